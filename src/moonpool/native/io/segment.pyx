"""Open segments: the table of a peer's regions, and the loop that offers a batch to each path in turn.

A path runs with the local and the remote table entered, so neither side's memory can be revoked under it. It carries
the transfers it can and leaves the others PENDING for the next path.
"""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset
from moonpool.native.io.batch cimport (
    AUTO_PATH,
    COMPLETE,
    LOCAL_DEVICE,
    LOCAL_HOST,
    LOCAL_MIXED,
    NOT_REGISTERED,
    NO_MEMORY,
    OP_READ,
    OP_WRITE,
    OUT_OF_RANGE,
    ACCESS_DENIED,
    PENDING,
    STALE_HANDLE,
    TIMED_OUT,
    Batch,
    UNSUPPORTED,
    batch_fail_pending,
    batch_on_device,
    batch_off_stack,
    batch_on_stack,
    plain_batch,
    mp_batch,
)
from moonpool.native.io.guard cimport (
    mp_count,
    mp_deadline_ns,
    mp_guard_destroy,
    mp_guard_drain,
    mp_guard_enter_locked,
    mp_guard_init,
    mp_guard_leave,
    mp_guard_lock,
    mp_guard_unlock,
    mp_guard_users,
    mp_load32,
    mp_now_ns,
    mp_store32,
)
from moonpool.native.io.regions cimport (
    ACCESS_READ,
    ACCESS_WRITE,
    COVER_DEVICE,
    COVER_NONE,
    KEY_BYTES,
    LocalRegions,
    regions_cover,
)

from moonpool.errors import LimitExceeded, OutOfMemory, RevokeIncomplete, StaleHandle, UsageError

# How long a new region waits for the batches that may still use the old one in its slot.
DRAIN_S = 1.0

cdef enum:
    # Look-ups done under the table's lock at a time, so that a huge batch cannot hold others up.
    LOOKUPS_AT_ONCE = 4096
    QUICK_BYTES = 16384


cdef bint path_takes(mp_path* path, mp_batch* batch, uint64_t i) noexcept nogil:
    """True when transfer i is still to be done and may go by this path."""
    if batch.status[i] != PENDING or (batch.device and not path.device and batch_on_device(batch, i)):
        return False
    return batch.path == NULL or batch.path[i] == AUTO_PATH or batch.path[i] == path.id


cdef int segment_check(mp_segment* segment, mp_batch* batch, uint64_t i, mp_remote_region** region) noexcept nogil:
    """Look transfer i up in the peer's table (guard entered): COMPLETE and the region, or the status it fails with."""
    cdef uint64_t handle = batch.region[i]
    cdef uint32_t index = <uint32_t>handle
    if handle == 0 or index >= segment.capacity or segment.slots[index].handle != handle:
        return STALE_HANDLE
    cdef mp_remote_region* found = &segment.slots[index]
    if not found.access & (ACCESS_READ if batch.op == OP_READ else ACCESS_WRITE):
        return ACCESS_DENIED
    if batch.offset[i] > found.length or batch.length[i] > found.length - batch.offset[i]:
        return OUT_OF_RANGE
    region[0] = found
    return COMPLETE


cdef uint32_t enter_own(mp_regions* own, mp_batch* batch) noexcept nogil:
    """Enter the own table; transfers whose local range is not registered fail here. Notes which are a device's."""
    cdef uint64_t i = 0, stop, on_device = 0
    cdef uint32_t ticket
    cdef int covered
    mp_guard_lock(&own.guard)
    ticket = mp_guard_enter_locked(&own.guard)
    while i < batch.n:
        stop = i + LOOKUPS_AT_ONCE if batch.n - i > LOOKUPS_AT_ONCE else batch.n
        while i < stop:
            covered = regions_cover(own, batch.local[i], batch.length[i], batch.op == OP_READ)
            if covered == COVER_NONE:
                batch.status[i] = NOT_REGISTERED
            elif covered == COVER_DEVICE:
                on_device += 1
                note_device(batch, i)
            i += 1
        if i < batch.n:
            mp_guard_unlock(&own.guard)
            mp_guard_lock(&own.guard)
    mp_guard_unlock(&own.guard)
    if on_device == batch.n:
        free(batch.on_device)
        batch.on_device = NULL
        batch.device = LOCAL_DEVICE
    return ticket


