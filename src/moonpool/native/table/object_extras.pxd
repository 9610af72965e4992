"""What few objects have: the end of a soft pin, a group (see object_extras.pyx)."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from moonpool.native.table.id_map cimport mp_id_map
from moonpool.native.table.object_records cimport NO_RECORD, Object, ObjectRecords

cdef struct Extra:            # when free, next is the next free one
    uint64_t soft_pin_end_ms
    uint64_t group            # 0: none
    uint32_t object
    uint32_t heap_at          # NO_RECORD when its soft pin does not hold
    uint32_t prev             # in its group, in order of joining
    uint32_t next
    uint32_t group_at

cdef struct Group:            # free when count is 0
    uint64_t group
    uint64_t chosen_in        # numbers of searches for victims
    uint64_t blocked_in
    uint32_t tenant
    uint32_t first
    uint32_t last
    uint32_t count
    uint32_t next             # with the same hash; the next free one when free


@cython.final
cdef class ObjectExtras:
    cdef ObjectRecords records
    cdef Extra* extras
    cdef uint32_t used, room, free, live
    cdef uint32_t* heap       # extras by (end of the soft pin, object id)
    cdef uint32_t heap_size
    cdef Group* groups
    cdef uint32_t groups_used, groups_room, groups_free
    cdef mp_id_map by_hash    # the first group with a hash, + 1

    cdef bint reserve(self) noexcept nogil
    cdef Extra* of(self, Object* record) noexcept nogil
    cdef void attach(self, uint32_t index, uint64_t soft_pin_end_ms, uint64_t group) noexcept nogil
    cdef void detach(self, uint32_t index) noexcept nogil
    cdef void hold_soft(self, uint32_t index, uint64_t soft_pin_end_ms) noexcept nogil
    cdef void release_soft(self, uint32_t index) noexcept nogil
    cdef uint32_t ended_pin(self, uint64_t now_ms) noexcept nogil
    cdef Group* group_of(self, Object* record) noexcept nogil
    cdef void clear(self) noexcept nogil
    cdef uint64_t memory_bytes(self) noexcept nogil
    cdef int check(self) except -1

    cdef bint ends_before(self, uint32_t a, uint32_t b) noexcept nogil
    cdef void settle(self, uint32_t at) noexcept nogil
    cdef void join(self, uint32_t at, uint64_t group) noexcept nogil
    cdef void leave(self, uint32_t at) noexcept nogil
