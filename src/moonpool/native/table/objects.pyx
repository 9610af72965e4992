"""Complete objects by (tenant, key), with the recency queues of each segment: the methods that Python calls.

What they do is in `stored_objects`, how victims are found in `find_victims` below; formats and policies are described
in the modules underneath. The plain twin is moonpool.native.table.objects_reference: same results, same errors, same
order, same dumps. A million objects with keys of 26 bytes and one place take about 150 bytes each.

Thread rule: the caller's; the master's loop thread owns it.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport qsort
from libc.string cimport memcmp

from moonpool.native.table.extents cimport rounded
from moonpool.native.table.id_map cimport mp_id_get
from moonpool.native.table.object_extras cimport Group
from moonpool.native.table.object_image cimport dump_objects, load_objects
from moonpool.native.table.object_records cimport NO_RECORD, PIN_HARD, Object, cell_at, is_live, object_at, require
from moonpool.native.table.recency cimport (
    HELD, NO_SEGMENT, QUEUES, SOFT, PlaceRecord, Recency, place_at,
)
from moonpool.native.table.stored_objects cimport NewObject, StoredObjects

from moonpool.errors import InternalError, LimitExceeded, OutOfMemory, UsageError
from moonpool.native.table.stored import Place, StoredObject, check_object, check_place

cdef enum:
    ENDED_PINS_MAX = 64       # soft pins that end in one search for victims
    LOOKS_BEYOND = 64         # entries a search looks at beyond four for each victim
    CHOSEN_USE = 0x80         # see recency
    PLACES_MAX = 255

POLICIES = ("lru", "s3fifo")

cdef object ID_MAX = (1 << 32) - 1
cdef object TIME_MAX = (1 << 63) - 1


@cython.final
cdef class ObjectTable:
    """`policy` is "lru" or "s3fifo"; `objects_max` and `ghosts_max` (a segment) are bounds, `seed` keys the hashes."""

    def __cinit__(self, policy="lru", *, objects_max=1 << 26, ghosts_max=1 << 16, uint64_t seed=0):
        if policy not in POLICIES:
            raise UsageError(f"there is no policy {policy!r}; there are {', '.join(POLICIES)}", field="policy")
        self.stored = StoredObjects(POLICIES.index(policy), objects_max, ghosts_max, seed)

    def __len__(self):
        return self.stored.records.live

    def add_segment(self, segment, capacity_bytes) -> None:
        """Makes room for a segment's queues; `capacity_bytes` sizes them."""
        if not (0 <= segment <= ID_MAX and capacity_bytes >= 0):
            raise InternalError(f"segment {segment} cannot be added")
        self.stored.recency.add_segment(segment, capacity_bytes)

    def drop_segment(self, segment) -> None:
        """Forgets a segment without places; InternalError when it still has some."""
        cdef uint32_t number = self.number_of(segment)
        cdef int queue
        for queue in range(QUEUES):
            if self.stored.recency.segments[number].queues[queue].count:
                raise InternalError(f"segment {segment} still has places")
        self.stored.recency.drop_segment(number)

    def find(self, uint32_t tenant, bytes key not None) -> int:
        """The index of the object, or -1."""
        cdef const uint8_t* text = key
        cdef size_t size = len(key)
        cdef uint64_t hash = self.stored.records.hash_of(tenant, text, size)
        cdef uint32_t index = self.stored.records.find(hash, tenant, text, size)
        return -1 if index == NO_RECORD else index

    def add(self, stored) -> int:
        """Adds an object as the most recent of its segments.

        InternalError when its key is taken, a field cannot be held or a segment is unknown; LimitExceeded when full.
        """
        cdef NewObject new
        cdef uint64_t hash
        cdef uint32_t index
        cdef bytes key = stored.key, digest = stored.digest
        check_object(stored)
        for place in stored.places:
            check_place(place)
            self.number_of(place.segment)
        new.object_id, new.size, new.group = stored.object_id, stored.size, stored.group
        new.soft_pin_end_ms, new.tenant = stored.soft_pin_end_ms, stored.tenant
        new.object_type, new.pin = stored.object_type, stored.pin
        new.key, new.key_bytes, new.digest = key, len(key), digest
        hash = self.stored.records.hash_of(new.tenant, new.key, new.key_bytes)
        if self.stored.records.find(hash, new.tenant, new.key, new.key_bytes) != NO_RECORD:
            raise InternalError(f"the key of object {stored.object_id} is taken")
        if self.stored.is_full():
            raise LimitExceeded("the table of objects is full", field="objects_max",
                                limit=self.stored.records.objects_max)
        if not self.stored.reserve(hash, new.key_bytes, len(stored.places)):
            raise OutOfMemory("no memory for an object")
        index = self.stored.add(hash, &new)
        for place in stored.places:
            self.stored.add_place(index, self.number_of(place.segment), place.offset, place.slot)
        return index

    def at(self, index):
        """The object; InternalError where there is none."""
        return self.value_of(self.record(index))

    def object_id(self, index) -> int:
        """Its object id."""
        return self.record(index).object_id

    def drop(self, index):
        """Takes the object and all of its places out; returns it as it was."""
        stored = self.value_of(self.record(index))
        self.stored.drop(index)
        return stored

    def add_place(self, index, place) -> None:
        """One more place; InternalError when the object has one on that segment."""
        cdef Object* record = self.record(index)
        cdef uint32_t number
        check_place(place)
        number = self.number_of(place.segment)
        if self.stored.place_on(index, number) != NO_RECORD or record.places >= PLACES_MAX:
            raise InternalError(f"object {record.object_id} cannot have one more place on {place.segment}")
        if not self.stored.recency.reserve(1):
            raise OutOfMemory("no memory for a place")
        self.stored.add_place(index, number, place.offset, place.slot)

    def drop_place(self, index, segment):
        """Takes one place out and returns it; the object stays, with no place if that was its last."""
        cdef Object* record = self.record(index)
        cdef uint32_t found = NO_RECORD
        if 0 <= segment <= ID_MAX:
            found = self.stored.place_on(index, self.stored.recency.number_of(segment))
        if found == NO_RECORD:
            raise InternalError(f"object {record.object_id} has no place on segment {segment}")
        place = place_value(self.stored.recency, found)
        self.stored.drop_place(index, found)
        return place

    def set_pin(self, index, pin, soft_pin_end_ms) -> None:
        """0 none, 1 soft until then, 2 hard."""
        cdef Object* record = self.record(index)
        if not (0 <= pin <= PIN_HARD and 0 <= soft_pin_end_ms <= TIME_MAX):
            raise InternalError(f"object {record.object_id} has a field that no table can hold")
        if not self.stored.set_pin(index, pin, soft_pin_end_ms):
            raise OutOfMemory("no memory for a pin")

    def lease_until(self, index) -> int:
        """The end of the longest lease, or 0."""
        return self.record(index).lease_until

    def extend_lease(self, index, until_ms) -> None:
        """Never shortens."""
        cdef Object* record = self.record(index)
        if not 0 <= until_ms <= TIME_MAX:
            raise InternalError(f"{until_ms} is no time")
        record.lease_until = max(record.lease_until, <uint64_t>until_ms)

    def touch(self, index) -> None:
        """A use, as the policy counts it, in every segment that has a place."""
        self.record(index)
        self.stored.touch(index)

    def victims(self, segment, wanted_bytes, now_ms, *, count_max, soft) -> list:
        """Objects to evict from a segment, least valuable first: see moonpool.store.tables."""
        cdef uint32_t number = self.number_of(segment)
        return find_victims(self.stored, number, Search(wanted_bytes, max(now_ms, 0), count_max, soft))

    def places_on(self, segment, after_index, count_max) -> list:
        """Indices above `after_index` of objects with a place on the segment, ascending. O(table) at worst."""
        cdef uint32_t number = self.number_of(segment)
        cdef uint64_t index = max(after_index, -1) + 1
        cdef list found = []
        if self.stored.recency.bytes_on(number) == 0:
            return found
        while index < self.stored.records.used and len(found) < count_max:
            if is_live(self.stored.records, index) and self.stored.place_on(<uint32_t>index, number) != NO_RECORD:
                found.append(index)
            index += 1
        return found

    def bytes_on(self, segment) -> int:
        """Bytes of all extents of complete places on the segment."""
        return self.stored.recency.bytes_on(self.number_of(segment))

    def bytes_of(self, uint32_t tenant) -> int:
        """Bytes of all extents of complete places of the tenant's objects."""
        return mp_id_get(&self.stored.tenant_bytes, tenant)

    def packed_places(self, segment) -> bytes:
        """Every place on the segment as u64 triples (offset, extent bytes, slot), by offset."""
        cdef uint32_t number = self.number_of(segment), place
        cdef uint64_t count = 0
        cdef int queue
        cdef bytes packed
        cdef uint64_t* row
        for queue in range(QUEUES):
            count += self.stored.recency.segments[number].queues[queue].count
        packed = PyBytes_FromStringAndSize(NULL, count * 3 * sizeof(uint64_t))
        row = <uint64_t*>PyBytes_AS_STRING(packed)
        for queue in range(QUEUES):
            place = self.stored.recency.segments[number].queues[queue].oldest
            while place != NO_RECORD:
                row[0] = place_at(self.stored.recency, place).offset
                row[1] = rounded(object_at(self.stored.records, place_at(self.stored.recency, place).object).size)
                row[2] = place_at(self.stored.recency, place).slot
                row += 3
                place = place_at(self.stored.recency, place).newer
        qsort(PyBytes_AS_STRING(packed), count, 3 * sizeof(uint64_t), compare_rows)
        return packed

    def drop_places(self, segment) -> int:
        """Takes out all places on the segment, and the objects that had no other; how many objects ended."""
        cdef uint32_t number = self.number_of(segment), place, index
        cdef uint64_t ended = 0
        cdef int queue
        for queue in range(QUEUES):
            while True:
                place = self.stored.recency.segments[number].queues[queue].oldest
                if place == NO_RECORD:
                    break
                index = place_at(self.stored.recency, place).object
                if object_at(self.stored.records, index).places == 1:
                    self.stored.drop(index)
                    ended += 1
                else:
                    self.stored.drop_place(index, place)
        return ended

    def find_prefix(self, uint32_t tenant, bytes prefix not None, after_index, count_max, looks_max) -> tuple:
        """Indices above `after_index` of the tenant's objects whose keys start so, and where to go on, or -1.

        Stops at `count_max` found or `looks_max` looked at, live or free.
        """
        cdef uint64_t first = max(after_index, -1) + 1, index, used = self.stored.records.used
        cdef uint64_t end = min(first + max(looks_max, 0), used)
        cdef const uint8_t* text = prefix
        cdef size_t size = len(prefix)
        cdef Object* record
        cdef list found = []
        for index in range(first, end):
            record = object_at(self.stored.records, <uint32_t>index)
            if (record.object_id and record.tenant == tenant and record.key_bytes >= size
                    and memcmp(cell_at(self.stored.records, record.key), text, size) == 0):
                found.append(index)
                if len(found) >= count_max:
                    return found, index if index + 1 < used else -1
        return found, first + looks_max - 1 if first + looks_max < used else -1

    def scan(self, after_index, count_max) -> list:
        """Live indices above `after_index`, ascending. Start with -1."""
        cdef uint64_t index = max(after_index, -1) + 1
        cdef list found = []
        while index < self.stored.records.used and len(found) < count_max:
            if is_live(self.stored.records, index):
                found.append(index)
            index += 1
        return found

    def dump(self) -> bytes:
        """All objects and the order of their queues, without leases and ghosts."""
        return dump_objects(self.stored)

    def load(self, bytes data not None) -> None:
        """A dump, into an empty table with its segments added; UsageError, and an empty table, for what is none."""
        if self.stored.records.live:
            raise UsageError("a dump is loaded into an empty table only")
        self.stored.clear()
        try:
            load_objects(self.stored, data)
        except BaseException:
            self.stored.clear()
            raise

    def memory_bytes(self) -> int:
        """Bytes in use, to a chunk."""
        return (self.stored.records.memory_bytes() + self.stored.recency.memory_bytes()
                + self.stored.extras.memory_bytes())

    def check(self) -> None:
        """Asserts all invariants; InternalError names the first that fails."""
        self.stored.records.check()
        self.stored.recency.check()
        self.stored.extras.check()
        check_objects(self.stored)

    cdef uint32_t number_of(self, object segment) except? 0xFFFE:
        cdef uint32_t number = NO_SEGMENT
        if 0 <= segment <= ID_MAX:
            number = self.stored.recency.number_of(segment)
        if number == NO_SEGMENT:
            raise InternalError(f"there is no segment {segment} in this table")
        return number

    cdef Object* record(self, object index) except NULL:
        if not (0 <= index <= ID_MAX and is_live(self.stored.records, index)):
            raise InternalError(f"there is no object at index {index}")
        return object_at(self.stored.records, index)

    cdef object value_of(self, Object* record):
        cdef uint32_t place = record.place
        cdef list places = []
        group = soft_pin_end_ms = 0
        if record.extra != NO_RECORD:
            group = self.stored.extras.of(record).group
            soft_pin_end_ms = self.stored.extras.of(record).soft_pin_end_ms
        while place != NO_RECORD:
            places.append(place_value(self.stored.recency, place))
            place = place_at(self.stored.recency, place).next_place
        return StoredObject(
            record.object_id, record.tenant, <bytes>cell_at(self.stored.records, record.key)[:record.key_bytes],
            record.size, <bytes>record.digest[:16], record.object_type, record.pin, soft_pin_end_ms, group,
            tuple(places))


