"""Free space of one segment: O(1) allocation with a good fit, all records outside of the space itself.

Theory of operation. Extents of 4,096 bytes and more are runs of pages. Free runs (*blocks*) are in lists by length: a
class for each below 32 pages, then 32 for each power of two (two-level segregated fit, Masmano et al., ECRTS 2004). A
request takes the front of a block: one of the first of its own class, so that sizes that come again fill each other's
holes, else of the first non-empty class whose every block fits.

`tags` has a word for each page: at the first page of a given extent its length; at the first and last page of a
block the block; at a page of small extents its SplitPage. Other words may be left over from earlier: a word
that names a block counts only if that block says the same of itself, and the word of a given extent is wiped
when it is freed. So neighbours are found in one step, and an extent that is not one is never freed.

Extents below 4,096 bytes are runs of 64-byte lines in *split pages*, found by the longest run that is free in them;
a split page whose lines are all free again becomes a free page. What shares a page with the end of an added range,
but lies outside of it, is marked in that page.

The plain twin is extents_reference. Thread rule: the caller's.
"""

cimport cython
from cpython.mem cimport PyMem_RawFree, PyMem_RawRealloc
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from moonpool.native.table.directory_slots cimport (
    mp_bits_at_or_before, mp_bits_bytes, mp_bits_clear, mp_bits_consistent, mp_bits_has,
    mp_bits_prepare, mp_bits_release, mp_bits_set,
)

from moonpool.errors import InternalError, OutOfMemory, UsageError

cdef extern from "line_runs.h" nogil:
    int mp_low_bit(uint64_t x)
    int mp_high_bit(uint64_t x)
    uint64_t mp_runs(uint64_t free, int length)
    int mp_longest_run(uint64_t free)

cdef enum:
    TAG_FREE = 0x40000000       # and the block
    TAG_GIVEN = 0x80000000      # and the pages
    TAG_SPLIT = 0xC0000000      # and the split page
    TAG_KIND = 0xC0000000
    TAG_REST = 0x3FFFFFFF
    MANTISSA = 5                # so a class is at most 1/32 wide
    NEAR_TRIES = 8              # blocks of the nearest class looked at first
    TRIES = 64                  # and where nothing larger is left
    PACKED_PLACE = 24

cdef str NO_MEMORY = "no memory for the free space of a segment"
cdef uint64_t CAPACITY_MAX = <uint64_t>1 << 41    # 2^29 pages: one below NO_BLOCK


cdef inline uint32_t class_of(uint64_t pages) noexcept nogil:
    cdef int power
    if pages < 32:
        return <uint32_t>pages
    power = mp_high_bit(pages)
    return <uint32_t>((power - MANTISSA + 1) * 32 + ((pages >> (power - MANTISSA)) & 31))


cdef inline uint32_t class_above(uint64_t pages) noexcept nogil:
    """The first class all of whose blocks have so many pages."""
    return <uint32_t>pages if pages < 32 else class_of(pages + (<uint64_t>1 << (mp_high_bit(pages) - MANTISSA)) - 1)


cdef inline uint64_t line_mask(uint64_t first, uint64_t lines) noexcept nogil:
    return (<uint64_t>0xFFFFFFFFFFFFFFFF >> (64 - lines)) << first


