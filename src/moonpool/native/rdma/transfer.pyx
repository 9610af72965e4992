"""The run loop: one batch, cut into pieces, posted on rails, and followed to its end by the thread that drives it.

Each piece is a work request: a range of a transfer, sized for the rail that was chosen for it (native/paths/rails), or
several small transfers that lie behind each other at the peer. A batch ends when nothing of it is posted any more: on
cancel, deadline or a dead segment it posts nothing new, gives what is under way GRACE_NS (none when the peer is gone),
and then breaks the rails that still carry some of it. What rails cannot carry stays PENDING for the next path.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset
from moonpool.native.io.batch cimport (
    COMPLETE,
    LOCAL_HOST,
    OP_READ,
    PEER_GONE,
    PENDING,
    STALE_HANDLE,
    STALLED,
    batch_interrupted,
    batch_on_device,
    mp_batch,
    mp_cond_wait_until,
    pthread_cond_broadcast,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from moonpool.native.io.copying cimport digest_chunks
from moonpool.native.io.guard cimport mp_count, mp_guard_leave, mp_now_ns, mp_tally
from moonpool.native.io.regions cimport EXTRA_RDMA, LocalRegions
from moonpool.native.io.segment cimport NativeSegment, mp_path, mp_path_record, mp_segment, path_takes
from moonpool.native.paths.rails cimport RAIL_NONE, rails_choose, rails_next, rails_unbook, rails_usable
from moonpool.native.rdma.bounce cimport SLOT_BYTES, mp_arena
from moonpool.native.rdma.keys cimport RemoteKeys
from moonpool.native.rdma.link cimport Link
from moonpool.native.rdma.local_side cimport copy_landed, forget_passing, look_up, register_passing, take_slot
from moonpool.native.rdma.queues cimport (
    BROKE_ASIDE,
    CHAIN_MAX,
    FAILED,
    NOT_MINE,
    PAIR_BROKEN,
    PAIR_UP,
    SGES_MAX,
    link_poll,
    mp_link,
    mp_pair,
    mp_piece,
    mp_run,
    pair_break,
    pair_post,
    run_fail,
    run_redo,
)
from moonpool.native.verbs.ibverbs cimport (
    IBV_WR_RDMA_READ,
    IBV_WR_RDMA_WRITE,
    ibv_sge,
    mp_chunk_room,
    mp_cq_arm,
    mp_cq_take,
    mp_lkey_of,
    mp_registration,
    mp_rkey_of,
    mp_wr_fill,
)
from moonpool.native.verbs.memory cimport MemoryRegistration

cdef extern from *:
    """
    #include <poll.h>
    #include <sched.h>
    """
    struct pollfd:
        int fd
        short events
        short revents
    int poll(pollfd* fds, unsigned long n, int timeout_ms) nogil
    short POLLIN
    int sched_yield() nogil

cdef enum:
    # What is under way when a batch ends early may arrive for so long, before its rails are broken for it.
    GRACE_NS = 100000000
    # With another path behind: how long a batch waits for a rail that is being replaced.
    PATIENCE_NS = 250000000
    # Sleepers look at cancel and deadline so often.
    TICK_NS = 10000000
    TICK_MS = 10
    SHORT_TICK_NS = 1000000
    # Small transfers that lie behind each other at the peer go as one request up to this size.
    GATHER_BYTES = 65536
    GATHER_EACH = 16384
    BYTES_UNDER_WAY = 16 << 20
    REQUEST_BYTES = 1 << 30
    BREAKS_MAX = 64
    PIECES_AT_ONCE = 64

cdef enum:
    CUT_NONE = 0       # nothing is left to cut
    CUT_ONE = 1
    CUT_WAIT = 2       # rails are full, or there is no bounce slot
    CUT_DRY = 3        # no rail may carry anything


# ---- cutting ---------------------------------------------------------------------------------------------------------

cdef uint32_t allowed_pairs(mp_link* link) noexcept nogil:
    """The rails that have room for one more request, and for the READ of the mark behind it."""
    cdef uint32_t k, mask = 0
    cdef mp_pair* pair
    for k in range(link.n_pairs):
        pair = link.pairs[k]
        if (pair.state == PAIR_UP and pair.used + pair.open_n + 2 <= pair.depth
                and pair.bytes + pair.open_bytes < BYTES_UNDER_WAY):
            mask |= <uint32_t>1 << k
    return mask


cdef uint32_t up_pairs(mp_link* link) noexcept nogil:
    cdef uint32_t k, mask = 0
    for k in range(link.n_pairs):
        if link.pairs[k].state == PAIR_UP:
            mask |= <uint32_t>1 << k
    return mask


cdef const mp_registration* far_of(mp_run* run, uint64_t i) noexcept nogil:
    return <const mp_registration*>run.segment.slots[<uint32_t>run.batch.region[i]].extra[<int>EXTRA_RDMA]


cdef bint taken_back(mp_run* run, uint64_t i) noexcept nogil:
    """True, and the transfer has ended, when its region was revoked."""
    if mp_count(&run.segment.slots[<uint32_t>run.batch.region[i]].handle) == run.batch.region[i]:
        return False
    run_fail(run, i, STALE_HANDLE)
    return True


cdef uint32_t gather(mp_run* run, uint64_t i, uint64_t* total) noexcept nogil:
    """How many transfers from i on can go as one request: small, remote neighbours, each in one registered chunk."""
    cdef mp_batch* batch = run.batch
    cdef uint32_t n = 0
    cdef uint64_t start = batch.offset[i], size
    total[0] = 0
    while i + n < batch.n and n < run.link.sges_max and n < SGES_MAX:
        size = batch.length[i + n]
        if (size > GATHER_EACH or total[0] + size > GATHER_BYTES or run.left[i + n] >= FAILED
                or batch.region[i + n] != batch.region[i] or batch.offset[i + n] != start + total[0]):
            break
        look_up(run, batch.local[i + n], size)
        if run.near == NULL or mp_chunk_room(run.near, batch.local[i + n]) < size:
            break
        if mp_chunk_room(far_of(run, i), far_of(run, i).base + start) < total[0] + size:
            break
        total[0] += size
        n += 1
    return n


cdef uint64_t room_at(mp_run* run, uint64_t i, uint64_t at) noexcept nogil:
    """Bytes from `at` of transfer i on that one request may carry; `near` is then its registration."""
    cdef mp_batch* batch = run.batch
    cdef const mp_registration* far = far_of(run, i)
    cdef uint64_t room = mp_chunk_room(far, far.base + batch.offset[i] + at), left = batch.length[i] - at
    room = left if left < room else room
    room = REQUEST_BYTES if room > REQUEST_BYTES else room
    look_up(run, batch.local[i], batch.length[i])
    left = SLOT_BYTES if run.near == NULL else mp_chunk_room(run.near, batch.local[i] + at)
    return left if left < room else room


cdef int cut_redo(mp_run* run, uint64_t now, uint32_t allowed, mp_piece* piece, int* rail) noexcept nogil:
    """The next of the pieces that a broken rail gave back."""
    cdef bint ended
    cdef uint64_t i
    while run.n_redo:
        piece[0] = run.redo[run.n_redo - 1]
        ended = False
        for i in range(piece.first, <uint64_t>piece.first + piece.count):
            ended = taken_back(run, i) or run.left[i] >= FAILED or ended
        if ended:
            run.n_redo -= 1
            if piece.count > 1:
                redo_alone(run, piece)
            continue
        rail[0] = rails_choose(&run.link.rails, piece.length, run.backlog, now, allowed)
        if rail[0] < 0:
            return CUT_DRY if rail[0] == RAIL_NONE else CUT_WAIT
        if not placed(run, piece):
            rails_unbook(&run.link.rails, rail[0], piece.length)
            return CUT_WAIT
        run.n_redo -= 1
        return CUT_ONE
    return CUT_NONE


cdef void redo_alone(mp_run* run, mp_piece* piece) noexcept nogil:
    """Take a gathered piece apart: what is left of it is done again one by one."""
    cdef mp_piece one
    cdef uint64_t i
    for i in range(piece.first, <uint64_t>piece.first + piece.count):
        if run.left[i] < FAILED:
            one.first = <uint32_t>i
            one.count = 1
            one.start = 0
            one.length = run.batch.length[i]
            one.slot = -1
            one.spare = 0
            run_redo(run, &one)


cdef bint placed(mp_run* run, mp_piece* piece) noexcept nogil:
    """Give a piece its bounce slot when it needs one; False when there is none now."""
    piece.slot = -1
    if piece.count > 1:
        return True
    look_up(run, run.batch.local[piece.first], run.batch.length[piece.first])
    return run.near != NULL or take_slot(run, piece)


cdef int cut_fresh(mp_run* run, uint64_t now, uint32_t allowed, mp_piece* piece, int* rail) noexcept nogil:
    """The next piece of what was never posted."""
    cdef mp_batch* batch = run.batch
    cdef uint64_t i, room, size = 0
    while run.next < batch.n and (run.left[run.next] >= FAILED or taken_back(run, run.next)):
        if run.left[run.next] == FAILED and batch.length[run.next] > run.at:
            run.backlog -= batch.length[run.next] - run.at
        run.next += 1
        run.at = 0
    if run.next == batch.n:
        return CUT_NONE
    i = run.next
    piece.first = <uint32_t>i
    piece.count = 1
    piece.start = run.at
    piece.slot = -1
    if run.at == 0 and batch.length[i] <= GATHER_EACH:
        piece.count = gather(run, i, &size)
        if piece.count > 1:
            piece.length = size
            rail[0] = rails_choose(&run.link.rails, size, run.backlog - size, now, allowed)
    if piece.count <= 1:
        piece.count = 1
        room = room_at(run, i, run.at)
        rail[0] = rails_next(&run.link.rails, room, run.backlog - room, now, allowed, &size)
        piece.length = size
    if rail[0] < 0:
        return CUT_DRY if rail[0] == RAIL_NONE else CUT_WAIT
    if not placed(run, piece):
        rails_unbook(&run.link.rails, rail[0], size)
        return CUT_WAIT
    run.backlog -= size
    run.at += size
    if piece.count > 1 or run.at == batch.length[i]:
        run.next += piece.count
        run.at = 0
    return CUT_ONE


# ---- posting ---------------------------------------------------------------------------------------------------------

cdef void prepare(mp_run* run, uint32_t k, mp_piece* piece) noexcept nogil:
    """Make the work request of a piece on a rail."""
    cdef mp_pair* pair = run.link.pairs[k]
    cdef mp_batch* batch = run.batch
    cdef mp_arena* arena = run.link.arena
    cdef const mp_registration* far = far_of(run, piece.first)
    cdef uint32_t n = pair.open_n, j
    cdef uint64_t there = far.base + batch.offset[piece.first] + piece.start, address
    cdef ibv_sge* sges = &pair.sges[n * SGES_MAX]
    pair.pieces[(pair.next_piece + n) % pair.depth] = piece[0]
    if piece.slot >= 0:
        address = <uint64_t><size_t>arena.base + <uint64_t>piece.slot * SLOT_BYTES
        sges[0].addr = address
        sges[0].length = <uint32_t>piece.length
        sges[0].lkey = arena.keys.lkeys[pair.local_nic]
    else:
        for j in range(piece.count):
            address = batch.local[piece.first + j] + (piece.start if piece.count == 1 else 0)
            sges[j].length = <uint32_t>(piece.length if piece.count == 1 else batch.length[piece.first + j])
            look_up(run, address, sges[j].length)
            sges[j].addr = address
            sges[j].lkey = mp_lkey_of(run.near, pair.local_nic, address)
    mp_wr_fill(&pair.requests[n], 0, IBV_WR_RDMA_READ if batch.op == OP_READ else IBV_WR_RDMA_WRITE, sges,
               1 if piece.slot >= 0 else <int>piece.count, there, mp_rkey_of(far, pair.remote_nic, there), 0, NULL)
    pair.open_n += 1
    pair.open_bytes += piece.length


cdef void post_open(mp_run* run, uint64_t now) noexcept nogil:
    """One doorbell for each rail that has something prepared."""
    cdef uint32_t k
    for k in range(run.link.n_pairs):
        if run.link.pairs[k].open_n:
            pair_post(run.link, k, run, run.batch.op != OP_READ, now)


cdef int post_some(mp_run* run, uint64_t now, bint* any) noexcept nogil:
    """Cut and post until rails are full or nothing is left; a CUT_*."""
    cdef mp_piece piece
    cdef int rail = 0, _n, outcome = CUT_NONE
    cdef uint32_t allowed
    for _n in range(PIECES_AT_ONCE):
        allowed = allowed_pairs(run.link)
        if allowed == 0 and up_pairs(run.link) & rails_usable(&run.link.rails):
            outcome = CUT_WAIT
            break
        outcome = cut_redo(run, now, allowed, &piece, &rail)
        if outcome == CUT_NONE:
            outcome = cut_fresh(run, now, allowed, &piece, &rail)
        if outcome != CUT_ONE:
            break
        prepare(run, <uint32_t>rail, &piece)
        any[0] = True
        if run.link.pairs[rail].open_n == CHAIN_MAX:
            pair_post(run.link, <uint32_t>rail, run, run.batch.op != OP_READ, now)
    post_open(run, now)
    if outcome == CUT_DRY and up_pairs(run.link) & rails_usable(&run.link.rails):
        outcome = CUT_WAIT  # those that are up are full
    return outcome


# ---- waiting ---------------------------------------------------------------------------------------------------------

cdef void wait_on_channels(mp_link* link, mp_run* run, uint64_t until) noexcept nogil:
    """Be the one that sleeps until a completion comes, or `until`. Lock held, and let go of while asleep."""
    cdef pollfd[32] watched
    cdef uint32_t k
    cdef unsigned long n = 0
    cdef uint64_t now
    link.leader = True
    for k in range(link.n_pairs):
        if link.pairs[k].state == PAIR_UP or link.pairs[k].head != link.pairs[k].tail:
            mp_cq_arm(link.pairs[k].cq)
            watched[n].fd = link.pairs[k].cq.channel.fd
            watched[n].events = POLLIN
            watched[n].revents = 0
            n += 1
    now = mp_now_ns()
    if link_poll(link, now) == 0 and run.n_landed == 0 and until > now:
        pthread_mutex_unlock(&link.lock)
        poll(watched, n, <int>((until - now + 999999) // 1000000))
        pthread_mutex_lock(&link.lock)
    for k in range(link.n_pairs):
        mp_cq_take(link.pairs[k].cq)
    link.leader = False
    if link.waiters:
        pthread_cond_broadcast(&link.news)


cdef void wait_for_news(mp_run* run, uint64_t idle_since, uint64_t now, uint64_t until) noexcept nogil:
    """Spin, then sleep: on the channels, or on the word of who does. Lock held on entry and exit."""
    cdef mp_link* link = run.link
    if run.chains and now - idle_since < link.spin_ns:
        pthread_mutex_unlock(&link.lock)
        sched_yield()
        pthread_mutex_lock(&link.lock)
        return
    if run.chains and not link.leader:
        wait_on_channels(link, run, until)
        return
    link.waiters += 1
    mp_cond_wait_until(&link.news, &link.lock, until if run.chains else now + SHORT_TICK_NS)
    link.waiters -= 1


cdef bint rails_may_come(mp_link* link) noexcept nogil:
    """True when a rail that broke for another's sake is about to be replaced."""
    cdef uint32_t k
    for k in range(link.n_pairs):
        if link.pairs[k].state == PAIR_BROKEN and link.pairs[k].cause == BROKE_ASIDE:
            return True
    return False


