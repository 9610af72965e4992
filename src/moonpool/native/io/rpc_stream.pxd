"""A client's connection as C structures and functions (see rpc_stream.pyx)."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from moonpool.native.io.batch cimport pthread_cond_t, pthread_mutex_t

cdef enum:
    WOKEN = 100              # not a status: look for signals and wait again

cdef struct rpc_waiter:
    uint64_t id              # 0: waits for a push
    bint done
    uint8_t* frame           # malloc'ed, the waiter's
    uint8_t* error           # inside the frame; NULL when there is none
    size_t error_bytes
    uint8_t* body            # inside the frame
    size_t body_bytes
    pthread_cond_t cond
    rpc_waiter* previous
    rpc_waiter* next

cdef struct rpc_push:
    rpc_push* next
    size_t method_bytes
    size_t params_bytes      # method and params follow the structure

cdef struct rpc_stream:
    int fd
    int status               # 0 while open, then why it ended, for good
    pthread_mutex_t lock     # guards all below
    pthread_cond_t turn      # `sending` has become free
    bint reading, sending
    rpc_waiter* waiters
    rpc_push* first_push
    rpc_push* last_push
    uint32_t n_pushes, pushes_max
    size_t push_bytes, push_bytes_max
    uint64_t id_limit        # ids from here on were never sent
    uint64_t unclaimed       # answers to calls that had given up
    uint8_t* buffer          # the reader's
    size_t begin, end, capacity
    size_t frame_bytes_max
    uint64_t spin_ns

cdef bint stream_init(rpc_stream* s, int fd) noexcept nogil
cdef void stream_let_go(rpc_stream* s) noexcept nogil
cdef void stream_free(rpc_stream* s) noexcept nogil
cdef void stream_fail(rpc_stream* s, int status) noexcept nogil
cdef void enter(rpc_stream* s, rpc_waiter* w, uint64_t id) noexcept nogil
cdef void leave(rpc_stream* s, rpc_waiter* w) noexcept nogil
cdef int send_frame(rpc_stream* s, const uint8_t* data, size_t n, uint64_t deadline) noexcept nogil
cdef int wait_done(rpc_stream* s, rpc_waiter* w, uint64_t deadline) noexcept nogil
cdef rpc_push* take_push(rpc_stream* s) noexcept nogil
