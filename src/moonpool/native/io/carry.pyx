"""Batches over a lane: requests in groups, several of them in flight, payload straight to and fro.

A WRITE's payload follows its group's entries; a READ's comes with the answer. Neither side can block the other for
ever: at most WRITE_WINDOW or READ_WINDOW groups are unanswered, and their answers fit in the initiator's receive
buffer.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset
from moonpool.native.io.batch cimport (
    COMPLETE,
    NO_MEMORY,
    OP_READ,
    OP_WRITE,
    OUT_OF_RANGE,
    PEER_GONE,
    PROTOCOL,
    mp_batch,
)
from moonpool.native.io.copying cimport DIGEST_CHUNK, digest_chunks
from moonpool.native.io.frames cimport MP_GROUP_MAX, MP_LENGTH_MAX, MP_MAGIC, MP_REPLY, mp_entry, mp_header
from moonpool.native.io.guard cimport mp_now_ns, mp_tally
from moonpool.native.io.lanes cimport LanePool, acquire, alight, board, final_status, give_back, mp_lane, mp_lanes
from moonpool.native.io.segment cimport NativeSegment, mp_path, mp_path_record, mp_path_stats, mp_segment, path_takes
from moonpool.native.io.stream cimport iovec, stream_receive, stream_send

cdef enum:
    HEADER_BYTES = 32
    ENTRY_BYTES = 64
    PIECES = 1024
    # Unanswered groups on a lane (docs/architecture.md): replies always fit in the initiator's receive buffer.
    WRITE_WINDOW = 64
    READ_WINDOW = 2
    # With digests, payload moves in windows that are hashed while they are still in the cache.
    DIGEST_WINDOW = 4 * 65536
    # Larger when sending: the peer has more to take in while we hash what was sent.
    DIGEST_SEND_WINDOW = 16 * 65536


cdef struct mp_run:
    # One batch on one lane.
    mp_lane* lane
    mp_batch* batch
    uint32_t* todo           # indices of the transfers to carry, in order
    uint64_t n
    uint64_t sent            # entries of todo already in a group
    bint heard               # any byte of an answer came
    uint64_t carried         # transfers that completed, over all tries, and their bytes
    uint64_t n_bytes
    mp_path_stats* stats
    bint ask_again           # a READ group had a bad entry: its good ones are still PENDING

cdef struct mp_cursor:
    # A walk over the payload of todo[next:stop].
    uint64_t next
    uint64_t stop
    uint64_t done            # bytes of todo[next] already walked


# ---- payload walks ---------------------------------------------------------------------------------------------------

cdef int fill_window(mp_run* run, mp_cursor* cursor, iovec* pieces, uint64_t most_bytes) noexcept nogil:
    """Next pieces of payload, at most most_bytes (whole digest chunks unless a transfer ends); returns how many."""
    cdef int n = 0
    cdef uint64_t i, left, total = 0
    while cursor.next < cursor.stop and n < PIECES and total < most_bytes:
        i = run.todo[cursor.next]
        left = run.batch.length[i] - cursor.done
        if left > most_bytes - total:
            left = (most_bytes - total) // DIGEST_CHUNK * DIGEST_CHUNK
            if left == 0:
                break
        pieces[n].iov_base = <void*><size_t>(run.batch.local[i] + cursor.done)
        pieces[n].iov_len = left
        n += 1
        total += left
        cursor.done += left
        if cursor.done == run.batch.length[i]:
            cursor.next += 1
            cursor.done = 0
    return n


cdef void digest_window(mp_run* run, mp_cursor* before, mp_cursor* after) noexcept nogil:
    """Hash the payload between two positions of a walk."""
    cdef uint64_t k = before.next, start = before.done, stop, i
    while k < after.next or (k == after.next and start < after.done):
        i = run.todo[k]
        stop = after.done if k == after.next else run.batch.length[i]
        digest_chunks(<void*><size_t>(run.batch.local[i] + start), stop - start,
                      run.batch.digest + run.batch.digest_at[i] + start // DIGEST_CHUNK)
        start = 0
        k += 1


cdef int move_payload(mp_run* run, uint64_t first, uint64_t stop, bint sending, int n_lead) noexcept nogil:
    """Send or receive the payload of todo[first:stop]; n_lead pieces (a frame) already stand in the lane's vector."""
    cdef mp_cursor cursor = mp_cursor(first, stop, 0), before
    cdef mp_lane* lane = run.lane
    cdef bint digest = run.batch.digest != NULL
    cdef uint64_t most = <uint64_t>1 << 30
    cdef int n, status
    if digest:
        most = DIGEST_SEND_WINDOW if sending else DIGEST_WINDOW
    while cursor.next < stop or n_lead:
        before = cursor
        n = fill_window(run, &cursor, lane.pieces + n_lead, most)
        if sending:
            status = stream_send(&lane.stream, lane.pieces, n + n_lead)
        else:
            status = stream_receive(&lane.stream, lane.pieces, n, True)
        if status:
            return status
        if digest:
            # After the move, also when sending: the peer is busy with the window meanwhile, and it is in the cache.
            digest_window(run, &before, &cursor)
        n_lead = 0
    return COMPLETE


