"""The initiator's lanes to one peer (see lanes.pyx)."""

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from moonpool.native.io.batch cimport mp_batch, pthread_cond_t, pthread_mutex_t
from moonpool.native.io.stream cimport iovec, mp_stream

cdef struct mp_lane:
    mp_stream stream
    uint64_t next_id
    uint32_t served          # batches it has carried: a lane that was idle may have been closed by the peer
    mp_lane* next
    uint8_t* frame           # one group header and its entries
    iovec* pieces
    uint32_t slot            # in the pool's list of open lanes

cdef struct mp_lanes:
    pthread_mutex_t lock
    pthread_cond_t freed
    mp_lane* idle
    mp_lane* open[64]
    uint32_t n_open
    uint32_t n_max
    int32_t closing
    int io
    uint64_t spin_ns
    uint64_t spin_max_bytes
    uint64_t stall_ns
    int32_t notifying        # a notification is on its way
    uint64_t notice_id
    uint64_t connects
    uint64_t lost
    void* connector          # borrowed Python callable, owned by LanePool

cdef class LanePool:
    cdef mp_lanes* raw
    cdef object connector

cdef int acquire(mp_lanes* lanes, mp_batch* batch, mp_lane** out) noexcept nogil
cdef void give_back(mp_lanes* lanes, mp_lane* lane, bint good) noexcept nogil
cdef int board(mp_lane* lane, mp_batch* batch, mp_lanes* lanes) noexcept nogil
cdef void alight(mp_lane* lane, mp_batch* batch) noexcept nogil
cdef bint final_status(uint8_t status) noexcept nogil
