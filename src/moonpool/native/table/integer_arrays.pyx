"""Arguments of integers, as lists or buffers, taken as C arrays for the length of a call.

Accepted: lists and tuples of integers; C-contiguous buffers of 64-bit integers (hashes, signed or not), of 32-bit or
64-bit integers (tokens); bytes, as little-endian integers of 8 (hashes) or 4 bytes (tokens).
"""

from cpython.buffer cimport (
    PyBUF_FORMAT, PyBUF_ND, Py_buffer, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer,
)
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy

from moonpool.errors import OutOfMemory, UsageError

cdef extern from "integers.h":
    Py_ssize_t mp_read_u64s(object sequence, Py_ssize_t first, Py_ssize_t last, uint64_t* out)
    Py_ssize_t mp_read_u32s(object sequence, Py_ssize_t first, Py_ssize_t last, uint32_t* out)

cdef str HASHES = "a list of 64-bit integers, a contiguous buffer of them, or bytes of little-endian u64"
cdef str TOKENS = "a list of token ids from 0 to 2**32 - 1, a contiguous buffer of them, or bytes of little-endian u32"


cdef int open_keys(object hashes, Keys* keys) except -1:
    cdef uint64_t* copy = keys.few
    cdef Py_ssize_t done
    keys.owned = NULL
    keys.viewed = False
    if isinstance(hashes, (list, tuple)):
        keys.count = len(hashes)
        if keys.count > KEPT_ON_STACK:
            copy = keys.owned = <uint64_t*>get_memory(8 * keys.count)
        keys.data = copy
        done = mp_read_u64s(hashes, 0, keys.count, copy)
        if done < keys.count:
            close_keys(keys)
            refuse_item("hashes", done, "an integer of 64 bits")
        return 0
    open_view(hashes, &keys.view, "hashes", HASHES)
    keys.viewed = True
    if keys.view.itemsize not in (1, 8) or keys.view.len % 8:
        close_keys(keys)
        raise UsageError(f"hashes must be {HASHES}", field="hashes")
    keys.count = keys.view.len // 8
    keys.data = <const uint64_t*>keys.view.buf
    if <uintptr_t>keys.view.buf % 8:  # cut out of a message
        try:
            keys.owned = <uint64_t*>copy_of(&keys.view)
        except BaseException:
            close_keys(keys)
            raise
        keys.data = keys.owned
    return 0


cdef void close_keys(Keys* keys) noexcept:
    PyMem_RawFree(keys.owned)
    keys.owned = NULL
    if keys.viewed:
        PyBuffer_Release(&keys.view)
        keys.viewed = False


cdef int open_tokens(object tokens, Tokens* out) except -1:
    out.owned = NULL
    out.data = NULL
    out.viewed = False
    if isinstance(tokens, (list, tuple)):
        out.count = len(tokens)
        return 0
    open_view(tokens, &out.view, "tokens", TOKENS)
    out.viewed = True
    try:
        take_tokens(out)
    except BaseException:
        close_tokens(out)
        raise
    return 0


cdef int read_tokens(object tokens, Py_ssize_t first, Py_ssize_t last, uint32_t* out) except -1:
    cdef Py_ssize_t done = mp_read_u32s(tokens, first, last, out)
    if done < last - first:
        refuse_item("tokens", first + done, "a token id from 0 to 2**32 - 1")
    return 0


cdef void close_tokens(Tokens* tokens) noexcept:
    PyMem_RawFree(tokens.owned)
    tokens.owned = NULL
    if tokens.viewed:
        PyBuffer_Release(&tokens.view)
        tokens.viewed = False


cdef int take_tokens(Tokens* out) except -1:
    """Takes an opened view as tokens: where it lies if it can, else as a copy of 32 bits each."""
    cdef Py_ssize_t size = 4 if out.view.itemsize == 1 else out.view.itemsize
    cdef Py_ssize_t i
    cdef const int64_t* wide
    cdef uint64_t seen = 0
    if size not in (4, 8) or out.view.len % size or (size == 8 and <uintptr_t>out.view.buf % 8):
        raise UsageError(f"tokens must be {TOKENS}", field="tokens")
    out.count = out.view.len // size
    if size == 8:
        wide = <const int64_t*>out.view.buf
        out.owned = <uint32_t*>get_memory(4 * out.count)
        out.data = out.owned
        for i in range(out.count):
            seen |= <uint64_t>wide[i]
            out.owned[i] = <uint32_t>wide[i]
    else:
        if <uintptr_t>out.view.buf % 4:
            out.owned = <uint32_t*>copy_of(&out.view)
            out.data = out.owned
        else:
            out.data = <const uint32_t*>out.view.buf
        if kind_of(&out.view) in b"il":  # signed: a set top bit is a number below zero
            for i in range(out.count):
                seen |= <uint64_t>(out.data[i] & 0x80000000u) << 1
    if seen >> 32:
        raise UsageError("tokens hold a number that is not from 0 to 2**32 - 1", field="tokens")
    return 0


cdef int open_view(object source, Py_buffer* view, str name, str accepted) except -1:
    if not PyObject_CheckBuffer(source):
        raise UsageError(f"{name} must be {accepted}; got {type(source).__name__}", field=name)
    try:
        PyObject_GetBuffer(source, view, PyBUF_ND | PyBUF_FORMAT)
    except (BufferError, ValueError) as error:
        raise UsageError(f"{name} must be {accepted}: {error}", field=name) from error
    if view.ndim > 1 or kind_of(view) not in b"BbcIiLlQq":
        PyBuffer_Release(view)
        raise UsageError(f"{name} must be {accepted}, in one dimension", field=name)
    return 0


cdef char kind_of(Py_buffer* view) noexcept:
    """The letter of a native item of one number; `?` for records and foreign byte orders."""
    cdef const char* form = view.format
    if form == NULL:
        return c"B"
    if form[0] in b"@=<":
        form += 1
    return form[0] if form[0] and not form[1] else c"?"


cdef void* copy_of(Py_buffer* view) except NULL:
    cdef void* copy = get_memory(view.len)
    memcpy(copy, view.buf, view.len)
    return copy


cdef void* get_memory(Py_ssize_t size) except NULL:
    cdef void* got = PyMem_RawMalloc(size if size else 1)
    if got == NULL:
        raise OutOfMemory(f"no memory for a copy of {size} bytes", length_bytes=size)
    return got


cdef int refuse_item(str name, Py_ssize_t at, str wanted) except -1:
    """Turns the pending exception of a read into a typed one that says which item it was."""
    try:
        raise_pending()
    except (TypeError, OverflowError, ValueError) as error:
        raise UsageError(f"{name}[{at}] is not {wanted}: {error}", field=name, index=at) from error
    return 0


cdef int raise_pending() except -1:
    return -1  # the exception is already set
