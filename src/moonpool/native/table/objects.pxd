"""The table of complete objects, for other native modules (see objects.pyx)."""

cimport cython
from libc.stdint cimport uint32_t

from moonpool.native.table.object_records cimport Object
from moonpool.native.table.stored_objects cimport StoredObjects


@cython.final
cdef class ObjectTable:
    cdef StoredObjects stored

    cdef uint32_t number_of(self, object segment) except? 0xFFFE
    cdef Object* record(self, object index) except NULL
    cdef object value_of(self, Object* record)
