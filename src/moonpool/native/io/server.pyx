"""The target side over tcp: one native thread a lane, which never needs the GIL.

A lane thread reads a group's header and entries, checks every entry against the region table, moves the payloads
straight between the socket and the regions, and answers. It yields and looks again for some tens of microseconds before
it blocks. Nothing an initiator sends can make it touch memory outside a region: addresses come only from the table.
"""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.ref cimport Py_INCREF
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy, memmove
from moonpool.native.io.batch cimport (
    COMPLETE,
    OP_FLUSH,
    OP_NOTIFY,
    OP_PING,
    OP_READ,
    OP_WRITE,
    PROTOCOL,
    QUEUE_FULL,
    mp_cond_wait_until,
    mp_start_thread,
    mp_sync_init,
    pthread_cond_broadcast,
    pthread_cond_destroy,
    pthread_mutex_destroy,
    pthread_mutex_lock,
    pthread_mutex_unlock,
    pthread_t,
)
from moonpool.native.io.frames cimport MP_GROUP_MAX, MP_LENGTH_MAX, MP_MAGIC, MP_NOTICE_MAX, MP_REPLY, mp_header
from moonpool.native.io.guard cimport (
    mp_count,
    mp_deadline_ns,
    mp_guard_enter_locked,
    mp_guard_leave,
    mp_guard_lock,
    mp_guard_unlock,
    mp_load32,
    mp_store32,
    mp_tally,
    mp_tick_before,
)
from moonpool.native.io.regions cimport ACCESS_READ, ACCESS_WRITE, LocalRegions, regions_resolve
from moonpool.native.io.stream cimport (
    iovec,
    stream_close,
    stream_open,
    stream_receive,
    stream_receive_some,
    stream_send,
)

from moonpool.errors import EngineClosed, LimitExceeded, OutOfMemory, ResourceError, UsageError

cdef extern from "sys/socket.h" nogil:
    int shutdown(int fd, int how)
    int SHUT_RDWR

cdef extern from "sys/eventfd.h" nogil:
    int eventfd(unsigned int initial, int flags)
    int EFD_CLOEXEC, EFD_NONBLOCK

cdef extern from "unistd.h" nogil:
    ssize_t write(int fd, const void* data, size_t n)
    ssize_t read(int fd, void* data, size_t n)
    int close(int fd)

cdef extern from "pthread.h" nogil:
    int pthread_detach(pthread_t)

cdef enum:
    HEADER_BYTES = 32
    ENTRY_BYTES = 64
    STAGE_BYTES = 32768      # holds the largest frame, and the whole of a small WRITE
    AHEAD_BYTES = 8192       # taken beyond a frame: enough for a small WRITE, little to copy of a large one
    TRASH_BYTES = 65536
    PIECES = 1024
    PAGE = 4096


# ---- reading frames --------------------------------------------------------------------------------------------------

cdef int need(mp_connection* c, uint32_t n, bint idle) noexcept nogil:
    """Have n bytes in the stage. A status."""
    cdef ssize_t got
    cdef uint32_t room
    while c.end - c.begin < n:
        if c.begin == c.end:
            c.begin = c.end = 0
        elif STAGE_BYTES - c.begin < n:
            memmove(c.stage, c.stage + c.begin, c.end - c.begin)
            c.end -= c.begin
            c.begin = 0
        room = n - (c.end - c.begin) + AHEAD_BYTES
        if room > STAGE_BYTES - c.end:
            room = STAGE_BYTES - c.end
        got = stream_receive_some(&c.stream, c.stage + c.end, room, idle and c.begin == c.end)
        if got < 0:
            return <int>-got
        c.end += <uint32_t>got
    return COMPLETE


