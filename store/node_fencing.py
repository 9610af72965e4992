"""Keeping writers off extents, over an engine: grants denied, lanes watched, processes of this host asked.

A lane that was let in before and still carries its WRITE when its grant is over for longer than a settling
may take is shut down: an initiator that sends a byte now and then must not hold an extent for ever.

Asking blocks, so a thread does it, in rounds, each for all tickets whose time had come before it began.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from moonpool.engine.gate import Gate
from moonpool.errors import StaleHandle
from moonpool.ids import InstanceId
from moonpool.store.node_holds import LANES_ONLY
from moonpool.units import MS_PER_S, NS_PER_MS

_ANYBODY: Final = bytes(16)


@final
@dataclass(slots=True, eq=False)
class _Ticket:
    """Those who could write a range when it was fenced, and have not been seen to have ended."""

    region: int
    offset: int
    length: int
    lanes: set[tuple[int, int]]
    writers: set[int]
    #: From when on writers may be asked.
    until_ms: int
    #: Before this time grants that could not be denied are good.
    not_before_ms: int
    #: From when on lanes are shut down; 0 before they were looked at again.
    kick_ms: int = 0
    asking: bool = False


@final
class EngineFencing:
    """A `Fencing` over regions, in the order of the core's segments.

    The core's lock guards its methods; `close` ends its thread.
    """

    def __init__(self, gate: Gate, regions: Sequence[int], settle_timeout_ms: int) -> None:
        self._gate = gate
        self._regions = regions
        self._settle_timeout_ms = settle_timeout_ms
        self._settle_timeout_s = settle_timeout_ms / MS_PER_S
        self._tickets: dict[int, _Ticket] = {}
        self._given = 0
        #: Grants that could not be denied for want of room, by region and start: until when they last.
        self._undenied: dict[tuple[int, int], int] = {}
        self._wanted = threading.Condition()
        self._queue: list[_Ticket] = []
        self._closing = False
        #: How often somebody was asked, and how many lanes were shut down.
        self.rounds = 0
        self.lanes_kicked = 0
        self._thread = threading.Thread(target=self._run, name="moonpool-settle", daemon=True)
        self._thread.start()

    def join_begins(self) -> None:
        """A new grant key: no grant of before is good any more."""
        self._undenied.clear()

    def deny(self, segment: int, start: int, tag: int, until_ms: int) -> None:
        """Refuse grants that show `tag` for an extent that starts there, until that time."""
        region = self._regions[segment]
        if not self._gate.deny(region, start, tag, until_ms * NS_PER_MS):
            self._undenied[region, start] = max(until_ms, self._undenied.get((region, start), 0))

    def begin(self, segment: int, offset: int, length: int, instance: bytes, until_ms: int) -> int:
        """See `Fencing.begin`."""
        region = self._regions[segment]
        lanes = self._gate.writes_into(region, offset, length)
        writers: set[int] = set()
        if instance != LANES_ONLY:
            who = None if instance == _ANYBODY else InstanceId(instance)
            writers = self._gate.writers(region, who)
        undenied = self._undenied.pop((region, offset), 0)
        if not lanes and not writers and not undenied:
            return 0
        self._given += 1
        self._tickets[self._given] = _Ticket(region, offset, length, lanes, writers, until_ms, undenied)
        return self._given

    def over(self, ticket: int, now_ms: int) -> bool:
        """See `Fencing.over`."""
        one = self._tickets[ticket]
        if one.lanes:
            one.lanes &= self._gate.writes_into(one.region, one.offset, one.length)
            one.kick_ms = (
                one.kick_ms or max(now_ms, one.until_ms, one.not_before_ms) + self._settle_timeout_ms
            )
            if one.lanes and now_ms >= one.kick_ms:
                self.lanes_kicked += self._gate.kick(one.lanes)
        # Under the condition's lock: the thread takes away those that settled.
        with self._wanted:
            if one.writers:
                one.writers &= self._gate.writers(one.region, None)
            if one.writers and now_ms >= one.until_ms and not one.asking:
                one.asking = True
                self._queue.append(one)
                self._wanted.notify()
            if one.lanes or one.writers or now_ms < one.not_before_ms:
                return False
        del self._tickets[ticket]
        return True

    def drop(self, ticket: int) -> None:
        """See `Fencing.drop`."""
        del self._tickets[ticket]

    def close(self, timeout_s: float) -> None:
        """Ends the thread."""
        with self._wanted:
            self._closing = True
            self._wanted.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._wanted:
                while not self._queue and not self._closing:
                    self._wanted.wait()
                if self._closing:
                    return
                tickets, self._queue = self._queue, []
            for region in {ticket.region for ticket in tickets}:
                self._ask(region, [ticket for ticket in tickets if ticket.region == region])
            self.rounds += 1

    def _ask(self, region: int, tickets: Sequence[_Ticket]) -> None:
        with self._wanted:
            sessions = set().union(*(ticket.writers for ticket in tickets))
        try:
            done = self._gate.settle(region, sessions, self._settle_timeout_s)
        except StaleHandle:
            done = set()
        with self._wanted:
            for ticket in tickets:
                ticket.writers -= done
                ticket.asking = False
