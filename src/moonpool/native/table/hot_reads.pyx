"""`exists` and `lookup` at C speed: what moonpool.store.leader_reads does, byte for byte.

Requests that are not plain (a key that is neither bytes nor ASCII, a number in an odd form, too many keys) go to
Python, which also says what is wrong with them.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from moonpool.native.io.rpc_hot cimport HOT_ANSWERED, HOT_COLD, HOT_NO_MEMORY, HotCall, HotOut, hot_reserve
from moonpool.native.io.rpc_msgpack cimport (
    mp_pack_array, mp_pack_bin, mp_pack_nil, mp_pack_read_array, mp_pack_read_uint, mp_pack_reader, mp_pack_uint,
)
from moonpool.native.table.hot_state cimport UNSEEN, HotSegment, HotState, look_ahead, look_ahead_to_queue, read_keys
from moonpool.native.table.object_records cimport NO_RECORD, Object, object_at
from moonpool.native.table.recency cimport PlaceRecord, place_at

cdef enum:
    HEAD_BYTES = 32           # of a reply
    ROW_BYTES = 48            # of a found object, without its places
    PLACE_BYTES = 20
    RANKS = 2
    DIGEST_BYTES = 16

cdef uint64_t TIME_MAX = <uint64_t>1 << 62


cdef bint read_request(HotState state, const HotCall* call, uint32_t* count, uint64_t* lease_ms) noexcept nogil:
    """[keys, lease_ms]; False where Python should look at it."""
    cdef mp_pack_reader reader
    cdef uint32_t items
    reader.at = call.params
    reader.end = call.params + call.params_bytes
    if mp_pack_read_array(&reader, &items) or items != 2:
        return False
    if not read_keys(state, &reader.at, reader.end, call.tenant, count):
        return False
    if mp_pack_read_uint(&reader, lease_ms) or lease_ms[0] > TIME_MAX or reader.at != reader.end:
        return False
    lease_ms[0] = min(lease_ms[0], state.lease_ms_max)
    return True


cdef inline uint8_t rank_of(HotState state, PlaceRecord* place) noexcept nogil:
    cdef HotSegment* segment = state.segment_numbered(place.segment)
    return segment.rank if segment != NULL else <uint8_t>UNSEEN


cdef inline uint32_t seen_places(HotState state, Object* record) noexcept nogil:
    """How many of an object's places readers are told of."""
    cdef uint32_t place = record.place, seen = 0
    while place != NO_RECORD:
        seen += rank_of(state, place_at(state.objects.recency, place)) != UNSEEN
        place = place_at(state.objects.recency, place).next_place
    return seen


cdef inline void lease(Object* record, uint64_t until_ms) noexcept nogil:
    if record.lease_until < until_ms:
        record.lease_until = until_ms


cdef inline uint32_t find(HotState state, uint32_t at, uint32_t tenant) noexcept nogil:
    return state.objects.records.find(state.keys[at].hash, tenant, state.keys[at].text, state.keys[at].key_bytes)


cdef int hot_exists(HotState state, const HotCall* call, HotOut* out) noexcept nogil:
    """One byte for each key: 1 when readers are told of its object."""
    cdef uint32_t count, at, index
    cdef uint64_t lease_ms, now_ms = max(call.now_ms, state.now_ms)
    cdef uint8_t* answers
    cdef Object* record
    cdef int refused
    if not read_request(state, call, &count, &lease_ms):
        return HOT_COLD
    refused = hot_reserve(out, count + 5)
    if refused:
        return HOT_COLD if refused == -1 else HOT_NO_MEMORY
    answers = mp_pack_bin(out.data + out.length, count)
    memset(answers, 0, count)
    for at in range(count):
        look_ahead(state, at, count)
        index = find(state, at, call.tenant)
        if index == NO_RECORD:
            continue
        record = object_at(state.objects.records, index)
        if seen_places(state, record):
            answers[at] = 1
            if lease_ms:
                state.objects.touch(index)
                lease(record, now_ms + lease_ms)
    out.length = answers + count - out.data
    return HOT_ANSWERED


cdef uint8_t* write_row(HotState state, Object* record, uint32_t seen, uint8_t* out) noexcept nogil:
    """[object id, size, digest, type, [[segment, offset, slot], ...]], places of the lowest rank first."""
    cdef PlaceRecord* stands
    cdef uint32_t place
    cdef uint8_t rank
    out = mp_pack_array(out, 5)
    out = mp_pack_uint(out, record.object_id)
    out = mp_pack_uint(out, record.size)
    out = mp_pack_bin(out, DIGEST_BYTES)
    memcpy(out, record.digest, DIGEST_BYTES)
    out = mp_pack_uint(out + DIGEST_BYTES, record.object_type)
    out = mp_pack_array(out, seen)
    for rank in range(RANKS):
        place = record.place
        while place != NO_RECORD:
            stands = place_at(state.objects.recency, place)
            if rank_of(state, stands) == rank:
                out = mp_pack_array(out, 3)
                out = mp_pack_uint(out, state.segments[stands.segment].segment_id)
                out = mp_pack_uint(out, stands.offset)
                out = mp_pack_uint(out, stands.slot)
            place = stands.next_place
    return out


cdef int hot_lookup(HotState state, const HotCall* call, HotOut* out) noexcept nogil:
    """[epoch, segments_version, [nil or row, ...]].

    The room for all rows is asked for before the first object is touched: a request that goes to Python has changed
    nothing.
    """
    cdef uint32_t count, at, index, seen
    cdef uint64_t lease_ms, now_ms = max(call.now_ms, state.now_ms), room = HEAD_BYTES
    cdef uint8_t* end
    cdef Object* record
    cdef int refused
    if not read_request(state, call, &count, &lease_ms):
        return HOT_COLD
    for at in range(count):
        look_ahead(state, at, count)
        index = find(state, at, call.tenant)
        state.keys[at].index = index
        room += 1
        if index != NO_RECORD:
            room += ROW_BYTES + object_at(state.objects.records, index).places * <uint64_t>PLACE_BYTES
    refused = hot_reserve(out, room)
    if refused:
        return HOT_COLD if refused == -1 else HOT_NO_MEMORY
    end = mp_pack_array(out.data + out.length, 3)
    end = mp_pack_uint(end, state.counters.epoch)
    end = mp_pack_uint(end, state.segments_version)
    end = mp_pack_array(end, count)
    for at in range(count):
        look_ahead_to_queue(state, at, count)
        index = state.keys[at].index
        record = object_at(state.objects.records, index) if index != NO_RECORD else NULL
        seen = seen_places(state, record) if record != NULL else 0
        if seen == 0:
            end = mp_pack_nil(end)
            continue
        state.objects.touch(index)
        if lease_ms:
            lease(record, now_ms + lease_ms)
        end = write_row(state, record, seen, end)
    out.length = end - out.data
    return HOT_ANSWERED
