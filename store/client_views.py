"""Views, from the key to the pinned bytes: look-up, pin, and the check at the first view of an object."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, final

from moonpool.errors import MoonpoolError, PeerError
from moonpool.store.errors import DataLost, NotOnThisHost

if TYPE_CHECKING:
    from moonpool.store.location_cache import Location
    from moonpool.store.reading import Reader
    from moonpool.store.segments_view import Target
    from moonpool.store.view import View, ViewDesk

#: How long a node may take to hear of a new object before a view of it is given up.
_WAIT_S: Final = 2.0
_PAUSE_FIRST_S: Final = 0.001
_PAUSE_MAX_S: Final = 0.05

Place = tuple[int, int, int]


@final
class Viewer:
    """Finds a copy on this host and pins it."""

    def __init__(self, reader: Reader, desk: ViewDesk) -> None:
        self._reader = reader
        self._context = reader.context
        self._desk = desk

    async def view(self, key: bytes) -> View | None:
        """A verified view, or None for a miss. NotOnThisHost, DataLost, or what reaching the node raises."""
        give_up = time.monotonic() + _WAIT_S
        pause_s = _PAUSE_FIRST_S
        problem: MoonpoolError | None = None
        while True:
            asked = await self._reader.locate([key], self._reader.lease_ms(0))
            location = asked.locations[0]
            if location is None:
                return None
            near = await self._near(location)
            if not near:
                raise NotOnThisHost(value=repr(key[:64]))
            for target, place in near:
                try:
                    view = await self._open(key, location, (target, place))
                except PeerError as failure:
                    problem = failure
                    self._context.segments.drop(place[0])
                    continue
                if view is not None:
                    return view
            if time.monotonic() >= give_up:
                raise DataLost(reason="no node of this host gave a view of it") from problem
            # The node hears of a new object a moment after its put has ended.
            await self._context.io.pause(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    async def _near(self, location: Location) -> list[tuple[Target, Place]]:
        near = []
        for place in location.places:
            try:
                target = await self._reader.open(place[0])
            except PeerError:
                continue
            if target is not None and target.is_near:
                near.append((target.nearness, place, target))
        return [(target, place) for _, place, target in sorted(near, key=lambda one: one[:2])]

    async def _open(self, key: bytes, location: Location, where: tuple[Target, Place]) -> View | None:
        target, place = where
        blocking = self._context.io.blocking
        view = await blocking(self._desk.open, target, location, place)
        if view is None:
            return None
        if await blocking(self._desk.is_verified, view, target, location.digest):
            return view
        view.close()
        await self._context.link.ask("damaged", key, location.object_id, place[0], place[2])
        return None