cdef bint frame_fits(mp_header* header) noexcept nogil:
    """The rules of docs/architecture.md that need the header alone."""
    if header.magic != MP_MAGIC or header.flags != 0 or header.reserved != 0:
        return False
    if header.op == OP_READ or header.op == OP_WRITE:
        return 0 < header.count <= MP_GROUP_MAX and header.payload <= header.count * MP_LENGTH_MAX
    if header.op == OP_NOTIFY:
        return header.count == 0 and header.payload <= MP_NOTICE_MAX
    return (header.op == OP_FLUSH or header.op == OP_PING) and header.count == 0 and header.payload == 0


# ---- moving payload --------------------------------------------------------------------------------------------------

cdef int scatter(mp_connection* c, uint32_t count, uint64_t total) noexcept nogil:
    """Move `total` bytes from the stage and the socket to where[]/length[]; refused entries go to the trash."""
    cdef uint32_t k = 0
    cdef uint64_t done = 0, staged = c.end - c.begin, part
    cdef int n, status
    if staged > total:
        staged = total
    while staged:
        part = c.length[k] - done
        if part > staged:
            part = staged
        if c.where[k] != NULL:
            memcpy(c.where[k] + done, c.stage + c.begin, part)
        c.begin += <uint32_t>part
        done += part
        staged -= part
        if done == c.length[k]:
            k += 1
            done = 0
    while k < count:
        n = window(c, count, &k, &done)
        if n == 0:
            break
        status = stream_receive(&c.stream, c.pieces, n, True)
        if status:
            return status
    return COMPLETE


cdef int window(mp_connection* c, uint32_t count, uint32_t* k, uint64_t* done) noexcept nogil:
    """Next pieces of where[]/length[] from position (k, done), which moves on; returns how many."""
    cdef int n = 0
    cdef uint64_t part, total = 0
    while k[0] < count and n < PIECES - 1 and total < <uint64_t>1 << 30:
        part = c.length[k[0]] - done[0]
        if part > <uint64_t>1 << 30:
            part = <uint64_t>1 << 30
        if c.where[k[0]] == NULL:
            if part > TRASH_BYTES:
                part = TRASH_BYTES
            c.pieces[n].iov_base = c.trash
        else:
            c.pieces[n].iov_base = c.where[k[0]] + done[0]
            # The kernel's copy into a target a few bytes past a page start is slow on some CPUs: take up the slack to
            # the next page as a piece of its own, so that the rest starts aligned.
            if <size_t>c.pieces[n].iov_base & (PAGE - 1) and done[0] and part > PAGE:
                part = PAGE - (<size_t>c.pieces[n].iov_base & (PAGE - 1))
        if part:
            c.pieces[n].iov_len = part
            n += 1
        total += part
        done[0] += part
        if done[0] == c.length[k[0]]:
            k[0] += 1
            done[0] = 0
    return n


cdef int send_regions(mp_connection* c, mp_header* reply, uint32_t count) noexcept nogil:
    cdef uint32_t k = 0
    cdef uint64_t done = 0
    cdef int n = 0, lead = 1, status
    c.pieces[0].iov_base = reply
    c.pieces[0].iov_len = HEADER_BYTES
    while lead or k < count:
        c.pieces += lead
        n = window(c, count, &k, &done)
        c.pieces -= lead
        if n + lead == 0:
            break
        status = stream_send(&c.stream, c.pieces, n + lead)
        if status:
            return status
        lead = 0
    return COMPLETE


# ---- groups ----------------------------------------------------------------------------------------------------------

cdef bint no_grant(const uint8_t* entry) noexcept nogil:
    """Grants are for WRITEs: their room must be zero elsewhere."""
    cdef uint64_t room[3]
    memcpy(room, entry + 40, 24)
    return (room[0] | room[1] | room[2]) == 0


