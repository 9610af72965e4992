"""The path by libfabric: a batch is cut into pieces, posted on an endpoint of its own, and taken back as it completes.

A batch leaves pieces in flight only when it fails, or when they have not ended some time after its cancel or deadline:
then the endpoint is closed, and the owner is asked for another address, which makes it close the one that might still
be receiving (`Link.settle`). Only then does the batch end, or go on.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset
from moonpool.native.io.batch cimport (
    ACCESS_DENIED,
    COMPLETE,
    INTERNAL,
    NO_MEMORY,
    OP_READ,
    PEER_GONE,
    PENDING,
    REFUSED,
    STALE_HANDLE,
    STALLED,
    batch_interrupted,
    mp_batch,
)
from moonpool.native.io.copying cimport digest_chunks
from moonpool.native.io.guard cimport mp_count, mp_guard_lock, mp_guard_unlock, mp_load32, mp_now_ns, mp_tally
from moonpool.native.io.regions cimport EXTRA_OFI, LocalRegions, mp_region, regions_find
from moonpool.native.io.segment cimport (
    NativeSegment,
    mp_path,
    mp_path_record,
    mp_remote_region,
    mp_segment,
    path_takes,
)
from moonpool.native.ofi.fabric cimport OwnMemory, mp_ofi_memory
from moonpool.native.ofi.library cimport (
    FI_COMPLETION,
    FI_DELIVERY_COMPLETE,
    FI_EACCES,
    FI_EAGAIN,
    FI_EAVAIL,
    FI_EKEYREJECTED,
    FI_ENOKEY,
    FI_EPERM,
    FI_MR_LOCAL,
    MP_OFI_BOUNCE,
    fi_cq_entry,
    fi_cq_err_entry,
    fi_cq_read,
    fi_cq_readerr,
    mp_ofi_may_sleep,
    mp_ofi_post,
)
from moonpool.native.ofi.link cimport (
    BOUNCE_PIECE,
    NONE,
    OPS,
    SLEEP_MS,
    Link,
    end_bounce,
    link_give,
    link_settle,
    link_take,
    mp_end,
    mp_flight,
    mp_link,
    mp_op,
)

cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <poll.h>
    #include <sched.h>
    #include <time.h>
    static inline void mp_ofi_wait_fd(int fd, int ms) {
        struct pollfd one = {fd, POLLIN, 0};
        poll(&one, 1, ms);
    }
    static inline void mp_ofi_pause(unsigned us) {
        struct timespec t = {0, (long)us * 1000};
        nanosleep(&t, 0);
    }
    """
    void mp_ofi_wait_fd(int fd, int ms) nogil
    void mp_ofi_pause(unsigned int us) nogil
    int sched_yield() nogil

cdef enum:
    FLUSHING = 0xFFFFFFFE
    ATTEMPTS = 3
    NAP_US_MIN = 10
    NAP_US_MAX = 500

# How long pieces in flight may go on after cancel or deadline before the endpoint is closed under them, and how long
# after a failure of one of them.
cdef uint64_t GRACE_NS = 500_000_000
cdef uint64_t FAILED_GRACE_NS = 50_000_000
cdef struct mp_ofi_remote:
    uint64_t key
    uint64_t base

cdef struct mp_work:
    mp_link* link
    mp_end* end
    mp_path* path
    mp_segment* segment
    mp_batch* batch
    mp_remote_region* region    # of the transfer that is being cut
    void* desc
    char* local
    uint64_t next
    uint64_t offset
    uint32_t flight
    uint32_t bounced
    uint32_t posted             # something was posted, so a failure may leave bytes on their way
    uint32_t flushed
    int failed
    uint64_t carried
    uint64_t n_bytes


cdef bint takes(mp_work* work, uint64_t i) noexcept nogil:
    cdef mp_remote_region* region = &work.segment.slots[<uint32_t>work.batch.region[i]]
    return path_takes(work.path, work.batch, i) and region.extra[EXTRA_OFI] != NULL


