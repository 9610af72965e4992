"""Dumps of stored objects (see object_image.pyx)."""

from moonpool.native.table.stored_objects cimport StoredObjects

cdef bytes dump_objects(StoredObjects objects)
cdef int load_objects(StoredObjects objects, bytes data) except -1
