# cython: language_level=3, boundscheck=False, wraparound=False
"""Token ids out of JSON text, without a Python object for each: what a long prompt's body mostly is."""

from cpython cimport array
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

import array

cdef extern from "token_text.h" nogil:
    int64_t mp_read_numbers(const unsigned char* text, int64_t* at, int64_t end, uint32_t* out)

cdef enum:
    SCRATCH_NUMBERS = 1 << 18

cdef array.array TEMPLATE = array.array("I")


cdef inline Py_ssize_t skip_blank(const unsigned char* text, Py_ssize_t at, Py_ssize_t end) noexcept nogil:
    while at < end and (text[at] == 32 or text[at] == 9 or text[at] == 10 or text[at] == 13):
        at += 1
    return at


cdef inline bint is_digit(unsigned char letter) noexcept nogil:
    return 48 <= letter <= 57


cdef struct Run:  # where a list ended, and how many numbers it had
    Py_ssize_t end
    Py_ssize_t count


cdef bint scan(const unsigned char* text, Py_ssize_t at, Py_ssize_t end, uint32_t* out, Run* run) noexcept nogil:
    """Reads `: [n, n, ...]` into `out`, which has room; False for anything but token ids."""
    cdef uint64_t value
    cdef Py_ssize_t first
    cdef int64_t place
    run.count = 0
    at = skip_blank(text, at, end)
    if at >= end or text[at] != 58:
        return False
    at = skip_blank(text, at + 1, end)
    if at >= end or text[at] != 91:
        return False
    at = skip_blank(text, at + 1, end)
    if at < end and text[at] == 93:
        run.end = at + 1
        return True
    if at >= 8:
        place = at
        run.count = mp_read_numbers(text, &place, end, out)
        at = skip_blank(text, place, end)
    while at < end:
        first = at
        value = 0
        while at < end and is_digit(text[at]) and at - first < 11:
            value = value * 10 + (text[at] - 48)
            at += 1
        # No digit, a leading zero or more than 32 bits: whoever reads all of JSON says what is wrong.
        if at == first or (text[first] == 48 and at - first > 1) or value > 0xFFFFFFFFu:
            return False
        out[run.count] = <uint32_t>value
        run.count += 1
        at = skip_blank(text, at, end)
        if at >= end:
            return False
        if text[at] == 93:
            run.end = at + 1
            return True
        if text[at] != 44:
            return False
        at = skip_blank(text, at + 1, end)
    return False


cdef uint32_t* SCRATCH = <uint32_t*>malloc(SCRATCH_NUMBERS * sizeof(uint32_t))  # used with the GIL held


def read_token_list(const unsigned char[::1] text not None, Py_ssize_t start):
    """The list of token ids after a key that ends at `start`: (`array('I')`, where it ends), or None.

    None means that it is not a colon and a list of integers from 0 to 2**32 - 1, and says nothing more.
    """
    cdef Run run
    cdef array.array found
    cdef Py_ssize_t size = text.shape[0]
    cdef Py_ssize_t most
    cdef uint32_t* room = SCRATCH
    if start < 0 or start >= size:
        return None
    most = (size - start) // 2 + 1  # a number and its comma are two letters at least
    if most > SCRATCH_NUMBERS or room == NULL:
        room = <uint32_t*>malloc(most * sizeof(uint32_t))
        if room == NULL:
            raise MemoryError
    try:
        if not scan(&text[0], start, size, room, &run):
            return None
        found = array.clone(TEMPLATE, run.count, False)
        memcpy(found.data.as_uints, room, run.count * sizeof(uint32_t))
    finally:
        if room != SCRATCH:
            free(room)
    return found, run.end
