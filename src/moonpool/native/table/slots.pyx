"""Blocks by (context, key): slots of 16 bytes, found through buckets of 8 (open addressing, linear probing).

Theory of operation. New blocks take slots one behind another, so the blocks of a chain, which arrive together, lie
together: a caller that has found one block looks into the slot behind it first (one comparison, in the same cache
line) and comes here only when that fails. Freed slots are given out last in, first out: engines evict a chain from its
tail, so what is freed backwards is filled forwards. A bucket keeps 32 bits of the key's hash: other keys in the way
are passed over without touching their slots, and deletion (which shifts the following buckets back, so that there are
no tombstones) and growth never read a slot. The hash is a multiply-and-fold under a random seed, because keys come
from the network.

Bytes for each block: 16 to 24 in slots, 10.7 to 21.3 in buckets (at most 3/4 full); memory does not shrink.
"""

cimport cython
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree, PyMem_RawRealloc
from libc.stdint cimport uint32_t, uint64_t

from moonpool.native.table.holder_sets cimport require

from moonpool.errors import OutOfMemory, UsageError

cdef extern from "mixing.h" nogil:
    uint64_t mp_fold(uint64_t a, uint64_t b)
    uint64_t mp_scatter(uint64_t x)
    void mp_prefetch(const void* p)

cdef enum:
    SLOTS_AT_FIRST = 64
    BUCKETS_AT_FIRST = 128