cdef int check_entries(mp_connection* c, mp_header* header, uint8_t* worst) noexcept nogil:
    """Resolve every entry (guard entered). PROTOCOL for lengths that break a rule, else COMPLETE, and the worst."""
    cdef uint32_t k
    cdef uint64_t total = 0
    cdef uint32_t access = ACCESS_READ if header.op == OP_READ else ACCESS_WRITE
    worst[0] = COMPLETE
    c.count = header.count
    for k in range(header.count):
        c.marks[k] = <uint8_t>regions_resolve(c.server.regions, c.stage + c.begin + k * ENTRY_BYTES, access,
                                              &c.where[k], &c.length[k])
        if c.length[k] > MP_LENGTH_MAX or (access == ACCESS_READ and not no_grant(c.stage + c.begin + k * ENTRY_BYTES)):
            return PROTOCOL
        total += c.length[k]
        if c.marks[k] > worst[0]:
            worst[0] = c.marks[k]
    return COMPLETE if total == header.payload else PROTOCOL


cdef int serve_group(mp_connection* c, mp_header* header) noexcept nogil:
    cdef uint8_t worst = COMPLETE
    cdef uint32_t count = header.count
    cdef uint64_t payload = header.payload
    cdef mp_header reply = header[0]
    cdef int status = check_entries(c, header, &worst)
    if status:
        return status
    c.begin += count * ENTRY_BYTES
    reply.op = header.op | MP_REPLY
    reply.flags = worst
    reply.payload = 0
    if worst:
        mp_tally(&c.server.refused, 1)
    if header.op == OP_READ and worst == COMPLETE:
        reply.payload = payload
        mp_tally(&c.server.bytes_read, payload)
        return send_regions(c, &reply, count)
    if header.op == OP_WRITE:
        mp_store32(&c.inside, LANE_WRITING)
        status = scatter(c, count, payload)
        if status:
            return status
        mp_tally(&c.server.bytes_written, payload)
    c.pieces[0].iov_base = &reply
    c.pieces[0].iov_len = HEADER_BYTES
    c.pieces[1].iov_base = c.marks
    c.pieces[1].iov_len = count
    return stream_send(&c.stream, c.pieces, 2 if worst else 1)


cdef int serve_notice(mp_connection* c, mp_header* header) noexcept nogil:
    cdef uint32_t size = <uint32_t>header.payload, have, got
    cdef mp_header reply = header[0]
    cdef iovec piece
    cdef int status
    cdef mp_notice* notice = <mp_notice*>malloc(sizeof(mp_notice) + size + 1)
    if notice == NULL:
        return PROTOCOL
    notice.next = NULL
    notice.id = header.id
    notice.size = size
    memcpy(notice.sender, c.peer, 16)
    have = c.end - c.begin
    got = have if have < size else size
    memcpy(<char*>(notice + 1), c.stage + c.begin, got)
    c.begin += got
    if got < size:
        piece.iov_base = <char*>(notice + 1) + got
        piece.iov_len = size - got
        status = stream_receive(&c.stream, &piece, 1, False)
        if status:
            free(notice)
            return status
    reply.op = OP_NOTIFY | MP_REPLY
    reply.payload = 0
    reply.flags = queue_notice(c, notice)
    piece.iov_base = &reply
    piece.iov_len = HEADER_BYTES
    return stream_send(&c.stream, &piece, 1)


cdef uint8_t queue_notice(mp_connection* c, mp_notice* notice) noexcept nogil:
    """Queue it (then the queue owns it) or free it: QUEUE_FULL, or a repeat of one that we have."""
    cdef mp_server* server = c.server
    cdef mp_sender* sender
    cdef uint64_t one = 1
    cdef uint8_t status = COMPLETE
    pthread_mutex_lock(&server.lock)
    sender = sender_of(server, c.peer)
    if notice.id <= sender.last_id:
        pass  # sent again because its acknowledgement was lost
    elif server.n_notices >= server.n_notices_max:
        server.notices_full += 1
        status = QUEUE_FULL
    else:
        sender.last_id = notice.id
        if server.last == NULL:
            server.first = notice
        else:
            server.last.next = notice
        server.last = notice
        server.n_notices += 1
        notice = NULL
        write(server.notice_fd, &one, 8)
        pthread_cond_broadcast(&server.changed)
    pthread_mutex_unlock(&server.lock)
    free(notice)
    return status