cdef void note_device(mp_batch* batch, uint64_t i) noexcept nogil:
    """The local side of transfer i is memory of a device: from here on `path_takes` keeps it from the CPU's paths."""
    if batch.on_device == NULL:
        batch.on_device = <uint8_t*>calloc(batch.n, 1)
        batch.device = LOCAL_MIXED
    if batch.on_device == NULL:
        batch.status[i] = NO_MEMORY
        batch.device = LOCAL_HOST
        return
    batch.on_device[i] = 1


cdef void segment_offer(mp_segment* segment, mp_batch* batch, mp_path* but) noexcept nogil:
    """Offer a batch to each path in turn, but one: that of who carries it in parts. Guards entered by the caller."""
    cdef uint32_t k
    for k in range(segment.n_paths):
        if &segment.paths[k] != but and segment.paths[k].run(&segment.paths[k], segment, batch) == 0:
            break


cdef int segment_run(void* context, mp_batch* batch) noexcept nogil:
    cdef mp_segment* segment = <mp_segment*>context
    cdef uint32_t own_ticket = 0, ticket
    cdef uint64_t i
    cdef mp_remote_region* region
    cdef int status
    batch.segment_dead = &segment.dead
    if not batch.trusted:
        own_ticket = enter_own(segment.own, batch)
    mp_guard_lock(&segment.guard)
    ticket = mp_guard_enter_locked(&segment.guard)
    mp_guard_unlock(&segment.guard)
    status = mp_load32(&segment.dead)
    if batch.grants != NULL and status == 0 and batch.deadline_ns and mp_now_ns() >= batch.deadline_ns:
        # Looked at inside the guard: who waits until nobody is inside finds later comers too late (openings, settle).
        status = TIMED_OUT
    if status:
        batch_fail_pending(batch, <uint8_t>status)
    else:
        for i in range(batch.n):
            if batch.status[i] == PENDING:
                status = segment_check(segment, batch, i, &region)
                if status:
                    batch.status[i] = <uint8_t>status
                elif batch.length[i] == 0:
                    batch.status[i] = COMPLETE
        segment_offer(segment, batch, NULL)
    mp_guard_leave(&segment.guard, ticket)
    if not batch.trusted:
        mp_guard_leave(&segment.own.guard, own_ticket)
        free(batch.on_device)
        batch.on_device = NULL
        batch.device = LOCAL_HOST
    return 0


