"""What holds a batch's memory, and how such a batch begins (see object_batch.pyx)."""

from libc.stdint cimport uint64_t
from moonpool.native.io.batch cimport Batch


cdef class Kept:
    cdef object things


cdef int entrust(Batch batch, object things, uint64_t deadline_ns) except -1