cdef bint revoked(mp_work* work, uint64_t i) noexcept nogil:
    return mp_count(&work.segment.slots[<uint32_t>work.batch.region[i]].handle) != work.batch.region[i]


cdef int status_of(int error) noexcept nogil:
    """How a transfer ends whose piece failed with a (positive) error of libfabric's."""
    if error == FI_EACCES or error == FI_EKEYREJECTED or error == FI_ENOKEY or error == FI_EPERM:
        return ACCESS_DENIED
    return REFUSED


cdef bint begin(mp_work* work) noexcept nogil:
    """Take up the next transfer that goes this way; False when there is none left."""
    cdef mp_batch* batch = work.batch
    cdef mp_region* own = NULL
    cdef uint32_t k
    while work.next < batch.n:
        if not takes(work, work.next):
            work.next += 1
        elif revoked(work, work.next):
            batch.status[work.next] = STALE_HANDLE
            work.next += 1
        else:
            break
    if work.next >= batch.n:
        return False
    for k in range(<uint32_t>OPS + 1):
        if work.end.flights[k].i == <uint64_t>-1:
            work.flight = k
            break
    memset(&work.end.flights[work.flight], 0, sizeof(mp_flight))
    work.end.flights[work.flight].i = work.next
    work.region = &work.segment.slots[<uint32_t>batch.region[work.next]]
    work.local = <char*><size_t>batch.local[work.next]
    work.offset = 0
    work.desc = NULL
    work.bounced = work.link.fabric.limits & MP_OFI_BOUNCE
    if work.link.fabric.mr_mode & FI_MR_LOCAL and not work.bounced:
        if not batch.trusted:
            mp_guard_lock(&work.segment.own.guard)
            own = regions_find(work.segment.own, batch.local[work.next], batch.length[work.next])
            mp_guard_unlock(&work.segment.own.guard)
        if own != NULL and own.extra[EXTRA_OFI] != NULL:
            work.desc = (<mp_ofi_memory*>own.extra[EXTRA_OFI]).desc
        else:
            work.bounced = 1
    return True


cdef ssize_t post_piece(mp_work* work, uint32_t place, uint64_t n) noexcept nogil:
    """Post the next n bytes of the transfer at hand with that op; the library's answer."""
    cdef mp_end* end = work.end
    cdef mp_batch* batch = work.batch
    cdef mp_op* op = &end.ops[place]
    cdef mp_ofi_remote* remote = <mp_ofi_remote*>work.region.extra[EXTRA_OFI]
    cdef char* buffer = work.local + work.offset
    cdef bint write = batch.op != OP_READ
    cdef void* desc = work.desc
    cdef uint64_t flags = FI_COMPLETION
    op.flight = work.flight
    op.n_bytes = n
    op.copy_to = NULL
    if work.bounced:
        buffer = end.bounce + <size_t>place * BOUNCE_PIECE
        desc = end.bounce_desc
        if write:
            memcpy(buffer, work.local + work.offset, n)
        else:
            op.copy_to = work.local + work.offset
    if write and work.link.fabric.delivery:
        flags |= FI_DELIVERY_COMPLETE
    return mp_ofi_post(end.ep, write, flags, buffer, n, desc, end.peer,
                       remote.base + batch.offset[work.next] + work.offset, remote.key, &op.context)


