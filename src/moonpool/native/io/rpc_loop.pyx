"""The server's loop: one thread, epoll, requests pipelined; hot methods are answered without the GIL.

Theory of operation
-------------------
`poll` is the loop. It reads whole frames from whoever has sent some, checks their structure before anything trusts it,
lets the native core answer hot requests straight into the connection's outbound buffer, queues the others as events.
It returns to Python when there are events, when it was woken, or at its timeout. A connection has turns: in each it may
bring so many bytes and frames, then the next one is served; what it is sent in a turn goes out in one write.

A connection is *paused* (not read) while it has too many unanswered requests or too many unsent bytes: TCP then holds
its sender back. One that takes none of its bytes for `stall_ms`, that needs more than `frame_ms` for one frame, or that
breaks the format, is closed. Each connection ends with exactly one CLOSED event, after which its number means nobody.

After traffic the loop yields and looks again for `spin_us` before it sleeps (docs/decisions/0004-waiting.md).

Threads: `add` and `wake` may be called by any; all else belongs to the thread that calls `poll`.
"""

from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcmp, memcpy, memmove
from moonpool.native.io.guard cimport mp_now_ns, mp_tally
from moonpool.native.io.rpc_hot cimport (
    HOT_ANSWERED,
    HOT_BAD_PARAMS,
    HOT_COLD,
    HOT_EXISTS,
    HOT_LOOKUP,
    HOT_PUT_END,
    HOT_PUT_START,
    HotCall,
    hot_reserve,
)
from moonpool.native.io.rpc_msgpack cimport (
    MP_RPC_REQUEST,
    mp_pack_str,
    mp_pack_uint,
    mp_rpc_begin_reply,
    mp_rpc_length,
    mp_rpc_length_of,
    mp_rpc_message,
    mp_rpc_parse,
)

cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <sched.h>
    #include <sys/epoll.h>
    #include <sys/eventfd.h>
    #include <sys/socket.h>
    #include <unistd.h>
    static inline int mp_watch(int ep, int op, int fd, uint32_t events, void *who) {
        struct epoll_event e = {.events = events, .data = {.ptr = who}};
        return epoll_ctl(ep, op, fd, &e);
    }
    static inline uint64_t mp_boot_ms(void) {
        struct timespec t;
        clock_gettime(CLOCK_BOOTTIME, &t);
        return (uint64_t)t.tv_sec * 1000u + (uint64_t)t.tv_nsec / 1000000u;
    }
    static inline unsigned mp_log2_bucket(uint64_t ns) { return ns ? 63u - (unsigned)__builtin_clzll(ns) : 0; }
    """
    int mp_watch(int ep, int op, int fd, uint32_t events, void* who) nogil
    uint64_t mp_boot_ms() nogil
    unsigned mp_log2_bucket(uint64_t ns) nogil
    int epoll_create1(int flags) nogil
    int epoll_wait(int ep, epoll_event* events, int n, int timeout_ms) nogil
    int eventfd(unsigned int initial, int flags) nogil
    int sched_yield() nogil
    int close(int fd) nogil
    ssize_t c_read "read" (int fd, void* data, size_t n) nogil
    ssize_t c_write "write" (int fd, const void* data, size_t n) nogil
    ssize_t recv(int fd, void* data, size_t n, int flags) nogil
    ssize_t send(int fd, const void* data, size_t n, int flags) nogil
    int EPOLL_CLOEXEC, EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, EPOLLIN, EPOLLOUT, EPOLLERR, EPOLLHUP
    int EFD_CLOEXEC, EFD_NONBLOCK, MSG_DONTWAIT, MSG_NOSIGNAL

cdef enum:
    READY_AT_ONCE = 64
    FIRST_BYTES = 16384
    LEAST_BYTES = 8192       # a read has at least so much room
    KEPT_BYTES = 262144      # an empty buffer above this is given back
    OWN_BYTES = 65536        # a buffer up to this is had whatever the others have
    TURN_BYTES = 262144
    TURN_FRAMES = 64
    SWEEP_NS = 100000000


# ---- endings, events, lists ------------------------------------------------------------------------------------------

cdef void queue_event(rpc_loop* loop, rpc_event* event) noexcept nogil:
    event.next = NULL
    if loop.last == NULL:
        loop.first = event
    else:
        loop.last.next = event
    loop.last = event
    loop.n_events += 1
    if event.kind == KIND_REQUEST:
        loop.event_bytes += event.params_bytes


cdef rpc_event* next_event(rpc_loop* loop) noexcept nogil:
    """Takes the oldest event, or NULL. A request's is freed by the caller, the other is a part of its connection."""
    cdef rpc_event* event = loop.first
    if event == NULL:
        return NULL
    loop.first = event.next
    if loop.first == NULL:
        loop.last = NULL
    loop.n_events -= 1
    if event.kind == KIND_REQUEST:
        loop.event_bytes -= event.params_bytes
    return event


