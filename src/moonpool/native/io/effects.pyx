"""The common effects of a master at C speed: ADD and RETIRE of extents that nobody else is concerned with.

`moonpool.store.node_core` says what effects mean and does all others; this does the same for the plain ones, straight
from their bytes. It stops before the first effect that is not plain, or not right: who asked then does that one.
"""

cimport cython
from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer, Py_buffer
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy
from moonpool.native.io.rpc_msgpack cimport (
    mp_pack_read_array,
    mp_pack_read_bytes,
    mp_pack_read_uint,
    mp_pack_reader,
    mp_pack_skip,
)

from moonpool.errors import OutOfMemory, ProtocolError, UsageError

cdef extern from *:
    """
    #include <stdint.h>
    static inline uint64_t mp_word_of(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
    static inline void mp_word_to(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
    """
    uint64_t mp_word_of(const uint64_t* p) nogil
    void mp_word_to(uint64_t* p, uint64_t v) nogil

cdef enum:
    ADD = 1
    RETIRE = 2
    ENTRY_BYTES = 64
    HEADER_BYTES = 4096
    KEY_BYTES_MAX = 1024
    DIGEST_BYTES = 16
    CHUNK_BYTES = 65536
    LOG_UNIT = 16
    FLAG_NO_LOG = 1
    REASON_SHIFT = 4

cdef uint64_t DEAD = <uint64_t>1 << 63
cdef uint64_t SIZE_MAX = <uint64_t>1 << 40

cdef struct mp_dir_entry:
    # docs/store/architecture.md, "Segment memory".
    uint64_t offset
    uint64_t size
    uint8_t digest[16]
    uint32_t tenant
    uint16_t key_bytes
    uint8_t type
    uint8_t flags
    uint64_t log_place
    uint32_t chunk_count
    uint32_t reserved
    uint64_t object_id

cdef struct mp_add:
    uint64_t slot
    uint64_t object_id
    uint64_t offset
    uint64_t size
    uint64_t tenant
    uint64_t type
    uint64_t tag
    const uint8_t* key
    const uint8_t* digest
    const uint8_t* chunks
    uint32_t key_bytes
    uint32_t digest_bytes
    uint32_t chunk_bytes


cdef inline uint64_t padded(uint64_t n, uint64_t unit) noexcept nogil:
    return (n + unit - 1) // unit * unit


