"""What one batch of the device path is at, and its moves between devices and buffers (see pump.pyx)."""

from libc.stdint cimport int32_t, uint64_t
from moonpool.native.device.stages cimport mp_piece, mp_stage, mp_stages, mp_window
from moonpool.native.io.batch cimport mp_batch
from moonpool.native.io.segment cimport mp_path, mp_segment

cdef enum:
    REMOTE_INNER = 0      # memory that other paths of the segment reach
    REMOTE_POINTER = 1    # a device within this process's reach
    REMOTE_SERVED = 2     # a device that only its owner reaches

# What is known of a region of ours, and of a peer's.
cdef struct mp_near:
    int device

cdef struct mp_far:
    uint64_t pointer      # 0: not within reach
    int device
    int32_t failed        # the pointer was of no use: the owner serves it from then on
    int served            # the owner serves it
    int32_t gone          # the owner, who serves it, says that it was taken back

cdef struct mp_reach:
    mp_stages* stages
    void* asker           # borrowed Python callable, or NULL
    uint64_t far_handle   # the owner's region for us, 0: none
    uint64_t far_slot_bytes
    int32_t asking        # one batch at a time is served by the owner
    int32_t waiting       # others that want to be

cdef struct mp_pump:
    mp_path* path
    mp_segment* segment
    mp_batch* batch
    mp_reach* reach
    mp_stages* stages
    mp_stage* stage
    uint64_t* left        # bytes of each transfer that are not there yet
    uint64_t next         # where the next window begins
    uint64_t done
    uint64_t carried
    uint64_t n_bytes
    uint64_t near_base    # the latest region of ours that was looked up
    uint64_t near_end
    int near_device
    bint near_rdma
    bint asked            # the owner has a window whose answer is to come
    int asked_slot
    bint lost             # a copy did not end
    bint retry            # a pointer was of no use: once more, by the owner

cdef bint ours(mp_pump* pump, uint64_t i, int* near, int* kind, int* far) noexcept nogil
cdef bint across(mp_pump* pump, mp_window* window) noexcept nogil
cdef bint cut(mp_pump* pump, mp_window* window) noexcept nogil
cdef char* place_of(mp_pump* pump, mp_window* window, int slot, mp_piece* piece) noexcept nogil
cdef void fail_window(mp_pump* pump, mp_window* window, int status) noexcept nogil
cdef void window_done(mp_pump* pump, mp_window* window) noexcept nogil
cdef void device_failed(mp_pump* pump, mp_window* window, int rc, bint far) noexcept nogil
cdef int enqueue(mp_pump* pump, mp_window* window, int slot, int device, int how, bint near) noexcept nogil
cdef void settle(mp_pump* pump, int slot) noexcept nogil
cdef void host_copy(mp_pump* pump, mp_window* window, int slot, bint into_buffer) noexcept nogil
cdef void hash_window(mp_pump* pump, mp_window* window, int slot) noexcept nogil
