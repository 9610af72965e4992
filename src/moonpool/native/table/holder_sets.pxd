"""Interned sets of holders, for other native modules (see holder_sets.pyx)."""

cimport cython
from libc.stdint cimport uint8_t, uint32_t, uint64_t

cdef enum:
    TIERS = 3
    ALL_TIERS = 3           # as a tier: every tier
    HOLDERS_PER_CHUNK = 64
    EMPTY_SET = 0
    NO_SET = 0xFFFFFFFF     # the set cannot be made: out of memory, or of the bound
    TRANSITIONS = 1024      # remembered, a power of two

cdef enum Change:
    HOLD = 0
    RELEASE = 4

cdef struct Chunk:          # 64 holders of a set, tier by tier; never all zero
    uint32_t word           # holder // 64
    uint32_t spare          # zero, so that chunks compare as bytes
    uint64_t tiers[TIERS]

cdef struct HolderSet:
    uint64_t digest         # sum of the members' stamps
    Chunk* chunks           # `count` of them, by ascending word
    uint32_t count
    uint32_t references     # slots that hold this set; 0: idle, or free when chunks is NULL
    uint32_t next           # in the digest's bucket, or in the free list
    uint32_t counted        # scratch of check()

cdef struct Transition:     # one remembered change: key is (base, holder, change), never 0
    uint64_t key
    uint32_t base
    uint32_t to


@cython.final
cdef class HolderSets:
    cdef HolderSet* sets
    cdef uint32_t* heads
    cdef Transition* transitions
    cdef Chunk* scratch
    cdef uint32_t capacity, used, free, idle, live, heads_mask
    cdef uint32_t holders_max
    cdef uint64_t chunk_bytes, bytes_max

    cdef uint32_t changed(self, uint32_t base, uint32_t holder, uint32_t change) noexcept nogil
    cdef void take(self, uint32_t found) noexcept nogil
    cdef void drop(self, uint32_t found) noexcept nogil
    cdef void sweep(self) noexcept nogil
    cdef uint32_t tiers_of(self, uint32_t found, uint32_t holder) noexcept nogil
    cdef uint64_t memory_bytes(self) noexcept nogil

    cdef uint32_t intern(self, uint32_t base, uint32_t holder, uint32_t change) noexcept nogil
    cdef uint32_t find(self, uint64_t digest, uint32_t count) noexcept nogil
    cdef uint32_t make(self, uint64_t digest, uint32_t count) noexcept nogil
    cdef bint has_room(self, size_t size) noexcept nogil
    cdef bint grow(self) noexcept nogil
    cdef void link(self, uint32_t made) noexcept nogil
    cdef int check(self) except -1

cdef int require(bint holds, str message) except -1