cdef object place_value(Recency recency, uint32_t place):
    cdef PlaceRecord* record = place_at(recency, place)
    return Place(recency.segments[record.segment].segment_id, record.offset, record.slot)


cdef int compare_rows(const void* a, const void* b) noexcept nogil:
    cdef const uint64_t* left = <const uint64_t*>a
    cdef const uint64_t* right = <const uint64_t*>b
    cdef int i
    for i in range(3):
        if left[i] != right[i]:
            return -1 if left[i] < right[i] else 1
    return 0


# -- victims --

@cython.final
cdef class Search:
    """What one search for victims is for, and what it has found."""

    cdef uint64_t wanted_bytes, covered, now_ms, number
    cdef int64_t count_max, looks
    cdef bint soft
    cdef list found

    def __cinit__(self, wanted_bytes, now_ms, count_max, soft):
        self.wanted_bytes = max(wanted_bytes, 0)
        self.now_ms = now_ms
        self.count_max = max(count_max, 0)
        self.looks = 4 * self.count_max + LOOKS_BEYOND
        self.soft = soft
        self.found = []


cdef list find_victims(StoredObjects stored, uint32_t number, Search search):
    """Walks the queues of a segment until enough is found, or nothing is left, or enough was looked at."""
    cdef uint32_t place, index
    cdef int ended = 0
    cdef Group* group
    while ended < ENDED_PINS_MAX:
        index = stored.extras.ended_pin(search.now_ms)
        if index == NO_RECORD:
            break
        stored.end_soft_pin(index)
        ended += 1
    stored.searches += 1
    search.number = stored.searches
    stored.recency.begin_walk(number)
    while (search.covered < search.wanted_bytes and <int64_t>len(search.found) < search.count_max
           and search.looks > 0):
        place = stored.recency.next_entry(search.soft)
        if place == NO_RECORD:
            break
        search.looks -= 1
        index = place_at(stored.recency, place).object
        group = stored.extras.group_of(object_at(stored.records, index))
        if group != NULL and group.chosen_in == search.number:
            continue
        if not (may_go(stored, index, search) if group == NULL else group_may_go(stored, group, search)):
            stored.recency.move(place, place_at(stored.recency, place).queue)
        elif not stored.recency.gets_another_round(place) and not choose(stored, number, place, group, search):
            break
    stored.recency.end_walk()
    return search.found


