"""The two ways to a namespace, as paths of a segment: passthrough commands, and requests to the block device.

Bytes of a WRITE that do not fill a block are *edges*: their block is read, changed and written back, and nobody else
may write it in between. One process does that for a region: its owner, under a lock. An initiator sends edges to the
owner on their control session, after everything else of the batch; the owner writes its own itself. So neighbours in
one block never lose bytes to each other, on whatever hosts their writers run.
"""

from cpython.exc cimport PyErr_SetInterrupt
from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memcpy, memset
from moonpool.native.disk.rings cimport DiskRings, mp_ring_pool, pool_give, pool_take
from moonpool.native.io.batch cimport (
    CANCELLED,
    COMPLETE,
    INTERNAL,
    NO_MEMORY,
    OP_READ,
    OP_WRITE,
    PENDING,
    Batch,
    batch_fail_pending,
    batch_interrupted,
    batch_off_stack,
    batch_on_stack,
    mp_batch,
    pthread_mutex_t,
    pthread_mutex_unlock,
)
from moonpool.native.io.guard cimport mp_now_ns, mp_tally
from moonpool.native.io.segment cimport NativeSegment, mp_path, mp_path_record, mp_segment
from moonpool.native.nvmeof.carry cimport (
    fail,
    mp_ns_edge,
    mp_ns_run,
    mp_ns_slot,
    piece_ended,
    region_of,
    run_close,
    run_open,
    run_pump,
    slot_ready,
)
from moonpool.native.nvmeof.command cimport MP_NVME_FLUSH, MP_NVME_READ, MP_NVME_WRITE, V_ELSEWHERE
from moonpool.native.nvmeof.namespace cimport (
    N_EDGES,
    N_FLUSHES,
    NamespaceRegion,
    mp_ns,
    mp_ns_region,
)

from moonpool.errors import MoonpoolError, UsageError, status_of

cdef extern from "<pthread.h>" nogil:
    int pthread_mutex_trylock(pthread_mutex_t* lock)

cdef extern from "<time.h>" nogil:
    struct timespec:
        long tv_sec
        long tv_nsec
    int nanosleep(const timespec* howlong, timespec* rest)

cdef enum:
    EDGE_PAUSE_NS = 200000
    # What one question to the owner carries, but for its last piece: a control request has at most 64 KiB.
    ASK_PIECES = 256
    ASK_BYTES = 24576

cdef double NS_PER_S = 1e9
# How long an owner may take when the batch has no deadline.
cdef double ASK_S = 30.0

cdef struct mp_ns_way:
    mp_ring_pool* pool
    void* ask                # Python: ask(handle, pieces, timeout_s) -> statuses; NULL when edges are ours to write
    int passthrough


# ---- edges -----------------------------------------------------------------------------------------------------------

cdef bint lock_edges(mp_ns_run* run, mp_ns* ns) noexcept nogil:
    """False when the batch was interrupted while somebody else wrote edges."""
    cdef timespec pause
    pause.tv_sec = 0
    pause.tv_nsec = EDGE_PAUSE_NS
    while pthread_mutex_trylock(&ns.edge) != 0:
        run.stop = batch_interrupted(run.batch)
        if run.stop:
            return False
        nanosleep(&pause, NULL)
    return True


cdef void run_slot(mp_ns_run* run, mp_ns_region* region, mp_ns_edge* edge, int kind) noexcept nogil:
    """One command for the block of an edge, into or out of aligned memory."""
    cdef mp_ns_slot* slot = &run.slots[0]
    cdef uint64_t place = region.start + run.batch.offset[edge.i] + edge.at
    slot.region = region
    slot.i, slot.at, slot.n = edge.i, edge.at, edge.n
    slot.first = place & ~(<uint64_t>region.ns.block_bytes - 1)
    slot.n_blocks_bytes = region.ns.block_bytes
    slot.data = run.bounce
    slot.bounced = False
    slot.kind = kind
    slot_ready(run, slot)
    run.open[edge.i] += 1
    run_pump(run, False)


cdef void write_edge(mp_ns_run* run, mp_ns_region* region, mp_ns_edge* edge) noexcept nogil:
    cdef uint64_t place = region.start + run.batch.offset[edge.i] + edge.at
    if not lock_edges(run, region.ns):
        return
    run_slot(run, region, edge, MP_NVME_READ)
    if run.verdict[edge.i] == PENDING and run.stop == 0:
        memcpy(run.bounce + (place & (region.ns.block_bytes - 1)),
               <void*><size_t>(run.batch.local[edge.i] + edge.at), edge.n)
        run_slot(run, region, edge, MP_NVME_WRITE)
    pthread_mutex_unlock(&region.ns.edge)
    mp_tally(&region.ns.counters[N_EDGES], 1)


