"""The path of device memory: between devices, between a device and whatever the segment's other paths reach.

A transfer has two sides. Bytes of a device leave and enter through a stage's pinned buffers (or go straight to another
device); bytes on the host are the caller's; all else ("inner") is moved by the segment's other paths, to which a window
of up to one buffer is offered as a batch of its own. With two buffers the device copies one window while the wire
carries another. A peer's device that is not within reach is served by the peer: it copies between the device and a
region of host memory, which the inner paths reach, and is asked once a window (`ask_owner`).
"""

from cpython.exc cimport PyErr_SetInterrupt
from cpython.ref cimport PyObject
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy
from moonpool.native.device.pump cimport (
    REMOTE_POINTER,
    REMOTE_SERVED,
    across,
    cut,
    device_failed,
    enqueue,
    fail_window,
    hash_window,
    host_copy,
    mp_far,
    mp_near,
    mp_pump,
    mp_reach,
    ours,
    place_of,
    settle,
    window_done,
)
from moonpool.native.device.runtime cimport MP_DEVICE_OK, MP_ON_DEVICE, MP_TO_DEVICE, MP_TO_HOST
from moonpool.native.device.stages cimport (
    PIECES,
    Stages,
    mp_piece,
    mp_stage,
    mp_window,
    stage_give,
    stage_take,
    stage_wait,
)
from moonpool.native.io.batch cimport (
    CANCELLED,
    COMPLETE,
    NO_MEMORY,
    OP_READ,
    PENDING,
    PROTOCOL,
    STALE_HANDLE,
    STALLED,
    UNSUPPORTED,
    batch_fail_pending,
    batch_interrupted,
    batch_off_stack,
    batch_on_stack,
    batch_whole,
    mp_batch,
)
from moonpool.native.io.copying cimport DIGEST_CHUNK, store_fence
from moonpool.native.io.guard cimport mp_add32, mp_load32, mp_now_ns, mp_store32, mp_swap_if32
from moonpool.native.io.regions cimport EXTRA_CUDA, LocalRegions
from moonpool.native.io.segment cimport (
    NativeSegment,
    mp_path,
    mp_path_record,
    mp_remote_region,
    mp_segment,
    segment_check,
    segment_offer,
)

from moonpool.errors import status_of

cdef extern from "time.h" nogil:
    struct timespec:
        long tv_sec
        long tv_nsec
    int nanosleep(const timespec* how_long, timespec* left)

cdef enum:
    ENTRY_BYTES = 48      # of a request to the owner, for each piece
    TRIES_MAX = 4
    TURN_WINDOWS = 8      # so many, and another batch is served
    NAP_NS = 200000


# ---- the inner paths, and the owner ---------------------------------------------------------------------------------

