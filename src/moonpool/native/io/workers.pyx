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

from moonpool.errors import EngineClosed, QueueFull, ResourceError, UsageError

WORKERS_MAX = 64


cdef mp_batch* pool_take(mp_pool* pool) noexcept nogil:
    """Next queued batch, with the queue's reference; NULL when the pool stops."""
    cdef mp_batch* batch = NULL
    pthread_mutex_lock(&pool.lock)
    while pool.head == NULL and not pool.stop:
        pool.idle += 1
        pthread_cond_wait(&pool.work, &pool.lock)
        pool.idle -= 1
    batch = pool.head
    if batch != NULL:
        pool.head = batch.next
        if pool.head == NULL:
            pool.tail = NULL
        pool.queued -= 1
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
    cdef mp_batch* batch
    while True:
        batch = pool_take(<mp_pool*>context)
        if batch == NULL:
            return NULL
        if mp_swap_if32(&batch.state, STATE_QUEUED, STATE_RUNNING):
            batch_drive(batch)
        batch_release(batch)


cdef class WorkerPool:
    """A bounded queue of batches and up to 64 threads that drive them, first come first served."""

    def __cinit__(self, unsigned int threads, unsigned int queued_max):
        mp_sync_init(&self.pool.lock, &self.pool.work)
        self.threads = min(threads, <unsigned int>WORKERS_MAX)
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
        start = self.pool.queued > self.pool.idle and self.running < self.threads
        pthread_cond_signal(&self.pool.work)
        pthread_mutex_unlock(&self.pool.lock)
        if start:
            self._start()

    def _start(self):
        if mp_start_thread(&self.handles[self.running], pool_work, &self.pool, b"moonpool-work") != 0:
            if self.running == 0:
                raise ResourceError("cannot start a worker thread: raise RLIMIT_NPROC or free memory")
            return
        self.running += 1

    def close(self) -> None:
        """Stop: queued batches still run to their ends (cancel them first), then the threads are joined."""
        cdef unsigned int i, running = self.running
        self.running = 0
        pthread_mutex_lock(&self.pool.lock)
        self.pool.stop = 1
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
