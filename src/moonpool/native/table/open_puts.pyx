"""Puts that have begun and not ended: found by id, by client, and by deadline.

A put is one piece of memory with its keys and places. A binary heap has the earliest deadline first (of equal ones the
first to arrive), a ring for each client its puts in order of arrival. Bytes of extents that are being written
are counted for each segment and each tenant, for the keys that are open.

Thread rule: the caller's; the master's loop thread owns it. The plain twin is open_puts_reference.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc, PyMem_RawRealloc
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from moonpool.native.table.extents cimport rounded
from moonpool.native.table.id_map cimport (
    mp_id_add, mp_id_get, mp_id_map_release, mp_id_remove, mp_id_reserve, mp_id_set,
)

from heapq import heappop, heappush

from moonpool.errors import InternalError, LimitExceeded, OutOfMemory, UsageError
from moonpool.native.table.stored import OpenPut, Place, PutEntry, check_put


cdef inline bint is_before(Put* a, Put* b) noexcept nogil:
    if a.deadline_ms != b.deadline_ms:
        return a.deadline_ms < b.deadline_ms
    return a.arrival < b.arrival


@cython.final
cdef class OpenPuts:
    """At most `puts_max` puts with `entries_max` keys together. `seed` keys the hash tables."""

    def __cinit__(self, *, puts_max=65536, entries_max=1048576, uint64_t seed=0):
        if not (1 <= puts_max <= 1 << 24 and 1 <= entries_max <= 1 << 28):
            raise UsageError("puts_max must be from 1 to 2^24 and entries_max from 1 to 2^28", field="puts_max")
        self.puts_max = puts_max
        self.entries_max = entries_max
        self.by_id.seed = self.by_client.seed = self.by_segment.seed = self.by_tenant.seed = seed

    def __dealloc__(self):
        cdef uint32_t at
        for at in range(self.puts):
            PyMem_RawFree(self.heap[at])
        PyMem_RawFree(self.heap)
        mp_id_map_release(&self.by_id)
        mp_id_map_release(&self.by_client)
        mp_id_map_release(&self.by_segment)
        mp_id_map_release(&self.by_tenant)

    def __len__(self):
        return self.puts

    def add(self, put) -> None:
        """LimitExceeded when the table is full; InternalError when the id is taken or a field cannot be held."""
        cdef Put* record
        cdef uint64_t places = 0, text = 0
        cdef int refused
        check_put(put)
        for entry in put.entries:
            places += <uint64_t>len(entry.places)
            text += <uint64_t>len(entry.key)
        refused = self.refusal(put.put_id, len(put.entries))
        if refused == PUT_ID_TAKEN:
            raise InternalError(f"put {put.put_id} is open already")
        if refused == PUTS_FULL:
            raise LimitExceeded("too many puts are open", field="puts_max", limit=self.puts_max)
        if refused == ENTRIES_FULL:
            raise LimitExceeded("the open puts have too many keys", field="entries_max", limit=self.entries_max)
        record = self.begin(len(put.entries), places, text)
        if record == NULL:
            raise OutOfMemory("no memory for an open put")
        fill(record, put)
        if not self.enter(record):
            PyMem_RawFree(record)
            raise OutOfMemory("no memory for an open put")

    def get(self, uint64_t put_id):
        """The put, or None."""
        cdef Put* put = self.find(put_id)
        if put == NULL:
            return None
        entries = tuple([entry_of(put, at) for at in range(put.count)])
        return OpenPut(put.put_id, put.client, put.tenant, put.deadline_ms, put.object_type, put.pin,
                       put.soft_pin_end_ms, put.group, bool(put.replace), entries)

    def end_entry(self, put_id, index, state):
        """Marks one entry as ended (1) or dropped (2); the put goes when none is open. The entry as it was."""
        cdef Put* put = self.find(put_id)
        if put == NULL or not 0 <= index < put.count or put.keys[<uint32_t>index].state != KEY_OPEN:
            raise InternalError(f"put {put_id} has no open entry {index}")
        if not KEY_OPEN < state <= KEY_DROPPED:
            raise InternalError(f"{state} is no state of an entry that has ended")
        entry = entry_of(put, index)
        self.end_key(put, index, state)
        return entry

    def expired(self, now_ms, count_max) -> list:
        """Put ids whose deadline has passed, earliest first. O(count_max * log(count_max))."""
        cdef list edge = [], found = []
        cdef uint64_t at = 0, child
        if self.puts:
            edge.append((self.heap[0].deadline_ms, self.heap[0].arrival, 0))
        while edge and len(found) < count_max:
            deadline_ms, _, at = heappop(edge)
            if deadline_ms > now_ms:
                break
            found.append(self.heap[at].put_id)
            for child in range(2 * at + 1, min(2 * at + 3, <uint64_t>self.puts)):
                heappush(edge, (self.heap[child].deadline_ms, self.heap[child].arrival, child))
        return found

    def of_client(self, uint32_t client) -> list:
        """Put ids of a client, in order of arrival."""
        cdef Put* first = <Put*>mp_id_get(&self.by_client, client)
        cdef Put* put = first
        cdef list found = []
        while put != NULL:
            found.append(put.put_id)
            put = put.next if put.next != first else NULL
        return found

    def writing_bytes(self, uint32_t segment) -> int:
        """Bytes of extents of open entries on a segment."""
        return mp_id_get(&self.by_segment, segment)

    def writing_bytes_of(self, uint32_t tenant) -> int:
        """Bytes of extents of a tenant's open entries, on all segments."""
        return mp_id_get(&self.by_tenant, tenant)

    def check(self) -> None:
        """Asserts that heap, maps, rings and counts tell of the same puts."""
        cdef uint32_t at, number
        cdef uint64_t entries = 0
        cdef Put* put
        cdef dict segments = {}, tenants = {}, clients = {}
        for at in range(self.puts):
            put = self.heap[at]
            if put.heap_at != at or self.find(put.put_id) != put or (at and is_before(put, self.heap[(at - 1) // 2])):
                raise InternalError(f"put {put.put_id} is misplaced")
            entries += put.count
            clients.setdefault(put.client, []).append((put.arrival, put.put_id))
            open_keys = [number for number in range(put.count) if put.keys[number].state == KEY_OPEN]
            if not open_keys or <uint32_t>len(open_keys) != put.open_keys:
                raise InternalError(f"put {put.put_id} has miscounted its keys")
            for entry in [entry_of(put, number) for number in open_keys]:
                for place in entry.places:
                    segments[place.segment] = segments.get(place.segment, 0) + rounded(entry.size)
                    tenants[put.tenant] = tenants.get(put.tenant, 0) + rounded(entry.size)
        if entries != self.entries or self.by_id.count != self.puts or self.by_client.count != <uint64_t>len(clients):
            raise InternalError("the open puts are miscounted")
        for client, puts in clients.items():
            if self.of_client(client) != [put_id for _, put_id in sorted(puts)]:
                raise InternalError(f"the ring of client {client} is broken")
        if (any([self.writing_bytes(segment) != size for segment, size in segments.items()])
                or any([self.writing_bytes_of(tenant) != size for tenant, size in tenants.items()])
                or (self.by_segment.count, self.by_tenant.count) != (len(segments), len(tenants))):
            raise InternalError("bytes being written are miscounted")

    # -- what other native modules call --

    cdef int refusal(self, uint64_t put_id, uint64_t count) noexcept nogil:
        """Why no put of so many keys can be entered now; 0 when it can."""
        if mp_id_get(&self.by_id, put_id):
            return PUT_ID_TAKEN
        if self.puts >= self.puts_max:
            return PUTS_FULL
        return ENTRIES_FULL if self.entries + count > self.entries_max else 0

    cdef Put* begin(self, uint32_t count, uint32_t places, uint32_t text_bytes) noexcept nogil:
        """Memory for a put, which the caller fills (but for open_keys, arrival and links) and enters; or NULL."""
        cdef size_t head = sizeof(Put) + count * sizeof(PutKey)
        cdef uint8_t* memory = <uint8_t*>PyMem_RawMalloc(head + places * sizeof(PutPlace) + text_bytes)
        cdef Put* put = <Put*>memory
        if put == NULL:
            return NULL
        put.count = count
        put.place_count = places
        put.text_bytes = text_bytes
        put.keys = <PutKey*>(memory + sizeof(Put))
        put.places = <PutPlace*>(memory + head)
        put.text = memory + head + places * sizeof(PutPlace)
        return put

    cdef bint enter(self, Put* put) noexcept nogil:
        """Adds a filled put that is not refused; False without memory, and then it is still the caller's."""
        cdef Put** grown
        cdef Put* first
        cdef uint32_t room, at
        if self.puts == self.heap_room:
            room = self.heap_room * 2 + 16
            grown = <Put**>PyMem_RawRealloc(self.heap, room * sizeof(Put*))
            if grown == NULL:
                return False
            self.heap = grown
            self.heap_room = room
        if not (mp_id_reserve(&self.by_id, 1) and mp_id_reserve(&self.by_client, 1)
                and mp_id_reserve(&self.by_segment, put.place_count) and mp_id_reserve(&self.by_tenant, 1)):
            return False
        self.arrivals += 1
        put.arrival = self.arrivals
        put.open_keys = 0
        mp_id_set(&self.by_id, put.put_id, <uint64_t>put)
        first = <Put*>mp_id_get(&self.by_client, put.client)
        if first == NULL:
            put.prev = put.next = put
            mp_id_set(&self.by_client, put.client, <uint64_t>put)
        else:
            put.next = first
            put.prev = first.prev
            first.prev.next = put
            first.prev = put
        self.heap[self.puts] = put
        put.heap_at = self.puts
        self.puts += 1
        self.sift_up(put.heap_at)
        self.entries += put.count
        for at in range(put.count):
            if put.keys[at].state == KEY_OPEN:
                put.open_keys += 1
                self.count_key(put, &put.keys[at], True)
        return True

    cdef Put* find(self, uint64_t put_id) noexcept nogil:
        """The put, or NULL; valid until its last key ends."""
        return <Put*>mp_id_get(&self.by_id, put_id)

    cdef bint end_key(self, Put* put, uint32_t index, uint8_t state) noexcept nogil:
        """Ends an open key. True when it was the last: the put is then gone, and its memory too."""
        self.count_key(put, &put.keys[index], False)
        put.keys[index].state = state
        put.open_keys -= 1
        if put.open_keys:
            return False
        self.leave(put)
        return True

    cdef void leave(self, Put* put) noexcept nogil:
        cdef uint32_t at = put.heap_at
        cdef Put* last
        mp_id_remove(&self.by_id, put.put_id)
        if put.next == put:
            mp_id_remove(&self.by_client, put.client)
        else:
            put.prev.next = put.next
            put.next.prev = put.prev
            if <Put*>mp_id_get(&self.by_client, put.client) == put:
                mp_id_set(&self.by_client, put.client, <uint64_t>put.next)
        self.puts -= 1
        last = self.heap[self.puts]
        if last != put:
            self.heap[at] = last
            last.heap_at = at
            self.sift_up(at)
            self.sift_down(last.heap_at)
        self.entries -= put.count
        PyMem_RawFree(put)

    cdef void count_key(self, Put* put, PutKey* key, bint open) noexcept nogil:
        """Adds or takes away the bytes of a key's extents."""
        cdef uint64_t size = rounded(key.size)
        cdef uint32_t at
        if not open:
            size = 0 - size
        for at in range(key.place, key.place + key.places):
            mp_id_add(&self.by_segment, put.places[at].segment, size)
            mp_id_add(&self.by_tenant, put.tenant, size)

    cdef void sift_up(self, uint32_t at) noexcept nogil:
        cdef Put* put = self.heap[at]
        cdef uint32_t parent
        while at:
            parent = (at - 1) // 2
            if not is_before(put, self.heap[parent]):
                break
            self.heap[at] = self.heap[parent]
            self.heap[at].heap_at = at
            at = parent
        self.heap[at] = put
        put.heap_at = at

    cdef void sift_down(self, uint32_t at) noexcept nogil:
        cdef Put* put = self.heap[at]
        cdef uint32_t child
        while 2 * <uint64_t>at + 1 < self.puts:
            child = 2 * at + 1
            if child + 1 < self.puts and is_before(self.heap[child + 1], self.heap[child]):
                child += 1
            if not is_before(self.heap[child], put):
                break
            self.heap[at] = self.heap[child]
            self.heap[at].heap_at = at
            at = child
        self.heap[at] = put
        put.heap_at = at


cdef int fill(Put* record, object put) except -1:
    """Copies a checked put into its record."""
    cdef uint32_t at = 0, place_at = 0, text = 0
    cdef PutKey* key
    cdef bytes name
    record.put_id, record.client, record.tenant = put.put_id, put.client, put.tenant
    record.deadline_ms, record.soft_pin_end_ms, record.group = put.deadline_ms, put.soft_pin_end_ms, put.group
    record.object_type, record.pin, record.replace = put.object_type, put.pin, put.replace
    for entry in put.entries:
        key = &record.keys[at]
        name = entry.key
        key.size, key.text, key.place = entry.size, text, place_at
        key.key_bytes, key.places, key.state = len(name), len(entry.places), entry.state
        memcpy(record.text + text, PyBytes_AS_STRING(name), key.key_bytes)
        for place in entry.places:
            record.places[place_at].offset = place.offset
            record.places[place_at].segment = place.segment
            record.places[place_at].slot = place.slot
            place_at += 1
        text += key.key_bytes
        at += 1
    return 0


cdef object entry_of(Put* put, uint32_t index):
    cdef PutKey* key = &put.keys[index]
    cdef uint32_t at
    places = tuple([Place(put.places[at].segment, put.places[at].offset, put.places[at].slot)
                    for at in range(key.place, key.place + key.places)])
    name = PyBytes_FromStringAndSize(<char*>put.text + key.text, key.key_bytes)
    return PutEntry(name, key.size, places, key.state)
