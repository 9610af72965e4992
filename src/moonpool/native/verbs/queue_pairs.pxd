"""Completion queues and reliable queue pairs (see queue_pairs.pyx)."""

from libc.stdint cimport uint32_t
from moonpool.native.verbs.devices cimport Device
from moonpool.native.verbs.ibverbs cimport ibv_qp, mp_cq, mp_verbs

cdef class CompletionQueue:
    cdef object __weakref__
    cdef readonly Device device
    cdef mp_cq raw              # raw.cq is NULL once closed
    cdef int users              # queue pairs on it
    cdef int release(self) noexcept
    cdef int check_open(self) except -1

cdef class QueuePair:
    cdef object __weakref__
    cdef readonly Device device
    cdef readonly CompletionQueue queue
    cdef mp_verbs* calls
    cdef ibv_qp* raw            # NULL once closed
    cdef readonly uint32_t number
    cdef readonly uint32_t send_depth      # what the device granted
    cdef readonly uint32_t pieces_max
    cdef int release(self) noexcept
    cdef int check_open(self) except -1
    cdef int changed(self, int rc, str doing) except -1
    cdef int to_state(self, int state, str doing) except -1