cdef void make_ready(rpc_loop* loop, rpc_connection* c) noexcept nogil:
    """Gives a connection a turn in the next pass, whatever epoll says."""
    if c.ready or c.fd < 0:
        return
    c.ready = True
    c.next_ready = NULL
    if loop.last_ready == NULL:
        loop.first_ready = c
    else:
        loop.last_ready.next_ready = c
    loop.last_ready = c


cdef void get_known(rpc_loop* loop, rpc_connection* c) noexcept nogil:
    """Puts a connection on the loop's own list, at its first sign of life."""
    if not c.known:
        c.known = True
        c.previous = NULL
        c.next = loop.connections
        if c.next != NULL:
            c.next.previous = c
        loop.connections = c


cdef void end(rpc_loop* loop, rpc_connection* c, int reason) noexcept nogil:
    """Closes the descriptor and gives back the buffers; the structure lives until Python has seen the event."""
    if c.fd < 0:
        return
    # A forked child may hold the same open file, which would keep it watched after our close.
    mp_watch(loop.epoll_fd, EPOLL_CTL_DEL, c.fd, 0, NULL)
    close(c.fd)
    c.fd = -1
    loop.buffer_bytes -= c.capacity + c.out.capacity
    free(c.inbound)
    free(c.out.data)
    c.inbound = c.out.data = NULL
    c.begin = c.end = c.capacity = c.out.length = c.out.capacity = c.sent = 0
    if c.known:
        if c.previous != NULL:
            c.previous.next = c.next
        else:
            loop.connections = c.next
        if c.next != NULL:
            c.next.previous = c.previous
        c.known = False
    mp_tally(&loop.closed[reason], 1)
    c.closed.kind = KIND_CLOSED
    c.closed.reason = reason
    c.closed.connection = c.number
    queue_event(loop, &c.closed)


cdef void forget(rpc_loop* loop, rpc_connection* c) noexcept nogil:
    """The structure of an ended connection is about to be freed: it may still wait for a turn."""
    cdef rpc_connection* at = loop.first_ready
    cdef rpc_connection* before = NULL
    if not c.ready:
        return
    while at != c:
        before = at
        at = at.next_ready
    if before == NULL:
        loop.first_ready = c.next_ready
    else:
        before.next_ready = c.next_ready
    if loop.last_ready == c:
        loop.last_ready = before


# ---- sending ---------------------------------------------------------------------------------------------------------

cdef bint out_room(rpc_loop* loop, rpc_connection* c, size_t more) noexcept nogil:
    """Room for more outbound bytes, or the connection ends."""
    cdef size_t before = c.out.capacity
    cdef int rc
    if c.sent and c.sent == c.out.length:
        c.sent = c.out.length = 0
    if c.sent > FIRST_BYTES and c.sent * 2 > c.out.length:
        memmove(c.out.data, c.out.data + c.sent, c.out.length - c.sent)
        c.out.length -= c.sent
        c.sent = 0
    c.out.limit = c.sent + loop.outbound_bytes_max + loop.frame_bytes_max + 64
    rc = hot_reserve(&c.out, more)
    loop.buffer_bytes += c.out.capacity - before
    if rc:
        end(loop, c, OVERFLOW if rc == -1 else OVERLOADED)
        return False
    if loop.buffer_bytes > loop.buffer_bytes_max and c.out.capacity > OWN_BYTES:
        end(loop, c, OVERLOADED)
        return False
    return True


