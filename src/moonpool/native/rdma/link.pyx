"""Rails to one peer: queue pairs, their rings of posted requests, and what becomes of completions.

Theory of operation
-------------------
A link is shared by all batches to a peer and has one lock. A batch posts *chains*: up to CHAIN_MAX requests behind one
doorbell, the last one signalled. WRITEs are followed by a READ of one byte (the mark), so that a completed chain has
landed and not only left. RC queue pairs work in order: a signal means that the whole chain, and all before it, are done.
Requests have running numbers; a completion of a number that is not in the ring belongs to an earlier queue pair.

When a request fails, or a batch must end now, its queue pair is *broken*: put into ERR, in which the device ends all that
is posted. Nothing of it is done again, or reported, before the completion of its last request has come (or the queue pair
was reset, when it does not come): so nothing lands late. Then the pieces go back to their batches, which post them on
other rails. Broken pairs are replaced from outside (moonpool.transport.rdma), woken by `wake_fd`.

One of the threads that wait (the leader) sleeps on the completion channels and takes in the completions of all; others
wait for its word. No thread belongs to a link.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memset
from moonpool.native.io.batch cimport (
    ACCESS_DENIED,
    COMPLETE,
    NO_MEMORY,
    NOT_REGISTERED,
    OP_READ,
    STALE_HANDLE,
    mp_cond_wait_until,
    mp_sync_init,
    pthread_cond_broadcast,
    pthread_cond_destroy,
    pthread_mutex_destroy,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from moonpool.native.io.guard cimport mp_count, mp_deadline_ns, mp_now_ns, mp_tally
from moonpool.native.paths.rails cimport (
    rails_add,
    rails_done,
    rails_failed,
    rails_idle_probe,
    rails_init,
    rails_link,
    rails_probed,
    rails_unbook,
)
from moonpool.native.rdma.bounce cimport SCRATCH_BYTES, BounceArena, arena_give
from moonpool.native.verbs.devices cimport Device
from moonpool.native.verbs.ibverbs cimport (
    IBV_QPS_ERR,
    IBV_QPS_RESET,
    IBV_WC_LOC_PROT_ERR,
    IBV_WC_REM_ACCESS_ERR,
    IBV_WC_SUCCESS,
    IBV_WC_WR_FLUSH_ERR,
    IBV_WR_RDMA_READ,
    ibv_post_send,
    ibv_send_wr,
    ibv_wc,
    mp_cq_poll,
    mp_qp_to_state,
    mp_wr_fill,
)
from moonpool.native.verbs.queue_pairs cimport CompletionQueue, QueuePair

from moonpool.errors import OutOfMemory, UsageError

cdef extern from "infiniband/verbs.h" nogil:
    enum:
        IBV_SEND_SIGNALED

cdef extern from "unistd.h" nogil:
    ssize_t write(int fd, const void* data, size_t n)

cdef enum:
    POLL_AT_ONCE = 32
    # How long a broken queue pair may take to end what is posted before it is reset.
    DRAIN_NS = 1000000000
    REDO_ROOM_AT_LEAST = 64

CHAIN = CHAIN_MAX
STATES = ("none", "up", "probing", "broken")
CAUSES = ("", "aside", "failed", "port", "fatal")


# ---- what becomes of pieces ------------------------------------------------------------------------------------------

cdef void run_fail(mp_run* run, uint64_t i, int status) noexcept nogil:
    """Transfer i ends with a status, whatever is still under way of it."""
    if run.left[i] < FAILED:
        run.left[i] = FAILED
        run.batch.status[i] = <unsigned char>status
        mp_tally(&run.path.stats.errors[run.batch.op != OP_READ][status], 1)


cdef void run_settle(mp_run* run, mp_piece* piece) noexcept nogil:
    """The bytes of a piece are where they belong."""
    cdef uint64_t i, n
    for i in range(piece.first, <uint64_t>piece.first + piece.count):
        n = piece.length if piece.count == 1 else run.batch.length[i]
        if run.left[i] >= FAILED:
            continue
        run.left[i] -= n
        run.n_bytes += n
        if run.left[i] == 0:
            run.carried += 1
            if run.batch.digest == NULL:
                run.batch.status[i] = COMPLETE


cdef void give_slot(mp_run* run, mp_piece* piece) noexcept nogil:
    if piece.slot >= 0:
        arena_give(run.link.arena, piece.slot)
        run.n_slots -= 1
        piece.slot = -1


cdef void piece_done(mp_run* run, mp_piece* piece) noexcept nogil:
    if piece.slot >= 0 and run.batch.op == OP_READ:
        run.landed[run.n_landed] = piece[0]  # has room for all slots that the run may hold
        run.n_landed += 1
        return
    give_slot(run, piece)
    run_settle(run, piece)


cdef void piece_back(mp_run* run, mp_piece* piece) noexcept nogil:
    """A broken rail gives a piece back: to be done again, unless its transfers have ended."""
    cdef mp_piece* grown
    cdef uint32_t room
    cdef uint64_t i
    give_slot(run, piece)
    if piece.count == 0:
        return
    if run.n_redo == run.redo_room:
        room = run.redo_room * 2 if run.redo_room else REDO_ROOM_AT_LEAST
        grown = <mp_piece*>realloc(run.redo, room * sizeof(mp_piece))
        if grown == NULL:
            for i in range(piece.first, <uint64_t>piece.first + piece.count):
                run_fail(run, i, NO_MEMORY)
            return
        run.redo = grown
        run.redo_room = room
    run.redo[run.n_redo] = piece[0]
    run.n_redo += 1


cdef void piece_refused(mp_run* run, mp_piece* piece, int wc_status) noexcept nogil:
    """The peer's NIC, or ours, forbids what a piece asks for: its transfers end, and are not tried again."""
    cdef uint64_t i
    cdef int status
    for i in range(piece.first, <uint64_t>piece.first + piece.count):
        if wc_status != IBV_WC_REM_ACCESS_ERR:
            status = NOT_REGISTERED
        elif mp_count(&run.segment.slots[<uint32_t>run.batch.region[i]].handle) != run.batch.region[i]:
            status = STALE_HANDLE
        else:
            status = ACCESS_DENIED
        run_fail(run, i, status)
    piece.count = 0