cdef mp_sender* sender_of(mp_server* server, const uint8_t* instance) noexcept nogil:
    """What we know of a sender, over all its lanes; the longest known makes room for a new one. Lock held."""
    cdef uint32_t k
    cdef mp_sender* sender
    for k in range(<uint32_t>SENDERS):
        if memcmp(server.senders[k].instance, instance, 16) == 0:
            return &server.senders[k]
    sender = &server.senders[server.next_sender]
    server.next_sender = (server.next_sender + 1) % SENDERS
    memcpy(sender.instance, instance, 16)
    sender.last_id = 0
    return sender


cdef int serve_one(mp_connection* c) noexcept nogil:
    """One frame. A status: COMPLETE to go on."""
    cdef mp_header header
    cdef iovec piece
    cdef uint32_t ticket
    cdef int status = need(c, HEADER_BYTES, True)
    if status:
        return status
    memcpy(&header, c.stage + c.begin, HEADER_BYTES)
    if not frame_fits(&header):
        return PROTOCOL
    c.begin += HEADER_BYTES
    mp_tally(&c.server.groups, 1)
    # After a large group the next request is not near: looking out for it would only burn CPU.
    c.stream.spin_ns = c.server.spin_ns if header.payload <= c.server.spin_max_bytes else 0
    if header.op == OP_READ or header.op == OP_WRITE:
        status = need(c, header.count * ENTRY_BYTES, False)
        if status:
            return status
        mp_guard_lock(&c.server.regions.guard)
        ticket = mp_guard_enter_locked(&c.server.regions.guard)
        c.group += 1
        mp_store32(&c.inside, LANE_READING if header.op == OP_READ else LANE_CHECKING)
        mp_guard_unlock(&c.server.regions.guard)
        status = serve_group(c, &header)
        mp_store32(&c.inside, 0)
        mp_guard_leave(&c.server.regions.guard, ticket)
        return status
    if header.op == OP_NOTIFY:
        return serve_notice(c, &header)
    header.op |= MP_REPLY
    piece.iov_base = &header
    piece.iov_len = HEADER_BYTES
    return stream_send(&c.stream, &piece, 1)


# ---- threads ---------------------------------------------------------------------------------------------------------

cdef void* serve(void* context) noexcept nogil:
    cdef mp_connection* c = <mp_connection*>context
    cdef mp_server* server = c.server
    cdef int status = COMPLETE
    while status == COMPLETE:
        status = serve_one(c)
    if status == PROTOCOL:
        mp_tally(&server.broken, 1)
    pthread_mutex_lock(&server.lock)
    unlink(server, c)
    pthread_mutex_unlock(&server.lock)
    connection_free(c)
    pthread_mutex_lock(&server.lock)
    server.n_connections -= 1  # last touch of the server: `close` waits for zero before it frees anything
    pthread_cond_broadcast(&server.changed)
    pthread_mutex_unlock(&server.lock)
    return NULL


cdef void unlink(mp_server* server, mp_connection* c) noexcept nogil:
    if c.previous != NULL:
        c.previous.next = c.next
    else:
        server.connections = c.next
    if c.next != NULL:
        c.next.previous = c.previous


cdef void connection_free(mp_connection* c) noexcept nogil:
    stream_close(&c.stream)
    free(c.stage)
    free(c.pieces)
    free(c.trash)
    free(c)