cdef void carry_inner(mp_pump* pump, mp_window* window, int slot) noexcept nogil:
    """Offer a window to the segment's other paths, as a batch between the host's bytes and the remote side."""
    cdef mp_stage* stage = pump.stage
    cdef mp_batch* batch = pump.batch
    cdef mp_batch inner
    cdef mp_piece* piece
    cdef mp_remote_region* region
    cdef uint32_t k
    cdef uint8_t one = PENDING
    cdef int status
    batch_on_stack(&inner, batch.op, &one)
    inner.n = window.n
    inner.local = stage.words
    inner.region = stage.words + PIECES
    inner.offset = stage.words + 2 * PIECES
    inner.length = stage.words + 3 * PIECES
    inner.status = stage.marks
    inner.started_ns = batch.started_ns
    inner.deadline_ns = batch.deadline_ns
    inner.segment_dead = batch.segment_dead
    inner.trusted = batch.trusted
    inner.whole = batch_whole(batch)
    for k in range(window.n):
        piece = &window.pieces[k]
        inner.local[k] = <uint64_t><size_t>place_of(pump, window, slot, piece)
        inner.length[k] = piece.length
        if window.remote == REMOTE_SERVED:
            inner.region[k] = pump.reach.far_handle
            inner.offset[k] = <uint64_t>slot * pump.reach.far_slot_bytes + piece.at
        else:
            inner.region[k] = batch.region[piece.i]
            inner.offset[k] = batch.offset[piece.i] + piece.start
            if batch.grants != NULL:
                memcpy(stage.grants + 24 * k, batch.grants + 24 * piece.i, 24)
                inner.grants = stage.grants
        # What failed before is not carried; nor is what lies in a region that was taken back meanwhile.
        status = segment_check(pump.segment, &inner, k, &region)
        inner.status[k] = PENDING if batch.status[piece.i] == PENDING and status == COMPLETE else UNSUPPORTED
        if status != COMPLETE and batch.status[piece.i] == PENDING:
            batch.status[piece.i] = STALE_HANDLE if window.remote == REMOTE_SERVED else <uint8_t>status
    segment_offer(pump.segment, &inner, pump.path)
    for k in range(window.n):
        piece = &window.pieces[k]
        if batch.status[piece.i] == PENDING and inner.status[k] != COMPLETE:
            batch.status[piece.i] = UNSUPPORTED if inner.status[k] == PENDING else inner.status[k]
    batch_off_stack(&inner)


cdef int call_asker(mp_reach* reach, int slot, bint write, const uint8_t* entries, uint32_t n, uint8_t* marks,
                    uint32_t n_marks) noexcept with gil:
    """Ask the owner to serve a window (n entries; 0: none) and to tell of the one before. A status."""
    cdef bytes answer
    cdef const char* raw
    try:
        answer = (<object><PyObject*>reach.asker)(slot, bool(write), (<const char*>entries)[: n * ENTRY_BYTES], n_marks)
        if len(answer) != n_marks:
            return PROTOCOL
        raw = answer
        memcpy(marks, raw, n_marks)
        return COMPLETE
    except KeyboardInterrupt:
        PyErr_SetInterrupt()  # raised again once the caller is back in Python
        return CANCELLED
    except BaseException as problem:
        return int(status_of(problem))


cdef void ask_owner(mp_pump* pump, mp_window* window, int slot) noexcept nogil:
    """Have the owner copy a window's bytes between the device and its slot (NULL: none); take the answer before."""
    cdef mp_window* before = &pump.stage.window[pump.asked_slot] if pump.asked else NULL
    cdef uint8_t* entries = NULL
    cdef uint8_t* at
    cdef uint8_t marks[PIECES]
    cdef mp_remote_region* region
    cdef mp_piece* piece
    cdef uint64_t number
    cdef uint32_t k, n = 0 if window == NULL else window.n
    cdef int status = COMPLETE
    if n:
        entries = <uint8_t*>malloc(n * ENTRY_BYTES)
        if entries == NULL:
            fail_window(pump, window, NO_MEMORY)
            n = 0
    for k in range(n):
        piece = &window.pieces[k]
        region = &pump.segment.slots[<uint32_t>pump.batch.region[piece.i]]
        at = entries + k * ENTRY_BYTES
        # A transfer that has failed is asked for with no bytes, so that entries and pieces stay side by side.
        memcpy(at, &pump.batch.region[piece.i], 8)
        number = pump.batch.offset[piece.i] + piece.start
        memcpy(at + 8, &number, 8)
        number = piece.length if pump.batch.status[piece.i] == PENDING else 0
        memcpy(at + 16, &number, 8)
        memcpy(at + 24, &piece.at, 8)
        memcpy(at + 32, &region.read_key[0] if pump.batch.op == OP_READ else &region.write_key[0], 16)
    if n or before != NULL:
        status = call_asker(pump.reach, slot, pump.batch.op != OP_READ, entries, n, marks,
                            before.n if before != NULL else 0)
    free(entries)
    if before != NULL:
        for k in range(before.n):
            if pump.batch.status[before.pieces[k].i] == PENDING and (status or marks[k] != COMPLETE):
                number = status if status else marks[k]
                if number > STALLED or number == PENDING:
                    number = PROTOCOL
                pump.batch.status[before.pieces[k].i] = <uint8_t>number
                if number == STALE_HANDLE:
                    region = &pump.segment.slots[<uint32_t>pump.batch.region[before.pieces[k].i]]
                    mp_store32(&(<mp_far*>region.extra[EXTRA_CUDA]).gone, 1)
    if status and window != NULL:
        fail_window(pump, window, status)
    pump.asked = n > 0 and status == COMPLETE
    pump.asked_slot = slot