# ---- chains ----------------------------------------------------------------------------------------------------------

cdef void wake_repairer(mp_link* link) noexcept nogil:
    cdef uint64_t one = 1
    write(link.wake_fd, &one, 8)


cdef void chain_done(mp_link* link, uint32_t k, mp_chain* chain, uint64_t now) noexcept nogil:
    cdef mp_pair* pair = link.pairs[k]
    cdef mp_piece* piece
    cdef uint32_t n
    pair.used -= chain.n_requests
    pair.bytes -= chain.bytes
    if chain.run == NULL:
        rails_probed(&link.rails, k, True, now)
        if pair.state == PAIR_PROBING:
            pair.state = PAIR_UP
            pair.cause = 0
        return
    for n in range(chain.n_pieces):
        piece = &pair.pieces[(chain.first_piece + n) % pair.depth]
        rails_done(&link.rails, k, piece.length, now)
        pair.moved[chain.run.batch.op != OP_READ] += piece.length
        piece_done(chain.run, piece)
    chain.run.chains -= 1


cdef void chain_back(mp_link* link, uint32_t k, mp_chain* chain, uint64_t now) noexcept nogil:
    """What a broken pair did not finish."""
    cdef mp_pair* pair = link.pairs[k]
    cdef mp_piece* piece
    cdef uint32_t n
    if chain.run == NULL:
        rails_probed(&link.rails, k, False, now)
        return
    for n in range(chain.n_pieces):
        piece = &pair.pieces[(chain.first_piece + n) % pair.depth]
        if pair.cause == BROKE_ASIDE:
            rails_unbook(&link.rails, k, piece.length)
        else:
            rails_failed(&link.rails, k, piece.length, now)
        piece_back(chain.run, piece)
    chain.run.chains -= 1
    chain.run.breaks += 1


