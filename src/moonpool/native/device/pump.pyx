"""The device path's moves: which transfers it takes, how they are cut into windows, and copies from and to devices.

A window is what passes through one buffer: pieces of transfers whose sides are of the same kind. Windows that go from
device to device need no buffer.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from moonpool.native.device.runtime cimport (
    MP_DEVICE_NOT_READY,
    MP_DEVICE_OK,
    MP_ON_DEVICE,
    MP_POINTER_HOST,
    MP_TO_DEVICE,
    MP_TO_HOST,
    mp_current,
    mp_pointer,
    mp_runtime,
)
from moonpool.native.device.stages cimport PIECES, mp_piece, mp_window, stage_mark, stage_ready, stage_wait
from moonpool.native.io.batch cimport (
    COMPLETE,
    INTERNAL,
    NO_MEMORY,
    OP_READ,
    PENDING,
    STALE_HANDLE,
    STALLED,
    UNSUPPORTED,
    batch_on_device,
    mp_batch,
)
from moonpool.native.io.copying cimport DIGEST_CHUNK, copy_bytes, digest_chunks
from moonpool.native.io.guard cimport mp_count, mp_guard_lock, mp_guard_unlock, mp_load32, mp_store32, mp_tally
from moonpool.native.io.regions cimport EXTRA_CUDA, EXTRA_RDMA, mp_region, regions_find
from moonpool.native.io.segment cimport mp_remote_region, path_takes

cdef enum:
    # Bounds how long a deadline waits; a device copies it in a fraction of a millisecond.
    ACROSS_BYTES = 16 << 20


# ---- what kind of transfer ------------------------------------------------------------------------------------------

cdef int local_device(mp_pump* pump, uint64_t i, bint* rdma) noexcept nogil:
    """The device of transfer i's local side, -1 for host memory, -2 when nobody knows it."""
    cdef mp_batch* batch = pump.batch
    cdef mp_region* region
    cdef mp_pointer about
    rdma[0] = False
    if not batch_on_device(batch, i):
        return -1
    if pump.near_end and pump.near_base <= batch.local[i] < pump.near_end:
        rdma[0] = pump.near_rdma
        return pump.near_device
    pump.near_rdma = False
    pump.near_device = -2
    pump.near_base = batch.local[i]
    pump.near_end = batch.local[i] + 1
    if batch.trusted:
        if pump.stages.rt.classify(pump.stages.rt, batch.local[i], &about) == 0 and about.kind != MP_POINTER_HOST:
            pump.near_device = about.device
            pump.near_end = batch.local[i] + batch.length[i]
        return pump.near_device
    mp_guard_lock(&pump.segment.own.guard)
    region = regions_find(pump.segment.own, batch.local[i], batch.length[i])
    if region != NULL and region.extra[EXTRA_CUDA] != NULL:
        pump.near_base = region.base
        pump.near_end = region.base + region.length
        pump.near_device = (<mp_near*>region.extra[EXTRA_CUDA]).device
        pump.near_rdma = region.extra[EXTRA_RDMA] != NULL
    mp_guard_unlock(&pump.segment.own.guard)
    rdma[0] = pump.near_rdma
    return pump.near_device


cdef bint ours(mp_pump* pump, uint64_t i, int* near, int* kind, int* far) noexcept nogil:
    """True when transfer i goes this way: the device of either side, -1 for none, and how the remote one is reached."""
    cdef mp_remote_region* region = &pump.segment.slots[<uint32_t>pump.batch.region[i]]
    cdef mp_far* about = <mp_far*>region.extra[EXTRA_CUDA]
    cdef bint rdma = False
    if not path_takes(pump.path, pump.batch, i):
        return False
    if mp_count(&region.handle) != pump.batch.region[i] or (about != NULL and mp_load32(&about.gone)):
        pump.batch.status[i] = STALE_HANDLE  # taken back meanwhile: who revokes it need not wait for a long batch
        return False
    near[0] = local_device(pump, i, &rdma)
    far[0] = -1
    kind[0] = REMOTE_INNER
    if about != NULL and about.pointer and not mp_load32(&about.failed):
        kind[0] = REMOTE_POINTER
        far[0] = about.device
    elif about != NULL:
        if not about.served or not pump.reach.far_handle:
            return False
        kind[0] = REMOTE_SERVED
    if near[0] == -2:
        pump.batch.status[i] = UNSUPPORTED
        return False
    if near[0] == -1:
        return kind[0] != REMOTE_INNER
    # What a NIC reads from the device itself is left to it.
    return not (rdma and kind[0] != REMOTE_POINTER and region.extra[EXTRA_RDMA] != NULL)