cdef bint may_go(StoredObjects stored, uint32_t index, Search search) noexcept:
    cdef Object* record = object_at(stored.records, index)
    return record.pin != PIN_HARD and record.lease_until <= search.now_ms and (search.soft or not record.soft)


cdef bint group_may_go(StoredObjects stored, Group* group, Search search) noexcept:
    """Whether all members may; asked once in a search where they may not."""
    cdef uint32_t member = group.first
    if group.blocked_in == search.number:
        return False
    search.looks -= group.count
    while member != NO_RECORD:
        if not may_go(stored, stored.extras.extras[member].object, search):
            group.blocked_in = search.number
            return False
        member = stored.extras.extras[member].next
    return True


cdef bint choose(StoredObjects stored, uint32_t number, uint32_t place, Group* group, Search search) except -1:
    """Adds the object, or those of its group that go with it; False where they are too many."""
    cdef uint32_t member
    cdef bint ends = False
    cdef list leaving = []
    if group == NULL:
        add_victim(stored, number, place_at(stored.recency, place).object, search)
        return True
    member = group.first
    while member != NO_RECORD:
        index = stored.extras.extras[member].object
        if stored.place_on(index, number) != NO_RECORD:
            leaving.append(index)
            ends = ends or object_at(stored.records, index).places == 1
        member = stored.extras.extras[member].next
    if ends:
        leaving = []
        member = group.first
        while member != NO_RECORD:
            leaving.append(stored.extras.extras[member].object)
            member = stored.extras.extras[member].next
    if search.found and <int64_t>(len(search.found) + len(leaving)) > search.count_max:
        return False
    group.chosen_in = search.number
    for index in leaving:
        add_victim(stored, number, index, search)
    return True


