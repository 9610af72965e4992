"""Own regions: registered address ranges, their handles and keys.

Target threads and running batches read the table inside the guard's grace period; `remove` makes a handle stale at once
and returns only when nobody who saw it alive can still touch the memory, or says that somebody may.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memmove, memset
from moonpool.native.io.grants cimport grant_allows, grants_close, grants_open
from moonpool.native.io.guard cimport (
    mp_guard_destroy,
    mp_guard_drain,
    mp_guard_init,
    mp_guard_lock,
    mp_guard_unlock,
    mp_guard_users,
    mp_deadline_ns,
)

from moonpool.errors import LimitExceeded, OutOfMemory, StaleHandle, UsageError

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    /* Constant time: how much of a guessed key was right must not show. */
    static inline int mp_same_key(const uint8_t *a, const uint8_t *b) {
        uint8_t d = 0;
        for (int i = 0; i < 16; i++) d |= a[i] ^ b[i];
        return d == 0;
    }
    """
    bint mp_same_key(const uint8_t* a, const uint8_t* b) nogil

cdef enum:
    COMPLETE = 0
    STALE_HANDLE = 6
    OUT_OF_RANGE = 7
    ACCESS_DENIED = 8
    UNSUPPORTED = 12


cdef mp_span* span_of(mp_regions* table, uint64_t address, uint64_t length) noexcept nogil:
    """The live span that holds the whole range, or NULL. Lock held by the caller."""
    cdef uint32_t low = 0, high = table.live, middle
    while low < high:
        middle = (low + high) // 2
        if table.order[middle].base <= address:
            low = middle + 1
        else:
            high = middle
    if low == 0:
        return NULL
    cdef mp_span* span = &table.order[low - 1]
    if address > span.end or length > span.end - address:
        return NULL
    return span


cdef int regions_cover(mp_regions* table, uint64_t address, uint64_t length, bint writing) noexcept nogil:
    """COVER_* of the live region that holds the whole range (and may be written here). Lock held by the caller."""
    cdef mp_span* span = span_of(table, address, length)
    if span == NULL or (writing and not span.bits & LOCAL_WRITABLE):
        return COVER_NONE
    return COVER_DEVICE if span.bits & DEVICE else COVER_HOST


cdef mp_region* regions_find(mp_regions* table, uint64_t address, uint64_t length) noexcept nogil:
    """The live region that holds the whole range, or NULL. Lock held by the caller; use it inside the guard."""
    cdef mp_span* span = span_of(table, address, length)
    return NULL if span == NULL else &table.slots[span.slot]


cdef int regions_resolve(mp_regions* table, const uint8_t* entry, uint32_t need, char** where,
                         uint64_t* length) noexcept nogil:
    """Check one wire entry (handle, offset, length, key) and turn it into an address. Guard entered by the caller.

    Returns a status; `length` is set in any case, because the payload of a refused WRITE must still be drained.
    """
    cdef uint64_t handle, offset
    memcpy(&handle, entry, 8)
    memcpy(&offset, entry + 8, 8)
    memcpy(length, entry + 16, 8)
    cdef uint32_t index = <uint32_t>handle
    where[0] = NULL
    if index >= table.capacity or handle == 0:
        return STALE_HANDLE
    cdef mp_region* region = &table.slots[index]
    if region.handle != handle:
        return STALE_HANDLE
    cdef const uint8_t* key = &region.write_key[0] if need == ACCESS_WRITE else &region.read_key[0]
    if not mp_same_key(entry + 24, key):
        return ACCESS_DENIED
    if not region.access & need:
        return ACCESS_DENIED
    if offset > region.length or length[0] > region.length - offset:
        return OUT_OF_RANGE
    if region.access & UNMAPPED:
        return UNSUPPORTED
    if region.access & GRANTED and need == ACCESS_WRITE and not grant_allows(&table.grants, entry):
        return ACCESS_DENIED
    where[0] = <char*><size_t>(region.base + offset)
    return COMPLETE


