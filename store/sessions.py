"""Who is at the other end of each connection: clients, and joins of nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, final

from moonpool.store.effects import EffectQueue

#: What a report says of a slot: what the table has is there, something else is, or nothing that counts.
CONFIRMED: Final = 1
TAKEN: Final = 2
TOLD: Final = 3
#: Slots whose marks lie together: few, for a report need not tell of neighbours.
_MARKS: Final = 512


@final
class SlotMarks:
    """A mark for each slot, 0 at first. It takes memory for slots that are told, not for all there are."""

    __slots__ = ("_counts", "_pages")

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}
        self._counts = [0] * (TOLD + 1)

    def tell(self, slot: int) -> bool:
        """Marks a slot that had no mark as `TOLD`; False when it had one."""
        if self[slot]:
            return False
        self[slot] = TOLD
        return True

    def __getitem__(self, slot: int) -> int:
        page = self._pages.get(slot // _MARKS)
        return page[slot % _MARKS] if page is not None else 0

    def __setitem__(self, slot: int, mark: int) -> None:
        page = self._pages.get(slot // _MARKS)
        if page is None:
            page = self._pages[slot // _MARKS] = bytearray(_MARKS)
        self._counts[page[slot % _MARKS]] -= 1
        self._counts[mark] += 1
        page[slot % _MARKS] = mark

    def count(self, mark: int) -> int:
        """How many slots have a mark other than 0."""
        return self._counts[mark]


@final
@dataclass(slots=True, eq=False)
class Client:
    """One client process, over all of its connections. `instance` (16 bytes) is that of its engine."""

    client_id: int
    tenant_id: int
    instance: bytes
    name: str
    host: str
    connections: set[int] = field(default_factory=set)
    #: When it ends, since it has no connection; 0 while it has one.
    ends_ms: int = 0


@final
@dataclass(slots=True, eq=False)
class Join:
    """A node from its join to the end of its connection: effects are numbered within it."""

    number: int
    node_id: int
    connection: int
    grant_key: bytes
    effects: EffectQueue
    last_ack_ms: int
    #: The node's clock as it said last, and when that arrived.
    clock_ms: int = 0
    clock_at_ms: int = 0
    #: Segments whose reports are not complete: the next page expected.
    reporting: dict[int, int] = field(default_factory=dict)
    #: For each slot of a reporting segment: what the report said of it so far.
    confirmed: dict[int, SlotMarks] = field(default_factory=dict)
    #: For each reporting segment: the object ids that were adopted, by slot.
    adopted: dict[int, dict[int, int]] = field(default_factory=dict)

    #: The same for ids that the journal forgot and the node has stamped dead since.
    passed_on: dict[int, dict[int, int]] = field(default_factory=dict)

    def slot_is_anothers(self, segment_id: int, slot: int, object_id: int) -> bool:
        """True when the running report found something else in the slot that the table has for the object."""
        said = self.confirmed.get(segment_id)
        if self.passed_on.get(segment_id, {}).get(slot, 0) > object_id:
            return True
        if said is None or said[slot] != TAKEN:
            return False
        return self.adopted[segment_id].get(slot) != object_id

    def node_clock(self, now_ms: int) -> int:
        """The node's clock now, never ahead of the true one (not cut to 32 bits)."""
        return self.clock_ms + max(0, now_ms - self.clock_at_ms)


@final
@dataclass(slots=True, eq=False)
class Session:
    """One connection: unbound, or of a client, or of a node's join."""

    connection: int
    client: Client | None = None
    join: Join | None = None
