/* Python integers read without a call where the interpreter's layout is known (3.11 to 3.14, 30-bit digits).

   Lists of tokens and of hashes are what callers have; a call of the C API for each item costs more than hashing or
   looking it up. Every other interpreter and every other object takes the slow way, which means the same. */
#ifndef MOONPOOL_INTEGERS_H
#define MOONPOOL_INTEGERS_H
#include <Python.h>
#include <stdint.h>

#if defined(PYLONG_BITS_IN_DIGIT) && PYLONG_BITS_IN_DIGIT == 30 && PY_VERSION_HEX < 0x030F0000 && !defined(Py_GIL_DISABLED)
#define MP_KNOWN_LAYOUT 1
#else
#define MP_KNOWN_LAYOUT 0
#endif

#if MP_KNOWN_LAYOUT
/* Number of 30-bit digits, and whether the number is below zero. */
static inline size_t mp_digits(PyObject *item, const digit **digits, int *negative) {
    PyLongObject *number = (PyLongObject *)item;
#if PY_VERSION_HEX < 0x030C0000
    Py_ssize_t size = Py_SIZE(number);
    *digits = number->ob_digit;
    *negative = size < 0;
    return (size_t)(size < 0 ? -size : size);
#else
    uintptr_t tag = number->long_value.lv_tag;
    *digits = number->long_value.ob_digit;
    *negative = (tag & 3) == 2;
    return (size_t)(tag >> 3);
#endif
}
#endif

/* An integer from -2**63 to 2**64 - 1 as 64 bits (two's complement). 0, or -1 with a Python exception set. */
static int mp_read_u64_slow(PyObject *item, uint64_t *out) {
    int overflow = 0;
    Py_INCREF(item); /* its __index__ may drop it from the list */
    PyObject *number = PyNumber_Index(item);
    Py_DECREF(item);
    if (number == NULL) return -1;
    long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
    if (overflow > 0) {
        *out = PyLong_AsUnsignedLongLong(number);
    } else if (overflow < 0) {
        PyErr_SetString(PyExc_OverflowError, "below -2**63");
    } else {
        *out = (uint64_t)value;
    }
    Py_DECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

static int mp_read_u32_slow(PyObject *item, uint32_t *out) {
    uint64_t value;
    if (mp_read_u64_slow(item, &value) != 0) return -1;
    if (value > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "not from 0 to 2**32 - 1");
        return -1;
    }
    *out = (uint32_t)value;
    return 0;
}

/* Whether the number was one that can be read in place, which is then done. */
static inline int mp_read_u64_fast(PyObject *item, uint64_t *out) {
#if MP_KNOWN_LAYOUT
    if (PyLong_CheckExact(item)) {
        const digit *d;
        int negative;
        size_t count = mp_digits(item, &d, &negative);
        uint64_t value = 0;
        if (count == 3 && d[2] < 16) {
            value = (uint64_t)d[0] | (uint64_t)d[1] << 30 | (uint64_t)d[2] << 60;
        } else if (count == 2) {
            value = (uint64_t)d[0] | (uint64_t)d[1] << 30;
        } else if (count == 1) {
            value = d[0];
        } else if (count != 0) {
            return 0;
        }
        *out = negative ? 0 - value : value;
        return !negative || value <= (uint64_t)1 << 63;
    }
#else
    (void)item, (void)out;
#endif
    return 0;
}

static inline int mp_read_u32_fast(PyObject *item, uint32_t *out) {
#if MP_KNOWN_LAYOUT
    if (PyLong_CheckExact(item)) {
        const digit *d;
        int negative;
        size_t count = mp_digits(item, &d, &negative);
        *out = count ? d[0] : 0;
        return count <= 1 && !negative;
    }
#else
    (void)item, (void)out;
#endif
    return 0;
}

/* Read items [first, last) of a list or tuple. Return how many were read: fewer mean that a Python exception is set.
   Reading the slow way runs the item's own code, which may change the list: then its place and length are asked anew. */
#define MP_DEFINE_READER(name, type, fast, slow)                                                          \
    static inline Py_ssize_t name(PyObject *sequence, Py_ssize_t first, Py_ssize_t last, type *out) {     \
        PyObject **items = PySequence_Fast_ITEMS(sequence);                                               \
        for (Py_ssize_t i = first; i < last; i++) {                                                       \
            if (fast(items[i], &out[i - first])) continue;                                                \
            if (slow(items[i], &out[i - first]) != 0) return i - first;                                   \
            if (PySequence_Fast_GET_SIZE(sequence) < last) {                                              \
                PyErr_SetString(PyExc_ValueError, "the list was shortened while it was read");            \
                return i - first;                                                                         \
            }                                                                                             \
            items = PySequence_Fast_ITEMS(sequence);                                                      \
        }                                                                                                 \
        return last - first;                                                                              \
    }

MP_DEFINE_READER(mp_read_u64s, uint64_t, mp_read_u64_fast, mp_read_u64_slow)
MP_DEFINE_READER(mp_read_u32s, uint32_t, mp_read_u32_fast, mp_read_u32_slow)
#endif