cdef int begin_asking(mp_pump* pump) noexcept nogil:
    """Be the one batch that the owner serves; waits until the batch is interrupted. A status."""
    cdef timespec nap
    cdef int early
    nap.tv_sec = 0
    nap.tv_nsec = NAP_NS
    if mp_swap_if32(&pump.reach.asking, 0, 1):
        return COMPLETE
    mp_add32(&pump.reach.waiting, 1)
    while True:
        early = batch_interrupted(pump.batch)
        if early or mp_swap_if32(&pump.reach.asking, 0, 1):
            break
        nanosleep(&nap, NULL)
    mp_add32(&pump.reach.waiting, -1)
    return early


cdef int let_others_ask(mp_pump* pump) noexcept nogil:
    """Give the others that wait to be served a turn. A status."""
    cdef timespec nap
    nap.tv_sec = 0
    nap.tv_nsec = 2 * NAP_NS  # longer than they sleep between two tries
    mp_store32(&pump.reach.asking, 0)
    nanosleep(&nap, NULL)
    return begin_asking(pump)


# ---- windows --------------------------------------------------------------------------------------------------------

cdef void begin(mp_pump* pump, mp_window* window, int slot) noexcept nogil:
    """Start to fetch a window's bytes, as far as that goes by itself."""
    cdef bint reading = pump.batch.op == OP_READ
    cdef int rc = MP_DEVICE_OK
    cdef bint far = False
    if across(pump, window):
        rc = enqueue(pump, window, slot, window.local_device if reading else window.remote_device, MP_ON_DEVICE, False)
        window.moving = rc == MP_DEVICE_OK
        far = True
    elif reading and window.remote == REMOTE_POINTER:
        rc = enqueue(pump, window, slot, window.remote_device, MP_TO_HOST, False)
        far = True
    elif not reading and window.local_device >= 0:
        rc = enqueue(pump, window, slot, window.local_device, MP_TO_HOST, True)
    if rc != MP_DEVICE_OK:
        device_failed(pump, window, rc, far)
    elif reading and window.remote == REMOTE_SERVED:
        ask_owner(pump, window, slot)


cdef void go_on(mp_pump* pump, mp_window* window, int slot) noexcept nogil:
    """Bring a begun window's bytes to the host and start to store them at the other side."""
    cdef bint reading = pump.batch.op == OP_READ
    cdef int rc = MP_DEVICE_OK, target
    if window.n == 0 or across(pump, window):
        return
    if window.busy_device >= 0:
        rc = stage_wait(pump.stages, pump.stage, slot, window.busy_device)
        if rc != MP_DEVICE_OK:
            device_failed(pump, window, rc, reading)
            return
    elif reading:
        carry_inner(pump, window, slot)
    elif window.remote == REMOTE_POINTER:
        host_copy(pump, window, slot, True)
    hash_window(pump, window, slot)
    target = window.local_device if reading else window.remote_device
    if target >= 0:
        rc = enqueue(pump, window, slot, target, MP_TO_DEVICE, reading)
        window.moving = rc == MP_DEVICE_OK
        if rc != MP_DEVICE_OK:
            device_failed(pump, window, rc, not reading)
        return
    if reading:
        if window.remote == REMOTE_POINTER:
            host_copy(pump, window, slot, False)
        window_done(pump, window)
        return
    carry_inner(pump, window, slot)
    if window.remote == REMOTE_SERVED:
        ask_owner(pump, window, slot)
    else:
        window_done(pump, window)


