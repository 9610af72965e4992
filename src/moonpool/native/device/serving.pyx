"""The owner's side of a device that a peer does not reach: copies between it and two slots of host memory.

The slots are a region that only one session knows; the peer's other transports reach it. While copies run, the table of
regions counts them as users, so that a revoke waits for them as it does for a lane.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy
from moonpool.native.device.runtime cimport (
    MP_DEVICE_NOT_READY,
    MP_DEVICE_OK,
    MP_TO_DEVICE,
    MP_TO_HOST,
    DeviceRuntime,
    mp_current,
    mp_runtime,
)
from moonpool.native.device.pump cimport mp_near
from moonpool.native.device.stages cimport PIECES, SLOTS, mp_stage, stage_end, stage_mark, stage_ready
from moonpool.native.io.batch cimport (
    ACCESS_DENIED,
    COMPLETE,
    INTERNAL,
    OUT_OF_RANGE,
    PROTOCOL,
    STALE_HANDLE,
    UNSUPPORTED,
)
from moonpool.native.io.guard cimport mp_guard_enter_locked, mp_guard_leave, mp_guard_lock, mp_guard_unlock
from moonpool.native.io.regions cimport (
    ACCESS_READ,
    ACCESS_WRITE,
    DEVICE,
    EXTRA_CUDA,
    GRANTED,
    KEY_BYTES,
    LocalRegions,
    mp_region,
    mp_regions,
)

from moonpool.errors import ProtocolError, UsageError

ENTRY_BYTES = 48
PIECES_MAX = PIECES

cdef struct mp_served:
    bint active
    bint inside              # counted as a user of the table
    uint32_t n
    uint32_t ticket          # of the table of regions
    uint32_t devices         # bits of those whose copies have not ended
    uint8_t marks[PIECES]


cdef bint same_key(const uint8_t* a, const uint8_t* b) noexcept nogil:
    """In constant time: how much of a guessed key was right must not show."""
    cdef int k
    cdef uint8_t different = 0
    for k in range(KEY_BYTES):
        different |= a[k] ^ b[k]
    return different == 0


cdef int resolve(mp_regions* table, const uint8_t* entry, bint write, uint64_t slot_bytes, mp_region** region,
                 uint64_t* numbers) noexcept nogil:
    """Check one entry: handle, offset, length, place in the slot, key. A status; guard entered by the caller."""
    memcpy(numbers, entry, 32)
    cdef uint32_t index = <uint32_t>numbers[0]
    cdef uint32_t need = ACCESS_WRITE if write else ACCESS_READ
    if numbers[3] > slot_bytes or numbers[2] > slot_bytes - numbers[3]:
        return PROTOCOL
    if numbers[0] == 0 or index >= table.capacity or table.slots[index].handle != numbers[0]:
        return STALE_HANDLE
    cdef mp_region* found = &table.slots[index]
    if not same_key(entry + 32, &found.write_key[0] if write else &found.read_key[0]) or not found.access & need:
        return ACCESS_DENIED
    if numbers[1] > found.length or numbers[2] > found.length - numbers[1]:
        return OUT_OF_RANGE
    if not found.access & DEVICE or found.extra[EXTRA_CUDA] == NULL:
        return UNSUPPORTED
    if write and found.access & GRANTED:
        return ACCESS_DENIED
    region[0] = found
    return COMPLETE


cdef class Serving:
    """Two slots at `address` for one peer. Methods are called by one thread at a time; `memory` keeps the slots."""

    cdef DeviceRuntime runtime
    cdef LocalRegions table
    cdef object memory
    cdef mp_stage* stage
    cdef mp_served slots[SLOTS]
    cdef uint64_t slot_bytes
    cdef readonly uint64_t served_bytes

    def __cinit__(self, DeviceRuntime runtime not None, LocalRegions table not None, uint64_t address,
                  uint64_t slot_bytes, memory):
        self.stage = <mp_stage*>calloc(1, sizeof(mp_stage))
        if self.stage == NULL:
            raise MemoryError
        self.runtime = runtime
        self.table = table
        self.memory = memory
        self.slot_bytes = slot_bytes
        self.stage.buffer[0] = <char*><size_t>address
        self.stage.buffer[1] = <char*><size_t>(address + slot_bytes)

    def __dealloc__(self):
        free(self.stage)

    def start(self, int slot, bint write, bytes entries) -> None:
        """Queue a window's copies: into the devices with `write`, out of them without. ProtocolError for nonsense."""
        cdef const uint8_t* raw = entries
        cdef Py_ssize_t size = len(entries)
        cdef uint32_t n
        if not 0 <= slot < SLOTS or size % ENTRY_BYTES or size > PIECES * ENTRY_BYTES:
            raise ProtocolError(f"a window has a slot from 0 to {SLOTS - 1} and at most {PIECES} entries")
        if self.slots[slot].active:
            raise UsageError("the slot is in use")
        n = <uint32_t>(size // ENTRY_BYTES)
        with nogil:
            self.queue(slot, write, raw, n)

    cdef void queue(self, int slot, bint write, const uint8_t* raw, uint32_t n) noexcept nogil:
        cdef mp_served* served = &self.slots[slot]
        cdef mp_regions* table = self.table.table
        cdef mp_region* region = NULL
        cdef uint64_t numbers[4]
        cdef uint32_t k
        cdef int device
        served.n = n
        served.devices = 0
        served.active = served.inside = True
        mp_guard_lock(&table.guard)
        served.ticket = mp_guard_enter_locked(&table.guard)
        mp_guard_unlock(&table.guard)
        for k in range(n):
            served.marks[k] = <uint8_t>resolve(table, raw + k * 48, write, self.slot_bytes, &region, numbers)
            if served.marks[k] == COMPLETE and numbers[2]:
                device = (<mp_near*>region.extra[EXTRA_CUDA]).device
                if self.copy(slot, device, write, region.base + numbers[1], numbers[3], numbers[2]) == MP_DEVICE_OK:
                    self.served_bytes += numbers[2]
                else:
                    served.marks[k] = INTERNAL
                if device >= 0 and device < 16 and self.stage.stream[device] != NULL:
                    served.devices |= <uint32_t>1 << device
        self.mark(slot)
        self.leave(served)

    cdef void leave(self, mp_served* served) noexcept nogil:
        """Once all copies have ended nobody need wait for them any more."""
        if served.inside and served.devices == 0:
            served.inside = False
            mp_guard_leave(&self.table.table.guard, served.ticket)

    cdef int copy(self, int slot, int device, bint write, uint64_t address, uint64_t at, uint64_t n) noexcept nogil:
        cdef mp_runtime* rt = self.runtime.raw
        cdef uint64_t host = <uint64_t><size_t>(self.stage.buffer[slot] + at)
        cdef mp_current saved
        cdef int rc = rt.enter(rt, device, &saved)
        if rc == MP_DEVICE_OK:
            rc = stage_ready(rt, self.stage, device)
        if rc == MP_DEVICE_OK:
            rc = rt.copy(rt, MP_TO_DEVICE if write else MP_TO_HOST, address if write else host, device,
                         host if write else address, device, n, self.stage.stream[device])
        rt.leave(rt, &saved)
        return rc

    cdef void mark(self, int slot) noexcept nogil:
        """Note where the slot's copies end on each stream; a stream that takes no mark is waited for."""
        cdef mp_runtime* rt = self.runtime.raw
        cdef mp_served* served = &self.slots[slot]
        cdef mp_current saved
        cdef int device, rc
        for device in range(16):
            if not served.devices >> device & 1:
                continue
            rc = rt.enter(rt, device, &saved)
            if rc == MP_DEVICE_OK:
                rc = stage_mark(rt, self.stage, slot, device)
                if rc != MP_DEVICE_OK:
                    rt.stream_sync(rt, self.stage.stream[device])
            rt.leave(rt, &saved)
            if rc != MP_DEVICE_OK:
                served.devices &= ~(<uint32_t>1 << device)
                self.spoil(served)

    cdef void spoil(self, mp_served* served) noexcept nogil:
        cdef uint32_t k
        for k in range(served.n):
            if served.marks[k] == COMPLETE:
                served.marks[k] = INTERNAL

    def done(self, int slot) -> bool:
        """True once the slot's copies have ended, whichever way; then `take` tells. Ask until it is: a revoke waits."""
        cdef mp_served* served = &self.slots[slot]
        cdef mp_runtime* rt = self.runtime.raw
        cdef mp_current saved
        cdef int device, rc
        with nogil:
            for device in range(16):
                if not served.devices >> device & 1:
                    continue
                rc = rt.enter(rt, device, &saved)
                if rc == MP_DEVICE_OK:
                    rc = rt.event_query(rt, self.stage.event[slot][device])
                rt.leave(rt, &saved)
                if rc == MP_DEVICE_NOT_READY:
                    continue
                served.devices &= ~(<uint32_t>1 << device)
                if rc != MP_DEVICE_OK:
                    self.spoil(served)
            self.leave(served)
        return served.devices == 0

    def take(self, int slot) -> bytes:
        """The statuses of a window that is done, one byte for each entry; the slot is free afterwards."""
        cdef mp_served* served = &self.slots[slot]
        if not served.active or served.devices:
            raise UsageError("the slot has no window that is done")
        served.active = False
        return (<const char*>served.marks)[: served.n]

    def is_active(self, int slot) -> bool:
        """True while a window is in the slot."""
        return self.slots[slot].active

    def close(self) -> bool:
        """Let go of streams, events and memory; False, and nothing done, while copies still run."""
        cdef int slot
        for slot in range(SLOTS):
            if self.slots[slot].active:
                if not self.done(slot):
                    return False
                self.take(slot)
        with nogil:
            stage_end(self.runtime.raw, self.stage)
        self.memory = None
        return True
