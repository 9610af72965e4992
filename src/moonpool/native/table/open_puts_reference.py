"""The plain twin of `open_puts`: dictionaries. Its tests' oracle."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import final

from moonpool.errors import InternalError, LimitExceeded
from moonpool.native.table.stored import ENTRY_DROPPED, ENTRY_OPEN, OpenPut, PutEntry, check_put, extent_bytes


@final
class ReferenceOpenPuts:
    """At most `puts_max` puts with `entries_max` entries together."""

    def __init__(self, *, puts_max: int = 65_536, entries_max: int = 1 << 20) -> None:
        self._puts_max = puts_max
        self._entries_max = entries_max
        #: In order of arrival.
        self._puts: dict[int, OpenPut] = {}
        self._arrival: dict[int, int] = {}
        self._arrivals = 0
        self._entries = 0
        self._writing: dict[int, int] = {}
        self._tenants: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._puts)

    def add(self, put: OpenPut) -> None:
        check_put(put)
        if put.put_id in self._puts:
            raise InternalError(f"put {put.put_id} is open already")
        if len(self._puts) >= self._puts_max:
            raise LimitExceeded("too many puts are open", field="puts_max", limit=self._puts_max)
        if self._entries + len(put.entries) > self._entries_max:
            raise LimitExceeded(
                "the open puts have too many keys", field="entries_max", limit=self._entries_max
            )
        self._puts[put.put_id] = put
        self._arrivals += 1
        self._arrival[put.put_id] = self._arrivals
        self._entries += len(put.entries)
        for entry in put.entries:
            if entry.state == ENTRY_OPEN:
                self._count(put.tenant, entry, 1)

    def get(self, put_id: int) -> OpenPut | None:
        """The put of that id; None when it is not open."""
        return self._puts.get(put_id)

    def end_entry(self, put_id: int, index: int, state: int) -> PutEntry:
        put = self._puts.get(put_id)
        if put is None or not 0 <= index < len(put.entries) or put.entries[index].state != ENTRY_OPEN:
            raise InternalError(f"put {put_id} has no open entry {index}")
        if not ENTRY_OPEN < state <= ENTRY_DROPPED:
            raise InternalError(f"{state} is no state of an entry that has ended")
        entry = put.entries[index]
        self._count(put.tenant, entry, -1)
        entries = [*put.entries[:index], entry._replace(state=state), *put.entries[index + 1 :]]
        if any(other.state == ENTRY_OPEN for other in entries):
            self._puts[put_id] = put._replace(entries=tuple(entries))
        else:
            self._entries -= len(entries)
            del self._puts[put_id]
            del self._arrival[put_id]
        return entry

    def expired(self, now_ms: int, count_max: int) -> list[int]:
        late = [
            (put.deadline_ms, self._arrival[put_id])
            for put_id, put in self._puts.items()
            if put.deadline_ms <= now_ms
        ]
        by_arrival = {arrival: put_id for put_id, arrival in self._arrival.items()}
        return [by_arrival[arrival] for _, arrival in heapq.nsmallest(max(count_max, 0), late)]

    def of_client(self, client: int) -> Sequence[int]:
        """Ids of the open puts of a client."""
        return [put_id for put_id, put in self._puts.items() if put.client == client]

    def writing_bytes(self, segment: int) -> int:
        return self._writing.get(segment, 0)

    def writing_bytes_of(self, tenant: int) -> int:
        return self._tenants.get(tenant, 0)

    def check(self) -> None:
        counted: dict[int, int] = {}
        tenants: dict[int, int] = {}
        for put in self._puts.values():
            for entry in put.entries:
                for place in entry.places if entry.state == ENTRY_OPEN else ():
                    counted[place.segment] = counted.get(place.segment, 0) + extent_bytes(entry.size)
                    tenants[put.tenant] = tenants.get(put.tenant, 0) + extent_bytes(entry.size)
        if counted != self._writing or tenants != self._tenants:
            raise InternalError("bytes being written are miscounted")
        if self._entries != sum(len(put.entries) for put in self._puts.values()):
            raise InternalError("entries of open puts are miscounted")
        if not all(any(e.state == ENTRY_OPEN for e in put.entries) for put in self._puts.values()):
            raise InternalError("a put without an open entry is kept")

    def _count(self, tenant: int, entry: PutEntry, sign: int) -> None:
        size = sign * extent_bytes(entry.size)
        for place in entry.places:
            self._writing[place.segment] = self._writing.get(place.segment, 0) + size
            self._tenants[tenant] = self._tenants.get(tenant, 0) + size
            if self._writing[place.segment] == 0:
                del self._writing[place.segment]
            if self._tenants[tenant] == 0:
                del self._tenants[tenant]