cdef void post_more(mp_work* work) noexcept nogil:
    """Post pieces until all are posted, all ops are in use, or the library takes no more for now."""
    cdef mp_end* end = work.end
    cdef mp_flight* flight
    cdef uint64_t n, most
    cdef uint32_t place
    cdef ssize_t rc
    while end.free_op != NONE and not work.failed:
        if work.flight == NONE and not begin(work):
            return
        flight = &end.flights[work.flight]
        if work.bounced and not end_bounce(work.link, end):
            work.failed = NO_MEMORY
            return
        most = BOUNCE_PIECE if work.bounced else work.link.fabric.piece_bytes
        n = work.batch.length[work.next] - work.offset
        n = n if n < most else most
        place = end.free_op
        if revoked(work, work.next):
            flight.failed = STALE_HANDLE
            work.offset = work.batch.length[work.next]
        else:
            rc = post_piece(work, place, n)
            if rc == -FI_EAGAIN:
                return
            if rc != 0:
                work.failed = status_of(<int>-rc)
                return
            work.posted = 1
            end.free_op = end.ops[place].next_free
            end.in_flight += 1
            flight.outstanding += 1
            work.offset += n
            if work.bounced:
                mp_tally(&work.link.fabric.bounced_bytes, n)
        if work.offset >= work.batch.length[work.next]:
            flight.posted_all = 1
            if flight.outstanding == 0:
                settle_flight(work, flight)
            work.next += 1
            work.flight = NONE


cdef void settle_flight(mp_work* work, mp_flight* flight) noexcept nogil:
    """All pieces of a transfer have come back."""
    cdef mp_batch* batch = work.batch
    cdef uint64_t i = flight.i
    flight.i = <uint64_t>-1
    if flight.failed:
        batch.status[i] = <uint8_t>flight.failed
        mp_tally(&work.path.stats.errors[batch.op != OP_READ][flight.failed], 1)
        return
    if batch.digest != NULL:
        digest_chunks(<void*><size_t>batch.local[i], batch.length[i], batch.digest + batch.digest_at[i])
    if batch.op == OP_READ or work.link.fabric.delivery:
        batch.status[i] = COMPLETE
        work.carried += 1
        work.n_bytes += batch.length[i]


cdef void came_back(mp_work* work, mp_op* op, int failure) noexcept nogil:
    cdef mp_end* end = work.end
    cdef mp_flight* flight
    end.in_flight -= 1
    op.next_free = end.free_op
    end.free_op = <uint32_t>(op - &end.ops[0])
    if op.flight == FLUSHING:
        work.flushed = failure == 0
        return
    flight = &end.flights[op.flight]
    flight.outstanding -= 1
    if failure == 0 and op.copy_to != NULL:
        memcpy(op.copy_to, end.bounce + <size_t>(op - &end.ops[0]) * BOUNCE_PIECE, op.n_bytes)
    if failure:
        return  # the whole endpoint is given up, and the transfer stays PENDING for the next attempt
    if flight.posted_all and flight.outstanding == 0:
        settle_flight(work, flight)


cdef bint is_ours(mp_end* end, void* context) noexcept nogil:
    """The library hands back what it was given; anything else is its error and must lead nowhere."""
    cdef size_t at = <size_t>context - <size_t>&end.ops[0]
    return context != NULL and at < sizeof(end.ops) and at % sizeof(mp_op) == 0


cdef uint32_t reap(mp_work* work) noexcept nogil:
    """Take what has come back; how many pieces."""
    cdef fi_cq_entry entries[16]
    cdef fi_cq_err_entry problem
    cdef mp_end* end = work.end
    cdef ssize_t n = fi_cq_read(end.queue, &entries[0], 16), k
    if n > 0:
        for k in range(n):
            if is_ours(end, entries[k].op_context):
                came_back(work, <mp_op*>entries[k].op_context, 0)
            else:
                work.failed = INTERNAL
        end.proven = 1
        return <uint32_t>n
    if n != -FI_EAVAIL:
        if n != -FI_EAGAIN and n != 0:
            work.failed = work.failed or status_of(<int>-n)
        return 0
    memset(&problem, 0, sizeof(problem))
    if fi_cq_readerr(end.queue, &problem, 0) <= 0:
        return 0
    if not work.failed:
        work.failed = status_of(problem.err)
    if is_ours(end, problem.op_context):
        came_back(work, <mp_op*>problem.op_context, work.failed)
        return 1
    return 0


