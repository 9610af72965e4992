"""The initiator over tcp: lanes to one peer, and the loops that carry a batch over one of them.

A lane is used by one batch at a time, driven by the thread that waits for it. Requests go out in groups of up to 256
entries, several in flight; payloads move between socket and destination with no copy between. A lane on which anything
went wrong is closed, never reused: so nothing late can land in a buffer.
"""

from cpython.ref cimport PyObject
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset
from moonpool.native.io.batch cimport (
    COMPLETE,
    NO_MEMORY,
    OP_NOTIFY,
    OP_READ,
    OP_WRITE,
    PEER_GONE,
    PENDING,
    PROTOCOL,
    Batch,
    batch_interrupted,
    batch_off_stack,
    batch_on_stack,
    mp_batch,
    mp_cond_wait_until,
    mp_sync_init,
    pthread_cond_broadcast,
    pthread_cond_destroy,
    pthread_cond_signal,
    pthread_mutex_destroy,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from moonpool.native.io.copying cimport DIGEST_CHUNK, digest_chunks
from moonpool.native.io.frames cimport MP_GROUP_MAX, MP_LENGTH_MAX, MP_MAGIC, MP_NOTICE_MAX, MP_REPLY, mp_entry, mp_header
from moonpool.native.io.guard cimport mp_now_ns, mp_tally
from moonpool.native.io.segment cimport NativeSegment, mp_path, mp_path_record, mp_segment, path_takes
from moonpool.native.io.stream cimport (
    iovec,
    stream_close,
    stream_open,
    stream_receive,
    stream_send,
)

from moonpool.errors import UsageError, error_from_status, status_of

cdef extern from "sys/socket.h" nogil:
    int shutdown(int fd, int how)
    int SHUT_RDWR

cdef extern from *:
    int close(int fd) nogil

cdef enum:
    HEADER_BYTES = 32
    ENTRY_BYTES = 64
    PIECES = 1024
    # Unanswered groups on a lane (docs/architecture.md): replies always fit in the initiator's receive buffer.
    WRITE_WINDOW = 64
    READ_WINDOW = 2
    # With digests, payload moves in windows that are hashed while they are still in the cache.
    DIGEST_WINDOW = 4 * 65536

LANES_MAX = 64


cdef struct mp_run:
    # One batch on one lane.
    mp_lane* lane
    mp_batch* batch
    uint32_t* todo           # indices of the transfers to carry, in order
    uint64_t n
    uint64_t sent            # entries of todo already in a group
    bint heard               # any byte of an answer came
    bint ask_again           # a READ group had a bad entry: its good ones are still PENDING

cdef struct mp_cursor:
    # A walk over the payload of todo[next:stop].
    uint64_t next
    uint64_t stop
    uint64_t done            # bytes of todo[next] already walked


# ---- lanes -----------------------------------------------------------------------------------------------------------

cdef mp_lane* lane_new(mp_lanes* lanes, int fd) noexcept nogil:
    cdef mp_lane* lane = <mp_lane*>calloc(1, sizeof(mp_lane))
    if lane == NULL:
        return NULL
    lane.frame = <uint8_t*>malloc(HEADER_BYTES + MP_GROUP_MAX * ENTRY_BYTES)
    lane.pieces = <iovec*>malloc((PIECES + 2) * sizeof(iovec))
    if lane.frame == NULL or lane.pieces == NULL or stream_open(&lane.stream, fd, lanes.io) != COMPLETE:
        free(lane.frame)
        free(lane.pieces)
        free(lane)
        return NULL
    lane.stream.stall_ns = lanes.stall_ns
    return lane


cdef void lane_free(mp_lane* lane) noexcept nogil:
    stream_close(&lane.stream)
    free(lane.frame)
    free(lane.pieces)
    free(lane)


cdef int ask_connector(mp_lanes* lanes, double timeout_s, int* fd) noexcept nogil:
    with gil:
        try:
            fd[0] = (<object><PyObject*>lanes.connector)(timeout_s)
            return COMPLETE
        except Exception as problem:
            return int(status_of(problem))


cdef int connect_lane(mp_lanes* lanes, mp_batch* batch, mp_lane** out) noexcept nogil:
    """Open a lane in the place already counted in n_open."""
    cdef int fd = -1, status
    cdef uint64_t now = mp_now_ns()
    cdef double timeout_s = 3600.0
    if batch.deadline_ns:
        timeout_s = (batch.deadline_ns - now) * 1e-9 if batch.deadline_ns > now else 0.001
    status = ask_connector(lanes, timeout_s, &fd)
    if status == COMPLETE:
        out[0] = lane_new(lanes, fd)
        if out[0] == NULL:
            close(fd)
            status = NO_MEMORY
    pthread_mutex_lock(&lanes.lock)
    if status != COMPLETE:
        lanes.n_open -= 1
        pthread_cond_signal(&lanes.freed)
    else:
        lanes.connects += 1
        place_lane(lanes, out[0])
    pthread_mutex_unlock(&lanes.lock)
    return status


cdef void place_lane(mp_lanes* lanes, mp_lane* lane) noexcept nogil:
    cdef uint32_t k
    for k in range(64):
        if lanes.open[k] == NULL:
            lanes.open[k] = lane
            lane.slot = k
            return


cdef int acquire(mp_lanes* lanes, mp_batch* batch, mp_lane** out) noexcept nogil:
    """An idle lane, or a new one, or wait for one to be freed until the batch's deadline. A status."""
    cdef int early
    pthread_mutex_lock(&lanes.lock)
    while True:
        early = batch_interrupted(batch)
        if lanes.closing:
            early = PEER_GONE
        if early:
            pthread_mutex_unlock(&lanes.lock)
            return early
        if lanes.idle != NULL:
            out[0] = lanes.idle
            lanes.idle = out[0].next
            pthread_mutex_unlock(&lanes.lock)
            return COMPLETE
        if lanes.n_open < lanes.n_max:
            lanes.n_open += 1
            pthread_mutex_unlock(&lanes.lock)
            return connect_lane(lanes, batch, out)
        # A short step, so that cancel is noticed.
        mp_cond_wait_until(&lanes.freed, &lanes.lock, mp_now_ns() + 20000000)


cdef void give_back(mp_lanes* lanes, mp_lane* lane, bint good) noexcept nogil:
    pthread_mutex_lock(&lanes.lock)
    if good and not lanes.closing:
        lane.served += 1
        lane.next = lanes.idle
        lanes.idle = lane
        lane = NULL
    else:
        lanes.open[lane.slot] = NULL
        lanes.n_open -= 1
        lanes.lost += not good
    pthread_cond_signal(&lanes.freed)
    if lanes.closing:
        pthread_cond_broadcast(&lanes.freed)
    pthread_mutex_unlock(&lanes.lock)
    if lane != NULL:
        lane_free(lane)


cdef int board(mp_lane* lane, mp_batch* batch, mp_lanes* lanes) noexcept nogil:
    """Tie a batch to its lane, so that cancel can tear the lane down. A status."""
    lane.stream.cancel = &batch.cancel
    lane.stream.deadline_ns = batch.deadline_ns
    pthread_mutex_lock(&batch.lock)
    batch.lane_fd = lane.stream.fd
    pthread_mutex_unlock(&batch.lock)
    return batch_interrupted(batch)


cdef void alight(mp_lane* lane, mp_batch* batch) noexcept nogil:
    pthread_mutex_lock(&batch.lock)
    batch.lane_fd = -1
    pthread_mutex_unlock(&batch.lock)
    lane.stream.cancel = NULL
    lane.stream.deadline_ns = 0


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
    cdef uint64_t most = DIGEST_WINDOW if digest else <uint64_t>1 << 30
    cdef int n, status
    while cursor.next < stop or n_lead:
        before = cursor
        n = fill_window(run, &cursor, lane.pieces + n_lead, most)
        if digest and sending:
            digest_window(run, &before, &cursor)
        if sending:
            status = stream_send(&lane.stream, lane.pieces, n + n_lead)
        else:
            status = stream_receive(&lane.stream, lane.pieces, n, True)
        if status:
            return status
        if digest and not sending:
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


cdef int receive_answer(mp_run* run, uint64_t id, uint64_t first, uint64_t stop, bint bulk) noexcept nogil:
    """Take the answer to one group: statuses of todo[first:stop], and for READ the payload. A status of the lane."""
    cdef mp_header header
    cdef uint8_t marks[256]
    cdef uint64_t k, i, payload = 0
    cdef iovec piece
    cdef int status
    cdef bint failed = False
    cdef mp_batch* batch = run.batch
    piece.iov_base = &header
    piece.iov_len = HEADER_BYTES
    status = stream_receive(&run.lane.stream, &piece, 1, bulk)
    if status:
        return status
    run.heard = True
    if (header.magic != MP_MAGIC or header.op != (batch.op | MP_REPLY) or header.id != id
            or header.count != stop - first or header.reserved != 0):
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
        return COMPLETE
    piece.iov_base = marks
    piece.iov_len = stop - first
    status = stream_receive(&run.lane.stream, &piece, 1, False)
    if status:
        return status
    for k in range(first, stop):
        i = run.todo[k]
        if marks[k - first] == PENDING or marks[k - first] > 15:
            return PROTOCOL
        if marks[k - first] != COMPLETE:
            failed = True
        elif batch.op == OP_READ:
            # A READ group with a bad entry brings no payload: the good ones are asked for again.
            run.ask_again = True
            continue
        batch.status[i] = marks[k - first]
    # A failed group that fails nobody would have us ask for ever.
    return COMPLETE if failed else PROTOCOL


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
                batch.status[i] = 7
                continue
            run.todo[run.n] = <uint32_t>i
            run.n += 1
    return 0


cdef int tcp_run(mp_path* path, mp_segment* segment, mp_batch* batch) noexcept nogil:
    """Carry what is pending over one lane. Returns 0: this is the last resort, nothing is left for others."""
    cdef mp_lanes* lanes = <mp_lanes*>path.context
    cdef uint64_t started = mp_now_ns(), i, n_bytes = 0, carried = 0
    cdef uint32_t one[1]
    cdef mp_run run
    cdef int status = COMPLETE
    cdef bint again = True
    run.todo = NULL
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
        elif batch.status[i] == COMPLETE:
            carried += 1
            n_bytes += batch.length[i]
    if status == COMPLETE and carried:
        mp_path_record(&path.stats, batch.op != OP_READ, carried, n_bytes, mp_now_ns() - started)
    return 0


cdef class LanePool:
    """Up to `lanes_max` lanes to one peer. `connector(timeout_s) -> fd` opens one; it may raise any MoonpoolError."""

    def __cinit__(self, connector, *, unsigned int lanes_max, int io, uint64_t spin_ns, uint64_t spin_max_bytes,
                  uint64_t stall_ns):
        if not 1 <= lanes_max <= LANES_MAX:
            raise UsageError(f"lanes_max={lanes_max}: a peer has 1 to {LANES_MAX} lanes", field="lanes_per_peer_max")
        self.raw = <mp_lanes*>calloc(1, sizeof(mp_lanes))
        if self.raw == NULL:
            raise MemoryError
        mp_sync_init(&self.raw.lock, &self.raw.freed)
        # Numbers grow over all pools of a process, so the owner can tell a repeated notification from a new one.
        self.raw.notice_id = mp_now_ns()
        self.connector = connector
        self.raw.connector = <void*>connector
        self.raw.n_max = lanes_max
        self.raw.io = io
        self.raw.spin_ns = spin_ns
        self.raw.spin_max_bytes = spin_max_bytes
        self.raw.stall_ns = stall_ns

    def __dealloc__(self):
        if self.raw != NULL:
            pthread_mutex_destroy(&self.raw.lock)
            pthread_cond_destroy(&self.raw.freed)
            free(self.raw)

    @property
    def open(self) -> int:
        """Lanes open now."""
        return self.raw.n_open

    def counters(self) -> dict:
        """Lanes connected and lanes lost since the start."""
        return {"connects": self.raw.connects, "lost": self.raw.lost, "open": self.raw.n_open}

    def shut(self) -> None:
        """Refuse new batches and shut every lane down: running batches end as PEER_GONE."""
        cdef uint32_t k
        cdef mp_lane* idle
        pthread_mutex_lock(&self.raw.lock)
        self.raw.closing = 1
        for k in range(64):
            if self.raw.open[k] != NULL:
                shutdown(self.raw.open[k].stream.fd, SHUT_RDWR)
        idle = self.raw.idle
        self.raw.idle = NULL
        pthread_cond_broadcast(&self.raw.freed)
        pthread_mutex_unlock(&self.raw.lock)
        while idle != NULL:
            lane = idle
            idle = lane.next
            give_back(self.raw, lane, True)

    def close(self, double timeout_s) -> bool:
        """`shut`, then wait until no batch uses a lane; False when the wait ran out."""
        cdef uint64_t deadline = mp_now_ns() + <uint64_t>(timeout_s * 1e9)
        cdef int rc = 0
        self.shut()
        with nogil:
            pthread_mutex_lock(&self.raw.lock)
            while self.raw.n_open and rc == 0:
                rc = mp_cond_wait_until(&self.raw.freed, &self.raw.lock, deadline)
            pthread_mutex_unlock(&self.raw.lock)
        return self.raw.n_open == 0

    def close_after_fork(self) -> None:
        """In a forked child: close our copies of the sockets; the parent's stay as they are."""
        cdef uint32_t k
        for k in range(64):
            if self.raw.open[k] != NULL:
                close(self.raw.open[k].stream.fd)
                self.raw.open[k] = NULL
        self.raw.idle = NULL
        self.raw.n_open = 0
        self.raw.closing = 1

    def call(self, int op, bytes message, double timeout_s) -> None:
        """One FLUSH, PING or NOTIFY round trip on a lane; raises the error of its status. Notifications keep order."""
        cdef mp_batch batch
        cdef const char* data = message
        cdef uint32_t size = <uint32_t>len(message)
        cdef int status
        if len(message) > MP_NOTICE_MAX:
            raise UsageError(f"a notification has at most {MP_NOTICE_MAX} bytes, this one {len(message)}",
                             limit=MP_NOTICE_MAX)
        cdef uint8_t mark = PENDING
        batch_on_stack(&batch, op, &mark)
        batch.deadline_ns = mp_now_ns() + <uint64_t>(timeout_s * 1e9)
        with nogil:
            status = lanes_call(self.raw, &batch, op, data, size)
        batch_off_stack(&batch)
        if status:
            raise error_from_status(status)


cdef int lanes_call(mp_lanes* lanes, mp_batch* batch, int op, const char* data, uint32_t size) noexcept nogil:
    cdef int status
    cdef bint again = True
    if op == OP_NOTIFY:
        # One notification at a time and each acknowledged: so they arrive in the order of the calls.
        status = take_notify_turn(lanes, batch)
        if status:
            return status
    while again:
        status = call_once(lanes, batch, op, data, size, &again)
    if op == OP_NOTIFY:
        pthread_mutex_lock(&lanes.lock)
        lanes.notifying = 0
        pthread_cond_broadcast(&lanes.freed)
        pthread_mutex_unlock(&lanes.lock)
    return status


cdef int take_notify_turn(mp_lanes* lanes, mp_batch* batch) noexcept nogil:
    cdef int status = COMPLETE
    pthread_mutex_lock(&lanes.lock)
    while lanes.notifying and status == COMPLETE:
        mp_cond_wait_until(&lanes.freed, &lanes.lock, mp_now_ns() + 20000000)
        status = batch_interrupted(batch)
    if status == COMPLETE:
        lanes.notifying = 1
        lanes.notice_id += 1
    pthread_mutex_unlock(&lanes.lock)
    return status


cdef int call_once(mp_lanes* lanes, mp_batch* batch, int op, const char* data, uint32_t size, bint* again) noexcept nogil:
    cdef mp_lane* lane = NULL
    cdef mp_header header
    cdef iovec pieces[2]
    cdef uint64_t id
    cdef int status
    again[0] = False
    status = acquire(lanes, batch, &lane)
    if status:
        return status
    board(lane, batch, lanes)
    lane.stream.spin_ns = lanes.spin_ns
    if op == OP_NOTIFY:
        id = lanes.notice_id
    else:
        id = lane.next_id
        lane.next_id += 1
    memset(&header, 0, sizeof(header))
    header.magic = MP_MAGIC
    header.op = <uint8_t>op
    header.id = id
    header.payload = size
    pieces[0].iov_base = &header
    pieces[0].iov_len = HEADER_BYTES
    pieces[1].iov_base = <void*>data
    pieces[1].iov_len = size
    status = stream_send(&lane.stream, pieces, 2 if size else 1)
    if status == COMPLETE:
        pieces[0].iov_base = &header
        pieces[0].iov_len = HEADER_BYTES
        status = stream_receive(&lane.stream, pieces, 1, False)
    alight(lane, batch)
    if status:
        # Sending a lost notification again is safe: its number makes the owner drop the second one.
        again[0] = status == PEER_GONE and lane.served > 0
        give_back(lanes, lane, False)
        return status
    if header.magic != MP_MAGIC or header.op != (op | MP_REPLY) or header.id != id or header.flags > 15:
        give_back(lanes, lane, False)
        return PROTOCOL
    give_back(lanes, lane, True)
    return header.flags


cdef int announce(void* context, mp_batch* batch) noexcept nogil:
    """Send a batch's notification after its transfers; a failure becomes the batch's."""
    cdef mp_segment* segment = <mp_segment*>context
    cdef int status = PEER_GONE
    if segment.lanes != NULL:
        status = lanes_call(<mp_lanes*>segment.lanes, batch, OP_NOTIFY, <const char*>batch.notice, batch.notice_bytes)
    if status:
        batch.status[batch.n - 1] = <uint8_t>status
    return status


def add_tcp_path(NativeSegment segment, LanePool lanes) -> int:
    """Let a segment be reached over these lanes; returns the path id. It must be the last path added."""
    return segment.add_path(tcp_run, lanes.raw, lanes).id


def set_notice_lanes(NativeSegment segment, LanePool lanes) -> None:
    """Send the notifications of a segment's batches over these lanes."""
    segment.keep.append(lanes)
    segment.raw.lanes = lanes.raw


def announce_by_lane(Batch batch) -> None:
    """Make a batch with a notice send it over the segment's lanes."""
    batch.raw.announce = announce
