"""The native core of a leader: what it is told after each turn, and what it did before the next.

Between two turns of the shell the rpc loop may serve hot methods on the leader's own tables. So each call
into the leader begins with `drain`, which takes over the facts and effects made there, and `take_outputs`
ends with `sync`.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, final

from moonpool.errors import InternalError
from moonpool.native.table.directory_slots import DirectorySlots
from moonpool.native.table.extents import Extents
from moonpool.native.table.hot import HotCore
from moonpool.native.table.hot_state import HotCounters
from moonpool.native.table.objects import ObjectTable
from moonpool.native.table.open_puts import OpenPuts
from moonpool.store.facts import Object, decode_fact
from moonpool.store.leader_core import LeaderCore
from moonpool.store.records import Place, object_id_of
from moonpool.store.segment_space import SegmentSpace
from moonpool.store.sessions import Join
from moonpool.store.table_factory import Tables


class _Joined(NamedTuple):
    grant_key: bytes | None
    clock_ms: int
    clock_at_ms: int


_AWAY: Final = _Joined(None, 0, 0)


class _Told(NamedTuple):
    """What the native core knows of a segment."""

    space: SegmentSpace
    data_handle: int
    rank: int | None
    resolved: bool
    floor: int
    slot_floor: int
    joined: _Joined


def is_native(tables: Tables) -> bool:
    """True for tables that a native core can work on."""
    return isinstance(tables.objects, ObjectTable) and isinstance(tables.open_puts, OpenPuts)


@final
class HotPath:
    """Keeps one leader and its native core in step; made before the leader's first decision.

    From then on the numbers that the leader gives are the native core's.
    """

    def __init__(self, core: LeaderCore) -> None:
        objects, puts = core.tables.objects, core.tables.open_puts
        if not isinstance(objects, ObjectTable) or not isinstance(puts, OpenPuts):
            raise InternalError("a native core needs native tables")
        given, config = core.counters, core.config
        numbers = HotCounters(given.epoch, given.last_fact, given.put_key)
        numbers.last_object, numbers.last_put = given.last_object, given.last_put
        numbers.place_cursor = given.place_cursor
        core.counters = numbers
        self._core = core
        self._told: dict[int, _Told] = {}
        self._version: tuple[Any, ...] = ()
        self._ranks: dict[int, int] = {}
        self._schedule: list[int] = []
        self._largest = 0
        #: For the rpc loop: it has `hot_binding()`.
        self.native = HotCore(
            objects,
            puts,
            numbers,
            batch_keys_max=config.batch_keys_max,
            lease_ms_max=config.lease_ms_max,
            put_ms=config.put_ms,
            put_bytes_per_ms=config.put_bytes_per_ms,
            facts_waiting_max=config.facts_waiting_max,
        )

    def drain(self) -> bool:
        """Takes over what hot methods did since the last turn: facts, effects, events. False for nothing."""
        if not self.native.has_changes:
            return False
        core = self._core
        made, first, effects, freed = self.native.take()
        core.space_came = core.space_came or freed
        if made:
            if first != core.state.sequence + 1 or core.counters.last_fact != core.state.sequence + len(made):
                raise InternalError("the native core numbered its facts otherwise than the state")
            core.out.facts += made
            core.state.sequence = core.counters.last_fact
            epoch = core.counters.epoch
            core.state.high[epoch] = object_id_of(epoch, core.counters.last_object)
        for node_id, sequence, effect in effects:
            join = core.joins.get(node_id)
            if join is not None:
                core.busy[join.number] = join
                join.effects.add(sequence, effect)
        if core.config.events:
            self._tell_stored(made)
        return True

    def _tell_stored(self, made: list[bytes]) -> None:
        by_tenant: dict[int, list[tuple[bytes, tuple[Place, ...]]]] = {}
        for data in made:
            fact = decode_fact(data)
            if isinstance(fact, Object):
                by_tenant.setdefault(fact.tenant, []).append((fact.key, fact.places))
        for tenant, stored in by_tenant.items():
            self._core.stored_events(tenant, stored)

    def sync(self, *, deposed: bool) -> None:
        """Tells the native core what has changed in this turn."""
        core, native = self._core, self.native
        may_change = not (deposed or core.journal_full) and len(core.holds) < core.config.holds_max
        native.set_turn(
            core.now_ms,
            core.durable,
            core.state.segments_version,
            may_change=may_change,
            may_end=not core.puts_wait,
        )
        # A few comparisons instead of all rows, in the turns in which nothing of them changed.
        version = (
            core.state.segments_version,
            [(each.segment_id, each.resolved, each.floor) for each in core.spaces.values()],
            [(each.number, each.clock_ms, each.clock_at_ms) for each in core.joins.values()],
        )
        if version != self._version or core.ranks is not self._ranks:
            self._sync_segments()
            self._version, self._ranks = version, core.ranks
        if core.schedule != self._schedule or core.largest_segment != self._largest:
            native.set_schedule(core.schedule, core.largest_segment)
            self._schedule, self._largest = list(core.schedule), core.largest_segment
        native.set_quotas(each.tenant_id for each in core.state.tenants.values() if each.quota_bytes)

    def _sync_segments(self) -> None:
        core, native = self._core, self.native
        for segment_id in self._told.keys() - core.spaces.keys():
            native.drop_segment(segment_id)
            del self._told[segment_id]
            self._schedule = []
        joined = {node_id: _joined(join) for node_id, join in core.joins.items()}
        for segment_id, space in core.spaces.items():
            told = _Told(
                space,
                core.state.segment(segment_id).data_handle,
                core.ranks.get(segment_id),
                space.resolved,
                space.floor,
                space.slot_floor,
                joined.get(space.node_id, _AWAY),
            )
            before = self._told.get(segment_id)
            if told == before:
                continue
            self._told[segment_id] = told
            if before is None or told[:3] != before[:3]:
                self._tell_segment(segment_id, told)
            native.set_floor(segment_id, resolved=told.resolved, floor=told.floor, slot_floor=told.slot_floor)
            native.set_join(segment_id, *told.joined)

    def _tell_segment(self, segment_id: int, told: _Told) -> None:
        extents, slots = told.space.extents, told.space.slots
        if not isinstance(extents, Extents) or not isinstance(slots, DirectorySlots):
            raise InternalError("a native core needs native tables")
        self.native.set_segment(
            segment_id,
            extents,
            slots,
            data_handle=told.data_handle,
            rank=told.rank,
            node_id=told.space.node_id,
        )


def _joined(join: Join) -> _Joined:
    return _Joined(join.grant_key, join.clock_ms, join.clock_at_ms)
