"""io_uring as a way for lanes to wait: one small ring per socket, one operation at a time.

On loopback it is neither faster nor slower than blocking calls for bulk, so it is not the default; it stays selectable
(``tcp_io="io_uring"``) for kernels and NICs where it wins, and the ring is what the file transports build on.
"""

from libc.errno cimport EAGAIN, EINTR
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset
from moonpool.native.io.guard cimport mp_now_ns
from moonpool.native.io.liburing cimport (
    __kernel_timespec,
    io_uring,
    io_uring_cqe,
    io_uring_cqe_seen,
    io_uring_get_sqe,
    io_uring_peek_cqe,
    io_uring_prep_cancel64,
    io_uring_prep_recvmsg,
    io_uring_prep_sendmsg,
    io_uring_queue_exit,
    io_uring_queue_init,
    io_uring_sqe,
    io_uring_sqe_set_data64,
    io_uring_submit,
    io_uring_wait_cqe,
    io_uring_wait_cqe_timeout,
    msghdr,
)
from moonpool.native.io.stream cimport iovec, mp_stream, set_ring_table

cdef extern from *:
    """
    #include <errno.h>
    #include <sched.h>
    #include <sys/socket.h>
    /* In Cython an assignment to errno would make a local variable of that name. */
    static inline void mp_set_errno(int code) { errno = code; }
    """
    void mp_set_errno(int code) nogil
    int sched_yield() nogil
    int MSG_NOSIGNAL

cdef enum:
    RING_ENTRIES = 8
    MOVE = 1
    CANCEL = 2
    VECTOR_MAX = 1024


cdef int ring_open(mp_stream* stream) noexcept nogil:
    cdef io_uring* ring = <io_uring*>calloc(1, sizeof(io_uring))
    if ring == NULL:
        return -1
    if io_uring_queue_init(RING_ENTRIES, ring, 0) != 0:
        free(ring)
        return -1
    stream.ring = ring
    return 0


cdef void ring_close(mp_stream* stream) noexcept nogil:
    io_uring_queue_exit(<io_uring*>stream.ring)
    free(stream.ring)


cdef int reap(io_uring* ring, uint64_t wait_ns, uint64_t spin_ns, int* result) noexcept nogil:
    """Take the completion of MOVE: 1 with its result, or 0 when wait_ns (0: for ever) went by."""
    cdef io_uring_cqe* cqe = NULL
    cdef __kernel_timespec timeout
    cdef uint64_t started = mp_now_ns(), user
    cdef int rc
    timeout.tv_sec = <long long>(wait_ns // 1000000000)
    timeout.tv_nsec = <long long>(wait_ns % 1000000000)
    while True:
        rc = io_uring_peek_cqe(ring, &cqe)
        if rc != 0:
            if mp_now_ns() - started < spin_ns:
                sched_yield()
                continue
            rc = io_uring_wait_cqe_timeout(ring, &cqe, &timeout) if wait_ns else io_uring_wait_cqe(ring, &cqe)
        if rc == -EINTR:
            continue
        if rc != 0 or cqe == NULL:
            return 0
        user = cqe.user_data
        result[0] = cqe.res
        io_uring_cqe_seen(ring, cqe)
        if user == MOVE:
            return 1


cdef ssize_t ring_move(mp_stream* stream, iovec* pieces, int n, bint sending, int flags,
                       uint64_t wait_ns) noexcept nogil:
    """One sendmsg or recvmsg through the ring: bytes moved, or -1 with errno (EAGAIN when wait_ns went by).

    It returns only when the kernel no longer holds the buffers: a wait that runs out is cancelled and reaped first.
    """
    cdef io_uring* ring = <io_uring*>stream.ring
    cdef io_uring_sqe* sqe = io_uring_get_sqe(ring)
    cdef msghdr message
    cdef int result = 0
    memset(&message, 0, sizeof(message))
    message.msg_iov = pieces
    message.msg_iovlen = n if n < VECTOR_MAX else VECTOR_MAX
    if sending:
        io_uring_prep_sendmsg(sqe, stream.fd, &message, MSG_NOSIGNAL | flags)
    else:
        io_uring_prep_recvmsg(sqe, stream.fd, &message, flags)
    io_uring_sqe_set_data64(sqe, MOVE)
    io_uring_submit(ring)
    if not reap(ring, wait_ns, stream.spin_ns, &result):
        sqe = io_uring_get_sqe(ring)
        io_uring_prep_cancel64(sqe, MOVE, 0)
        io_uring_sqe_set_data64(sqe, CANCEL)
        io_uring_submit(ring)
        reap(ring, 0, 0, &result)
        drain_cancel(ring)
        if result < 0:
            mp_set_errno(EAGAIN)
            return -1
    if result < 0:
        mp_set_errno(-result)
        return -1
    return result


cdef void drain_cancel(io_uring* ring) noexcept nogil:
    """The cancel's own completion may come after the move's; leave nothing behind for the next operation."""
    cdef io_uring_cqe* cqe = NULL
    while io_uring_peek_cqe(ring, &cqe) == 0 and cqe != NULL:
        io_uring_cqe_seen(ring, cqe)


set_ring_table(ring_open, ring_close, ring_move)
