"""Free slots of one segment's directory: two bit trees, the lowest free slot first.

A slot is none of the table's until `add_range`, then free or taken. Every call but `add_range`, `take_all` and
`check` is O(1). The plain twin is moonpool.native.table.directory_slots_reference.

Thread rule: the caller's; the master's loop thread owns it.
"""

cimport cython
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy

from moonpool.errors import InternalError, OutOfMemory, UsageError

cdef enum:
    SLOTS_MAX = 1 << 30
    PACKED_PLACE = 24         # bytes of one place as ObjectTable.packed_places gives it
    SLOT_IN_PACKED = 16


@cython.final
cdef class DirectorySlots:
    """`count` slots, none of which is free at first."""

    def __cinit__(self, count):
        if not 1 <= count <= SLOTS_MAX:
            raise UsageError(f"there can be 1 to {SLOTS_MAX} slots", field="slots", value=str(count))
        self.count = count
        if not (mp_bits_prepare(&self.open_slots, self.count) and mp_bits_prepare(&self.added, self.count)):
            raise OutOfMemory("no memory for the free slots of a directory")

    def __dealloc__(self):
        mp_bits_release(&self.open_slots)
        mp_bits_release(&self.added)

    def add_range(self, first, count) -> None:
        """These slots may be given from now on; InternalError when one was added before."""
        cdef uint64_t slot, begin, end
        if not (0 <= first < self.count and 0 < count <= self.count - first):
            raise InternalError(f"there are no slots {first} to {first + count - 1}")
        begin = first
        end = begin + <uint64_t>count
        slot = mp_bits_at_or_after(&self.added, begin)
        if slot < end:
            raise InternalError(f"slots {begin} to {end - 1} are partly added already")
        for slot in range(begin, end):
            mp_bits_set(&self.added, slot)
            mp_bits_set(&self.open_slots, slot)
        self.free_slots += end - begin

    def allocate(self) -> int:
        """The lowest free slot, or -1 when all that were added are taken."""
        cdef uint32_t slot = self.give()
        return -1 if slot == NO_FREE_SLOT else slot

    def free(self, slot) -> None:
        """Takes a slot back; InternalError when it is not taken."""
        if not (0 <= slot < self.count and self.give_back(slot)):
            raise InternalError(f"slot {slot} is not taken")

    def take(self, slot) -> None:
        """Marks a free slot as taken; InternalError when it is not free."""
        if not (0 <= slot < self.count and self.claim(slot)):
            raise InternalError(f"slot {slot} is not free")

    def take_all(self, bytes packed not None) -> None:
        """`take` for the slot of each place of `ObjectTable.packed_places`; those before a refused one stay taken."""
        cdef const unsigned char* data = packed
        cdef Py_ssize_t size = len(packed), at
        cdef uint64_t slot
        if size % PACKED_PLACE:
            raise InternalError("these are no packed places")
        for at in range(0, size, PACKED_PLACE):
            memcpy(&slot, data + at + SLOT_IN_PACKED, sizeof(slot))
            if slot >= self.count or not self.claim(slot):
                raise InternalError(f"slot {slot} is not free")

    def used(self) -> int:
        """How many are taken."""
        return self.taken_slots

    def free_count(self) -> int:
        """How many can be given now."""
        return self.free_slots

    def memory_bytes(self) -> int:
        """Bytes reserved; only what was touched is used."""
        return mp_bits_bytes(&self.open_slots) + mp_bits_bytes(&self.added)

    def check(self) -> None:
        """Asserts that counts, bits and the bits above them agree."""
        cdef uint64_t slot, free_slots = 0, added = 0
        for slot in range(self.count):
            free_slots += mp_bits_has(&self.open_slots, slot)
            added += mp_bits_has(&self.added, slot)
            if mp_bits_has(&self.open_slots, slot) and not mp_bits_has(&self.added, slot):
                raise InternalError(f"slot {slot} is free but was never added")
        if free_slots != self.free_slots or added != self.free_slots + self.taken_slots:
            raise InternalError("the slots are miscounted")
        if not (mp_bits_consistent(&self.open_slots) and mp_bits_consistent(&self.added)):
            raise InternalError("a bit tree of the slots is broken")

    cdef uint32_t give(self) noexcept nogil:
        """The lowest free slot, now taken; NO_FREE_SLOT when there is none."""
        cdef uint64_t slot = mp_bits_first(&self.open_slots)
        if slot >= self.count:
            return NO_FREE_SLOT
        mp_bits_clear(&self.open_slots, slot)
        self.free_slots -= 1
        self.taken_slots += 1
        return <uint32_t>slot

    cdef bint give_back(self, uint64_t slot) noexcept nogil:
        """Frees a taken slot; False when it is none."""
        if slot >= self.count or not mp_bits_has(&self.added, slot) or mp_bits_has(&self.open_slots, slot):
            return False
        mp_bits_set(&self.open_slots, slot)
        self.free_slots += 1
        self.taken_slots -= 1
        return True

    cdef bint claim(self, uint64_t slot) noexcept nogil:
        """Takes one given free slot; False when it is not free."""
        if slot >= self.count or not mp_bits_has(&self.open_slots, slot):
            return False
        mp_bits_clear(&self.open_slots, slot)
        self.free_slots -= 1
        self.taken_slots += 1
        return True
