"""`put_start` without a policy at C speed: what moonpool.store.leader_puts does, byte for byte.

Whatever is not plain goes to Python, with nothing changed: a policy, a tenant with a quota, a key for which there is
no space (extents given to the keys before it are given back in reverse order), a full table of open puts.
"""

from cpython.mem cimport PyMem_RawFree
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from moonpool.native.io.grants cimport GRANT_BYTES, grant_make
from moonpool.native.io.rpc_hot cimport HOT_ANSWERED, HOT_COLD, HOT_NO_MEMORY, HotCall, HotOut, hot_reserve
from moonpool.native.io.rpc_msgpack cimport (
    mp_pack_array, mp_pack_bin, mp_pack_read_array, mp_pack_read_nil, mp_pack_read_uint, mp_pack_reader, mp_pack_uint,
)
from moonpool.native.table.extents cimport rounded
from moonpool.native.table.hot_state cimport UNSEEN, HotKey, HotSegment, HotState, look_ahead, read_keys
from moonpool.native.table.object_records cimport NO_RECORD, object_at
from moonpool.native.table.open_puts cimport KEY_DROPPED, KEY_OPEN, Put, PutKey
from moonpool.native.table.recency cimport place_at

cdef enum:
    HEAD_BYTES = 64           # of a reply
    ROW_BYTES = 52            # of one key
    CODE_OK = 0
    CODE_EXISTS = 1
    CODE_TOO_LARGE = 5
    PLAIN_MAP = 0x80          # an empty policy is none

cdef uint64_t TIME_MAX = <uint64_t>1 << 62
cdef uint64_t OBJECT_BYTES_MAX = <uint64_t>1 << 40


cdef bint read_request(HotState state, const HotCall* call, uint32_t* count, uint64_t* total_bytes,
                       uint64_t* text_bytes) noexcept nogil:
    """[keys, sizes, policy, wait_ms]; False where Python should look at it."""
    cdef mp_pack_reader reader
    cdef uint32_t items, at
    cdef uint64_t wait_ms
    reader.at = call.params
    reader.end = call.params + call.params_bytes
    if mp_pack_read_array(&reader, &items) or items != 4:
        return False
    if not read_keys(state, &reader.at, reader.end, call.tenant, count) or count[0] == 0:
        return False
    if mp_pack_read_array(&reader, &items) or items != count[0]:
        return False
    total_bytes[0] = text_bytes[0] = 0
    for at in range(items):
        if mp_pack_read_uint(&reader, &state.keys[at].size) or state.keys[at].size > OBJECT_BYTES_MAX:
            return False
        total_bytes[0] += state.keys[at].size
        text_bytes[0] += state.keys[at].key_bytes
    if reader.at < reader.end and reader.at[0] == PLAIN_MAP:
        reader.at += 1
    elif mp_pack_read_nil(&reader):
        return False
    return not mp_pack_read_uint(&reader, &wait_ms) and wait_ms <= TIME_MAX and reader.at == reader.end


cdef bint is_seen(HotState state, HotKey* key, uint32_t tenant) noexcept nogil:
    """Whether the key has an object that readers are told of."""
    cdef uint32_t index = state.objects.records.find(key.hash, tenant, key.text, key.key_bytes), place
    cdef HotSegment* segment
    if index == NO_RECORD:
        return False
    place = object_at(state.objects.records, index).place
    while place != NO_RECORD:
        segment = state.segment_numbered(place_at(state.objects.recency, place).segment)
        if segment != NULL and segment.rank != UNSEEN:
            return True
        place = place_at(state.objects.recency, place).next_place
    return False


cdef bint allocate(HotState state, PutKey* key, Put* put) noexcept nogil:
    """One extent on the first segment of the schedule, from the cursor on, that has room."""
    cdef uint32_t at, slot = 0
    cdef int64_t offset
    cdef HotSegment* segment
    state.allocations += 1
    at = <uint32_t>(state.counters.place_cursor % state.schedule_count)
    for _ in range(state.schedule_count):
        segment = &state.segments[state.schedule[at]]
        if segment.tried != state.allocations:
            offset = state.give_extent(segment, key.size, &slot)
            if offset >= 0:
                put.places[key.place].segment = segment.segment_id
                put.places[key.place].offset = <uint64_t>offset
                put.places[key.place].slot = slot
                key.places = 1
                return True
            segment.tried = state.allocations
        at = at + 1 if at + 1 < state.schedule_count else 0
    return False


cdef void give_up(HotState state, Put* put, uint32_t count) noexcept nogil:
    """Undoes the first `count` keys, the last one first."""
    cdef PutKey* key
    while count:
        count -= 1
        key = &put.keys[count]
        if key.places:
            state.take_back(state.segment(put.places[key.place].segment), put.places[key.place].offset, key.size,
                            put.places[key.place].slot)
    PyMem_RawFree(put)