cdef bint is_last(mp_run* run) noexcept nogil:
    """True when no other path comes after this one."""
    return run.path.id + <uint32_t>1 == run.segment.n_paths


cdef bint has_run_dry(mp_run* run, uint64_t now) noexcept nogil:
    """No rail may carry anything: True when it is time to give up, and leave the rest to the next path."""
    cdef mp_link* link = run.link
    cdef bint last = is_last(run)
    if link.closing:
        run.stopping = PEER_GONE if last else 0
        return True
    if run.dry_ns == 0:
        run.dry_ns = now
    if last:
        if now - run.dry_ns >= link.stall_ns:
            run.stopping = STALLED
        return run.stopping != 0
    return not rails_may_come(link) or now - run.dry_ns >= PATIENCE_NS


cdef void look_for_the_end(mp_run* run, uint64_t now) noexcept nogil:
    """Cancel, deadline, a dead segment: stop posting; after the grace, break what still carries some of the batch."""
    cdef mp_link* link = run.link
    cdef mp_pair* pair
    cdef uint32_t k
    cdef uint64_t seq
    if not run.stopping:
        run.stopping = batch_interrupted(run.batch)
        if run.stopping:
            run.stop_ns = now if run.stopping == PEER_GONE else now + GRACE_NS
    if not run.stopping or run.broke_off or now < run.stop_ns:
        return
    run.broke_off = True
    for k in range(link.n_pairs):
        pair = link.pairs[k]
        for seq in range(pair.head, pair.tail):
            if pair.chains[seq % pair.depth].run == run:
                pair_break(link, k, BROKE_ASIDE, now)
                break


