"""What is posted on the rails to a peer, and what becomes of its completions.

Theory of operation
-------------------
A link is shared by all batches to a peer and has one lock. A batch posts *chains*: up to CHAIN_MAX requests behind
one doorbell, the last one signalled. WRITEs are followed by a READ of one byte (the mark), so that a completed chain
has landed and not only left. RC queue pairs work in order: a signal means that the whole chain, and all before it, are
done. Requests have running numbers; a completion with one that is not in the ring belongs to an earlier queue pair.

When a request fails, or a batch must end now, its queue pair is *broken*: put into ERR, in which the device ends all
that is posted. Nothing of it is done again, or reported, before the completion of its last request has come (or the
queue pair was reset, when it does not come): so nothing lands late. Then the pieces go back to their batches, which
post them on other rails. Broken pairs are replaced from outside (moonpool.transport.rdma), woken by `wake_fd`.

One of the threads that wait (the leader) sleeps on the completion channels and takes in the completions of all; others
wait for its word. No thread belongs to a link.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport realloc
from moonpool.native.io.batch cimport (
    ACCESS_DENIED,
    COMPLETE,
    NO_MEMORY,
    NOT_REGISTERED,
    OP_READ,
    STALE_HANDLE,
    pthread_cond_broadcast,
)
from moonpool.native.io.guard cimport mp_count, mp_tally
from moonpool.native.paths.rails cimport rails_done, rails_failed, rails_probed, rails_unbook
from moonpool.native.rdma.bounce cimport arena_give
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


cdef void run_redo(mp_run* run, mp_piece* piece) noexcept nogil:
    """A piece is to be done again."""
    cdef mp_piece* grown
    cdef uint32_t room
    cdef uint64_t i
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


cdef void piece_back(mp_run* run, mp_piece* piece) noexcept nogil:
    """A broken rail gives a piece back: to be done again, unless its transfers have ended."""
    give_slot(run, piece)
    if piece.count:
        run_redo(run, piece)


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
    pair.requests[n - 1].send_flags = IBV_SEND_SIGNALED
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
    link.discard(link.owner, k)
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
