"""Records of complete objects by (tenant, key), for other native modules (see object_records.pyx)."""

cimport cython
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

cdef enum:
    NO_RECORD = 0xFFFFFFFF
    RECORD_SHIFT = 12         # records are in chunks of 4,096, cells of keys in chunks of 8,192
    CELL_SHIFT = 13
    CELL_BYTES = 8
    CELLS_OF_KEY = 128        # the longest key
    SHARDS = 64

cdef enum:
    PIN_NONE = 0
    PIN_SOFT = 1
    PIN_HARD = 2

cdef struct Object:           # 64 bytes; free when object_id is 0, and key then is the next free one
    uint64_t object_id
    uint64_t lease_until
    uint64_t size
    uint8_t digest[16]
    uint32_t tenant
    uint32_t key              # its first cell
    uint32_t place            # its first place, or NO_RECORD
    uint32_t extra            # or NO_RECORD: see object_extras
    uint16_t key_bytes
    uint8_t object_type
    uint8_t pin
    uint8_t places
    bint soft                 # a soft pin that still holds

cdef struct Bucket:           # empty when object is 0
    uint32_t object           # index + 1
    uint32_t tag              # low half of the hash; its low bits are the bucket's number

cdef struct Shard:
    Bucket* buckets
    uint32_t mask
    uint32_t count


@cython.final
cdef class ObjectRecords:
    cdef Object** chunks
    cdef uint32_t chunk_count, chunk_room
    cdef uint32_t used, free, live
    cdef readonly uint32_t objects_max
    cdef uint64_t seed
    cdef Shard shards[SHARDS]
    cdef uint8_t** cells
    cdef uint32_t cell_chunks, cell_room, cells_used
    cdef uint32_t free_cells[CELLS_OF_KEY + 1]

    cdef uint64_t hash_of(self, uint32_t tenant, const uint8_t* key, size_t key_bytes) noexcept nogil
    cdef void look_ahead(self, uint64_t hash) noexcept nogil
    cdef uint32_t guess(self, uint64_t hash) noexcept nogil
    cdef uint32_t find(self, uint64_t hash, uint32_t tenant, const uint8_t* key, size_t key_bytes) noexcept nogil
    cdef bint reserve(self, uint64_t hash, size_t key_bytes) noexcept nogil
    cdef uint32_t insert(self, uint64_t hash, uint32_t tenant, const uint8_t* key, size_t key_bytes) noexcept nogil
    cdef void remove(self, uint32_t index) noexcept nogil
    cdef void clear(self) noexcept nogil
    cdef uint64_t memory_bytes(self) noexcept nogil
    cdef int check(self) except -1

    cdef bint grow_shard(self, Shard* shard) noexcept nogil
    cdef bint add_record_chunk(self) noexcept nogil
    cdef bint add_cell_chunk(self) noexcept nogil
    cdef uint32_t give_cells(self, uint32_t count) noexcept nogil
    cdef void free_cells_at(self, uint32_t first, uint32_t count) noexcept nogil

cdef inline Object* object_at(ObjectRecords records, uint32_t index) noexcept nogil:
    return &records.chunks[index >> RECORD_SHIFT][index & ((1 << RECORD_SHIFT) - 1)]

cdef inline uint8_t* cell_at(ObjectRecords records, uint32_t cell) noexcept nogil:
    return records.cells[cell >> CELL_SHIFT] + (cell & ((1 << CELL_SHIFT) - 1)) * CELL_BYTES

cdef inline bint is_live(ObjectRecords records, uint64_t index) noexcept nogil:
    return index < records.used and object_at(records, <uint32_t>index).object_id != 0

cdef int require(bint true, str what) except -1
