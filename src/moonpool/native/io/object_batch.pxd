"""What holds a batch's memory (see object_batch.pyx)."""


cdef class Kept:
    cdef object things
