"""Worker threads: they drive the batches that nobody waits on. Started with the first such batch."""

from moonpool.native.io.batch cimport (
    STATE_NEW,
    STATE_QUEUED,
    STATE_RUNNING,
    Batch,
    batch_drive,
    batch_release,
    mp_batch,
    mp_join_thread,
    mp_start_thread,
    mp_sync_init,
    pthread_cond_broadcast,
    pthread_cond_destroy,
    pthread_cond_signal,
    pthread_cond_wait,
    pthread_mutex_destroy,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from moonpool.native.io.guard cimport mp_add32, mp_load32, mp_swap_if32

import threading

from moonpool.errors import EngineClosed, QueueFull, ResourceError, UsageError

cdef enum:
    WORKERS_AT_MOST = 64

WORKERS_MAX = WORKERS_AT_MOST


cdef bint pool_may(mp_pool* pool, mp_batch* batch) noexcept nogil:
    """True when a thread may drive the batch now: its segment does not use up its share. Lock held."""
    cdef uint32_t k, n = 0
    for k in range(<uint32_t>WORKERS_AT_MOST):
        n += pool.busy[k] == batch.segment
    return n < pool.share


cdef bint pool_lacks(mp_pool* pool) noexcept nogil:
    """True when more batches could be driven than threads are idle. Lock held."""
    cdef uint32_t n = 0
    cdef mp_batch* batch = pool.head
    if pool.queued <= pool.idle:
        return False
    while batch != NULL and n <= pool.idle:
        n += pool_may(pool, batch)
        batch = batch.next
    return n > pool.idle


cdef mp_batch* pool_pick(mp_pool* pool) noexcept nogil:
    """Take the first batch out that may be driven; NULL when there is none. Lock held."""
    cdef mp_batch* before = NULL
    cdef mp_batch* batch = pool.head
    while batch != NULL and not pool_may(pool, batch):
        before = batch
        batch = batch.next
    if batch == NULL:
        return NULL
    if before == NULL:
        pool.head = batch.next
    else:
        before.next = batch.next
    if pool.tail == batch:
        pool.tail = before
    pool.queued -= 1
    return batch


cdef mp_batch* pool_take(mp_pool* pool, uint32_t* place) noexcept nogil:
    """Next batch for this thread, with the queue's reference, noted as busy at `place`; NULL when the pool stops."""
    cdef mp_batch* batch
    cdef uint32_t k = 0
    pthread_mutex_lock(&pool.lock)
    batch = pool_pick(pool)
    while batch == NULL and not pool.stop:
        pool.idle += 1
        pthread_cond_wait(&pool.work, &pool.lock)
        pool.idle -= 1
        batch = pool_pick(pool)
    if batch != NULL:
        while pool.busy[k] != NULL:
            k += 1
        pool.busy[k] = batch.segment
        place[0] = k
        if pool.head != NULL and pool.idle:
            pthread_cond_signal(&pool.work)
    pthread_mutex_unlock(&pool.lock)
    return batch


cdef void pool_sweep(mp_pool* pool) noexcept nogil:
    """Take out what its waiters have driven themselves while every worker was busy. Lock held."""
    cdef mp_batch** place = &pool.head
    cdef mp_batch* batch
    pool.tail = NULL
    while place[0] != NULL:
        batch = place[0]
        if mp_load32(&batch.state) == STATE_QUEUED:
            pool.tail = batch
            place = &batch.next
        else:
            place[0] = batch.next
            pool.queued -= 1
            batch_release(batch)


cdef void* pool_work(void* context) noexcept nogil:
    cdef mp_pool* pool = <mp_pool*>context
    cdef mp_batch* batch
    cdef uint32_t place = 0
    while True:
        batch = pool_take(pool, &place)
        if batch == NULL:
            return NULL
        if mp_swap_if32(&batch.state, STATE_QUEUED, STATE_RUNNING):
            batch_drive(batch)
        batch_release(batch)
        pthread_mutex_lock(&pool.lock)
        pool.busy[place] = NULL
        pthread_mutex_unlock(&pool.lock)


cdef class WorkerPool:
    """A bounded queue of batches, and threads that drive them, first come first served.

    Each segment has up to `threads` of them at a time, and all together 64: what waits for a stalled peer must not hold
    up batches to others.
    """

    def __cinit__(self, unsigned int threads, unsigned int queued_max):
        mp_sync_init(&self.pool.lock, &self.pool.work)
        self.threads = min(threads, <unsigned int>WORKERS_MAX)
        self.pool.share = self.threads
        self.starting = threading.Lock()
        self.queued_max = queued_max

    def __dealloc__(self):
        self.close()
        pthread_mutex_destroy(&self.pool.lock)
        pthread_cond_destroy(&self.pool.work)

    @property
    def queued(self) -> int:
        """Batches that no thread has taken yet."""
        return self.pool.queued

    def submit(self, Batch batch not None) -> None:
        """Queue a batch. QueueFull (retryable) when the bound is reached, EngineClosed after `close`."""
        cdef mp_batch* raw = batch.raw
        cdef bint start
        pthread_mutex_lock(&self.pool.lock)
        if self.pool.queued >= self.queued_max:
            pool_sweep(&self.pool)
        if self.pool.stop or self.pool.queued >= self.queued_max:
            pthread_mutex_unlock(&self.pool.lock)
            if self.pool.stop:
                raise EngineClosed()
            raise QueueFull(f"{self.queued_max} batches are queued; wait for some, or raise queued_batches_max",
                            limit=self.queued_max)
        if not mp_swap_if32(&raw.state, STATE_NEW, STATE_QUEUED):
            pthread_mutex_unlock(&self.pool.lock)
            raise UsageError("a batch is submitted once, and not after it was driven")
        mp_add32(&raw.references, 1)
        raw.next = NULL
        if self.pool.tail == NULL:
            self.pool.head = raw
        else:
            self.pool.tail.next = raw
        self.pool.tail = raw
        self.pool.queued += 1
        # A thread that was woken counts as idle until it runs: it can take one batch, not all that are queued.
        start = pool_lacks(&self.pool)
        pthread_cond_signal(&self.pool.work)
        pthread_mutex_unlock(&self.pool.lock)
        if start:
            self._start()

    def _start(self):
        with self.starting:
            if self.running >= <uint32_t>WORKERS_AT_MOST or self.pool.stop:
                return
            if mp_start_thread(&self.handles[self.running], pool_work, &self.pool, b"moonpool-work") == 0:
                self.running += 1
            elif self.running == 0:
                raise ResourceError("cannot start a worker thread: raise RLIMIT_NPROC or free memory")

    def close(self) -> None:
        """Stop: queued batches still run to their ends (cancel them first), then the threads are joined."""
        cdef unsigned int i, running = self.running
        self.running = 0
        pthread_mutex_lock(&self.pool.lock)
        self.pool.stop = 1
        self.pool.share = WORKERS_AT_MOST  # nothing is left for later now
        pthread_cond_broadcast(&self.pool.work)
        pthread_mutex_unlock(&self.pool.lock)
        with nogil:
            for i in range(running):
                mp_join_thread(self.handles[i])
            pool_work(&self.pool)  # what is queued where no thread could be started

    def forget_after_fork(self) -> None:
        """In a forked child there are no threads to join."""
        self.running = 0
        self.pool.head = NULL
        self.pool.tail = NULL
        self.pool.queued = 0
        self.pool.stop = 1
