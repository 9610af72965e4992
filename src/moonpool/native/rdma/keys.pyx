"""The remote keys of one region of a peer, by NIC of the peer's and by chunk."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from moonpool.errors import OutOfMemory, UsageError


cdef class RemoteKeys:
    """`keys[nic * n_chunks + chunk]` for a region of `length` bytes at `base` in the owner's process."""

    def __cinit__(self, uint64_t base, uint64_t length, uint64_t chunk_bytes, uint32_t n_nics, keys):
        cdef uint64_t n_chunks, k, n = len(keys)
        if length == 0 or chunk_bytes == 0 or n_nics == 0:
            raise UsageError("a region has bytes, chunks and NICs")
        n_chunks = (length - 1) // chunk_bytes + 1
        if n != n_chunks * n_nics:
            raise UsageError(f"{n_chunks} chunks on {n_nics} NICs have {n_chunks * n_nics} keys, not {n}")
        self.raw.rkeys = <uint32_t*>calloc(n, sizeof(uint32_t))
        if self.raw.rkeys == NULL:
            raise OutOfMemory(f"no memory for {n} remote keys")
        for k in range(n):
            self.raw.rkeys[k] = keys[k]
        self.raw.base = base
        self.raw.length = length
        self.raw.chunk_bytes = chunk_bytes
        self.raw.n_chunks = <uint32_t>n_chunks
        self.raw.n_devices = n_nics

    def __dealloc__(self):
        free(self.raw.rkeys)

    def close(self) -> None:
        """Nothing: the keys go with the last user."""