cdef class NativeSegment:
    """A peer's regions by handle, and the paths to it in order of preference."""

    def __cinit__(self, LocalRegions own not None, uint32_t capacity, uint64_t stream_min_bytes):
        self.raw = <mp_segment*>calloc(1, sizeof(mp_segment))
        if self.raw == NULL:
            raise MemoryError
        self.raw.slots = <mp_remote_region*>calloc(capacity, sizeof(mp_remote_region))
        if self.raw.slots == NULL:
            raise OutOfMemory(f"no memory for a table of {capacity} regions")
        mp_guard_init(&self.raw.guard)
        self.raw.capacity = capacity
        self.raw.own = own.table
        self.raw.stream_min_bytes = stream_min_bytes
        self.own = own
        self.keep = []

    def __dealloc__(self):
        if self.raw != NULL:
            mp_guard_destroy(&self.raw.guard)
            free(self.raw.slots)
            free(self.raw)

    cdef mp_path* add_path(self, int (*run)(mp_path*, mp_segment*, mp_batch*) noexcept nogil, void* context,
                           object keep) except NULL:
        """Append a path; its id is its place. `keep` lives as long as the segment."""
        if self.raw.n_paths >= PATHS_MAX:
            raise LimitExceeded(f"a segment has at most {PATHS_MAX} paths", limit=PATHS_MAX)
        cdef mp_path* path = &self.raw.paths[self.raw.n_paths]
        path.id = <uint16_t>self.raw.n_paths
        path.run = run
        path.context = context
        self.keep.append(keep)
        self.raw.n_paths += 1
        return path

    def transfer_one(self, int op, uint64_t local, uint64_t region, uint64_t offset, uint64_t length,
                     uint64_t timeout_ns) -> int:
        """One transfer, driven here, with no object made for it: a status. The quickest way for small ones."""
        cdef mp_batch batch
        cdef uint8_t mark = PENDING
        cdef uint32_t index = <uint32_t>region
        if op != OP_READ and op != OP_WRITE:
            raise UsageError(f"a transfer reads (1) or writes (2); there is no operation {op}")
        batch_on_stack(&batch, op, &mark)
        batch.local = &local
        batch.region = &region
        batch.offset = &offset
        batch.length = &length
        batch.started_ns = mp_now_ns()
        batch.deadline_ns = batch.started_ns + timeout_ns
        if length <= QUICK_BYTES and index < self.raw.capacity and self.raw.slots[index].map != NULL:
            # Shorter than giving the GIL up and getting it back.
            segment_run(self.raw, &batch)
        else:
            with nogil:
                segment_run(self.raw, &batch)
        batch_off_stack(&batch)
        return UNSUPPORTED if mark == PENDING else mark

    def carry_plain(self, int op, local, region, offset, length, uint64_t timeout_ns, uint64_t n_max):
        """A batch of vectors `local` and `offset` and numbers `region` and `length`, driven here to its end.

        None, and nothing done, when the arguments are of another kind: then build the batch the general way.
        """
        cdef Batch batch = plain_batch(op, local, region, offset, length, n_max)
        if batch is None:
            return None
        batch.raw.started_ns = mp_now_ns()
        batch.raw.deadline_ns = batch.raw.started_ns + timeout_ns
        batch.bind(self.raw, segment_run, self)
        batch.drive_here()
        return batch

    def put_region(self, uint64_t handle, uint64_t base, uint64_t length, uint32_t access, bytes read_key,
                   bytes write_key) -> None:
        """Enter or replace a region of the peer's."""
        cdef uint32_t index = <uint32_t>handle
        cdef const char* read_bytes = read_key
        cdef const char* write_bytes = write_key
        if index >= self.raw.capacity:
            raise LimitExceeded(
                f"the peer has region slot {index}, this engine takes {self.raw.capacity}: raise regions_max",
                field="regions_max", limit=self.raw.capacity,
            )
        if len(read_key) != KEY_BYTES or len(write_key) != KEY_BYTES or handle >> 32 == 0:
            raise UsageError("a region has a handle with a generation and two keys of 16 bytes")
        cdef mp_remote_region* region = &self.raw.slots[index]
        if region.handle == handle:
            return
        if region.length != 0:
            # The slot was used before: a batch that still looks at the old region must not meet half of the new one.
            drained = self.drop_region(region.handle, DRAIN_S) if region.handle else self.drain(DRAIN_S)
            if not drained:
                raise RevokeIncomplete(
                    "a transfer still uses the region whose place a new one takes: let it end, then refresh",
                    region=handle,
                )
        mp_guard_lock(&self.raw.guard)
        region.base = base
        region.length = length
        region.access = access
        region.map = NULL
        region.process_vm = 0
        memset(region.extra, 0, sizeof(region.extra))
        memcpy(region.read_key, read_bytes, KEY_BYTES)
        memcpy(region.write_key, write_bytes, KEY_BYTES)
        region.handle = handle
        mp_guard_unlock(&self.raw.guard)

    cdef mp_remote_region* slot_of(self, uint64_t handle) except NULL:
        cdef uint32_t index = <uint32_t>handle
        if handle == 0 or index >= self.raw.capacity or self.raw.slots[index].handle != handle:
            raise StaleHandle(region=handle)
        return &self.raw.slots[index]

    def set_mapping(self, uint64_t handle, uint64_t address, bint writable, keep) -> None:
        """The region is mapped here at `address` (`keep` owns the mapping)."""
        cdef mp_remote_region* region = self.slot_of(handle)
        self.keep.append(keep)
        mp_guard_lock(&self.raw.guard)
        region.map_writable = writable
        region.map = <char*><size_t>address
        mp_guard_unlock(&self.raw.guard)

    cdef void set_extra(self, uint64_t handle, int which, void* extra, object keep) except *:
        """What a transport needs to know of a region (EXTRA_*); `keep` owns it and lives as long as the segment.

        After `drop_region` a transport may let go of it earlier, with `release_mapping`.
        """
        cdef mp_remote_region* region = self.slot_of(handle)
        self.keep.append(keep)
        mp_guard_lock(&self.raw.guard)
        region.extra[which] = extra
        mp_guard_unlock(&self.raw.guard)

    def set_process_vm(self, uint64_t handle) -> None:
        """The owner granted process_vm_* on the region."""
        cdef mp_remote_region* region = self.slot_of(handle)
        region.process_vm = 1

    def has_region(self, uint64_t handle) -> bool:
        """True while the handle is that of a region in the table."""
        cdef uint32_t index = <uint32_t>handle
        return handle != 0 and index < self.raw.capacity and self.raw.slots[index].handle == handle

    def drop_region(self, uint64_t handle, double timeout_s) -> bool:
        """Make a handle stale, then wait for running batches; False when some may still touch it."""
        cdef mp_remote_region* region = self.slot_of(handle)
        mp_guard_lock(&self.raw.guard)
        region.handle = 0
        mp_guard_unlock(&self.raw.guard)
        return self.drain(timeout_s)

    def release_mapping(self, keep) -> None:
        """Forget a mapping after `drop_region`."""
        self.keep = [item for item in self.keep if item is not keep]

    def drain(self, double timeout_s) -> bool:
        """Wait until the batches running at this moment have ended."""
        cdef uint64_t deadline = mp_deadline_ns(timeout_s)
        cdef int rc
        with nogil:
            rc = mp_guard_drain(&self.raw.guard, deadline)
        return rc == 0

    @property
    def users(self) -> int:
        """Batches running on this segment."""
        return mp_guard_users(&self.raw.guard)

    def mark_dead(self, int status) -> None:
        """Fail every new transfer with this status, and end the running ones with it at their next piece."""
        mp_store32(&self.raw.dead, status)

    @property
    def dead(self) -> int:
        return mp_load32(&self.raw.dead)

    def bind(self, Batch batch not None) -> None:
        """Make a batch run on this segment."""
        batch.bind(self.raw, segment_run, self)

    def path_stats(self, unsigned int index) -> dict:
        """Counters and the latency histogram of one path, per operation."""
        if index >= self.raw.n_paths:
            raise UsageError(f"no path {index}", path=index)
        return stats_snapshot(&self.raw.paths[index].stats)


cdef dict stats_snapshot(mp_path_stats* stats):
    cdef int side
    cdef unsigned int k
    out = {"fallbacks": mp_count(&stats.fallbacks)}
    for side, name in ((0, "READ"), (1, "WRITE")):
        out[name] = {
            "batches": mp_count(&stats.batches[side]),
            "transfers": mp_count(&stats.transfers[side]),
            "bytes": mp_count(&stats.bytes[side]),
            "latency_sum_ns": mp_count(&stats.nanoseconds[side]),
            "errors": {k: mp_count(&stats.errors[side][k]) for k in range(16) if mp_count(&stats.errors[side][k])},
            "latency_ns_buckets": [
                (mp_bucket_upper(k), mp_count(&stats.latency[side][k])) for k in range(<unsigned int>MP_BUCKETS)
            ],
        }
    return out
