# cython: language_level=3, boundscheck=False, wraparound=False
"""Token ids out of JSON text, without a Python object for each: what a long prompt's body mostly is."""

from cpython cimport array
from libc.stdint cimport uint32_t, uint64_t

import array

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


def read_token_list(const unsigned char[::1] text not None, Py_ssize_t start):
    """The list of token ids after a key that ends at `start`: (`array('I')`, where it ends), or None.

    None means that it is not a colon and a list of integers from 0 to 2**32 - 1, and says nothing more.
    """
    cdef Run run
    cdef array.array found
    cdef Py_ssize_t size = text.shape[0]
    if start < 0 or start >= size:
        return None
    # A number and its comma are two letters at least.
    found = array.clone(TEMPLATE, (size - start) // 2 + 1, False)
    if not scan(&text[0], start, size, <uint32_t*>found.data.as_uints, &run):
        return None
    array.resize(found, run.count)
    return found, run.end
