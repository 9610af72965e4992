"""The journal of a pool inside one process: it keeps nothing, and whoever starts it leads at once.

Facts are durable the moment they are appended, as far as anything in this pool outlives the process: nothing
does. The interface and the order of events are those of the journal in Redis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, final

from moonpool.store.journal import Elected, EpochRaised, Identity, Notice
from moonpool.store.state import State
from moonpool.store.tables import ObjectTable

_NEVER_ENDS_NS: Final = 1 << 62


@final
class MemoryJournal:
    """See `moonpool.store.journal.Journal`. All calls come from one thread but `counters`."""

    def __init__(
        self, identity: Identity, make_objects: Callable[[], ObjectTable], wake: Callable[[], None]
    ) -> None:
        self.durable = 0
        self.trouble = ""
        self.leader_endpoints = identity.endpoints
        self.role = "standby"
        self._make_objects = make_objects
        self._wake = wake
        self._epoch = 0
        self._notices: list[Notice] = []
        self._bytes = 0

    def start(self) -> None:
        """Leads at once, from nothing."""
        self._epoch = 1
        self.role = "leader"
        self._notices.append(Elected(State(self._make_objects()), self._epoch, 1))
        self._wake()

    def take(self) -> list[Notice]:
        """What happened since the last call."""
        taken, self._notices = self._notices, []
        return taken

    def append(self, first_sequence: int, facts: Sequence[bytes], now_ms: int, *, urgent: bool) -> None:
        """Counts the facts; they are durable from now on."""
        self._bytes += sum(map(len, facts))
        self.durable = first_sequence + len(facts) - 1

    def service(self) -> None:
        """There is nobody to hear."""

    def room(self) -> bool:
        """Always: nothing is kept."""
        return True

    def may_answer(self, now_ns: int) -> bool:
        """While it runs: nobody else can lead this pool."""
        return self.role == "leader"

    @property
    def lease_until_ns(self) -> int:
        """Never ends while it leads."""
        return _NEVER_ENDS_NS if self.role == "leader" else 0

    def resign(self, reason: str) -> bool:
        """There is nothing to read afresh: the term goes on."""
        return False

    def raise_epoch(self, at_least: int) -> None:
        """Raises it at once."""
        self._epoch = max(self._epoch, at_least) + 1
        self._notices.append(EpochRaised(self._epoch))
        self._wake()

    def write_snapshot(self, state: State) -> None:
        """There is nowhere to write it."""

    def counters(self) -> dict[str, int]:
        """For metrics."""
        return {
            "journal_appended_bytes": self._bytes,
            "journal_durable_sequence": self.durable,
            "journal_leading": int(self.role == "leader"),
        }

    def close(self, *, release: bool) -> None:
        """Ends it; idempotent."""
        self.role = "closed"