@cython.final
cdef class SlotMap:
    """The blocks of one table. Not thread-safe: the table's mutex covers it."""

    def __cinit__(self, uint64_t blocks_max, uint64_t seed):
        if not 1 <= blocks_max <= 1 << 30:
            raise UsageError("blocks_max must be from 1 to 1073741824", field="blocks_max")
        self.blocks_max = <uint32_t>blocks_max
        self.seed = seed
        self.free = NO_SLOT
        self.capacity = min(<uint32_t>SLOTS_AT_FIRST, self.blocks_max)
        self.mask = BUCKETS_AT_FIRST - 1
        self.slots = <Slot*>PyMem_RawCalloc(self.capacity, sizeof(Slot))
        self.buckets = <Bucket*>PyMem_RawCalloc(BUCKETS_AT_FIRST, sizeof(Bucket))
        if not (self.slots and self.buckets):
            raise OutOfMemory("no memory for the blocks of the index")

    def __dealloc__(self):
        PyMem_RawFree(self.slots)
        PyMem_RawFree(self.buckets)

    cdef Scope scope_of(self, uint32_t context) noexcept nogil:
        cdef Scope scope
        scope.context = context
        scope.factor = mp_scatter(self.seed ^ mp_scatter(context)) | 1
        return scope

    cdef uint32_t find(self, Scope* scope, uint64_t key) noexcept nogil:
        """The block's slot, or NO_SLOT."""
        cdef uint32_t tag = <uint32_t>mp_fold(key ^ self.seed, scope.factor)
        cdef uint64_t at = tag & self.mask
        cdef Slot* slot
        while self.buckets[at].slot:
            if self.buckets[at].tag == tag:
                slot = &self.slots[self.buckets[at].slot - 1]
                if slot.key == key and slot.context == scope.context:
                    return self.buckets[at].slot - 1
            at = (at + 1) & self.mask
        return NO_SLOT

    cdef uint32_t insert(self, Scope* scope, uint64_t key, uint32_t holders) noexcept nogil:
        """A slot for a block that has none; NO_SLOT when there are blocks_max, or no memory."""
        cdef uint32_t slot, tag = <uint32_t>mp_fold(key ^ self.seed, scope.factor)
        cdef uint64_t at
        if self.live == self.blocks_max:
            return NO_SLOT
        if <uint64_t>self.live * 4 >= (self.mask + 1) * 3 and not self.grow_buckets():
            return NO_SLOT
        if self.free != NO_SLOT:
            slot = self.free
            self.free = <uint32_t>self.slots[slot].key
        elif self.used < self.capacity or self.grow_slots():
            slot = self.used
            self.used += 1
        else:
            return NO_SLOT
        at = tag & self.mask
        while self.buckets[at].slot:
            at = (at + 1) & self.mask
        self.buckets[at].slot = slot + 1
        self.buckets[at].tag = tag
        self.slots[slot].key = key
        self.slots[slot].context = scope.context
        self.slots[slot].holders = holders
        self.live += 1
        return slot

    cdef void remove(self, uint32_t slot) noexcept nogil:
        """Frees a live slot; the buckets behind its own move up where their keys may stand there."""
        cdef Scope scope = self.scope_of(self.slots[slot].context)
        cdef uint64_t hole = <uint32_t>mp_fold(self.slots[slot].key ^ self.seed, scope.factor) & self.mask
        cdef uint64_t at
        while self.buckets[hole].slot != slot + 1:
            hole = (hole + 1) & self.mask
        at = (hole + 1) & self.mask
        while self.buckets[at].slot:
            # At home behind the hole? Then it must stay: a look-up would not pass over the hole.
            if ((at - self.buckets[at].tag) & self.mask) >= ((at - hole) & self.mask):
                self.buckets[hole] = self.buckets[at]
                hole = at
            at = (at + 1) & self.mask
        self.buckets[hole].slot = 0
        self.slots[slot].holders = 0
        self.slots[slot].key = self.free
        self.free = slot
        self.live -= 1

    cdef void look_ahead(self, Scope* scope, const uint64_t* keys, Py_ssize_t at, Py_ssize_t count) noexcept nogil:
        """Fetches what the look-ups after `at` will read: the bucket of one, the slot of another that is nearer."""
        cdef Bucket* bucket
        if at + LOOK_AHEAD < count:
            mp_prefetch(&self.buckets[<uint32_t>mp_fold(keys[at + LOOK_AHEAD] ^ self.seed, scope.factor) & self.mask])
        if at + LOOK_AHEAD // 2 < count:
            bucket = &self.buckets[<uint32_t>mp_fold(keys[at + LOOK_AHEAD // 2] ^ self.seed, scope.factor) & self.mask]
            if bucket.slot:
                mp_prefetch(&self.slots[bucket.slot - 1])

    cdef void look_ahead_to(self, uint32_t slot) noexcept nogil:
        """Fetches the bucket of a block that is about to be removed."""
        cdef Scope scope = self.scope_of(self.slots[slot].context)
        mp_prefetch(&self.buckets[<uint32_t>mp_fold(self.slots[slot].key ^ self.seed, scope.factor) & self.mask])

    cdef bint grow_slots(self) noexcept nogil:
        cdef uint64_t capacity = min(<uint64_t>self.capacity + self.capacity // 2, <uint64_t>self.blocks_max)
        cdef Slot* slots
        if capacity == self.capacity:
            return False
        slots = <Slot*>PyMem_RawRealloc(self.slots, capacity * sizeof(Slot))
        if slots == NULL:
            return False
        self.slots = slots
        self.capacity = <uint32_t>capacity
        return True

    cdef bint grow_buckets(self) noexcept nogil:
        cdef uint64_t mask = self.mask * 2 + 1, i, at
        cdef Bucket* buckets = <Bucket*>PyMem_RawCalloc(mask + 1, sizeof(Bucket))
        if buckets == NULL:
            return False
        for i in range(self.mask + 1):
            if self.buckets[i].slot:
                at = self.buckets[i].tag & mask
                while buckets[at].slot:
                    at = (at + 1) & mask
                buckets[at] = self.buckets[i]
        PyMem_RawFree(self.buckets)
        self.buckets = buckets
        self.mask = mask
        return True

    cdef uint64_t memory_bytes(self) noexcept nogil:
        return <uint64_t>self.capacity * sizeof(Slot) + (self.mask + 1) * sizeof(Bucket)

    cdef int check(self) except -1:
        """Asserts that buckets and live slots are the same blocks, each findable, and that the rest is free."""
        cdef uint32_t slot, live = 0, freed = 0
        cdef uint64_t at, filled = 0
        cdef Scope scope
        require(self.used <= self.capacity <= self.blocks_max, "the slots outgrew their bound")
        for slot in range(self.used):
            if self.slots[slot].holders:
                live += 1
                scope = self.scope_of(self.slots[slot].context)
                require(self.find(&scope, self.slots[slot].key) == slot, "a block is not found where it is")
        for at in range(self.mask + 1):
            filled += self.buckets[at].slot != 0
        slot = self.free
        while slot != NO_SLOT:
            require(slot < self.used and self.slots[slot].holders == 0 and freed < self.used, "the free list is broken")
            freed += 1
            slot = <uint32_t>self.slots[slot].key
        require(live == self.live == filled, "slots, buckets and their count disagree")
        require(live + freed == self.used, "a slot is neither live nor free")
        require(filled * 4 <= (self.mask + 1) * 3, "the buckets are too full")
        return 0
