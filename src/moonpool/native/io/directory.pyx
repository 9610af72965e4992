"""State words of a segment's directory: 64-bit words in memory that other processes read while we write.

A word is stored with release and loaded with acquire order, so that who sees a word also sees what was written before
it: the entry and the log of the object that it names (docs/store/architecture.md, "Segment memory").
"""

cimport cython
from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer, Py_buffer
from libc.stdint cimport uint64_t

from moonpool.errors import UsageError

cdef extern from *:
    """
    #include <stdint.h>
    static inline uint64_t mp_word(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
    static inline void mp_set_word(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
    """
    uint64_t mp_word(const uint64_t* p) nogil
    void mp_set_word(uint64_t* p, uint64_t v) nogil

cdef enum:
    WORD_BYTES = 8


@cython.final
@cython.no_gc_clear  # else a collection drops the buffer's owner, and the export is never given back
cdef class StateWords:
    """`count` words from byte `offset` of a writable buffer, which is held until `release`."""

    cdef Py_buffer view
    cdef uint64_t* words
    cdef uint64_t count

    def __cinit__(self, memory, uint64_t offset, uint64_t count):
        PyObject_GetBuffer(memory, &self.view, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE)
        self.count = count
        cdef uint64_t size = self.view.len
        if offset > size or count > (size - offset) // WORD_BYTES or (<size_t>self.view.buf + offset) % WORD_BYTES:
            raise UsageError(f"{count} words do not fit into {size} bytes at {offset}, or are not aligned to 8 bytes")
        self.words = <uint64_t*>(<char*>self.view.buf + offset)

    def __dealloc__(self):
        self.release()

    def __len__(self) -> int:
        return self.count

    def load(self, uint64_t slot) -> int:
        """The word of a slot; IndexError for one that is not there."""
        if slot >= self.count:
            raise IndexError(f"slot {slot} of {self.count}")
        return mp_word(&self.words[slot])

    def store(self, uint64_t slot, uint64_t word) -> None:
        """Sets a slot's word, after everything that was written before this call."""
        if slot >= self.count:
            raise IndexError(f"slot {slot} of {self.count}")
        mp_set_word(&self.words[slot], word)

    def next_used(self, uint64_t slot) -> int:
        """The first slot from `slot` on whose word is not 0, or -1. The GIL is released."""
        cdef uint64_t k = slot
        with nogil:
            while k < self.count and mp_word(&self.words[k]) == 0:
                k += 1
        return k if k < self.count else -1

    def release(self) -> None:
        """Lets go of the memory: no slot is there any more."""
        self.count = 0
        self.words = NULL
        if self.view.buf != NULL:
            PyBuffer_Release(&self.view)
            self.view.buf = NULL