cdef void pair_drained(mp_link* link, uint32_t k, uint64_t now) noexcept nogil:
    """Nothing of a broken pair can land any more."""
    cdef mp_pair* pair = link.pairs[k]
    while pair.head != pair.tail:
        chain_back(link, k, &pair.chains[pair.head % pair.depth], now)
        pair.head += 1
    pair.used = 0
    pair.bytes = 0
    wake_repairer(link)
    if link.waiters:
        pthread_cond_broadcast(&link.news)


cdef void pair_break(mp_link* link, uint32_t k, int cause, uint64_t now) noexcept nogil:
    """End what is posted on a pair; the first cause counts, but that a port or a NIC is gone always does."""
    cdef mp_pair* pair = link.pairs[k]
    if pair.state == PAIR_NONE:
        return
    if pair.state == PAIR_BROKEN:
        if cause >= BROKE_PORT:
            pair.cause = cause
        return
    pair.state = PAIR_BROKEN
    pair.cause = cause
    pair.breaks += 1
    pair.drain_ns = now + DRAIN_NS
    mp_qp_to_state(link.nics[pair.local_nic].calls, pair.qp, IBV_QPS_ERR)
    if pair.head == pair.tail:
        pair_drained(link, k, now)


cdef void pair_post(mp_link* link, uint32_t k, mp_run* run, bint marked, uint64_t now) noexcept nogil:
    """Post the prepared requests of a pair as one chain; `marked` adds the READ that flushes WRITEs, or probes."""
    cdef mp_pair* pair = link.pairs[k]
    cdef uint64_t seq = pair.tail, n = pair.open_n, i, posted
    cdef mp_chain* chain = &pair.chains[seq % pair.depth]
    cdef ibv_send_wr* bad = NULL
    cdef int rc
    if marked:
        pair.sges[256].addr = pair.scratch
        pair.sges[256].length = 1
        pair.sges[256].lkey = pair.scratch_lkey
        mp_wr_fill(&pair.requests[n], 0, IBV_WR_RDMA_READ, &pair.sges[256], 1, pair.mark_address, pair.mark_rkey, 0,
                   NULL)
        n += 1
    for i in range(n):
        pair.requests[i].wr_id = seq << 8 | i
        pair.requests[i].next = &pair.requests[i + 1] if i + 1 < n else NULL
    pair.requests[n - 1].send_flags = link.signalled
    chain.run = run
    chain.first_piece = pair.next_piece
    chain.n_pieces = pair.open_n
    chain.n_requests = <uint32_t>n
    chain.bytes = pair.open_bytes
    if pair.head == pair.tail:
        pair.progress_ns = now
    pair.tail += 1
    pair.next_piece += pair.open_n
    pair.used += <uint32_t>n
    pair.bytes += pair.open_bytes
    pair.open_n = 0
    pair.open_bytes = 0
    if run != NULL:
        run.chains += 1
    rc = ibv_post_send(pair.qp, &pair.requests[0], &bad)
    if rc == 0:
        pair.last_id = seq << 8 | (n - 1)
        return
    # Some may have been taken before the bad one: these are flushed, the others never existed.
    posted = 0
    while posted < n and bad != NULL and &pair.requests[posted] != bad:
        posted += 1
    if posted and bad != NULL:
        pair.last_id = seq << 8 | (posted - 1)
    pair_break(link, k, BROKE_FAILED, now)
    if pair.head + 1 == pair.tail and not (posted and bad != NULL):
        pair_drained(link, k, now)  # nothing was posted at all, and no completion will come


# ---- completions -----------------------------------------------------------------------------------------------------