cdef uint64_t room_of(mp_pump* pump, mp_window* window) noexcept nogil:
    """Most bytes of a window, by what it is of."""
    cdef uint64_t most = pump.stages.slot_bytes
    if across(pump, window):
        return ACROSS_BYTES
    if window.remote == REMOTE_SERVED and pump.reach.far_slot_bytes < most:
        most = pump.reach.far_slot_bytes
    return most


cdef bint across(mp_pump* pump, mp_window* window) noexcept nogil:
    """True for a window that goes from device to device and through no buffer."""
    return window.local_device >= 0 and window.remote == REMOTE_POINTER and pump.batch.digest == NULL


cdef bint cut(mp_pump* pump, mp_window* window) noexcept nogil:
    """The next window: pieces of one kind that fit a buffer. False when nothing is left."""
    cdef mp_batch* batch = pump.batch
    cdef mp_piece* piece
    cdef uint64_t room = 0, take
    cdef int near = -1, kind = 0, far = -1
    window.n = 0
    window.n_bytes = 0
    window.busy_device = -1
    window.moving = False
    while pump.next < batch.n and window.n < PIECES:
        if not ours(pump, pump.next, &near, &kind, &far):
            pump.next += 1
            pump.done = 0
            continue
        if window.n == 0:
            window.local_device = near
            window.remote = kind
            window.remote_device = far
            room = room_of(pump, window)
        elif window.local_device != near or window.remote != kind or window.remote_device != far:
            break
        take = batch.length[pump.next] - pump.done
        if take > room - window.n_bytes:
            take = (room - window.n_bytes) // DIGEST_CHUNK * DIGEST_CHUNK
            if take == 0:
                break
        piece = &window.pieces[window.n]
        piece.i = pump.next
        piece.start = pump.done
        piece.length = take
        piece.at = window.n_bytes
        window.n += 1
        window.n_bytes += take
        pump.done += take
        if pump.done == batch.length[pump.next]:
            pump.next += 1
            pump.done = 0
    return window.n > 0


# ---- pieces ---------------------------------------------------------------------------------------------------------

cdef char* place_of(mp_pump* pump, mp_window* window, int slot, mp_piece* piece) noexcept nogil:
    """Where a piece's bytes are on the host: in the caller's memory, unless a device is on the other side."""
    if window.local_device < 0 and window.remote != REMOTE_POINTER:
        return <char*><size_t>(pump.batch.local[piece.i] + piece.start)
    return pump.stage.buffer[slot] + piece.at


cdef uint64_t pointer_of(mp_pump* pump, mp_piece* piece, bint near) noexcept nogil:
    """A piece's address on the device of its local or its remote side."""
    cdef mp_remote_region* region
    if near:
        return pump.batch.local[piece.i] + piece.start
    region = &pump.segment.slots[<uint32_t>pump.batch.region[piece.i]]
    return (<mp_far*>region.extra[EXTRA_CUDA]).pointer + pump.batch.offset[piece.i] + piece.start


cdef void fail_window(mp_pump* pump, mp_window* window, int status) noexcept nogil:
    cdef uint32_t k
    for k in range(window.n):
        if pump.batch.status[window.pieces[k].i] == PENDING:
            pump.batch.status[window.pieces[k].i] = <uint8_t>status
            mp_tally(&pump.path.stats.errors[pump.batch.op != OP_READ][status], 1)


cdef void window_done(mp_pump* pump, mp_window* window) noexcept nogil:
    """Every piece of the window that has not failed is where it belongs."""
    cdef mp_piece* piece
    cdef uint32_t k
    for k in range(window.n):
        piece = &window.pieces[k]
        if pump.batch.status[piece.i] != PENDING:
            continue
        pump.left[piece.i] -= piece.length
        if pump.left[piece.i] == 0:
            pump.batch.status[piece.i] = COMPLETE
            if window.remote == REMOTE_POINTER:  # else another path of the segment counts it
                pump.carried += 1
                pump.n_bytes += pump.batch.length[piece.i]
    window.n = 0


cdef void device_failed(mp_pump* pump, mp_window* window, int rc, bint far) noexcept nogil:
    """A copy failed or did not end. Where the owner can serve instead, its transfers are tried so once more."""
    cdef mp_far* about
    cdef uint32_t k
    cdef bint again = False
    if rc == MP_DEVICE_NOT_READY:
        pump.lost = True
        fail_window(pump, window, STALLED)
    elif far and window.remote == REMOTE_POINTER and pump.reach.far_handle:
        for k in range(window.n):
            about = <mp_far*>pump.segment.slots[<uint32_t>pump.batch.region[window.pieces[k].i]].extra[EXTRA_CUDA]
            if about.served:
                mp_store32(&about.failed, 1)
                again = True
        mp_tally(&pump.path.stats.fallbacks, 1)
        pump.retry |= again
        if not again:
            fail_window(pump, window, INTERNAL)
    else:
        fail_window(pump, window, NO_MEMORY if rc == pump.stages.rt.row.no_memory else INTERNAL)
    window.n = 0
    window.moving = False


