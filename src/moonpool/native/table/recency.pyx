"""The recency queues of each segment: 32 bytes for each place of an object, linked both ways.

Theory of operation: see moonpool.native.table.queues_reference, the plain twin, which has the same queues and
policies. A place is the entry itself: its links are its neighbours in one queue of one segment. A search walks the
queues with a cursor each; an entry that is put back goes to the recent end, and a cursor that has run out of its queue
takes up what is put back, so that a search sees entries in the same order as the twin.

Ghosts are kept by the 64-bit hash of the object: one of another object with the same hash is taken for its own, once in
2^64. Segments are numbered densely; what is outside of this module uses these numbers.
"""

cimport cython
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree, PyMem_RawRealloc
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memset

from moonpool.native.table.extents cimport rounded
from moonpool.native.table.id_map cimport mp_id_get, mp_id_map_release, mp_id_remove, mp_id_reserve, mp_id_set
from moonpool.native.table.object_records cimport is_live, object_at, require

from moonpool.errors import InternalError, LimitExceeded, OutOfMemory, UsageError

cdef extern from "ghosts.h" nogil:
    void mp_ghosts_release(mp_ghosts* all)
    size_t mp_ghosts_memory(const mp_ghosts* all)
    bint mp_ghosts_take(mp_ghosts* all, uint64_t hash)
    void mp_ghosts_add(mp_ghosts* all, uint64_t hash, uint64_t bytes, uint32_t count_max, uint64_t bytes_max)

cdef enum:
    USES = 3                  # the bits of PlaceRecord.uses that count, and the most they count
    CHOSEN_USE = 0x80         # named as a victim: leaves a ghost if it goes
    USES_TO_MOVE = 0            # as in queues_reference.py, which says why
    SMALL_SHARE = 2
    MAIN_ROUNDS = 4


