"""Rings for files and devices: a batch borrows a whole one for as long as it runs, so nothing in it needs a lock.

A ring remembers what it has registered with the kernel: descriptors by the serial of their disk, windows of own
regions by the region's handle (a handle is never used twice, so a stale entry can never be taken for another region's).
Only the borrower adds entries; whoever closes a disk or takes a region back removes them, under the ring's lock.
"""

from libc.errno cimport EINVAL, ENOMEM
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset
from moonpool.native.disk.uring cimport (
    IORING_FSYNC_DATASYNC,
    IORING_SETUP_CLAMP,
    IORING_SETUP_COOP_TASKRUN,
    IORING_SETUP_CQE32,
    IORING_SETUP_SQE128,
    MAP_ANONYMOUS,
    MAP_FAILED,
    MAP_POPULATE,
    MAP_PRIVATE,
    PROT_READ,
    PROT_WRITE,
    __kernel_timespec,
    io_uring_cqe,
    io_uring_cqe_seen,
    io_uring_get_sqe,
    io_uring_params,
    io_uring_peek_cqe,
    io_uring_prep_fsync,
    io_uring_queue_exit,
    io_uring_queue_init_params,
    io_uring_register_buffers_sparse,
    io_uring_register_buffers_update_tag,
    io_uring_register_files_sparse,
    io_uring_register_files_update,
    io_uring_sqe,
    io_uring_sqe_set_data64,
    io_uring_submit,
    io_uring_submit_and_wait_timeout,
    iovec,
    mmap,
    munmap,
)
from moonpool.native.io.batch cimport (
    CANCELLED,
    NO_MEMORY,
    batch_interrupted,
    mp_batch,
    mp_cond_wait_until,
    mp_sync_init,
    pthread_cond_destroy,
    pthread_cond_signal,
    pthread_mutex_destroy,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from moonpool.native.io.guard cimport mp_count, mp_deadline_ns, mp_now_ns, mp_tally

import errno as error_numbers
import os

from moonpool.errors import ResourceError, TransferTimeout, UsageError

cdef extern from "pthread.h" nogil:
    int pthread_mutex_init(pthread_mutex_t* lock, const void* attributes)

COUNTERS = (
    "rings_opened", "rings_refused", "windows_registered", "windows_refused", "ios_fixed", "ios_bounced",
    "ios_cached", "ios_short", "ios_again", "ios_cancelled", "direct_refused", "errors_space", "errors_device",
    "errors_access", "errors_end", "errors_other",
)

cdef enum:
    TICK_NS = 10000000
    SYNC_TAG = 0xFFFFFFFE
    CANCEL_TAG = 0xFFFFFFFF


cdef int ring_init(mp_ring* ring, uint32_t depth, uint32_t flags) noexcept nogil:
    """0 or -errno. Kernels before 5.19 know no cooperative task work; they do without."""
    cdef io_uring_params params
    cdef int rc
    memset(&params, 0, sizeof(params))
    params.flags = flags | IORING_SETUP_CLAMP | IORING_SETUP_COOP_TASKRUN
    rc = io_uring_queue_init_params(2 * depth, &ring.uring, &params)
    if rc == -EINVAL:
        memset(&params, 0, sizeof(params))
        params.flags = flags | IORING_SETUP_CLAMP
        rc = io_uring_queue_init_params(2 * depth, &ring.uring, &params)
    return rc


cdef mp_ring* ring_open(mp_ring_pool* pool, int* rc) noexcept nogil:
    cdef mp_ring* ring = <mp_ring*>calloc(1, sizeof(mp_ring))
    cdef uint32_t k
    rc[0] = -ENOMEM
    if ring == NULL:
        return NULL
    ring.ios = <mp_io*>calloc(pool.depth, sizeof(mp_io))
    ring.works = <mp_work*>calloc(pool.depth + 1, sizeof(mp_work))
    if ring.ios != NULL and ring.works != NULL:
        rc[0] = ring_init(ring, pool.depth, pool.setup_flags)
    if rc[0] != 0:
        free(ring.ios)
        free(ring.works)
        free(ring)
        return NULL
    pthread_mutex_init(&ring.tables, NULL)
    ring.depth = pool.depth
    for k in range(pool.depth):
        ring.ios[k].next = k + 1
        ring.works[k].next = k + 1
    ring.works[pool.depth].next = pool.depth + 1
    ring.has_files = io_uring_register_files_sparse(&ring.uring, 2 * FILES_MAX) == 0
    ring.has_buffers = io_uring_register_buffers_sparse(&ring.uring, WINDOWS_MAX + 1) == 0
    return ring


cdef void ring_close(mp_ring* ring) noexcept nogil:
    io_uring_queue_exit(&ring.uring)
    if ring.bounce != NULL:
        munmap(ring.bounce, BOUNCE_SLOTS * BOUNCE_BYTES)
    pthread_mutex_destroy(&ring.tables)
    free(ring.ios)
    free(ring.works)
    free(ring)


cdef void collect_owed(mp_ring* ring) noexcept nogil:
    """Take what came for those that stopped waiting."""
    cdef io_uring_cqe* cqe = NULL
    while ring.owed and io_uring_peek_cqe(&ring.uring, &cqe) == 0 and cqe != NULL:
        if cqe.user_data == SYNC_TAG or cqe.user_data == CANCEL_TAG:
            ring.owed -= 1
        io_uring_cqe_seen(&ring.uring, cqe)


cdef mp_ring* free_ring(mp_ring_pool* pool, int* rc) noexcept nogil:
    """A ring that nobody uses, opened if need be, or NULL (rc says why not). Lock held by the caller."""
    cdef uint32_t k
    cdef mp_ring* ring
    rc[0] = 0
    for k in range(pool.n_rings):
        ring = pool.rings[k]
        if not ring.busy:
            collect_owed(ring)
            if not ring.owed:
                return ring
    if pool.n_rings >= pool.rings_max:
        return NULL
    ring = ring_open(pool, rc)
    if ring == NULL:
        mp_tally(&pool.counters[RINGS_REFUSED], 1)
        return NULL
    mp_tally(&pool.counters[RINGS_OPENED], 1)
    pool.rings[pool.n_rings] = ring
    pool.n_rings += 1
    return ring


cdef mp_ring* pool_take(mp_ring_pool* pool, mp_batch* batch, int* status) noexcept nogil:
    """Borrow a ring, waiting for one as long as the batch may; NULL and the status to end with otherwise."""
    cdef mp_ring* ring = NULL
    cdef int rc = 0
    status[0] = 0
    pthread_mutex_lock(&pool.lock)
    while True:
        if pool.closed:
            status[0] = CANCELLED
            break
        ring = free_ring(pool, &rc)
        if ring != NULL:
            ring.busy = 1
            pool.busy += 1
            break
        if rc != 0 and pool.busy == 0:
            status[0] = NO_MEMORY  # no ring, and nobody who would give one back
            break
        status[0] = batch_interrupted(batch)
        if status[0]:
            break
        mp_cond_wait_until(&pool.given, &pool.lock, mp_now_ns() + TICK_NS)
    pthread_mutex_unlock(&pool.lock)
    return ring


cdef void pool_give(mp_ring_pool* pool, mp_ring* ring) noexcept nogil:
    """Give a ring back, with nothing in flight but what it owes."""
    pthread_mutex_lock(&pool.lock)
    ring.busy = 0
    pool.busy -= 1
    pthread_cond_signal(&pool.given)
    pthread_mutex_unlock(&pool.lock)


cdef int file_index(mp_ring* ring, mp_disk* disk) noexcept nogil:
    """Where the disk's descriptors are registered (fd there, edge_fd behind it), or -1. Borrower only."""
    cdef uint32_t place = <uint32_t>(disk.serial % FILES_MAX)
    cdef int descriptors[2]
    cdef int rc
    if not ring.has_files:
        return -1
    pthread_mutex_lock(&ring.tables)
    if ring.files[place] != disk.serial:
        # What is prepared and not yet submitted may name this place for the disk that is there now.
        io_uring_submit(&ring.uring)
        descriptors[0] = disk.fd
        descriptors[1] = disk.edge_fd
        rc = io_uring_register_files_update(&ring.uring, 2 * place, descriptors, 2)
        ring.files[place] = disk.serial if rc == 2 else 0
    rc = <int>(2 * place) if ring.files[place] == disk.serial else -1
    pthread_mutex_unlock(&ring.tables)
    return rc


cdef void forget_window(mp_ring* ring, int index) noexcept nogil:
    """Unpin a window. Lock held by the caller."""
    cdef iovec nothing
    cdef unsigned long long tag = 0
    if ring.windows[index].state == 1:
        nothing.iov_base = NULL
        nothing.iov_len = 0
        io_uring_register_buffers_update_tag(&ring.uring, index, &nothing, &tag, 1)
    memset(&ring.windows[index], 0, sizeof(mp_window))


cdef int window_index(mp_ring_pool* pool, mp_ring* ring, uint64_t handle, uint64_t base, uint64_t length,
                      uint64_t address, uint64_t n) noexcept nogil:
    """The registered buffer that holds a range of an own region, or -1: then it is plain I/O. Borrower only.

    Windows are pinned once they were used a few times: to pin one costs as much as a few large transfers.
    """
    cdef uint64_t number = (address - base) >> WINDOW_SHIFT
    cdef int index = <int>((handle * <uint64_t>0x9E3779B97F4A7C15 + number) % WINDOWS_MAX), answer = -1
    cdef mp_window* window = &ring.windows[index]
    cdef uint64_t start = base + (number << WINDOW_SHIFT), end = start + WINDOW_BYTES
    cdef unsigned long long tag = 0
    cdef iovec vector
    if not ring.has_buffers:
        return -1
    if end > base + length:
        end = base + length
    if address + n > end:
        return -1
    pthread_mutex_lock(&ring.tables)
    if window.handle == 0:
        window.handle = handle
        window.base = start
        window.end = end
    if window.handle == handle and window.base == start:
        if window.state == 0:
            window.touches += 1
            if window.touches >= WINDOW_TOUCHES:
                vector.iov_base = <void*><size_t>start
                vector.iov_len = end - start
                if io_uring_register_buffers_update_tag(&ring.uring, index, &vector, &tag, 1) == 1:
                    window.state = 1
                    mp_tally(&pool.counters[WINDOWS_REGISTERED], 1)
                else:
                    window.state = 2  # RLIMIT_MEMLOCK, or memory that cannot be pinned
                    mp_tally(&pool.counters[WINDOWS_REFUSED], 1)
        if window.state == 1:
            answer = index
    pthread_mutex_unlock(&ring.tables)
    return answer


cdef char* bounce_memory(mp_ring* ring) noexcept nogil:
    """The ring's bounce slots, made when first needed; NULL without memory. Borrower only."""
    cdef iovec vector
    cdef unsigned long long tag = 0
    cdef void* memory
    if ring.bounce != NULL:
        return ring.bounce
    memory = mmap(NULL, BOUNCE_SLOTS * BOUNCE_BYTES, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0)
    if memory == MAP_FAILED:
        return NULL
    ring.bounce = <char*>memory
    ring.bounce_free = <uint64_t>-1
    if ring.has_buffers:
        vector.iov_base = memory
        vector.iov_len = BOUNCE_SLOTS * BOUNCE_BYTES
        ring.bounce_fixed = io_uring_register_buffers_update_tag(&ring.uring, BOUNCE_INDEX, &vector, &tag, 1) == 1
    return ring.bounce


cdef int sync_by(mp_ring* ring, int fd, uint64_t deadline_ns, int* result) noexcept nogil:
    """fdatasync by a borrowed ring: 1 with its result, 0 when the deadline came first (the ring then owes it)."""
    cdef io_uring_sqe* sqe = io_uring_get_sqe(&ring.uring)
    cdef io_uring_cqe* cqe = NULL
    cdef __kernel_timespec tick
    io_uring_prep_fsync(sqe, fd, IORING_FSYNC_DATASYNC)
    io_uring_sqe_set_data64(sqe, SYNC_TAG)
    tick.tv_sec = 0
    tick.tv_nsec = TICK_NS
    ring.owed += 1
    while True:
        cqe = NULL
        io_uring_submit_and_wait_timeout(&ring.uring, &cqe, 1, &tick, NULL)
        while io_uring_peek_cqe(&ring.uring, &cqe) == 0 and cqe != NULL:
            if cqe.user_data == SYNC_TAG:
                ring.owed -= 1
                result[0] = cqe.res
                io_uring_cqe_seen(&ring.uring, cqe)
                return 1
            io_uring_cqe_seen(&ring.uring, cqe)
        if mp_now_ns() >= deadline_ns:
            return 0


def probe_rings() -> int:
    """0 when this process may open a ring, or the errno that says why not."""
    cdef mp_ring ring
    memset(&ring, 0, sizeof(ring))
    cdef int rc = ring_init(&ring, 1, 0)
    if rc == 0:
        io_uring_queue_exit(&ring.uring)
    return -rc


cdef class DiskRings:
    """Rings shared by all batches of one transport; opened when needed, at most `rings_max`, each `depth` deep.

    `big_entries` makes rings for device commands (SQE128, CQE32).
    """

    def __cinit__(self, uint32_t rings_max, uint32_t depth, bint big_entries=False):
        cdef int rc = 0
        if not 1 <= rings_max <= RINGS_MAX or not 1 <= depth <= DEPTH_MAX:
            raise UsageError(f"there are 1 to {RINGS_MAX} rings, each 1 to {DEPTH_MAX} deep")
        self.pool = <mp_ring_pool*>calloc(1, sizeof(mp_ring_pool))
        if self.pool == NULL:
            raise MemoryError
        mp_sync_init(&self.pool.lock, &self.pool.given)
        self.pool.rings_max = rings_max
        self.pool.depth = depth
        if big_entries:
            self.pool.setup_flags = IORING_SETUP_SQE128 | IORING_SETUP_CQE32
        free_ring(self.pool, &rc)
        if rc != 0:
            raise ResourceError(f"the kernel gives no io_uring: {os.strerror(-rc)}", errno=-rc)

    def __dealloc__(self):
        if self.pool != NULL:
            self.close()
            pthread_cond_destroy(&self.pool.given)
            pthread_mutex_destroy(&self.pool.lock)
            free(self.pool)

    def close(self) -> None:
        """Close the rings; idempotent. One that still owes something of a stuck device is left to the kernel."""
        cdef mp_ring_pool* pool = self.pool
        cdef uint32_t k
        pthread_mutex_lock(&pool.lock)
        pool.closed = 1
        for k in range(pool.n_rings):
            collect_owed(pool.rings[k])
            if not pool.rings[k].busy:
                ring_close(pool.rings[k])
        pool.n_rings = 0
        pthread_mutex_unlock(&pool.lock)

    def drop_disk(self, uint64_t serial) -> None:
        """Take a disk's descriptors out of every ring, so that closing them lets go of the file."""
        cdef mp_ring_pool* pool = self.pool
        cdef uint32_t k, place = <uint32_t>(serial % FILES_MAX)
        cdef int nothing[2]
        cdef mp_ring* ring
        nothing[0] = nothing[1] = -1
        pthread_mutex_lock(&pool.lock)
        for k in range(pool.n_rings):
            ring = pool.rings[k]
            pthread_mutex_lock(&ring.tables)
            if ring.files[place] == serial:
                io_uring_register_files_update(&ring.uring, 2 * place, nothing, 2)
                ring.files[place] = 0
            pthread_mutex_unlock(&ring.tables)
        pthread_mutex_unlock(&pool.lock)

    def drop_region(self, uint64_t handle) -> None:
        """Unpin an own region's windows in every ring."""
        cdef mp_ring_pool* pool = self.pool
        cdef uint32_t k
        cdef int index
        pthread_mutex_lock(&pool.lock)
        for k in range(pool.n_rings):
            pthread_mutex_lock(&pool.rings[k].tables)
            for index in range(WINDOWS_MAX):
                if pool.rings[k].windows[index].handle == handle:
                    forget_window(pool.rings[k], index)
            pthread_mutex_unlock(&pool.rings[k].tables)
        pthread_mutex_unlock(&pool.lock)

    def sync(self, int fd, double timeout_s) -> None:
        """fdatasync; TransferTimeout when it takes longer (it goes on), ResourceError when it fails."""
        cdef uint64_t deadline_ns = mp_deadline_ns(timeout_s)
        cdef mp_batch waiting
        cdef mp_ring* ring
        cdef int status = 0, ended = 0, result = 0
        memset(&waiting, 0, sizeof(waiting))
        waiting.deadline_ns = deadline_ns
        with nogil:
            ring = pool_take(self.pool, &waiting, &status)
            if ring != NULL:
                ended = sync_by(ring, fd, deadline_ns, &result)
                pool_give(self.pool, ring)
        if ended and result < 0:
            raise ResourceError(f"making a file durable failed: {os.strerror(-result)}", errno=-result)
        if not ended and status == NO_MEMORY:
            raise ResourceError("the kernel gives no io_uring", errno=error_numbers.ENOMEM)
        if not ended:
            raise TransferTimeout("a file was not made durable in time; it goes on, call flush again",
                                  timeout_ms=timeout_s * 1000)

    @property
    def rings(self) -> int:
        """Rings that are open."""
        return self.pool.n_rings

    @property
    def busy(self) -> int:
        """Rings that batches use at this moment."""
        return self.pool.busy

    def counters(self) -> dict:
        """Totals by name, see COUNTERS."""
        return {name: mp_count(&self.pool.counters[place]) for place, name in enumerate(COUNTERS)}
