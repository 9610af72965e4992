"""Complete objects: records, places in recency queues, pins and groups kept in step.

The layer below the Python methods of `objects` and the hot methods of `hot`: everything here runs without the GIL, and
what cannot be done is asked before (`is_full`, `reserve`), so that no call fails half-way.
"""

cimport cython
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from moonpool.native.table.extents cimport rounded
from moonpool.native.table.id_map cimport mp_id_add, mp_id_map_release, mp_id_reserve
from moonpool.native.table.object_records cimport PIN_HARD, PIN_SOFT, cell_at, object_at
from moonpool.native.table.recency cimport HELD, LRU, MAIN, SOFT, place_at


@cython.final
cdef class StoredObjects:
    """`policy` is LRU or S3FIFO; `seed` keys all hash tables."""

    def __cinit__(self, int policy, objects_max, ghosts_max, uint64_t seed):
        self.records = ObjectRecords(objects_max, seed)
        self.recency = Recency(self.records, policy, ghosts_max, seed)
        self.extras = ObjectExtras(self.records, seed)
        self.tenant_bytes.seed = seed

    def __dealloc__(self):
        mp_id_map_release(&self.tenant_bytes)

    cdef void clear(self) noexcept nogil:
        """Forgets all objects and ghosts, not the segments."""
        cdef uint64_t seed = self.tenant_bytes.seed
        self.recency.clear()
        self.extras.clear()
        self.records.clear()
        mp_id_map_release(&self.tenant_bytes)
        self.tenant_bytes.seed = seed

    cdef bint is_full(self) noexcept nogil:
        return self.records.live >= self.records.objects_max

    cdef bint reserve(self, uint64_t hash, uint32_t key_bytes, uint32_t places) noexcept nogil:
        """Makes room for one object with this key and so many places; False without memory."""
        return (self.records.reserve(hash, key_bytes) and self.recency.reserve(places) and self.extras.reserve()
                and mp_id_reserve(&self.tenant_bytes, 1))

    cdef uint32_t add(self, uint64_t hash, const NewObject* new) noexcept nogil:
        """Adds an object without places, after `reserve`; its key must be absent."""
        cdef uint32_t index = self.records.insert(hash, new.tenant, new.key, new.key_bytes)
        cdef Object* record = object_at(self.records, index)
        record.object_id = new.object_id
        record.size = new.size
        record.object_type = new.object_type
        record.pin = new.pin
        memcpy(record.digest, new.digest, sizeof(record.digest))
        if new.group or new.soft_pin_end_ms or new.pin == PIN_SOFT:
            self.extras.attach(index, new.soft_pin_end_ms, new.group)
        if new.pin == PIN_SOFT:
            self.extras.hold_soft(index, new.soft_pin_end_ms)
        return index

    cdef void drop(self, uint32_t index) noexcept nogil:
        """Takes an object and its places out."""
        cdef Object* record = object_at(self.records, index)
        while record.place != NO_RECORD:
            self.drop_place(index, record.place)
        if record.extra != NO_RECORD:
            self.extras.detach(index)
        self.records.remove(index)

    cdef void add_place(self, uint32_t index, uint32_t number, uint64_t offset, uint32_t slot) noexcept nogil:
        """Adds a place on a segment where the object has none, after `reserve`, as its last."""
        cdef Object* record = object_at(self.records, index)
        cdef uint32_t place = self.recency.link(index, number, self.pinned_queue(record), self.hash_at(record))
        cdef uint32_t last = record.place
        place_at(self.recency, place).offset = offset
        place_at(self.recency, place).slot = slot
        if last == NO_RECORD:
            record.place = place
        else:
            while place_at(self.recency, last).next_place != NO_RECORD:
                last = place_at(self.recency, last).next_place
            place_at(self.recency, last).next_place = place
        record.places += 1
        mp_id_add(&self.tenant_bytes, record.tenant, rounded(record.size))

    cdef uint32_t place_on(self, uint32_t index, uint32_t number) noexcept nogil:
        """The object's place on a segment, or NO_RECORD."""
        cdef uint32_t place = object_at(self.records, index).place
        while place != NO_RECORD and place_at(self.recency, place).segment != number:
            place = place_at(self.recency, place).next_place
        return place

    cdef void drop_place(self, uint32_t index, uint32_t place) noexcept nogil:
        """Takes one place of an object out."""
        cdef Object* record = object_at(self.records, index)
        cdef uint32_t before = record.place
        if before == place:
            record.place = place_at(self.recency, place).next_place
        else:
            while place_at(self.recency, before).next_place != place:
                before = place_at(self.recency, before).next_place
            place_at(self.recency, before).next_place = place_at(self.recency, place).next_place
        record.places -= 1
        self.recency.unlink(place, self.hash_at(record))
        mp_id_add(&self.tenant_bytes, record.tenant, 0 - rounded(record.size))

    cdef bint set_pin(self, uint32_t index, uint8_t pin, uint64_t soft_pin_end_ms) noexcept nogil:
        """False without memory, and then nothing has changed."""
        cdef Object* record = object_at(self.records, index)
        cdef int before = self.pinned_queue(record)
        if record.extra == NO_RECORD and (pin == PIN_SOFT or soft_pin_end_ms):
            if not self.extras.reserve():
                return False
            self.extras.attach(index, 0, 0)
        record.pin = pin
        if pin == PIN_SOFT:
            self.extras.hold_soft(index, soft_pin_end_ms)
        elif record.extra != NO_RECORD:
            self.extras.release_soft(index)
            self.extras.of(record).soft_pin_end_ms = soft_pin_end_ms
        if self.pinned_queue(record) != before:
            self.requeue(record)
        return True

    cdef void end_soft_pin(self, uint32_t index) noexcept nogil:
        """A soft pin is over: the object is as if just used."""
        self.extras.release_soft(index)
        self.requeue(object_at(self.records, index))

    cdef void touch(self, uint32_t index) noexcept nogil:
        """A use, in every segment that has a place."""
        cdef uint32_t place = object_at(self.records, index).place
        while place != NO_RECORD:
            self.recency.touch(place)
            place = place_at(self.recency, place).next_place

    cdef int pinned_queue(self, Object* record) noexcept nogil:
        """The queue that its pin asks for, or -1."""
        if record.soft:
            return SOFT
        return HELD if record.pin == PIN_HARD else -1

    cdef void requeue(self, Object* record) noexcept nogil:
        cdef int queue = self.pinned_queue(record)
        cdef uint32_t place = record.place
        while place != NO_RECORD:
            place_at(self.recency, place).uses = 0
            self.recency.move(place, MAIN if queue < 0 else queue)
            place = place_at(self.recency, place).next_place

    cdef uint64_t hash_at(self, Object* record) noexcept nogil:
        """The hash of an object's key; only S3-FIFO's ghosts need it."""
        if self.recency.policy == LRU:
            return 0
        return self.records.hash_of(record.tenant, cell_at(self.records, record.key), record.key_bytes)
