"""Pinned buffers and streams through which bytes of devices pass.

The host memory that a device's copy engine touches is only ever a stage's own: a caller's buffer is filled from it by
the CPU. So a copy that never ends can hurt nothing but its stage, which is then given up, with its bytes, for good.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from moonpool.native.device.runtime cimport (
    MP_DEVICE_GONE,
    MP_DEVICE_NOT_READY,
    MP_DEVICE_OK,
    DeviceRuntime,
    mp_current,
    mp_runtime,
)
from moonpool.native.io.batch cimport (
    COMPLETE,
    NO_MEMORY,
    batch_interrupted,
    mp_batch,
    mp_cond_wait_until,
    mp_sync_init,
    pthread_cond_destroy,
    pthread_cond_signal,
    pthread_mutex_destroy,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from moonpool.native.io.guard cimport mp_count, mp_now_ns, mp_tally

from moonpool.errors import UsageError

cdef extern from "sched.h" nogil:
    int sched_yield()

cdef extern from "time.h" nogil:
    struct timespec:
        long tv_sec
        long tv_nsec
    int nanosleep(const timespec* how_long, timespec* left)

cdef enum:
    DIGEST_CHUNK = 65536
    # A copy of a window takes tens of microseconds: asked for without sleep so long, then now and then.
    ASK_NS = 100000
    NAP_NS = 50000
    TICK_NS = 20000000


cdef mp_stage* stage_take(mp_stages* stages, mp_batch* batch, int* status) noexcept nogil:
    """A stage of one's own; waits for one until the batch is interrupted. NULL, and why, when there is none."""
    cdef mp_stage* found = NULL
    pthread_mutex_lock(&stages.lock)
    while stages.idle == NULL:
        status[0] = batch_interrupted(batch)
        if status[0] == 0 and stages.lost >= stages.n_all:
            status[0] = NO_MEMORY
        if status[0]:
            pthread_mutex_unlock(&stages.lock)
            return NULL
        stages.waits += 1
        mp_cond_wait_until(&stages.freed, &stages.lock, mp_now_ns() + TICK_NS)
    found = stages.idle
    stages.idle = found.next
    found.in_use = 1
    pthread_mutex_unlock(&stages.lock)
    status[0] = COMPLETE
    return found


cdef void stage_give(mp_stages* stages, mp_stage* stage, bint good) noexcept nogil:
    """Back to the others; one whose copies may still run (not `good`) is never used again."""
    pthread_mutex_lock(&stages.lock)
    stage.in_use = 0
    if good:
        stage.next = stages.idle
        stages.idle = stage
    else:
        stages.lost += 1
    pthread_cond_signal(&stages.freed)
    pthread_mutex_unlock(&stages.lock)


cdef int stage_ready(mp_runtime* rt, mp_stage* stage, int device) noexcept nogil:
    """Make the stream and the events of a device, which is current. The runtime's answer."""
    cdef int rc = MP_DEVICE_OK, slot
    if device < 0 or device >= rt.devices:
        return MP_DEVICE_GONE
    if stage.stream[device] == NULL:
        rc = rt.stream_new(rt, &stage.stream[device])
        if rc != MP_DEVICE_OK:
            stage.stream[device] = NULL
    for slot in range(SLOTS):
        if rc == MP_DEVICE_OK and stage.event[slot][device] == NULL:
            rc = rt.event_new(rt, &stage.event[slot][device])
            if rc != MP_DEVICE_OK:
                stage.event[slot][device] = NULL
    return rc


cdef int stage_mark(mp_runtime* rt, mp_stage* stage, int slot, int device) noexcept nogil:
    """Note where in the device's stream the copies of a slot end; the device is current."""
    return rt.event_record(rt, stage.event[slot][device], stage.stream[device])


cdef int stage_wait(mp_stages* stages, mp_stage* stage, int slot, int device) noexcept nogil:
    """Wait for a slot's copies: MP_DEVICE_OK, what the runtime says, or MP_DEVICE_NOT_READY when they do not end."""
    cdef uint64_t since = mp_now_ns(), now
    cdef timespec nap
    cdef mp_current saved
    cdef mp_runtime* rt = stages.rt
    cdef int rc = rt.enter(rt, device, &saved)
    if rc != MP_DEVICE_OK:
        return rc
    nap.tv_sec = 0
    nap.tv_nsec = NAP_NS
    while True:
        rc = rt.event_query(rt, stage.event[slot][device])
        now = mp_now_ns()
        if rc != MP_DEVICE_NOT_READY or now - since >= stages.stall_ns:
            break
        if now - since < ASK_NS:
            sched_yield()
        else:
            nanosleep(&nap, NULL)
    rt.leave(rt, &saved)
    if rc != MP_DEVICE_OK:
        mp_tally(&stages.errors, 1)
    return rc


