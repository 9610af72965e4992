"""The initiator over tcp: lanes to one peer, and the one-frame calls on them (carry.pyx has the batches).

A lane is used by one batch at a time, driven by the thread that waits for it. Requests go out in groups of up to 256
entries, several in flight; payloads move between socket and destination with no copy between. A lane on which anything
went wrong is closed, never reused: so nothing late can land in a buffer.
"""

from cpython.exc cimport PyErr_SetInterrupt
from cpython.ref cimport PyObject
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset
from moonpool.native.io.batch cimport (
    CANCELLED,
    COMPLETE,
    INTERNAL,
    NO_MEMORY,
    OP_NOTIFY,
    PEER_GONE,
    PENDING,
    PROTOCOL,
    STALLED,
    batch_interrupted,
    batch_whole,
    mp_batch,
    Batch,
    batch_off_stack,
    batch_on_stack,
    mp_cond_wait_until,
    mp_sync_init,
    pthread_cond_broadcast,
    pthread_cond_destroy,
    pthread_mutex_destroy,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from moonpool.native.io.frames cimport MP_GROUP_MAX, MP_MAGIC, MP_NOTICE_MAX, MP_REPLY, mp_header
from moonpool.native.io.guard cimport mp_deadline_ns, mp_load32, mp_now_ns
from moonpool.native.io.segment cimport NativeSegment, mp_segment
from moonpool.native.io.stream cimport iovec, stream_receive, stream_send, stream_close, stream_open

from moonpool.errors import UsageError, error_from_status, status_of

cdef extern from "sys/socket.h" nogil:
    int shutdown(int fd, int how)
    int SHUT_RDWR

cdef extern from *:
    int close(int fd) nogil

cdef extern from "fcntl.h" nogil:
    int fcntl(int fd, int command, int argument)
    int F_DUPFD_CLOEXEC

cdef enum:
    HEADER_BYTES = 32
    ENTRY_BYTES = 64
    PIECES = 1024

LANES_MAX = 64


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


cdef class Dialing:
    """A connection in the making: called with its descriptor, it lets the batch's cancel shut that down.

    It keeps a duplicate, so the connector may close its own whenever it likes.
    """

    cdef mp_batch* batch
    cdef int fd

    def __call__(self, int fd) -> None:
        """Watch this descriptor in place of the one before; TransferCancelled when the batch has been cancelled."""
        if self.batch == NULL:
            raise UsageError("the connector has returned: its socket is not watched any more")
        self.unwatch()
        self.fd = fcntl(fd, F_DUPFD_CLOEXEC, 0)
        if self.fd < 0:
            raise error_from_status(NO_MEMORY, "no file descriptor for a lane: raise RLIMIT_NOFILE")
        pthread_mutex_lock(&self.batch.lock)
        self.batch.lane_fd = self.fd
        pthread_mutex_unlock(&self.batch.lock)
        if mp_load32(&self.batch.cancel):
            raise error_from_status(CANCELLED)

    cdef void unwatch(self) noexcept:
        if self.fd >= 0:
            pthread_mutex_lock(&self.batch.lock)
            self.batch.lane_fd = -1
            pthread_mutex_unlock(&self.batch.lock)
            close(self.fd)
            self.fd = -1


cdef int ask_connector(mp_lanes* lanes, mp_batch* batch, double timeout_s, int* fd) noexcept with gil:
    cdef Dialing dialing = Dialing.__new__(Dialing)
    dialing.batch = batch_whole(batch)
    dialing.fd = -1
    try:
        fd[0] = (<object><PyObject*>lanes.connector)(timeout_s, dialing)
        return COMPLETE if fd[0] >= 0 else INTERNAL
    except KeyboardInterrupt:
        PyErr_SetInterrupt()  # raised again once the caller is back in Python
        return CANCELLED
    except BaseException as problem:
        return int(status_of(problem))
    finally:
        dialing.unwatch()
        dialing.batch = NULL


cdef int connect_lane(mp_lanes* lanes, mp_batch* batch, mp_lane** out) noexcept nogil:
    """Open a lane in the place already counted in n_open."""
    cdef int fd = -1, status, early
    cdef uint64_t now = mp_now_ns()
    cdef double timeout_s = 3600.0
    if batch.deadline_ns:
        timeout_s = (batch.deadline_ns - now) * 1e-9 if batch.deadline_ns > now else 0.001
    status = ask_connector(lanes, batch, timeout_s, &fd)
    if status != COMPLETE:
        early = batch_interrupted(batch)
        if early:
            status = early  # what the connector met with is only how it came to stop
    if status == COMPLETE:
        out[0] = lane_new(lanes, fd)
        if out[0] == NULL:
            close(fd)
            status = NO_MEMORY
    pthread_mutex_lock(&lanes.lock)
    if status != COMPLETE:
        lanes.n_open -= 1
        pthread_cond_broadcast(&lanes.freed)
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
    pthread_cond_broadcast(&lanes.freed)  # to all: notifications wait on it too, for another reason
    pthread_mutex_unlock(&lanes.lock)
    if lane != NULL:
        lane_free(lane)


cdef int board(mp_lane* lane, mp_batch* batch, mp_lanes* lanes) noexcept nogil:
    """Tie a batch to its lane, so that cancel can tear the lane down. A status."""
    cdef mp_batch* whole = batch_whole(batch)
    lane.stream.cancel = &whole.cancel
    lane.stream.dead = batch.segment_dead
    lane.stream.deadline_ns = batch.deadline_ns
    pthread_mutex_lock(&whole.lock)
    whole.lane_fd = lane.stream.fd
    pthread_mutex_unlock(&whole.lock)
    return batch_interrupted(batch)


cdef void alight(mp_lane* lane, mp_batch* batch) noexcept nogil:
    cdef mp_batch* whole = batch_whole(batch)
    pthread_mutex_lock(&whole.lock)
    whole.lane_fd = -1
    pthread_mutex_unlock(&whole.lock)
    lane.stream.cancel = NULL
    lane.stream.dead = NULL
    lane.stream.deadline_ns = 0


cdef bint final_status(uint8_t status) noexcept nogil:
    """True for the statuses that an answer can have."""
    return status <= STALLED and status != PENDING


cdef class LanePool:
    """Up to `lanes_max` lanes to one peer. `connector(timeout_s, dialing) -> fd` opens one.

    It calls `dialing(fd)` with each socket before it waits on it, so that a cancel ends the wait; it may raise any
    MoonpoolError.
    """

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
            self.shut()  # no batch is under way, or it would hold this object: every lane is idle, and closed here
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
        cdef uint64_t deadline = mp_deadline_ns(timeout_s)
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
        batch.deadline_ns = mp_deadline_ns(timeout_s)
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


cdef int call_once(mp_lanes* lanes, mp_batch* batch, int op, const char* data, uint32_t size,
                   bint* again) noexcept nogil:
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
    if (header.magic != MP_MAGIC or header.op != (op | MP_REPLY) or header.id != id or not final_status(header.flags)
            or header.count or header.payload or header.reserved):
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


def set_notice_lanes(NativeSegment segment not None, LanePool lanes not None) -> None:
    """Send the notifications of a segment's batches over these lanes."""
    segment.keep.append(lanes)
    segment.raw.lanes = lanes.raw


def announce_by_lane(Batch batch not None) -> None:
    """Make a batch with a notice send it over the segment's lanes."""
    batch.raw.announce = announce
