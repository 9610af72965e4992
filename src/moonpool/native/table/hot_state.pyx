"""What the hot methods work on, and what keeps it in step with Python.

The tables are the leader's own, so both sides see every change at once. The numbers that a leader gives (facts,
objects, puts, the cursor of its schedule) are in one HotCounters, which Python uses too. Everything else that the
leader knows (which segments are seen, where puts go, grant keys, limits) is copied in by setters at the end of each of
its turns; the loop serves hot methods only between turns.

What hot methods make, facts and effects, waits here as bytes until the leader's next turn takes it.
"""

cimport cython
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree, PyMem_RawRealloc
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from moonpool.native.io.rpc_msgpack cimport mp_pack_read_array, mp_pack_read_bytes, mp_pack_reader
from moonpool.native.table.directory_slots cimport NO_FREE_SLOT, DirectorySlots
from moonpool.native.table.extents cimport Extents
from moonpool.native.table.object_records cimport NO_RECORD, Object, cell_at, object_at
from moonpool.native.table.open_puts cimport OpenPuts
from moonpool.native.table.recency cimport PlaceRecord, place_at
from moonpool.native.table.stored_objects cimport StoredObjects

from moonpool.errors import InternalError, OutOfMemory, UsageError

cdef extern from "byte_log.h" nogil:
    void mp_log_release(mp_byte_log* log)

cdef extern from "mixing.h" nogil:
    void mp_prefetch(const void* p)

cdef enum:
    KEY_BYTES_MAX = 1024
    PUT_KEY_BYTES = 16
    SEQUENCE_BITS = 40
    AHEAD_OF_BUCKET = 16      # keys between the first prefetch for a key and its turn
    AHEAD_OF_RECORD = 10
    AHEAD_OF_KEY = 5

cdef uint64_t EPOCH_MAX = (1 << 23) - 1


cdef int64_t call_give_extent(Extents extents, uint64_t size) noexcept nogil:
    return extents.give(size)


cdef bint call_free_extent(Extents extents, uint64_t offset, uint64_t size) noexcept nogil:
    return extents.give_back(offset, size)


cdef uint32_t call_give_slot(DirectorySlots slots) noexcept nogil:
    return slots.give()


cdef bint call_free_slot(DirectorySlots slots, uint64_t slot) noexcept nogil:
    return slots.give_back(slot)


cdef give_extent_function GIVE_EXTENT = <give_extent_function><void*>call_give_extent
cdef free_extent_function FREE_EXTENT = <free_extent_function><void*>call_free_extent
cdef give_slot_function GIVE_SLOT = <give_slot_function><void*>call_give_slot
cdef free_slot_function FREE_SLOT = <free_slot_function><void*>call_free_slot


