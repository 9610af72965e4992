"""Places of objects in the recency queues of their segments, for other native modules (see recency.pyx)."""

cimport cython
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from moonpool.native.table.id_map cimport mp_id_map
from moonpool.native.table.object_records cimport NO_RECORD, RECORD_SHIFT, Object, ObjectRecords

cdef extern from "ghosts.h" nogil:
    ctypedef struct mp_ghosts:
        uint32_t count
        uint64_t bytes

cdef enum:
    SMALL = 0
    MAIN = 1
    SOFT = 2
    HELD = 3
    QUEUES = 4
    LRU = 0
    S3FIFO = 1
    SEGMENTS_MAX = 65535
    NO_SEGMENT = 0xFFFF

cdef struct PlaceRecord:      # 32 bytes; when free, next_place is the next free one
    uint64_t offset
    uint32_t object
    uint32_t slot
    uint32_t next_place       # of the same object
    uint32_t older
    uint32_t newer
    uint16_t segment          # its number here, not its id
    uint8_t queue
    uint8_t uses              # two bits, and CHOSEN

cdef struct Queue:
    uint32_t oldest
    uint32_t newest
    uint64_t count
    uint64_t bytes

cdef struct SegmentQueues:
    Queue queues[QUEUES]
    mp_ghosts ghosts
    uint64_t capacity_bytes
    uint32_t segment_id
    uint32_t next_free        # number of the next free one, when free
    bint live


@cython.final
cdef class Recency:
    cdef ObjectRecords records
    cdef readonly int policy
    cdef readonly uint32_t ghosts_max
    cdef PlaceRecord** chunks
    cdef uint32_t chunk_count, chunk_room, used, free, live
    cdef SegmentQueues* segments
    cdef uint32_t segments_used, segments_room, segments_free
    cdef mp_id_map numbers                # by segment id, + 1
    cdef uint32_t walked                  # number of the segment that is searched, or NO_SEGMENT
    cdef uint32_t cursors[QUEUES]
    cdef uint64_t looks[QUEUES]
    cdef uint64_t small_bytes

    cdef uint32_t number_of(self, uint64_t segment_id) noexcept nogil
    cdef int add_segment(self, uint32_t segment_id, uint64_t capacity_bytes) except -1
    cdef void drop_segment(self, uint32_t number) noexcept nogil
    cdef bint reserve(self, uint32_t places) noexcept nogil
    cdef uint32_t link(self, uint32_t index, uint32_t number, int queue, uint64_t hash) noexcept nogil
    cdef void unlink(self, uint32_t place, uint64_t hash) noexcept nogil
    cdef void move(self, uint32_t place, int queue) noexcept nogil
    cdef void touch(self, uint32_t place) noexcept nogil
    cdef void begin_walk(self, uint32_t number) noexcept nogil
    cdef uint32_t next_entry(self, bint soft) noexcept nogil
    cdef bint gets_another_round(self, uint32_t place) noexcept nogil
    cdef void end_walk(self) noexcept nogil
    cdef void clear(self) noexcept nogil
    cdef uint64_t bytes_on(self, uint32_t number) noexcept nogil
    cdef uint64_t memory_bytes(self) noexcept nogil
    cdef int check(self) except -1

    cdef void append(self, uint32_t place, int queue) noexcept nogil
    cdef void take_out(self, uint32_t place) noexcept nogil
    cdef uint32_t pop(self, int queue) noexcept nogil

cdef inline PlaceRecord* place_at(Recency recency, uint32_t place) noexcept nogil:
    return &recency.chunks[place >> RECORD_SHIFT][place & ((1 << RECORD_SHIFT) - 1)]
