"""Pins: which client connection reads which extent in place. Counted, bounded, gone with it. Pure."""

from __future__ import annotations

from typing import NamedTuple, final

from moonpool.errors import LimitExceeded


class PinPlace(NamedTuple):
    """An extent: the node's own number of the segment, and the slot."""

    segment: int
    slot: int


@final
class PinBook:
    """Holders are connections of the view endpoint, by number. Not thread-safe."""

    def __init__(self, pins_max: int, pins_per_holder_max: int) -> None:
        self._pins_max = pins_max
        self._per_holder_max = pins_per_holder_max
        self._holders: dict[int, dict[PinPlace, int]] = {}
        self._held: dict[int, int] = {}
        self._counts: dict[PinPlace, int] = {}
        #: Pins held now, those of one holder on one place counted one by one.
        self.total = 0

    def check_room(self, holder: int, count: int) -> None:
        """LimitExceeded unless the holder may take so many more pins."""
        if self.total + count > self._pins_max:
            raise LimitExceeded(
                f"{self.total} views are open on this node: close some, or raise pins_max",
                field="pins_max",
                limit=self._pins_max,
            )
        if self._held.get(holder, 0) + count > self._per_holder_max:
            raise LimitExceeded(
                f"this client has {self._held.get(holder, 0)} views open: close some, "
                "or raise pins_per_client_max",
                field="pins_per_client_max",
                limit=self._per_holder_max,
            )

    def pin(self, holder: int, place: PinPlace) -> None:
        """One more; the caller has checked the room."""
        mine = self._holders.setdefault(holder, {})
        mine[place] = mine.get(place, 0) + 1
        self._held[holder] = self._held.get(holder, 0) + 1
        self._counts[place] = self._counts.get(place, 0) + 1
        self.total += 1

    def unpin(self, holder: int, place: PinPlace) -> bool:
        """One less; False when that holder has none there."""
        mine = self._holders.get(holder, {})
        if place not in mine:
            return False
        mine[place] -= 1
        if not mine[place]:
            del mine[place]
        self._forget(holder, place, 1)
        return True

    def drop(self, holder: int) -> int:
        """The holder is gone: how many pins went with it."""
        mine = self._holders.pop(holder, {})
        for place, count in mine.items():
            self._forget(holder, place, count)
        return sum(mine.values())

    def count(self, place: PinPlace) -> int:
        """How many pins are on a place."""
        return self._counts.get(place, 0)

    def places(self) -> list[PinPlace]:
        """Those with a pin."""
        return list(self._counts)

    @property
    def holders(self) -> int:
        """Connections that hold a pin."""
        return len(self._held)

    def _forget(self, holder: int, place: PinPlace, count: int) -> None:
        self.total -= count
        self._counts[place] -= count
        if not self._counts[place]:
            del self._counts[place]
        self._held[holder] -= count
        if not self._held[holder]:
            del self._held[holder]
            self._holders.pop(holder, None)