cdef void flush(rpc_loop* loop, rpc_connection* c) noexcept nogil:
    """Sends what the socket takes. Answers of hot methods leave only while the leader's lease lasts: this process may
    have stood still since they were made, or the socket may have been full."""
    cdef ssize_t n
    if c.hot_unsent and mp_boot_ms() + loop.offset_ms >= loop.hot_until_ms:
        end(loop, c, LEASE_OVER)
        return
    while c.sent < c.out.length:
        n = send(c.fd, c.out.data + c.sent, c.out.length - c.sent, MSG_DONTWAIT | MSG_NOSIGNAL)
        if n < 0:
            if errno == EINTR:
                continue
            if errno != EAGAIN:
                end(loop, c, PEER_CLOSED)
                return
            if c.out_since_ns == 0:
                c.out_since_ns = mp_now_ns()
                loop.at_risk = True
            return
        c.sent += n
        mp_tally(&loop.bytes_out, n)
        if c.out_since_ns:
            c.out_since_ns = mp_now_ns()
    c.sent = c.out.length = 0
    c.out_since_ns = 0
    c.hot_unsent = False
    if c.out.capacity > KEPT_BYTES:
        loop.buffer_bytes -= c.out.capacity
        free(c.out.data)
        c.out.data = NULL
        c.out.capacity = 0
    if c.closing:
        end(loop, c, CLOSED_HERE)


cdef void answer_error(rpc_loop* loop, rpc_connection* c, uint64_t id, int code, const char* name, size_t name_bytes,
                       const char* text, size_t text_bytes) noexcept nogil:
    """Replies [code, name, text] (both short)."""
    cdef size_t start
    cdef uint8_t* p
    if not out_room(loop, c, 64 + name_bytes + text_bytes):
        return
    start = c.out.length
    p = mp_rpc_begin_reply(c.out.data + start, id)
    p[0] = 0x93
    p = mp_pack_uint(p + 1, code)
    p = mp_pack_str(p, name_bytes)
    memcpy(p, name, name_bytes)
    p = mp_pack_str(p + name_bytes, text_bytes)
    memcpy(p, text, text_bytes)
    p += text_bytes
    p[0] = 0xc0
    c.out.length = p + 1 - c.out.data
    mp_rpc_length(c.out.data + start, c.out.length - start - 4)
    mp_tally(&loop.replies, 1)


# ---- requests --------------------------------------------------------------------------------------------------------

cdef int hot_method(const mp_rpc_message* m) noexcept nogil:
    """HOT_*, or -1 for the methods of Python."""
    if m.method_bytes == 6:
        if memcmp(m.method, b"exists", 6) == 0:
            return HOT_EXISTS
        if memcmp(m.method, b"lookup", 6) == 0:
            return HOT_LOOKUP
    elif m.method_bytes == 7 and memcmp(m.method, b"put_end", 7) == 0:
        return HOT_PUT_END
    elif m.method_bytes == 9 and memcmp(m.method, b"put_start", 9) == 0:
        return HOT_PUT_START
    return -1


cdef void serve_cold(rpc_loop* loop, rpc_connection* c, const mp_rpc_message* m) noexcept nogil:
    cdef rpc_event* event = <rpc_event*>malloc(sizeof(rpc_event) + m.method_bytes + m.body_bytes)
    cdef uint8_t* data
    if event == NULL:
        end(loop, c, OVERLOADED)
        return
    event.kind = KIND_REQUEST
    event.connection = c.number
    event.id = m.id
    event.since_ns = loop.active_ns
    event.method_bytes = m.method_bytes
    event.params_bytes = m.body_bytes
    data = <uint8_t*>(event + 1)
    memcpy(data, m.method, m.method_bytes)
    memcpy(data + m.method_bytes, m.body, m.body_bytes)
    c.unanswered += 1
    mp_tally(&loop.cold, 1)
    queue_event(loop, event)


