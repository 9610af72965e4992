"""Sets of (holder, tier), each distinct set kept once and known by a number.

Theory of operation. A block is held by a set of holders. There are millions of blocks and few distinct sets, because
blocks come and go by whole chains: so a block keeps the number of its set (4 bytes), however many holders there are,
and two blocks held alike are seen to be so by comparing two numbers. A change (holder h now holds this block in tier
t) leads from one set to another; the last changes are remembered in a small table, so that a chain of blocks pays for
one. Sets are found by a digest, the sum of one stamp for each member, which a change updates in O(1); equality is
then proved on the members themselves. A set without references stays *idle* for a while, since blocks of a chain
leave it and others join it in turn; `sweep` frees idle sets when there are more than half as many as live ones.

Set 0 is the empty one. Numbers are reused only after a sweep, which also forgets the remembered changes.
The twin is a Python frozenset for each block (moonpool.native.table.reference).
"""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree, PyMem_RawMalloc, PyMem_RawRealloc
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from moonpool.errors import InternalError, OutOfMemory, UsageError

cdef extern from "mixing.h" nogil:
    uint64_t mp_scatter(uint64_t x)
    int mp_lowest_bit(uint64_t x)

cdef enum:
    SETS_AT_FIRST = 64
    IDLE_AT_LEAST = 1024   # idle sets that no sweep is worth
    RECORD_BYTES = 40      # of a set besides its members: its record, its bucket, its place in the free list


