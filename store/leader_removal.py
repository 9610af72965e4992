"""Removing and pinning objects.

A reply to a removal waits until its facts are durable and every node that held the object stamped it dead,
or nobody may trust an old location any more. Who removes a key whose object is just going waits as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from moonpool.store import facts
from moonpool.store.call import HELD, Call
from moonpool.store.holds import Needs
from moonpool.store.leader_core import LeaderCore
from moonpool.store.leader_endings import end_objects, join_ending
from moonpool.store.outputs import Reply
from moonpool.store.params import cursor, flag, if_leased, keys, number, prefix
from moonpool.store.records import Pin, Reason, RemoveCode, StoredObject
from moonpool.store.state import EVERY_KEY


@final
class Removal:
    """The methods that remove and pin."""

    def __init__(self, core: LeaderCore) -> None:
        self._core = core

    def remove(self, call: Call) -> Any:
        """Removes keys; the result has one byte for each."""
        core = self._core
        key_list = keys(call.params[0], core.config.batch_keys_max)
        refuse = if_leased(call.params[1])
        force = flag(call.params[2], "force")
        core.check_may_change()
        codes = bytearray()
        going: list[StoredObject] = []
        leases: list[int] = []
        absent: list[bytes] = []
        taken: dict[bytes, None] = {}
        for key in key_list:
            index = core.objects.find(call.tenant, key) if key not in taken else -1
            code = RemoveCode.ABSENT if index < 0 else self._may_go(index, refuse, force)
            codes.append(code)
            if code == RemoveCode.REMOVED:
                taken[key] = None
                going.append(core.objects.at(index))
                leases.append(core.objects.lease_until(index))
            elif code == RemoveCode.ABSENT and key not in taken:
                absent.append(key)
        needs = end_objects(core, going, leases, Reason.REMOVED)
        # A directory may hold a newer object than the table had.
        self._bury(call.tenant, [*absent, *taken])
        join_ending(core, needs, call.tenant, absent)
        return self._answer(call, [core.counters.epoch, bytes(codes)], needs, going)

    def _may_go(self, index: int, refuse: bool, force: bool) -> RemoveCode:
        core = self._core
        stored = core.objects.at(index)
        if stored.pin == Pin.HARD and not force:
            return RemoveCode.PINNED
        if refuse and not force and core.objects.lease_until(index) > core.now_ms:
            return RemoveCode.LEASED
        return RemoveCode.REMOVED

    def _bury(self, tenant: int, keys_gone: Sequence[bytes]) -> None:
        """While directories may still bring objects back: those of these keys from before may not."""
        core = self._core
        if keys_gone and not core.state.settled and core.state.adopting:
            before = core.counters.epoch << 40
            core.commit_gone(Reason.REMOVED, tenant, [(before, key) for key in keys_gone])

    def _answer(self, call: Call, result: list[Any], needs: Needs, going: list[StoredObject]) -> Any:
        core = self._core
        needs.not_before_ms = max(needs.not_before_ms, core.silent_until_ms)
        needs.sequence = max(needs.sequence, core.counters.last_fact) if going else needs.sequence
        waits = needs.sequence > core.durable or needs.acks or needs.not_before_ms > core.now_ms
        if not going and not waits and core.durable >= core.counters.last_fact:
            return result
        needs.sequence = max(needs.sequence, core.counters.last_fact)
        pairs = tuple((each.tenant, each.key) for each in going)
        core.hold(Reply(call.connection, call.message_id, None, result), needs, pairs)
        return HELD

    def remove_prefix(self, call: Call) -> Any:
        """Removes keys with a prefix, some at a time; a cursor to go on with."""
        return self._remove_found(call, prefix(call.params[0]), call.params[1:])

    def remove_all(self, call: Call) -> Any:
        """Removes all keys of the tenant, some at a time; a cursor to go on with."""
        return self._remove_found(call, b"", call.params)

    def _remove_found(self, call: Call, start: bytes, params: list[Any]) -> Any:
        core = self._core
        refuse = if_leased(params[0])
        force = flag(params[1], "force")
        limit = number(params[2], "limit", 1, core.config.batch_keys_max)
        after = cursor(params[3])
        core.check_may_change()
        found, after = core.objects.find_prefix(call.tenant, start, after, limit, core.config.list_looks_max)
        going = [each for each in found if self._may_go(each, refuse, force) == RemoveCode.REMOVED]
        stored = [core.objects.at(index) for index in going]
        leases = [core.objects.lease_until(index) for index in going]
        needs = end_objects(core, stored, leases, Reason.REMOVED)
        self._bury(call.tenant, [EVERY_KEY])
        result = [core.counters.epoch, len(going), None if after < 0 else after]
        for pending in {id(each): each for each in core.holds.ending.values()}.values():
            needs.join(pending)
        return self._answer(call, result, needs, stored)

    def pin(self, call: Call) -> Any:
        """Pins or unpins objects; one byte for each key: 0 done, 1 absent."""
        core = self._core
        key_list = keys(call.params[0], core.config.batch_keys_max)
        kind = number(call.params[1], "pin", 0, Pin.HARD)
        soft_pin_ms = number(call.params[2], "soft_pin_ms")
        core.check_may_change()
        codes = bytearray()
        before = core.counters.last_fact
        for key in key_list:
            index = core.objects.find(call.tenant, key)
            stored = core.objects.at(index) if index >= 0 else None
            if stored is None or not core.is_seen(stored):
                codes.append(1)
                continue
            codes.append(0)
            end_ms = core.now_ms + soft_pin_ms if kind == Pin.SOFT else 0
            core.commit(facts.PinSet(stored.object_id, call.tenant, key, kind, end_ms))
        result = [core.counters.epoch, bytes(codes)]
        if core.counters.last_fact == before:
            return result
        needs = Needs(core.counters.last_fact)
        core.hold(Reply(call.connection, call.message_id, None, result), needs)
        return HELD
