"""How far each holder matches a chain of blocks, for all holders at once.

Theory of operation. Usually a holder matches a chain tier by tier and never goes back up: first the leading blocks
that it has in tier 0 (device), from there on those that it has in tier 1 (host), from there on those in tier 2 (disk).
So it is in one of three *stages*, and a block moves it along: one AND for each stage and 64 holders. *Mixed*, a block
counts for a tier when the holder has it in that tier or a faster one, and the stages do not feed each other. The depth
at which a holder leaves a stage is noted when it does, so the cost is blocks/run + holders, where a run is blocks with
the same set of holders: those after the first change nothing and are passed over by comparing set numbers.
Either way 0 <= device <= host <= disk. Source of the usual counts: Mooncake Conductor's query API, which follows what
an engine with an offloading connector can use.
"""

cimport cython
from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES, PyBUF_WRITABLE, Py_buffer
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport qsort

from moonpool.native.table.holder_sets cimport EMPTY_SET, HOLDERS_PER_CHUNK, TIERS, Chunk
from moonpool.native.table.slots cimport NO_SLOT, stands_at

from moonpool.errors import OutOfMemory

cdef extern from "mixing.h" nogil:
    int mp_lowest_bit(uint64_t x)
    int mp_bits_below(uint64_t x, int bit)


