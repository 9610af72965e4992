"""The way to one peer's endpoint, and endpoints of ours that batches use one at a time (see link.pyx)."""

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from moonpool.native.io.batch cimport mp_batch, pthread_cond_t, pthread_mutex_t
from moonpool.native.ofi.fabric cimport Fabric, mp_fabric
from moonpool.native.ofi.library cimport fi_addr_t, fi_context2, fid_av, fid_cq, fid_ep, fid_mr

cdef enum:
    OPS = 64                    # pieces in flight on one endpoint
    NONE = 0xFFFFFFFF
    BOUNCE_PIECE = 65536        # the digest chunk
    SLEEP_MS = 2                # between looks at cancel and deadline

cdef struct mp_op:
    fi_context2 context         # first: the library hands its address back
    uint32_t flight             # of its transfer, or FLUSHING
    uint32_t next_free
    uint64_t n_bytes
    char* copy_to               # a READ through the bounce buffer: where its bytes belong

cdef struct mp_flight:
    uint64_t i
    uint32_t outstanding
    uint32_t posted_all
    uint32_t failed

cdef struct mp_end:
    fid_ep* ep
    fid_cq* queue
    fid_av* av
    fi_addr_t peer
    int wait_fd
    uint32_t generation         # of the address it talks to
    uint32_t proven             # something has come back by it
    uint32_t in_flight
    uint32_t free_op
    char* bounce                # OPS pieces
    fid_mr* bounce_mr
    void* bounce_desc
    mp_op ops[64]
    mp_flight flights[65]
    mp_end* next

cdef struct mp_link:
    mp_fabric* fabric
    pthread_mutex_t lock
    pthread_cond_t freed
    mp_end* idle
    uint32_t n_ends
    uint32_t ends_max
    int32_t shut
    int32_t generation          # of `address`; 0: the owner must be asked first
    uint8_t address[256]
    uint64_t flush_key
    uint64_t flush_base
    uint64_t spin_ns
    uint64_t spin_max_bytes
    uint64_t stall_ns
    uint64_t connect_ns
    void* owner                 # its Link

cdef bint end_bounce(mp_link* link, mp_end* end) noexcept nogil
cdef mp_end* link_take(mp_link* link, mp_batch* batch, int* status) noexcept nogil
cdef void link_give(mp_link* link, mp_end* end, bint sound) noexcept nogil
cdef int link_settle(mp_link* link, uint32_t generation) noexcept nogil

cdef class Link:
    cdef mp_link raw
    cdef Fabric fabric
    cdef object ask
    cdef object asking
    cdef object number
    cdef int32_t last_generation
    cdef uint64_t down_until_ns
    cdef uint64_t down_ns
    cdef int down_status
    cdef object __weakref__
    cdef int settle(self, uint32_t generation) noexcept
    cdef int _try_renew(self) except -1