@cython.final
cdef class HolderSets:
    """The sets of one table. Not thread-safe: the table's mutex covers it."""

    def __cinit__(self, uint32_t holders_max, uint64_t bytes_max):
        if not 1 <= holders_max <= 1 << 22:
            raise UsageError("holders_max must be from 1 to 4194304", field="holders_max")
        self.holders_max = holders_max
        self.bytes_max = bytes_max
        self.capacity = SETS_AT_FIRST
        self.heads_mask = SETS_AT_FIRST - 1
        self.used = 1  # set 0, the empty one
        self.sets = <HolderSet*>PyMem_RawCalloc(self.capacity, sizeof(HolderSet))
        self.heads = <uint32_t*>PyMem_RawCalloc(self.capacity, sizeof(uint32_t))
        self.transitions = <Transition*>PyMem_RawCalloc(TRANSITIONS, sizeof(Transition))
        # A change adds at most one chunk to those that all holders fill.
        self.scratch = <Chunk*>PyMem_RawCalloc(holders_max // HOLDERS_PER_CHUNK + 2, sizeof(Chunk))
        if not (self.sets and self.heads and self.transitions and self.scratch):
            raise OutOfMemory("no memory for the sets of holders")

    def __dealloc__(self):
        cdef uint32_t i
        if self.sets:
            for i in range(self.used):
                PyMem_RawFree(self.sets[i].chunks)
        PyMem_RawFree(self.sets)
        PyMem_RawFree(self.heads)
        PyMem_RawFree(self.transitions)
        PyMem_RawFree(self.scratch)

    cdef uint32_t changed(self, uint32_t base, uint32_t holder, uint32_t change) noexcept nogil:
        """The set that `base` becomes; NO_SET where it cannot be made. `change` is HOLD or RELEASE plus a tier.

        `base` must be referenced or empty; the result has no new reference yet.
        """
        cdef uint64_t key = (<uint64_t>holder << 3 | change) + 1
        cdef uint64_t spread = (key * 0x9E3779B97F4A7C15u ^ base) * 0xD6E8FEB86659FD93u
        cdef Transition* known = &self.transitions[spread >> 54 & (TRANSITIONS - 1)]
        cdef uint32_t to
        if known.key == key and known.base == base:
            return known.to
        to = self.intern(base, holder, change)
        if to != NO_SET:
            known.key = key
            known.base = base
            known.to = to
        return to

    cdef uint32_t intern(self, uint32_t base, uint32_t holder, uint32_t change) noexcept nogil:
        cdef uint32_t word = holder // HOLDERS_PER_CHUNK, at = 0, count, kept
        cdef int tier, only = change % 4
        cdef uint64_t bit = <uint64_t>1 << (holder % HOLDERS_PER_CHUNK)
        cdef uint64_t digest, stamp
        cdef bint present, holding = change < RELEASE, differs = False
        cdef Chunk* chunks
        cdef Chunk one
        if self.idle > IDLE_AT_LEAST + self.live // 2:
            self.sweep()
        chunks = self.sets[base].chunks
        count = self.sets[base].count
        digest = self.sets[base].digest
        while at < count and chunks[at].word < word:
            at += 1
        present = at < count and chunks[at].word == word
        memset(&one, 0, sizeof(Chunk))
        if present:
            one = chunks[at]
        one.word = word
        for tier in range(TIERS):
            if only != tier and only != ALL_TIERS or (one.tiers[tier] & bit != 0) == holding:
                continue
            stamp = mp_scatter(<uint64_t>holder * TIERS + tier)
            digest += stamp if holding else 0 - stamp
            one.tiers[tier] ^= bit
            differs = True
        if not differs:
            return base
        kept = (one.tiers[0] | one.tiers[1] | one.tiers[2]) != 0
        if count:  # the empty set has no chunks to copy from
            memcpy(self.scratch, chunks, at * sizeof(Chunk))
            memcpy(self.scratch + at + kept, chunks + at + present, (count - at - present) * sizeof(Chunk))
        if kept:
            self.scratch[at] = one
        count = count - present + kept
        return self.find(digest, count) if count else EMPTY_SET

    cdef uint32_t find(self, uint64_t digest, uint32_t count) noexcept nogil:
        """The number of the set that lies in `scratch`, made if it is new."""
        cdef uint32_t found = self.heads[digest & self.heads_mask]
        while found != EMPTY_SET:
            if (self.sets[found].digest == digest and self.sets[found].count == count
                    and memcmp(self.sets[found].chunks, self.scratch, count * sizeof(Chunk)) == 0):
                return found
            found = self.sets[found].next
        return self.make(digest, count)

    cdef uint32_t make(self, uint64_t digest, uint32_t count) noexcept nogil:
        cdef size_t size = count * sizeof(Chunk)
        cdef uint32_t made
        cdef Chunk* chunks
        if not self.has_room(size):
            # Full of live sets is full: a sweep for each refusal would read them all again and again.
            if self.idle > self.live // 8:
                self.sweep()
            if not self.has_room(size):
                return NO_SET
        if self.free == EMPTY_SET and self.used == self.capacity and not self.grow():
            return NO_SET
        chunks = <Chunk*>PyMem_RawMalloc(size)
        if chunks == NULL:
            return NO_SET
        memcpy(chunks, self.scratch, size)
        if self.free != EMPTY_SET:
            made = self.free
            self.free = self.sets[made].next
        else:
            made = self.used
            self.used += 1
        self.sets[made].digest = digest
        self.sets[made].chunks = chunks
        self.sets[made].count = count
        self.sets[made].references = 0
        self.chunk_bytes += size
        self.idle += 1
        self.link(made)
        return made

    cdef bint has_room(self, size_t size) noexcept nogil:
        """Whether one more set, with `size` bytes of members, stays within the bound."""
        return self.chunk_bytes + size + (<uint64_t>self.live + self.idle + 1) * RECORD_BYTES <= self.bytes_max

    cdef void link(self, uint32_t made) noexcept nogil:
        cdef uint32_t* head = &self.heads[self.sets[made].digest & self.heads_mask]
        self.sets[made].next = head[0]
        head[0] = made

    cdef bint grow(self) noexcept nogil:
        """Doubles the room for sets and the buckets; False without memory, and then nothing has changed."""
        cdef uint32_t capacity = self.capacity * 2, i
        cdef uint32_t* heads
        cdef HolderSet* sets
        if self.capacity >= 1u << 30:
            return False
        heads = <uint32_t*>PyMem_RawCalloc(capacity, sizeof(uint32_t))
        if heads == NULL:
            return False
        sets = <HolderSet*>PyMem_RawRealloc(self.sets, capacity * sizeof(HolderSet))
        if sets == NULL:
            PyMem_RawFree(heads)
            return False
        memset(sets + self.capacity, 0, (capacity - self.capacity) * sizeof(HolderSet))
        PyMem_RawFree(self.heads)
        self.sets, self.heads = sets, heads
        self.capacity, self.heads_mask = capacity, capacity - 1
        for i in range(1, self.used):
            if sets[i].chunks:
                self.link(i)
        return True

    cdef void take(self, uint32_t found) noexcept nogil:
        """One more slot holds the set."""
        if found == EMPTY_SET:
            return
        if self.sets[found].references == 0:
            self.idle -= 1
            self.live += 1
        self.sets[found].references += 1

    cdef void drop(self, uint32_t found) noexcept nogil:
        """One slot fewer holds the set."""
        if found == EMPTY_SET:
            return
        self.sets[found].references -= 1
        if self.sets[found].references == 0:
            self.idle += 1
            self.live -= 1

    cdef void sweep(self) noexcept nogil:
        """Frees every idle set and forgets the remembered changes: O(sets)."""
        cdef uint32_t i
        cdef HolderSet* one
        memset(self.transitions, 0, TRANSITIONS * sizeof(Transition))
        memset(self.heads, 0, (<size_t>self.heads_mask + 1) * sizeof(uint32_t))
        self.free = EMPTY_SET
        for i in range(1, self.used):
            one = &self.sets[i]
            if one.references:
                self.link(i)
                continue
            if one.chunks:
                self.chunk_bytes -= one.count * sizeof(Chunk)
                PyMem_RawFree(one.chunks)
                one.chunks = NULL
                self.idle -= 1
            one.next = self.free
            self.free = i

    cdef uint32_t tiers_of(self, uint32_t found, uint32_t holder) noexcept nogil:
        """The tiers, as bits, in which the holder is a member."""
        cdef HolderSet* one = &self.sets[found]
        cdef uint32_t i, tiers = 0
        cdef int tier
        for i in range(one.count):
            if one.chunks[i].word == holder // HOLDERS_PER_CHUNK:
                for tier in range(TIERS):
                    tiers |= <uint32_t>(one.chunks[i].tiers[tier] >> (holder % HOLDERS_PER_CHUNK) & 1) << tier
        return tiers

    cdef uint64_t memory_bytes(self) noexcept nogil:
        return (
            self.chunk_bytes
            + self.capacity * sizeof(HolderSet)
            + (<uint64_t>self.heads_mask + 1) * sizeof(uint32_t)
            + TRANSITIONS * sizeof(Transition)
            + (self.holders_max // HOLDERS_PER_CHUNK + 2) * sizeof(Chunk)
        )

    cdef int check(self) except -1:
        """Asserts the invariants, given the references counted by the table in each set's `counted`."""
        cdef uint32_t i, j, live = 0, idle = 0
        cdef uint64_t held = 0
        seen = set()
        for i in range(1, self.used):
            if self.sets[i].chunks == NULL:
                require(self.sets[i].references == 0, "a freed set of holders is referenced")
                continue
            require(self.sets[i].counted == self.sets[i].references, "a set's references are not its blocks")
            require(self.sets[i].count > 0, "a set without members is not set 0")
            live += self.sets[i].references != 0
            idle += self.sets[i].references == 0
            held += self.sets[i].count * sizeof(Chunk)
            members = PyBytes_FromStringAndSize(<char*>self.sets[i].chunks, self.sets[i].count * sizeof(Chunk))
            require(members not in seen, "two sets have the same members")
            seen.add(members)
            require(digest_of(&self.sets[i]) == self.sets[i].digest, "a set's digest is not that of its members")
            for j in range(1, self.sets[i].count):
                require(self.sets[i].chunks[j - 1].word < self.sets[i].chunks[j].word, "a set's chunks are unsorted")
        require((live, idle) == (self.live, self.idle), "live or idle sets are miscounted")
        require(held == self.chunk_bytes, "the bytes of the sets are miscounted")
        return 0


cdef uint64_t digest_of(HolderSet* one) noexcept nogil:
    """The sum of the members' stamps, from nothing."""
    cdef uint64_t digest = 0, bits
    cdef uint32_t i
    cdef int tier
    for i in range(one.count):
        for tier in range(TIERS):
            bits = one.chunks[i].tiers[tier]
            while bits:
                digest += mp_scatter(
                    (<uint64_t>one.chunks[i].word * HOLDERS_PER_CHUNK + mp_lowest_bit(bits)) * TIERS + tier
                )
                bits &= bits - 1
    return digest


cdef int require(bint holds, str message) except -1:
    if not holds:
        raise InternalError(message)
    return 0
