"""`put_end` at C speed: what moonpool.store.leader_put_end does with new keys, byte for byte.

Served here: all rows name open keys of a put of the same client, in time, without `replace`, with digests of the right
lengths, on segments that are seen; keys that have no object, or one that readers are told of (then the put is too
late, and its extents are free again). Anything else goes to Python, with nothing changed.

For each object: its id, then its fact's number, then the tables, then the effects, place by place.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from moonpool.native.io.rpc_hot cimport HOT_ANSWERED, HOT_COLD, HOT_NO_MEMORY, HotCall, HotOut, hot_reserve
from moonpool.native.io.rpc_msgpack cimport (
    mp_pack_array, mp_pack_bin, mp_pack_read_array, mp_pack_read_bytes, mp_pack_read_uint, mp_pack_reader, mp_pack_uint,
)
from moonpool.native.table.hot_state cimport (
    UNSEEN, HotKey, HotSegment, HotState, look_ahead, mp_log_close, mp_log_reserve,
)
from moonpool.native.table.object_records cimport NO_RECORD, object_at
from moonpool.native.table.open_puts cimport KEY_DROPPED, KEY_ENDED, KEY_OPEN, Put, PutKey, PutPlace
from moonpool.native.table.recency cimport place_at
from moonpool.native.table.stored_objects cimport NewObject

cdef enum:
    KEY_NAMED = 3             # of a key while its request is read: open, and named by an earlier row
    HEAD_BYTES = 32           # of a reply
    ROW_BYTES = 16            # of one key
    FACT_BYTES = 128          # of a fact or an effect, without keys, places and chunk digests
    PLACE_BYTES = 20
    CHUNK_BYTES = 65536
    DIGEST_BYTES = 16
    CODE_OK = 0
    CODE_EXISTS = 1
    CODE_NO_SPACE = 2
    OBJECT_FACT = 6
    ADD_EFFECT = 1
    SEQUENCE_BITS = 40


cdef bint is_binary(const uint8_t* head) noexcept nogil:
    return 0xC4 <= head[0] <= 0xC6


cdef bint read_row(mp_pack_reader* reader, HotKey* row) noexcept nogil:
    """[index, digest, chunk digests], or with a mask of 0 as fourth."""
    cdef uint32_t items, digest_bytes
    cdef uint64_t index, mask
    cdef const uint8_t* head
    if mp_pack_read_array(reader, &items) or not 3 <= items <= 4:
        return False
    if mp_pack_read_uint(reader, &index) or index >> 32:
        return False
    head = reader.at
    if mp_pack_read_bytes(reader, &row.digest, &digest_bytes) or digest_bytes != DIGEST_BYTES or not is_binary(head):
        return False
    head = reader.at
    if mp_pack_read_bytes(reader, &row.chunks, &row.chunk_bytes) or not is_binary(head):
        return False
    if items == 4 and (mp_pack_read_uint(reader, &mask) or mask):
        return False
    row.index = <uint32_t>index
    return True


cdef bint is_in_order(HotState state, Put* put, HotKey* row) noexcept nogil:
    """Whether a row can be served here, as far as it does not depend on its key."""
    cdef PutKey* key
    cdef HotSegment* segment
    cdef uint64_t chunked = 0
    cdef uint32_t at
    if row.index >= put.count:
        return False
    key = &put.keys[row.index]
    if key.state != KEY_OPEN or key.places == 0:
        return False
    if key.size > CHUNK_BYTES:
        chunked = (key.size + CHUNK_BYTES - 1) // CHUNK_BYTES * 8
    if row.chunk_bytes != chunked and (chunked or row.chunk_bytes != 8):
        return False
    for at in range(key.place, key.place + key.places):
        segment = state.segment(put.places[at].segment)
        if segment == NULL or segment.rank == UNSEEN:
            return False
    return True


cdef struct Room:             # that facts and effects need
    uint64_t fact_bytes
    uint64_t effect_bytes
    uint32_t places


cdef bint read_rows(HotState state, Put* put, mp_pack_reader* reader, uint32_t count, Room* room) noexcept nogil:
    """Reads all rows into state.keys and marks their keys as named; False where Python should look at the request."""
    cdef uint32_t at
    cdef HotKey* row
    cdef PutKey* key
    memset(room, 0, sizeof(Room))
    for at in range(count):
        row = &state.keys[at]
        if not read_row(reader, row) or not is_in_order(state, put, row):
            unname(state, put, at)
            return False
        key = &put.keys[row.index]
        key.state = KEY_NAMED
        row.text = put.text + key.text
        row.key_bytes = key.key_bytes
        row.hash = state.objects.records.hash_of(put.tenant, row.text, row.key_bytes)
        if at < 16:
            state.objects.records.look_ahead(row.hash)
        room.places += key.places
        room.fact_bytes += FACT_BYTES + row.key_bytes + key.places * <uint64_t>PLACE_BYTES
        room.effect_bytes += (FACT_BYTES + row.key_bytes + <uint64_t>row.chunk_bytes) * key.places
    return True


cdef void unname(HotState state, Put* put, uint32_t count) noexcept nogil:
    """Takes back the marks of the first `count` rows."""
    cdef uint32_t at
    for at in range(count):
        put.keys[state.keys[at].index].state = KEY_OPEN


cdef bint is_seen(HotState state, uint32_t index) noexcept nogil:
    cdef uint32_t place = object_at(state.objects.records, index).place
    cdef HotSegment* segment
    while place != NO_RECORD:
        segment = state.segment_numbered(place_at(state.objects.recency, place).segment)
        if segment != NULL and segment.rank != UNSEEN:
            return True
        place = place_at(state.objects.recency, place).next_place
    return False


cdef bint all_can_end(HotState state, Put* put, uint32_t count) noexcept nogil:
    """Whether no key has an object that readers are not told of (a put then replaces it), and all new ones fit."""
    cdef uint32_t at, index
    cdef HotKey* row
    for at in range(count):
        look_ahead(state, at, count)
        row = &state.keys[at]
        index = state.objects.records.find(row.hash, put.tenant, row.text, row.key_bytes)
        if index != NO_RECORD and not is_seen(state, index):
            return False
    return (<uint64_t>state.objects.records.live + count <= state.objects.records.objects_max
            and (state.counters.last_object + count) >> SEQUENCE_BITS == 0)


cdef uint8_t* write_fact(Put* put, PutKey* key, HotKey* row, uint64_t object_id, uint8_t* out) noexcept nogil:
    """An OBJECT fact: see moonpool.store.facts."""
    cdef uint32_t at
    out = mp_pack_array(out, 13)
    out = mp_pack_uint(out, OBJECT_FACT)
    out = mp_pack_uint(out, 1)
    out = mp_pack_uint(out, object_id)
    out = mp_pack_uint(out, put.tenant)
    out = mp_pack_bin(out, row.key_bytes)
    memcpy(out, row.text, row.key_bytes)
    out = mp_pack_uint(out + row.key_bytes, key.size)
    out = mp_pack_bin(out, DIGEST_BYTES)
    memcpy(out, row.digest, DIGEST_BYTES)
    out = mp_pack_uint(out + DIGEST_BYTES, put.object_type)
    out = mp_pack_uint(out, put.pin)
    out = mp_pack_uint(out, put.soft_pin_end_ms)
    out = mp_pack_uint(out, put.group)
    out = mp_pack_array(out, key.places)
    for at in range(key.place, key.place + key.places):
        out = mp_pack_array(out, 3)
        out = mp_pack_uint(out, put.places[at].segment)
        out = mp_pack_uint(out, put.places[at].offset)
        out = mp_pack_uint(out, put.places[at].slot)
    return mp_pack_uint(out, 0)


cdef uint8_t* write_effect(Put* put, PutKey* key, HotKey* row, PutPlace* place, uint64_t object_id,
                           uint8_t* out) noexcept nogil:
    """An ADD effect: see moonpool.store.effects."""
    out = mp_pack_array(out, 12)
    out = mp_pack_uint(out, ADD_EFFECT)
    out = mp_pack_uint(out, place.segment)
    out = mp_pack_uint(out, place.slot)
    out = mp_pack_uint(out, place.offset)
    out = mp_pack_uint(out, key.size)
    out = mp_pack_uint(out, put.tenant)
    out = mp_pack_uint(out, object_id)
    out = mp_pack_bin(out, row.key_bytes)
    memcpy(out, row.text, row.key_bytes)
    out = mp_pack_bin(out + row.key_bytes, DIGEST_BYTES)
    memcpy(out, row.digest, DIGEST_BYTES)
    out = mp_pack_uint(out + DIGEST_BYTES, put.object_type)
    out = mp_pack_bin(out, row.chunk_bytes)
    memcpy(out, row.chunks, row.chunk_bytes)
    return mp_pack_uint(out + row.chunk_bytes, put.put_id & 0xFFFF)


cdef uint64_t store(HotState state, Put* put, PutKey* key, HotKey* row) noexcept nogil:
    """Makes the object; its id, or 0 without memory."""
    cdef NewObject new
    cdef uint32_t index, at
    cdef HotSegment* segment
    if not state.objects.reserve(row.hash, row.key_bytes, key.places):
        return 0
    state.counters.last_object += 1
    state.counters.last_fact += 1
    new.object_id = state.counters.epoch << SEQUENCE_BITS | state.counters.last_object
    new.size, new.soft_pin_end_ms, new.group = key.size, put.soft_pin_end_ms, put.group
    new.key, new.key_bytes, new.digest = row.text, row.key_bytes, row.digest
    new.tenant, new.object_type, new.pin = put.tenant, put.object_type, put.pin
    index = state.objects.add(row.hash, &new)
    for at in range(key.place, key.place + key.places):
        state.objects.add_place(index, state.objects.recency.number_of(put.places[at].segment), put.places[at].offset,
                                put.places[at].slot)
    mp_log_close(&state.facts, write_fact(put, key, row, new.object_id, state.facts.data + state.facts.length),
                 state.counters.last_fact, 0)
    for at in range(key.place, key.place + key.places):
        segment = state.segment(put.places[at].segment)
        if segment.joined:
            mp_log_close(&state.effects, write_effect(put, key, row, &put.places[at], new.object_id,
                                                      state.effects.data + state.effects.length),
                         state.counters.last_fact, segment.node_id)
    return new.object_id


cdef void free_places(HotState state, Put* put, PutKey* key) noexcept nogil:
    cdef uint32_t at
    for at in range(key.place, key.place + key.places):
        state.take_back(state.segment(put.places[at].segment), put.places[at].offset, key.size, put.places[at].slot)
    state.freed = True


cdef uint8_t* end_rows(HotState state, Put* put, uint32_t count, uint8_t* out) noexcept nogil:
    """Ends every named key and writes [code, object id] for it. The put is gone when none is left."""
    cdef uint32_t at, index
    cdef uint64_t object_id
    cdef HotKey* row
    cdef PutKey* key
    cdef uint8_t code, ended
    unname(state, put, count)
    for at in range(count):
        row = &state.keys[at]
        key = &put.keys[row.index]
        # Looked for again: an earlier row may have made it.
        index = state.objects.records.find(row.hash, put.tenant, row.text, row.key_bytes)
        if index != NO_RECORD:
            object_id = object_at(state.objects.records, index).object_id
            code, ended = CODE_EXISTS, KEY_DROPPED
            free_places(state, put, key)
        else:
            object_id = store(state, put, key, row)
            code, ended = CODE_OK, KEY_ENDED
        out = mp_pack_array(out, 2)
        out = mp_pack_uint(out, code if object_id else <uint64_t>CODE_NO_SPACE)
        out = mp_pack_uint(out, object_id)
        if object_id:
            state.puts.end_key(put, row.index, ended)
    return out


cdef int hot_put_end(HotState state, const HotCall* call, HotOut* out) noexcept nogil:
    """[epoch, [[code, object id], ...]]."""
    cdef mp_pack_reader reader
    cdef uint32_t items, count
    cdef uint64_t put_id
    cdef Room room
    cdef Put* put
    cdef uint8_t* end
    cdef int refused
    state.now_ms = max(call.now_ms, state.now_ms)
    reader.at = call.params
    reader.end = call.params + call.params_bytes
    if mp_pack_read_array(&reader, &items) or items != 2 or mp_pack_read_uint(&reader, &put_id):
        return HOT_COLD
    if mp_pack_read_array(&reader, &count) or count > state.batch_keys_max:
        return HOT_COLD
    if not (state.may_end and state.facts_fit(count)):
        return HOT_COLD
    put = state.puts.find(put_id)
    if put == NULL or put.client != call.client or put.replace or state.now_ms > put.deadline_ms:
        return HOT_COLD
    if not read_rows(state, put, &reader, count, &room):
        return HOT_COLD
    if reader.at != reader.end or not all_can_end(state, put, count):
        unname(state, put, count)
        return HOT_COLD
    refused = hot_reserve(out, HEAD_BYTES + count * <uint64_t>ROW_BYTES)
    if refused == 0 and not (mp_log_reserve(&state.facts, count, room.fact_bytes)
                             and mp_log_reserve(&state.effects, room.places, room.effect_bytes)):
        refused = -2
    if refused:
        unname(state, put, count)
        return HOT_COLD if refused == -1 else HOT_NO_MEMORY
    end = mp_pack_array(out.data + out.length, 2)
    end = mp_pack_uint(end, state.counters.epoch)
    end = mp_pack_array(end, count)
    out.length = end_rows(state, put, count, end) - out.data
    return HOT_ANSWERED