@cython.final
cdef class Extents:
    """The space of a segment of `capacity_bytes` (a multiple of 64, up to 2 TiB); none is free until `add_range`."""

    def __cinit__(self, capacity_bytes):
        if not 0 < capacity_bytes <= CAPACITY_MAX or capacity_bytes % LINE_BYTES:
            raise UsageError(f"capacity_bytes must be a multiple of 64 up to {CAPACITY_MAX}", field="capacity_bytes",
                             value=str(capacity_bytes))
        self.capacity_bytes = capacity_bytes
        self.pages = (self.capacity_bytes + PAGE_BYTES - 1) >> PAGE_SHIFT
        self.blocks_free = self.splits_free = NO_BLOCK
        memset(self.heads, 0xFF, sizeof(self.heads))
        memset(self.split_heads, 0xFF, sizeof(self.split_heads))
        self.tags = <uint32_t*>calloc(self.pages, sizeof(uint32_t))
        self.added = <uint64_t*>calloc((self.pages + 63) // 64, sizeof(uint64_t))
        if not (self.tags and self.added and mp_bits_prepare(&self.block_starts, self.pages)):
            raise OutOfMemory(NO_MEMORY)

    def __dealloc__(self):
        free(self.tags)
        free(self.added)
        mp_bits_release(&self.block_starts)
        PyMem_RawFree(self.blocks)
        PyMem_RawFree(self.splits)

    def add_range(self, offset, length) -> None:
        """Space that may be given from now on; InternalError when some of it was added before."""
        if not (0 <= offset < self.capacity_bytes and 0 < length <= self.capacity_bytes - offset
                and not offset % LINE_BYTES and not length % LINE_BYTES):
            raise InternalError(f"the {length} bytes at {offset} are no range of this segment")
        if not self.is_free_to_add(offset, length):
            raise InternalError(f"the range at {offset} is partly added already")
        if not self.open_range(offset, length):
            raise OutOfMemory(NO_MEMORY)

    def allocate(self, uint64_t size) -> int:
        """The offset of a new extent for `size` bytes, or -1 where none fits. O(1)."""
        cdef int64_t offset = self.give(size)
        if offset == GIVE_NO_MEMORY:
            raise OutOfMemory(NO_MEMORY)
        return offset

    def free(self, offset, uint64_t size) -> None:
        """Gives back an extent as allocated; InternalError when it is not one. O(1)."""
        if not (0 <= offset < self.capacity_bytes and self.give_back(offset, size)):
            raise InternalError(f"no extent for {size} bytes starts at {offset}")

    def take(self, offset, uint64_t size) -> None:
        """Carves a given extent out of free space; InternalError when it is not all free."""
        cdef int done = self.claim(offset, size) if 0 <= offset < self.capacity_bytes else 0
        if done < 0:
            raise OutOfMemory(NO_MEMORY)
        if not done:
            raise InternalError(f"the extent for {size} bytes at {offset} is not all free")

    def take_all(self, bytes packed not None) -> None:
        """`take` for each place of `ObjectTable.packed_places`; those before a refused one stay taken."""
        cdef const uint8_t* data = packed
        cdef Py_ssize_t length = len(packed), at
        cdef uint64_t row[2]
        if length % PACKED_PLACE:
            raise InternalError("these are no packed places")
        for at in range(0, length, PACKED_PLACE):
            memcpy(row, data + at, sizeof(row))
            if rounded(row[1]) != row[1] or row[0] >= self.capacity_bytes:
                raise InternalError(f"{row[1]} bytes at {row[0]} are no extent")
            self.take(row[0], row[1])

    def free_bytes(self) -> int:
        """Bytes that are free, in pieces of any size."""
        return self.free_space

    def largest_free(self) -> int:
        """The largest extent that fits: whole pages, or of one page's lines where no page is free."""
        cdef int word
        cdef uint32_t block, pages = 0
        if self.filled_words:
            word = mp_high_bit(self.filled_words)
            block = self.heads[word * 64 + mp_high_bit(self.filled[word])]
            while block != <uint32_t>0xFFFFFFFF:
                pages = max(pages, self.blocks[block].pages)
                block = self.blocks[block].next
            return <uint64_t>pages * PAGE_BYTES
        return mp_high_bit(self.split_filled) * LINE_BYTES if self.split_filled else 0

    def extents(self) -> int:
        """How many extents are given."""
        return self.given

    def memory_bytes(self) -> int:
        """Bytes reserved; of those for each page only what was touched is used."""
        return (self.pages * sizeof(uint32_t) + self.pages // 8 + mp_bits_bytes(&self.block_starts)
                + self.blocks_room * sizeof(Block) + self.splits_room * sizeof(SplitPage))

    def check(self) -> None:
        """Asserts that blocks, lists, tags and counts tell of the same space."""
        self.check_blocks()
        self.check_pages()

    # -- what other native modules call --

    cdef int64_t give(self, uint64_t size) noexcept nogil:
        """The offset of a new extent, GIVE_NO_SPACE or GIVE_NO_MEMORY."""
        cdef uint64_t length
        cdef int64_t first
        if size > self.capacity_bytes:
            return GIVE_NO_SPACE
        length = rounded(size)
        if length > self.free_space:
            return GIVE_NO_SPACE
        if not self.reserve_records():
            return GIVE_NO_MEMORY
        if length < PAGE_BYTES:
            return self.give_lines(length // LINE_BYTES)
        first = self.give_pages(length >> PAGE_SHIFT, <uint32_t>TAG_GIVEN | <uint32_t>(length >> PAGE_SHIFT))
        if first < 0:
            return GIVE_NO_SPACE
        self.given += 1
        self.free_space -= length
        return first << PAGE_SHIFT

    cdef bint give_back(self, uint64_t offset, uint64_t size) noexcept nogil:
        """Frees an extent; False when it is none, or without memory."""
        cdef uint64_t length = rounded(size), first = offset >> PAGE_SHIFT
        if size > self.capacity_bytes or offset >= self.capacity_bytes or not self.reserve_records():
            return False
        if length < PAGE_BYTES:
            return self.free_lines(offset, length // LINE_BYTES)
        if offset & (PAGE_BYTES - 1) or self.tags[first] != (<uint32_t>TAG_GIVEN | <uint32_t>(length >> PAGE_SHIFT)):
            return False
        self.given -= 1
        self.free_space += length
        self.free_pages(first, length >> PAGE_SHIFT)
        return True

    cdef int claim(self, uint64_t offset, uint64_t size) noexcept nogil:
        """Takes this extent: 1 when done, 0 when it is not all free, -1 without memory."""
        cdef uint64_t length = rounded(size)
        if size > self.capacity_bytes or offset >= self.capacity_bytes:
            return 0
        if not self.reserve_records():
            return -1
        if length < PAGE_BYTES:
            return self.claim_lines(offset, length // LINE_BYTES)
        if offset & (PAGE_BYTES - 1):
            return 0
        return self.claim_pages(offset >> PAGE_SHIFT, length >> PAGE_SHIFT)

    cdef bint open_range(self, uint64_t offset, uint64_t length) noexcept nogil:
        """Adds a range that `is_free_to_add`; False without memory for all of it, and then some may be added."""
        cdef uint64_t end = offset + length, at = offset, first, stop
        cdef uint32_t split
        while at < end:
            if not self.reserve_records():
                return False
            first = at >> PAGE_SHIFT
            if at & (PAGE_BYTES - 1) or end - at < PAGE_BYTES:
                stop = min(end, (first + 1) << PAGE_SHIFT)
                split = self.split_at(first)
                if split == NO_BLOCK:
                    split = self.new_split(first, <uint64_t>0xFFFFFFFFFFFFFFFF)
                self.leave_list(split)
                self.splits[split].outside &= ~line_mask((at >> 6) & 63, (stop - at) >> 6)
                self.settle_split(split)
            else:
                stop = end & ~<uint64_t>(PAGE_BYTES - 1)
                for first in range(at >> PAGE_SHIFT, stop >> PAGE_SHIFT):
                    self.added[first >> 6] |= <uint64_t>1 << (first & 63)
                self.free_pages(at >> PAGE_SHIFT, (stop - at) >> PAGE_SHIFT)
            self.free_space += stop - at
            at = stop
        return True

    # -- free runs of pages --

    cdef bint reserve_records(self) noexcept nogil:
        """Room for two more blocks and one more split page: the most that one call makes."""
        cdef void* grown
        cdef uint32_t room
        if self.blocks_used + 2 > self.blocks_room:
            room = self.blocks_room + self.blocks_room // 2 + 64
            grown = PyMem_RawRealloc(self.blocks, room * sizeof(Block))
            if grown == NULL:
                return False
            self.blocks = <Block*>grown
            self.blocks_room = room
        if self.splits_free == NO_BLOCK and self.splits_used + 1 > self.splits_room:
            room = self.splits_room + self.splits_room // 2 + 16
            grown = PyMem_RawRealloc(self.splits, room * sizeof(SplitPage))
            if grown == NULL:
                return False
            self.splits = <SplitPage*>grown
            self.splits_room = room
        return True

    cdef void insert_block(self, uint64_t first, uint64_t pages) noexcept nogil:
        cdef uint32_t block = self.blocks_free, number = class_of(pages)
        cdef Block* record
        if block != NO_BLOCK:
            self.blocks_free = self.blocks[block].next
        else:
            block = self.blocks_used
            self.blocks_used += 1
        record = &self.blocks[block]
        record.first = <uint32_t>first
        record.pages = <uint32_t>pages
        record.prev = <uint32_t>0xFFFFFFFF
        record.next = self.heads[number]
        if record.next != <uint32_t>0xFFFFFFFF:
            self.blocks[record.next].prev = block
        self.heads[number] = block
        self.filled[number >> 6] |= <uint64_t>1 << (number & 63)
        self.filled_words |= <uint64_t>1 << (number >> 6)
        self.tags[first] = self.tags[first + pages - 1] = <uint32_t>TAG_FREE | block
        mp_bits_set(&self.block_starts, first)

    cdef void remove_block(self, uint32_t block) noexcept nogil:
        cdef Block* record = &self.blocks[block]
        cdef uint32_t number = class_of(record.pages)
        if record.next != <uint32_t>0xFFFFFFFF:
            self.blocks[record.next].prev = record.prev
        if record.prev != <uint32_t>0xFFFFFFFF:
            self.blocks[record.prev].next = record.next
        else:
            self.heads[number] = record.next
            if record.next == <uint32_t>0xFFFFFFFF:
                self.filled[number >> 6] &= ~(<uint64_t>1 << (number & 63))
                if self.filled[number >> 6] == 0:
                    self.filled_words &= ~(<uint64_t>1 << (number >> 6))
        mp_bits_clear(&self.block_starts, record.first)
        record.pages = 0
        record.next = self.blocks_free
        self.blocks_free = block

    cdef uint32_t block_ending_at(self, uint64_t page) noexcept nogil:
        """The block whose last page is the one before, or NO_BLOCK."""
        cdef uint32_t tag, block
        if page == 0:
            return NO_BLOCK
        tag = self.tags[page - 1]
        block = tag & TAG_REST
        if tag & <uint32_t>TAG_KIND != TAG_FREE or block >= self.blocks_used or self.blocks[block].pages == 0:
            return NO_BLOCK
        return block if <uint64_t>self.blocks[block].first + self.blocks[block].pages == page else NO_BLOCK

    cdef uint32_t block_starting_at(self, uint64_t page) noexcept nogil:
        """The block whose first page it is, or NO_BLOCK."""
        cdef uint32_t tag, block
        if page >= self.pages:
            return NO_BLOCK
        tag = self.tags[page]
        block = tag & TAG_REST
        if tag & <uint32_t>TAG_KIND != TAG_FREE or block >= self.blocks_used or self.blocks[block].pages == 0:
            return NO_BLOCK
        return block if self.blocks[block].first == page else NO_BLOCK

    cdef uint32_t fitting_block(self, uint64_t pages) noexcept nogil:
        """A block of so many pages or more, or NO_BLOCK."""
        cdef uint32_t number = class_above(pages), word = number >> 6, block = self.block_in_class(pages, NEAR_TRIES)
        cdef uint64_t found
        if block != NO_BLOCK or number >= CLASSES:
            return block
        found = self.filled[word] & (<uint64_t>0xFFFFFFFFFFFFFFFF << (number & 63))
        if not found and word + 1 < CLASS_WORDS:
            found = self.filled_words & (<uint64_t>0xFFFFFFFFFFFFFFFF << (word + 1))
            if found:
                word = mp_low_bit(found)
                found = self.filled[word]
        return self.heads[word * 64 + mp_low_bit(found)] if found else self.block_in_class(pages, TRIES)

    cdef uint32_t block_in_class(self, uint64_t pages, int tries) noexcept nogil:
        """One of the first blocks of the class of so many pages that has them, or NO_BLOCK."""
        cdef uint32_t block = self.heads[class_of(pages)]
        while block != <uint32_t>0xFFFFFFFF and tries:
            if self.blocks[block].pages >= pages:
                return block
            block = self.blocks[block].next
            tries -= 1
        return NO_BLOCK

    cdef int64_t give_pages(self, uint64_t pages, uint32_t tag) noexcept nogil:
        """The first page of a run that is now tagged as given, or -1."""
        cdef uint32_t block = self.fitting_block(pages)
        cdef uint64_t first
        if block == NO_BLOCK:
            return -1
        first = self.blocks[block].first
        self.take_from(block, first, pages)
        self.tags[first] = tag
        return <int64_t>first

    cdef void take_from(self, uint32_t block, uint64_t first, uint64_t pages) noexcept nogil:
        """Leaves of a block what lies before and behind these pages."""
        cdef uint64_t start = self.blocks[block].first, end = start + self.blocks[block].pages
        self.remove_block(block)
        if first > start:
            self.insert_block(start, first - start)
        if first + pages < end:
            self.insert_block(first + pages, end - first - pages)

    cdef void free_pages(self, uint64_t first, uint64_t pages) noexcept nogil:
        """Adds a run to what is free, in one with its free neighbours."""
        cdef uint32_t before = self.block_ending_at(first), after = self.block_starting_at(first + pages)
        self.tags[first] = 0
        if before != NO_BLOCK:
            first = self.blocks[before].first
            pages += self.blocks[before].pages
            self.remove_block(before)
        if after != NO_BLOCK:
            pages += self.blocks[after].pages
            self.remove_block(after)
        self.insert_block(first, pages)

    cdef int claim_pages(self, uint64_t first, uint64_t pages) noexcept nogil:
        cdef uint64_t start = mp_bits_at_or_before(&self.block_starts, first)
        cdef uint32_t block
        if start >= self.pages:
            return 0
        block = self.block_starting_at(start)
        if block == NO_BLOCK or first + pages > start + self.blocks[block].pages:
            return 0
        self.take_from(block, first, pages)
        self.tags[first] = <uint32_t>TAG_GIVEN | <uint32_t>pages
        self.given += 1
        self.free_space -= pages << PAGE_SHIFT
        return 1

    # -- split pages --

    cdef uint32_t split_at(self, uint64_t page) noexcept nogil:
        """The split page that this page is, or NO_BLOCK."""
        cdef uint32_t tag = self.tags[page], split = tag & TAG_REST
        if tag & <uint32_t>TAG_KIND != <uint32_t>TAG_SPLIT or split >= self.splits_used:
            return NO_BLOCK
        return split if self.splits[split].live and self.splits[split].page == page else NO_BLOCK

    cdef uint32_t new_split(self, uint64_t page, uint64_t outside) noexcept nogil:
        """A split page without extents, in no list yet."""
        cdef uint32_t split = self.splits_free
        if split != NO_BLOCK:
            self.splits_free = self.splits[split].next
        else:
            split = self.splits_used
            self.splits_used += 1
        memset(&self.splits[split], 0, sizeof(SplitPage))
        self.splits[split].outside = outside
        self.splits[split].page = <uint32_t>page
        self.splits[split].live = True
        self.tags[page] = <uint32_t>TAG_SPLIT | split
        return split

    cdef void place_split(self, uint32_t split) noexcept nogil:
        """Into the list of its longest free run; into none when it has no free line."""
        cdef SplitPage* record = &self.splits[split]
        record.run = <uint8_t>mp_longest_run(~(record.taken | record.outside))
        record.prev = <uint32_t>0xFFFFFFFF
        record.next = <uint32_t>0xFFFFFFFF
        if record.run == 0:
            return
        record.next = self.split_heads[record.run]
        if record.next != <uint32_t>0xFFFFFFFF:
            self.splits[record.next].prev = split
        self.split_heads[record.run] = split
        self.split_filled |= <uint64_t>1 << record.run

    cdef void leave_list(self, uint32_t split) noexcept nogil:
        cdef SplitPage* record = &self.splits[split]
        if record.run == 0:
            return
        if record.next != <uint32_t>0xFFFFFFFF:
            self.splits[record.next].prev = record.prev
        if record.prev != <uint32_t>0xFFFFFFFF:
            self.splits[record.prev].next = record.next
        else:
            self.split_heads[record.run] = record.next
            if record.next == <uint32_t>0xFFFFFFFF:
                self.split_filled &= ~(<uint64_t>1 << record.run)
        record.run = 0

    cdef void settle_split(self, uint32_t split) noexcept nogil:
        """For a split page in no list: into its list, or back to the free pages when nothing of it is given."""
        cdef SplitPage* record = &self.splits[split]
        cdef uint64_t page = record.page
        if record.taken or record.outside:
            self.place_split(split)
            return
        record.live = False
        record.next = self.splits_free
        self.splits_free = split
        self.added[page >> 6] |= <uint64_t>1 << (page & 63)
        self.free_pages(page, 1)

    cdef int64_t give_lines(self, uint64_t lines) noexcept nogil:
        cdef uint64_t found = self.split_filled & (<uint64_t>0xFFFFFFFFFFFFFFFF << lines)
        cdef uint32_t split
        cdef int64_t page
        cdef uint64_t line
        cdef SplitPage* record
        if found:
            split = self.split_heads[mp_low_bit(found)]
            self.leave_list(split)
        else:
            page = self.give_pages(1, 0)
            if page < 0:
                return GIVE_NO_SPACE
            split = self.new_split(page, 0)
        record = &self.splits[split]
        line = mp_low_bit(mp_runs(~(record.taken | record.outside), <int>lines))
        record.taken |= line_mask(line, lines)
        record.starts |= <uint64_t>1 << line
        self.place_split(split)
        self.given += 1
        self.free_space -= lines * LINE_BYTES
        return (<int64_t>record.page << PAGE_SHIFT) + <int64_t>(line * LINE_BYTES)

    cdef bint free_lines(self, uint64_t offset, uint64_t lines) noexcept nogil:
        cdef uint32_t split = self.split_at(offset >> PAGE_SHIFT)
        cdef uint64_t line = (offset >> 6) & 63, mask
        cdef SplitPage* record
        if split == NO_BLOCK or offset & (LINE_BYTES - 1) or line + lines > LINES:
            return False
        record = &self.splits[split]
        mask = line_mask(line, lines)
        if record.taken & mask != mask or record.starts & mask != <uint64_t>1 << line:
            return False
        if line + lines < LINES and (record.taken & ~record.starts) >> (line + lines) & 1:
            return False  # it is longer
        self.leave_list(split)
        record.taken &= ~mask
        record.starts &= ~mask
        self.given -= 1
        self.free_space += lines * LINE_BYTES
        self.settle_split(split)
        return True

    cdef int claim_lines(self, uint64_t offset, uint64_t lines) noexcept nogil:
        cdef uint64_t page = offset >> PAGE_SHIFT, line = (offset >> 6) & 63, mask, start
        cdef uint32_t split = self.split_at(page), block
        if offset & (LINE_BYTES - 1) or line + lines > LINES:
            return 0
        if split == NO_BLOCK:
            start = mp_bits_at_or_before(&self.block_starts, page)
            block = self.block_starting_at(start) if start < self.pages else <uint32_t>NO_BLOCK
            if block == NO_BLOCK or page >= start + self.blocks[block].pages:
                return 0
            self.take_from(block, page, 1)
            split = self.new_split(page, 0)
        mask = line_mask(line, lines)
        if (self.splits[split].taken | self.splits[split].outside) & mask:
            return 0
        self.leave_list(split)
        self.splits[split].taken |= mask
        self.splits[split].starts |= <uint64_t>1 << line
        self.place_split(split)
        self.given += 1
        self.free_space -= lines * LINE_BYTES
        return 1

    cdef bint is_free_to_add(self, uint64_t offset, uint64_t length) noexcept nogil:
        """Whether no byte of the range was added before."""
        cdef uint64_t end = offset + length, at = offset, page, stop
        cdef uint32_t split
        while at < end:
            page = at >> PAGE_SHIFT
            stop = min(end, (page + 1) << PAGE_SHIFT)
            if self.added[page >> 6] >> (page & 63) & 1:
                return False
            split = self.split_at(page)
            if split != NO_BLOCK and ~self.splits[split].outside & line_mask((at >> 6) & 63, (stop - at) >> 6):
                return False
            at = stop
        return True

    # -- invariants --

    cdef int check_blocks(self) except -1:
        """Each list has the blocks of its class, and each block its tags and its bit."""
        cdef uint32_t number, block, live = 0, classes = CLASSES
        cdef uint64_t listed = 0
        cdef int word
        for number in range(classes):
            block = self.heads[number]
            if (self.filled[number >> 6] >> (number & 63) & 1) != (block != <uint32_t>0xFFFFFFFF):
                raise InternalError(f"class {number} of the free blocks is wrongly marked")
            while block != <uint32_t>0xFFFFFFFF:
                listed += 1
                if listed > self.blocks_used or class_of(self.blocks[block].pages) != number:
                    raise InternalError(f"list {number} of the free blocks is broken")
                if not (self.block_starting_at(self.blocks[block].first) == block
                        and mp_bits_has(&self.block_starts, self.blocks[block].first)
                        and self.block_ending_at(self.blocks[block].first + self.blocks[block].pages) == block):
                    raise InternalError(f"the block at page {self.blocks[block].first} is not found")
                block = self.blocks[block].next
        for block in range(self.blocks_used):
            live += self.blocks[block].pages != 0
        for word in range(CLASS_WORDS):
            if (self.filled_words >> word & 1) != (self.filled[word] != 0):
                raise InternalError("the words of the classes are wrongly marked")
        if live != listed or not mp_bits_consistent(&self.block_starts):
            raise InternalError("the free blocks are miscounted")
        return 0

    cdef int check_pages(self) except -1:
        """Walks the space from end to end: every added page is free, given or split, and the counts are right."""
        cdef uint64_t page = 0, spare, free_space = 0, given = 0
        cdef uint32_t block, split, tag
        while page < self.pages:
            block, split, tag = self.block_starting_at(page), self.split_at(page), self.tags[page]
            if split != NO_BLOCK:
                spare = ~(self.splits[split].taken | self.splits[split].outside)
                if (self.splits[split].taken & self.splits[split].outside
                        or self.splits[split].starts & ~self.splits[split].taken
                        or self.splits[split].run != mp_longest_run(spare)):
                    raise InternalError(f"the split page {page} is broken")
                free_space += <uint64_t>bin(spare).count("1") * LINE_BYTES
                given += <uint64_t>bin(self.splits[split].starts).count("1")
                page += 1
            elif not self.added[page >> 6] >> (page & 63) & 1:
                page += 1
            elif block != NO_BLOCK:
                free_space += <uint64_t>self.blocks[block].pages << PAGE_SHIFT
                page += self.blocks[block].pages
            elif tag & <uint32_t>TAG_KIND == <uint32_t>TAG_GIVEN and tag & TAG_REST:
                given += 1
                page += tag & TAG_REST
            else:
                raise InternalError(f"page {page} is neither free nor given")
        if page > self.pages or free_space != self.free_space or given != self.given:
            raise InternalError("the free space is miscounted")
        return 0
