"""liburing, as its header groups it (liburing.h; io_uring(7))."""

from libc.stdint cimport uint64_t

cdef extern from "liburing.h" nogil:
    struct io_uring:
        pass
    struct io_uring_sqe:
        pass
    struct io_uring_cqe:
        uint64_t user_data
        int res
        unsigned int flags
    struct __kernel_timespec:
        long long tv_sec
        long long tv_nsec
    struct msghdr:
        void* msg_iov
        size_t msg_iovlen
    int io_uring_queue_init(unsigned int entries, io_uring* ring, unsigned int flags)
    void io_uring_queue_exit(io_uring* ring)
    io_uring_sqe* io_uring_get_sqe(io_uring* ring)
    int io_uring_submit(io_uring* ring)
    int io_uring_wait_cqe(io_uring* ring, io_uring_cqe** cqe)
    int io_uring_wait_cqe_timeout(io_uring* ring, io_uring_cqe** cqe, __kernel_timespec* timeout)
    int io_uring_peek_cqe(io_uring* ring, io_uring_cqe** cqe)
    void io_uring_cqe_seen(io_uring* ring, io_uring_cqe* cqe)
    void io_uring_sqe_set_data64(io_uring_sqe* sqe, uint64_t data)
    void io_uring_prep_sendmsg(io_uring_sqe* sqe, int fd, const msghdr* message, unsigned int flags)
    void io_uring_prep_recvmsg(io_uring_sqe* sqe, int fd, msghdr* message, unsigned int flags)
    void io_uring_prep_cancel64(io_uring_sqe* sqe, uint64_t user_data, int flags)
