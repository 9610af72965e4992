"""The loop that carries a batch to namespaces: pieces of transfers become commands, or requests to a block device.

At most DEPTH are under way at once, and the loop ends with none: what the kernel has not answered may still touch
memory. The kernel answers a command at the latest when its own timeout has run out and its queue has been torn down, so
that timeout is set from the batch's deadline. A command that comes back because there is no way to its namespace waits
for one (`find_way`) and goes again. What memory or a range takes that does not fit the device:

- READ of part of a block, or into memory that is not aligned: whole blocks into aligned memory, and a copy;
- WRITE from such memory: the same the other way round, in whole blocks;
- WRITE of part of a block: an *edge*, written last, by the region's owner alone (`edges.pyx`).
"""

from libc.errno cimport ENOSPC
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy
from moonpool.native.disk.rings cimport BOUNCE_BYTES, bounce_memory
from moonpool.native.disk.uring cimport (
    IORING_FSYNC_DATASYNC,
    __kernel_timespec,
    io_uring_cqe,
    io_uring_cqe_seen,
    io_uring_get_sqe,
    io_uring_peek_cqe,
    io_uring_prep_fsync,
    io_uring_prep_read,
    io_uring_prep_write,
    io_uring_sqe,
    io_uring_sqe_set_data64,
    io_uring_submit_and_wait_timeout,
)
from moonpool.native.io.batch cimport (
    COMPLETE,
    NO_MEMORY,
    OP_READ,
    OUT_OF_RANGE,
    PEER_GONE,
    PENDING,
    STALE_HANDLE,
    STALLED,
    ACCESS_DENIED,
    batch_interrupted,
    mp_batch,
)
from moonpool.native.io.copying cimport digest_chunks
from moonpool.native.io.guard cimport mp_count, mp_now_ns, mp_tally
from moonpool.native.io.regions cimport EXTRA_NVMEOF
from moonpool.native.io.segment cimport mp_remote_region, path_takes
from moonpool.native.nvmeof.command cimport (
    MP_NVME_FLUSH,
    MP_NVME_READ,
    MP_NVME_WRITE,
    V_AGAIN,
    V_DONE,
    V_DOUBT,
    V_ELSEWHERE,
    V_INVALID,
    V_LOST,
    command_verdict,
    mp_nvme_durable,
    mp_nvme_fill,
    mp_nvme_prepare,
    nvme_uring_cmd,
    request_verdict,
)
from moonpool.native.nvmeof.namespace cimport (
    N_AGAIN,
    N_BOUNCED,
    N_COMMANDS,
    N_DEVICE_ERRORS,
    N_LOST,
    N_REQUESTS,
    NS_COMING_BACK,
    NS_LIVE,
    WAY_BLOCK,
    WAY_PASSTHROUGH,
    files_give,
    files_take,
    mp_ns,
    mp_ns_files,
    mp_ns_region,
    namespace_look,
)
cdef extern from "<time.h>" nogil:
    struct timespec:
        long tv_sec
        long tv_nsec
    int nanosleep(const timespec* howlong, timespec* rest)

cdef enum:
    FREE = 0
    READY = 1
    FLYING = 2
    NS_PER_MS = 1000000
    # A shorter timeout would have the kernel reset a controller for one slow command.
    COMMAND_MS_MIN = 2000
    WAIT_NS = 100000000
    PAUSE_NS = 500000
    LOOK_AGAIN_NS = 50000000
    AGAIN_TRIES = 12
    LOST_PAUSE_MS = 20
    LOST_PAUSE_MS_MAX = 200
    # How long an error that may be for good is taken for one that passes, while sysfs shows a way.
    DOUBT_NS = 2000000000
    AGAIN_MS_MAX = 256
    # Of memory that a command reads or writes by itself.
    COMMAND_ALIGN = 4
    SOME_EDGES = 64
    # Of an edge, so that some fit one control request.
    EDGE_BYTES = 16384


# ---- a run -----------------------------------------------------------------------------------------------------------

