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
    cdef bint device                 # device memory is welcome
    cdef readonly bint on_device     # its address is one of a device, which no CPU may touch
    cdef readonly int ordinal        # of that device where the object names it, else -1
    cdef readonly uint64_t stream    # on which the object's owner works on it, where it says so, else 0
    cdef object keep
    cdef readonly uint64_t address
    cdef readonly uint64_t size_bytes
    cdef readonly bint writable
