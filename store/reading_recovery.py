"""A read that did not go through: every copy is tried, with fresh look-ups between, before it is given up.

What may be wrong: the object was replaced or evicted while we read (a fresh look-up tells), our lease ran out
under a slow read (a longer one helps), a node does not answer (another copy), or a copy is damaged (another
copy, and the master is told; it lets the node hash the copy and believes the node).
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, final

from moonpool.errors import MoonpoolError, PeerError
from moonpool.native.io.object_batch import MISMATCH, clear_memory
from moonpool.store.client_config import Verify
from moonpool.store.client_results import GetResult, GetStatus
from moonpool.store.errors import DataLost
from moonpool.store.reading import MISS, Group, Item, Reader

if TYPE_CHECKING:
    from moonpool.store.client_context import Span
    from moonpool.store.location_cache import Location

#: Look-ups before a read is given up: one, one after a mismatch, and one in case the object changed then.
_LOOKUPS_MAX: Final = 3

Places = set[tuple[int, tuple[int, int, int]]]


@final
class Recovery:
    """Reads one key thoroughly. Made once for a pool; holds no state between reads."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._context = reader.context

    async def run(self, key: bytes, memory: Callable[[int], Span], verify: Verify) -> GetResult:
        """HIT, MISS, or FAILED with the error; then the destination is cleared."""
        wrong: Places = set()
        size = 0
        span: Span | None = None
        location: Location | None = None
        for _ in range(_LOOKUPS_MAX):
            asked = await self._reader.locate([key], self._reader.lease_ms(2 * size or 1 << 20))
            location = asked.locations[0]
            if location is None:
                _clear(span)
                return MISS
            size = location.size
            try:
                span = memory(size)
            except MoonpoolError as problem:
                return GetResult(GetStatus.FAILED, 0, location.object_id, problem)
            if await self._try_places(location, span, (verify, asked.safe_until_ns), wrong):
                return GetResult(GetStatus.HIT, size, location.object_id)
        _clear(span)
        damaged = [place for object_id, place in wrong if location and object_id == location.object_id]
        if location is not None:
            for place in damaged:
                await self._report(key, location, place)
        error = DataLost(
            reason="the bytes do not match their digest" if damaged else "no node that holds it answered",
            length_bytes=size,
            value=repr(key[:64]),
        )
        return GetResult(GetStatus.FAILED, 0, location.object_id if location else 0, error)

    async def _try_places(
        self, location: Location, span: Span, how: tuple[Verify, int], wrong: Places
    ) -> bool:
        """True when one copy gave the right bytes; notes those that gave others."""
        for place in await self._nearest_first(location):
            mark = await self._try_place(location, place, span, how)
            if mark == 0:
                return True
            if mark == MISMATCH:
                wrong.add((location.object_id, place))
            else:
                self._context.segments.drop(place[0])
        return False

    async def _nearest_first(self, location: Location) -> list[tuple[int, int, int]]:
        ranked = []
        for number, place in enumerate(location.places):
            try:
                target = await self._reader.open(place[0])
            except PeerError:
                continue
            if target is not None:
                ranked.append((target.nearness, number, place))
        return [place for _, _, place in sorted(ranked)]

    async def _try_place(
        self, location: Location, place: tuple[int, int, int], span: Span, how: tuple[Verify, int]
    ) -> int:
        verify, safe_until_ns = how
        # The state word cannot be asked here: right after a put the node may not have stamped it yet.
        hashing = verify is not Verify.OFF
        try:
            target = await self._reader.open(place[0])
        except PeerError:
            return 1
        if target is None:
            return 1
        group = Group(target)
        group.items.append(Item(0, location, place, span))
        patience_ns = self._reader.patience_ns(location.size)
        await self._context.io.carry([group.plan(False, hashing, patience_ns)])
        in_time = time.monotonic_ns() < safe_until_ns
        return group.verdicts(hashing, False, in_time or not target.is_near)[0]

    async def _report(self, key: bytes, location: Location, place: tuple[int, int, int]) -> None:
        try:
            await self._context.link.ask("damaged", key, location.object_id, place[0], place[2])
        except MoonpoolError:  # the read's own error says more; the next reader reports it again
            return


def _clear(span: Span | None) -> None:
    """A failed read leaves nothing of what it saw."""
    if span is not None:
        clear_memory(array("Q", span.addresses), array("Q", span.lengths))
