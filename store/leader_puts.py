"""Puts: extents for writers, objects when they are written, and what becomes of puts that do not end.

An open put's entries stand at the places of its request's keys; those that got no extent are closed from the
start. The first `put_end` of a key wins: whoever comes later gets *exists*, and its extents back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

from moonpool.errors import LimitExceeded
from moonpool.native.io.grants import make_grant
from moonpool.store.call import HELD, Call
from moonpool.store.errors import BadParams, Overloaded
from moonpool.store.leader_core import LeaderCore
from moonpool.store.leader_windows import Room
from moonpool.store.params import PLAIN_POLICY, Policy, array, keys, number, policy
from moonpool.store.placement import allocate_copies, allocate_one, preferred_first
from moonpool.store.records import (
    OBJECT_BYTES_MAX,
    EntryCode,
    OpenPut,
    Pin,
    Place,
    PutEntry,
    extent_bytes,
)

_OPEN: Final = 0
_DROPPED: Final = 2
_U32: Final = 0xFFFFFFFF
_NONE: Final[tuple[Place, ...]] = ()


@final
@dataclass(slots=True, eq=False)
class Starting:
    """A `put_start` on its way: what each key got so far. Codes are those of the reply."""

    call: Call
    keys: list[bytes]
    sizes: Sequence[int]
    policy: Policy
    segments: Sequence[int]
    until_ms: int
    #: False: it waits only for windows that are decided and not durable yet.
    patient: bool
    codes: list[int] = field(default_factory=list)
    places: list[tuple[Place, ...]] = field(default_factory=list)


@final
class Puts:
    """The put methods of a leader, and their timers."""

    def __init__(self, core: LeaderCore, room: Room) -> None:
        self._core = core
        self._room = room
        #: Waiting for space, oldest first.
        self.waiting: dict[Starting, None] = {}
        core.put_waiters.append(self.look_again)

    # put_start

    def put_start(self, call: Call) -> Any:
        """Extents for new objects; waits for space up to `wait_ms`."""
        core, config = self._core, self._core.config
        key_list = keys(call.params[0], config.batch_keys_max)
        sizes = array(call.params[1], "sizes", config.batch_keys_max)
        if len(sizes) != len(key_list) or not key_list:
            raise BadParams("keys and sizes must be arrays of one length, not empty", field="sizes")
        for size in sizes:
            if type(size) is not int or size < 0:
                raise BadParams("a size is a whole number of bytes, 0 or more", field="sizes")
        rules = policy(call.params[2], call.tenant, config.replicas_max)
        wait_ms = min(number(call.params[3], "wait_ms"), config.put_wait_ms_max)
        core.check_may_change()
        segments = core.schedule if rules is PLAIN_POLICY else self._segments_for(rules)
        until_ms = core.now_ms + (wait_ms or config.journal_wait_ms)
        starting = Starting(call, key_list, sizes, rules, segments, until_ms, wait_ms > 0)
        short = self._allocate(starting)
        if short:
            self._make_room(starting)
            if self._may_wait(starting) and self._wait(starting):
                return HELD
        return self._started(starting)

    def _segments_for(self, rules: Policy) -> list[int]:
        core = self._core
        fitting = []
        by_name: dict[str, int] = {}
        for segment in dict.fromkeys(core.schedule):
            record = core.state.segment(segment)
            if rules.tier in (None, record.tier) and rules.kind in (None, record.kind):
                fitting.append(segment)
                by_name.setdefault(record.name, segment)
        schedule = [segment for segment in core.schedule if segment in set(fitting)]
        if not rules.preferred:
            return schedule
        return preferred_first(schedule, [by_name[name] for name in rules.preferred if name in by_name])

    def _allocate(self, starting: Starting) -> bool:
        """One pass over the keys; True when at least one lacks space."""
        core = self._core
        objects, counters, tenant = core.objects, core.counters, starting.call.tenant
        rules, segments = starting.policy, starting.segments
        quota = self._quota_left(tenant)
        largest = core.largest_segment
        codes, places, short = starting.codes, starting.places, False
        for key, size in zip(starting.keys, starting.sizes, strict=True):
            got: tuple[Place, ...] = _NONE
            index = -1 if rules.replace else objects.find(tenant, key)
            if index >= 0 and core.is_seen(objects.at(index)):
                code = EntryCode.EXISTS
            elif size > OBJECT_BYTES_MAX or (segments and size > largest):
                code = EntryCode.TOO_LARGE
            elif quota is not None and extent_bytes(size) * rules.replicas > quota:
                code = EntryCode.REFUSED
            else:
                got = self._place(rules, segments, counters.place_cursor, size)
                counters.place_cursor += 1
                code = EntryCode.OK if got else EntryCode.NO_SPACE
                short = short or not got
                if quota is not None:
                    quota -= extent_bytes(size) * len(got)
            codes.append(code)
            places.append(got)
        return short

    def _place(self, rules: Policy, segments: Sequence[int], cursor: int, size: int) -> tuple[Place, ...]:
        if not segments:
            return _NONE
        start = 0 if rules.preferred else cursor % len(segments)
        spaces = self._core.spaces
        if rules.replicas == 1:
            one = allocate_one(spaces, segments, start, size)
            return (one,) if one is not None else _NONE
        got = allocate_copies(spaces, segments, start, size, rules.replicas)
        if rules.need_all and len(got) < rules.replicas:
            self._free_all(got, size)
            return _NONE
        return got

    def _quota_left(self, tenant: int) -> int | None:
        core = self._core
        quota = core.state.tenants[tenant].quota_bytes
        if not quota:
            return None
        waiting = sum(
            extent_bytes(size) * len(places)
            for other in self.waiting
            if other.call.tenant == tenant
            for size, places in zip(other.sizes, other.places, strict=True)
        )
        return quota - core.objects.bytes_of(tenant) - core.puts.writing_bytes_of(tenant) - waiting

    def _make_room(self, starting: Starting) -> None:
        """Starts to make room for the keys that lack it."""
        order = list(dict.fromkeys(starting.segments))
        rules = starting.policy
        if not order or (rules.need_all and len(order) < rules.replicas):
            return  # no eviction would help: only another segment does
        turn = self._core.counters.place_cursor % len(order)
        wanted = max(
            size
            for size, code in zip(starting.sizes, starting.codes, strict=True)
            if code == EntryCode.NO_SPACE
        )
        self._room.make([*order[turn:], *order[:turn]], wanted)

    # Waiting for space

    def _may_wait(self, starting: Starting) -> bool:
        spaces = self._core.spaces
        return starting.patient or any(spaces[each].windows for each in starting.segments)

    def _wait(self, starting: Starting) -> bool:
        if len(self.waiting) >= self._core.config.waiting_puts_max:
            return False
        self.waiting[starting] = None
        self._reserve(starting, 1)
        return True

    def _reserve(self, starting: Starting, sign: int) -> None:
        for size, places in zip(starting.sizes, starting.places, strict=True):
            for place in places:
                space = self._core.spaces.get(place.segment)
                if space is not None:
                    space.reserved += sign * extent_bytes(size)

    def look_again(self) -> None:
        """Space came: gives it to those who wait, oldest first."""
        for starting in list(self.waiting):
            if self._try_again(starting) or not self._may_wait(starting):
                del self.waiting[starting]
                self._answer(starting)
            elif not self._core.schedule:
                return

    def _try_again(self, starting: Starting) -> bool:
        """True when every key has its extents now."""
        core, rules = self._core, starting.policy
        segments = core.schedule if rules is PLAIN_POLICY else self._segments_for(rules)
        starting.segments = segments
        whole = True
        for at, code in enumerate(starting.codes):
            if code != EntryCode.NO_SPACE:
                continue
            size = starting.sizes[at]
            got = self._place(rules, segments, core.counters.place_cursor, size) if whole else _NONE
            core.counters.place_cursor += 1
            if not got:
                whole = False
                continue
            starting.codes[at], starting.places[at] = EntryCode.OK, got
            for place in got:
                core.spaces[place.segment].reserved += extent_bytes(size)
        if not whole:
            self._make_room(starting)
        return whole

    def _answer(self, starting: Starting) -> None:
        self._reserve(starting, -1)
        call = starting.call
        try:
            result = self._started(starting)
        except Overloaded as error:
            self._core.fail(call.connection, call.message_id, error)
            return
        self._core.reply(call.connection, call.message_id, result)

    def end_waits(self) -> None:
        """Answers those whose time to wait is over."""
        late = [each for each in self.waiting if each.until_ms <= self._core.now_ms]
        for starting in late:
            del self.waiting[starting]
            self._answer(starting)

    def connection_closed(self, connection: int) -> None:
        """Nobody waits there any more: what was put aside is free, since nobody was told of it."""
        for starting in [each for each in self.waiting if each.call.connection == connection]:
            del self.waiting[starting]
            self._reserve(starting, -1)
            for size, places in zip(starting.sizes, starting.places, strict=True):
                self._free_all(places, size)

    def segment_gone(self, segment_id: int) -> None:
        """Takes places on a segment that is going out of what waits; they lack space again."""
        for starting in self.waiting:
            for at, places in enumerate(starting.places):
                if any(place.segment == segment_id for place in places):
                    for place in places:
                        self._core.spaces[place.segment].reserved -= extent_bytes(starting.sizes[at])
                    self._free_all(places, starting.sizes[at])
                    starting.places[at], starting.codes[at] = _NONE, EntryCode.NO_SPACE

    def _free_all(self, places: Sequence[Place], size: int) -> None:
        for place in places:
            space = self._core.spaces.get(place.segment)
            if space is not None:
                space.free(place.offset, size, place.slot)

    def _started(self, starting: Starting) -> list[Any]:
        """Opens the put and makes the reply of `put_start`."""
        core, rules, call = self._core, starting.policy, starting.call
        config, state = core.config, core.state
        remaining_ms = config.put_ms + sum(starting.sizes) // config.put_bytes_per_ms
        if not any(starting.places):
            empty = [[code, []] for code in starting.codes]
            return [core.counters.epoch, state.segments_version, 0, remaining_ms, empty]
        deadline_ms = core.now_ms + remaining_ms
        put_id = core.counters.next_put_id()
        entries = tuple(
            PutEntry(key, size, places, _OPEN if places else _DROPPED)
            for key, size, places in zip(starting.keys, starting.sizes, starting.places, strict=True)
        )
        soft_end = core.now_ms + rules.soft_pin_ms if rules.pin == Pin.SOFT else 0
        put = OpenPut(
            put_id,
            call.client.client_id,
            call.tenant,
            deadline_ms,
            rules.object_type,
            rules.pin,
            soft_end,
            rules.group,
            rules.replace,
            entries,
        )
        try:
            core.puts.add(put)
        except LimitExceeded as exc:
            for size, places in zip(starting.sizes, starting.places, strict=True):
                self._free_all(places, size)
            raise Overloaded(exc.message, field=exc.field or "", limit=exc.limit or 0) from exc
        granted = self._grants(put, deadline_ms - core.now_ms)
        rows = [[code, row] for code, row in zip(starting.codes, granted, strict=True)]
        return [core.counters.epoch, state.segments_version, put_id, remaining_ms, rows]

    def _grants(self, put: OpenPut, remaining_ms: int) -> list[list[Any]]:
        """Of each entry `[segment, offset, slot, grant]` for each place."""
        core, tag = self._core, put.put_id & 0xFFFF
        known: dict[int, tuple[bytes, int, int]] = {}
        rows: list[list[Any]] = []
        for entry in put.entries:
            row = []
            for place in entry.places:
                grant = known.get(place.segment)
                if grant is None:
                    join = core.joins.get(core.spaces[place.segment].node_id)
                    handle = core.state.segments[place.segment].data_handle
                    if join is None:
                        grant = (bytes(16), handle, 0)
                    else:
                        until = join.node_clock(core.now_ms) + remaining_ms & _U32
                        grant = (join.grant_key, handle, until)
                    known[place.segment] = grant
                grant_key, handle, until = grant
                made = make_grant(grant_key, handle, place.offset, extent_bytes(entry.size), until, tag)
                row.append((place.segment, place.offset, place.slot, made))
            rows.append(row)
        return rows