@cython.final
@cython.no_gc_clear  # else a collection drops the buffer's owner, and the export is never given back
cdef class SegmentEffects:
    """One segment's directory in writable memory, which is held until `release`, and what is known of each slot.

    New objects take their log from a reserve that the owner gives; it is asked for more when it runs short.
    """

    cdef Py_buffer view
    cdef uint64_t* words
    cdef mp_dir_entry* entries
    cdef uint8_t* base
    cdef uint64_t slots
    cdef uint64_t capacity
    cdef uint64_t log_offset
    cdef uint64_t log_bytes
    cdef uint16_t* tags
    cdef uint64_t* added_ms
    cdef uint8_t* busy
    cdef uint64_t reserve_at
    cdef uint64_t reserve_end
    cdef readonly uint32_t number
    cdef readonly long live_delta

    def __cinit__(self, memory, uint64_t slots, uint64_t capacity, uint64_t log_offset, uint64_t log_bytes):
        PyObject_GetBuffer(memory, &self.view, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE)
        cdef uint64_t words_bytes = padded(slots * 8, ENTRY_BYTES)
        if slots == 0 or log_offset != HEADER_BYTES + words_bytes + slots * ENTRY_BYTES or (
            log_offset + log_bytes > <uint64_t>self.view.len or <size_t>self.view.buf % 8
        ):
            raise UsageError("the memory does not hold such a directory, or is not aligned to 8 bytes")
        self.base = <uint8_t*>self.view.buf
        self.words = <uint64_t*>(self.base + HEADER_BYTES)
        self.entries = <mp_dir_entry*>(self.base + HEADER_BYTES + words_bytes)
        self.slots = slots
        self.capacity = capacity
        self.log_offset = log_offset
        self.log_bytes = log_bytes
        self.tags = <uint16_t*>calloc(slots, 2)
        self.added_ms = <uint64_t*>calloc(slots, 8)
        self.busy = <uint8_t*>calloc(slots, 1)
        if self.tags == NULL or self.added_ms == NULL or self.busy == NULL:
            raise OutOfMemory(f"no memory for {slots} slots")

    def __dealloc__(self):
        self.release()
        free(self.tags)
        free(self.added_ms)
        free(self.busy)

    def release(self) -> None:
        """Lets go of the memory: no effect is plain any more."""
        self.slots = 0
        if self.view.buf != NULL:
            PyBuffer_Release(&self.view)
            self.view.buf = NULL

    def join_begins(self) -> None:
        """Forgets whose grants the extents had."""
        # Fresh memory and not zeroed in place: what is never used then costs nothing.
        cdef uint16_t* tags = <uint16_t*>calloc(self.slots + 1, 2)
        cdef uint64_t* added_ms = <uint64_t*>calloc(self.slots + 1, 8)
        if tags == NULL or added_ms == NULL:
            free(tags)
            free(added_ms)
            raise OutOfMemory(f"no memory for {self.slots} slots")
        free(self.tags)
        free(self.added_ms)
        self.tags = tags
        self.added_ms = added_ms

    def set_number(self, uint32_t number) -> None:
        """What the segment is called in lists of what was done."""
        self.number = number

    def mark(self, uint64_t slot, bint busy) -> None:
        """Somebody is concerned with what happens to the slot: its effects are not plain."""
        if slot < self.slots:
            self.busy[slot] = busy

    def note(self, uint64_t slot, uint16_t tag, uint64_t now_ms) -> None:
        """Whose grants the extent had (0: nobody's), and when its object came. IndexError for no slot."""
        if slot >= self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        self.tags[slot] = tag
        self.added_ms[slot] = now_ms

    def noted(self, uint64_t slot) -> tuple:
        """(tag, time) of `note`."""
        if slot >= self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        return self.tags[slot], self.added_ms[slot]

    @property
    def reserve_left(self) -> int:
        """Bytes of the reserve that no object took."""
        return self.reserve_end - self.reserve_at

    def give_reserve(self, uint64_t place, uint64_t size) -> tuple:
        """A new reserve, by its place in the log, in whole units; returns what is left of the one before."""
        if place % LOG_UNIT or place > self.log_bytes or size > self.log_bytes - place:
            raise UsageError("the reserve is not inside the log")
        old = (self.reserve_at, self.reserve_end - self.reserve_at)
        self.reserve_at = place
        self.reserve_end = place + size // LOG_UNIT * LOG_UNIT
        return old

    cdef bint add(self, mp_add* new, uint64_t now_ms, list freed):
        """True when it was plain, and done."""
        cdef uint64_t word, chunks, needed, had = 0, place
        cdef mp_dir_entry* entry
        cdef mp_dir_entry made
        if new.slot >= self.slots or self.busy[new.slot]:
            return False
        word = mp_word_of(&self.words[new.slot])
        if (word and not word & DEAD) or new.object_id <= word & ~DEAD or new.object_id >= DEAD:
            return False
        chunks = (new.size + CHUNK_BYTES - 1) // CHUNK_BYTES
        if chunks <= 1:
            chunks = 0
        if (new.size > SIZE_MAX or new.offset > self.capacity or new.size > self.capacity - new.offset
                or not 0 < new.key_bytes <= KEY_BYTES_MAX or new.digest_bytes != DIGEST_BYTES
                or (chunks and new.chunk_bytes != chunks * 8) or new.tenant > 0xFFFFFFFF or new.type > 255
                or new.tag > 0xFFFF):
            return False
        entry = &self.entries[new.slot]
        needed = padded(padded(new.key_bytes, 8) + chunks * 8, LOG_UNIT)
        if word and not entry.flags & FLAG_NO_LOG:
            had = padded(padded(entry.key_bytes, 8) + <uint64_t>entry.chunk_count * 8, LOG_UNIT)
        if had == needed:
            place = entry.log_place
        elif self.reserve_end - self.reserve_at >= needed:
            place = self.log_offset + self.reserve_at
            self.reserve_at += needed
            if had:
                freed.append((self.number, entry.log_place - self.log_offset, had))
        else:
            return False
        memcpy(self.base + place, new.key, new.key_bytes)
        memcpy(self.base + place + padded(new.key_bytes, 8), new.chunks, chunks * 8)
        made.offset = new.offset
        made.size = new.size
        memcpy(made.digest, new.digest, DIGEST_BYTES)
        made.tenant = <uint32_t>new.tenant
        made.key_bytes = <uint16_t>new.key_bytes
        made.type = <uint8_t>new.type
        made.flags = 0
        made.log_place = place
        made.chunk_count = <uint32_t>chunks
        made.reserved = 0
        made.object_id = new.object_id
        entry[0] = made
        mp_word_to(&self.words[new.slot], new.object_id)
        self.tags[new.slot] = <uint16_t>new.tag
        self.added_ms[new.slot] = now_ms
        self.live_delta += 1
        return True

    cdef bint retire(self, uint64_t slot, uint64_t object_id, uint64_t reason, list retired):
        """True when it was plain, and done."""
        cdef mp_dir_entry* entry
        if slot >= self.slots or self.busy[slot] or reason > 15 or not object_id:
            return False
        if mp_word_of(&self.words[slot]) != object_id:
            return False
        entry = &self.entries[slot]
        entry.flags |= <uint8_t>(reason << REASON_SHIFT)
        mp_word_to(&self.words[slot], DEAD | object_id)
        self.live_delta -= 1
        self.busy[slot] = 1  # it is to be told of: what comes later for the slot is not plain
        retired.append((self.number, slot, entry.offset, entry.size, self.tags[slot], self.added_ms[slot]))
        return True