cdef void drive(mp_run* run) noexcept nogil:
    """Until nothing of the batch is posted, and nothing is left that rails could carry. Lock held."""
    cdef mp_link* link = run.link
    cdef uint64_t now = mp_now_ns(), idle_since = now, until
    cdef bint moved
    cdef int outcome
    while True:
        now = mp_now_ns()
        look_for_the_end(run, now)
        moved = link_poll(link, now) > 0
        moved = copy_landed(run) or moved
        outcome = CUT_NONE
        if run.breaks >= BREAKS_MAX and not run.stopping and is_last(run):
            run.stopping = STALLED
            run.stop_ns = now + GRACE_NS
        if not run.stopping and run.breaks < BREAKS_MAX:
            outcome = post_some(run, now, &moved)
        if outcome == CUT_DRY and run.chains == 0 and run.n_landed == 0:
            if has_run_dry(run, now):
                return
        elif outcome != CUT_DRY:
            run.dry_ns = 0
        if run.chains == 0 and run.n_landed == 0 and (outcome == CUT_NONE or run.stopping):
            return
        if run.batch.digest != NULL and hash_some(run):
            moved = True
        if moved:
            idle_since = now
            if link.runs > 1:
                pthread_mutex_unlock(&link.lock)
                sched_yield()
                pthread_mutex_lock(&link.lock)
            continue
        until = now + TICK_NS
        if run.batch.deadline_ns and not run.stopping and run.batch.deadline_ns < until:
            until = run.batch.deadline_ns if run.batch.deadline_ns > now else now
        wait_for_news(run, idle_since, now, until)


