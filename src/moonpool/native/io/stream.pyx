"""Byte streams over a connected socket, with waits that end: at a deadline, on cancel, on a stalled or lost peer.

Waking a thread on another CPU costs more than a small transfer, so a receiver first yields and looks again for some
tens of microseconds, and only then blocks. Three ways to block are kept behind one interface: blocking calls (with
socket timeouts as ticks), epoll, and io_uring; `docs/bench.md` has what each is good for.
"""

from libc.errno cimport EAGAIN, EINTR, ETIMEDOUT, errno
from libc.stdint cimport uint64_t
from moonpool.native.io.batch cimport CANCELLED, COMPLETE, NO_MEMORY, PEER_GONE, STALLED, TIMED_OUT
from moonpool.native.io.guard cimport mp_load32, mp_now_ns

cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <fcntl.h>
    #include <poll.h>
    #include <sched.h>
    #include <string.h>
    #include <sys/epoll.h>
    #include <sys/socket.h>
    #include <sys/time.h>
    #include <unistd.h>
    #define MP_TICK_MS 100
    static inline ssize_t mp_sendmsg(int fd, struct iovec *v, int n, int flags) {
        struct msghdr m; memset(&m, 0, sizeof m); m.msg_iov = v; m.msg_iovlen = n > 1024 ? 1024 : n;
        return sendmsg(fd, &m, flags | MSG_NOSIGNAL);
    }
    static inline ssize_t mp_recvmsg(int fd, struct iovec *v, int n, int flags) {
        struct msghdr m; memset(&m, 0, sizeof m); m.msg_iov = v; m.msg_iovlen = n > 1024 ? 1024 : n;
        return recvmsg(fd, &m, flags);
    }
    static inline void mp_set_ticks(int fd) {
        struct timeval t = {0, MP_TICK_MS * 1000};
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t);
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &t, sizeof t);
    }
    static inline int mp_poll_one(int fd, int want, int timeout_ms) {
        struct pollfd p = {fd, (short)(want ? POLLOUT : POLLIN), 0};
        return poll(&p, 1, timeout_ms);
    }
    static inline int mp_epoll_open(int fd) {
        struct epoll_event e;
        int ep = epoll_create1(EPOLL_CLOEXEC);
        memset(&e, 0, sizeof e);
        if (ep >= 0 && epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e) != 0) { close(ep); return -1; }
        return ep;
    }
    static inline int mp_epoll_one(int ep, int fd, int want, int timeout_ms) {
        struct epoll_event e;
        memset(&e, 0, sizeof e);
        e.events = want ? EPOLLOUT : EPOLLIN;
        if (epoll_ctl(ep, EPOLL_CTL_MOD, fd, &e) != 0) return -1;
        return epoll_wait(ep, &e, 1, timeout_ms);
    }
    """
    ssize_t mp_sendmsg(int fd, iovec* pieces, int n, int flags) nogil
    ssize_t mp_recvmsg(int fd, iovec* pieces, int n, int flags) nogil
    void mp_set_ticks(int fd) nogil
    int mp_poll_one(int fd, int want, int timeout_ms) nogil
    int mp_epoll_open(int fd) nogil
    int mp_epoll_one(int ep, int fd, int want, int timeout_ms) nogil
    int sched_yield() nogil
    int close(int fd) nogil
    int MSG_DONTWAIT, MSG_WAITALL
    enum:
        MP_TICK_MS

cdef enum:
    TICK_NS = 100000000
    # One sendmsg/recvmsg moves at most about 2 GiB; stay well below.
    CALL_BYTES = 1 << 30

cdef mp_ring_table ring_table


cdef void set_ring_table(mp_ring_open open, mp_ring_close close, mp_ring_move move) noexcept nogil:
    """Called once by the ring module when it is imported."""
    ring_table.open = open
    ring_table.close = close
    ring_table.move = move


cdef int stream_open(mp_stream* stream, int fd, int io) noexcept nogil:
    """Take a connected, blocking socket. A status; on failure the fd still belongs to the caller."""
    stream.fd = fd
    stream.io = io
    stream.epoll_fd = -1
    stream.ring = NULL
    mp_set_ticks(fd)
    if io == IO_EPOLL:
        stream.epoll_fd = mp_epoll_open(fd)
        if stream.epoll_fd < 0:
            return NO_MEMORY
    elif io == IO_RING:
        if ring_table.open == NULL or ring_table.open(stream) != 0:
            return NO_MEMORY
    return COMPLETE


cdef void stream_close(mp_stream* stream) noexcept nogil:
    if stream.ring != NULL:
        ring_table.close(stream)
        stream.ring = NULL
    if stream.epoll_fd >= 0:
        close(stream.epoll_fd)
        stream.epoll_fd = -1
    if stream.fd >= 0:
        close(stream.fd)
        stream.fd = -1


cdef int look_up(mp_stream* stream, uint64_t since_ns, uint64_t* left_ns) noexcept nogil:
    """Why to stop waiting (a status), or 0 and how long one wait may last."""
    cdef uint64_t now = mp_now_ns()
    left_ns[0] = TICK_NS
    if stream.cancel != NULL and mp_load32(stream.cancel):
        return CANCELLED
    if stream.dead != NULL and mp_load32(stream.dead):
        return mp_load32(stream.dead)
    if stream.deadline_ns:
        if now >= stream.deadline_ns:
            return TIMED_OUT
        if stream.deadline_ns - now < left_ns[0]:
            left_ns[0] = stream.deadline_ns - now
    if stream.stall_ns and now >= since_ns + stream.stall_ns:
        return STALLED
    return 0


cdef int lost(mp_stream* stream, int code) noexcept nogil:
    """The status of a connection that ended: by our own shutdown, by the kernel (`code`), or by the peer."""
    if stream.cancel != NULL and mp_load32(stream.cancel):
        return CANCELLED
    if stream.dead != NULL and mp_load32(stream.dead):
        return mp_load32(stream.dead)
    # TCP_USER_TIMEOUT: the peer's host took no byte for stall_timeout_ms.
    return STALLED if code == ETIMEDOUT else PEER_GONE


cdef int block(mp_stream* stream, bint sending, uint64_t left_ns) noexcept nogil:
    """Wait until the socket is ready, at most left_ns."""
    cdef int timeout_ms = <int>((left_ns + 999999) // 1000000)
    if stream.epoll_fd >= 0:
        return mp_epoll_one(stream.epoll_fd, stream.fd, sending, timeout_ms)
    return mp_poll_one(stream.fd, sending, timeout_ms)


cdef int advance(iovec** pieces, int n, size_t moved) noexcept nogil:
    """Step over what was moved; returns how many pieces are left."""
    while n and moved >= pieces[0].iov_len:
        moved -= pieces[0].iov_len
        pieces[0] += 1
        n -= 1
    if n:
        pieces[0].iov_base = <char*>pieces[0].iov_base + moved
        pieces[0].iov_len -= moved
    return n


cdef int move_all(mp_stream* stream, iovec* pieces, int n, bint sending, bint bulk) noexcept nogil:
    cdef uint64_t since = mp_now_ns(), spun = 0, left = 0, now
    cdef ssize_t moved
    cdef int status = look_up(stream, since, &left)
    # Whole waits inside the kernel are cheapest for bulk; they need a tick of room before the deadline.
    cdef bint waiting = bulk and left == TICK_NS and stream.io == IO_BLOCKING
    if status:
        return status
    while n:
        if stream.io == IO_RING:
            moved = ring_table.move(stream, pieces, n, sending, MSG_WAITALL if bulk else 0, left)
        elif sending:
            moved = mp_sendmsg(stream.fd, pieces, n, 0 if waiting else MSG_DONTWAIT)
        else:
            moved = mp_recvmsg(stream.fd, pieces, n, MSG_WAITALL if waiting else MSG_DONTWAIT)
        if moved > 0:
            n = advance(&pieces, n, moved)
            if n == 0:
                return COMPLETE
            # Looked up after progress too: a peer that trickles must not outlive the deadline.
            spun = 0
            since = mp_now_ns()
            status = look_up(stream, since, &left)
            if status:
                return status
            waiting = bulk and left == TICK_NS and stream.io == IO_BLOCKING
            continue
        if moved == 0 and not sending:
            return lost(stream, 0)
        if moved < 0 and errno == EINTR:
            continue
        if moved < 0 and errno != EAGAIN:
            return lost(stream, errno)
        if not waiting and stream.spin_ns and stream.io != IO_RING:
            now = mp_now_ns()
            if spun == 0:
                spun = now
            if now - spun < stream.spin_ns:
                sched_yield()
                continue
        status = look_up(stream, since, &left)
        if status:
            return status
        waiting = bulk and left == TICK_NS and stream.io == IO_BLOCKING
        if not waiting and stream.io != IO_RING:
            block(stream, sending, left)
    return COMPLETE


cdef int stream_send(mp_stream* stream, iovec* pieces, int n) noexcept nogil:
    """Send all pieces (the vector is consumed). A status."""
    return move_all(stream, pieces, n, True, True)


cdef int stream_receive(mp_stream* stream, iovec* pieces, int n, bint bulk) noexcept nogil:
    """Receive until all pieces are full (the vector is consumed). `bulk`: wait in the kernel instead of spinning."""
    return move_all(stream, pieces, n, False, bulk)


cdef ssize_t stream_receive_some(mp_stream* stream, void* target, size_t room, bint idle) noexcept nogil:
    """Receive at least one byte: how many, or minus a status. `idle`: silence is no stall (between requests)."""
    cdef iovec piece
    cdef uint64_t since = mp_now_ns(), spun = since, left = 0, now
    cdef ssize_t moved
    cdef int status
    while True:
        piece.iov_base = target
        piece.iov_len = room
        moved = mp_recvmsg(stream.fd, &piece, 1, MSG_DONTWAIT)
        if moved > 0:
            return moved
        if moved == 0:
            return -PEER_GONE
        if errno == EINTR:
            continue
        if errno != EAGAIN:
            return -PEER_GONE
        now = mp_now_ns()
        if now - spun < stream.spin_ns:
            sched_yield()
            continue
        if idle:
            # Ended by a request, by the peer, or by shutdown() on our side.
            if stream.io == IO_RING:
                moved = ring_table.move(stream, &piece, 1, False, 0, 0)
                if moved > 0:
                    return moved
                if moved == 0 or errno != EAGAIN:
                    return -PEER_GONE
            elif stream.epoll_fd >= 0:
                mp_epoll_one(stream.epoll_fd, stream.fd, 0, -1)
            else:
                mp_poll_one(stream.fd, 0, -1)
            since = mp_now_ns()
            continue
        status = look_up(stream, since, &left)
        if status:
            return -status
        block(stream, False, left)


def have_ring() -> bool:
    """True once the io_uring module is loaded."""
    return ring_table.open != NULL
