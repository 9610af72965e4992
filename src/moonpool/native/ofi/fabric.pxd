"""One provider's domain, the endpoints that peers reach, and registered memory (see fabric.pyx)."""

from libc.stdint cimport int32_t, uint32_t, uint64_t
from moonpool.native.io.batch cimport pthread_mutex_t, pthread_t
from moonpool.native.ofi.library cimport fi_info, fid_av, fid_cq, fid_domain, fid_ep, fid_fabric, fid_mr

cdef enum:
    PIECE_BYTES = 1 << 20      # a multiple of the digest chunk
    QUEUE_SIZE = 256
    ADDRESS_BYTES_MAX = 256

cdef struct mp_fabric:
    fi_info* info
    fid_fabric* fabric
    fid_domain* domain
    fid_cq* queue         # of the endpoints that peers reach
    fid_av* av
    int wait_fd           # readable when the queue has something, or -1
    int wake_fd           # ends the progress thread's sleep
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
    cdef fid_ep* ep
    cdef Fabric fabric
    cdef readonly bytes address

cdef class OwnMemory:
    cdef mp_ofi_memory raw
    cdef Fabric fabric