@cython.no_gc_clear  # lane threads use the region table: a collection must not take it from under them
cdef class TargetServer:
    """Serves this process's regions on accepted lanes. Methods are called with the GIL held."""

    def __cinit__(self, LocalRegions regions not None, *, int io, uint64_t spin_ns, uint64_t spin_max_bytes,
                  uint64_t stall_ns, unsigned int lanes_max, unsigned int notices_max):
        self.raw = <mp_server*>calloc(1, sizeof(mp_server))
        if self.raw == NULL:
            raise MemoryError
        mp_sync_init(&self.raw.lock, &self.raw.changed)
        self.regions = regions
        self.raw.regions = regions.table
        self.raw.io = io
        self.raw.spin_ns = spin_ns
        self.raw.spin_max_bytes = spin_max_bytes
        self.raw.stall_ns = stall_ns
        self.raw.n_max = lanes_max
        self.raw.n_notices_max = notices_max
        self.raw.notice_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
        if self.raw.notice_fd < 0:
            raise ResourceError("no file descriptor for the notification queue: raise RLIMIT_NOFILE")

    def __dealloc__(self):
        if self.raw == NULL:
            return
        if self.raw.n_connections:
            # Lane threads still run: leaking what they use, the region table too, is the only safe thing left.
            Py_INCREF(self.regions)
            return
        self._drop_notices()
        if self.raw.notice_fd >= 0:
            close(self.raw.notice_fd)
        pthread_mutex_destroy(&self.raw.lock)
        pthread_cond_destroy(&self.raw.changed)
        free(self.raw)

    def _drop_notices(self):
        cdef mp_notice* notice
        while self.raw.first != NULL:
            notice = self.raw.first
            self.raw.first = notice.next
            free(notice)
        self.raw.last = NULL
        self.raw.n_notices = 0

    def add_lane(self, int fd, bytes peer_instance) -> None:
        """Serve a connected, blocking socket whose hello is done; takes the fd. On failure it is still the caller's."""
        cdef mp_connection* c
        cdef pthread_t thread
        cdef const char* peer = peer_instance
        if len(peer_instance) != 16:
            raise UsageError("an instance id has 16 bytes")
        if self.raw.stopping or self.raw.n_connections >= self.raw.n_max:
            if self.raw.stopping:
                raise EngineClosed()
            raise LimitExceeded(f"{self.raw.n_max} lanes are open: raise connections_max", field="connections_max",
                                limit=self.raw.n_max)
        c = <mp_connection*>calloc(1, sizeof(mp_connection))
        if c == NULL:
            raise MemoryError
        c.server = self.raw
        c.stage = <uint8_t*>malloc(STAGE_BYTES)
        c.trash = <char*>malloc(TRASH_BYTES)
        c.pieces = <iovec*>malloc((PIECES + 2) * sizeof(iovec))
        memcpy(c.peer, peer, 16)
        if (c.stage == NULL or c.trash == NULL or c.pieces == NULL
                or stream_open(&c.stream, fd, self.raw.io) != COMPLETE):
            c.stream.fd = c.stream.epoll_fd = -1
            connection_free(c)
            raise OutOfMemory("no memory for a lane")
        c.stream.spin_ns = self.raw.spin_ns
        c.stream.stall_ns = self.raw.stall_ns
        pthread_mutex_lock(&self.raw.lock)
        c.next = self.raw.connections
        if c.next != NULL:
            c.next.previous = c
        self.raw.connections = c
        self.raw.n_connections += 1
        self.raw.accepted += 1
        c.serial = self.raw.accepted
        pthread_mutex_unlock(&self.raw.lock)
        if mp_start_thread(&thread, serve, c, b"moonpool-lane") != 0:
            pthread_mutex_lock(&self.raw.lock)
            unlink(self.raw, c)
            self.raw.n_connections -= 1
            pthread_mutex_unlock(&self.raw.lock)
            c.stream.fd = -1
            connection_free(c)
            raise ResourceError("cannot start a thread for a lane: raise RLIMIT_NPROC or free memory")
        pthread_detach(thread)

    def kick_busy(self) -> int:
        """Shut down the lanes that are touching region memory at this moment; returns how many."""
        cdef mp_connection* c
        cdef int n = 0
        pthread_mutex_lock(&self.raw.lock)
        c = self.raw.connections
        while c != NULL:
            if mp_load32(&c.inside):
                shutdown(c.stream.fd, SHUT_RDWR)
                n += 1
            c = c.next
        pthread_mutex_unlock(&self.raw.lock)
        return n

    def close(self, double timeout_s) -> bool:
        """Shut every lane down and wait for their threads; False when some did not end in time."""
        cdef mp_connection* c
        cdef uint64_t deadline = mp_deadline_ns(timeout_s)
        cdef int rc = 0
        pthread_mutex_lock(&self.raw.lock)
        self.raw.stopping = 1
        c = self.raw.connections
        while c != NULL:
            shutdown(c.stream.fd, SHUT_RDWR)
            c = c.next
        pthread_cond_broadcast(&self.raw.changed)
        pthread_mutex_unlock(&self.raw.lock)
        with nogil:
            pthread_mutex_lock(&self.raw.lock)
            while self.raw.n_connections and rc == 0:
                rc = mp_cond_wait_until(&self.raw.changed, &self.raw.lock, deadline)
            if self.raw.n_connections == 0 and self.raw.notice_fd >= 0:
                # Here and not with the object, which a cycle of references may keep for long.
                close(self.raw.notice_fd)
                self.raw.notice_fd = -1
            pthread_mutex_unlock(&self.raw.lock)
        if self.raw.n_connections == 0 and self.raw.notice_fd >= 0:
            close(self.raw.notice_fd)
            self.raw.notice_fd = -1
        return self.raw.n_connections == 0

    def close_after_fork(self) -> None:
        """In a forked child: close our copies of the sockets. The threads exist only in the parent."""
        cdef mp_connection* c = self.raw.connections
        while c != NULL:
            close(c.stream.fd)
            c = c.next
        self.raw.connections = NULL
        self.raw.n_connections = 0
        self.raw.stopping = 1

    @property
    def lanes(self) -> int:
        """Lanes open now."""
        return self.raw.n_connections

    @property
    def notice_fd(self) -> int:
        """An eventfd that is readable while notifications wait; borrowed."""
        return self.raw.notice_fd

    def take_notices(self, unsigned int count_max, timeout_s) -> list:
        """Up to count_max waiting notifications as (sender instance, number, bytes); waits for the first one."""
        cdef uint64_t deadline = 0 if timeout_s is None else mp_deadline_ns(timeout_s)
        cdef mp_notice* notice
        cdef uint64_t count
        cdef uint64_t until
        cdef bint waiting = True
        out = []
        while waiting:
            until = mp_tick_before(deadline)
            with nogil:
                pthread_mutex_lock(&self.raw.lock)
                while waiting and self.raw.first == NULL and not self.raw.stopping:
                    waiting = mp_cond_wait_until(&self.raw.changed, &self.raw.lock, until) == 0
                waiting = self.raw.first == NULL and not self.raw.stopping and until != deadline
                pthread_mutex_unlock(&self.raw.lock)
            PyErr_CheckSignals()  # so that Ctrl-C ends the wait
        pthread_mutex_lock(&self.raw.lock)
        while self.raw.first != NULL and <unsigned int>len(out) < count_max:
            notice = self.raw.first
            self.raw.first = notice.next
            if self.raw.first == NULL:
                self.raw.last = NULL
            self.raw.n_notices -= 1
            out.append((notice.sender[:16], notice.id, (<const char*>(notice + 1))[:notice.size]))
            free(notice)
        if self.raw.first == NULL and self.raw.notice_fd >= 0:
            read(self.raw.notice_fd, &count, 8)
        pthread_mutex_unlock(&self.raw.lock)
        return out

    def counters(self) -> dict:
        """Totals since the start, and what is open now."""
        cdef mp_server* s = self.raw
        return {
            "lanes_open": s.n_connections,
            "lanes_accepted": mp_count(&s.accepted),
            "groups": mp_count(&s.groups),
            "bytes_read": mp_count(&s.bytes_read),
            "bytes_written": mp_count(&s.bytes_written),
            "groups_refused": mp_count(&s.refused),
            "lanes_broken": mp_count(&s.broken),
            "notices_waiting": s.n_notices,
            "notices_refused": mp_count(&s.notices_full),
        }
