"""How far each holder matches a chain, for other native modules (see matching.pyx)."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from moonpool.native.table.holder_sets cimport HolderSet, HolderSets
from moonpool.native.table.slots cimport Scope, SlotMap

cdef struct Alive:          # up to 64 holders that match so far
    uint32_t word           # holder // 64
    uint32_t row            # of the first of them, where rows are given to matching holders only
    uint64_t members        # those that hold the first block
    uint64_t stages[3]      # those still matching in each tier (see matching.pyx)


@cython.final
cdef class Walk:
    cdef Alive* alive
    cdef uint32_t count     # of `alive`
    cdef uint32_t* depths   # [TIERS][stride]
    cdef Py_ssize_t stride
    cdef bint by_row        # else by holder
    cdef bint mixed         # tiers may alternate along a chain

    cdef Py_ssize_t begin(self, HolderSet* first) noexcept nogil
    cdef void step(self, HolderSet* holders, uint32_t depth) noexcept nogil
    cdef void put(self, Alive* one, uint64_t bits, int tier, uint32_t depth) noexcept nogil
    cdef void list_holders(self, uint32_t* out) noexcept nogil
    cdef void follow(
        self, SlotMap slots, HolderSets sets, Scope* scope, const uint64_t* keys, Py_ssize_t count
    ) noexcept nogil


@cython.final
cdef class Match:
    cdef readonly Py_ssize_t blocks
    cdef Py_ssize_t rows
    cdef uint32_t* data     # [4][rows]: holders, then the depth in each tier
    cdef Py_ssize_t shape[2]
    cdef Py_ssize_t strides[2]

    cdef bint reserve(self, Py_ssize_t rows) noexcept nogil
    cdef list column(self, Py_ssize_t which)