cdef void serve_hot(rpc_loop* loop, rpc_connection* c, int method, const mp_rpc_message* m,
                    uint64_t now_ms) noexcept nogil:
    """Lets the core answer behind the reply's head; what it leaves goes to Python."""
    cdef HotCall call
    cdef size_t start, before
    cdef uint64_t began = mp_now_ns(), took
    cdef uint8_t* p
    cdef int rc
    if not out_room(loop, c, 32):
        return
    start = c.out.length
    before = c.out.capacity
    p = mp_rpc_begin_reply(c.out.data + start, m.id)
    p[0] = 0xc0
    c.out.length = p + 1 - c.out.data
    c.out.limit = start + 4 + loop.frame_bytes_max
    call.connection = c.number
    call.client = c.client
    call.tenant = c.tenant
    call.now_ms = now_ms
    call.params = m.body
    call.params_bytes = m.body_bytes
    rc = loop.hot(loop.core, method, &call, &c.out)
    loop.buffer_bytes += c.out.capacity - before
    if rc != HOT_ANSWERED:
        c.out.length = start
        if rc == HOT_COLD:
            serve_cold(loop, c, m)
        elif rc == HOT_BAD_PARAMS:
            mp_tally(&loop.bad_params, 1)
            answer_error(loop, c, m.id, 65, b"BAD_PARAMS", 10, b"these are not the parameters of this method", 43)
        else:
            answer_error(loop, c, m.id, 67, b"OVERLOADED", 10, b"the server has no memory for this call", 38)
        return
    mp_rpc_length(c.out.data + start, c.out.length - start - 4)
    c.hot_unsent = True
    mp_tally(&loop.replies, 1)
    mp_tally(&loop.hot_answered, 1)
    took = mp_now_ns() - began
    mp_tally(&loop.latency[method][log2_bucket(took)], 1)
    if method >= HOT_PUT_START and loop.changed_ns == 0:
        loop.changed_ns = began


cdef bint is_paused(rpc_loop* loop, rpc_connection* c) noexcept nogil:
    return (c.closing or c.unanswered >= loop.unanswered_max
            or c.out.length - c.sent > loop.outbound_bytes_max)


cdef bint has_frame(rpc_connection* c) noexcept nogil:
    cdef size_t have = c.end - c.begin
    return have >= 4 and have - 4 >= mp_rpc_length_of(c.inbound + c.begin)


cdef void take_frames(rpc_loop* loop, rpc_connection* c) noexcept nogil:
    """Serves the whole frames that were read, within one turn's share."""
    cdef mp_rpc_message m
    cdef uint32_t length
    cdef int left = TURN_FRAMES, method
    cdef uint64_t now_ms = mp_boot_ms() + loop.offset_ms
    cdef bint is_hot = loop.hot != NULL and c.client != 0 and now_ms < loop.hot_until_ms
    while c.fd >= 0 and c.end - c.begin >= 4 and not is_paused(loop, c):
        length = mp_rpc_length_of(c.inbound + c.begin)
        if length == 0 or length > loop.frame_bytes_max:
            end(loop, c, FRAME_TOO_LARGE if length else MALFORMED)
            return
        if c.end - c.begin - 4 < length:
            break
        if left == 0 or loop.n_events >= loop.events_max or loop.event_bytes >= loop.frame_bytes_max:
            break
        left -= 1
        if mp_rpc_parse(c.inbound + c.begin + 4, length, &m) or m.type != MP_RPC_REQUEST:
            end(loop, c, MALFORMED)
            return
        mp_tally(&loop.requests, 1)
        method = hot_method(&m) if is_hot else -1
        if method >= 0:
            serve_hot(loop, c, method, &m, now_ms)
        else:
            serve_cold(loop, c, &m)
        c.begin += 4 + length
    if c.fd >= 0 and c.begin == c.end:
        c.begin = c.end = 0
        if c.capacity > KEPT_BYTES:
            loop.buffer_bytes -= c.capacity
            free(c.inbound)
            c.inbound = NULL
            c.capacity = 0