@cython.final
cdef class Walk:
    """One walk along a chain: scratch of a table, used under its mutex."""

    def __cinit__(self, uint32_t holders_max):
        self.alive = <Alive*>PyMem_RawCalloc(holders_max // HOLDERS_PER_CHUNK + 1, sizeof(Alive))
        if self.alive == NULL:
            raise OutOfMemory("no memory for queries")

    def __dealloc__(self):
        PyMem_RawFree(self.alive)

    cdef Py_ssize_t begin(self, HolderSet* first) noexcept nogil:
        """Starts with the holders of the first block; returns how many they are."""
        cdef Py_ssize_t rows = 0
        cdef uint32_t i
        cdef Chunk* chunk
        cdef Alive* one
        for i in range(first.count):
            chunk = &first.chunks[i]
            one = &self.alive[i]
            one.word = chunk.word
            one.row = <uint32_t>rows
            one.members = chunk.tiers[0] | chunk.tiers[1] | chunk.tiers[2]
            one.stages[0] = chunk.tiers[0]
            one.stages[1] = chunk.tiers[0] | chunk.tiers[1] if self.mixed else chunk.tiers[1] & ~chunk.tiers[0]
            one.stages[2] = one.members if self.mixed else chunk.tiers[2] & ~(chunk.tiers[0] | chunk.tiers[1])
            rows += mp_bits_below(one.members, 63) + (one.members >> 63)
        self.count = first.count
        return rows

    cdef void list_holders(self, uint32_t* out) noexcept nogil:
        """The holders, ascending, right after `begin`."""
        cdef uint32_t i
        cdef uint64_t members
        for i in range(self.count):
            members = self.alive[i].members
            while members:
                out[0] = self.alive[i].word * HOLDERS_PER_CHUNK + mp_lowest_bit(members)
                out += 1
                members &= members - 1

    cdef void step(self, HolderSet* holders, uint32_t depth) noexcept nogil:
        """Goes on to the block at `depth`, held by `holders`; the empty set ends the walk."""
        cdef uint32_t i, j = 0, kept = 0
        cdef int tier
        cdef uint64_t inside, leaving
        cdef Alive* one
        for i in range(self.count):
            one = &self.alive[i]
            while j < holders.count and holders.chunks[j].word < one.word:
                j += 1
            leaving = inside = 0
            for tier in range(TIERS):
                if not self.mixed:
                    inside = 0
                if j < holders.count and holders.chunks[j].word == one.word:
                    inside |= holders.chunks[j].tiers[tier]
                leaving = one.stages[tier] | (0 if self.mixed else leaving)
                one.stages[tier] = leaving & inside
                leaving &= ~inside
                if leaving:
                    self.put(one, leaving, tier, depth)
            if one.stages[0] | one.stages[1] | one.stages[2]:
                self.alive[kept] = one[0]
                kept += 1
        self.count = kept

    cdef void put(self, Alive* one, uint64_t bits, int tier, uint32_t depth) noexcept nogil:
        cdef uint32_t* plane = self.depths + tier * self.stride
        cdef int bit
        while bits:
            bit = mp_lowest_bit(bits)
            bits &= bits - 1
            if self.by_row:
                plane[one.row + mp_bits_below(one.members, bit)] = depth
            else:
                plane[one.word * HOLDERS_PER_CHUNK + bit] = depth

    cdef void follow(
        self, SlotMap slots, HolderSets sets, Scope* scope, const uint64_t* keys, Py_ssize_t count
    ) noexcept nogil:
        """Walks on from the first block, for which `begin` was called, and notes every depth (0 is left out)."""
        cdef uint32_t at = slots.find(scope, keys[0]), holders = slots.slots[at].holders, now
        cdef Py_ssize_t i
        for i in range(1, count):
            at += 1
            if not stands_at(slots, at, scope, keys[i]):
                slots.look_ahead(scope, keys, i, count)
                at = slots.find(scope, keys[i])
                if at == NO_SLOT:
                    self.step(&sets.sets[EMPTY_SET], <uint32_t>i)
                    return
            now = slots.slots[at].holders
            if now != holders:
                self.step(&sets.sets[now], <uint32_t>i)
                if self.count == 0:
                    return
                holders = now
        self.step(&sets.sets[EMPTY_SET], <uint32_t>count)


cdef char* FORMAT = "I"


cdef int later_first(const void* a, const void* b) noexcept nogil:
    cdef uint32_t x = (<const uint32_t*>a)[0], y = (<const uint32_t*>b)[0]
    return (x < y) - (x > y)


@cython.final
cdef class Match:
    """What a query found: the holders of the first block, ascending, and how many leading blocks each has.

    Depths are cumulative: `device` counts blocks in tier 0, `host` those and the following ones in tier 1, `disk` those
    and the following ones in tier 2. A match is a buffer, see `planes`.
    """

    def __cinit__(self, Py_ssize_t blocks):
        self.blocks = blocks

    def __dealloc__(self):
        PyMem_RawFree(self.data)

    cdef bint reserve(self, Py_ssize_t rows) noexcept nogil:
        self.data = <uint32_t*>PyMem_RawCalloc(4 * rows + 1, sizeof(uint32_t))
        self.rows = rows if self.data else 0
        return self.data != NULL

    def __len__(self):
        return self.rows

    @property
    def holders(self) -> list:
        """Numbers of the holders, ascending."""
        return self.column(0)

    @property
    def device(self) -> list:
        """Leading blocks that each holder has on its device."""
        return self.column(1)

    @property
    def host(self) -> list:
        """The same, and then in host memory."""
        return self.column(2)

    @property
    def disk(self) -> list:
        """The same, and then on disk: all that the holder matches."""
        return self.column(3)

    def planes(self) -> memoryview:
        """`uint32[4, holders]`: holders, device, host, disk; a read-only view, which keeps the match alive."""
        return memoryview(self)

    def rows_by_holder(self) -> dict:
        """`{holder: (device, host, disk)}`."""
        cdef Py_ssize_t i, n = self.rows
        return {
            self.data[i]: (self.data[n + i], self.data[2 * n + i], self.data[3 * n + i]) for i in range(n)
        }

    def depths_by_name(self, tuple names) -> dict:
        """`{names[holder]: disk}`: all that each holder matches, by name."""
        cdef Py_ssize_t i, n = self.rows
        return {names[self.data[i]]: self.data[3 * n + i] for i in range(n)}

    def depth_of_rank(self, Py_ssize_t rank) -> int:
        """How many leading blocks at least `rank` holders match (rank 1: the deepest match); 0 when there are fewer."""
        cdef uint32_t depth
        cdef uint32_t* sorted_depths
        cdef Py_ssize_t i
        if not 1 <= rank <= self.rows:
            return 0
        sorted_depths = <uint32_t*>PyMem_RawCalloc(self.rows, sizeof(uint32_t))
        if sorted_depths == NULL:
            raise OutOfMemory("no memory to rank the holders of a match")
        for i in range(self.rows):
            sorted_depths[i] = self.data[3 * self.rows + i]
        qsort(sorted_depths, self.rows, sizeof(uint32_t), later_first)
        depth = sorted_depths[rank - 1]
        PyMem_RawFree(sorted_depths)
        return depth

    def __getbuffer__(self, Py_buffer* view, int flags):
        if flags & PyBUF_WRITABLE:
            raise BufferError("a match is read-only")
        self.shape[0], self.shape[1] = 4, self.rows
        self.strides[0], self.strides[1] = 4 * self.rows, 4
        view.buf = self.data
        view.obj = self
        view.len = 16 * self.rows
        view.itemsize = 4
        view.readonly = 1
        view.ndim = 2
        view.format = NULL
        view.shape = NULL
        view.strides = NULL
        if flags & PyBUF_FORMAT:
            view.format = FORMAT
        if flags & PyBUF_ND:
            view.shape = self.shape
        if (flags & PyBUF_STRIDES) == PyBUF_STRIDES:
            view.strides = self.strides
        view.suboffsets = NULL
        view.internal = NULL

    cdef list column(self, Py_ssize_t which):
        cdef Py_ssize_t i
        return [self.data[which * self.rows + i] for i in range(self.rows)]
