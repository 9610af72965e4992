"""What the hot methods read and change: tables, numbers, segments, limits (see hot_state.pyx)."""

cimport cython
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from moonpool.native.table.open_puts cimport OpenPuts
from moonpool.native.table.stored_objects cimport StoredObjects

cdef extern from "byte_log.h" nogil:
    ctypedef struct mp_log_mark:
        size_t end
        uint64_t sequence
        uint32_t node
    ctypedef struct mp_byte_log:
        uint8_t* data
        mp_log_mark* marks
        size_t length
        uint32_t count
    bint mp_log_reserve(mp_byte_log* log, uint32_t records, size_t bytes)
    void mp_log_close(mp_byte_log* log, const uint8_t* end, uint64_t sequence, uint32_t node)

cdef enum:
    UNSEEN = 255              # rank of a segment that readers are not told of
    SPECK_ROUNDS = 27

# Methods of a segment's Extents and DirectorySlots as C functions: without the GIL an object out of an array cannot be
# called by its name.
ctypedef int64_t (*give_extent_function)(void* extents, uint64_t size) noexcept nogil
ctypedef bint (*free_extent_function)(void* extents, uint64_t offset, uint64_t size) noexcept nogil
ctypedef uint32_t (*give_slot_function)(void* slots) noexcept nogil
ctypedef bint (*free_slot_function)(void* slots, uint64_t slot) noexcept nogil

cdef struct HotSegment:
    void* extents             # kept by HotState.kept; NULL: not a segment
    void* slots
    uint64_t floor            # below it nothing is free before `resolved`
    uint64_t slot_floor
    uint64_t data_handle
    uint64_t grant_k0
    uint64_t grant_k1
    uint64_t clock_ms         # the node's clock, as it said at cluster time clock_at_ms
    uint64_t clock_at_ms
    uint64_t tried            # number of the last allocation that failed here
    uint32_t segment_id
    uint32_t node_id
    uint8_t rank
    bint joined
    bint resolved

cdef struct HotKey:           # one key of the request being served
    const uint8_t* text
    uint64_t hash
    uint64_t size
    uint32_t key_bytes
    uint32_t index
    const uint8_t* digest
    const uint8_t* chunks
    uint32_t chunk_bytes


@cython.final
cdef class HotCounters:
    cdef public uint64_t epoch
    cdef public uint64_t last_fact
    cdef public uint64_t last_object
    cdef public uint64_t last_put
    cdef public uint64_t place_cursor
    cdef readonly bytes put_key
    cdef uint32_t rounds[SPECK_ROUNDS]

    cdef uint64_t make_put_id(self) noexcept nogil


@cython.final
cdef class HotState:
    cdef StoredObjects objects
    cdef OpenPuts puts
    cdef HotCounters counters
    cdef HotSegment* segments             # by the number that the table of objects gives
    cdef uint32_t segments_room
    cdef uint32_t* schedule               # numbers of segments
    cdef uint32_t schedule_count
    cdef uint64_t largest_segment
    cdef uint64_t allocations             # that began, so far
    cdef dict numbers                     # of segment ids
    cdef dict kept                        # (extents, slots) by segment id
    cdef set quota_tenants
    cdef uint32_t* quotas                 # the same, as an array
    cdef uint32_t quota_count
    cdef HotKey* keys                     # [batch_keys_max]
    cdef mp_byte_log facts
    cdef mp_byte_log effects
    cdef uint64_t now_ms
    cdef uint64_t durable
    cdef uint64_t segments_version
    cdef bint told                        # `set_turn` was called: before it nothing is answered
    cdef bint may_change                  # facts may be made
    cdef bint may_end                     # and new objects be confirmed before their facts are durable
    cdef bint freed                       # an extent became free
    # Limits: see HotCore.
    cdef uint64_t batch_keys_max, lease_ms_max, put_ms, put_bytes_per_ms, facts_waiting_max, waiting_bytes_max

    cdef bint has_quota(self, uint32_t tenant) noexcept nogil
    cdef bint facts_fit(self, uint64_t more) noexcept nogil
    cdef HotSegment* segment(self, uint32_t segment_id) noexcept nogil
    cdef HotSegment* segment_numbered(self, uint32_t number) noexcept nogil
    cdef int64_t give_extent(self, HotSegment* segment, uint64_t size, uint32_t* slot) noexcept nogil
    cdef void take_back(self, HotSegment* segment, uint64_t offset, uint64_t size, uint32_t slot) noexcept nogil
    cdef int grow_segments(self, uint32_t number) except -1

cdef bint read_keys(HotState state, const uint8_t** at, const uint8_t* end, uint32_t tenant,
                    uint32_t* count) noexcept nogil
cdef void look_ahead(HotState state, uint32_t at, uint32_t count) noexcept nogil
cdef void look_ahead_to_queue(HotState state, uint32_t at, uint32_t count) noexcept nogil