cdef bint read_add(mp_pack_reader* r, mp_add* new) noexcept nogil:
    return (
        mp_pack_read_uint(r, &new.slot) == 0
        and mp_pack_read_uint(r, &new.offset) == 0
        and mp_pack_read_uint(r, &new.size) == 0
        and mp_pack_read_uint(r, &new.tenant) == 0
        and mp_pack_read_uint(r, &new.object_id) == 0
        and mp_pack_read_bytes(r, &new.key, &new.key_bytes) == 0
        and mp_pack_read_bytes(r, &new.digest, &new.digest_bytes) == 0
        and mp_pack_read_uint(r, &new.type) == 0
        and mp_pack_read_bytes(r, &new.chunks, &new.chunk_bytes) == 0
        and mp_pack_read_uint(r, &new.tag) == 0
    )


def open_effects(bytes packed) -> tuple:
    """(epoch, number of the first, how many, where they begin) of a push's params; ProtocolError for others."""
    cdef const char* data = packed
    cdef mp_pack_reader r
    cdef uint32_t parts = 0, count = 0
    cdef uint64_t epoch = 0, first = 0
    r.at = <const uint8_t*>data
    r.end = r.at + len(packed)
    if (mp_pack_read_array(&r, &parts) or parts != 3 or mp_pack_read_uint(&r, &epoch) or mp_pack_read_uint(&r, &first)
            or mp_pack_read_array(&r, &count)):
        raise ProtocolError("the master's effects are not of their shape")
    return epoch, first, count, <const char*>r.at - data


def skip_values(bytes packed, Py_ssize_t at, uint32_t count) -> int:
    """Where the value after so many begins; ProtocolError when they are not all there."""
    cdef const char* data = packed
    cdef mp_pack_reader r
    cdef uint32_t _
    if not 0 <= at <= len(packed):
        raise UsageError("there is no such place", offset=at)
    r.at = <const uint8_t*>data + at
    r.end = <const uint8_t*>data + len(packed)
    for _ in range(count):
        if mp_pack_skip(&r):
            raise ProtocolError("the master's effects end too soon")
    return <const char*>r.at - data


def apply_plain(bytes packed, Py_ssize_t at, uint32_t count, dict segments, uint64_t now_ms, list retired,
                list freed) -> tuple:
    """Does the plain ones among `count` effects from `at` on, up to the first that is not: (how many, where it begins).

    `segments` maps ids to `SegmentEffects`. What was retired is marked busy and appended to `retired` as (segment's
    number, slot, offset, size, tag, time of its ADD); log blocks that became free are appended to `freed` as (segment's
    number, place in the log, size).
    """
    cdef const char* data = packed
    cdef mp_pack_reader r
    cdef const uint8_t* start
    cdef uint32_t done = 0, parts = 0
    cdef uint64_t kind = 0, segment_id = 0, known_id = <uint64_t>-1, slot = 0, object_id = 0, reason = 0
    cdef SegmentEffects segment = None
    cdef mp_add new
    cdef bint plain
    if not 0 <= at <= len(packed):
        raise UsageError("there is no such place", offset=at)
    start = <const uint8_t*>data + at
    r.at = start
    r.end = <const uint8_t*>data + len(packed)
    while done < count:
        start = r.at
        if mp_pack_read_array(&r, &parts) or mp_pack_read_uint(&r, &kind) or mp_pack_read_uint(&r, &segment_id):
            break
        if segment_id != known_id:
            segment = segments.get(segment_id)
            known_id = segment_id
        if segment is None:
            break
        plain = False
        if kind == ADD and parts == 12:
            plain = read_add(&r, &new) and segment.add(&new, now_ms, freed)
        elif kind == RETIRE and parts == 5:
            plain = (
                mp_pack_read_uint(&r, &slot) == 0
                and mp_pack_read_uint(&r, &object_id) == 0
                and mp_pack_read_uint(&r, &reason) == 0
                and segment.retire(slot, object_id, reason, retired)
            )
        if not plain:
            break
        done += 1
        start = r.at
    return done, <const char*>start - data
