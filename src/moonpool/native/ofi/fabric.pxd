"""One provider's domain, the endpoints that peers reach, and registered memory (see fabric.pyx)."""

from libc.stdint cimport int32_t, uint32_t, uint64_t
from moonpool.native.io.batch cimport pthread_mutex_t, pthread_t
from moonpool.native.ofi.library cimport fi_info, fid_av, fid_cq, fid_domain, fid_ep, fid_fabric, fid_mr

cdef enum:
    PIECE_BYTES = 1 << 20      # a multiple of the digest chunk
    QUEUE_SIZE = 256
    ADDRESS_BYTES_MAX = 256

cdef struct mp_own_end:
    fid_ep* ep
    fid_cq* queue         # its own: a queue of several keeps what it knew of those that are closed
    fid_av* av
    int wait_fd           # readable when the queue has something, or -1
    mp_own_end* next

cdef struct mp_fabric:
    fi_info* info
    fid_fabric* fabric
    fid_domain* domain
    mp_own_end* ends      # that peers reach
    int epoll_fd          # what the progress thread sleeps on: queues, and wake_fd
    int wake_fd           # ends its sleep
    int napping           # a queue has no descriptor: short sleeps instead
    int32_t stop
    uint32_t mr_mode
    uint32_t limits       # MP_OFI_*
    int delivery          # a WRITE completes when it is in the target's memory
    uint64_t piece_bytes
    pthread_mutex_t lock  # progress and changes of endpoints that peers reach
    pthread_t thread
    # Totals of the initiator's side.
    uint64_t ends_opened
    uint64_t ends_closed
    uint64_t torn
    uint64_t retries
    uint64_t renewals
    uint64_t bounced_bytes
    uint64_t flushes

cdef struct mp_ofi_memory:
    fid_mr* mr
    void* desc
    uint64_t key
    uint64_t base         # what peers add offsets to

cdef class Fabric:
    cdef mp_fabric raw
    cdef bint running
    cdef bint open_now
    cdef uint32_t opened
    cdef int process
    cdef object shared
    cdef object __weakref__
    cdef start_progress(self)
    cdef bint is_mine(self)

cdef class OwnEnd:
    cdef mp_own_end* raw
    cdef Fabric fabric
    cdef readonly bytes address

    cdef _end(self)

cdef class OwnMemory:
    cdef mp_ofi_memory raw
    cdef Fabric fabric