@cython.final
cdef class Recency:
    """The queues of `records`, under `policy` (LRU or S3FIFO), with at most `ghosts_max` ghosts a segment."""

    def __cinit__(self, ObjectRecords records not None, int policy, ghosts_max, uint64_t seed):
        if not 1 <= ghosts_max <= 1 << 24:
            raise UsageError("ghosts_max must be from 1 to 2^24", field="ghosts_max", value=str(ghosts_max))
        self.records = records
        self.policy = policy
        self.ghosts_max = ghosts_max
        self.free = NO_RECORD
        self.segments_free = self.walked = NO_SEGMENT
        self.numbers.seed = seed

    def __dealloc__(self):
        cdef uint32_t number
        self.clear()
        for number in range(self.segments_used):
            mp_ghosts_release(&self.segments[number].ghosts)
        PyMem_RawFree(self.segments)
        mp_id_map_release(&self.numbers)

    cdef void clear(self) noexcept nogil:
        """Forgets all places and ghosts, not the segments."""
        cdef uint32_t at
        for at in range(self.chunk_count):
            PyMem_RawFree(self.chunks[at])
        PyMem_RawFree(self.chunks)
        self.chunks = NULL
        self.chunk_count = self.chunk_room = self.used = self.live = 0
        self.free = NO_RECORD
        for at in range(self.segments_used):
            mp_ghosts_release(&self.segments[at].ghosts)
            reset_queues(&self.segments[at])

    # -- segments --

    cdef uint32_t number_of(self, uint64_t segment_id) noexcept nogil:
        """The number of a segment, or NO_SEGMENT."""
        cdef uint64_t found = mp_id_get(&self.numbers, segment_id)
        return <uint32_t>(found - 1) if found else <uint32_t>NO_SEGMENT

    cdef int add_segment(self, uint32_t segment_id, uint64_t capacity_bytes) except -1:
        cdef uint32_t number = self.segments_free, room
        cdef void* grown
        if self.number_of(segment_id) != NO_SEGMENT:
            raise InternalError(f"segment {segment_id} cannot be added")
        if number == NO_SEGMENT and self.segments_used == SEGMENTS_MAX:
            raise LimitExceeded("there are too many segments", field="segments", limit=SEGMENTS_MAX)
        if not mp_id_reserve(&self.numbers, 1):
            raise OutOfMemory("no memory for a segment's queues")
        if number != NO_SEGMENT:
            self.segments_free = self.segments[number].next_free
        else:
            if self.segments_used == self.segments_room:
                room = self.segments_room * 2 + 4
                grown = PyMem_RawRealloc(self.segments, room * sizeof(SegmentQueues))
                if grown == NULL:
                    raise OutOfMemory("no memory for a segment's queues")
                self.segments = <SegmentQueues*>grown
                self.segments_room = room
            number = self.segments_used
            self.segments_used += 1
        memset(&self.segments[number], 0, sizeof(SegmentQueues))
        mp_ghosts_release(&self.segments[number].ghosts)
        reset_queues(&self.segments[number])
        self.segments[number].capacity_bytes = capacity_bytes
        self.segments[number].segment_id = segment_id
        self.segments[number].live = True
        mp_id_set(&self.numbers, segment_id, <uint64_t>number + 1)
        return 0

    cdef void drop_segment(self, uint32_t number) noexcept nogil:
        """Forgets a segment that has no places."""
        mp_ghosts_release(&self.segments[number].ghosts)
        mp_id_remove(&self.numbers, self.segments[number].segment_id)
        self.segments[number].live = False
        self.segments[number].next_free = self.segments_free
        self.segments_free = number

    cdef uint64_t bytes_on(self, uint32_t number) noexcept nogil:
        cdef uint64_t total = 0
        cdef int queue
        for queue in range(QUEUES):
            total += self.segments[number].queues[queue].bytes
        return total

    # -- places --

    cdef bint reserve(self, uint32_t places) noexcept nogil:
        """Makes room for so many places (at most 255) more, not counting free ones; False without memory."""
        cdef void* grown
        while self.used + places > self.chunk_count << RECORD_SHIFT:
            if self.chunk_count == self.chunk_room:
                grown = PyMem_RawRealloc(self.chunks, (self.chunk_room * 2 + 16) * sizeof(PlaceRecord*))
                if grown == NULL:
                    return False
                self.chunks = <PlaceRecord**>grown
                self.chunk_room = self.chunk_room * 2 + 16
            self.chunks[self.chunk_count] = <PlaceRecord*>PyMem_RawCalloc(1 << RECORD_SHIFT, sizeof(PlaceRecord))
            if self.chunks[self.chunk_count] == NULL:
                return False
            self.chunk_count += 1
        return True

    cdef uint32_t link(self, uint32_t index, uint32_t number, int queue, uint64_t hash) noexcept nogil:
        """A new place of an object, after `reserve`, at the recent end of SOFT or HELD, or (-1) where new ones go."""
        cdef uint32_t place = self.free
        cdef PlaceRecord* record
        if queue < 0:
            queue = MAIN
            if self.policy == S3FIFO and not mp_ghosts_take(&self.segments[number].ghosts, hash):
                queue = SMALL
        if place != NO_RECORD:
            self.free = place_at(self, place).next_place
        else:
            place = self.used
            self.used += 1
        record = place_at(self, place)
        memset(record, 0, sizeof(PlaceRecord))
        record.object = index
        record.segment = <uint16_t>number
        record.next_place = NO_RECORD
        self.append(place, queue)
        self.live += 1
        return place

    cdef void unlink(self, uint32_t place, uint64_t hash) noexcept nogil:
        """Frees a place; leaves a ghost when it goes because it was not used in SMALL."""
        cdef PlaceRecord* record = place_at(self, place)
        cdef SegmentQueues* segment = &self.segments[record.segment]
        self.take_out(place)
        if self.policy == S3FIFO and record.queue == SMALL and record.uses & CHOSEN_USE:
            mp_ghosts_add(&segment.ghosts, hash, rounded(object_at(self.records, record.object).size), self.ghosts_max,
                          segment.capacity_bytes)
        record.object = NO_RECORD
        record.next_place = self.free
        self.free = place
        self.live -= 1

    cdef void move(self, uint32_t place, int queue) noexcept nogil:
        """To the recent end of another queue, or of its own."""
        self.take_out(place)
        place_at(self, place).uses &= USES
        self.append(place, queue)

    cdef void touch(self, uint32_t place) noexcept nogil:
        """A use, as the policy counts it."""
        cdef PlaceRecord* record = place_at(self, place)
        cdef uint8_t chosen = record.uses & <uint8_t>CHOSEN_USE
        if record.queue == SOFT or (record.queue == MAIN and self.policy == LRU):
            if record.newer != NO_RECORD:
                self.take_out(place)
                self.append(place, record.queue)
        elif record.queue != HELD and record.uses & USES < USES:
            record.uses = chosen | ((record.uses & USES) + 1)

    cdef void append(self, uint32_t place, int queue) noexcept nogil:
        cdef PlaceRecord* record = place_at(self, place)
        cdef Queue* ends = &self.segments[record.segment].queues[queue]
        record.queue = <uint8_t>queue
        record.older = ends.newest
        record.newer = NO_RECORD
        if ends.newest != NO_RECORD:
            place_at(self, ends.newest).newer = place
        else:
            ends.oldest = place
        ends.newest = place
        ends.count += 1
        ends.bytes += rounded(object_at(self.records, record.object).size)
        if self.walked == record.segment and self.cursors[queue] == NO_RECORD:
            self.cursors[queue] = place

    cdef void take_out(self, uint32_t place) noexcept nogil:
        cdef PlaceRecord* record = place_at(self, place)
        cdef Queue* ends = &self.segments[record.segment].queues[record.queue]
        if record.older != NO_RECORD:
            place_at(self, record.older).newer = record.newer
        else:
            ends.oldest = record.newer
        if record.newer != NO_RECORD:
            place_at(self, record.newer).older = record.older
        else:
            ends.newest = record.older
        ends.count -= 1
        ends.bytes -= rounded(object_at(self.records, record.object).size)

    # -- a search: only put_back and gets_another_round may change queues between begin and end --

    cdef void begin_walk(self, uint32_t number) noexcept nogil:
        cdef SegmentQueues* segment = &self.segments[number]
        cdef int queue
        self.walked = number
        for queue in range(QUEUES):
            self.cursors[queue] = segment.queues[queue].oldest
            self.looks[queue] = segment.queues[queue].count
        if self.policy == S3FIFO:
            self.looks[MAIN] *= MAIN_ROUNDS
        self.looks[HELD] = 0
        self.small_bytes = segment.queues[SMALL].bytes

    cdef void end_walk(self) noexcept nogil:
        self.walked = NO_SEGMENT

    cdef uint32_t next_entry(self, bint soft) noexcept nogil:
        """The next place to look at, or NO_RECORD."""
        cdef bint small = self.cursors[SMALL] != NO_RECORD and self.looks[SMALL] > 0
        cdef bint main = self.cursors[MAIN] != NO_RECORD and self.looks[MAIN] > 0
        cdef uint32_t place
        if small and (not main or self.small_bytes > self.segments[self.walked].capacity_bytes // SMALL_SHARE):
            place = self.pop(SMALL)
            self.small_bytes -= rounded(object_at(self.records, place_at(self, place).object).size)
            return place
        if main:
            return self.pop(MAIN)
        if soft and self.cursors[SOFT] != NO_RECORD and self.looks[SOFT] > 0:
            return self.pop(SOFT)
        return NO_RECORD

    cdef uint32_t pop(self, int queue) noexcept nogil:
        cdef uint32_t place = self.cursors[queue]
        self.cursors[queue] = place_at(self, place).newer
        self.looks[queue] -= 1
        return place

    cdef bint gets_another_round(self, uint32_t place) noexcept nogil:
        """Whether its uses save a place for now; then it has been moved."""
        cdef PlaceRecord* record = place_at(self, place)
        cdef uint8_t uses = record.uses & <uint8_t>USES
        if self.policy == LRU or record.queue == SOFT:
            return False
        if record.queue == SMALL:
            if uses <= USES_TO_MOVE:
                return False
            uses = 0
        elif uses == 0:
            return False
        else:
            uses -= 1
        record.uses = uses
        self.move(place, MAIN)
        return True

    cdef uint64_t memory_bytes(self) noexcept nogil:
        cdef uint64_t total = <uint64_t>self.used * sizeof(PlaceRecord) + self.chunk_room * sizeof(void*)
        cdef uint32_t number
        for number in range(self.segments_used):
            total += mp_ghosts_memory(&self.segments[number].ghosts)
        return total + self.segments_room * sizeof(SegmentQueues)

    cdef int check(self) except -1:
        """Asserts that every live place is in one queue, linked both ways, and that counts and bytes are right."""
        cdef uint32_t number, place, before, listed = 0, freed = 0
        cdef uint64_t count, size
        cdef int queue
        cdef Queue* ends
        for number in range(self.segments_used):
            if not self.segments[number].live:
                continue
            require(self.number_of(self.segments[number].segment_id) == number, "a segment has lost its number")
            for queue in range(QUEUES):
                ends = &self.segments[number].queues[queue]
                place, before, count, size = ends.oldest, NO_RECORD, 0, 0
                while place != NO_RECORD:
                    require(place < self.used and count < ends.count, "a queue is broken")
                    require(place_at(self, place).older == before and place_at(self, place).queue == queue
                            and place_at(self, place).segment == number, "a queue is linked wrongly")
                    require(is_live(self.records, place_at(self, place).object), "a place has no object")
                    size += rounded(object_at(self.records, place_at(self, place).object).size)
                    before, place, count = place, place_at(self, place).newer, count + 1
                require(before == ends.newest and count == ends.count and size == ends.bytes, "a queue is miscounted")
                listed += <uint32_t>count
        place = self.free
        while place != NO_RECORD:
            require(place < self.used and freed < self.used, "the free places are broken")
            freed += 1
            place = place_at(self, place).next_place
        require(listed == self.live and listed + freed == self.used, "a place is neither linked nor free")
        return 0


cdef void reset_queues(SegmentQueues* segment) noexcept nogil:
    cdef int queue
    memset(segment.queues, 0, sizeof(segment.queues))
    for queue in range(QUEUES):
        segment.queues[queue].oldest = segment.queues[queue].newest = NO_RECORD
