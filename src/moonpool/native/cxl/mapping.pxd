"""Mappings of far memory (see mapping.pyx)."""

from libc.stdint cimport uint32_t, uint64_t


cdef struct mp_far:
    char* map            # where the region's first byte is mapped here
    uint64_t length
    uint32_t writable
    uint32_t by_hand     # no hardware keeps the caches of its hosts coherent


cdef class FarMapping:
    cdef readonly int fd
    cdef readonly uint64_t size_bytes      # of the region: what lies beyond in the mapping is nobody's business
    cdef readonly bint writable
    cdef mp_far far
    cdef void* start
    cdef uint64_t mapped_bytes
    cdef release(self)
