"""The far-memory path: copies into and out of what is mapped here of a peer's far memory (or our own).

Blocks are streamed past the caches; a batch ends with a store fence, so that a completed WRITE is seen by every later
READ. Where no hardware keeps the hosts' caches coherent, each WRITE writes its lines back and each READ first drops the
lines that this host may have kept. Memory that went bad under a copy (a poisoned line, a device taken away) ends that
transfer with STALE_HANDLE: its bytes are not there any more.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from moonpool.native.cxl.mapping cimport mp_far
from moonpool.native.io.batch cimport (
    ACCESS_DENIED,
    COMPLETE,
    NOT_REGISTERED,
    OP_READ,
    PEER_GONE,
    PENDING,
    STALE_HANDLE,
    batch_interrupted,
    mp_batch,
)
from moonpool.native.io.copying cimport DIGEST_CHUNK, copy_bytes, copy_digest, store_fence
from moonpool.native.io.guard cimport mp_count, mp_load32, mp_now_ns, mp_tally
from moonpool.native.io.regions cimport EXTRA_CXL
from moonpool.native.io.segment cimport (
    NativeSegment,
    mp_path,
    mp_path_record,
    mp_remote_region,
    mp_segment,
    path_takes,
)

from moonpool.errors import ResourceError, UsageError

cdef extern from "trap.h" nogil:
    int mp_trap_install()
    int mp_trap_run(void (*job)(void*) noexcept nogil, void* context, const void* first, const void* second, size_t n)

cdef extern from "cachelines.h" nogil:
    const char* mp_line_kernel()
    void mp_lines_back(const void* start, size_t n)
    void mp_lines_drop(const void* start, size_t n)

cdef enum:
    # Copies look for cancel, deadline and revokes after each piece; a multiple of the digest chunk. Far memory may move
    # no more than some MB/s, so pieces are small beside those of near memory.
    PIECE_BYTES = 1 << 20
    # A smaller copy is as quick by plain stores.
    STREAM_PIECE_BYTES = 4096

cdef struct mp_copy:
    char* target
    char* source
    uint64_t n
    uint64_t stream_min
    uint64_t* digest    # NULL: not asked for
    int op
    int by_hand

# Transfers of this process that met bad memory.
cdef uint64_t faults = 0


cdef void copy_piece(void* context) noexcept nogil:
    """One piece, inside the trap: it owns nothing."""
    cdef mp_copy* job = <mp_copy*>context
    if job.by_hand:
        if job.op == OP_READ:
            mp_lines_drop(job.source, job.n)
        else:
            # The first and the last line may be shared with bytes that stay: what is kept of them must be of today.
            mp_lines_drop(job.target, 1)
            mp_lines_drop(job.target + job.n - 1, 1)
    if job.digest != NULL:
        copy_digest(job.target, job.source, job.n, job.stream_min, job.digest)
    else:
        copy_bytes(job.target, job.source, job.n, job.stream_min)
    if job.by_hand and job.op != OP_READ:
        store_fence()
        mp_lines_back(job.target, job.n)


cdef int copy_one(mp_batch* batch, uint64_t i, mp_remote_region* region, mp_far* far,
                  uint64_t stream_min) noexcept nogil:
    """Copy transfer i between its local range and far memory; a status."""
    cdef mp_copy job
    cdef char* here = <char*><size_t>batch.local[i]
    cdef char* there = far.map + batch.offset[i]
    cdef uint64_t done = 0, n = batch.length[i]
    cdef int hit, early
    job.op = batch.op
    job.by_hand = far.by_hand
    job.stream_min = 0 if n >= stream_min else <uint64_t>-1
    while done < n:
        job.n = n - done if n - done < PIECE_BYTES else PIECE_BYTES
        job.target = (here if batch.op == OP_READ else there) + done
        job.source = (there if batch.op == OP_READ else here) + done
        job.digest = NULL
        if batch.digest != NULL:
            job.digest = batch.digest + batch.digest_at[i] + done // DIGEST_CHUNK
        hit = mp_trap_run(copy_piece, &job, there + done, here + done, job.n)
        if hit:
            return STALE_HANDLE if hit == 1 else NOT_REGISTERED
        done += job.n
        if done < n:
            early = batch_interrupted(batch) or revoked(region, batch, i)
            if early:
                return early
    return COMPLETE


cdef int revoked(mp_remote_region* region, mp_batch* batch, uint64_t i) noexcept nogil:
    """STALE_HANDLE once the region was taken back, so that who revokes it need not wait for a long batch."""
    return 0 if mp_count(&region.handle) == batch.region[i] else STALE_HANDLE


cdef uint64_t stream_from(mp_segment* segment, mp_batch* batch) noexcept nogil:
    """The size from which this batch's transfers are streamed: by how much the batch moves in all."""
    cdef uint64_t i, total = 0
    for i in range(batch.n):
        total += batch.length[i]
        if total >= segment.stream_min_bytes:
            return STREAM_PIECE_BYTES
    return <uint64_t>-1