# ---- a batch ---------------------------------------------------------------------------------------------------------

cdef bint hash_some(mp_run* run) noexcept nogil:
    """Digest the next transfer that has arrived, in order. Lock held, and let go of while hashing."""
    cdef uint64_t i = run.hashed
    while i < run.batch.n and run.left[i] >= FAILED:
        i += 1
    run.hashed = i
    if i == run.batch.n or run.left[i] != 0:
        return False
    pthread_mutex_unlock(&run.link.lock)
    digest_chunks(<void*><size_t>run.batch.local[i], run.batch.length[i],
                  run.batch.digest + run.batch.digest_at[i])
    pthread_mutex_lock(&run.link.lock)
    run.batch.status[i] = COMPLETE
    run.hashed = i + 1
    return True


cdef bint known_to_nics(mp_run* run, uint64_t i) noexcept nogil:
    """True when a transfer's local side, memory of a device, is registered, and nothing asks for its digest."""
    if run.batch.digest != NULL:
        return False
    look_up(run, run.batch.local[i], run.batch.length[i])
    return run.near != NULL


cdef uint64_t begin(mp_run* run, mp_path* path, mp_segment* segment, mp_batch* batch) noexcept nogil:
    """How many transfers rails are to carry; 0 also when there is no memory to carry them.

    What lies in memory of a device is left to others unless the NICs know it: no CPU may bounce or digest it.
    """
    cdef uint64_t i, n = 0
    cdef const mp_registration* far
    memset(run, 0, sizeof(mp_run))
    run.batch = batch
    run.segment = segment
    run.path = path
    run.link = <mp_link*>path.context
    run.left = &run.one_left if batch.n == 1 else <uint64_t*>malloc(batch.n * sizeof(uint64_t))
    if run.left == NULL:
        return 0
    for i in range(batch.n):
        run.left[i] = NOT_MINE
        if path_takes(path, batch, i):
            far = <const mp_registration*>segment.slots[<uint32_t>batch.region[i]].extra[<int>EXTRA_RDMA]
            if far != NULL and (not batch_on_device(batch, i) or known_to_nics(run, i)):
                run.left[i] = batch.length[i]
                run.backlog += batch.length[i]
                n += 1
    return n