cdef void host_copy(mp_pump* pump, mp_window* window, int slot, bint into_buffer) noexcept nogil:
    """Between the caller's memory and the buffer."""
    cdef mp_piece* piece
    cdef char* here
    cdef char* buffer
    cdef uint32_t k
    for k in range(window.n):
        piece = &window.pieces[k]
        here = <char*><size_t>(pump.batch.local[piece.i] + piece.start)
        buffer = pump.stage.buffer[slot] + piece.at
        if pump.batch.status[piece.i] == PENDING:
            copy_bytes(buffer if into_buffer else here, here if into_buffer else buffer, piece.length, <size_t>-1)


cdef void hash_window(mp_pump* pump, mp_window* window, int slot) noexcept nogil:
    cdef mp_piece* piece
    cdef uint32_t k
    if pump.batch.digest == NULL:
        return
    for k in range(window.n):
        piece = &window.pieces[k]
        if pump.batch.status[piece.i] == PENDING:
            digest_chunks(place_of(pump, window, slot, piece), piece.length,
                          pump.batch.digest + pump.batch.digest_at[piece.i] + piece.start // DIGEST_CHUNK)


# ---- device copies --------------------------------------------------------------------------------------------------

cdef int enqueue(mp_pump* pump, mp_window* window, int slot, int device, int how, bint near) noexcept nogil:
    """Queue the copies of a window on a device's stream; `near`: of its local side. The runtime's answer."""
    cdef mp_runtime* rt = pump.stages.rt
    cdef mp_current saved
    cdef mp_piece* piece
    cdef uint64_t to, source
    cdef bint reading = pump.batch.op == OP_READ
    cdef uint32_t k
    cdef int rc, marked, to_device, from_device
    rc = rt.enter(rt, device, &saved)
    if rc != MP_DEVICE_OK:
        return rc
    rc = stage_ready(rt, pump.stage, device)
    if rc != MP_DEVICE_OK:
        rt.leave(rt, &saved)
        return rc
    to_device = from_device = device
    if how == MP_ON_DEVICE:
        to_device = window.local_device if reading else window.remote_device
        from_device = window.remote_device if reading else window.local_device
    for k in range(window.n):
        piece = &window.pieces[k]
        if pump.batch.status[piece.i] != PENDING:
            continue
        if how == MP_ON_DEVICE:
            to, source = pointer_of(pump, piece, reading), pointer_of(pump, piece, not reading)
        elif how == MP_TO_DEVICE:
            to, source = pointer_of(pump, piece, near), <uint64_t><size_t>(pump.stage.buffer[slot] + piece.at)
        else:
            to, source = <uint64_t><size_t>(pump.stage.buffer[slot] + piece.at), pointer_of(pump, piece, near)
        rc = rt.copy(rt, how, to, to_device, source, from_device, piece.length, pump.stage.stream[device])
        if rc != MP_DEVICE_OK:
            break
    # Noted also after a failure: copies queued before it may still run.
    marked = stage_mark(rt, pump.stage, slot, device)
    rt.leave(rt, &saved)
    if marked == MP_DEVICE_OK:
        window.busy_device = device
        if rc != MP_DEVICE_OK and stage_wait(pump.stages, pump.stage, slot, device) == MP_DEVICE_NOT_READY:
            rc = MP_DEVICE_NOT_READY
    elif rc == MP_DEVICE_OK:
        # Without a mark only the stream itself tells when it is done.
        rc = rt.stream_sync(rt, pump.stage.stream[device])
        rc = marked if rc == MP_DEVICE_OK else rc
    if rc == MP_DEVICE_OK:
        if how == MP_TO_DEVICE:
            mp_tally(&pump.stages.up_bytes, window.n_bytes)
        elif how == MP_TO_HOST:
            mp_tally(&pump.stages.down_bytes, window.n_bytes)
        else:
            mp_tally(&pump.stages.across_bytes, window.n_bytes)
    elif rc != MP_DEVICE_NOT_READY:
        mp_tally(&pump.stages.errors, 1)
    return rc


cdef void settle(mp_pump* pump, int slot) noexcept nogil:
    """Wait until a slot's buffer is free: the copies that store its bytes have ended."""
    cdef mp_window* window = &pump.stage.window[slot]
    cdef int rc
    if not window.moving:
        return
    rc = stage_wait(pump.stages, pump.stage, slot, window.busy_device)
    window.moving = False
    if rc != MP_DEVICE_OK:
        device_failed(pump, window, rc, across(pump, window) or pump.batch.op != OP_READ)
    else:
        window_done(pump, window)
