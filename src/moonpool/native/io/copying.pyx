"""Copies and digests: the only place where payload bytes are moved by the CPU or hashed.

Digest (format): XXH3-64 of each 64 KiB chunk, counted from the start of the transfer; the root is XXH3-128 over the
list of chunk digests as little-endian u64. An empty transfer has no chunk.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer, Py_buffer
from libc.stdint cimport uint64_t

cdef extern from "copykernels.h" nogil:
    ctypedef void (*mp_stream_fn)(char*, const char*, size_t) noexcept nogil
    mp_stream_fn mp_pick_stream(const char** name)
    void mp_copy_stream(mp_stream_fn stream, char* target, const char* source, size_t n)
    void mp_fence()

cdef extern from "xxh3.h" nogil:
    ctypedef uint64_t (*mp_xxh3_fn)(const void*, size_t) noexcept nogil
    mp_xxh3_fn mp_pick_xxh3()
    void mp_xxh3_128_base(const void* p, size_t n, uint64_t* out)

cdef extern from "string.h" nogil:
    void* memcpy(void* target, const void* source, size_t n)

cdef const char* stream_name = NULL
cdef mp_stream_fn stream = mp_pick_stream(&stream_name)
cdef mp_xxh3_fn xxh3 = mp_pick_xxh3()


cdef void copy_bytes(void* target, const void* source, size_t n, size_t stream_min) noexcept nogil:
    """Copy; from stream_min bytes on by non-temporal stores, after which the caller owes a store_fence."""
    if n >= stream_min:
        mp_copy_stream(stream, <char*>target, <const char*>source, n)
    else:
        memcpy(target, source, n)


cdef void copy_digest(void* target, const void* source, size_t n, size_t stream_min, uint64_t* digests) noexcept nogil:
    # Hash first: it pulls the chunk into L2, from where the copy reads it, so memory is read once.
    cdef size_t done = 0, piece
    cdef bint streaming = n >= stream_min
    while done < n:
        piece = n - done if n - done < DIGEST_CHUNK else DIGEST_CHUNK
        digests[done // DIGEST_CHUNK] = xxh3(<const char*>source + done, piece)
        copy_bytes(<char*>target + done, <const char*>source + done, piece, 0 if streaming else piece + 1)
        done += piece


cdef void digest_chunks(const void* source, size_t n, uint64_t* digests) noexcept nogil:
    cdef size_t done = 0, piece
    while done < n:
        piece = n - done if n - done < DIGEST_CHUNK else DIGEST_CHUNK
        digests[done // DIGEST_CHUNK] = xxh3(<const char*>source + done, piece)
        done += piece


cdef void root_of(const uint64_t* digests, size_t n, uint64_t* root) noexcept nogil:
    """The root (two words) over n chunk digests, which lie in memory as they are hashed: little endian."""
    mp_xxh3_128_base(digests, n * 8, root)


cdef void store_fence() noexcept nogil:
    mp_fence()


def stream_kernel() -> str:
    """Name of the non-temporal copy kernel this CPU runs: ``avx512``, ``avx2`` or ``memcpy`` (none)."""
    return stream_name.decode()


def chunk_digests(data) -> list[int]:
    """XXH3-64 of each 64 KiB chunk of ``data`` (any C-contiguous buffer), as Python integers."""
    cdef Py_buffer view
    cdef list out = []
    cdef size_t done = 0, piece
    cdef uint64_t value
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        while done < <size_t>view.len:
            piece = min(<size_t>view.len - done, <size_t>DIGEST_CHUNK)
            with nogil:
                value = xxh3(<const char*>view.buf + done, piece)
            out.append(value)
            done += piece
    finally:
        PyBuffer_Release(&view)
    return out


def root_digest(digests) -> bytes:
    """XXH3-128 over a list of chunk digests: 16 bytes, low word first, little endian."""
    cdef uint64_t out[2]
    packed = b"".join([int(d).to_bytes(8, "little") for d in digests])
    cdef const char* p = packed
    mp_xxh3_128_base(p, len(packed), out)
    return int(out[0]).to_bytes(8, "little") + int(out[1]).to_bytes(8, "little")


def copy_buffer(target, source, *, size_t stream_min_bytes=262144, bint digest=False):
    """Copy ``source`` into ``target`` (equal lengths, no overlap); returns the chunk digests with ``digest``.

    Blocks of ``stream_min_bytes`` and more use non-temporal stores. The GIL is released.
    """
    cdef Py_buffer t, s
    cdef uint64_t[::1] digests = None
    cdef uint64_t* out = NULL
    PyObject_GetBuffer(source, &s, PyBUF_SIMPLE)
    try:
        PyObject_GetBuffer(target, &t, PyBUF_SIMPLE | PyBUF_WRITABLE)
        try:
            if t.len != s.len:
                raise ValueError(f"target has {t.len} bytes, source {s.len}: they must be equal")
            if not digest:
                with nogil:
                    copy_bytes(t.buf, s.buf, s.len, stream_min_bytes)
                    mp_fence()
                return None
            holder = bytearray(8 * ((s.len + DIGEST_CHUNK - 1) // DIGEST_CHUNK))
            if s.len:
                digests = memoryview(holder).cast("Q")
                out = &digests[0]
                with nogil:
                    copy_digest(t.buf, s.buf, s.len, stream_min_bytes, out)
                    mp_fence()
            return memoryview(holder).cast("Q").tolist()
        finally:
            PyBuffer_Release(&t)
    finally:
        PyBuffer_Release(&s)
