"""The rpc server's loop as C structures and functions (see rpc_loop.pyx)."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from moonpool.native.io.rpc_hot cimport HotOut, hot_function

cdef extern from *:
    """
    #include <sys/epoll.h>
    """
    ctypedef union epoll_data_t:
        void* ptr
    struct epoll_event:
        uint32_t events
        epoll_data_t data

cdef enum:
    SLOT_BITS = 20           # of a connection's number: where its structure is; above them a serial
    LATENCY_BUCKETS = 64

cdef enum:
    KIND_REQUEST = 1
    KIND_CLOSED = 2

# Why a connection ended, in the order of REASON_NAMES.
cdef enum:
    PEER_CLOSED = 0
    MALFORMED = 1
    FRAME_TOO_LARGE = 2
    STALLED = 3
    SLOW_FRAME = 4
    OVERFLOW = 5
    OVERLOADED = 6
    CLOSED_HERE = 7
    LEASE_OVER = 8
    REASONS = 9

cdef struct rpc_event:
    int kind
    int reason
    uint64_t connection
    uint64_t id
    uint64_t since_ns
    uint32_t method_bytes
    size_t params_bytes      # method and params follow the structure
    rpc_event* next

cdef struct rpc_connection:
    uint64_t number
    int fd                   # -1 once closed
    uint32_t interest
    uint32_t client, tenant
    uint32_t unanswered
    uint8_t* inbound
    size_t begin, end, capacity
    HotOut out
    size_t sent
    uint64_t frame_since_ns  # an unfinished frame began then; 0: none
    uint64_t out_since_ns    # unsent bytes have not moved since then; 0: none
    bint known, ready, closing
    bint hot_unsent          # a hot method's answer is among the unsent bytes
    rpc_connection* previous
    rpc_connection* next
    rpc_connection* next_ready
    rpc_event closed

cdef struct rpc_loop:
    int epoll_fd, wake_fd
    size_t frame_bytes_max, outbound_bytes_max, buffer_bytes_max, buffer_bytes
    size_t event_bytes
    uint32_t unanswered_max, events_max, n_events
    uint64_t stall_ns, frame_ns, spin_ns, linger_ns, swept_ns, active_ns, changed_ns
    bint at_risk, woken
    int64_t offset_ms
    uint64_t hot_until_ms
    hot_function hot
    void* core
    rpc_connection* connections
    rpc_connection* first_ready
    rpc_connection* last_ready
    rpc_event* first
    rpc_event* last
    uint64_t requests, replies, pushes, hot_answered, cold, bad_params, bytes_in, bytes_out
    uint64_t closed[9]       # REASONS
    uint64_t latency[4][64]  # HOT_METHODS, LATENCY_BUCKETS
    epoll_event found[64]

cdef bint loop_open(rpc_loop* loop) noexcept nogil
cdef void loop_close(rpc_loop* loop) noexcept nogil
cdef bint loop_watch(rpc_loop* loop, rpc_connection* c) noexcept nogil
cdef void loop_run(rpc_loop* loop, uint64_t deadline) noexcept nogil
cdef bint loop_listen(rpc_loop* loop, int fd, bint on) noexcept nogil
cdef void loop_wake(rpc_loop* loop) noexcept nogil
cdef void end(rpc_loop* loop, rpc_connection* c, int reason) noexcept nogil
cdef void forget(rpc_loop* loop, rpc_connection* c) noexcept nogil
cdef rpc_event* next_event(rpc_loop* loop) noexcept nogil
cdef void make_ready(rpc_loop* loop, rpc_connection* c) noexcept nogil
cdef bint out_room(rpc_loop* loop, rpc_connection* c, size_t more) noexcept nogil
cdef unsigned log2_bucket(uint64_t ns) noexcept nogil