cdef void answered(mp_pump* pump, int slot) noexcept nogil:
    """After the owner told of a slot's window of a WRITE: it is where it belongs."""
    if pump.batch.op != OP_READ and pump.stage.window[slot].remote == REMOTE_SERVED:
        window_done(pump, &pump.stage.window[slot])


cdef bint run_windows(mp_pump* pump, bint served) noexcept nogil:
    """All windows, the fetching of one beside the storing of the one before.

    True when it stopped between two because others want to be served, with nothing on its way.
    """
    cdef mp_window* window = &pump.stage.window[0]
    cdef mp_window* following
    cdef bint reading = pump.batch.op == OP_READ, more
    cdef int slot = 0, done = 0
    cdef bint turn = False
    cdef int early = batch_interrupted(pump.batch)
    more = early == 0 and cut(pump, window)
    if more:
        begin(pump, window, slot)
    while more:
        following = &pump.stage.window[1 - slot]
        settle(pump, 1 - slot)
        if not reading and pump.asked and pump.asked_slot == 1 - slot:
            ask_owner(pump, NULL, 1 - slot)
            answered(pump, 1 - slot)
        early = batch_interrupted(pump.batch)
        done += 1
        turn = served and done >= TURN_WINDOWS and mp_load32(&pump.reach.waiting) > 0
        more = not pump.lost and not pump.retry and not turn and early == 0 and cut(pump, following)
        if more:
            begin(pump, following, 1 - slot)
        if reading and pump.asked and pump.asked_slot == slot:
            ask_owner(pump, NULL, slot)  # the last one: nothing is begun that would bring its answer
        go_on(pump, window, slot)
        slot = 1 - slot
        window = following
    settle(pump, 0)
    settle(pump, 1)
    if pump.asked:
        slot = pump.asked_slot
        ask_owner(pump, NULL, slot)
        answered(pump, slot)
    if early:
        batch_fail_pending(pump.batch, <uint8_t>early)
    return turn and not early and not pump.lost and not pump.retry


cdef bint any_ours(mp_pump* pump, bint* served) noexcept nogil:
    """Whether anything goes this way, and whether the owner has to serve some of it."""
    cdef uint64_t i
    cdef int near = -1, kind = 0, far = -1
    cdef bint found = False
    served[0] = False
    for i in range(pump.batch.n):
        if ours(pump, i, &near, &kind, &far):
            found = True
            served[0] |= kind == REMOTE_SERVED
            if served[0]:
                break
    return found


cdef void run_once(mp_pump* pump, bint served) noexcept nogil:
    cdef uint64_t i
    cdef int status = COMPLETE
    pump.next = pump.done = 0
    pump.retry = pump.asked = pump.lost = False
    for i in range(pump.batch.n):
        pump.left[i] = pump.batch.length[i]
    pump.stage = stage_take(pump.stages, pump.batch, &status)
    if pump.stage != NULL and served:
        status = begin_asking(pump)
    if status == COMPLETE:
        while status == COMPLETE and run_windows(pump, served):
            status = let_others_ask(pump)
        if served and status == COMPLETE:
            mp_store32(&pump.reach.asking, 0)
        if pump.lost:
            status = STALLED
    if status:
        batch_fail_ours(pump, status)
    if pump.stage != NULL:
        stage_give(pump.stages, pump.stage, not pump.lost)


cdef void batch_fail_ours(mp_pump* pump, int status) noexcept nogil:
    cdef uint64_t i
    cdef int near = -1, kind = 0, far = -1
    for i in range(pump.batch.n):
        if ours(pump, i, &near, &kind, &far):
            pump.batch.status[i] = <uint8_t>status


