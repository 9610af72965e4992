"""Copies and digests for other native modules (see copying.pyx)."""

from libc.stdint cimport uint64_t

cdef enum:
    DIGEST_CHUNK = 65536

cdef void copy_bytes(void* target, const void* source, size_t n, size_t stream_min) noexcept nogil
cdef void copy_digest(void* target, const void* source, size_t n, size_t stream_min, uint64_t* digests) noexcept nogil
cdef void digest_chunks(const void* source, size_t n, uint64_t* digests) noexcept nogil
cdef void root_of(const uint64_t* digests, size_t n, uint64_t* root) noexcept nogil
cdef void store_fence() noexcept nogil
