"""Free directory slots, for other native modules (see directory_slots.pyx)."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

cdef extern from "bit_tree.h" nogil:
    ctypedef struct mp_bit_tree:
        uint64_t bits
        int levels
    int mp_bits_prepare(mp_bit_tree* tree, uint64_t bits)
    void mp_bits_release(mp_bit_tree* tree)
    size_t mp_bits_bytes(const mp_bit_tree* tree)
    bint mp_bits_has(const mp_bit_tree* tree, uint64_t i)
    void mp_bits_set(mp_bit_tree* tree, uint64_t i)
    void mp_bits_clear(mp_bit_tree* tree, uint64_t i)
    uint64_t mp_bits_first(const mp_bit_tree* tree)
    uint64_t mp_bits_at_or_before(const mp_bit_tree* tree, uint64_t i)
    uint64_t mp_bits_at_or_after(const mp_bit_tree* tree, uint64_t i)
    bint mp_bits_consistent(const mp_bit_tree* tree)

cdef enum:
    NO_FREE_SLOT = 0xFFFFFFFF


@cython.final
cdef class DirectorySlots:
    cdef mp_bit_tree open_slots      # free
    cdef mp_bit_tree added           # free or taken
    cdef uint64_t count
    cdef uint64_t free_slots
    cdef uint64_t taken_slots

    cdef uint32_t give(self) noexcept nogil
    cdef bint give_back(self, uint64_t slot) noexcept nogil
    cdef bint claim(self, uint64_t slot) noexcept nogil