# ---- groups ----------------------------------------------------------------------------------------------------------

cdef uint64_t encode_group(mp_run* run, mp_segment* segment, uint64_t* stop) noexcept nogil:
    """Write the next group's frame; returns its size and where the group ends in todo."""
    cdef mp_header* header = <mp_header*>run.lane.frame
    cdef mp_entry* entry = <mp_entry*>(run.lane.frame + HEADER_BYTES)
    cdef mp_batch* batch = run.batch
    cdef uint64_t i, k = run.sent, payload = 0
    cdef uint32_t count = 0
    while k < run.n and count < MP_GROUP_MAX:
        i = run.todo[k]
        entry.region = batch.region[i]
        entry.offset = batch.offset[i]
        entry.length = batch.length[i]
        if batch.op == OP_READ:
            memcpy(entry.key, segment.slots[<uint32_t>batch.region[i]].read_key, 16)
        else:
            memcpy(entry.key, segment.slots[<uint32_t>batch.region[i]].write_key, 16)
        if batch.grants != NULL:
            memcpy(entry.grant, batch.grants + 24 * i, 24)
        else:
            memset(entry.grant, 0, 24)
        payload += batch.length[i]
        entry += 1
        count += 1
        k += 1
    header.magic = MP_MAGIC
    header.op = batch.op
    header.flags = 0
    header.count = count
    header.id = run.lane.next_id
    header.payload = payload
    header.reserved = 0
    run.lane.next_id += 1
    stop[0] = k
    return HEADER_BYTES + count * ENTRY_BYTES


cdef int send_group(mp_run* run, mp_segment* segment) noexcept nogil:
    cdef uint64_t stop = 0, first = run.sent
    cdef uint64_t size = encode_group(run, segment, &stop)
    run.sent = stop
    run.lane.pieces[0].iov_base = run.lane.frame
    run.lane.pieces[0].iov_len = size
    if run.batch.op == OP_WRITE:
        return move_payload(run, first, stop, True, 1)
    return stream_send(&run.lane.stream, run.lane.pieces, 1)


cdef void tally_carried(mp_run* run, uint64_t i) noexcept nogil:
    run.carried += 1
    run.n_bytes += run.batch.length[i]


cdef int receive_answer(mp_run* run, uint64_t id, uint64_t first, uint64_t stop, bint bulk) noexcept nogil:
    """Take the answer to one group: statuses of todo[first:stop], and for READ the payload. A status of the lane."""
    cdef mp_header header
    cdef uint8_t marks[256]
    cdef uint64_t k, i, payload = 0
    cdef iovec piece
    cdef int status
    cdef bint named = False
    cdef mp_batch* batch = run.batch
    piece.iov_base = &header
    piece.iov_len = HEADER_BYTES
    status = stream_receive(&run.lane.stream, &piece, 1, bulk)
    if status:
        return status
    run.heard = True
    if (header.magic != MP_MAGIC or header.op != (batch.op | MP_REPLY) or header.id != id
            or header.count != stop - first or header.reserved or not final_status(header.flags)):
        return PROTOCOL
    if header.payload and (batch.op != OP_READ or header.flags != COMPLETE):
        return PROTOCOL
    if header.flags == COMPLETE:
        if batch.op == OP_READ:
            for k in range(first, stop):
                payload += batch.length[run.todo[k]]
            if header.payload != payload:
                return PROTOCOL
            status = move_payload(run, first, stop, False, 0)
            if status:
                return status
        for k in range(first, stop):
            batch.status[run.todo[k]] = COMPLETE
            tally_carried(run, run.todo[k])
        return COMPLETE
    piece.iov_base = marks
    piece.iov_len = stop - first
    status = stream_receive(&run.lane.stream, &piece, 1, False)
    if status:
        return status
    for k in range(stop - first):
        if not final_status(marks[k]):
            return PROTOCOL
        named |= marks[k] == header.flags
    if not named:
        return PROTOCOL  # and a failed group that fails nobody would have us ask for ever
    for k in range(first, stop):
        i = run.todo[k]
        if marks[k - first] != COMPLETE:
            mp_tally(&run.stats.errors[batch.op != OP_READ][marks[k - first]], 1)
        elif batch.op == OP_READ:
            # A READ group with a bad entry brings no payload: the good ones are asked for again.
            run.ask_again = True
            continue
        else:
            tally_carried(run, i)
        batch.status[i] = marks[k - first]
    return COMPLETE