cdef int run_open(mp_ns_run* run) noexcept nogil:
    """Room for a batch's transfers; 0, or NO_MEMORY. `batch` and `ring` are set, what the caller did not set is 0."""
    cdef uint64_t i, n = run.batch.n
    run.bounce = bounce_memory(run.ring)
    run.open = &run.one_open
    run.verdict = &run.one_verdict
    if n > 1:
        run.open = <uint32_t*>calloc(n, sizeof(uint32_t))
        run.verdict = <uint8_t*>calloc(n, 1)
    if run.bounce == NULL or run.open == NULL or run.verdict == NULL:
        run_close(run)
        return NO_MEMORY
    for i in range(n):
        run.verdict[i] = PENDING
    return 0


cdef void run_close(mp_ns_run* run) noexcept nogil:
    """Free what `run_open` made; nothing is under way."""
    if run.open != &run.one_open:
        free(run.open)
        free(run.verdict)
    free(run.edge)


cdef mp_ns_region* region_of(mp_ns_run* run, uint64_t i) noexcept nogil:
    """Where transfer i goes by this way, or NULL when it does not."""
    cdef mp_ns_region* found = run.only
    if run.path != NULL:
        if not path_takes(run.path, run.batch, i):
            return NULL
        found = <mp_ns_region*>run.segment.slots[<uint32_t>run.batch.region[i]].extra[EXTRA_NVMEOF]
    if found == NULL or found.way == (WAY_BLOCK if run.passthrough else WAY_PASSTHROUGH):
        return NULL
    return found


cdef bint is_revoked(mp_ns_run* run, uint64_t i) noexcept nogil:
    cdef mp_remote_region* remote
    if run.path == NULL:
        return False
    remote = &run.segment.slots[<uint32_t>run.batch.region[i]]
    return mp_count(&remote.handle) != run.batch.region[i]


cdef void fail(mp_ns_run* run, uint64_t i, int status) noexcept nogil:
    """Transfer i fails with its first problem; V_ELSEWHERE leaves it to the next path."""
    if run.verdict[i] == PENDING:
        run.verdict[i] = <uint8_t>status


cdef void settle(mp_ns_run* run, uint64_t i) noexcept nogil:
    """Set the status of a transfer of which no piece is left."""
    cdef mp_batch* batch = run.batch
    if run.verdict[i] == V_ELSEWHERE:
        return
    if run.verdict[i] != PENDING:
        batch.status[i] = run.verdict[i]
        if run.path != NULL:
            mp_tally(&run.path.stats.errors[batch.op != OP_READ][run.verdict[i]], 1)
        return
    if batch.digest != NULL:
        digest_chunks(<void*><size_t>batch.local[i], batch.length[i], batch.digest + batch.digest_at[i])
    batch.status[i] = COMPLETE
    run.carried += 1
    run.n_bytes += batch.length[i]


cdef void piece_ended(mp_ns_run* run, uint64_t i) noexcept nogil:
    run.open[i] -= 1
    if run.open[i] == 0 and run.i > i:
        settle(run, i)


# ---- pieces ----------------------------------------------------------------------------------------------------------

cdef bint add_edge(mp_ns_run* run, uint64_t n) noexcept nogil:
    """Keep n bytes at the cut for the end; False when there is no memory."""
    cdef mp_ns_edge* grown
    if run.n_edges == run.edges_room:
        run.edges_room = run.edges_room * 2 + SOME_EDGES
        grown = <mp_ns_edge*>realloc(run.edge, run.edges_room * sizeof(mp_ns_edge))
        if grown == NULL:
            run.edges_room = run.n_edges
            fail(run, run.i, NO_MEMORY)
            return False
        run.edge = grown
    run.edge[run.n_edges].i = run.i
    run.edge[run.n_edges].at = run.at
    run.edge[run.n_edges].n = n
    run.n_edges += 1
    run.open[run.i] += 1
    return True