cdef void post_flush(mp_work* work) noexcept nogil:
    """A READ behind the WRITEs: when it has come back, they are in the target's memory."""
    cdef mp_end* end = work.end
    cdef uint32_t place = end.free_op
    cdef ssize_t rc
    if not end_bounce(work.link, end):
        work.failed = NO_MEMORY
        return
    end.ops[place].flight = FLUSHING
    end.ops[place].copy_to = NULL
    rc = mp_ofi_post(end.ep, 0, FI_COMPLETION, end.bounce + <size_t>place * BOUNCE_PIECE, 8, end.bounce_desc, end.peer,
                     work.link.flush_base, work.link.flush_key, &end.ops[place].context)
    if rc == 0:
        end.free_op = end.ops[place].next_free
        end.in_flight += 1
        mp_tally(&work.link.fabric.flushes, 1)
    elif rc != -FI_EAGAIN:
        work.failed = status_of(<int>-rc)


cdef void settle_flushed(mp_work* work) noexcept nogil:
    """Every WRITE that was posted is in place."""
    cdef uint64_t i
    for i in range(work.batch.n):
        if takes(work, i):
            work.batch.status[i] = COMPLETE
            work.carried += 1
            work.n_bytes += work.batch.length[i]


cdef void rest(mp_work* work, uint64_t idle_ns, unsigned int* nap) noexcept nogil:
    """Wait a little for the queue: by polling at first for small batches, then asleep."""
    cdef mp_link* link = work.link
    if idle_ns < link.spin_ns and work.batch.length[0] * work.batch.n <= link.spin_max_bytes:
        sched_yield()
    elif work.end.wait_fd >= 0:
        if mp_ofi_may_sleep(link.fabric.fabric, work.end.queue) == 0:
            mp_ofi_wait_fd(work.end.wait_fd, SLEEP_MS)
    else:
        mp_ofi_pause(nap[0])
        nap[0] = nap[0] * 2 if nap[0] * 2 < NAP_US_MAX else NAP_US_MAX


cdef bint carry(mp_work* work) noexcept nogil:
    """Carry what goes this way. True when the endpoint is as good as before; `failed` says what went wrong."""
    cdef mp_end* end = work.end
    cdef uint64_t now = mp_now_ns(), moved = now, stop_at = 0, limit
    cdef unsigned int nap = NAP_US_MIN
    cdef int early
    cdef bint flushing = work.batch.op != OP_READ and not work.link.fabric.delivery
    while True:
        if not stop_at:
            post_more(work)
        if end.in_flight == 0 and (stop_at or work.failed):
            break
        if end.in_flight == 0 and work.flight == NONE and work.next >= work.batch.n:
            if not flushing or not work.posted or work.flushed:
                break
            post_flush(work)
        now = mp_now_ns() if not reap(work) else 0
        early = batch_interrupted(work.batch)
        if now == 0:
            moved = mp_now_ns()
            nap = NAP_US_MIN
        if not stop_at and (early or work.failed):
            stop_at = mp_now_ns() + (GRACE_NS if early and early != PEER_GONE else FAILED_GRACE_NS)
        if now == 0:
            continue
        if stop_at and now >= stop_at:
            break
        limit = link_patience(work)
        if now > moved and now - moved > limit:
            work.failed = STALLED
            break
        rest(work, now - moved, &nap)
    if flushing and work.flushed and not work.failed:
        settle_flushed(work)
    forget_flights(end)
    return end.in_flight == 0 and not work.failed


cdef uint64_t link_patience(mp_work* work) noexcept nogil:
    """How long nothing may come back: less while nothing ever has."""
    return work.link.stall_ns if work.end.proven else work.link.connect_ns


cdef void forget_flights(mp_end* end) noexcept nogil:
    cdef uint32_t k
    for k in range(<uint32_t>OPS + 1):
        end.flights[k].i = <uint64_t>-1


# Batches