cdef int device_run(mp_path* path, mp_segment* segment, mp_batch* batch) noexcept nogil:
    """Carry what has a device on either side. Returns how many transfers are left for other paths."""
    cdef mp_pump pump
    cdef uint64_t one = 0, i, left = 0, started = mp_now_ns()
    cdef bint served = False
    cdef int _tries
    pump.path = path
    pump.segment = segment
    pump.batch = batch
    pump.reach = <mp_reach*>path.context
    pump.stages = pump.reach.stages
    pump.carried = pump.n_bytes = pump.near_end = 0
    pump.left = NULL
    for _tries in range(TRIES_MAX):
        if not any_ours(&pump, &served):
            break
        if pump.left == NULL:
            pump.left = &one if batch.n == 1 else <uint64_t*>malloc(batch.n * 8)
        if pump.left == NULL:
            batch_fail_ours(&pump, NO_MEMORY)
            break
        run_once(&pump, served)
        if not pump.retry:
            break
    if pump.left != &one:
        free(pump.left)
    if pump.carried:
        store_fence()
        mp_path_record(&path.stats, batch.op != OP_READ, pump.carried, pump.n_bytes, mp_now_ns() - started)
    for i in range(batch.n):
        left += batch.status[i] == PENDING
    return <int>(left > 0)


# ---- objects --------------------------------------------------------------------------------------------------------

cdef class DeviceReach:
    """What a segment's device path needs: stages, and the owner's region and ear where the owner serves us.

    `asker(slot, write, entries, n_marks)` asks the owner to serve a window and returns the statuses of the window
    before, one byte each; it is called from transfers, with the GIL.
    """

    cdef mp_reach* raw
    cdef Stages stages
    cdef object asker

    def __cinit__(self, Stages stages not None, asker=None):
        self.raw = <mp_reach*>calloc(1, sizeof(mp_reach))
        if self.raw == NULL:
            raise MemoryError
        self.stages = stages
        self.asker = asker
        self.raw.stages = stages.raw
        self.raw.asker = <void*><PyObject*>asker

    def __dealloc__(self):
        free(self.raw)

    def serve_by(self, uint64_t handle, uint64_t slot_bytes) -> None:
        """The owner's region of two slots, by which it serves this segment; `handle` 0: no more."""
        self.raw.far_slot_bytes = slot_bytes // DIGEST_CHUNK * DIGEST_CHUNK
        self.raw.far_handle = handle if self.raw.far_slot_bytes else 0

    @property
    def served(self) -> bool:
        """True when the owner serves this segment."""
        return self.raw.far_handle != 0


cdef class NearRegion:
    """A region of ours on a device."""

    cdef mp_near raw

    def __cinit__(self, int device):
        self.raw.device = device


cdef class FarRegion:
    """A peer's region on a device: its address here (0: out of reach) on a device of ours, and who else serves it."""

    cdef mp_far raw

    def __cinit__(self, uint64_t pointer, int device, bint served):
        self.raw.pointer = pointer
        self.raw.device = device
        self.raw.served = served

    @property
    def failed(self) -> bool:
        """True once copies to or from the address failed: the owner serves the region since."""
        return mp_load32(&self.raw.failed) != 0


def add_device_path(NativeSegment segment not None, DeviceReach reach not None) -> int:
    """Let a segment's transfers with a device on either side go this way; returns the path id."""
    cdef mp_path* path = segment.add_path(device_run, reach.raw, reach)
    path.device = 1
    return path.id


def set_near(LocalRegions table not None, uint64_t handle, NearRegion region not None) -> None:
    """Our region is on a device."""
    table.set_extra(handle, EXTRA_CUDA, &region.raw, region)


def set_far(NativeSegment segment not None, uint64_t handle, FarRegion region not None) -> None:
    """The peer's region is on a device."""
    segment.set_extra(handle, EXTRA_CUDA, &region.raw, region)
