"""Frames of a data lane (frames.h)."""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from "frames.h" nogil:
    enum:
        MP_MAGIC
        MP_REPLY
        MP_GROUP_MAX
        MP_NOTICE_MAX
    uint64_t MP_LENGTH_MAX
    ctypedef struct mp_header:
        uint16_t magic
        uint8_t op
        uint8_t flags
        uint32_t count
        uint64_t id
        uint64_t payload
        uint64_t reserved
    ctypedef struct mp_entry:
        uint64_t region
        uint64_t offset
        uint64_t length
        uint8_t key[16]
        uint8_t grant[24]