cdef int carry(mp_run* run, mp_segment* segment, mp_lanes* lanes) noexcept nogil:
    """Send all groups and take all answers. A status of the lane."""
    cdef uint64_t starts[WRITE_WINDOW]
    cdef uint64_t stops[WRITE_WINDOW]
    cdef uint64_t ids[WRITE_WINDOW]
    cdef uint64_t head = 0, tail = 0, k, weight = 0
    cdef uint64_t window = READ_WINDOW if run.batch.op == OP_READ else WRITE_WINDOW
    cdef int status
    cdef bint bulk
    for k in range(run.n):
        weight += run.batch.length[run.todo[k]]
    bulk = weight > lanes.spin_max_bytes
    run.lane.stream.spin_ns = lanes.spin_ns
    while run.sent < run.n or head < tail:
        if run.sent < run.n and tail - head < window:
            starts[tail % WRITE_WINDOW] = run.sent
            ids[tail % WRITE_WINDOW] = run.lane.next_id
            status = send_group(run, segment)
            stops[tail % WRITE_WINDOW] = run.sent
            tail += 1
            if status:
                return status
            continue
        status = receive_answer(run, ids[head % WRITE_WINDOW], starts[head % WRITE_WINDOW],
                                stops[head % WRITE_WINDOW], bulk)
        head += 1
        if status:
            return status
    return COMPLETE


cdef int list_todo(mp_run* run, mp_path* path, mp_batch* batch, uint32_t* one) noexcept nogil:
    """Collect what this path is to carry; 0, or NO_MEMORY."""
    cdef uint64_t i
    run.batch = batch
    run.n = run.sent = 0
    run.heard = run.ask_again = False
    if run.todo == NULL:
        run.todo = one if batch.n == 1 else <uint32_t*>malloc(batch.n * 4)
        if run.todo == NULL:
            return NO_MEMORY
    for i in range(batch.n):
        if path_takes(path, batch, i):
            if batch.length[i] > MP_LENGTH_MAX:
                batch.status[i] = OUT_OF_RANGE
                mp_tally(&path.stats.errors[batch.op != OP_READ][OUT_OF_RANGE], 1)
                continue
            run.todo[run.n] = <uint32_t>i
            run.n += 1
    return 0


cdef int tcp_run(mp_path* path, mp_segment* segment, mp_batch* batch) noexcept nogil:
    """Carry what is pending over one lane. Returns 0: this is the last resort, nothing is left for others."""
    cdef mp_lanes* lanes = <mp_lanes*>path.context
    cdef uint64_t started = mp_now_ns(), i
    cdef uint32_t one[1]
    cdef mp_run run
    cdef int status = COMPLETE
    cdef bint again = True
    run.todo = NULL
    run.carried = run.n_bytes = 0
    run.stats = &path.stats
    while again:
        again = False
        status = list_todo(&run, path, batch, one)
        if status or run.n == 0:
            break
        status = acquire(lanes, batch, &run.lane)
        if status:
            break
        status = board(run.lane, batch, lanes)
        if status == COMPLETE:
            status = carry(&run, segment, lanes)
        alight(run.lane, batch)
        # An idle lane may have been closed at the other end since; nothing was carried out then, so try a fresh one.
        again = run.ask_again if status == COMPLETE else (
            status == PEER_GONE and run.lane.served > 0 and not run.heard)
        give_back(lanes, run.lane, status == COMPLETE)
    if run.todo != one:
        free(run.todo)
    for i in range(batch.n):
        if path_takes(path, batch, i) and status:
            batch.status[i] = <uint8_t>status
            mp_tally(&path.stats.errors[batch.op != OP_READ][status], 1)
    if run.carried:
        mp_path_record(&path.stats, batch.op != OP_READ, run.carried, run.n_bytes, mp_now_ns() - started)
    return 0


def add_tcp_path(NativeSegment segment not None, LanePool lanes not None) -> int:
    """Let a segment be reached over these lanes; returns the path id. It must be the last path added."""
    return segment.add_path(tcp_run, lanes.raw, lanes).id
