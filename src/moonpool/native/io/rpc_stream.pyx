"""A client's connection shared by threads: who waits for an answer reads the socket, for the others too.

Theory of operation
-------------------
Each call enters a *waiter*, sends its frame, and waits. One waiter at a time is the *reader*: it takes frames off the
socket, hands each to the waiter it answers, and stops when its own has come; then the next waiter reads on. So no
answer crosses a thread that need not see it, and a lone caller never leaves its thread. A reader yields and looks again
for `spin_ns` before it sleeps (docs/decisions/0004-waiting.md). Frames are checked whole before anything trusts them.

States: open, then ended with one status for good. A frame that was sent in part, or bytes that are no frame, end it.
"""

from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memmove
from moonpool.native.io.batch cimport (
    NO_MEMORY,
    PEER_GONE,
    PROTOCOL,
    QUEUE_FULL,
    STALLED,
    TIMED_OUT,
    mp_cond_wait_until,
    mp_sync_init,
    pthread_cond_broadcast,
    pthread_cond_destroy,
    pthread_cond_signal,
    pthread_mutex_destroy,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from moonpool.native.io.guard cimport mp_now_ns, mp_tick_before
from moonpool.native.io.rpc_msgpack cimport (
    MP_RPC_PUSH,
    MP_RPC_REPLY,
    mp_rpc_length_of,
    mp_rpc_message,
    mp_rpc_parse,
)

cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <poll.h>
    #include <pthread.h>
    #include <sched.h>
    #include <sys/socket.h>
    #include <time.h>
    #include <unistd.h>
    static inline int mp_rpc_poll(int fd, int events, uint64_t ns) {
        struct pollfd p = {fd, (short)events, 0};
        struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
        return ppoll(&p, 1, &t, 0) > 0 ? p.revents : 0;
    }
    static inline void mp_cond_begin(pthread_cond_t *cond) {
        pthread_condattr_t a;
        pthread_condattr_init(&a);
        pthread_condattr_setclock(&a, CLOCK_MONOTONIC);
        pthread_cond_init(cond, &a);
        pthread_condattr_destroy(&a);
    }
    """
    int mp_rpc_poll(int fd, int events, uint64_t ns) nogil
    void mp_cond_begin(pthread_cond_t* cond) nogil
    int sched_yield() nogil
    int close(int fd) nogil
    int shutdown(int fd, int how) nogil
    ssize_t recv(int fd, void* data, size_t n, int flags) nogil
    ssize_t send(int fd, const void* data, size_t n, int flags) nogil
    int MSG_DONTWAIT, MSG_NOSIGNAL, POLLIN, POLLOUT, SHUT_RDWR

cdef enum:
    FIRST_BYTES = 65536
    LEAST_BYTES = 16384
    KEPT_BYTES = 1048576     # an empty buffer above this is given back


cdef bint stream_init(rpc_stream* s, int fd) noexcept nogil:
    """Takes the descriptor."""
    mp_sync_init(&s.lock, &s.turn)
    s.fd = fd
    s.id_limit = 1
    s.buffer = <uint8_t*>malloc(FIRST_BYTES)
    s.capacity = FIRST_BYTES if s.buffer != NULL else 0
    return s.buffer != NULL


cdef void stream_let_go(rpc_stream* s) noexcept nogil:
    """Closes the descriptor of an ended connection that no thread is inside of."""
    if s.fd >= 0:
        close(s.fd)
    s.fd = -1


cdef void stream_free(rpc_stream* s) noexcept nogil:
    """When no thread is inside any more."""
    cdef rpc_push* push
    stream_let_go(s)
    while s.first_push != NULL:
        push = s.first_push
        s.first_push = push.next
        free(push)
    free(s.buffer)
    s.buffer = NULL
    pthread_cond_destroy(&s.turn)
    pthread_mutex_destroy(&s.lock)


cdef void fail_locked(rpc_stream* s, int status) noexcept nogil:
    cdef rpc_waiter* w = s.waiters
    if s.status == 0:
        s.status = status
        shutdown(s.fd, SHUT_RDWR)  # wakes whoever is inside a system call on it
    while w != NULL:
        pthread_cond_signal(&w.cond)
        w = w.next
    pthread_cond_broadcast(&s.turn)


cdef void stream_fail(rpc_stream* s, int status) noexcept nogil:
    """Ends the connection for a reason; the first one stays."""
    pthread_mutex_lock(&s.lock)
    fail_locked(s, status)
    pthread_mutex_unlock(&s.lock)


cdef void enter(rpc_stream* s, rpc_waiter* w, uint64_t id) noexcept nogil:
    """Registers a waiter, before its frame is sent."""
    w.id = id
    w.done = False
    w.frame = w.error = w.body = NULL
    w.error_bytes = w.body_bytes = 0
    mp_cond_begin(&w.cond)
    pthread_mutex_lock(&s.lock)
    if id >= s.id_limit:
        s.id_limit = id + 1
    w.previous = NULL
    w.next = s.waiters
    if w.next != NULL:
        w.next.previous = w
    s.waiters = w
    pthread_mutex_unlock(&s.lock)


cdef void leave(rpc_stream* s, rpc_waiter* w) noexcept nogil:
    """Takes a waiter out; what it got stays its caller's."""
    pthread_mutex_lock(&s.lock)
    if w.previous != NULL:
        w.previous.next = w.next
    else:
        s.waiters = w.next
    if w.next != NULL:
        w.next.previous = w.previous
    pass_on(s)
    pthread_mutex_unlock(&s.lock)
    pthread_cond_destroy(&w.cond)


cdef void pass_on(rpc_stream* s) noexcept nogil:
    """When nobody reads, wakes somebody who has something to wait for. Lock held."""
    cdef rpc_waiter* w = s.waiters
    if s.reading:
        return
    while w != NULL and w.done:
        w = w.next
    if w != NULL:
        pthread_cond_signal(&w.cond)


cdef rpc_push* take_push(rpc_stream* s) noexcept nogil:
    """The oldest push, which the caller frees, or NULL."""
    cdef rpc_push* push
    pthread_mutex_lock(&s.lock)
    push = s.first_push
    if push != NULL:
        s.first_push = push.next
        if s.first_push == NULL:
            s.last_push = NULL
        s.n_pushes -= 1
        s.push_bytes -= push.method_bytes + push.params_bytes
    pthread_mutex_unlock(&s.lock)
    return push


# ---- reading ---------------------------------------------------------------------------------------------------------

cdef int keep_push(rpc_stream* s, const mp_rpc_message* m) noexcept nogil:
    """Queues a push and tells who waits for one. Lock held."""
    cdef size_t n = m.method_bytes + m.body_bytes
    cdef rpc_waiter* w = s.waiters
    cdef rpc_push* push
    if s.n_pushes >= s.pushes_max or s.push_bytes + n > s.push_bytes_max:
        return QUEUE_FULL
    push = <rpc_push*>malloc(sizeof(rpc_push) + n)
    if push == NULL:
        return NO_MEMORY
    push.next = NULL
    push.method_bytes = m.method_bytes
    push.params_bytes = m.body_bytes
    memcpy(<uint8_t*>(push + 1), m.method, m.method_bytes)
    memcpy(<uint8_t*>(push + 1) + m.method_bytes, m.body, m.body_bytes)
    if s.last_push == NULL:
        s.first_push = push
    else:
        s.last_push.next = push
    s.last_push = push
    s.n_pushes += 1
    s.push_bytes += n
    while w != NULL:
        if w.id == 0 and not w.done:
            w.done = True
            pthread_cond_signal(&w.cond)
            return 0
        w = w.next
    return 0


cdef int give(rpc_stream* s, const uint8_t* frame, size_t n, const mp_rpc_message* m) noexcept nogil:
    """Copies an answer for its waiter. Lock held."""
    cdef rpc_waiter* w = s.waiters
    if m.id == 0 or m.id >= s.id_limit:
        return PROTOCOL
    while w != NULL and w.id != m.id:
        w = w.next
    if w == NULL or w.done:
        s.unclaimed += 1
        return 0
    w.frame = <uint8_t*>malloc(n)
    if w.frame == NULL:
        return NO_MEMORY
    memcpy(w.frame, frame, n)
    w.body = w.frame + (m.body - frame)
    w.body_bytes = m.body_bytes
    if m.error[0] != 0xc0:
        w.error = w.frame + (m.error - frame)
        w.error_bytes = m.error_bytes
    w.done = True
    pthread_cond_signal(&w.cond)
    return 0


cdef int dispatch(rpc_stream* s, rpc_waiter* mine) noexcept nogil:
    """Hands out whole frames until mine came. A status. The reader calls, without the lock."""
    cdef mp_rpc_message m
    cdef uint32_t length
    cdef int status = 0
    while not mine.done and s.end - s.begin >= 4:
        length = mp_rpc_length_of(s.buffer + s.begin)
        if length == 0 or length > s.frame_bytes_max:
            return PROTOCOL
        if s.end - s.begin - 4 < length:
            break
        if mp_rpc_parse(s.buffer + s.begin + 4, length, &m):
            return PROTOCOL
        pthread_mutex_lock(&s.lock)
        if m.type == MP_RPC_REPLY:
            status = give(s, s.buffer + s.begin + 4, length, &m)
        elif m.type == MP_RPC_PUSH:
            status = keep_push(s, &m)
        else:
            status = PROTOCOL  # a server asks nothing
        pthread_mutex_unlock(&s.lock)
        if status:
            return status
        s.begin += 4 + length
    if s.begin == s.end:
        s.begin = s.end = 0
    return 0


cdef int read_room(rpc_stream* s) noexcept nogil:
    """Room to read into. A status."""
    cdef size_t wanted
    cdef uint8_t* grown
    if s.begin == s.end and s.capacity > KEPT_BYTES:
        free(s.buffer)
        s.buffer = NULL
        s.begin = s.end = s.capacity = 0
    if s.capacity - s.end >= LEAST_BYTES:
        return 0
    if s.begin:
        memmove(s.buffer, s.buffer + s.begin, s.end - s.begin)
        s.end -= s.begin
        s.begin = 0
        if s.capacity - s.end >= LEAST_BYTES:
            return 0
    wanted = s.capacity * 2 if s.capacity else <size_t>FIRST_BYTES
    grown = <uint8_t*>realloc(s.buffer, wanted)
    if grown == NULL:
        return NO_MEMORY
    s.buffer = grown
    s.capacity = wanted
    return 0


cdef int read_some(rpc_stream* s, rpc_waiter* mine) noexcept nogil:
    """One read, if there is anything, and what it brought. A status; EAGAIN as WOKEN."""
    cdef ssize_t n
    cdef int status = read_room(s)
    if status:
        return status
    n = recv(s.fd, s.buffer + s.end, s.capacity - s.end, MSG_DONTWAIT)
    if n > 0:
        s.end += n
        return dispatch(s, mine)
    if n < 0 and (errno == EAGAIN or errno == EINTR):
        return WOKEN
    return PEER_GONE


cdef int read_until(rpc_stream* s, rpc_waiter* mine, uint64_t until) noexcept nogil:
    """The reader's loop: until mine came (0), a failure, or the time (WOKEN)."""
    cdef uint64_t now, began = mp_now_ns()
    cdef int status = dispatch(s, mine)
    while status == 0 and not mine.done:
        status = read_some(s, mine)
        if status == 0:
            began = mp_now_ns() if s.spin_ns else began
            continue
        if status != WOKEN:
            return status
        now = mp_now_ns()
        if now >= until or s.status:
            return WOKEN
        status = 0
        if now < began + s.spin_ns:
            sched_yield()
        else:
            mp_rpc_poll(s.fd, POLLIN, until - now)
    return status


cdef int wait_done(rpc_stream* s, rpc_waiter* w, uint64_t deadline) noexcept nogil:
    """Waits until the waiter is done: 0, a status, or WOKEN at least each tenth of a second."""
    cdef uint64_t tick = mp_tick_before(deadline)
    cdef int status = WOKEN
    pthread_mutex_lock(&s.lock)
    while not w.done and s.status == 0:
        if mp_now_ns() >= tick:
            break
        if s.reading:
            mp_cond_wait_until(&w.cond, &s.lock, tick)
            continue
        s.reading = True
        pthread_mutex_unlock(&s.lock)
        status = read_until(s, w, tick)
        pthread_mutex_lock(&s.lock)
        s.reading = False
        if status != 0 and status != WOKEN:
            fail_locked(s, status)
        pass_on(s)
    status = 0 if w.done else s.status
    pthread_mutex_unlock(&s.lock)
    if status == 0 and not w.done:
        return TIMED_OUT if mp_now_ns() >= deadline else WOKEN
    return status


# ---- sending ---------------------------------------------------------------------------------------------------------

cdef int take_turn(rpc_stream* s, uint64_t deadline) noexcept nogil:
    """Becomes the one that sends. A status."""
    cdef int status = 0
    pthread_mutex_lock(&s.lock)
    while s.sending and s.status == 0 and status == 0:
        if mp_cond_wait_until(&s.turn, &s.lock, deadline) != 0 and s.sending:
            status = TIMED_OUT
    if s.status:
        status = s.status
    if status == 0:
        s.sending = True
    pthread_mutex_unlock(&s.lock)
    return status


cdef int read_meanwhile(rpc_stream* s) noexcept nogil:
    """A server that waits for us to read takes nothing more: so read, unless somebody does. A status."""
    cdef rpc_waiter nobody
    cdef int status = 0
    nobody.done = False
    pthread_mutex_lock(&s.lock)
    if s.reading:
        pthread_mutex_unlock(&s.lock)
        return 0
    s.reading = True
    pthread_mutex_unlock(&s.lock)
    status = read_some(s, &nobody)
    pthread_mutex_lock(&s.lock)
    s.reading = False
    pass_on(s)
    pthread_mutex_unlock(&s.lock)
    return 0 if status == WOKEN else status


cdef int send_all(rpc_stream* s, const uint8_t* data, size_t n, uint64_t deadline) noexcept nogil:
    """A status; TIMED_OUT only when not a byte went out."""
    cdef size_t done = 0
    cdef ssize_t moved
    cdef uint64_t now
    cdef int status, ready
    while done < n:
        moved = send(s.fd, data + done, n - done, MSG_DONTWAIT | MSG_NOSIGNAL)
        if moved > 0:
            done += moved
            continue
        if errno == EINTR:
            continue
        if errno != EAGAIN:
            return PEER_GONE
        now = mp_now_ns()
        if now >= deadline:
            return STALLED if done else TIMED_OUT
        ready = mp_rpc_poll(s.fd, POLLOUT | (0 if s.reading else POLLIN), mp_tick_before(deadline) - now)
        if s.status:
            return s.status
        if ready & POLLIN:
            status = read_meanwhile(s)
            if status:
                return status
    return 0


cdef int send_frame(rpc_stream* s, const uint8_t* data, size_t n, uint64_t deadline) noexcept nogil:
    """Sends a whole frame, one at a time. A status; any but TIMED_OUT ends the connection."""
    cdef int status = take_turn(s, deadline)
    if status:
        return status
    status = send_all(s, data, n, deadline)
    pthread_mutex_lock(&s.lock)
    s.sending = False
    pthread_cond_signal(&s.turn)
    if status and status != TIMED_OUT:
        fail_locked(s, status)
    pthread_mutex_unlock(&s.lock)
    return status