cdef void stage_end(mp_runtime* rt, mp_stage* stage) noexcept nogil:
    """Let go of a stage's streams and events; nothing runs on them."""
    cdef mp_current saved
    cdef int device, slot
    for device in range(rt.devices):
        if stage.stream[device] == NULL:
            continue
        if rt.enter(rt, device, &saved) == MP_DEVICE_OK:
            for slot in range(SLOTS):
                if stage.event[slot][device] != NULL:
                    rt.event_end(rt, stage.event[slot][device])
            rt.stream_end(rt, stage.stream[device])
        rt.leave(rt, &saved)
        stage.stream[device] = NULL
        stage.event[0][device] = stage.event[1][device] = NULL


cdef class Stages:
    """`count` stages in a range of host memory, which `memory` keeps in place. Thread-safe without the GIL."""

    def __cinit__(self, DeviceRuntime runtime not None, uint64_t address, uint64_t size_bytes, uint32_t count,
                  uint64_t stall_ns, memory):
        cdef uint64_t slot_bytes
        cdef uint32_t k
        cdef mp_stage* stage
        if not 1 <= count <= STAGES_MAX:
            raise UsageError(f"there are 1 to {STAGES_MAX} stages, not {count}")
        slot_bytes = size_bytes // (SLOTS * count) // DIGEST_CHUNK * DIGEST_CHUNK
        if slot_bytes == 0:
            raise UsageError(f"{count} stages need {SLOTS * count * DIGEST_CHUNK} bytes of host memory at least",
                             field="device_staging_bytes")
        self.raw = <mp_stages*>calloc(1, sizeof(mp_stages))
        if self.raw == NULL:
            raise MemoryError
        mp_sync_init(&self.raw.lock, &self.raw.freed)
        self.raw.rt = runtime.raw
        self.raw.slot_bytes = slot_bytes
        self.raw.stall_ns = stall_ns
        self.runtime = runtime
        self.memory = memory
        for k in range(count):
            stage = <mp_stage*>calloc(1, sizeof(mp_stage))
            if stage == NULL:
                raise MemoryError
            stage.buffer[0] = <char*><size_t>(address + 2 * k * slot_bytes)
            stage.buffer[1] = stage.buffer[0] + slot_bytes
            stage.next = self.raw.idle
            self.raw.idle = stage
            self.raw.all[k] = stage
            self.raw.n_all += 1

    def __dealloc__(self):
        cdef uint32_t k
        if self.raw != NULL:
            for k in range(self.raw.n_all):
                free(self.raw.all[k])
            pthread_mutex_destroy(&self.raw.lock)
            pthread_cond_destroy(&self.raw.freed)
            free(self.raw)

    @property
    def slot_bytes(self) -> int:
        """Most bytes that pass at once."""
        return self.raw.slot_bytes

    @property
    def whole(self) -> bool:
        """False once a copy never ended: then the host memory of the stages must not be freed."""
        return mp_count(&self.raw.lost) == 0

    @property
    def busy(self) -> int:
        """Stages in use at this moment."""
        cdef uint32_t k
        return sum(1 for k in range(self.raw.n_all) if self.raw.all[k].in_use)

    def counters(self) -> dict[str, int]:
        """Totals since the beginning."""
        return {
            "up_bytes": mp_count(&self.raw.up_bytes),
            "down_bytes": mp_count(&self.raw.down_bytes),
            "across_bytes": mp_count(&self.raw.across_bytes),
            "stage_waits": mp_count(&self.raw.waits),
            "device_errors": mp_count(&self.raw.errors),
            "stages_lost": mp_count(&self.raw.lost),
        }

    def close(self) -> None:
        """Let go of streams, events and memory. Nobody uses a stage any more; where one is lost all stays."""
        cdef mp_stage* stage
        if self.raw.lost:
            return
        with nogil:
            stage = self.raw.idle
            while stage != NULL:
                stage_end(self.raw.rt, stage)
                stage = stage.next
        self.memory = None
