"""Records of complete objects, found by (tenant, key): 64 bytes each, and their keys.

Theory of operation. A record never moves while it lives: records are in chunks of 4,096, so growth copies nothing.
Keys are in cells of 8 bytes, chunked likewise; freed cells are kept by length and given out again. The hash index
is 64 shards of open addressing (linear probing, 8-byte buckets that keep 32 bits of the hash, deletion by
X
The hash is XXH3-64 under a secret seed, since keys come from the network.

Bytes for each object: 64, its key rounded up to 8, and 10.7 to 21.3 in buckets (at most 3/4 full). Memory does not
shrink. Freed records are given out last in, first out.
"""

cimport cython
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree, PyMem_RawMalloc, PyMem_RawRealloc
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from moonpool.errors import InternalError, UsageError

cdef extern from *:
    """
    #define XXH_INLINE_ALL
    #include <xxhash.h>
    """
    uint64_t XXH3_64bits_withSeed(const void* data, size_t size, uint64_t seed) nogil

cdef extern from "mixing.h" nogil:
    uint64_t mp_scatter(uint64_t x)
    void mp_prefetch(const void* p)

cdef enum:
    BUCKETS_AT_FIRST = 8
    SHARD_SHIFT = 58


cdef int require(bint true, str what) except -1:
    """Asserts an invariant."""
    if not true:
        raise InternalError(what)
    return 0


