"""Methods that read: exists, lookup, list, stat. A lease keeps extents from being freed, not keys from going.

`exists` touches (counts as a use) only with a lease, `lookup` always. Keys are touched in the order asked.
"""

from __future__ import annotations

from typing import Any, final

from moonpool.store.call import Call
from moonpool.store.leader_core import LeaderCore
from moonpool.store.params import cursor, keys, lease, number, prefix
from moonpool.store.records import StoredObject


@final
class Reads:
    """The reading methods of a leader."""

    def __init__(self, core: LeaderCore) -> None:
        self._core = core

    def exists(self, call: Call) -> bytes:
        """One byte a key: 1 when it has an object that readers are told of."""
        core = self._core
        key_list = keys(call.params[0], core.config.batch_keys_max)
        lease_ms = lease(call.params[1], core.config.lease_ms_max)
        objects, ranks, tenant = core.objects, core.ranks, call.tenant
        until_ms = core.now_ms + lease_ms
        found = bytearray(len(key_list))
        for at, key in enumerate(key_list):
            index = objects.find(tenant, key)
            if index < 0:
                continue
            for place in objects.at(index).places:
                if place.segment in ranks:
                    found[at] = 1
                    if lease_ms:
                        objects.touch(index)
                        objects.extend_lease(index, until_ms)
                    break
        return bytes(found)

    def lookup(self, call: Call) -> list[Any]:
        """Where each key's object lies, active places first; nil for a miss."""
        core = self._core
        key_list = keys(call.params[0], core.config.batch_keys_max)
        lease_ms = lease(call.params[1], core.config.lease_ms_max)
        objects, ranks, tenant = core.objects, core.ranks, call.tenant
        until_ms = core.now_ms + lease_ms
        rows: list[Any] = []
        for key in key_list:
            index = objects.find(tenant, key)
            if index < 0:
                rows.append(None)
                continue
            stored = objects.at(index)
            places = stored.places
            if len(places) > 1:
                places = tuple(place for place in places if place.segment in ranks)
                places = tuple(sorted(places, key=lambda place: ranks[place.segment]))
            elif places[0].segment not in ranks:
                places = ()
            if not places:
                rows.append(None)
                continue
            objects.touch(index)
            if lease_ms:
                objects.extend_lease(index, until_ms)
            rows.append((stored.object_id, stored.size, stored.digest, stored.object_type, places))
        return [core.counters.epoch, core.state.segments_version, rows]

    def list_objects(self, call: Call) -> list[Any]:
        """Keys with a prefix, some at a time, in no promised order; a cursor to go on with."""
        core = self._core
        start = prefix(call.params[0])
        limit = number(call.params[1], "limit", 1, core.config.batch_keys_max)
        after = cursor(call.params[2])
        found, after = core.objects.find_prefix(call.tenant, start, after, limit, core.config.list_looks_max)
        rows = []
        for index in found:
            stored = core.objects.at(index)
            seen = sum(place.segment in core.ranks for place in stored.places)
            if seen:
                rows.append((stored.key, stored.size, stored.object_type, stored.pin, seen))
        return [core.counters.epoch, rows, None if after < 0 else after]

    def stat(self, call: Call) -> list[Any]:
        """All that is known of each key's object; nil for a miss. Neither a use nor a lease."""
        core = self._core
        rows = []
        for key in keys(call.params[0], core.config.batch_keys_max):
            index = core.objects.find(call.tenant, key)
            stored = core.objects.at(index) if index >= 0 else None
            rows.append(self._describe(index, stored) if stored and core.is_seen(stored) else None)
        return [core.counters.epoch, rows]

    def _describe(self, index: int, stored: StoredObject) -> dict[str, Any]:
        core = self._core
        places = []
        for place in stored.places:
            record = core.state.segment(place.segment)
            node = core.state.nodes[record.node_id]
            places.append(
                {
                    "segment": place.segment,
                    "segment_name": record.name,
                    "node": node.name,
                    "host": node.host,
                    "offset": place.offset,
                    "slot": place.slot,
                    "tier": record.tier,
                    "kind": record.kind,
                    "state": record.state,
                }
            )
        return {
            "object_id": stored.object_id,
            "size": stored.size,
            "digest": stored.digest,
            "type": stored.object_type,
            "pin": stored.pin,
            "soft_pin_left_ms": max(0, stored.soft_pin_end_ms - core.now_ms),
            "group": stored.group,
            "lease_left_ms": max(0, core.objects.lease_until(index) - core.now_ms),
            "places": places,
        }
