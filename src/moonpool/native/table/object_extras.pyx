"""What few objects have: the end of a soft pin, and a group. 48 bytes for each of those.

Soft pins that hold are in a heap by their end, so that those that are over are found at once. Members of a group,
which is named by (tenant, group), are linked in the order in which they joined.
"""

cimport cython
from cpython.mem cimport PyMem_RawFree, PyMem_RawRealloc
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from moonpool.native.table.id_map cimport mp_id_get, mp_id_map_release, mp_id_remove, mp_id_reserve, mp_id_set
from moonpool.native.table.object_records cimport is_live, object_at, require

cdef extern from "mixing.h" nogil:
    uint64_t mp_scatter(uint64_t x)


cdef inline uint64_t hash_of(uint32_t tenant, uint64_t group) noexcept nogil:
    return mp_scatter(group ^ mp_scatter(tenant))


@cython.final
cdef class ObjectExtras:
    """The extras of `records`. `seed` keys the table of groups."""

    def __cinit__(self, ObjectRecords records not None, uint64_t seed):
        self.records = records
        self.by_hash.seed = seed
        self.free = self.groups_free = NO_RECORD

    def __dealloc__(self):
        self.clear()

    cdef void clear(self) noexcept nogil:
        """Forgets everything."""
        cdef uint64_t seed = self.by_hash.seed
        PyMem_RawFree(self.extras)
        PyMem_RawFree(self.heap)
        PyMem_RawFree(self.groups)
        mp_id_map_release(&self.by_hash)
        self.by_hash.seed = seed
        self.extras = NULL
        self.heap = NULL
        self.groups = NULL
        self.used = self.room = self.live = self.heap_size = self.groups_used = self.groups_room = 0
        self.free = self.groups_free = NO_RECORD

    cdef bint reserve(self) noexcept nogil:
        """Makes room for one more extra and group; False without memory."""
        cdef uint32_t room
        cdef void* grown
        if self.free == NO_RECORD and self.used == self.room:
            room = self.room + self.room // 2 + 16
            grown = PyMem_RawRealloc(self.heap, room * sizeof(uint32_t))
            if grown == NULL:
                return False
            self.heap = <uint32_t*>grown
            grown = PyMem_RawRealloc(self.extras, room * sizeof(Extra))
            if grown == NULL:
                return False
            self.extras = <Extra*>grown
            self.room = room
        if self.groups_free == NO_RECORD and self.groups_used == self.groups_room:
            room = self.groups_room + self.groups_room // 2 + 16
            grown = PyMem_RawRealloc(self.groups, room * sizeof(Group))
            if grown == NULL:
                return False
            self.groups = <Group*>grown
            self.groups_room = room
        return mp_id_reserve(&self.by_hash, 1)

    cdef Extra* of(self, Object* record) noexcept nogil:
        """The extra of an object, or NULL; valid until the next `reserve`."""
        return &self.extras[record.extra] if record.extra != NO_RECORD else NULL

    cdef void attach(self, uint32_t index, uint64_t soft_pin_end_ms, uint64_t group) noexcept nogil:
        """Gives an object that has none an extra, after `reserve`; no soft pin holds yet."""
        cdef uint32_t at = self.free
        if at != NO_RECORD:
            self.free = self.extras[at].next
        else:
            at = self.used
            self.used += 1
        memset(&self.extras[at], 0, sizeof(Extra))
        self.extras[at].soft_pin_end_ms = soft_pin_end_ms
        self.extras[at].object = index
        self.extras[at].heap_at = self.extras[at].group_at = NO_RECORD
        self.live += 1
        object_at(self.records, index).extra = at
        if group:
            self.join(at, group)

    cdef void detach(self, uint32_t index) noexcept nogil:
        """Frees the extra of an object that has one."""
        cdef Object* record = object_at(self.records, index)
        cdef uint32_t at = record.extra
        self.release_soft(index)
        if self.extras[at].group_at != NO_RECORD:
            self.leave(at)
        record.extra = NO_RECORD
        self.extras[at].object = NO_RECORD
        self.extras[at].next = self.free
        self.free = at
        self.live -= 1

    # -- soft pins --

    cdef void hold_soft(self, uint32_t index, uint64_t soft_pin_end_ms) noexcept nogil:
        """The soft pin of an object with an extra holds until then."""
        cdef Object* record = object_at(self.records, index)
        cdef Extra* extra = &self.extras[record.extra]
        extra.soft_pin_end_ms = soft_pin_end_ms
        if extra.heap_at == NO_RECORD:
            extra.heap_at = self.heap_size
            self.heap[self.heap_size] = record.extra
            self.heap_size += 1
        record.soft = True
        self.settle(extra.heap_at)

    cdef void release_soft(self, uint32_t index) noexcept nogil:
        """The soft pin of an object with an extra holds no more, if it did."""
        cdef Object* record = object_at(self.records, index)
        cdef uint32_t at = self.extras[record.extra].heap_at
        if at == NO_RECORD:
            return
        record.soft = False
        self.extras[record.extra].heap_at = NO_RECORD
        self.heap_size -= 1
        if at != self.heap_size:
            self.heap[at] = self.heap[self.heap_size]
            self.extras[self.heap[at]].heap_at = at
            self.settle(at)

    cdef uint32_t ended_pin(self, uint64_t now_ms) noexcept nogil:
        """The object whose soft pin ended first, and by now, or NO_RECORD."""
        if self.heap_size == 0 or self.extras[self.heap[0]].soft_pin_end_ms > now_ms:
            return NO_RECORD
        return self.extras[self.heap[0]].object

    cdef bint ends_before(self, uint32_t a, uint32_t b) noexcept nogil:
        if self.extras[a].soft_pin_end_ms != self.extras[b].soft_pin_end_ms:
            return self.extras[a].soft_pin_end_ms < self.extras[b].soft_pin_end_ms
        return (object_at(self.records, self.extras[a].object).object_id
                < object_at(self.records, self.extras[b].object).object_id)

    cdef void settle(self, uint32_t at) noexcept nogil:
        """Moves one place of the heap up or down to where it belongs."""
        cdef uint32_t moved = self.heap[at], child
        while at and self.ends_before(moved, self.heap[(at - 1) // 2]):
            self.heap[at] = self.heap[(at - 1) // 2]
            self.extras[self.heap[at]].heap_at = at
            at = (at - 1) // 2
        while <uint64_t>2 * at + 1 < self.heap_size:
            child = 2 * at + 1
            if child + 1 < self.heap_size and self.ends_before(self.heap[child + 1], self.heap[child]):
                child += 1
            if not self.ends_before(self.heap[child], moved):
                break
            self.heap[at] = self.heap[child]
            self.extras[self.heap[at]].heap_at = at
            at = child
        self.heap[at] = moved
        self.extras[moved].heap_at = at

    # -- groups --

    cdef Group* group_of(self, Object* record) noexcept nogil:
        """The group of an object, or NULL; valid until the next `reserve`."""
        if record.extra == NO_RECORD or self.extras[record.extra].group_at == NO_RECORD:
            return NULL
        return &self.groups[self.extras[record.extra].group_at]

    cdef void join(self, uint32_t at, uint64_t group) noexcept nogil:
        cdef uint32_t tenant = object_at(self.records, self.extras[at].object).tenant
        cdef uint64_t hash = hash_of(tenant, group)
        cdef uint32_t first = <uint32_t>mp_id_get(&self.by_hash, hash) - 1, found = first
        while found != NO_RECORD and not (self.groups[found].group == group and self.groups[found].tenant == tenant):
            found = self.groups[found].next
        if found == NO_RECORD:
            found = self.groups_free
            if found != NO_RECORD:
                self.groups_free = self.groups[found].next
            else:
                found = self.groups_used
                self.groups_used += 1
            memset(&self.groups[found], 0, sizeof(Group))
            self.groups[found].group = group
            self.groups[found].tenant = tenant
            self.groups[found].next = first
            self.groups[found].first = self.groups[found].last = NO_RECORD
            mp_id_set(&self.by_hash, hash, <uint64_t>found + 1)
        self.extras[at].group = group
        self.extras[at].group_at = found
        self.extras[at].prev = self.groups[found].last
        self.extras[at].next = NO_RECORD
        if self.groups[found].last != NO_RECORD:
            self.extras[self.groups[found].last].next = at
        else:
            self.groups[found].first = at
        self.groups[found].last = at
        self.groups[found].count += 1

    cdef void leave(self, uint32_t at) noexcept nogil:
        cdef uint32_t found = self.extras[at].group_at
        cdef Group* group = &self.groups[found]
        if self.extras[at].prev != NO_RECORD:
            self.extras[self.extras[at].prev].next = self.extras[at].next
        else:
            group.first = self.extras[at].next
        if self.extras[at].next != NO_RECORD:
            self.extras[self.extras[at].next].prev = self.extras[at].prev
        else:
            group.last = self.extras[at].prev
        self.extras[at].group_at = NO_RECORD
        group.count -= 1
        if group.count:
            return
        drop_group(self, found)

    cdef uint64_t memory_bytes(self) noexcept nogil:
        return (<uint64_t>self.room * (sizeof(Extra) + sizeof(uint32_t)) + <uint64_t>self.groups_room * sizeof(Group)
                + ((self.by_hash.mask + 1) * 16 if self.by_hash.entries != NULL else 0))

    cdef int check(self) except -1:
        """Asserts that extras belong to objects, that the heap is one, and that groups are linked both ways."""
        cdef uint32_t at, found, before, count, live = 0, freed = 0, held = 0, grouped = 0, members = 0
        for at in range(self.used):
            if self.extras[at].object == NO_RECORD:
                continue
            live += 1
            require(is_live(self.records, self.extras[at].object)
                    and object_at(self.records, self.extras[at].object).extra == at, "an extra has lost its object")
            held += self.extras[at].heap_at != NO_RECORD
            grouped += self.extras[at].group_at != NO_RECORD
            require(object_at(self.records, self.extras[at].object).soft == (self.extras[at].heap_at != NO_RECORD),
                    "a soft pin is not in the heap")
        for at in range(self.heap_size):
            require(self.extras[self.heap[at]].heap_at == at, "the heap has lost its place")
            require(at == 0 or not self.ends_before(self.heap[at], self.heap[(at - 1) // 2]), "the heap is none")
        for found in range(self.groups_used):
            at, before, count = self.groups[found].first, NO_RECORD, 0
            if self.groups[found].count == 0:
                continue
            while at != NO_RECORD and count <= self.groups[found].count:
                require(self.extras[at].group_at == found and self.extras[at].prev == before, "a group is broken")
                before, at, count = at, self.extras[at].next, count + 1
            require(before == self.groups[found].last and count == self.groups[found].count, "a group is miscounted")
            members += count
        at = self.free
        while at != NO_RECORD:
            freed += 1
            require(freed <= self.used, "the free extras are broken")
            at = self.extras[at].next
        require(live == self.live and live + freed == self.used and held == self.heap_size and grouped == members,
                "the extras are miscounted")
        return 0


cdef void drop_group(ObjectExtras extras, uint32_t found) noexcept nogil:
    """Frees a group without members."""
    cdef Group* group = &extras.groups[found]
    cdef uint64_t hash = hash_of(group.tenant, group.group)
    cdef uint32_t first = <uint32_t>mp_id_get(&extras.by_hash, hash) - 1
    if first == found and group.next == NO_RECORD:
        mp_id_remove(&extras.by_hash, hash)
    elif first == found:
        mp_id_set(&extras.by_hash, hash, <uint64_t>group.next + 1)
    else:
        while extras.groups[first].next != found:
            first = extras.groups[first].next
        extras.groups[first].next = group.next
    group.next = extras.groups_free
    extras.groups_free = found
