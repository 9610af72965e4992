"""The library and its devices (see devices.pyx)."""

from moonpool.native.verbs.ibverbs cimport ibv_context, ibv_pd, mp_verbs

# Kinds of objects that are counted from making to freeing.
cdef enum:
    LIVE_DEVICES = 0
    LIVE_COMPLETION_QUEUES = 1
    LIVE_QUEUE_PAIRS = 2
    LIVE_REGIONS = 3
    LIVE_KINDS = 4

cdef void count_live(int kind, int change) noexcept nogil
cdef bint is_freed(int rc) noexcept nogil

cdef class VerbsLibrary:
    cdef mp_verbs* calls        # valid for the process's life: a provider library cannot be unloaded safely
    cdef readonly str path
    cdef int check_listing(self, int failure) except -1

cdef class Device:
    cdef object __weakref__
    cdef readonly VerbsLibrary library
    cdef mp_verbs* calls
    cdef ibv_context* context   # NULL once closed
    cdef ibv_pd* pd
    cdef int pid                # of the process that opened it; a forked child frees nothing
    cdef readonly str name
    cdef readonly int async_fd  # readable when an event waits
    cdef object children        # what was made on it, closed before it
    cdef object adopt(self, object child)
    cdef int release(self) noexcept
    cdef int check_open(self) except -1
