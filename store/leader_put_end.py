"""How open puts end: as objects, given back, or fenced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

from moonpool.errors import LimitExceeded
from moonpool.store.call import HELD, Call
from moonpool.store.effects import ADD, encode_effect
from moonpool.store.errors import BadParams
from moonpool.store.facts import Object, encode_fact
from moonpool.store.holds import Needs
from moonpool.store.leader_core import LeaderCore
from moonpool.store.leader_endings import join_ending
from moonpool.store.outputs import Reply
from moonpool.store.params import array, number, raw
from moonpool.store.records import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    EntryCode,
    OpenPut,
    Place,
    PutEntry,
    Reason,
)
from moonpool.units import U64_MAX

_OPEN: Final = 0
_ENDED: Final = 1
_DROPPED: Final = 2
_EXPIRED_AT_ONCE: Final = 256
#: Codes after which an entry is not open any more.
_ENDING: Final = frozenset({EntryCode.OK, EntryCode.EXISTS, EntryCode.NO_SPACE})


@final
class PutEnds:
    """`put_end`, `put_abort`, deadlines and dead clients."""

    def __init__(self, core: LeaderCore) -> None:
        self._core = core

    def put_end(self, call: Call) -> Any:
        """Objects are written: makes them, or says why not, entry by entry."""
        core = self._core
        put_id = number(call.params[0], "put_id", 0, U64_MAX)
        rows = array(call.params[1], "entries", core.config.batch_keys_max)
        for row in rows:
            if not isinstance(row, list | tuple) or not 3 <= len(row) <= 4 or type(row[0]) is not int:
                raise BadParams("an entry is [index, digest, chunk digests] or has a mask as fourth item")
            raw(row[1], "digest")
            raw(row[2], "chunk digests")
            number(row[3] if len(row) == 4 else 0, "mask", 0, 0xFFFFFFFF)
        core.check_may_change()
        needs = Needs()
        keys: list[tuple[int, bytes]] = []
        stored: list[tuple[bytes, tuple[Place, ...]]] = []
        codes: list[tuple[int, int]] = []
        before = core.counters.last_fact
        put = core.puts.get(put_id)
        if put is not None and put.client != call.client.client_id:
            put = None
        ended: set[int] = set()
        for row in rows:
            if put is None or row[0] in ended:
                codes.append((EntryCode.UNKNOWN_PUT, 0))
                continue
            code, object_id, places = self._end_entry(put, row, needs, keys)
            codes.append((code, object_id))
            if code in _ENDING:
                ended.add(row[0])
            if code == EntryCode.OK:
                stored.append((put.entries[row[0]].key, places))
        core.stored_events(call.tenant, stored)
        result = [core.counters.epoch, codes]
        waits = core.puts_wait or needs.sequence
        if core.counters.last_fact == before or not waits:
            return result
        needs.sequence = core.counters.last_fact
        core.hold(Reply(call.connection, call.message_id, None, result), needs, tuple(keys))
        return HELD

    def _end_entry(
        self, put: OpenPut, row: Sequence[Any], needs: Needs, keys: list[tuple[int, bytes]]
    ) -> tuple[int, int, tuple[Place, ...]]:
        core, index, digest, chunks = self._core, row[0], row[1], row[2]
        if not 0 <= index < len(put.entries) or put.entries[index].state != _OPEN:
            return EntryCode.UNKNOWN_PUT, 0, ()
        if core.now_ms > put.deadline_ms:
            return EntryCode.DEADLINE_PASSED, 0, ()
        entry = put.entries[index]
        chunked = 8 * -(-entry.size // CHUNK_BYTES) if entry.size > CHUNK_BYTES else 0
        if len(digest) != DIGEST_BYTES or (len(chunks) != chunked and (chunked or len(chunks) != 8)):
            return EntryCode.REFUSED, 0, ()
        found = core.objects.find(put.tenant, entry.key)
        old = core.objects.at(found) if found >= 0 else None
        if old is not None and not put.replace and core.is_seen(old):
            core.puts.end_entry(put.put_id, index, _DROPPED)
            self._free_all(entry)
            return EntryCode.EXISTS, old.object_id, ()
        failed = row[3] if len(row) == 4 else 0
        places = self._good_places(put, entry, failed)
        core.puts.end_entry(put.put_id, index, _ENDED if places else _DROPPED)
        if not places:
            return EntryCode.NO_SPACE, 0, ()
        lease_ms = core.objects.lease_until(found) if found >= 0 else 0
        fact = Object(
            core.counters.next_object_id(),
            put.tenant,
            entry.key,
            entry.size,
            digest,
            put.object_type,
            put.pin,
            put.soft_pin_end_ms,
            put.group,
            places,
            old.object_id if old is not None else 0,
        )
        if not self._store(fact, chunks, put.put_id & 0xFFFF):
            self._free_all(entry._replace(places=places))
            return EntryCode.NO_SPACE, 0, ()
        if put.replace or old is not None:
            # Also without an old object here: a reader may still trust the place of one that was evicted.
            needs.sequence = core.counters.last_fact
            needs.not_before_ms = max(needs.not_before_ms, core.silent_until_ms)
            join_ending(core, needs, put.tenant, [entry.key])
        if old is not None:
            for place in old.places:
                needs.join(core.retire(old, place, Reason.REPLACED, lease_ms))
            keys.append((put.tenant, entry.key))
            core.removed_events(put.tenant, [(old.key, old.places)])
        return EntryCode.OK, fact.object_id, places

    def _good_places(self, put: OpenPut, entry: PutEntry, failed: int) -> tuple[Place, ...]:
        """The places that were written on segments that are still there; the others are fenced."""
        core = self._core
        ranks = core.ranks
        if not failed and all(place.segment in ranks for place in entry.places):
            return entry.places
        good = []
        for at, place in enumerate(entry.places):
            if place.segment in ranks and not failed >> at & 1:
                good.append(place)
            else:
                core.fence(place, entry.size, put.put_id, put.client, put.deadline_ms)
        return tuple(good)

    def _store(self, fact: Object, chunks: bytes, tag: int) -> bool:
        """Makes an object; False when the table is full."""
        core = self._core
        try:
            core.state.apply_object(fact)
        except LimitExceeded:
            return False
        core.state.sequence += 1
        core.out.facts.append(encode_fact(fact))
        core.counters.last_fact += 1
        sequence = core.counters.last_fact
        for segment, offset, slot in fact.places:
            join = core.joins.get(core.spaces[segment].node_id)
            if join is not None:
                core.busy[join.number] = join
                join.effects.add(
                    sequence,
                    encode_effect(
                        (
                            ADD,
                            segment,
                            slot,
                            offset,
                            fact.size,
                            fact.tenant,
                            fact.object_id,
                            fact.key,
                            fact.digest,
                            fact.object_type,
                            chunks,
                            tag,
                        )
                    ),
                )
        return True

    def _free_all(self, entry: PutEntry) -> None:
        for place in entry.places:
            space = self._core.spaces.get(place.segment)
            if space is not None:
                space.free(place.offset, entry.size, place.slot)
                self._core.space_came = True

    def put_abort(self, call: Call) -> Any:
        """Gives extents back at once: their holder says that nothing writes them any more."""
        core = self._core
        put_id = number(call.params[0], "put_id", 0, U64_MAX)
        wanted = call.params[1]
        if wanted is not None:
            wanted = [
                number(each, "index", 0, 1 << 31)
                for each in array(wanted, "indexes", core.config.batch_keys_max)
            ]
        put = core.puts.get(put_id)
        if put is None or put.client != call.client.client_id:
            return [core.counters.epoch, 0]
        indexes = range(len(put.entries)) if wanted is None else dict.fromkeys(wanted)
        count = 0
        for index in indexes:
            if index < len(put.entries) and put.entries[index].state == _OPEN:
                self._free_all(core.puts.end_entry(put_id, index, _DROPPED))
                count += 1
        return [core.counters.epoch, count]

    # Puts that nobody ends

    def end_expired(self) -> None:
        """Fences what is left of puts whose deadline has passed."""
        core = self._core
        while late := core.puts.expired(core.now_ms - 1, _EXPIRED_AT_ONCE):
            for put_id in late:
                self._fence_put(put_id)

    def client_ended(self, client_id: int) -> None:
        """Fences what is left of the puts of a client that is gone."""
        for put_id in list(self._core.puts.of_client(client_id)):
            self._fence_put(put_id)

    def _fence_put(self, put_id: int) -> None:
        core = self._core
        put = core.puts.get(put_id)
        if put is None:
            return
        for index, entry in enumerate(put.entries):
            if entry.state == _OPEN:
                core.puts.end_entry(put_id, index, _DROPPED)
                for place in entry.places:
                    core.fence(place, entry.size, put_id, put.client, put.deadline_ms)
