"""Byte streams over a socket with bounded waits (see stream.pyx)."""

from libc.stdint cimport int32_t, uint64_t

cdef extern from *:
    """
    #include <sys/uio.h>
    """
    struct iovec:
        void* iov_base
        size_t iov_len

cdef enum:
    IO_BLOCKING = 0
    IO_EPOLL = 1
    IO_RING = 2

cdef struct mp_stream:
    int fd
    int io                    # IO_*
    int epoll_fd              # -1 unless IO_EPOLL
    void* ring                # NULL unless IO_RING
    uint64_t spin_ns          # yield-spin before blocking
    uint64_t stall_ns         # no progress for so long is STALLED; 0: never
    const int32_t* cancel     # NULL, or a flag that ends the wait as CANCELLED
    const int32_t* dead       # NULL, or a status that ends the wait once it is not 0
    uint64_t deadline_ns      # 0: none

ctypedef int (*mp_ring_open)(mp_stream* stream) noexcept nogil
ctypedef void (*mp_ring_close)(mp_stream* stream) noexcept nogil
ctypedef ssize_t (*mp_ring_move)(mp_stream* stream, iovec* pieces, int n, bint sending, int flags,
                                 uint64_t wait_ns) noexcept nogil

cdef struct mp_ring_table:
    mp_ring_open open
    mp_ring_close close
    mp_ring_move move

cdef void set_ring_table(mp_ring_open open, mp_ring_close close, mp_ring_move move) noexcept nogil
cdef int stream_open(mp_stream* stream, int fd, int io) noexcept nogil
cdef void stream_close(mp_stream* stream) noexcept nogil
cdef int stream_send(mp_stream* stream, iovec* pieces, int n) noexcept nogil
cdef int stream_receive(mp_stream* stream, iovec* pieces, int n, bint bulk) noexcept nogil
cdef ssize_t stream_receive_some(mp_stream* stream, void* target, size_t room, bint idle) noexcept nogil