# ---- receiving -------------------------------------------------------------------------------------------------------

cdef bint in_room(rpc_loop* loop, rpc_connection* c) noexcept nogil:
    """Room to read into: an unfinished frame moves to the front, and the buffer grows only as bytes really come."""
    cdef size_t have = c.end - c.begin, wanted
    cdef uint8_t* grown = NULL
    if c.capacity - c.end >= LEAST_BYTES:
        return True
    if c.begin:
        memmove(c.inbound, c.inbound + c.begin, have)
        c.begin = 0
        c.end = have
    if c.capacity - c.end >= LEAST_BYTES:
        return True
    wanted = c.capacity * 2 if c.capacity else <size_t>FIRST_BYTES
    if wanted > loop.frame_bytes_max + FIRST_BYTES:
        wanted = loop.frame_bytes_max + FIRST_BYTES
    if wanted > c.capacity and (wanted <= OWN_BYTES
                                or loop.buffer_bytes + wanted - c.capacity <= loop.buffer_bytes_max):
        grown = <uint8_t*>realloc(c.inbound, wanted)
    if grown == NULL:
        end(loop, c, OVERLOADED)
        return False
    loop.buffer_bytes += wanted - c.capacity
    c.inbound = grown
    c.capacity = wanted
    return True


cdef void receive(rpc_loop* loop, rpc_connection* c) noexcept nogil:
    """One read, as much as a turn allows."""
    cdef size_t room
    cdef ssize_t n
    if not in_room(loop, c):
        return
    room = c.capacity - c.end
    if room > TURN_BYTES:
        room = TURN_BYTES
    n = recv(c.fd, c.inbound + c.end, room, MSG_DONTWAIT)
    if n > 0:
        c.end += n
        mp_tally(&loop.bytes_in, n)
        loop.active_ns = mp_now_ns()
    elif n == 0 or (errno != EAGAIN and errno != EINTR):
        end(loop, c, PEER_CLOSED)


cdef void watch(rpc_loop* loop, rpc_connection* c) noexcept nogil:
    """Asks epoll for what the connection now waits for."""
    cdef uint32_t interest = 0
    if not is_paused(loop, c) and not has_frame(c):
        interest |= <uint32_t>EPOLLIN
    if c.sent < c.out.length:
        interest |= <uint32_t>EPOLLOUT
    if interest != c.interest:
        c.interest = interest
        if mp_watch(loop.epoll_fd, EPOLL_CTL_MOD, c.fd, interest, c) != 0:
            end(loop, c, OVERLOADED)


cdef void serve(rpc_loop* loop, rpc_connection* c, uint32_t events) noexcept nogil:
    """A connection's turn."""
    if c.fd < 0:
        return
    get_known(loop, c)
    if is_paused(loop, c):
        if events & <uint32_t>(EPOLLERR | EPOLLHUP):
            end(loop, c, PEER_CLOSED)
    elif events & <uint32_t>(EPOLLIN | EPOLLERR | EPOLLHUP) and not has_frame(c):
        receive(loop, c)
    if c.fd >= 0:
        take_frames(loop, c)
    if c.fd >= 0:
        flush(loop, c)
    if c.fd < 0:
        return
    if has_frame(c):
        c.frame_since_ns = 0
        if not is_paused(loop, c):
            make_ready(loop, c)
    elif c.begin == c.end or is_paused(loop, c):
        c.frame_since_ns = 0
    elif c.frame_since_ns == 0:
        c.frame_since_ns = mp_now_ns()
        loop.at_risk = True
    watch(loop, c)


cdef void serve_ready(rpc_loop* loop) noexcept nogil:
    """A turn for each that was ready when the pass began."""
    cdef rpc_connection* c = loop.first_ready
    cdef rpc_connection* following
    loop.first_ready = loop.last_ready = NULL
    while c != NULL:
        following = c.next_ready
        c.ready = False
        serve(loop, c, 0)
        c = following