@cython.final
cdef class ObjectRecords:
    """At most `objects_max` records. Not thread-safe."""

    def __cinit__(self, objects_max, uint64_t seed):
        if not 1 <= objects_max <= 1 << 30:
            raise UsageError("objects_max must be from 1 to 2^30", field="objects_max", value=str(objects_max))
        self.objects_max = objects_max
        self.seed = seed
        self.free = NO_RECORD
        memset(self.free_cells, 0xFF, sizeof(self.free_cells))

    def __dealloc__(self):
        self.clear()

    cdef void clear(self) noexcept nogil:
        """Forgets everything."""
        cdef uint32_t at
        for at in range(self.chunk_count):
            PyMem_RawFree(self.chunks[at])
        for at in range(self.cell_chunks):
            PyMem_RawFree(self.cells[at])
        for at in range(<uint32_t>SHARDS):
            PyMem_RawFree(self.shards[at].buckets)
        PyMem_RawFree(self.chunks)
        PyMem_RawFree(self.cells)
        memset(self.shards, 0, sizeof(self.shards))
        memset(self.free_cells, 0xFF, sizeof(self.free_cells))
        self.chunks = NULL
        self.cells = NULL
        self.chunk_count = self.chunk_room = self.cell_chunks = self.cell_room = self.cells_used = 0
        self.used = self.live = 0
        self.free = NO_RECORD

    cdef uint64_t hash_of(self, uint32_t tenant, const uint8_t* key, size_t key_bytes) noexcept nogil:
        return XXH3_64bits_withSeed(key, key_bytes, self.seed ^ mp_scatter(tenant))

    cdef void look_ahead(self, uint64_t hash) noexcept nogil:
        """Fetches the bucket that `find` will read first."""
        cdef Shard* shard = &self.shards[hash >> SHARD_SHIFT]
        if shard.buckets != NULL:
            mp_prefetch(&shard.buckets[<uint32_t>hash & shard.mask])

    cdef uint32_t guess(self, uint64_t hash) noexcept nogil:
        """The object that the first bucket of a hash names, which is most often the right one, or NO_RECORD."""
        cdef Shard* shard = &self.shards[hash >> SHARD_SHIFT]
        if shard.buckets == NULL:
            return NO_RECORD
        return shard.buckets[<uint32_t>hash & shard.mask].object - 1

    cdef uint32_t find(self, uint64_t hash, uint32_t tenant, const uint8_t* key, size_t key_bytes) noexcept nogil:
        """The index of an object, or NO_RECORD. `hash` is that of the key."""
        cdef Shard* shard = &self.shards[hash >> SHARD_SHIFT]
        cdef uint32_t tag = <uint32_t>hash, at
        cdef Object* record
        if shard.buckets == NULL:
            return NO_RECORD
        at = tag & shard.mask
        while shard.buckets[at].object:
            if shard.buckets[at].tag == tag:
                record = object_at(self, shard.buckets[at].object - 1)
                if (record.key_bytes == key_bytes and record.tenant == tenant
                        and memcmp(cell_at(self, record.key), key, key_bytes) == 0):
                    return shard.buckets[at].object - 1
            at = (at + 1) & shard.mask
        return NO_RECORD

    cdef bint reserve(self, uint64_t hash, size_t key_bytes) noexcept nogil:
        """Makes room for one object with this key: False without memory, and then nothing has changed."""
        cdef Shard* shard = &self.shards[hash >> SHARD_SHIFT]
        cdef uint32_t count = <uint32_t>((key_bytes + CELL_BYTES - 1) // CELL_BYTES)
        if (shard.buckets == NULL or (<uint64_t>shard.count + 1) * 4 > (<uint64_t>shard.mask + 1) * 3) \
                and not self.grow_shard(shard):
            return False
        if self.free == NO_RECORD and self.used >> RECORD_SHIFT == self.chunk_count and not self.add_record_chunk():
            return False
        if self.free_cells[count] != NO_RECORD or self.cells_used + count <= self.cell_chunks << CELL_SHIFT:
            return True
        return self.add_cell_chunk()

    cdef uint32_t insert(self, uint64_t hash, uint32_t tenant, const uint8_t* key, size_t key_bytes) noexcept nogil:
        """A new record for a key that has none, after `reserve`; the caller sets object_id and the other fields."""
        cdef Shard* shard = &self.shards[hash >> SHARD_SHIFT]
        cdef uint32_t index = self.free, at = <uint32_t>hash & shard.mask
        cdef Object* record
        if index != NO_RECORD:
            self.free = object_at(self, index).key
        else:
            index = self.used
            self.used += 1
        while shard.buckets[at].object:
            at = (at + 1) & shard.mask
        shard.buckets[at].object = index + 1
        shard.buckets[at].tag = <uint32_t>hash
        shard.count += 1
        self.live += 1
        record = object_at(self, index)
        memset(record, 0, sizeof(Object))
        record.tenant = tenant
        record.key_bytes = <uint16_t>key_bytes
        record.key = self.give_cells(<uint32_t>((key_bytes + CELL_BYTES - 1) // CELL_BYTES))
        record.place = record.extra = NO_RECORD
        memcpy(cell_at(self, record.key), key, key_bytes)
        return index

    cdef void remove(self, uint32_t index) noexcept nogil:
        """Frees a live record and its key; the buckets behind its own move up where their keys may stand there."""
        cdef Object* record = object_at(self, index)
        cdef uint64_t hash = self.hash_of(record.tenant, cell_at(self, record.key), record.key_bytes)
        cdef Shard* shard = &self.shards[hash >> SHARD_SHIFT]
        cdef uint32_t hole = <uint32_t>hash & shard.mask, at
        while shard.buckets[hole].object != index + 1:
            hole = (hole + 1) & shard.mask
        at = (hole + 1) & shard.mask
        while shard.buckets[at].object:
            if ((at - shard.buckets[at].tag) & shard.mask) >= ((at - hole) & shard.mask):
                shard.buckets[hole] = shard.buckets[at]
                hole = at
            at = (at + 1) & shard.mask
        shard.buckets[hole].object = 0
        shard.count -= 1
        self.free_cells_at(record.key, (record.key_bytes + CELL_BYTES - 1) // CELL_BYTES)
        record.object_id = 0
        record.key = self.free
        self.free = index
        self.live -= 1

    cdef bint grow_shard(self, Shard* shard) noexcept nogil:
        cdef uint32_t size = (shard.mask + 1) * 2 if shard.buckets != NULL else <uint32_t>BUCKETS_AT_FIRST
        cdef uint32_t i, at
        cdef Bucket* buckets = <Bucket*>PyMem_RawCalloc(size, sizeof(Bucket))
        if buckets == NULL:
            return False
        if shard.buckets != NULL:
            for i in range(shard.mask + 1):
                if shard.buckets[i].object:
                    at = shard.buckets[i].tag & (size - 1)
                    while buckets[at].object:
                        at = (at + 1) & (size - 1)
                    buckets[at] = shard.buckets[i]
        PyMem_RawFree(shard.buckets)
        shard.buckets = buckets
        shard.mask = size - 1
        return True

    cdef bint add_record_chunk(self) noexcept nogil:
        cdef void* grown
        if self.chunk_count == self.chunk_room:
            grown = PyMem_RawRealloc(self.chunks, (self.chunk_room * 2 + 16) * sizeof(Object*))
            if grown == NULL:
                return False
            self.chunks = <Object**>grown
            self.chunk_room = self.chunk_room * 2 + 16
        self.chunks[self.chunk_count] = <Object*>PyMem_RawCalloc(1 << RECORD_SHIFT, sizeof(Object))
        if self.chunks[self.chunk_count] == NULL:
            return False
        self.chunk_count += 1
        return True

    cdef bint add_cell_chunk(self) noexcept nogil:
        """A new chunk of cells; the rest of the last one is kept as free cells."""
        cdef uint32_t rest = (self.cell_chunks << CELL_SHIFT) - self.cells_used
        cdef void* grown
        if self.cell_chunks == 1 << (32 - CELL_SHIFT) - 1:
            return False
        if self.cell_chunks == self.cell_room:
            grown = PyMem_RawRealloc(self.cells, (self.cell_room * 2 + 16) * sizeof(uint8_t*))
            if grown == NULL:
                return False
            self.cells = <uint8_t**>grown
            self.cell_room = self.cell_room * 2 + 16
        self.cells[self.cell_chunks] = <uint8_t*>PyMem_RawMalloc(CELL_BYTES << CELL_SHIFT)
        if self.cells[self.cell_chunks] == NULL:
            return False
        self.cell_chunks += 1
        if rest:
            self.free_cells_at(self.cells_used, rest)
            self.cells_used += rest
        return True

    cdef uint32_t give_cells(self, uint32_t count) noexcept nogil:
        """The first of so many cells in a row, after `reserve`."""
        cdef uint32_t first = self.free_cells[count]
        if first != NO_RECORD:
            memcpy(&self.free_cells[count], cell_at(self, first), sizeof(uint32_t))
            return first
        first = self.cells_used
        self.cells_used += count
        return first

    cdef void free_cells_at(self, uint32_t first, uint32_t count) noexcept nogil:
        memcpy(cell_at(self, first), &self.free_cells[count], sizeof(uint32_t))
        self.free_cells[count] = first

    cdef uint64_t memory_bytes(self) noexcept nogil:
        cdef uint64_t total = <uint64_t>self.used * sizeof(Object) + <uint64_t>self.cells_used * CELL_BYTES
        cdef uint32_t at
        for at in range(<uint32_t>SHARDS):
            if self.shards[at].buckets != NULL:
                total += (<uint64_t>self.shards[at].mask + 1) * sizeof(Bucket)
        return total + <uint64_t>(self.chunk_room + self.cell_room) * sizeof(void*)

    cdef int check(self) except -1:
        """Asserts that buckets and live records are the same objects, and that the rest is free."""
        cdef uint32_t index, live = 0, freed = 0, at, b
        cdef uint64_t hash, filled = 0, counted = 0, cells = 0
        cdef Object* record
        require(self.used <= self.objects_max and self.used <= self.chunk_count << RECORD_SHIFT, "too many records")
        for index in range(self.used):
            record = object_at(self, index)
            if record.object_id:
                live += 1
                cells += (record.key_bytes + CELL_BYTES - 1) // CELL_BYTES
                require(record.key + (record.key_bytes + CELL_BYTES - 1) // CELL_BYTES <= self.cells_used,
                        "a key lies outside of the cells")
                hash = self.hash_of(record.tenant, cell_at(self, record.key), record.key_bytes)
                require(self.find(hash, record.tenant, cell_at(self, record.key), record.key_bytes) == index,
                        "an object is not found by its key")
        for at in range(<uint32_t>SHARDS):
            counted += self.shards[at].count
            if self.shards[at].buckets != NULL:
                for b in range(self.shards[at].mask + 1):
                    filled += self.shards[at].buckets[b].object != 0
        index = self.free
        while index != NO_RECORD:
            require(index < self.used and object_at(self, index).object_id == 0 and freed < self.used,
                    "the free records are broken")
            freed += 1
            index = object_at(self, index).key
        for b in range(1, <uint32_t>CELLS_OF_KEY + 1):
            at = self.free_cells[b]
            while at != NO_RECORD:
                cells += b
                require(at + b <= self.cells_used and cells <= self.cells_used, "the free cells are broken")
                memcpy(&at, cell_at(self, at), sizeof(uint32_t))
        require(live == self.live and live == filled and live == counted, "records and buckets disagree")
        require(live + freed == self.used, "a record is neither live nor free")
        require(cells == self.cells_used, "a cell is neither a key's nor free")
        return 0