cdef uint64_t waiting(mp_work* work) noexcept nogil:
    """How many transfers are still to be done and go this way."""
    cdef uint64_t i, n = 0
    for i in range(work.batch.n):
        n += takes(work, i)
    return n


cdef int attempt(mp_work* work) noexcept nogil:
    """Carry what goes this way once; a status, after which nothing of it is on its way any more if it is COMPLETE."""
    cdef mp_link* link = work.link
    cdef int status
    cdef uint32_t generation
    cdef bint sound
    if mp_load32(&link.generation) == 0:
        status = link_settle(link, 0)
        if status:
            return status
    work.end = link_take(link, work.batch, &status)
    if work.end == NULL:
        return status
    generation = work.end.generation
    work.next = work.offset = 0
    work.flight = NONE
    work.failed = 0
    work.posted = work.flushed = 0
    sound = carry(work)
    link_give(link, work.end, sound)
    work.end = NULL
    if sound:
        return COMPLETE
    # The owner closes what may still be receiving, and tells another address.
    status = link_settle(link, generation)
    if status == COMPLETE:
        return work.failed or STALLED
    if work.posted and work.batch.op != OP_READ:
        fail(work, batch_interrupted(work.batch) or status)  # bytes may be on their way: no other path may write
    return status


cdef void fail(mp_work* work, int status) noexcept nogil:
    cdef uint64_t i
    for i in range(work.batch.n):
        if takes(work, i):
            work.batch.status[i] = <uint8_t>status
            mp_tally(&work.path.stats.errors[work.batch.op != OP_READ][status], 1)


cdef int ofi_run(mp_path* path, mp_segment* segment, mp_batch* batch) noexcept nogil:
    """Carry what goes by libfabric; whether transfers are left for other paths."""
    cdef mp_work work
    cdef uint64_t i, left = 0, started = mp_now_ns()
    cdef int status = COMPLETE, early = 0, tries = 0
    memset(&work, 0, sizeof(work))
    work.link = <mp_link*>path.context
    work.path = path
    work.segment = segment
    work.batch = batch
    while waiting(&work):
        early = batch_interrupted(batch)
        if early or tries == ATTEMPTS:
            break
        if tries:
            mp_tally(&work.link.fabric.retries, 1)
        tries += 1
        status = attempt(&work)
        if mp_load32(&work.link.generation) == 0:
            break  # the owner does not answer
    early = batch_interrupted(batch)
    if early:
        fail(&work, early)
    elif waiting(&work):
        if <uint32_t>path.id + 1 < segment.n_paths:
            mp_tally(&path.stats.fallbacks, waiting(&work))
        else:
            fail(&work, status if status else INTERNAL)
    if work.carried:
        mp_path_record(&path.stats, batch.op != OP_READ, work.carried, work.n_bytes, mp_now_ns() - started)
    for i in range(batch.n):
        left += batch.status[i] == PENDING
    return <int>(left > 0)


cdef class RemoteKey:
    """What a path must know of a peer's region; kept by the segment."""

    cdef mp_ofi_remote raw

    def close(self) -> None:
        """Nothing to close: it goes with its last reference."""


def add_ofi_path(NativeSegment segment not None, Link link not None) -> int:
    """Let a segment's regions be reached by this link; returns the path id."""
    return segment.add_path(ofi_run, &link.raw, link).id


def reach_region(NativeSegment segment not None, uint64_t handle, uint64_t key, uint64_t base) -> RemoteKey:
    """Note the key and the base address of a peer's region."""
    cdef RemoteKey made = RemoteKey()
    made.raw.key = key
    made.raw.base = base
    segment.set_extra(handle, EXTRA_OFI, &made.raw, made)
    return made


def use_locally(LocalRegions table not None, uint64_t handle, OwnMemory memory not None) -> None:
    """Note how the device knows a region of ours."""
    table.set_extra(handle, EXTRA_OFI, &memory.raw, memory)
