"""Arguments of integers, as lists or buffers, taken as C arrays for the length of a call."""

from cpython.buffer cimport Py_buffer
from libc.stdint cimport uint32_t, uint64_t

cdef enum:
    KEPT_ON_STACK = 128   # longer lists are copied to the heap

cdef struct Keys:         # 64-bit hashes; `data` is valid until close_keys
    const uint64_t* data
    Py_ssize_t count
    uint64_t* owned
    Py_buffer view
    bint viewed
    uint64_t few[KEPT_ON_STACK]

cdef struct Tokens:       # 32-bit token ids; `data` is NULL for a list or tuple, which read_tokens reads piece by piece
    const uint32_t* data
    Py_ssize_t count
    uint32_t* owned
    Py_buffer view
    bint viewed

# The object must outlive the array. After an error (UsageError, OutOfMemory) there is nothing to close.
cdef int open_keys(object hashes, Keys* keys) except -1
cdef void close_keys(Keys* keys) noexcept
cdef int open_tokens(object tokens, Tokens* out) except -1
cdef int read_tokens(object tokens, Py_ssize_t first, Py_ssize_t last, uint32_t* out) except -1
cdef void close_tokens(Tokens* tokens) noexcept
