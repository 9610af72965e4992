"""The local side of a batch: registered memory, a held buffer registered for the batch, or bounce slots."""

from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.string cimport memcpy
from moonpool.native.io.batch cimport OP_READ, mp_batch, pthread_mutex_lock, pthread_mutex_unlock
from moonpool.native.io.guard cimport mp_guard_enter_locked, mp_guard_lock, mp_guard_unlock
from moonpool.native.io.regions cimport EXTRA_RDMA, mp_region, regions_find
from moonpool.native.rdma.bounce cimport SLOT_BYTES, arena_give, arena_take
from moonpool.native.rdma.queues cimport FAILED, LANDED_MAX, mp_link, mp_piece, mp_run, run_settle
from moonpool.native.verbs.ibverbs cimport IBV_ACCESS_LOCAL_WRITE, mp_registered, mp_registration

cdef enum:
    # A held buffer that is at least so large is registered for the batch, a smaller one is copied.
    PASSING_BYTES = 262144


cdef void look_up(mp_run* run, uint64_t address, uint64_t length) noexcept nogil:
    """Set `near` to the registration that holds a local range, NULL when there is none: then it is bounced."""
    cdef mp_region* region
    if run.near != NULL and mp_registered(run.near, address, length):
        return
    mp_guard_lock(&run.segment.own.guard)
    if not run.in_own:
        run.own_ticket = mp_guard_enter_locked(&run.segment.own.guard)
        run.in_own = True
    region = regions_find(run.segment.own, address, length)
    run.near = NULL
    if region != NULL:
        run.near = <const mp_registration*>region.extra[<int>EXTRA_RDMA]
    mp_guard_unlock(&run.segment.own.guard)
    if run.near == NULL and run.passing.n_devices and mp_registered(&run.passing, address, length):
        run.near = &run.passing


cdef void register_passing(mp_run* run) noexcept nogil:
    """Register what a batch uses of its held buffer, on all NICs and for this batch only; when it is large enough.

    Without the link's lock, for pinning takes a while.
    """
    cdef mp_batch* batch = run.batch
    cdef mp_link* link = run.link
    cdef uint64_t i, low = <uint64_t>-1, high = 0
    cdef uint32_t k
    cdef int access = IBV_ACCESS_LOCAL_WRITE if batch.op == OP_READ else 0
    for i in range(batch.n):
        if run.left[i] < FAILED:
            low = batch.local[i] if batch.local[i] < low else low
            high = batch.local[i] + batch.length[i] if batch.local[i] + batch.length[i] > high else high
    if high <= low or high - low < PASSING_BYTES:
        return
    look_up(run, low, high - low)
    if run.near != NULL:
        return
    for k in range(link.n_nics):
        run.passing_regions[k] = link.nics[k].calls.reg_mr(link.nics[k].pd, <void*><size_t>low, high - low, access)
        if run.passing_regions[k] == NULL:
            forget_passing(run)
            return
        run.passing_keys[k] = run.passing_regions[k].lkey
    run.passing.base = low
    run.passing.length = run.passing.chunk_bytes = high - low
    run.passing.n_chunks = 1
    run.passing.lkeys = run.passing_keys
    run.passing.n_devices = link.n_nics


cdef void forget_passing(mp_run* run) noexcept nogil:
    cdef uint32_t k
    run.passing.n_devices = 0
    for k in range(run.link.n_nics):
        if run.passing_regions[k] != NULL:
            run.link.nics[k].calls.dereg_mr(run.passing_regions[k])
            run.passing_regions[k] = NULL


cdef bint take_slot(mp_run* run, mp_piece* piece) noexcept nogil:
    """A bounce slot for a piece, filled when it is to be written; False when there is none now."""
    cdef int32_t slot
    if run.n_slots >= LANDED_MAX:
        return False
    slot = arena_take(run.link.arena)
    if slot < 0:
        return False
    run.n_slots += 1
    piece.slot = slot
    if run.batch.op != OP_READ:
        memcpy(run.link.arena.base + <uint64_t>slot * SLOT_BYTES,
               <void*><size_t>(run.batch.local[piece.first] + piece.start), piece.length)
    return True


cdef bint copy_landed(mp_run* run) noexcept nogil:
    """Copy what was READ into bounce slots to where it belongs. Lock held, and let go of while copying."""
    cdef mp_piece landed[LANDED_MAX]
    cdef uint32_t n = run.n_landed, k
    if n == 0:
        return False
    memcpy(landed, run.landed, n * sizeof(mp_piece))
    run.n_landed = 0
    pthread_mutex_unlock(&run.link.lock)
    for k in range(n):
        memcpy(<void*><size_t>(run.batch.local[landed[k].first] + landed[k].start),
               run.link.arena.base + <uint64_t>landed[k].slot * SLOT_BYTES, landed[k].length)
        arena_give(run.link.arena, landed[k].slot)
    pthread_mutex_lock(&run.link.lock)
    run.n_slots -= n
    for k in range(n):
        run_settle(run, &landed[k])
    return True
