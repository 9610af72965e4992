"""Memory objects (see memory.pyx)."""

from cpython.buffer cimport Py_buffer
from libc.stdint cimport uint64_t


cdef class SharedMemory:
    cdef readonly int fd
    cdef readonly uint64_t address
    cdef readonly uint64_t size_bytes
    cdef readonly bint writable
    cdef readonly bint owner
    cdef readonly bint hugetlb
    cdef readonly uint64_t huge_bytes      # of our own memory, mapped by huge pages that were made on request
    cdef Py_ssize_t exports
    cdef release(self)


cdef class BufferHold:
    cdef Py_buffer view
    cdef bint has_view
    cdef object keep
    cdef readonly uint64_t address
    cdef readonly uint64_t size_bytes
    cdef readonly bint writable