cdef class LocalRegions:
    """At most ``capacity`` registered ranges, none overlapping another. Methods are called with the GIL held."""

    def __cinit__(self, uint32_t capacity):
        self.table = <mp_regions*>calloc(1, sizeof(mp_regions))
        if self.table == NULL:
            raise MemoryError
        self.table.slots = <mp_region*>calloc(capacity, sizeof(mp_region))
        self.table.order = <mp_span*>calloc(capacity, sizeof(mp_span))
        self.table.capacity = capacity
        mp_guard_init(&self.table.guard)
        grants_open(&self.table.grants)
        if self.table.slots == NULL or self.table.order == NULL:
            raise OutOfMemory(f"no memory for a table of {capacity} regions")
        self.free_slots = []
        self.kept = {}

    def __dealloc__(self):
        if self.table != NULL:
            mp_guard_destroy(&self.table.guard)
            grants_close(&self.table.grants)
            free(self.table.slots)
            free(self.table.order)
            free(self.table)

    def __len__(self) -> int:
        return self.table.live

    @property
    def users(self) -> int:
        """Target threads and batches inside the table at this moment."""
        return mp_guard_users(&self.table.guard)

    def add(self, uint64_t address, uint64_t length, uint32_t access, bytes read_key, bytes write_key) -> int:
        """Register a range: its handle. UsageError when it overlaps one, LimitExceeded when the table is full.

        With UNMAPPED in `access` the address is 0: the region has bytes that only some transports reach. With DEVICE
        too it is a device's: a range that only paths which say so take as their local side.
        """
        cdef mp_regions* table = self.table
        cdef uint32_t slot, place = 0
        cdef bint unmapped = access & UNMAPPED and not access & DEVICE
        if length == 0 or (address == 0) != unmapped or address + length < address:
            raise UsageError(f"cannot register {length} bytes at {address:#x}")
        if len(read_key) != KEY_BYTES or len(write_key) != KEY_BYTES:
            raise UsageError(f"keys have {KEY_BYTES} bytes")
        if not unmapped:
            place = self.place_of(address, length)
        if self.free_slots:
            slot = self.free_slots.pop()
        elif table.used < table.capacity:
            slot = table.used
            table.used += 1
        else:
            raise LimitExceeded(
                f"all {table.capacity} regions are in use: revoke some, or raise regions_max",
                field="regions_max", limit=table.capacity,
            )
        cdef mp_region* region = &table.slots[slot]
        cdef const char* read_bytes = read_key
        cdef const char* write_bytes = write_key
        mp_guard_lock(&table.guard)
        region.generation += 1
        region.base = address
        region.length = length
        region.access = access
        memcpy(region.read_key, read_bytes, KEY_BYTES)
        memcpy(region.write_key, write_bytes, KEY_BYTES)
        region.handle = <uint64_t>region.generation << 32 | slot
        memset(region.extra, 0, sizeof(region.extra))
        if not unmapped:
            memmove(&table.order[place + 1], &table.order[place], (table.live - place) * sizeof(mp_span))
            table.order[place] = mp_span(address, address + length, slot, access & (LOCAL_WRITABLE | DEVICE))
            table.live += 1
        mp_guard_unlock(&table.guard)
        return region.handle

    cdef void set_extra(self, uint64_t handle, int which, void* extra, object keep) except *:
        """What a transport needs to know of a region (EXTRA_*); `keep` owns it, until nobody can see it any more."""
        cdef uint32_t slot = <uint32_t>handle
        if handle == 0 or slot >= self.table.capacity or self.table.slots[slot].handle != handle:
            raise StaleHandle(region=handle)
        self.kept.setdefault(handle, []).append(keep)
        mp_guard_lock(&self.table.guard)
        self.table.slots[slot].extra[which] = extra
        mp_guard_unlock(&self.table.guard)

    cdef uint32_t place_of(self, uint64_t address, uint64_t length) except? 0xFFFFFFFF:
        cdef mp_regions* table = self.table
        cdef uint32_t low = 0, high = table.live, middle
        while low < high:
            middle = (low + high) // 2
            if table.order[middle].base < address:
                low = middle + 1
            else:
                high = middle
        if (low > 0 and table.order[low - 1].end > address) or (
            low < table.live and table.order[low].base < address + length
        ):
            raise UsageError(
                f"the range {address:#x}+{length} overlaps a registered one: register the whole buffer once",
                address=address, length_bytes=length,
            )
        return low

    def find(self, uint64_t address, uint64_t length) -> int:
        """Handle of the live region that holds the whole range, or 0."""
        cdef mp_regions* table = self.table
        cdef uint32_t place
        for place in range(table.live):
            if table.order[place].base <= address <= table.order[place].end and (
                length <= table.order[place].end - address
            ):
                return table.slots[table.order[place].slot].handle
        return 0

    def remove(self, uint64_t handle, double timeout_s) -> bool:
        """Make a handle stale, then wait for everyone who may have seen it alive.

        True when nobody can touch the range any more. False when the wait ran out: the handle is stale all the same,
        but the caller must keep the memory, and call `drain` again before letting it go.
        """
        cdef mp_regions* table = self.table
        cdef uint32_t slot = <uint32_t>handle, place
        if handle == 0 or slot >= table.capacity or table.slots[slot].handle != handle:
            raise StaleHandle(region=handle)
        mp_guard_lock(&table.guard)
        table.slots[slot].handle = 0
        for place in range(table.live):
            if table.order[place].slot == slot:
                table.live -= 1
                memmove(&table.order[place], &table.order[place + 1], (table.live - place) * sizeof(mp_span))
                break
        mp_guard_unlock(&table.guard)
        if not self.drain(timeout_s):
            return False
        self.free_slots.append(slot)
        self.kept.pop(handle, None)
        return True

    def drain(self, double timeout_s) -> bool:
        """Wait until everyone inside the table at this moment has left. The GIL is released."""
        cdef uint64_t deadline = mp_deadline_ns(timeout_s)
        cdef int rc
        with nogil:
            rc = mp_guard_drain(&self.table.guard, deadline)
        return rc == 0
