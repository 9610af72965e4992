"""The dump of an object table at C speed; moonpool.native.table.objects_dump has the format and is the twin.

`load_objects` trusts nothing: every length, number and order is checked against the bytes and against what was read
before. It adds objects as it reads, so a refused dump leaves some: the caller clears the table.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

from moonpool.native.table.object_records cimport (
    NO_RECORD, PIN_HARD, PIN_NONE, Object, cell_at, is_live, object_at,
)
from moonpool.native.table.recency cimport (
    HELD, LRU, MAIN, NO_SEGMENT, QUEUES, SMALL, SOFT, PlaceRecord, SegmentQueues, place_at,
)
from moonpool.native.table.stored_objects cimport NewObject, StoredObjects

import zlib

from moonpool.errors import LimitExceeded, OutOfMemory, UsageError

cdef enum:
    VERSION = 1
    HEADER_BYTES = 40
    OBJECT_BYTES = 57
    DIGEST_AT = 32
    PLACE_BYTES = 16
    QUEUE_BYTES = 16
    ENTRY_BYTES = 5
    CRC_BYTES = 4
    KEY_BYTES_MAX = 1024
    USES = 3

cdef uint64_t SIZE_MAX_OF_OBJECT = <uint64_t>1 << 40
cdef uint64_t SIGNED_TOP = <uint64_t>1 << 63
cdef const char* MAGIC = b"MOONOBJ1"

# Fields of a packed object, as objects_dump.OBJECT has them.
cdef packed struct PackedObject:
    uint64_t object_id
    uint64_t group
    uint64_t soft_pin_end_ms
    uint64_t size
    uint8_t digest[16]
    uint32_t tenant
    uint16_t key_bytes
    uint8_t object_type
    uint8_t pin
    uint8_t places

cdef packed struct PackedPlace:
    uint64_t offset
    uint32_t segment
    uint32_t slot

cdef packed struct PackedQueue:
    uint32_t segment
    uint32_t queue
    uint64_t entries

cdef packed struct PackedEntry:
    uint32_t ordinal
    uint8_t uses

cdef packed struct PackedHeader:
    char magic[8]
    uint32_t version
    uint32_t policy
    uint64_t objects
    uint64_t queues
    uint64_t object_bytes


cdef object refuse(str reason):
    return UsageError(f"this is no dump of an object table: {reason}", field="data", reason=reason)


# -- writing --

cdef list queues_in_order(StoredObjects objects):
    """(segment id, number, queue) of the queues that are not empty."""
    cdef uint32_t number
    cdef int queue
    cdef list found = []
    for number in range(objects.recency.segments_used):
        if objects.recency.segments[number].live:
            for queue in range(QUEUES):
                if objects.recency.segments[number].queues[queue].count:
                    found.append((objects.recency.segments[number].segment_id, queue, number))
    return sorted(found)


cdef uint64_t packed_bytes(StoredObjects objects) noexcept nogil:
    """Bytes of the object part."""
    cdef uint32_t index
    cdef uint64_t total = 0
    cdef Object* record
    for index in range(objects.records.used):
        record = object_at(objects.records, index)
        if record.object_id:
            total += OBJECT_BYTES + record.key_bytes + record.places * <uint64_t>PLACE_BYTES
    return total


cdef uint8_t* write_object(StoredObjects objects, Object* record, uint8_t* out) noexcept nogil:
    cdef PackedObject* packed = <PackedObject*>out
    cdef PackedPlace* row
    cdef PlaceRecord* stands
    cdef uint32_t place = record.place
    packed.object_id = record.object_id
    packed.group = packed.soft_pin_end_ms = 0
    if record.extra != NO_RECORD:
        packed.group = objects.extras.of(record).group
        packed.soft_pin_end_ms = objects.extras.of(record).soft_pin_end_ms
    packed.size = record.size
    memcpy(packed.digest, record.digest, sizeof(record.digest))
    packed.tenant = record.tenant
    packed.key_bytes = record.key_bytes
    packed.object_type = record.object_type
    packed.pin = record.pin
    packed.places = record.places
    out += OBJECT_BYTES
    memcpy(out, cell_at(objects.records, record.key), record.key_bytes)
    out += record.key_bytes
    while place != NO_RECORD:
        stands = place_at(objects.recency, place)
        row = <PackedPlace*>out
        row.offset = stands.offset
        row.segment = objects.recency.segments[stands.segment].segment_id
        row.slot = stands.slot
        out += PLACE_BYTES
        place = stands.next_place
    return out


cdef uint8_t* write_queue(StoredObjects objects, SegmentQueues* segment, int queue, const uint32_t* ordinals,
                          uint8_t* out) noexcept nogil:
    cdef PackedQueue* head = <PackedQueue*>out
    cdef PackedEntry* entry
    cdef uint32_t place = segment.queues[queue].oldest
    head.segment = segment.segment_id
    head.queue = queue
    head.entries = segment.queues[queue].count
    out += QUEUE_BYTES
    while place != NO_RECORD:
        entry = <PackedEntry*>out
        entry.ordinal = ordinals[place_at(objects.recency, place).object]
        entry.uses = place_at(objects.recency, place).uses & <uint8_t>USES
        out += ENTRY_BYTES
        place = place_at(objects.recency, place).newer
    return out


cdef bytes dump_objects(StoredObjects objects):
    """The dump of all objects, in one pass."""
    cdef list queues = queues_in_order(objects)
    cdef uint64_t object_bytes = packed_bytes(objects)
    cdef uint64_t total = (HEADER_BYTES + object_bytes + QUEUE_BYTES * <uint64_t>len(queues) + CRC_BYTES
                           + ENTRY_BYTES * <uint64_t>objects.recency.live)
    cdef bytes dump = PyBytes_FromStringAndSize(NULL, total)
    cdef uint8_t* start = <uint8_t*>PyBytes_AS_STRING(dump)
    cdef uint8_t* out = start + HEADER_BYTES
    cdef PackedHeader* header = <PackedHeader*>start
    cdef bytearray room = bytearray((objects.records.used + 1) * sizeof(uint32_t))
    cdef uint32_t* ordinals = <uint32_t*><char*>room
    cdef uint32_t index, live = 0, checksum
    memcpy(header.magic, MAGIC, 8)
    header.version = VERSION
    header.policy = objects.recency.policy
    header.objects = objects.records.live
    header.queues = len(queues)
    header.object_bytes = object_bytes
    for index in range(objects.records.used):
        if is_live(objects.records, index):
            ordinals[index] = live
            live += 1
            out = write_object(objects, object_at(objects.records, index), out)
    for _, queue, number in queues:
        out = write_queue(objects, &objects.recency.segments[<uint32_t>number], queue, ordinals, out)
    checksum = zlib.crc32(memoryview(dump)[:total - CRC_BYTES])
    memcpy(out, &checksum, CRC_BYTES)
    return dump


# -- reading --

cdef uint64_t read_object(StoredObjects objects, const uint8_t* at, uint64_t left) noexcept nogil:
    """Adds the object at `at`; the bytes it took, 0 where it is none, 1 without memory."""
    cdef const PackedObject* packed = <const PackedObject*>at
    cdef const PackedPlace* row
    cdef NewObject new
    cdef uint64_t hash, whole
    cdef uint32_t index, place, number
    if left < OBJECT_BYTES:
        return 0
    whole = OBJECT_BYTES + packed.key_bytes + packed.places * <uint64_t>PLACE_BYTES
    if (whole > left or packed.object_id == 0 or packed.object_id >= SIGNED_TOP or packed.pin > PIN_HARD
            or not 1 <= packed.key_bytes <= KEY_BYTES_MAX or packed.size > SIZE_MAX_OF_OBJECT
            or packed.soft_pin_end_ms >= SIGNED_TOP):
        return 0
    new.object_id, new.size, new.group = packed.object_id, packed.size, packed.group
    new.soft_pin_end_ms, new.tenant, new.pin = packed.soft_pin_end_ms, packed.tenant, packed.pin
    new.object_type, new.key_bytes = packed.object_type, packed.key_bytes
    new.key = at + OBJECT_BYTES
    new.digest = at + DIGEST_AT
    hash = objects.records.hash_of(new.tenant, new.key, new.key_bytes)
    if objects.records.find(hash, new.tenant, new.key, new.key_bytes) != NO_RECORD:
        return 0
    if not objects.reserve(hash, new.key_bytes, packed.places):
        return 1
    index = objects.add(hash, &new)
    for place in range(packed.places):
        row = <const PackedPlace*>(at + OBJECT_BYTES + packed.key_bytes + place * PLACE_BYTES)
        number = objects.recency.number_of(row.segment)
        if number == NO_SEGMENT or row.offset >= SIGNED_TOP or objects.place_on(index, number) != NO_RECORD:
            return 0
        objects.add_place(index, number, row.offset, row.slot)
    return whole


cdef bint read_entry(StoredObjects objects, const PackedEntry* entry, uint32_t number, uint32_t queue,
                     uint8_t* seen) noexcept nogil:
    """Moves one place to the end of the queue that it was in; False where there is no such place."""
    cdef Object* record
    cdef uint32_t place
    cdef uint8_t kind = 1 if queue == SMALL else <uint8_t>queue   # SMALL and MAIN are one kind
    if entry.ordinal >= objects.records.used or entry.uses > USES:
        return False
    record = object_at(objects.records, entry.ordinal)
    if (record.pin == PIN_HARD) != (queue == HELD) or (record.pin == PIN_NONE and queue == SOFT):
        return False
    if seen[entry.ordinal] == 0:
        seen[entry.ordinal] = kind
        if record.soft and kind == 1:
            objects.extras.release_soft(entry.ordinal)
    place = objects.place_on(entry.ordinal, number)
    if seen[entry.ordinal] != kind or place == NO_RECORD or place_at(objects.recency, place).uses & 0x40:
        return False
    objects.recency.move(place, MAIN if queue == SMALL and objects.recency.policy == LRU else <int>queue)
    place_at(objects.recency, place).uses = entry.uses | 0x40
    return True


cdef int read_queues(StoredObjects objects, const uint8_t* at, const uint8_t* end, uint64_t queues) except -1:
    """Puts every place into its queue and order."""
    cdef bytearray room = bytearray(objects.records.used + 1)
    cdef uint8_t* seen = <uint8_t*><char*>room
    cdef const PackedQueue* head
    cdef uint64_t before = 0, this, entries = 0, i
    cdef uint32_t number
    for _ in range(queues):
        if end - at < QUEUE_BYTES:
            raise refuse("it ends too early")
        head = <const PackedQueue*>at
        at += QUEUE_BYTES
        if head.entries > <uint64_t>(end - at) // ENTRY_BYTES:
            raise refuse("it ends too early")
        this = (<uint64_t>head.segment << 2 | head.queue) + 1
        number = objects.recency.number_of(head.segment)
        if head.queue >= QUEUES or this <= before or (number == NO_SEGMENT and head.entries):
            raise refuse("its queues are out of order")
        for i in range(head.entries):
            if not read_entry(objects, <const PackedEntry*>at + i, number, head.queue, seen):
                raise refuse("a queue has an entry that cannot be")
        before, entries = this, entries + head.entries
        at += head.entries * ENTRY_BYTES
    if at != end:
        raise refuse("it goes on behind its end")
    if entries != objects.recency.live:
        raise refuse("its queues do not hold its places")
    for i in range(objects.recency.used):
        place_at(objects.recency, <uint32_t>i).uses &= USES
    return 0


cdef int load_objects(StoredObjects objects, bytes data) except -1:
    """Reads a dump into a table without objects; UsageError where it is none, LimitExceeded, OutOfMemory."""
    cdef const uint8_t* at = data
    cdef const uint8_t* end = at + len(data) - CRC_BYTES
    cdef const uint8_t* objects_end
    cdef const PackedHeader* header = <const PackedHeader*>at
    cdef uint64_t took
    cdef uint32_t checksum
    if len(data) < HEADER_BYTES + CRC_BYTES or memcmp(at, MAGIC, 8):
        raise refuse("it does not begin as one")
    memcpy(&checksum, end, CRC_BYTES)
    if zlib.crc32(memoryview(data)[:len(data) - CRC_BYTES]) != checksum:
        raise refuse("its checksum is wrong")
    if header.version != VERSION:
        raise refuse(f"its version is {header.version}")
    at += HEADER_BYTES
    if header.objects > <uint64_t>(end - at) // OBJECT_BYTES or header.object_bytes > <uint64_t>(end - at):
        raise refuse("it ends too early")
    if header.objects > objects.records.objects_max:
        raise LimitExceeded("the dump has too many objects", field="objects_max", limit=objects.records.objects_max)
    objects_end = at + header.object_bytes
    for _ in range(header.objects):
        took = read_object(objects, at, objects_end - at)
        if took == 0:
            raise refuse("an object or a place has a field that cannot be, or a key comes twice")
        if took == 1:
            raise OutOfMemory("no memory for the objects of a dump")
        at += took
    if at != objects_end:
        raise refuse("its objects have another size")
    return read_queues(objects, at, end, header.queues)