cdef int finish(mp_run* run, uint64_t started) noexcept nogil:
    """Statuses, counters, and whether transfers are left for other paths."""
    cdef mp_batch* batch = run.batch
    cdef uint64_t i, left = 0
    cdef int side = batch.op != OP_READ
    if batch.trusted:
        forget_passing(run)
    if run.in_own:
        mp_guard_leave(&run.segment.own.guard, run.own_ticket)
    for i in range(batch.n):
        if batch.status[i] != PENDING:
            continue
        if run.left[i] == 0:  # arrived, and not hashed yet
            digest_chunks(<void*><size_t>batch.local[i], batch.length[i], batch.digest + batch.digest_at[i])
            batch.status[i] = COMPLETE
        elif run.stopping:
            batch.status[i] = <unsigned char>run.stopping
            mp_tally(&run.path.stats.errors[side][run.stopping], 1)
        else:
            left += 1
            if run.left[i] != NOT_MINE:
                mp_tally(&run.path.stats.fallbacks, 1)
    if run.carried:
        mp_path_record(&run.path.stats, side, run.carried, run.n_bytes, mp_now_ns() - started)
    if run.left != &run.one_left:
        free(run.left)
    free(run.redo)
    return <int>(left > 0)


cdef int rdma_run(mp_path* path, mp_segment* segment, mp_batch* batch) noexcept nogil:
    """Carry what lies in regions whose keys are known. Returns whether transfers are left for other paths."""
    cdef mp_run run
    cdef uint64_t started = mp_now_ns()
    cdef mp_link* link = <mp_link*>path.context
    if begin(&run, path, segment, batch):
        if batch.trusted and batch.device == LOCAL_HOST:
            register_passing(&run)
        pthread_mutex_lock(&link.lock)
        link.runs += 1
        drive(&run)
        link.runs -= 1
        if link.closing or link.waiters:
            pthread_cond_broadcast(&link.news)
        pthread_mutex_unlock(&link.lock)
    elif run.left == NULL:
        return 1
    return finish(&run, started)


def add_rdma_path(NativeSegment segment not None, Link link not None) -> int:
    """Let a segment be reached over a link's rails; returns the path id."""
    cdef mp_path* path = segment.add_path(rdma_run, link.raw, link)
    path.device = 1
    return path.id


def note_own(LocalRegions table not None, uint64_t handle, MemoryRegistration registration not None) -> None:
    """Let own transfers use a region of ours by its local keys."""
    table.set_extra(handle, EXTRA_RDMA, registration.raw, registration)


def note_remote(NativeSegment segment not None, uint64_t handle, RemoteKeys keys not None) -> None:
    """Let transfers reach a region of a peer by its remote keys."""
    segment.set_extra(handle, EXTRA_RDMA, &keys.raw, keys)
