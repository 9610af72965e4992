"""Batches that carry whole objects: any local memory, digests in the copy, and the check against roots.

An object is one or more pieces of local memory in a row. Its digest is that of its bytes, whatever the pieces: XXH3-64
of each 64 KiB, and XXH3-128 over those (see copying.pyx).
"""

cimport cython
from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBuffer_Release, PyObject_GetBuffer, Py_buffer
from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy, memset
from moonpool.native.io.batch cimport COMPLETE, Batch
from moonpool.native.io.copying cimport DIGEST_CHUNK, digest_chunks, root_of
from moonpool.native.io.guard cimport mp_now_ns

from moonpool.errors import OutOfMemory, UsageError

cdef enum:
    ROOT_BYTES = 16
    # Hashing less than this takes less time than giving the GIL up and getting it back.
    QUICK_BYTES = 32768
    WRONG_ROOT = 255

MISMATCH = WRONG_ROOT


cdef class Kept:
    """What owns a batch's local memory; held until the batch has ended."""

    def __cinit__(self, things):
        self.things = things

    def release(self) -> None:
        """Let go of it; the batch calls this."""
        self.things = None


cdef int entrust(Batch batch, object things, uint64_t deadline_ns) except -1:
    """Begin a batch over memory that `things` own: its addresses are taken as they are."""
    batch.holds = Kept(things)
    batch.raw.trusted = 1
    batch.raw.started_ns = mp_now_ns()
    batch.raw.deadline_ns = deadline_ns
    return 0


def object_batch(int op, things, local, region, offset, length, bint digest, uint64_t timeout_ns) -> Batch:
    """A batch over memory that `things` own: addresses are taken as they are, so the caller must have made them.

    Arrays of 64-bit integers, or a number for all. Its deadline runs from now. Bind it to a segment, then drive it.
    """
    cdef uint64_t n = 1 if isinstance(local, int) else len(local)
    cdef Batch batch = Batch(op, n)
    batch.fill(local, region, offset, length, None, digest)
    entrust(batch, things, mp_now_ns() + timeout_ns)
    return batch


cdef int words(value, Py_buffer* view, str name) except -1:
    """Take a one-dimensional buffer of 64-bit integers."""
    PyObject_GetBuffer(value, view, PyBUF_FORMAT | PyBUF_ND)
    if view.ndim != 1 or view.itemsize != 8 or view.format == NULL or view.format[0] not in b"QqLl":
        PyBuffer_Release(view)
        raise UsageError(f"{name} must be a C-contiguous array of 64-bit integers", field=name)
    return 0


cdef void hash_pieces(const uint64_t* address, const uint64_t* length, uint64_t n, uint64_t* out,
                      uint8_t* room) noexcept nogil:
    """Chunk digests of n pieces in a row; chunks that lie over a seam are put together in `room` (64 KiB)."""
    cdef uint64_t i, left, take, held = 0
    cdef const char* p
    for i in range(n):
        p = <const char*><size_t>address[i]
        left = length[i]
        while left:
            if held == 0 and (left >= DIGEST_CHUNK or i + 1 == n):
                take = left if i + 1 == n else left // DIGEST_CHUNK * DIGEST_CHUNK
                digest_chunks(p, take, out)
                out += (take + DIGEST_CHUNK - 1) // DIGEST_CHUNK
            else:
                take = DIGEST_CHUNK - held if left > DIGEST_CHUNK - held else left
                memcpy(room + held, p, take)
                held += take
                if held == DIGEST_CHUNK:
                    digest_chunks(room, held, out)
                    out += 1
                    held = 0
            p += take
            left -= take
    if held:
        digest_chunks(room, held, out)


