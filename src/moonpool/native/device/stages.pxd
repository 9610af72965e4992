"""Stages: two pinned buffers each, and streams to the devices; a batch has one to itself while it runs."""

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from moonpool.native.device.runtime cimport DeviceRuntime, mp_runtime
from moonpool.native.io.batch cimport mp_batch, pthread_cond_t, pthread_mutex_t

cdef enum:
    STAGES_MAX = 16
    PIECES = 1024            # of transfers in one window
    SLOTS = 2

cdef struct mp_piece:
    uint64_t i               # which transfer
    uint64_t start           # from its beginning
    uint64_t length
    uint64_t at              # in the buffer

# What goes by one buffer at a time: pieces of transfers that come from, and go to, places of the same kind.
cdef struct mp_window:
    uint32_t n
    uint64_t n_bytes
    int local_device         # -1: memory of the host
    int remote               # REMOTE_* of path.pyx
    int remote_device
    int busy_device          # whose stream works on it, or -1
    bint moving              # copies that store its bytes are on their way
    mp_piece pieces[PIECES]

cdef struct mp_stage:
    mp_stage* next
    int in_use
    char* buffer[SLOTS]
    void* stream[16]         # by device, made when first used
    void* event[SLOTS][16]
    mp_window window[SLOTS]
    # Room for the batch that carries a window by another path.
    uint64_t words[4 * PIECES]
    uint8_t marks[PIECES]
    uint8_t grants[24 * PIECES]

cdef struct mp_stages:
    mp_runtime* rt
    pthread_mutex_t lock
    pthread_cond_t freed
    mp_stage* idle
    mp_stage* all[STAGES_MAX]
    uint32_t n_all
    uint64_t slot_bytes
    uint64_t stall_ns
    uint64_t up_bytes        # host to device, device to host, between devices
    uint64_t down_bytes
    uint64_t across_bytes
    uint64_t waits           # for a free stage
    uint64_t errors          # answers of the runtime that were no success
    uint64_t lost            # stages whose copies never ended: not used again

cdef mp_stage* stage_take(mp_stages* stages, mp_batch* batch, int* status) noexcept nogil
cdef void stage_give(mp_stages* stages, mp_stage* stage, bint good) noexcept nogil
cdef int stage_ready(mp_runtime* rt, mp_stage* stage, int device) noexcept nogil
cdef int stage_mark(mp_runtime* rt, mp_stage* stage, int slot, int device) noexcept nogil
cdef int stage_wait(mp_stages* stages, mp_stage* stage, int slot, int device) noexcept nogil
cdef void stage_end(mp_runtime* rt, mp_stage* stage) noexcept nogil

cdef class Stages:
    cdef mp_stages* raw
    cdef DeviceRuntime runtime
    cdef object memory