cdef uint32_t place_keys(HotState state, Put* put, uint32_t tenant) noexcept nogil:
    """Fills in all keys and gives them extents; how many were done: fewer than all where one lacks space."""
    cdef uint32_t at, text = 0, places = 0
    cdef PutKey* key
    cdef HotKey* asked
    for at in range(put.count):
        look_ahead(state, at, put.count)
        asked = &state.keys[at]
        key = &put.keys[at]
        key.size = asked.size
        key.text = text
        key.place = places
        key.key_bytes = <uint16_t>asked.key_bytes
        key.places = 0
        key.state = KEY_DROPPED
        memcpy(put.text + text, asked.text, asked.key_bytes)
        text += asked.key_bytes
        if is_seen(state, asked, tenant):
            asked.index = CODE_EXISTS
        elif key.size > state.largest_segment:
            asked.index = CODE_TOO_LARGE
        elif allocate(state, key, put):
            asked.index = CODE_OK
            key.state = KEY_OPEN
            state.counters.place_cursor += 1
            places += 1
        else:
            return at
    put.place_count = places
    return put.count


cdef uint8_t* write_rows(HotState state, Put* put, uint64_t remaining_ms, uint8_t* out) noexcept nogil:
    """[code, [[segment, offset, slot, grant]]] for each key."""
    cdef uint32_t at
    cdef PutKey* key
    cdef HotSegment* segment
    cdef uint64_t until, clock_ms = state.now_ms
    out = mp_pack_array(out, put.count)
    for at in range(put.count):
        key = &put.keys[at]
        out = mp_pack_array(out, 2)
        out = mp_pack_uint(out, state.keys[at].index)
        out = mp_pack_array(out, key.places)
        if key.places == 0:
            continue
        segment = state.segment(put.places[key.place].segment)
        until = 0
        if segment.joined:
            until = segment.clock_ms + (clock_ms - segment.clock_at_ms if clock_ms > segment.clock_at_ms else 0)
            until += remaining_ms
        out = mp_pack_array(out, 4)
        out = mp_pack_uint(out, segment.segment_id)
        out = mp_pack_uint(out, put.places[key.place].offset)
        out = mp_pack_uint(out, put.places[key.place].slot)
        out = mp_pack_bin(out, GRANT_BYTES)
        grant_make(segment.grant_k0, segment.grant_k1, segment.data_handle, put.places[key.place].offset,
                   rounded(key.size), <uint32_t>until, <uint16_t>put.put_id, out)
        out += GRANT_BYTES
    return out


cdef void describe(HotState state, Put* put, const HotCall* call, uint64_t remaining_ms) noexcept nogil:
    """Sets the fields of a plain put."""
    put.put_id = state.counters.make_put_id()
    put.client = call.client
    put.tenant = call.tenant
    put.deadline_ms = state.now_ms + remaining_ms
    put.soft_pin_end_ms = put.group = 0
    put.object_type = put.pin = 0
    put.replace = False


cdef int hot_put_start(HotState state, const HotCall* call, HotOut* out) noexcept nogil:
    """[epoch, segments_version, put id, remaining ms, rows]; put id 0 where no key got an extent."""
    cdef uint32_t count, done
    cdef uint64_t total_bytes, text_bytes, remaining_ms, put_id = 0, cursor = state.counters.place_cursor
    cdef uint64_t last_put = state.counters.last_put
    cdef Put* put
    cdef uint8_t* end
    cdef int refused
    if not state.facts_fit(1) or state.schedule_count == 0 or state.has_quota(call.tenant):
        return HOT_COLD
    if not read_request(state, call, &count, &total_bytes, &text_bytes):
        return HOT_COLD
    if state.puts.refusal(0, count):
        return HOT_COLD
    refused = hot_reserve(out, HEAD_BYTES + count * <uint64_t>ROW_BYTES)
    if refused:
        return HOT_COLD if refused == -1 else HOT_NO_MEMORY
    put = state.puts.begin(count, count, <uint32_t>text_bytes)
    if put == NULL:
        return HOT_NO_MEMORY
    state.now_ms = max(call.now_ms, state.now_ms)
    remaining_ms = state.put_ms + total_bytes // state.put_bytes_per_ms
    done = place_keys(state, put, call.tenant)
    if done == count and put.place_count:
        describe(state, put, call, remaining_ms)
        put_id = put.put_id
    if done < count or (put.place_count and not state.puts.enter(put)):
        state.counters.place_cursor = cursor
        state.counters.last_put = last_put
        give_up(state, put, done)
        return HOT_COLD
    end = mp_pack_array(out.data + out.length, 5)
    end = mp_pack_uint(end, state.counters.epoch)
    end = mp_pack_uint(end, state.segments_version)
    end = mp_pack_uint(end, put_id)
    end = mp_pack_uint(end, remaining_ms)
    out.length = write_rows(state, put, remaining_ms, end) - out.data
    if put.place_count == 0:
        PyMem_RawFree(put)
    return HOT_ANSWERED
