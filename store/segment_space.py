"""The space of one segment: what is free, and which part of it is not known yet.

Below `floor` lies what was opened before this leader (or before the node joined) and is not *resolved*: some
may be with writers and readers that nobody here knows. Nothing below it is given until `resolve`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import NamedTuple, final

from moonpool.errors import InternalError
from moonpool.store.quarantine import Quarantined
from moonpool.store.records import SegmentRecord, extent_bytes
from moonpool.store.tables import Extents, Slots


class Gauges(NamedTuple):
    """Bytes of extents of one segment; the five add up to its capacity."""

    free: int
    live: int
    writing: int
    quarantined: int
    leaving: int


@final
class SegmentSpace:
    """Extents and slots of a segment, its windows that wait for their facts, and its quarantine by slot."""

    __slots__ = (
        "_slot_floor",
        "added",
        "capacity",
        "evicted_ms",
        "extents",
        "floor",
        "host",
        "node_id",
        "quarantine",
        "quarantined_bytes",
        "reserved",
        "resolved",
        "segment_id",
        "slot_count",
        "slots",
        "unseen_ms",
        "windows",
    )

    def __init__(self, record: SegmentRecord, host: str, extents: Extents, slots: Slots) -> None:
        self.segment_id = record.segment_id
        self.node_id = record.node_id
        self.host = host
        self.capacity = record.capacity
        self.slot_count = record.slots
        self.extents = extents
        self.slots = slots
        #: Bytes from 0 whose windows are durable.
        self.added = record.opened
        self.floor = record.opened
        self._slot_floor = self._slots_below(record.opened)
        self.resolved = record.opened == 0
        #: (sequence of the fact, end of the window).
        self.windows: deque[tuple[int, int]] = deque()
        #: Bytes of extents given to puts that wait for more space.
        self.reserved = 0
        #: When a put had objects evicted here last.
        self.evicted_ms = 0
        #: Since when readers are not told of places here; 0 when they are.
        self.unseen_ms = 0
        self.quarantine: dict[int, Quarantined] = {}
        self.quarantined_bytes = 0

    @property
    def slot_floor(self) -> int:
        return self._slot_floor

    def _slots_below(self, opened: int) -> int:
        return self.slot_count * opened // self.capacity

    def allocate(self, size: int) -> tuple[int, int] | None:
        """Offset and slot of a new extent, or None."""
        offset = self.extents.allocate(size)
        if offset < 0:
            return None
        slot = self.slots.allocate()
        if slot < 0:
            self.extents.free(offset, size)
            return None
        return offset, slot

    def fits(self, size: int) -> bool:
        """True when `allocate` would give an extent now."""
        place = self.allocate(size)
        if place is not None:
            self.free(place[0], size, place[1])
        return place is not None

    def free(self, offset: int, size: int, slot: int) -> None:
        """Gives an extent back; below an unresolved floor it becomes free with the rest."""
        if self.resolved or offset >= self.floor:
            self.extents.free(offset, size)
        if self.resolved or slot >= self._slot_floor:
            self.slots.free(slot)

    def window_decided(self, sequence: int, end: int) -> None:
        """A window up to `end` is in the facts; it opens when fact `sequence` is durable."""
        self.windows.append((sequence, end))

    def open_windows(self, durable: int) -> bool:
        """Opens the windows whose facts are durable; True when there were any."""
        opened = False
        while self.windows and self.windows[0][0] <= durable:
            _, end = self.windows.popleft()
            self.extents.add_range(self.added, end - self.added)
            first, last = self._slots_below(self.added), self._slots_below(end)
            if last > first:
                self.slots.add_range(first, last - first)
            self.added = end
            opened = True
        return opened

    def raise_floor(self, end: int) -> None:
        """Windows up to `end` opened for what a report found: not given until resolved."""
        if self.resolved or self.windows or end < self.floor or self.added != self.floor:
            raise InternalError(f"segment {self.segment_id} cannot take windows in any more")
        self.added = self.floor = end
        self._slot_floor = self._slots_below(end)

    def unresolve(self) -> None:
        """For a segment that opened nothing yet: what its report finds is not known either."""
        if self.added or self.windows:
            raise InternalError(f"segment {self.segment_id} has opened windows already")
        self.resolved = False

    def resolve(self, packed: bytes) -> None:
        """What lies below the floor is free, but for the segment's `packed` places and what is quarantined.

        Raises `InternalError` when those overlap; the segment is then not usable any more.
        """
        if self.resolved:
            raise InternalError(f"segment {self.segment_id} is resolved already")
        offsets = memoryview(packed).cast("Q")[::3]
        below = packed[: 24 * bisect_left(offsets, self.floor)]
        if self.floor:
            self.extents.add_range(0, self.floor)
        if self._slot_floor:
            self.slots.add_range(0, self._slot_floor)
        self.extents.take_all(below)
        self.slots.take_all(below)
        for entry in self.quarantine.values():
            if entry.offset < self.floor:
                self.extents.take(entry.offset, entry.size)
                self.slots.take(entry.slot)
        self.resolved = True

    def gauges(self, live: int, writing: int, leaving: bool) -> Gauges:
        """The five gauges, from the bytes of complete and of open extents on the segment."""
        if leaving:
            return Gauges(0, 0, 0, 0, self.capacity)
        writing += self.reserved
        free = self.capacity - self.added + self.extents.free_bytes()
        quarantined = self.quarantined_bytes if self.resolved else self.capacity - free - live - writing
        return Gauges(free, live, writing, quarantined, 0)

    def check(self, live: int, writing: int) -> None:
        """Asserts that the gauges add up; `InternalError` with all of them when they do not."""
        self.extents.check()
        gauges = self.gauges(live, writing, leaving=False)
        counted = sum(extent_bytes(entry.size) for entry in self.quarantine.values())
        if sum(gauges) != self.capacity or min(gauges) < 0 or counted != self.quarantined_bytes:
            raise InternalError(
                f"segment {self.segment_id} of {self.capacity} bytes: {gauges}, {counted} quarantined"
            )