cdef void sweep(rpc_loop* loop, uint64_t now) noexcept nogil:
    """Ends whoever takes no byte, or is too slow with a frame."""
    cdef rpc_connection* c = loop.connections
    cdef rpc_connection* following
    loop.swept_ns = now
    loop.at_risk = False
    while c != NULL:
        following = c.next
        if c.out_since_ns and now > c.out_since_ns + loop.stall_ns:
            end(loop, c, STALLED)
        elif c.frame_since_ns and now > c.frame_since_ns + loop.frame_ns:
            end(loop, c, SLOW_FRAME)
        elif c.out_since_ns or c.frame_since_ns:
            loop.at_risk = True
        c = following


cdef int wait_ms(rpc_loop* loop, uint64_t now, uint64_t deadline) noexcept nogil:
    """How long to sleep: to the deadline, or to the next sweep when somebody is at risk."""
    cdef uint64_t left = deadline - now if deadline > now else 0
    if loop.at_risk and left > SWEEP_NS:
        left = SWEEP_NS
    left = (left + 999999) / 1000000
    return <int>left if left < 1000000 else 1000000


cdef void loop_run(rpc_loop* loop, uint64_t deadline) noexcept nogil:
    cdef int n, k, sleep_ms = 0
    cdef uint64_t now, counted
    while True:
        n = epoll_wait(loop.epoll_fd, loop.found, READY_AT_ONCE, sleep_ms)
        if n < 0:
            return  # a signal: Python looks at it
        for k in range(n):
            if loop.found[k].data.ptr == NULL:
                c_read(loop.wake_fd, &counted, 8)
                loop.woken = True
            else:
                serve(loop, <rpc_connection*>loop.found[k].data.ptr, loop.found[k].events)
        serve_ready(loop)
        now = mp_now_ns()
        if now > loop.swept_ns + SWEEP_NS:
            sweep(loop, now)
        if loop.n_events or loop.woken or now >= deadline:
            return
        if loop.changed_ns and now > loop.changed_ns + loop.linger_ns:
            return
        sleep_ms = 0
        if n > 0 or loop.first_ready != NULL:
            continue
        if now < loop.active_ns + loop.spin_ns:
            sched_yield()
            continue
        if loop.changed_ns:
            return
        sleep_ms = wait_ms(loop, now, deadline)


cdef bint loop_open(rpc_loop* loop) noexcept nogil:
    loop.epoll_fd = epoll_create1(EPOLL_CLOEXEC)
    loop.wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
    return (loop.epoll_fd >= 0 and loop.wake_fd >= 0
            and mp_watch(loop.epoll_fd, EPOLL_CTL_ADD, loop.wake_fd, <uint32_t>EPOLLIN, NULL) == 0)


cdef void loop_close(rpc_loop* loop) noexcept nogil:
    if loop.epoll_fd >= 0:
        close(loop.epoll_fd)
    if loop.wake_fd >= 0:
        close(loop.wake_fd)
    loop.epoll_fd = loop.wake_fd = -1


cdef bint loop_listen(rpc_loop* loop, int fd, bint on) noexcept nogil:
    """Has the loop return to Python while `fd` is readable, or no more; the owner reads it."""
    return mp_watch(loop.epoll_fd, EPOLL_CTL_ADD if on else EPOLL_CTL_DEL, fd, <uint32_t>EPOLLIN, NULL) == 0


cdef void loop_wake(rpc_loop* loop) noexcept nogil:
    cdef uint64_t one = 1
    if loop.wake_fd >= 0:
        c_write(loop.wake_fd, &one, 8)


cdef bint loop_watch(rpc_loop* loop, rpc_connection* c) noexcept nogil:
    """Begins to watch a new connection: from here on the loop's thread may serve it."""
    c.interest = <uint32_t>EPOLLIN
    return mp_watch(loop.epoll_fd, EPOLL_CTL_ADD, c.fd, c.interest, c) == 0


cdef unsigned log2_bucket(uint64_t ns) noexcept nogil:
    """The bucket of a latency: floor(log2)."""
    return mp_log2_bucket(ns)