@cython.final
cdef class HotCounters:
    """What was given last of each number; the leader's own counters while it has a native core.

    `put_key` (16 bytes) is the key of the cipher that makes put ids from a count (Speck64/128, Beaulieu et al.,
    "The SIMON and SPECK Families of Lightweight Block Ciphers", section 4).
    """

    def __cinit__(self, epoch, last_fact, bytes put_key not None):
        cdef const uint8_t* key = put_key
        cdef uint32_t words[4]
        cdef uint32_t left[SPECK_ROUNDS + 3]
        cdef uint32_t i
        if len(put_key) != PUT_KEY_BYTES:
            raise UsageError("the key of put ids has 16 bytes", field="put_key")
        self.epoch = epoch
        self.last_fact = last_fact
        self.put_key = put_key
        for i in range(4):
            words[i] = key[4 * i] | key[4 * i + 1] << 8 | key[4 * i + 2] << 16 | <uint32_t>key[4 * i + 3] << 24
        self.rounds[0] = words[0]
        for i in range(3):
            left[i] = words[i + 1]
        for i in range(<uint32_t>SPECK_ROUNDS - 1):
            left[i + 3] = (self.rounds[i] + (left[i] >> 8 | left[i] << 24)) ^ i
            self.rounds[i + 1] = (self.rounds[i] << 3 | self.rounds[i] >> 29) ^ left[i + 3]

    def next_object_id(self) -> int:
        """The id of one more object."""
        self.last_object += 1
        if self.last_object >> SEQUENCE_BITS:
            raise InternalError("this epoch has no object id left; a new leader has")
        return self.epoch << SEQUENCE_BITS | self.last_object

    def next_put_id(self) -> int:
        """An id that no other put of this epoch has, never 0."""
        return self.make_put_id()

    def raise_epoch(self, epoch) -> None:
        """A new epoch: objects count from 1 again."""
        if not self.epoch < epoch <= EPOCH_MAX:
            raise InternalError(f"epoch {epoch} cannot follow epoch {self.epoch}")
        self.epoch = epoch
        self.last_object = 0

    cdef uint64_t make_put_id(self) noexcept nogil:
        cdef uint32_t high, low
        cdef int i
        while True:
            self.last_put += 1
            high = <uint32_t>(self.last_put >> 32)
            low = <uint32_t>self.last_put
            for i in range(SPECK_ROUNDS):
                high = ((high >> 8 | high << 24) + low) ^ self.rounds[i]
                low = (low << 3 | low >> 29) ^ high
            if high | low:
                return <uint64_t>high << 32 | low


@cython.final
cdef class HotState:
    """State of one native core; limits are set by `HotCore`."""

    def __cinit__(self, StoredObjects objects not None, OpenPuts puts not None, HotCounters counters not None,
                  uint64_t batch_keys_max):
        self.objects = objects
        self.puts = puts
        self.counters = counters
        self.batch_keys_max = batch_keys_max
        self.numbers = {}
        self.kept = {}
        self.quota_tenants = set()
        self.keys = <HotKey*>PyMem_RawCalloc(batch_keys_max, sizeof(HotKey))
        if self.keys == NULL:
            raise OutOfMemory("no memory for the keys of requests")

    def __dealloc__(self):
        PyMem_RawFree(self.segments)
        PyMem_RawFree(self.schedule)
        PyMem_RawFree(self.quotas)
        PyMem_RawFree(self.keys)
        mp_log_release(&self.facts)
        mp_log_release(&self.effects)

    cdef bint has_quota(self, uint32_t tenant) noexcept nogil:
        cdef uint32_t at
        for at in range(self.quota_count):
            if self.quotas[at] == tenant:
                return True
        return False

    cdef bint facts_fit(self, uint64_t more) noexcept nogil:
        """Whether so many facts may be made now."""
        cdef uint64_t waiting = self.counters.last_fact + (more if more else 1) - self.durable
        return (self.may_change and waiting <= self.facts_waiting_max
                and self.facts.length + self.effects.length <= self.waiting_bytes_max)

    cdef HotSegment* segment(self, uint32_t segment_id) noexcept nogil:
        """A segment by its id, or NULL."""
        return self.segment_numbered(self.objects.recency.number_of(segment_id))

    cdef HotSegment* segment_numbered(self, uint32_t number) noexcept nogil:
        """A segment by the number that the table of objects gives it, or NULL."""
        if number >= self.segments_room or self.segments[number].extents == NULL:
            return NULL
        return &self.segments[number]

    cdef int64_t give_extent(self, HotSegment* segment, uint64_t size, uint32_t* slot) noexcept nogil:
        """The offset of a new extent with a slot, or below 0."""
        cdef int64_t offset = GIVE_EXTENT(segment.extents, size)
        if offset < 0:
            return offset
        slot[0] = GIVE_SLOT(segment.slots)
        if slot[0] == NO_FREE_SLOT:
            FREE_EXTENT(segment.extents, <uint64_t>offset, size)
            return -1
        return offset

    cdef void take_back(self, HotSegment* segment, uint64_t offset, uint64_t size, uint32_t slot) noexcept nogil:
        """Frees an extent; one below an unresolved floor becomes free with the rest."""
        if segment.resolved or offset >= segment.floor:
            FREE_EXTENT(segment.extents, offset, size)
        if segment.resolved or slot >= segment.slot_floor:
            FREE_SLOT(segment.slots, slot)

    cdef int grow_segments(self, uint32_t number) except -1:
        """Room for a segment with this number."""
        cdef uint32_t room = number + number // 2 + 8
        cdef HotSegment* grown
        if number < self.segments_room:
            return 0
        grown = <HotSegment*>PyMem_RawRealloc(self.segments, room * sizeof(HotSegment))
        if grown == NULL:
            raise OutOfMemory("no memory for the segments of a native core")
        memset(grown + self.segments_room, 0, (room - self.segments_room) * sizeof(HotSegment))
        self.segments = grown
        self.segments_room = room
        return 0