@cython.no_gc_clear  # else a collection drops the buffer's owner, and the export is never given back
cdef class Hashing:
    """Pieces and the digests computed of them; one object a row."""

    cdef Py_buffer address
    cdef Py_buffer length
    cdef Py_buffer first
    cdef bint has_address, has_length, has_first
    cdef uint64_t n_objects
    cdef uint64_t n_pieces
    cdef uint64_t* chunk_at
    cdef uint64_t* chunk
    cdef uint64_t total

    def __cinit__(self, address, length, first):
        cdef uint64_t i, j, size, stop, chunks = 0
        words(address, &self.address, "address")
        self.has_address = True
        words(length, &self.length, "length")
        self.has_length = True
        if first is not None:
            words(first, &self.first, "first")
            self.has_first = True
        self.n_pieces = self.address.len // 8
        self.n_objects = self.first.len // 8 - 1 if self.has_first else self.n_pieces
        if self.address.len != self.length.len or (self.has_first and self.first.len < 8):
            raise UsageError("address and length have one entry for each piece, first one more than objects")
        self.chunk_at = <uint64_t*>malloc((self.n_objects + 1) * 8)
        if self.chunk_at == NULL:
            raise OutOfMemory("no memory for digests")
        for i in range(self.n_objects):
            self.chunk_at[i] = chunks
            stop = self.start_of(i + 1)
            if stop > self.n_pieces or self.start_of(i) > stop:
                raise UsageError("first must rise, up to the number of pieces", field="first", index=i)
            size = 0
            for j in range(self.start_of(i), stop):
                size += (<uint64_t*>self.length.buf)[j]
            self.total += size
            chunks += (size + DIGEST_CHUNK - 1) // DIGEST_CHUNK
        self.chunk_at[self.n_objects] = chunks
        self.chunk = <uint64_t*>malloc(chunks * 8 + 8)
        if self.chunk == NULL:
            raise OutOfMemory("no memory for digests")

    def __dealloc__(self):
        if self.has_address:
            PyBuffer_Release(&self.address)
        if self.has_length:
            PyBuffer_Release(&self.length)
        if self.has_first:
            PyBuffer_Release(&self.first)
        free(self.chunk_at)
        free(self.chunk)

    cdef inline uint64_t start_of(self, uint64_t i) noexcept nogil:
        return (<uint64_t*>self.first.buf)[i] if self.has_first else i

    cdef void fill(self, uint8_t* room) noexcept nogil:
        cdef uint64_t i, start
        for i in range(self.n_objects):
            start = self.start_of(i)
            hash_pieces(<uint64_t*>self.address.buf + start, <uint64_t*>self.length.buf + start,
                        self.start_of(i + 1) - start, self.chunk + self.chunk_at[i], room)

    cdef run(self):
        cdef uint8_t* room = NULL
        if self.has_first:
            room = <uint8_t*>malloc(DIGEST_CHUNK)
            if room == NULL:
                raise OutOfMemory("no memory for digests")
        if self.total <= QUICK_BYTES:
            self.fill(room)
        else:
            with nogil:
                self.fill(room)
        free(room)


cdef tuple roots_and_chunks(uint64_t n, const uint64_t* chunk_at, const uint64_t* chunk):
    cdef uint64_t i
    cdef uint64_t root[2]
    cdef list chunks = []
    made = bytearray(n * ROOT_BYTES)
    cdef char* out = made
    for i in range(n):
        root_of(chunk + chunk_at[i], chunk_at[i + 1] - chunk_at[i], root)
        memcpy(out + i * ROOT_BYTES, root, ROOT_BYTES)
        chunks.append((<const char*>(chunk + chunk_at[i]))[: (chunk_at[i + 1] - chunk_at[i]) * 8])
    return bytes(made), chunks


cdef int same_root(const uint64_t* chunk, uint64_t n, const char* wanted) noexcept nogil:
    cdef uint64_t root[2]
    root_of(chunk, n, root)
    return memcmp(root, wanted, ROOT_BYTES) == 0


def hash_objects(address, length, first=None) -> tuple:
    """Roots (16 bytes each, joined) and a list of the chunk digests (bytes) of objects in local memory.

    Without `first` each piece is an object; with it object i is the pieces first[i] to first[i + 1].
    """
    cdef Hashing hashing = Hashing(address, length, first)
    hashing.run()
    return roots_and_chunks(hashing.n_objects, hashing.chunk_at, hashing.chunk)


def check_objects(address, length, const uint8_t[::1] roots, first=None) -> bytes:
    """One byte an object: 0 when its bytes have the root (16 bytes each, in a row), MISMATCH when not."""
    cdef Hashing hashing = Hashing(address, length, first)
    cdef uint64_t i
    if <uint64_t>roots.shape[0] != hashing.n_objects * ROOT_BYTES:
        raise UsageError(f"{hashing.n_objects} objects need {hashing.n_objects * ROOT_BYTES} bytes of roots")
    hashing.run()
    out = bytearray(hashing.n_objects)
    cdef char* mark = out
    for i in range(hashing.n_objects):
        if not same_root(hashing.chunk + hashing.chunk_at[i], hashing.chunk_at[i + 1] - hashing.chunk_at[i],
                         <const char*>&roots[i * ROOT_BYTES]):
            mark[i] = <char>WRONG_ROOT
    return bytes(out)


