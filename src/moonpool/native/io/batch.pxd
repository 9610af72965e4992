"""Batches as C structures that workers and lanes share without the GIL (see batch.pyx)."""

from libc.stdint cimport int32_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from "pthread.h" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    ctypedef unsigned long pthread_t
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)
    int pthread_cond_broadcast(pthread_cond_t*)
    int pthread_cond_signal(pthread_cond_t*)
    int pthread_cond_wait(pthread_cond_t*, pthread_mutex_t*)
    int pthread_mutex_destroy(pthread_mutex_t*)
    int pthread_cond_destroy(pthread_cond_t*)

cdef extern from "sync.h" nogil:
    void mp_sync_init(pthread_mutex_t* lock, pthread_cond_t* cond)
    int mp_cond_wait_until(pthread_cond_t* cond, pthread_mutex_t* lock, uint64_t deadline_ns)
    int mp_start_thread(pthread_t* thread, void* (*run)(void*) noexcept nogil, void* context, const char* name)
    int mp_join_thread(pthread_t thread)

# The numbers of moonpool.errors.Status.
cdef enum:
    COMPLETE = 0
    PENDING = 1
    TIMED_OUT = 2
    CANCELLED = 3
    PEER_GONE = 4
    REFUSED = 5
    STALE_HANDLE = 6
    OUT_OF_RANGE = 7
    ACCESS_DENIED = 8
    PROTOCOL = 9
    NOT_REGISTERED = 10
    NO_MEMORY = 11
    UNSUPPORTED = 12
    QUEUE_FULL = 13
    INTERNAL = 14
    STALLED = 15

cdef enum:
    OP_READ = 1
    OP_WRITE = 2
    OP_FLUSH = 3
    OP_NOTIFY = 4
    OP_PING = 5

cdef enum:
    STATE_NEW = 0
    STATE_QUEUED = 1
    STATE_RUNNING = 2
    STATE_ENDED = 3
    STATE_HELD = 4           # queued under a cap: only a worker starts it, or who ends it early

cdef enum:
    AUTO_PATH = 0xFFFF
    NO_DEADLINE = 0

# Whether the local side of a batch's transfers is memory of a device.
cdef enum:
    LOCAL_HOST = 0
    LOCAL_MIXED = 1      # see `on_device`
    LOCAL_DEVICE = 2

cdef struct mp_batch:
    int32_t references
    int32_t state
    int32_t cancel           # set by cancel(); looked at between pieces
    int32_t event_fd         # -1 until somebody awaits
    int32_t lane_fd          # socket of the lane that carries it now, or -1; guarded by lock
    const int32_t* segment_dead  # its segment's `dead`, looked at with `cancel`; NULL until it runs
    uint8_t op
    uint8_t worst            # first failure in transfer order, else COMPLETE
    uint8_t trusted          # local range is a held buffer: no look-up
    uint8_t device           # LOCAL_*: only paths that take device memory carry such transfers
    uint32_t one_region      # 1: `single` is the storage of every array
    uint64_t n
    uint64_t* local
    uint64_t* region
    uint64_t* offset
    uint64_t* length
    uint16_t* path           # NULL: AUTO_PATH for all
    uint8_t* status
    uint64_t* digest         # NULL: not asked for
    uint64_t* digest_at      # n + 1 positions in digest
    uint8_t* grants          # 24 bytes for each transfer, shown by WRITEs over lanes; NULL: none
    uint64_t bytes
    uint64_t deadline_ns     # 0: none
    uint64_t started_ns
    uint64_t ended_ns
    uint64_t single[8]
    pthread_mutex_t lock
    pthread_cond_t ended
    uint8_t* on_device       # of a mixed batch, while it runs: 1 for each transfer from or into a device
    mp_batch* whole          # the batch that this one carries a part of, whose cancel ends it too; or NULL
    void* segment            # mp_segment*; typed where it is used
    int (*run)(void* segment, mp_batch* batch) noexcept nogil
    void* notice             # notification to send after success, owned
    uint32_t notice_bytes
    int (*announce)(void* segment, mp_batch* batch) noexcept nogil

cdef void batch_finish(mp_batch* batch) noexcept nogil
cdef void batch_drive(mp_batch* batch) noexcept nogil
cdef void batch_release(mp_batch* batch) noexcept nogil
cdef void batch_settle(mp_batch* batch) noexcept nogil
cdef void batch_fail_pending(mp_batch* batch, uint8_t status) noexcept nogil
cdef void batch_on_stack(mp_batch* batch, int op, uint8_t* status) noexcept nogil
cdef void batch_off_stack(mp_batch* batch) noexcept nogil
cdef int batch_interrupted(mp_batch* batch) noexcept nogil
cdef mp_batch* batch_whole(mp_batch* batch) noexcept nogil
cdef bint batch_on_device(mp_batch* batch, uint64_t i) noexcept nogil

cdef class Batch:
    cdef mp_batch* raw
    cdef object holds
    cdef public object segment
    cdef readonly str operation
    cdef void bind(self, void* segment, int (*run)(void*, mp_batch*) noexcept nogil, object owner)
    cdef bint _end_held(self)

cdef Batch plain_batch(int op, local, region, offset, length, uint64_t n_max)
