"""Blocks by (context, key), for other native modules (see slots.pyx)."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

cdef enum:
    NO_SLOT = 0xFFFFFFFF
    LOOK_AHEAD = 8          # keys between the first prefetch for a look-up and the look-up

cdef struct Slot:           # one block; free when holders is 0, and key then leads to the next free one
    uint64_t key
    uint32_t context
    uint32_t holders        # number of its set of holders

cdef struct Bucket:         # empty when slot is 0
    uint32_t slot           # index + 1
    uint32_t tag            # low half of the key's hash; its low bits are the bucket's number

cdef struct Scope:          # a context as look-ups need it
    uint32_t context
    uint64_t factor


@cython.final
cdef class SlotMap:
    cdef Slot* slots
    cdef Bucket* buckets
    cdef uint32_t used, capacity, free, live, blocks_max
    cdef uint64_t mask
    cdef uint64_t seed

    cdef Scope scope_of(self, uint32_t context) noexcept nogil
    cdef uint32_t find(self, Scope* scope, uint64_t key) noexcept nogil
    cdef uint32_t insert(self, Scope* scope, uint64_t key, uint32_t holders) noexcept nogil
    cdef void remove(self, uint32_t slot) noexcept nogil
    cdef void look_ahead(self, Scope* scope, const uint64_t* keys, Py_ssize_t at, Py_ssize_t count) noexcept nogil
    cdef void look_ahead_to(self, uint32_t slot) noexcept nogil
    cdef uint64_t memory_bytes(self) noexcept nogil
    cdef bint grow_slots(self) noexcept nogil
    cdef bint grow_buckets(self) noexcept nogil
    cdef int check(self) except -1

# Whether this key is in slot `at`: the guess that comes before a look-up.
cdef inline bint stands_at(SlotMap map, uint32_t at, Scope* scope, uint64_t key) noexcept nogil:
    return (at < map.used and map.slots[at].key == key and map.slots[at].context == scope.context
            and map.slots[at].holders != 0)