def hash_one(uint64_t address, uint64_t length) -> tuple:
    """The root and the chunk digests (bytes) of one object in one piece."""
    cdef uint64_t n = (length + DIGEST_CHUNK - 1) // DIGEST_CHUNK
    cdef uint64_t root[2]
    cdef uint64_t small[16]
    cdef uint64_t* chunk = small
    if n > 16:
        chunk = <uint64_t*>malloc(n * 8)
        if chunk == NULL:
            raise OutOfMemory("no memory for digests")
    if length <= QUICK_BYTES:
        digest_chunks(<const void*><size_t>address, length, chunk)
    else:
        with nogil:
            digest_chunks(<const void*><size_t>address, length, chunk)
    root_of(chunk, n, root)
    try:
        return (<const char*>root)[:ROOT_BYTES], (<const char*>chunk)[: n * 8]
    finally:
        if chunk != small:
            free(chunk)


def root_of_chunks(const uint8_t[::1] chunks) -> bytes:
    """The root over a list of chunk digests, 8 bytes each."""
    cdef uint64_t root[2]
    if chunks.shape[0] % 8:
        raise UsageError("chunk digests have 8 bytes each", field="chunks")
    root_of(<const uint64_t*>&chunks[0] if chunks.shape[0] else NULL, chunks.shape[0] // 8, root)
    return (<const char*>root)[:ROOT_BYTES]


def is_intact(uint64_t address, uint64_t length, bytes root not None) -> bool:
    """True when the bytes of one object in one piece have this root."""
    return hash_one(address, length)[0] == root


def batch_hashes(Batch batch not None) -> tuple:
    """Roots and chunk digests of an ended batch that was made with digests, one object a transfer."""
    if batch.raw.digest == NULL:
        raise UsageError("this batch was made without digests")
    return roots_and_chunks(batch.raw.n, batch.raw.digest_at, batch.raw.digest)


def batch_verdicts(Batch batch not None, const uint8_t[::1] roots) -> bytes:
    """One byte a transfer of an ended batch with digests: its status, or MISMATCH when COMPLETE with another root."""
    cdef uint64_t i
    if batch.raw.digest == NULL or <uint64_t>roots.shape[0] != batch.raw.n * ROOT_BYTES:
        raise UsageError("a batch with digests and 16 bytes of root for each transfer are needed")
    out = bytearray(batch.raw.n)
    cdef char* mark = out
    memcpy(mark, batch.raw.status, batch.raw.n)
    for i in range(batch.raw.n):
        if batch.raw.status[i] == COMPLETE and not same_root(
            batch.raw.digest + batch.raw.digest_at[i], batch.raw.digest_at[i + 1] - batch.raw.digest_at[i],
            <const char*>&roots[i * ROOT_BYTES],
        ):
            mark[i] = <char>WRONG_ROOT
    return bytes(out)


def clear_memory(address, length) -> None:
    """Zero pieces of local memory (a failed read leaves nothing of what it saw)."""
    cdef Py_buffer where, size
    cdef uint64_t i
    words(address, &where, "address")
    try:
        words(length, &size, "length")
        try:
            if where.len != size.len:
                raise UsageError("address and length have one entry for each piece")
            with nogil:
                for i in range(<uint64_t>(where.len // 8)):
                    memset(<void*><size_t>(<uint64_t*>where.buf)[i], 0, (<uint64_t*>size.buf)[i])
        finally:
            PyBuffer_Release(&size)
    finally:
        PyBuffer_Release(&where)


def copy_memory(uint64_t target, uint64_t source, uint64_t length) -> None:
    """Copy between two ranges of local memory that do not overlap."""
    if length <= QUICK_BYTES:
        memcpy(<void*><size_t>target, <const void*><size_t>source, length)
    else:
        with nogil:
            memcpy(<void*><size_t>target, <const void*><size_t>source, length)
