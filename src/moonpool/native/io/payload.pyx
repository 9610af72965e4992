"""Payload: bytes of one object in memory that somebody else owns, as a Python buffer.

The memory is held while the payload, or any view of it, lives; then its place goes back to the free list it came from.
So a caller can keep a numpy array of a value for as long as it likes, and can never see the memory's next use.
"""

from cpython.buffer cimport PyBuffer_FillInfo, Py_buffer
from libc.stdint cimport uint64_t

from moonpool.errors import UsageError


cdef class Payload:
    """`size_bytes` bytes at `address`, which `keep` holds in place; `home` (a list) gets `address` when all is over.

    A closed payload gives no new views; the memory goes when the last view does. Readers never see it change.
    """

    cdef readonly uint64_t address
    cdef readonly uint64_t size_bytes
    cdef object keep
    cdef list home
    cdef Py_ssize_t views
    cdef bint shut
    cdef bint writable

    def __cinit__(self, uint64_t address, uint64_t size_bytes, keep, list home, bint writable, *_more):
        self.address = address
        self.size_bytes = size_bytes
        self.keep = keep
        self.home = home
        self.writable = writable

    def __dealloc__(self):
        self.give_back()

    cdef give_back(self):
        if self.home is not None:
            self.home.append(self.address)
            self.home = None
        self.keep = None

    def __getbuffer__(self, Py_buffer* view, int flags):
        if self.shut:
            raise UsageError(f"this {type(self).__name__} is closed; take what you need out of it before")
        PyBuffer_FillInfo(view, self, <void*><size_t>self.address, self.size_bytes, not self.writable, flags)
        self.views += 1

    def __releasebuffer__(self, Py_buffer* view):
        self.views -= 1
        if self.shut and self.views == 0:
            self.give_back()

    def __len__(self):
        return self.size_bytes

    @property
    def closed(self) -> bool:
        return self.shut

    def close(self) -> None:
        """Give no new views; the memory goes back once the last one is released. Idempotent."""
        if self.shut:
            return
        self.shut = True
        if self.views == 0:
            self.give_back()