cdef void pair_completion(mp_link* link, uint32_t k, ibv_wc* wc, uint64_t now) noexcept nogil:
    cdef mp_pair* pair = link.pairs[k]
    cdef uint64_t seq = wc.wr_id >> 8, n = wc.wr_id & 0xFF
    cdef mp_chain* chain
    if seq < pair.head or seq >= pair.tail:
        return  # of a queue pair before this one
    pair.progress_ns = now
    pair.completions += 1
    chain = &pair.chains[seq % pair.depth]
    if wc.status == IBV_WC_SUCCESS:
        if n + 1 != chain.n_requests:
            return
        while pair.head <= seq:  # a signal speaks for all before it
            chain_done(link, k, &pair.chains[pair.head % pair.depth], now)
            pair.head += 1
        if pair.state == PAIR_BROKEN and pair.head == pair.tail:
            pair_drained(link, k, now)
        return
    if wc.status == IBV_WC_REM_ACCESS_ERR or wc.status == IBV_WC_LOC_PROT_ERR:
        link.access_errors += 1
        if chain.run != NULL and n < chain.n_pieces:
            piece_refused(chain.run, &pair.pieces[(chain.first_piece + n) % pair.depth], wc.status)
            pair_break(link, k, BROKE_ASIDE, now)
        else:
            pair_break(link, k, BROKE_FAILED, now)  # the mark itself: the peer forgot us
    elif wc.status == IBV_WC_WR_FLUSH_ERR:
        pair_break(link, k, BROKE_ASIDE, now)  # put into ERR by somebody else
    else:
        pair_break(link, k, BROKE_FAILED, now)
    if wc.wr_id == pair.last_id:
        pair_drained(link, k, now)


cdef void pair_watch(mp_link* link, uint32_t k, uint64_t now) noexcept nogil:
    """Bounds: a busy rail without a completion has failed; a broken one that does not drain is reset."""
    cdef mp_pair* pair = link.pairs[k]
    if pair.head == pair.tail:
        return
    if pair.state != PAIR_BROKEN:
        if now - pair.progress_ns > link.silence_ns and now > pair.progress_ns:
            pair_break(link, k, BROKE_FAILED, now)
    elif now > pair.drain_ns:
        link.resets += 1
        if mp_qp_to_state(link.nics[pair.local_nic].calls, pair.qp, IBV_QPS_RESET) != 0 and pair.cause != BROKE_FATAL:
            destroy_pair(link, k)
        pair_drained(link, k, now)


cdef void destroy_pair(mp_link* link, uint32_t k) noexcept nogil:
    """The last means to keep a device from memory, when it takes no other order: destroying returns when it is done."""
    with gil:
        (<Link>link.owner).discard(k)
    link.pairs[k].qp = NULL


cdef int link_poll(mp_link* link, uint64_t now) noexcept nogil:
    """Take in what has completed, on all rails: how many completions. Lock held."""
    cdef ibv_wc[POLL_AT_ONCE] found
    cdef uint32_t k
    cdef int n, i, total = 0
    for k in range(link.n_pairs):
        if link.pairs[k].head == link.pairs[k].tail:
            continue
        n = mp_cq_poll(link.pairs[k].cq, POLL_AT_ONCE, found)
        if n < 0:
            pair_break(link, k, BROKE_FAILED, now)
            continue
        for i in range(n):
            pair_completion(link, k, &found[i], now)
        total += n
        pair_watch(link, k, now)
    if total and link.waiters:
        pthread_cond_broadcast(&link.news)
    return total


# ---- the face of a link ----------------------------------------------------------------------------------------------

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
        self.raw.signalled = IBV_SEND_SIGNALED
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

    def set_bounds(self, uint64_t spin_ns, uint64_t silence_ns, uint64_t stall_ns) -> None:
        """Before the first rail: how long to spin, when a silent rail has failed, when a batch without rails has."""
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
                if queue_pair.pieces_max < self.raw.sges_max:
                    self.raw.sges_max = queue_pair.pieces_max
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

    def due(self) -> list:
        """Rails whose queue pair must be replaced now, as (rail, whether to probe it); probes that need none are sent."""
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
        """End all work, wait for the batches inside, and destroy the queue pairs; False when a batch stayed."""
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
        for one in (*self.queue_pairs, *self.queues):
            if one is not None:
                one.close()
        return True

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


cdef bint busy(mp_link* link) noexcept nogil:
    cdef uint32_t k
    for k in range(link.n_pairs):
        if link.pairs[k].head != link.pairs[k].tail:
            return True
    return False
