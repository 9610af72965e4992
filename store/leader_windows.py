"""Windows opened ahead of need, and eviction in the background and in line: room for puts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from moonpool.store import facts
from moonpool.store.leader_core import LeaderCore
from moonpool.store.leader_endings import end_objects, join_ending
from moonpool.store.records import NodeState, Reason, StoredObject, extent_bytes
from moonpool.store.segment_space import SegmentSpace

_PAGE: Final = 4_096


@final
class Room:
    """Makes room on segments: opens windows, evicts objects."""

    def __init__(self, core: LeaderCore) -> None:
        self._core = core

    def open_window(self, space: SegmentSpace, wanted: int) -> bool:
        """Decides a window with at least `wanted` bytes if the segment has them; False when all is open."""
        record = self._core.state.segment(space.segment_id)
        length = max(self._core.config.window_bytes, -(-wanted // _PAGE) * _PAGE)
        length = min(length, record.capacity - record.opened)
        if length <= 0:
            return False
        sequence = self._core.commit(facts.Window(space.segment_id, record.opened, length))
        space.window_decided(sequence, record.opened + length)
        return True

    def open_ahead(self) -> None:
        """Opens the next window of each segment whose open space or slots run low."""
        for space in self._core.spaces.values():
            if space.windows or space.added >= space.capacity or not self._core.takes_puts(space):
                continue
            low_slots = space.slots.free_count() * 8 < space.slot_count * space.added // space.capacity
            if space.extents.free_bytes() < self._core.config.window_bytes // 2 or low_slots:
                self.open_window(space, 0)

    def make(self, segments: Sequence[int], size: int) -> None:
        """Starts to make room for an extent somewhere on these segments, if any can be made.

        Opens a window where one is left; evicts where not enough is on its way out of quarantine. A segment
        that has room keeps what it holds: the put lacks another one.
        """
        wanted = extent_bytes(size)
        spaces = [self._core.spaces[each] for each in segments]
        if any(space.windows for space in spaces):
            return
        if any(space.added < space.capacity and self.open_window(space, wanted) for space in spaces):
            return
        for space in spaces:
            if wanted > space.capacity or not space.resolved or space.fits(size):
                continue
            # What is on its way out of quarantine gets the time of a beat; a writer that is stopped, or a
            # reader that pins, may keep some of it for much longer.
            waits = self._core.now_ms < space.evicted_ms + self._core.config.beat_ms
            if waits and space.quarantined_bytes >= 2 * wanted:
                return
            if self.evict(space.segment_id, wanted) > 0:
                space.evicted_ms = self._core.now_ms
                return

    def evict_background(self) -> None:
        """Evicts from every segment that is in use above `evict_high`, down to `evict_low`."""
        core, config = self._core, self._core.config
        for space in core.spaces.values():
            if core.state.segment(space.segment_id).state != NodeState.ACTIVE:
                continue
            gauges = space.gauges(
                core.objects.bytes_on(space.segment_id), core.puts.writing_bytes(space.segment_id), False
            )
            used = gauges.live + gauges.writing
            if used + gauges.quarantined > config.evict_high * space.capacity:
                over = used - int(config.evict_low * space.capacity)
                if over > 0:
                    self.evict(space.segment_id, over)
            elif space.added >= space.capacity and space.slots.free_count() * 50 < space.slot_count:
                self.evict(space.segment_id, space.capacity // 100)

    def evict(self, segment_id: int, wanted: int) -> int:
        """Evicts objects from a segment until their extents cover `wanted` bytes; the bytes that it found."""
        core = self._core
        if core.now_ms < core.free_after_ms or core.journal_behind:
            return 0
        count_max = core.config.evict_batch
        found = core.objects.victims(segment_id, wanted, core.now_ms, count_max=count_max, soft=False)
        freed = self._evict_all(segment_id, found)
        if freed < wanted and len(found) < count_max:
            left = count_max - len(found)
            found = core.objects.victims(segment_id, wanted - freed, core.now_ms, count_max=left, soft=True)
            freed += self._evict_all(segment_id, found)
        return freed

    def _evict_all(self, segment_id: int, indices: Sequence[int]) -> int:
        """Evicts these objects: each loses its place on the segment, and ends if it has no other.

        Where a member of a group ends, all of them do, wherever they are.
        """
        core = self._core
        ending: dict[int, list[StoredObject]] = {}
        freed = 0
        victims = [core.objects.at(index) for index in indices]
        broken = {(each.tenant, each.group) for each in victims if each.group and len(each.places) == 1}
        for stored in victims:
            here = [place for place in stored.places if place.segment == segment_id]
            freed += extent_bytes(stored.size) * len(here)
            if len(stored.places) == 1 or (stored.tenant, stored.group) in broken:
                ending.setdefault(stored.tenant, []).append(stored)
                continue
            for place in here:
                core.commit(
                    facts.PlaceGone(stored.object_id, stored.tenant, stored.key, segment_id, Reason.EVICTED)
                )
                needs = core.retire(stored, place, Reason.EVICTED, 0)
                join_ending(core, needs, stored.tenant, [stored.key])
                core.hold(None, needs, ((stored.tenant, stored.key),))
                core.removed_events(stored.tenant, [(stored.key, (place,))])
        for gone in ending.values():
            needs = end_objects(core, gone, [0] * len(gone), Reason.EVICTED)
            core.hold(None, needs, tuple((each.tenant, each.key) for each in gone))
        return freed
