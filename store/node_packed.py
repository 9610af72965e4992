"""Pushes of the master's applied from their bytes: plain effects natively, others by the node's core. Pure.

The outcome is that of `NodeCore.effects`, which is the oracle. A slot with which somebody is concerned (held,
pinned, waiting to be shown or told of) is marked, and its effects go the long way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from moonpool.errors import ProtocolError
from moonpool.native.io.effects import SegmentEffects, apply_plain, open_effects, skip_values
from moonpool.store.node_effects import ANY_SLOT, Reset, read_effect
from moonpool.store.node_holds import LANES_ONLY
from moonpool.store.node_pins import PinPlace
from moonpool.wire.rpc import unpack_value

if TYPE_CHECKING:
    from moonpool.store.node_core import NodeCore

#: With more slots than these to be marked for each push, effects go the long way.
_MARKS_MAX: Final = 4_096


@final
class PackedEffects:
    """Takes pushes for a core. Not thread-safe."""

    def __init__(self, core: NodeCore) -> None:
        self._core = core
        self._marked: set[PinPlace] = set()

    def take(self, packed: bytes, now_ms: int) -> None:
        """The params of a push, `[epoch, first number, [effect, ...]]`; raises as `NodeCore.effects`."""
        core = self._core
        epoch, first, count, at = open_effects(packed)
        core.see(epoch)
        if first < 1:
            raise ProtocolError("effects are numbered from 1")
        if not core.takes_effects:
            return
        if first > core.applied + 1:
            core.counters["effects_ahead"] += 1
            return
        known = min(count, core.applied + 1 - first)
        core.counters["effects_repeated"] += known
        busy = core.busy_places()
        if len(busy) > _MARKS_MAX:
            core.effects(epoch, first + known, unpack_value(packed)[2][known:], now_ms)
            return
        at = skip_values(packed, at, known)
        try:
            self._mark(busy)
            self._run(packed, at, count - known, now_ms)
        finally:
            for place in self._marked:
                core.segments[place.segment].directory.plain.mark(place.slot, False)
            self._marked.clear()

    def _mark(self, places: set[PinPlace]) -> None:
        self._marked |= places
        for place in places:
            self._core.segments[place.segment].directory.plain.mark(place.slot, True)

    def _run(self, packed: bytes, at: int, left: int, now_ms: int) -> None:
        core = self._core
        by_id = {one.id: one.directory.plain for one in core.segments}
        while left:
            done, at = self._plain(packed, at, left, by_id, now_ms)
            core.note_applied(done)
            left -= done
            if not left:
                return
            end = skip_values(packed, at, 1)
            effect = read_effect(unpack_value(packed[at:end]))
            core.apply(effect, now_ms)
            core.note_applied(1)
            if isinstance(effect, Reset):
                return
            slot = getattr(effect, "slot", ANY_SLOT)
            if slot != ANY_SLOT:
                # Whatever came of it, later effects on the slot must see it.
                self._mark({PinPlace(core.index_of(effect.segment), slot)})
            at = end
            left -= 1

    def _plain(
        self, packed: bytes, at: int, left: int, by_id: dict[int, SegmentEffects], now_ms: int
    ) -> tuple[int, int]:
        """Does the plain effects up to the first that is not: how many, and where that begins."""
        core = self._core
        for number, segment in enumerate(core.segments):
            segment.directory.plain.set_number(number)
            segment.directory.refill()
        retired: list[tuple[int, int, int, int, int, int]] = []
        freed: list[tuple[int, int, int]] = []
        done, at = apply_plain(packed, at, left, by_id, now_ms, retired, freed)
        for number, place, size in freed:
            core.segments[number].directory.free_log(place, size)
        if retired:
            self._release(retired, now_ms)
        return done, at

    def _release(self, retired: list[tuple[int, int, int, int, int, int]], now_ms: int) -> None:
        """Says of retired extents that they are released, or holds those that lanes still write into."""
        core, fencing = self._core, self._core.fencing
        # First all denials, then the looks at who was let in before.
        for number, _, offset, size, tag, added_ms in retired:
            if tag:
                core.deny(number, offset, size, (tag, added_ms), now_ms)
        loud = set()
        for number in {one[0] for one in retired}:
            capacity = core.segments[number].directory.header.capacity
            ticket = fencing.begin(number, 0, capacity, LANES_ONLY, now_ms)
            if ticket:
                fencing.drop(ticket)
                loud.add(number)
        for number, slot, offset, size, _, _ in retired:
            ticket = fencing.begin(number, offset, size, LANES_ONLY, now_ms) if number in loud else 0
            place = PinPlace(number, slot)
            core.holds.begin(place, ticket, offset, size)
            self._marked.add(place)  # as the native side has done
