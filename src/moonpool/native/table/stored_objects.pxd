"""Complete objects with their places, pins and groups, for other native modules (see stored_objects.pyx)."""

cimport cython
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from moonpool.native.table.id_map cimport mp_id_map
from moonpool.native.table.object_extras cimport ObjectExtras
from moonpool.native.table.object_records cimport NO_RECORD, Object, ObjectRecords
from moonpool.native.table.recency cimport PlaceRecord, Recency

cdef struct NewObject:        # what `add` takes over; key and digest are read during the call only
    uint64_t object_id
    uint64_t size
    uint64_t soft_pin_end_ms
    uint64_t group
    const uint8_t* key
    const uint8_t* digest
    uint32_t tenant
    uint32_t key_bytes
    uint8_t object_type
    uint8_t pin


@cython.final
cdef class StoredObjects:
    cdef ObjectRecords records
    cdef Recency recency
    cdef ObjectExtras extras
    cdef mp_id_map tenant_bytes
    cdef uint64_t searches            # for victims, so far

    cdef bint is_full(self) noexcept nogil
    cdef bint reserve(self, uint64_t hash, uint32_t key_bytes, uint32_t places) noexcept nogil
    cdef uint32_t add(self, uint64_t hash, const NewObject* new) noexcept nogil
    cdef void drop(self, uint32_t index) noexcept nogil
    cdef void add_place(self, uint32_t index, uint32_t number, uint64_t offset, uint32_t slot) noexcept nogil
    cdef uint32_t place_on(self, uint32_t index, uint32_t number) noexcept nogil
    cdef void drop_place(self, uint32_t index, uint32_t place) noexcept nogil
    cdef bint set_pin(self, uint32_t index, uint8_t pin, uint64_t soft_pin_end_ms) noexcept nogil
    cdef void end_soft_pin(self, uint32_t index) noexcept nogil
    cdef void touch(self, uint32_t index) noexcept nogil
    cdef void clear(self) noexcept nogil

    cdef int pinned_queue(self, Object* record) noexcept nogil
    cdef void requeue(self, Object* record) noexcept nogil
    cdef uint64_t hash_at(self, Object* record) noexcept nogil
