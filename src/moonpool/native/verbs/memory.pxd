"""Registered memory (see memory.pyx)."""

from libc.stdint cimport int32_t, uint32_t, uint64_t
from moonpool.native.verbs.ibverbs cimport ibv_mr, ibv_pd, mp_registration, mp_verbs

cdef struct mp_pinning:
    mp_registration* range
    ibv_mr** regions      # by job: device * n_chunks + chunk
    mp_verbs** calls      # by device
    ibv_pd** domains      # by device
    unsigned int access
    int fd                # of a dma-buf, or -1
    uint64_t fd_offset
    int32_t n_jobs
    int32_t next          # jobs begun
    int32_t failure       # the first errno
    int32_t failed_job
    int pid               # of the process that registered it

cdef class MemoryRegistration:
    cdef object __weakref__
    cdef mp_registration* raw   # keys by device and chunk: stays until this object is freed
    cdef mp_pinning pinning
    cdef list devices
    cdef bint live
    cdef int release(self) noexcept
    cdef int prepare(self, list devices, uint64_t address, uint64_t length, uint64_t chunk_bytes) except -1
    cdef int run(self, int n_threads) except -1
    cdef int check_place(self, uint32_t device) except -1