cdef int carry_one(mp_path* path, mp_batch* batch, uint64_t i, mp_remote_region* region, mp_far* far,
                   uint64_t stream_min) noexcept nogil:
    """Carry transfer i, and count what goes wrong; a status."""
    cdef int status
    if batch.op != OP_READ and not far.writable:
        return ACCESS_DENIED
    if batch.offset[i] > far.length or batch.length[i] > far.length - batch.offset[i]:
        return STALE_HANDLE  # the mapping is shorter than the region: never beyond it
    status = revoked(region, batch, i) or copy_one(batch, i, region, far, stream_min)
    if status != COMPLETE:
        mp_tally(&path.stats.errors[batch.op != OP_READ][status], 1)
        if status == NOT_REGISTERED or (status == STALE_HANDLE and not revoked(region, batch, i)):
            mp_tally(&faults, 1)
    return status


cdef int far_run(mp_path* path, mp_segment* segment, mp_batch* batch) noexcept nogil:
    """Carry what lies in far memory that is mapped here. Returns whether transfers are left for other paths."""
    cdef uint64_t i, started = mp_now_ns(), carried = 0, n_bytes = 0, left = 0, since = 0
    cdef uint64_t stream_min = stream_from(segment, batch)
    cdef mp_remote_region* region
    cdef mp_far* far
    cdef int early = 0
    for i in range(batch.n):
        if not path_takes(path, batch, i):
            left += batch.status[i] == PENDING
            continue
        region = &segment.slots[<uint32_t>batch.region[i]]
        far = <mp_far*>region.extra[EXTRA_CXL]
        if far == NULL:
            left += 1
            continue
        batch.status[i] = <uint8_t>carry_one(path, batch, i, region, far, stream_min)
        if batch.status[i] == COMPLETE:
            carried += 1
            n_bytes += batch.length[i]
        since += batch.length[i]
        if since >= PIECE_BYTES:
            since = 0
            early = batch_interrupted(batch)
            if early:
                break
    if carried:
        store_fence()  # streamed stores and lines written back are in memory before anybody is told
        if mp_load32(&segment.dead) == PEER_GONE:
            mark(batch, COMPLETE, PEER_GONE)
            mark(batch, PENDING, PEER_GONE)
            return 0
        mp_path_record(&path.stats, batch.op != OP_READ, carried, n_bytes, mp_now_ns() - started)
    if early:
        mark(batch, PENDING, early)
        return 0
    return <int>(left > 0)


cdef void mark(mp_batch* batch, int before, int after) noexcept nogil:
    cdef uint64_t i
    for i in range(batch.n):
        if batch.status[i] == before:
            batch.status[i] = <uint8_t>after


cdef class FarView:
    """Far memory as the path sees it: ``size_bytes`` at ``address`` here, kept by ``owner`` or, with None, by others.

    Held by a segment for a region; `close` lets the owner go.
    """

    cdef mp_far far
    cdef object owner

    def __cinit__(self, uint64_t address, uint64_t size_bytes, owner, *, bint writable, bint by_hand=False):
        if address == 0 or size_bytes == 0:
            raise UsageError("far memory has an address and a size")
        self.owner = owner
        self.far.map = <char*><size_t>address
        self.far.length = size_bytes
        self.far.writable = writable
        self.far.by_hand = by_hand

    def close(self) -> None:
        """Close the owner, if there is one. Idempotent. Nobody may be copying any more."""
        owner, self.owner = self.owner, None
        if owner is not None:
            owner.close()


def catch_bad_memory() -> None:
    """Take SIGBUS over for the copies of this module; other faults go on to whoever handled them before.

    Call it with the GIL, before copies start; again after somebody else (faulthandler) took the signal.
    """
    if mp_trap_install() != 0:
        raise ResourceError("the signal SIGBUS cannot be handled here")


def add_far_path(NativeSegment segment not None) -> int:
    """Let a segment's far regions be reached by copies; returns the path's id."""
    mp_line_kernel()  # looks at the CPU
    return segment.add_path(far_run, NULL, None).id


def reach_far(NativeSegment segment not None, uint64_t handle, FarView view not None) -> None:
    """The region is what `view` shows, which the segment keeps until `release_mapping`."""
    segment.set_extra(handle, EXTRA_CXL, &view.far, view)


def bad_memory_faults() -> int:
    """Transfers of this process that met bad memory."""
    return mp_count(&faults)


def copy_trapped(target, source) -> int:
    """Copy between two writable buffers of one length as the path does: 0, or 1 (source) or 2 (target) gone bad."""
    cdef char[::1] to = target
    cdef char[::1] of = source
    cdef mp_copy job
    if to.shape[0] != of.shape[0] or to.shape[0] == 0:
        raise UsageError("two buffers of one length are needed")
    job.target = &to[0]
    job.source = &of[0]
    job.n = to.shape[0]
    job.stream_min = <uint64_t>-1
    job.digest = NULL
    job.op = OP_READ
    job.by_hand = 0
    return mp_trap_run(copy_piece, &job, job.source, job.target, job.n)
