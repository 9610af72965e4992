"""The local side of a batch (see local_side.pyx)."""

from libc.stdint cimport uint64_t
from moonpool.native.rdma.queues cimport mp_piece, mp_run

cdef void look_up(mp_run* run, uint64_t address, uint64_t length) noexcept nogil
cdef void register_passing(mp_run* run) noexcept nogil
cdef void forget_passing(mp_run* run) noexcept nogil
cdef bint take_slot(mp_run* run, mp_piece* piece) noexcept nogil
cdef bint copy_landed(mp_run* run) noexcept nogil
