"""Worker threads: they drive the batches that nobody waits on. Started with the first such batch."""

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from moonpool.native.io.batch cimport (
    STATE_HELD,
    STATE_NEW,
    STATE_QUEUED,
    STATE_RUNNING,
    Batch,
    batch_drive,
    batch_release,
    mp_batch,
    mp_cond_wait_until,
    mp_join_thread,
    mp_start_thread,
    mp_sync_init,
    pthread_cond_broadcast,
    pthread_cond_destroy,
    pthread_cond_signal,
    pthread_mutex_destroy,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from moonpool.native.io.guard cimport mp_add32, mp_load32, mp_now_ns, mp_swap_if32
from moonpool.native.paths.turns cimport (
    CLASS_DIRECT,
    CLASSES,
    TURN_GONE,
    TURN_NOT_NOW,
    TURN_TAKE,
    class_counts,
    mp_turn,
    turns_add,
    turns_cap,
    turns_init,
    turns_next,
    turns_ready,
    turns_sweep,
)

import threading

from moonpool.errors import EngineClosed, OutOfMemory, QueueFull, ResourceError, UsageError

cdef enum:
    WORKERS_AT_MOST = 64

WORKERS_MAX = WORKERS_AT_MOST


cdef struct mp_asking:
    # One look at the queue: most that wait are of one segment, whose answer is found once.
    mp_pool* pool
    void* segment
    bint known
    bint answer


cdef bint has_share(mp_pool* pool, mp_batch* batch) noexcept nogil:
    """True when the segment of a batch does not use up its share of threads. Lock held."""
    cdef uint32_t k, n = 0
    for k in range(<uint32_t>WORKERS_AT_MOST):
        n += pool.busy[k] == batch.segment
    return n < pool.share


cdef int pool_may(void* context, void* what) noexcept nogil:
    """Whether a thread may drive a batch now, or its waiter has taken it over. Lock held."""
    cdef mp_asking* asking = <mp_asking*>context
    cdef mp_batch* batch = <mp_batch*>what
    cdef int32_t state = mp_load32(&batch.state)
    if state != STATE_QUEUED and state != STATE_HELD:
        return TURN_GONE
    if not asking.known or asking.segment != batch.segment:
        asking.segment = batch.segment
        asking.answer = has_share(asking.pool, batch)
        asking.known = True
    return TURN_TAKE if asking.answer else TURN_NOT_NOW


cdef int pool_gone(void* context, void* what) noexcept nogil:
    """Only whether a batch was taken over. Lock held."""
    cdef int32_t state = mp_load32(&(<mp_batch*>what).state)
    return TURN_NOT_NOW if state == STATE_QUEUED or state == STATE_HELD else TURN_GONE


cdef bint pool_lacks(mp_pool* pool) noexcept nogil:
    """True when more batches could be driven than threads are idle. Lock held."""
    cdef mp_asking asking = mp_asking(pool, NULL, False, False)
    if pool.turns.n <= pool.idle:
        return False
    return turns_ready(&pool.turns, mp_now_ns(), pool_may, &asking, pool.idle + 1) > pool.idle


cdef mp_batch* let_go(mp_turn* turn) noexcept nogil:
    """The batch of a node that was taken out; the node is freed."""
    cdef mp_batch* batch = <mp_batch*>turn.what
    free(turn)
    return batch


cdef mp_batch* pool_pick(mp_pool* pool, uint64_t* wake_ns) noexcept nogil:
    """Take out the batch whose turn it is; NULL when none has one before `wake_ns` (0: one comes). Lock held."""
    cdef mp_asking asking = mp_asking(pool, NULL, False, False)
    cdef mp_turn* turn = turns_next(&pool.turns, mp_now_ns(), pool_may, &asking, wake_ns)
    return NULL if turn == NULL else let_go(turn)


cdef mp_batch* pool_take(mp_pool* pool, uint32_t* place) noexcept nogil:
    """Next batch for this thread, with the queue's reference, noted as busy at `place`; NULL when the pool stops."""
    cdef mp_batch* batch
    cdef uint64_t wake_ns = 0
    cdef uint32_t k = 0
    pthread_mutex_lock(&pool.lock)
    batch = pool_pick(pool, &wake_ns)
    while batch == NULL and not pool.stop:
        pool.idle += 1
        mp_cond_wait_until(&pool.work, &pool.lock, wake_ns)
        pool.idle -= 1
        batch = pool_pick(pool, &wake_ns)
    if batch != NULL:
        while pool.busy[k] != NULL:
            k += 1
        pool.busy[k] = batch.segment
        place[0] = k
        if pool.turns.n and pool.idle:
            pthread_cond_signal(&pool.work)
    pthread_mutex_unlock(&pool.lock)
    return batch


cdef void pool_sweep(mp_pool* pool) noexcept nogil:
    """Take out what its waiters have driven themselves while every worker was busy. Lock held."""
    cdef mp_turn* turn = turns_sweep(&pool.turns, pool_gone, pool)
    while turn != NULL:
        batch_release(let_go(turn))
        turn = turns_sweep(&pool.turns, pool_gone, pool)


cdef void* pool_work(void* context) noexcept nogil:
    cdef mp_pool* pool = <mp_pool*>context
    cdef mp_batch* batch
    cdef uint32_t place = 0
    while True:
        batch = pool_take(pool, &place)
        if batch == NULL:
            return NULL
        if mp_swap_if32(&batch.state, STATE_QUEUED, STATE_RUNNING) or mp_swap_if32(
            &batch.state, STATE_HELD, STATE_RUNNING
        ):
            batch_drive(batch)
        batch_release(batch)
        pthread_mutex_lock(&pool.lock)
        pool.busy[place] = NULL
        pthread_mutex_unlock(&pool.lock)


cdef uint64_t bytes_of(mp_batch* batch) noexcept nogil:
    cdef uint64_t i, total = 0
    for i in range(batch.n):
        total += batch.length[i]
    return total


cdef class WorkerPool:
    """A bounded queue of batches, and threads that drive them in the order of moonpool.native.paths.turns.

    Each segment has up to `threads` of them at a time, and all together 64: what waits for a stalled peer must not hold
    up batches to others. `caps` are (class, bytes a second); a class goes before what came up to `head_start_ns`
    earlier in the one below it.
    """

    def __cinit__(self, unsigned int threads, unsigned int queued_max, *, uint64_t head_start_ns=0,
                  bint by_deadline=False, caps=()):
        mp_sync_init(&self.pool.lock, &self.pool.work)
        turns_init(&self.pool.turns, head_start_ns, by_deadline)
        for of, rate in caps:
            if not 0 <= of < CLASS_DIRECT:
                raise UsageError(f"class {of} cannot be capped")
            turns_cap(&self.pool.turns, of, rate)
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
        return self.pool.turns.n

    def counts(self, int of) -> dict:
        """Totals of one class: submitted, started, started_bytes, gone (driven by their waiters), waited_ns, ..."""
        if not 0 <= of < CLASSES:
            raise UsageError(f"there is no class {of}")
        pthread_mutex_lock(&self.pool.lock)
        found = class_counts(&self.pool.turns.classes[of])
        pthread_mutex_unlock(&self.pool.lock)
        return found

    def submit(self, Batch batch not None, int of=CLASS_DIRECT) -> None:
        """Queue a batch in a class. QueueFull (retryable) when the bound is reached, EngineClosed after `close`."""
        cdef mp_batch* raw = batch.raw
        cdef mp_turn* turn
        cdef bint start
        if not 0 <= of < CLASSES:
            raise UsageError(f"there is no class {of}")
        turn = <mp_turn*>malloc(sizeof(mp_turn))
        if turn == NULL:
            raise OutOfMemory("no memory to queue a batch")
        turn.what = raw
        turn.of = <uint8_t>of
        turn.n_bytes = bytes_of(raw)
        turn.until_ns = raw.deadline_ns
        pthread_mutex_lock(&self.pool.lock)
        if self.pool.turns.n >= self.queued_max:
            pool_sweep(&self.pool)
        if self.pool.stop or self.pool.turns.n >= self.queued_max:
            pthread_mutex_unlock(&self.pool.lock)
            free(turn)
            if self.pool.stop:
                raise EngineClosed()
            raise QueueFull(f"{self.queued_max} batches are queued; wait for some, or raise queued_batches_max",
                            limit=self.queued_max)
        if not mp_swap_if32(&raw.state, STATE_NEW, STATE_HELD if self.pool.turns.classes[of].rate else STATE_QUEUED):
            pthread_mutex_unlock(&self.pool.lock)
            free(turn)
            raise UsageError("a batch is submitted once, and not after it was driven")
        mp_add32(&raw.references, 1)
        turns_add(&self.pool.turns, turn, mp_now_ns())
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
        self.pool.turns.uncapped = 1
        pthread_cond_broadcast(&self.pool.work)
        pthread_mutex_unlock(&self.pool.lock)
        with nogil:
            for i in range(running):
                mp_join_thread(self.handles[i])
            pool_work(&self.pool)  # what is queued where no thread could be started

    def forget_after_fork(self) -> None:
        """In a forked child there are no threads to join."""
        cdef int of
        self.running = 0
        for of in range(CLASSES):
            self.pool.turns.classes[of].head = NULL
            self.pool.turns.classes[of].tail = NULL
        self.pool.turns.n = 0
        self.pool.stop = 1