cdef void write_edges(mp_ns_run* run) noexcept nogil:
    """Write the edges of a batch, here."""
    cdef uint64_t k
    cdef mp_ns_edge* edge
    for k in range(run.n_edges):
        edge = &run.edge[k]
        if run.stop == 0 and run.verdict[edge.i] == PENDING:
            write_edge(run, region_of(run, edge.i), edge)
        if run.stop:
            fail(run, edge.i, run.stop)
        piece_ended(run, edge.i)


cdef uint64_t ask_some(mp_ns_run* run, uint64_t k) noexcept:
    """Have the owner write edges from k on, as many as one question carries, of one region; where to go on."""
    cdef mp_batch* batch = run.batch
    cdef uint64_t handle = batch.region[run.edge[k].i], n_bytes = 0, first = k, place
    cdef mp_ns_edge* edge
    cdef const char* here
    pieces, asked, verdicts, wrong = [], [], None, INTERNAL
    timeout_s = ASK_S
    try:
        while k < run.n_edges and len(pieces) < ASK_PIECES and n_bytes < ASK_BYTES:
            edge = &run.edge[k]
            if batch.region[edge.i] != handle:
                break
            if run.verdict[edge.i] == PENDING:
                here = <const char*><size_t>(batch.local[edge.i] + edge.at)
                place = batch.offset[edge.i] + edge.at
                pieces.append((place, here[:edge.n]))
                asked.append(k)
                n_bytes += edge.n
            k += 1
        if batch.deadline_ns:
            timeout_s = max(0.0, (<double>batch.deadline_ns - <double>mp_now_ns()) / NS_PER_S)
        verdicts = (<object>run.edges)(handle, pieces, timeout_s) if pieces else []
    except MoonpoolError as problem:
        wrong = int(status_of(problem))
    except KeyboardInterrupt:
        wrong = CANCELLED
        PyErr_SetInterrupt()  # for whoever waits for this batch: nothing can be raised from here
    except BaseException:
        wrong = INTERNAL
    for at, which in enumerate(asked):
        said = wrong if verdicts is None else verdicts[at]
        if said != COMPLETE:
            fail(run, run.edge[<uint64_t>which].i, said)
    k = max(k, first + 1)
    for place in range(first, k):
        piece_ended(run, run.edge[place].i)
    return k


cdef void ask_owner(mp_ns_run* run) noexcept with gil:
    cdef uint64_t k = 0
    while k < run.n_edges:
        if run.stop == 0:
            run.stop = batch_interrupted(run.batch)
        if run.stop:
            fail(run, run.edge[k].i, run.stop)
            piece_ended(run, run.edge[k].i)
            k += 1
        else:
            k = ask_some(run, k)


# ---- paths -----------------------------------------------------------------------------------------------------------

cdef void conclude(mp_ns_run* run) noexcept nogil:
    """What was not begun, or not finished, when the batch was interrupted."""
    cdef uint64_t i
    cdef mp_batch* batch = run.batch
    if run.stop == 0:
        return
    for i in range(batch.n):
        if batch.status[i] == PENDING and region_of(run, i) != NULL and run.verdict[i] != V_ELSEWHERE:
            batch.status[i] = <uint8_t>(run.stop if run.verdict[i] == PENDING else run.verdict[i])
    batch_fail_pending(batch, <uint8_t>run.stop)


cdef bint takes_any(mp_ns_run* run) noexcept nogil:
    cdef uint64_t i
    for i in range(run.batch.n):
        if region_of(run, i) != NULL:
            return True
    return False


cdef int way_run(mp_path* path, mp_segment* segment, mp_batch* batch) noexcept nogil:
    """Carry what lies in namespaces, by this way. Returns whether transfers are left for other paths."""
    cdef mp_ns_way* way = <mp_ns_way*>path.context
    cdef mp_ns_run run
    cdef uint64_t i, started = mp_now_ns(), left = 0
    memset(&run, 0, sizeof(run))
    run.path, run.segment, run.batch = path, segment, batch
    run.passthrough, run.edges = way.passthrough, way.ask
    if takes_any(&run):
        carry(&run, way.pool)
        if run.carried:
            mp_path_record(&path.stats, batch.op != OP_READ, run.carried, run.n_bytes, mp_now_ns() - started)
    for i in range(batch.n):
        left += batch.status[i] == PENDING
    return <int>(left > 0)


