"""Free space of one segment, for other native modules (see extents.pyx)."""

cimport cython
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from moonpool.native.table.directory_slots cimport mp_bit_tree

cdef enum:
    LINE_BYTES = 64
    PAGE_BYTES = 4096
    PAGE_SHIFT = 12
    LINES = 64                # of a page
    CLASSES = 896             # of lengths in pages, 32 for each power of two from 32 up
    CLASS_WORDS = 14
    NO_BLOCK = 0x3FFFFFFF     # also the most blocks there can be

cdef enum:                    # what `give` says instead of an offset
    GIVE_NO_SPACE = -1
    GIVE_NO_MEMORY = -2

cdef struct Block:            # a run of free pages; unused when pages is 0, and next then leads to the next unused
    uint32_t first
    uint32_t pages
    uint32_t prev
    uint32_t next

cdef struct SplitPage:        # a page with small extents: a bit for each line
    uint64_t taken
    uint64_t starts           # the first line of each extent
    uint64_t outside          # never added
    uint32_t page
    uint32_t prev
    uint32_t next
    uint8_t run               # its longest run of free lines: the number of its list
    bint live

# Bytes of the extent of a payload: see stored.extent_bytes.
cdef inline uint64_t rounded(uint64_t size) noexcept nogil:
    if size >= PAGE_BYTES:
        return (size + PAGE_BYTES - 1) & ~<uint64_t>(PAGE_BYTES - 1)
    if size == 0:
        return LINE_BYTES
    return (size + LINE_BYTES - 1) & ~<uint64_t>(LINE_BYTES - 1)


@cython.final
cdef class Extents:
    cdef readonly uint64_t capacity_bytes
    cdef uint64_t pages
    cdef uint64_t free_space              # bytes
    cdef uint64_t given                   # extents
    cdef uint32_t* tags                   # [pages], see extents.pyx
    cdef uint64_t* added                  # a bit for each whole page ever added
    cdef mp_bit_tree block_starts
    cdef Block* blocks
    cdef uint32_t blocks_used, blocks_room, blocks_free
    cdef uint32_t heads[CLASSES]
    cdef uint64_t filled[CLASS_WORDS]     # a bit for each class with a block
    cdef uint64_t filled_words
    cdef SplitPage* splits
    cdef uint32_t splits_used, splits_room, splits_free
    cdef uint32_t split_heads[LINES]
    cdef uint64_t split_filled

    cdef int64_t give(self, uint64_t size) noexcept nogil
    cdef bint give_back(self, uint64_t offset, uint64_t size) noexcept nogil
    cdef int claim(self, uint64_t offset, uint64_t size) noexcept nogil
    cdef bint open_range(self, uint64_t offset, uint64_t length) noexcept nogil

    cdef bint reserve_records(self) noexcept nogil
    cdef void insert_block(self, uint64_t first, uint64_t pages) noexcept nogil
    cdef void remove_block(self, uint32_t block) noexcept nogil
    cdef uint32_t block_ending_at(self, uint64_t page) noexcept nogil
    cdef uint32_t block_starting_at(self, uint64_t page) noexcept nogil
    cdef uint32_t fitting_block(self, uint64_t pages) noexcept nogil
    cdef uint32_t block_in_class(self, uint64_t pages, int tries) noexcept nogil
    cdef int64_t give_pages(self, uint64_t pages, uint32_t tag) noexcept nogil
    cdef void take_from(self, uint32_t block, uint64_t first, uint64_t pages) noexcept nogil
    cdef void free_pages(self, uint64_t first, uint64_t pages) noexcept nogil
    cdef int64_t give_lines(self, uint64_t lines) noexcept nogil
    cdef uint32_t new_split(self, uint64_t page, uint64_t outside) noexcept nogil
    cdef void place_split(self, uint32_t split) noexcept nogil
    cdef void leave_list(self, uint32_t split) noexcept nogil
    cdef bint free_lines(self, uint64_t offset, uint64_t lines) noexcept nogil
    cdef void settle_split(self, uint32_t split) noexcept nogil
    cdef int claim_lines(self, uint64_t offset, uint64_t lines) noexcept nogil
    cdef int claim_pages(self, uint64_t first, uint64_t pages) noexcept nogil
    cdef bint is_free_to_add(self, uint64_t offset, uint64_t length) noexcept nogil
    cdef uint32_t split_at(self, uint64_t page) noexcept nogil
    cdef int check_blocks(self) except -1
    cdef int check_pages(self) except -1
