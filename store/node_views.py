"""Views: clients of this host that read extents in place, asked for by segment, slot and object id. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import final

from moonpool.errors import UsageError
from moonpool.store.directory import DEAD
from moonpool.store.node_pins import PinBook, PinPlace
from moonpool.store.node_segment import CoreSegment


@final
class Views:
    """Opens and closes pins. `index` maps every id that a segment ever had to its number here."""

    def __init__(self, segments: Sequence[CoreSegment], index: Mapping[int, int], pins: PinBook) -> None:
        self._segments = segments
        self._index = index
        self._pins = pins
        self.opened = self.refused = self.dropped = 0

    def open(self, holder: int, wanted: object) -> bytes:
        """Pins `[[segment id, slot, object id], ...]`: one byte each, 1 when that object is there and pinned.

        UsageError for what is no such list, LimitExceeded when the holder or the node has too many.
        """
        places = list(self._asked(wanted))
        self._pins.check_room(holder, len(places))
        out = bytearray(len(places))
        for number, (place, object_id) in enumerate(places):
            if self._holds_object(place, object_id):
                self._pins.pin(holder, place)
                out[number] = 1
        self.opened += sum(out)
        self.refused += len(out) - sum(out)
        return bytes(out)

    def close(self, holder: int, given_up: object) -> int:
        """Drops pins, given as they were opened: how many there were."""
        return sum(self._pins.unpin(holder, place) for place, _ in list(self._asked(given_up)))

    def holder_gone(self, holder: int) -> int:
        """A client's connection or process ended: its pins go."""
        dropped = self._pins.drop(holder)
        self.dropped += dropped
        return dropped

    def _holds_object(self, place: PinPlace, object_id: int) -> bool:
        if place.segment < 0:
            return False
        directory = self._segments[place.segment].directory
        return place.slot < directory.header.slots and directory.word(place.slot) == object_id

    def _asked(self, items: object) -> Iterator[tuple[PinPlace, int]]:
        if not isinstance(items, list):
            raise UsageError("views are given as [[segment, slot, object id], ...]", field="views")
        for item in items:
            if not isinstance(item, list) or len(item) != 3 or any(type(n) is not int or n < 0 for n in item):
                raise UsageError("a view is [segment, slot, object id]", field="views")
            segment, slot, object_id = item
            if not 0 < object_id < DEAD:
                raise UsageError(f"{object_id} is no object id", field="views")
            yield PinPlace(self._index.get(segment, -1), slot), object_id