cdef void carry(mp_ns_run* run, mp_ring_pool* pool) noexcept nogil:
    """Carry all that goes this way, edges last; statuses are set, nothing is under way."""
    cdef uint64_t i
    cdef int status = 0
    run.ring = pool_take(pool, run.batch, &status)
    if run.ring == NULL:
        refuse(run, status)
        return
    if run_open(run) != 0:
        refuse(run, NO_MEMORY)
    else:
        run_pump(run, True)
        if run.n_edges and run.edges != NULL:
            ask_owner(run)
        elif run.n_edges:
            write_edges(run)
        conclude(run)
        for i in range(run.batch.n if run.path != NULL else 0):
            if run.verdict[i] == V_ELSEWHERE:
                mp_tally(&run.path.stats.fallbacks, 1)
        run_close(run)
    pool_give(pool, run.ring)


cdef void refuse(mp_ns_run* run, int status) noexcept nogil:
    """Fail what would have gone this way."""
    cdef uint64_t i
    for i in range(run.batch.n):
        if region_of(run, i) != NULL and run.batch.status[i] == PENDING:
            run.batch.status[i] = <uint8_t>status


cdef class NamespaceWay:
    """What a path needs; lives as long as its segment. `ask` is None in the owner's own process."""

    cdef mp_ns_way way
    cdef object rings
    cdef object ask

    def __cinit__(self, DiskRings rings not None, ask, *, bint passthrough):
        self.rings, self.ask = rings, ask
        self.way.pool = rings.pool
        self.way.passthrough = passthrough
        self.way.ask = NULL if ask is None else <void*>ask


def add_way(NativeSegment segment not None, NamespaceWay way not None) -> int:
    """Let regions that are ranges of namespaces be reached; returns the path id."""
    return segment.add_path(way_run, &way.way, way).id


# ---- of the owner ----------------------------------------------------------------------------------------------------

cdef int run_alone(DiskRings rings, bint passthrough, NamespaceRegion region, mp_batch* batch, int kind) except -1:
    """Drive a batch on one range, here. `kind` is that of the single command, or -1 for the transfers of the batch."""
    cdef mp_ns_run run
    cdef int status = 0
    memset(&run, 0, sizeof(run))
    run.batch, run.only, run.passthrough = batch, &region.region, passthrough
    with nogil:
        if kind < 0:
            carry(&run, rings.pool)
            return 0
        run.ring = pool_take(rings.pool, batch, &status)
        if run.ring == NULL:
            batch.status[0] = <uint8_t>status
            return 0
        if run_open(&run) == 0:
            run.i = batch.n
            run.slots[0].region = run.only
            run.slots[0].kind = <uint8_t>kind
            run.open[0] = 1
            slot_ready(&run, &run.slots[0])
            run_pump(&run, False)
            conclude(&run)
            run_close(&run)
        else:
            batch.status[0] = NO_MEMORY
        pool_give(rings.pool, run.ring)
    return 0


def write_pieces(DiskRings rings not None, NamespaceRegion region not None, pieces, double timeout_s, *,
                 bint passthrough) -> list[int]:
    """Write bytes at offsets of a range, each (offset, bytes); the status of each. The GIL is released meanwhile."""
    cdef uint64_t k
    cdef const unsigned char[::1] view
    cdef Batch batch = Batch(OP_WRITE, len(pieces))
    held = []
    for k, (offset, data) in enumerate(pieces):
        view = data
        held.append(data)
        if offset < 0 or not len(data) or offset + len(data) > region.region.length:
            raise UsageError(f"{len(data)} bytes at {offset} are not inside the range", index=k)
        batch.raw.local[k] = <uint64_t><size_t>&view[0]
        batch.raw.offset[k] = offset
        batch.raw.length[k] = len(data)
    batch.raw.deadline_ns = mp_now_ns() + <uint64_t>(timeout_s * NS_PER_S)
    run_alone(rings, passthrough, region, batch.raw, -1)
    return [batch.raw.status[k] for k in range(batch.raw.n)]


def flush_range(DiskRings rings not None, NamespaceRegion region not None, double timeout_s, *,
                bint passthrough) -> int:
    """Have the device put what it keeps in a volatile cache onto its media; a status."""
    cdef mp_batch batch
    cdef uint8_t mark = PENDING
    cdef uint64_t zero = 0
    batch_on_stack(&batch, OP_WRITE, &mark)
    batch.local = batch.region = batch.offset = batch.length = &zero
    batch.deadline_ns = mp_now_ns() + <uint64_t>(timeout_s * NS_PER_S)
    run_alone(rings, passthrough, region, &batch, MP_NVME_FLUSH)
    batch_off_stack(&batch)
    mp_tally(&region.region.ns.counters[N_FLUSHES], 1)
    return mark