cdef inline bint is_plain_text(const uint8_t* head, const uint8_t* text, uint32_t n) noexcept nogil:
    """Whether a key's bytes are the same as text and as bytes: it came as bytes, or is ASCII."""
    cdef uint32_t i
    if 0xC4 <= head[0] <= 0xC6:
        return True
    for i in range(n):
        if text[i] >= 0x80:
            return False
    return True


cdef bint read_keys(HotState state, const uint8_t** at, const uint8_t* end, uint32_t tenant,
                    uint32_t* count) noexcept nogil:
    """Reads an array of keys into state.keys, with their hashes; False where Python should look at it."""
    cdef mp_pack_reader reader
    cdef const uint8_t* head
    cdef HotKey* key
    cdef uint32_t i
    reader.at = at[0]
    reader.end = end
    if mp_pack_read_array(&reader, count) or count[0] > state.batch_keys_max:
        return False
    for i in range(count[0]):
        key = &state.keys[i]
        head = reader.at
        if mp_pack_read_bytes(&reader, &key.text, &key.key_bytes):
            return False
        if not 1 <= key.key_bytes <= KEY_BYTES_MAX or not is_plain_text(head, key.text, key.key_bytes):
            return False
        key.hash = state.objects.records.hash_of(tenant, key.text, key.key_bytes)
        if i < AHEAD_OF_BUCKET:
            state.objects.records.look_ahead(key.hash)
    at[0] = reader.at
    return True


cdef void look_ahead(HotState state, uint32_t at, uint32_t count) noexcept nogil:
    """Fetches what the keys behind `at` will need: a bucket, nearer a record, nearer still its key and place."""
    cdef uint32_t index
    cdef Object* record
    if at + AHEAD_OF_BUCKET < count:
        state.objects.records.look_ahead(state.keys[at + AHEAD_OF_BUCKET].hash)
    if at + AHEAD_OF_RECORD < count:
        index = state.objects.records.guess(state.keys[at + AHEAD_OF_RECORD].hash)
        if index != NO_RECORD:
            mp_prefetch(object_at(state.objects.records, index))
    if at + AHEAD_OF_KEY < count:
        index = state.objects.records.guess(state.keys[at + AHEAD_OF_KEY].hash)
        if index != NO_RECORD:
            record = object_at(state.objects.records, index)
            mp_prefetch(cell_at(state.objects.records, record.key))
            if record.place != NO_RECORD:
                mp_prefetch(place_at(state.objects.recency, record.place))


cdef void look_ahead_to_queue(HotState state, uint32_t at, uint32_t count) noexcept nogil:
    """Fetches the neighbours, in their queues, of the objects found that are about to be touched."""
    cdef uint32_t index
    cdef PlaceRecord* place
    if at + AHEAD_OF_KEY < count:
        index = state.keys[at + AHEAD_OF_KEY].index
        if index != NO_RECORD and object_at(state.objects.records, index).place != NO_RECORD:
            place = place_at(state.objects.recency, object_at(state.objects.records, index).place)
            if place.older != NO_RECORD:
                mp_prefetch(place_at(state.objects.recency, place.older))
            if place.newer != NO_RECORD:
                mp_prefetch(place_at(state.objects.recency, place.newer))
