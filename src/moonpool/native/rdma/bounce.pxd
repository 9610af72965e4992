"""Registered memory through which unregistered buffers go (see bounce.pyx)."""

from libc.stdint cimport int32_t, uint32_t, uint64_t
from moonpool.native.io.batch cimport pthread_mutex_t
from moonpool.native.verbs.ibverbs cimport mp_registration

cdef enum:
    SLOT_BYTES = 65536
    SCRATCH_BYTES = 4096

cdef struct mp_arena:
    pthread_mutex_t lock
    mp_registration* keys
    char* base               # of slot 0; the scratch page lies before it
    uint64_t scratch
    int32_t* unused          # stack of slots
    uint32_t n_unused
    uint32_t n_slots

cdef int32_t arena_take(mp_arena* arena) noexcept nogil
cdef void arena_give(mp_arena* arena, int32_t slot) noexcept nogil

cdef class BounceArena:
    cdef mp_arena* raw
    cdef readonly object memory
    cdef readonly object registration