cdef int add_victim(StoredObjects stored, uint32_t number, uint32_t index, Search search) except -1:
    cdef uint32_t place = stored.place_on(index, number)
    search.found.append(index)
    if place != NO_RECORD:
        place_at(stored.recency, place).uses |= CHOSEN_USE
        search.covered += rounded(object_at(stored.records, index).size)
    return 0


# -- invariants between the parts --

cdef int check_objects(StoredObjects stored) except -1:
    """Asserts that objects have their places, pins the right queues, and tenants the right bytes."""
    cdef uint32_t index, place, count, places = 0
    cdef Object* record
    cdef PlaceRecord* stands
    cdef dict tenants = {}
    cdef int queue
    for index in range(stored.records.used):
        record = object_at(stored.records, index)
        if record.object_id == 0:
            continue
        place, count, queue = record.place, 0, stored.pinned_queue(record)
        while place != NO_RECORD:
            require(place < stored.recency.used and count < record.places, "the places of an object are broken")
            stands = place_at(stored.recency, place)
            require(stands.object == index and stored.place_on(index, stands.segment) == place,
                    "a place is another object's")
            require(stands.queue == queue or (queue < 0 and stands.queue not in (SOFT, HELD)),
                    "a place is in the wrong queue")
            place, count = stands.next_place, count + 1
        require(count == record.places, "the places of an object are miscounted")
        places += count
        if count:
            tenants[record.tenant] = tenants.get(record.tenant, 0) + rounded(record.size) * count
    require(places == stored.recency.live, "a place has no object")
    require(stored.tenant_bytes.count == <uint64_t>len(tenants), "the tenants are miscounted")
    for tenant, size in tenants.items():
        require(mp_id_get(&stored.tenant_bytes, tenant) == size, "bytes of a tenant are miscounted")
    return 0