cdef uint64_t cut_read(mp_ns_run* run, mp_ns_slot* slot, uint64_t left, uint64_t within, bint aligned) noexcept nogil:
    """Bytes of the next piece of a READ; fills in whether they go through aligned memory."""
    cdef mp_ns* ns = slot.region.ns
    cdef uint64_t block = ns.block_bytes, n
    if within == 0 and left >= block and aligned:
        slot.bounced = False
        return min(left // block * block, ns.piece_bytes_max)
    slot.bounced = True
    n = min(left, <uint64_t>BOUNCE_BYTES - within)
    if within and left > BOUNCE_BYTES:
        n = block - within  # so that what follows begins with a block
    return n


cdef bint cut(mp_ns_run* run, mp_ns_slot* slot) noexcept nogil:
    """Cut the next piece off the current transfer into a free slot; False when that made no command."""
    cdef mp_batch* batch = run.batch
    cdef uint64_t i = run.i, left = batch.length[i] - run.at
    cdef uint64_t place = slot.region.start + batch.offset[i] + run.at
    cdef uint64_t block = slot.region.ns.block_bytes, within = place & (block - 1), n
    cdef char* here = <char*><size_t>(batch.local[i] + run.at)
    cdef uint32_t align = COMMAND_ALIGN if run.passthrough else slot.region.ns.memory_align
    cdef bint aligned = <size_t>here % align == 0
    if batch.op == OP_READ:
        n = cut_read(run, slot, left, within, aligned)
        slot.kind = MP_NVME_READ
    elif within or left < block:
        n = min(left, block - within, <uint64_t>EDGE_BYTES)
        if add_edge(run, n):
            run.at += n
        return False
    else:
        slot.bounced = not aligned
        n = min(left // block * block, slot.region.ns.piece_bytes_max if aligned else <uint64_t>BOUNCE_BYTES)
        slot.kind = MP_NVME_WRITE
    slot.i, slot.at, slot.n = i, run.at, n
    slot.first = place - within
    slot.n_blocks_bytes = (within + n + block - 1) & ~(block - 1)
    slot.data = here
    if slot.bounced:
        slot.data = run.bounce + (slot - &run.slots[0]) * BOUNCE_BYTES
        mp_tally(&slot.region.ns.counters[N_BOUNCED], 1)
        if slot.kind == MP_NVME_WRITE:
            memcpy(slot.data, here, n)
    slot_ready(run, slot)
    run.open[i] += 1
    run.at += n
    return True


cdef void slot_ready(mp_ns_run* run, mp_ns_slot* slot) noexcept nogil:
    slot.moved = slot.again_ns = slot.lost_ns = slot.tries = 0
    slot.state = READY
    run.ready += 1


cdef void fill(mp_ns_run* run) noexcept nogil:
    """Cut pieces while there are free slots and transfers."""
    cdef mp_batch* batch = run.batch
    cdef uint32_t k
    cdef mp_ns_slot* slot
    for k in range(DEPTH):
        slot = &run.slots[k]
        if slot.state != FREE:
            continue
        while run.i < batch.n:
            slot.region = region_of(run, run.i)
            if slot.region == NULL:
                run.i += 1
                continue
            if is_revoked(run, run.i):
                fail(run, run.i, STALE_HANDLE)
            elif batch.op != OP_READ and not slot.region.writable:
                fail(run, run.i, ACCESS_DENIED)
            if run.verdict[run.i] == PENDING and run.at < batch.length[run.i]:
                if cut(run, slot):
                    break
                continue
            run.i += 1
            run.at = 0
            if run.open[run.i - 1] == 0:
                settle(run, run.i - 1)
        if run.i >= batch.n:
            return


# ---- commands and requests -------------------------------------------------------------------------------------------

cdef uint32_t command_ms(mp_ns_run* run, mp_ns* ns) noexcept nogil:
    """After how long the kernel takes this command back: by the batch's deadline, if that leaves a fair time."""
    cdef uint64_t now, left = ns.command_ms
    if run.batch.deadline_ns:
        now = mp_now_ns()
        left = (run.batch.deadline_ns - now) // NS_PER_MS if run.batch.deadline_ns > now else 0
        left = max(left, <uint64_t>COMMAND_MS_MIN)
    return <uint32_t>min(left, <uint64_t>ns.command_ms)


cdef void issue(mp_ns_run* run, mp_ns_slot* slot, uint32_t k) noexcept nogil:
    """Put a ready slot's command or request into the ring."""
    cdef mp_ns* ns = slot.region.ns
    cdef mp_ns_files* files = files_take(ns)
    cdef io_uring_sqe* sqe
    cdef nvme_uring_cmd command
    cdef int fd
    if files == NULL:
        lose(run, slot)
        return
    fd = files.generic if run.passthrough else files.block
    sqe = io_uring_get_sqe(&run.ring.uring) if fd >= 0 else NULL
    if sqe == NULL:
        files_give(ns, files)
        if fd < 0:
            ended(run, slot, V_ELSEWHERE)
        return  # a full ring: later
    slot.files = files
    if run.passthrough:
        mp_nvme_fill(&command, slot.kind, ns.nsid, slot.first // ns.block_bytes,
                     <uint32_t>(slot.n_blocks_bytes // ns.block_bytes), slot.data, <uint32_t>slot.n_blocks_bytes,
                     slot.region.fua and slot.kind == MP_NVME_WRITE, command_ms(run, ns))
        mp_nvme_prepare(sqe, fd, &command)
        mp_tally(&ns.counters[N_COMMANDS], 1)
    else:
        prepare_request(slot, sqe, fd)
        mp_tally(&ns.counters[N_REQUESTS], 1)
    io_uring_sqe_set_data64(sqe, k)
    slot.state = FLYING
    run.ready -= 1
    run.flying += 1


cdef void prepare_request(mp_ns_slot* slot, io_uring_sqe* sqe, int fd) noexcept nogil:
    cdef unsigned int n = <unsigned int>(slot.n_blocks_bytes - slot.moved)
    if slot.kind == MP_NVME_FLUSH:
        io_uring_prep_fsync(sqe, fd, IORING_FSYNC_DATASYNC)
    elif slot.kind == MP_NVME_READ:
        io_uring_prep_read(sqe, fd, slot.data + slot.moved, n, slot.first + slot.moved)
    else:
        io_uring_prep_write(sqe, fd, slot.data + slot.moved, n, slot.first + slot.moved)
        if slot.region.fua:
            mp_nvme_durable(sqe)


cdef void lose(mp_ns_run* run, mp_ns_slot* slot) noexcept nogil:
    """There is no way to the slot's namespace: all wait for one."""
    if run.lost_since_ns == 0:
        run.lost_since_ns = mp_now_ns()
    if run.lost == NULL:
        mp_tally(&slot.region.ns.counters[N_LOST], 1)
    run.lost = slot.region.ns


cdef void again(mp_ns_run* run, mp_ns_slot* slot, uint64_t after_ms) noexcept nogil:
    slot.tries += 1
    slot.again_ns = mp_now_ns() + after_ms * NS_PER_MS
    slot.state = READY
    run.ready += 1


cdef void ended(mp_ns_run* run, mp_ns_slot* slot, int verdict) noexcept nogil:
    """A slot, ready or answered, is done with: its piece arrived, or its transfer fails."""
    cdef uint64_t i = slot.i
    if slot.state == READY:
        run.ready -= 1
    slot.state = FREE
    if verdict != V_DONE:
        fail(run, i, verdict)
    elif slot.bounced and slot.kind == MP_NVME_READ:
        memcpy(<void*><size_t>(run.batch.local[i] + slot.at),
               slot.data + (slot.region.start + run.batch.offset[i] + slot.at - slot.first), slot.n)
    piece_ended(run, i)


cdef bint worth_a_try(mp_ns_slot* slot, int verdict) noexcept nogil:
    """Whether a command that came back without a way may find one: sysfs tells of a loss a moment after commands do."""
    cdef uint64_t now = mp_now_ns()
    if slot.lost_ns == 0:
        slot.lost_ns = now
    return now - slot.lost_ns < (slot.region.ns.away_ns if verdict == V_LOST else <uint64_t>DOUBT_NS)


cdef void answered(mp_ns_run* run, mp_ns_slot* slot, int result) noexcept nogil:
    """The kernel is done with a slot's command: look at what became of it."""
    cdef mp_ns* ns = slot.region.ns
    cdef int verdict = command_verdict(result) if run.passthrough else request_verdict(result)
    files_give(ns, slot.files)
    slot.files = NULL
    run.flying -= 1
    if not run.passthrough and slot.kind == MP_NVME_FLUSH and result == 0:
        verdict = V_DONE
    if verdict == V_DONE:
        run.lost_since_ns = 0
        slot.moved += <uint64_t>result if not run.passthrough else 0
        if not run.passthrough and slot.moved < slot.n_blocks_bytes and slot.kind != MP_NVME_FLUSH:
            again(run, slot, 0)
            return
    elif verdict == V_AGAIN:
        mp_tally(&ns.counters[N_AGAIN], 1)
        if slot.tries < AGAIN_TRIES:
            again(run, slot, min(<uint64_t>1 << slot.tries, <uint64_t>AGAIN_MS_MAX))
            return
        verdict = STALLED
    elif verdict == V_LOST or verdict == V_DOUBT or verdict == V_INVALID:
        if worth_a_try(slot, verdict):
            again(run, slot, min(slot.tries * LOST_PAUSE_MS, <uint64_t>LOST_PAUSE_MS_MAX))
            lose(run, slot)
            return
        if verdict == V_INVALID:
            verdict = V_ELSEWHERE
        elif not run.passthrough and (result == 0 or result == -ENOSPC):
            verdict = OUT_OF_RANGE  # the device is there, and smaller than it was
        else:
            verdict = PEER_GONE
    if verdict != V_DONE:
        mp_tally(&ns.counters[N_DEVICE_ERRORS], 1)
    ended(run, slot, verdict)


# ---- the loop --------------------------------------------------------------------------------------------------------

cdef void reap(mp_ns_run* run) noexcept nogil:
    """Pass what is in the ring to the kernel, wait a moment for answers, and take all that are there."""
    cdef io_uring_cqe* cqe = NULL
    cdef __kernel_timespec patience
    cdef uint64_t k
    cdef int result
    patience.tv_sec = 0
    patience.tv_nsec = WAIT_NS
    io_uring_submit_and_wait_timeout(&run.ring.uring, &cqe, 1, &patience, NULL)
    cqe = NULL
    while io_uring_peek_cqe(&run.ring.uring, &cqe) == 0 and cqe != NULL:
        k = cqe.user_data
        result = cqe.res
        io_uring_cqe_seen(&run.ring.uring, cqe)
        if k < DEPTH and run.slots[k].state == FLYING:
            answered(run, &run.slots[k], result)


cdef void issue_ready(mp_ns_run* run) noexcept nogil:
    cdef uint64_t now = mp_now_ns()
    cdef uint32_t k
    cdef mp_ns_slot* slot
    for k in range(DEPTH):
        slot = &run.slots[k]
        if slot.state != READY:
            continue
        if run.verdict[slot.i] != PENDING:
            ended(run, slot, run.verdict[slot.i])  # another piece has failed already
        elif run.lost == NULL and slot.again_ns <= now:
            issue(run, slot, k)


cdef void drop_ready(mp_ns_run* run, int status, mp_ns* of) noexcept nogil:
    """Fail the slots that wait to be issued: all, or those of one namespace."""
    cdef uint32_t k
    for k in range(DEPTH):
        if run.slots[k].state == READY and (of == NULL or run.slots[k].region.ns == of):
            ended(run, &run.slots[k], status)


cdef void drop_revoked(mp_ns_run* run) noexcept nogil:
    """Fail the slots whose region was taken back, so that who revokes it need not wait for a lost namespace."""
    cdef uint32_t k
    for k in range(DEPTH):
        if run.slots[k].state == READY and is_revoked(run, run.slots[k].i):
            ended(run, &run.slots[k], STALE_HANDLE)


cdef void find_way(mp_ns_run* run) noexcept nogil:
    """Nothing is under way and a namespace is lost: look for it once; fail what goes there after too long a time."""
    cdef mp_ns* ns = run.lost
    cdef int state = namespace_look(ns)
    drop_revoked(run)
    if state == NS_LIVE or run.ready == 0:
        run.lost = NULL
    elif mp_now_ns() - run.lost_since_ns >= ns.away_ns:
        run.lost = NULL
        run.lost_since_ns = 0
        drop_ready(run, STALLED if state == NS_COMING_BACK else PEER_GONE, ns)
    else:
        pause(LOOK_AGAIN_NS)


cdef void pause(long nanoseconds) noexcept nogil:
    cdef timespec moment
    moment.tv_sec = 0
    moment.tv_nsec = nanoseconds
    nanosleep(&moment, NULL)


cdef void run_pump(mp_ns_run* run, bint cutting) noexcept nogil:
    """Until every slot is done with; with `cutting` until every transfer is. Nothing is under way afterwards."""
    while True:
        if run.stop == 0:
            run.stop = batch_interrupted(run.batch)
        if run.stop:
            drop_ready(run, run.stop, NULL)
        elif run.lost == NULL:
            if cutting:
                fill(run)
            issue_ready(run)
        if run.flying:
            reap(run)
        elif run.stop:
            return
        elif run.lost != NULL:
            find_way(run)
        elif run.ready:
            pause(PAUSE_NS)
        elif not cutting or run.i >= run.batch.n:
            return
