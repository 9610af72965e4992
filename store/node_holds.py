"""Extents that are not free for others yet, and those of which `released` is to be said. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple, Protocol, final

from moonpool.store.node_effects import ANY_SLOT
from moonpool.store.node_pins import PinBook, PinPlace

#: In a `Fencing.begin`: nobody but lanes needs to be looked at.
LANES_ONLY: Final = b""


class Fencing(Protocol):
    """What keeps writers off extents, and knows who may still write. Segments by the node's own number."""

    def deny(self, segment: int, start: int, tag: int, until_ms: int) -> None:
        """Refuse grants that show `tag` for an extent that starts there, until that time."""

    def begin(self, segment: int, offset: int, length: int, instance: bytes, until_ms: int) -> int:
        """Watch those who could write the range at this moment: a ticket, or 0 when there are none.

        They are lanes that carry a WRITE let in before, and living processes that were given the segment's
        memory for writing: under `instance`, under any (zeros), or none (`LANES_ONLY`). A process counts
        until it ended or settled after `until_ms`.
        """

    def over(self, ticket: int, now_ms: int) -> bool:
        """True when none of them can write any more; the ticket is then used up."""

    def drop(self, ticket: int) -> None:
        """The ticket is not needed any more."""


class Hold(NamedTuple):
    """An extent in use. `ticket` 0: only pins keep it."""

    ticket: int
    offset: int
    length: int


@final
class Holds:
    """Places by slot; `ANY_SLOT` stands for a whole segment. Not thread-safe."""

    def __init__(self, pins: PinBook, fencing: Fencing) -> None:
        self._pins = pins
        self._fencing = fencing
        self._holds: dict[PinPlace, Hold] = {}
        #: With a serial number: a place may be released again while an earlier release is being told.
        self._released: dict[PinPlace, int] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._holds)

    @property
    def releases(self) -> int:
        """How many places wait to be told of."""
        return len(self._released)

    def places(self) -> Iterator[PinPlace]:
        """Those held, and those to be told of; whole segments aside."""
        for place in (*self._holds, *self._released):
            if place.slot != ANY_SLOT:
                yield place

    def at(self, place: PinPlace) -> Hold | None:
        """What holds a place."""
        return self._holds.get(place)

    def of_segment(self, segment: int) -> Iterator[tuple[int, Hold]]:
        """(slot, hold) of a segment, whole-segment ones aside."""
        for place, hold in self._holds.items():
            if place.segment == segment and place.slot != ANY_SLOT:
                yield place.slot, hold

    def begin(self, place: PinPlace, ticket: int, offset: int, length: int) -> None:
        """Nobody new can use the extent: `released` when those are done who do."""
        if ticket or self._pins.count(place):
            self._holds[place] = Hold(ticket, offset, length)
        else:
            self._release(place)

    def _release(self, place: PinPlace) -> None:
        self._serial += 1
        self._released[place] = self._serial

    def forget(self, place: PinPlace) -> None:
        """What was to be said of a place is of the past."""
        self._released.pop(place, None)
        hold = self._holds.pop(place, None)
        if hold is not None and hold.ticket:
            self._fencing.drop(hold.ticket)

    def join_begins(self) -> None:
        """What is held goes into the report; what was free is told there too."""
        self._released.clear()
        for place in [place for place in self._holds if place.slot == ANY_SLOT]:
            self.forget(place)

    def look(self, now_ms: int) -> None:
        """Finds those that nobody uses any more."""
        for place, hold in list(self._holds.items()):
            free = not hold.ticket
            if hold.ticket and self._fencing.over(hold.ticket, now_ms):
                self._holds[place] = hold._replace(ticket=0)
                free = True
            if free and not self._pins.count(place):
                del self._holds[place]
                self._release(place)

    def to_say(self, count_max: int) -> list[tuple[PinPlace, int]]:
        """The places to tell of, oldest first, each with the serial number of its release."""
        return list(islice(self._released.items(), count_max))

    def said(self, places: list[tuple[PinPlace, int]]) -> None:
        """The master has heard of these."""
        for place, serial in places:
            if self._released.get(place) == serial:
                del self._released[place]
