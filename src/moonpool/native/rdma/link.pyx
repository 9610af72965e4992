"""A link: the rails to one peer, as those hold it who make and repair them (queues.pyx has what happens on it).

Every method lets go of the GIL before it takes the lock, because a thread that holds the lock may ask for the GIL.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from moonpool.native.io.batch cimport (
    mp_cond_wait_until,
    mp_sync_init,
    pthread_cond_broadcast,
    pthread_cond_destroy,
    pthread_mutex_destroy,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from moonpool.native.io.guard cimport mp_deadline_ns, mp_now_ns
from moonpool.native.paths.rails cimport (
    RAIL_UP,
    rails_add,
    rails_failed,
    rails_idle_probe,
    rails_init,
    rails_link,
    rails_probed,
)
from moonpool.native.rdma.bounce cimport SCRATCH_BYTES, BounceArena
from moonpool.native.rdma.queues cimport (
    BROKE_ASIDE,
    BROKE_FAILED,
    BROKE_FATAL,
    BROKE_PORT,
    CHAIN_MAX,
    NICS_MAX,
    PAIR_BROKEN,
    PAIR_NONE,
    PAIR_PROBING,
    PAIR_UP,
    PAIRS_MAX,
    SGES_MAX,
    link_poll,
    mp_chain,
    mp_link,
    mp_pair,
    mp_piece,
    pair_break,
    pair_post,
)
from moonpool.native.verbs.devices cimport Device
from moonpool.native.verbs.ibverbs cimport ibv_wc, mp_cq_poll
from moonpool.native.verbs.queue_pairs cimport CompletionQueue, QueuePair

from moonpool.errors import MoonpoolError, OutOfMemory, UsageError

cdef enum:
    POLL_AT_ONCE = 32

CHAIN = CHAIN_MAX
STATES = ("none", "up", "probing", "broken")
CAUSES = ("", "aside", "failed", "port", "fatal")


cdef void discard_pair(void* owner, uint32_t k) noexcept nogil:
    with gil:
        (<Link>owner).discard(k)


cdef bint busy(mp_link* link) noexcept nogil:
    """True while anything is posted."""
    cdef uint32_t k
    for k in range(link.n_pairs):
        if link.pairs[k].head != link.pairs[k].tail:
            return True
    return False


cdef class Link:
    """Rails to one peer. Methods are safe from any thread; none waits but `shut`."""

    def __cinit__(self, list devices not None, BounceArena arena not None, int wake_fd):
        cdef Device device
        if not 1 <= len(devices) <= NICS_MAX:
            raise UsageError(f"a link has 1 to {NICS_MAX} NICs")
        self.raw = <mp_link*>calloc(1, sizeof(mp_link))
        if self.raw == NULL:
            raise MemoryError
        mp_sync_init(&self.raw.lock, &self.raw.news)
        rails_init(&self.raw.rails, 0)
        self.raw.n_nics = <uint32_t>len(devices)
        for k, device in enumerate(devices):
            self.raw.nics[k].calls = device.calls
            self.raw.nics[k].pd = device.pd
        self.raw.arena = arena.raw
        self.raw.wake_fd = wake_fd
        self.raw.sges_max = SGES_MAX
        self.raw.owner = <void*>self
        self.raw.discard = discard_pair
        self.devices = devices
        self.arena = arena
        self.queues = []
        self.queue_pairs = []

    def __dealloc__(self):
        cdef uint32_t k
        if self.raw == NULL:
            return
        for k in range(self.raw.n_pairs):
            free(self.raw.pairs[k].chains)
            free(self.raw.pairs[k].pieces)
            free(self.raw.pairs[k])
        pthread_mutex_destroy(&self.raw.lock)
        pthread_cond_destroy(&self.raw.news)
        free(self.raw)

    def set_bounds(self, uint64_t spin_ns, uint64_t silence_ns, uint64_t stall_ns, uint32_t pieces_max) -> None:
        """Before the first rail: how long to spin, when a silent rail has failed, when a batch without rails has, and
        the local pieces of a request that every rail takes.
        """
        self.raw.sges_max = min(max(pieces_max, 1), SGES_MAX)
        self.raw.spin_ns = spin_ns
        self.raw.silence_ns = silence_ns
        self.raw.stall_ns = stall_ns

    def add_rail(self, CompletionQueue queue not None, uint32_t local_nic, uint32_t remote_nic, uint32_t depth,
                 uint64_t bytes_per_s) -> int:
        """A rail between two NICs, without a queue pair yet; its number. `queue` has more than `depth` entries."""
        cdef mp_pair* pair
        cdef int k
        if len(self.queues) >= PAIRS_MAX or local_nic >= self.raw.n_nics or depth < CHAIN_MAX + 2:
            raise UsageError(f"a link has up to {PAIRS_MAX} rails of at least {CHAIN_MAX + 2} requests")
        pair = <mp_pair*>calloc(1, sizeof(mp_pair))
        if pair == NULL:
            raise MemoryError
        pair.chains = <mp_chain*>calloc(depth, sizeof(mp_chain))
        pair.pieces = <mp_piece*>calloc(depth, sizeof(mp_piece))
        if pair.chains == NULL or pair.pieces == NULL:
            free(pair.chains)
            free(pair.pieces)
            free(pair)
            raise OutOfMemory(f"no memory for a rail of {depth} requests")
        pair.cq = &queue.raw
        pair.depth = depth
        pair.local_nic = local_nic
        pair.remote_nic = remote_nic
        pair.scratch = self.raw.arena.scratch + 64 * (len(self.queues) % (SCRATCH_BYTES // 64))
        pair.scratch_lkey = self.raw.arena.keys.lkeys[local_nic]
        self.queues.append(queue)
        self.queue_pairs.append(None)
        with nogil:
            pthread_mutex_lock(&self.raw.lock)
            k = rails_add(&self.raw.rails, bytes_per_s, 5000, 256, depth)
            self.raw.pairs[k] = pair
            self.raw.n_pairs = <uint32_t>k + 1
            pthread_mutex_unlock(&self.raw.lock)
        return k

    def install(self, uint32_t k, QueuePair queue_pair not None, uint64_t mark_address, uint32_t mark_rkey,
                bint probe) -> None:
        """Give a rail its connected queue pair; the one before is destroyed. Drained pairs and new rails only.

        With `probe` the rail carries nothing before a READ of the mark has succeeded on it.
        """
        cdef mp_pair* pair = self.raw.pairs[k]
        cdef ibv_wc[POLL_AT_ONCE] old
        cdef uint64_t now = mp_now_ns()
        cdef bint fits
        with nogil:
            pthread_mutex_lock(&self.raw.lock)
            fits = pair.state in (PAIR_NONE, PAIR_BROKEN) and pair.head == pair.tail and not self.raw.closing
            if fits:
                while mp_cq_poll(pair.cq, POLL_AT_ONCE, old) > 0:
                    pass  # what the queue pair before left behind
                pair.repairs += pair.state == PAIR_BROKEN
                pair.qp = queue_pair.raw
                pair.mark_address = mark_address
                pair.mark_rkey = mark_rkey
                pair.state = PAIR_PROBING if probe else PAIR_UP
                pair.cause = 0
                if probe:
                    pair_post(self.raw, k, NULL, True, now)
                if self.raw.waiters:
                    pthread_cond_broadcast(&self.raw.news)
            pthread_mutex_unlock(&self.raw.lock)
        if not fits:
            raise UsageError(f"rail {k} has a queue pair, or work on it, or the link is closed")
        before = self.queue_pairs[k]
        self.queue_pairs[k] = queue_pair
        if before is not None:
            before.close()

    cdef object discard(self, uint32_t k):
        before = self.queue_pairs[k]
        if before is not None:
            before.close()

    def queue(self, uint32_t k) -> CompletionQueue:
        """The completion queue of a rail, for its next queue pair."""
        return self.queues[k]

    def poll(self) -> int:
        """Take in completions; for whoever waits for probes. How many there were."""
        cdef int n
        with nogil:
            pthread_mutex_lock(&self.raw.lock)
            n = link_poll(self.raw, mp_now_ns())
            pthread_mutex_unlock(&self.raw.lock)
        return n

    @property
    def healthy(self) -> bool:
        """True while no rail waits for a repair or a probe, as a cheap look tells."""
        cdef uint32_t k
        for k in range(self.raw.n_pairs):
            if self.raw.pairs[k].state > PAIR_UP or self.raw.rails.rails[k].state != RAIL_UP:
                return False
        return True

    def due(self) -> list:
        """Rails whose queue pair must be replaced now: (rail, whether to probe it). Probes that need none are sent."""
        cdef uint32_t k, n = 0
        cdef int probing
        cdef uint64_t now = mp_now_ns()
        cdef uint32_t[PAIRS_MAX] found
        cdef bint[PAIRS_MAX] probes
        cdef mp_pair* pair
        with nogil:
            pthread_mutex_lock(&self.raw.lock)
            for k in range(self.raw.n_pairs):
                pair = self.raw.pairs[k]
                if pair.state == PAIR_BROKEN and pair.cause == BROKE_ASIDE and pair.head == pair.tail:
                    found[n] = k
                    probes[n] = False
                    n += 1
            while not self.raw.closing:
                probing = rails_idle_probe(&self.raw.rails, now)
                if probing < 0:
                    break
                pair = self.raw.pairs[probing]
                if pair.state == PAIR_BROKEN and pair.head == pair.tail and pair.cause <= BROKE_FAILED:
                    k = 0
                    while k < n and found[k] != <uint32_t>probing:
                        k += 1
                    found[k] = probing
                    probes[k] = True
                    n += k == n
                elif pair.state == PAIR_UP and pair.used < pair.depth:
                    pair_post(self.raw, probing, NULL, True, now)
                elif pair.state != PAIR_PROBING:
                    rails_probed(&self.raw.rails, probing, False, now)
            pthread_mutex_unlock(&self.raw.lock)
        return [(found[k], bool(probes[k])) for k in range(n)]

    def not_replaced(self, uint32_t k, bint probe) -> None:
        """A rail that was due got no new queue pair: it is tried again later, with growing back-off."""
        cdef mp_pair* pair = self.raw.pairs[k]
        cdef uint64_t now = mp_now_ns()
        with nogil:
            pthread_mutex_lock(&self.raw.lock)
            if probe and pair.state != PAIR_NONE:
                rails_probed(&self.raw.rails, k, False, now)
            else:
                rails_failed(&self.raw.rails, k, 0, now)
            if pair.state == PAIR_NONE:
                pair.state = PAIR_BROKEN
            if pair.cause <= BROKE_ASIDE:
                pair.cause = BROKE_FAILED
            pthread_mutex_unlock(&self.raw.lock)

    def nic_down(self, uint32_t nic, bint fatal) -> None:
        """Our NIC's port went down, or the NIC itself: what its rails carry goes to others."""
        cdef uint32_t k
        cdef uint64_t now = mp_now_ns()
        with nogil:
            pthread_mutex_lock(&self.raw.lock)
            for k in range(self.raw.n_pairs):
                if self.raw.pairs[k].local_nic == nic:
                    pair_break(self.raw, k, BROKE_FATAL if fatal else BROKE_PORT, now)
                    rails_link(&self.raw.rails, k, False, now)
            pthread_mutex_unlock(&self.raw.lock)

    def nic_up(self, uint32_t nic) -> None:
        """The port is back: its rails are probed."""
        cdef uint32_t k
        cdef uint64_t now = mp_now_ns()
        with nogil:
            pthread_mutex_lock(&self.raw.lock)
            for k in range(self.raw.n_pairs):
                if self.raw.pairs[k].local_nic == nic and self.raw.pairs[k].cause != BROKE_FATAL:
                    if self.raw.pairs[k].cause == BROKE_PORT:
                        self.raw.pairs[k].cause = BROKE_FAILED
                    rails_link(&self.raw.rails, k, True, now)
            pthread_mutex_unlock(&self.raw.lock)

    def shut(self, double timeout_s) -> bool:
        """End all work, wait for the batches inside, and destroy the queue pairs.

        False when a batch stayed, or a device refused: then call it again.
        """
        cdef uint32_t k
        cdef uint64_t deadline = mp_deadline_ns(timeout_s)
        cdef bint empty
        with nogil:
            pthread_mutex_lock(&self.raw.lock)
            self.raw.closing = True
            for k in range(self.raw.n_pairs):
                pair_break(self.raw, k, BROKE_ASIDE, mp_now_ns())
            pthread_cond_broadcast(&self.raw.news)
            while self.raw.runs or busy(self.raw):
                link_poll(self.raw, mp_now_ns())
                if not self.raw.runs and not busy(self.raw):
                    break
                if mp_now_ns() >= deadline:
                    break
                self.raw.waiters += 1
                mp_cond_wait_until(&self.raw.news, &self.raw.lock, mp_now_ns() + 1000000)
                self.raw.waiters -= 1
            empty = self.raw.runs == 0
            pthread_mutex_unlock(&self.raw.lock)
        if not empty:
            return False
        refused = False
        for one in (*self.queue_pairs, *self.queues):
            if one is not None:
                try:
                    one.close()
                except MoonpoolError:
                    refused = True
        return not refused

    def rails(self) -> list:
        """Each rail as it is: (state, why it is broken, local NIC, remote NIC, bytes READ, bytes written, breaks,
        repairs, requests posted)."""
        return [
            (STATES[self.raw.pairs[k].state], CAUSES[self.raw.pairs[k].cause], self.raw.pairs[k].local_nic,
             self.raw.pairs[k].remote_nic, self.raw.pairs[k].moved[0], self.raw.pairs[k].moved[1],
             self.raw.pairs[k].breaks, self.raw.pairs[k].repairs, self.raw.pairs[k].used)
            for k in range(self.raw.n_pairs)
        ]

    @property
    def resets(self) -> int:
        """Queue pairs that did not end their work in time and were reset."""
        return self.raw.resets

    @property
    def access_errors(self) -> int:
        """Requests that a NIC refused."""
        return self.raw.access_errors
