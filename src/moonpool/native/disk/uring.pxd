"""What rings of files and devices use of liburing.h (io_uring(7), io_uring_setup(2), io_uring_register(2))."""

from libc.stdint cimport int32_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <fcntl.h>
    #include <liburing.h>
    #include <sys/mman.h>
    #include <sys/uio.h>
    #include <unistd.h>
    """

cdef extern from "liburing.h" nogil:
    struct iovec:
        void* iov_base
        size_t iov_len
    struct io_uring_params:
        uint32_t flags
    struct io_uring_sq:
        pass
    struct io_uring:
        int ring_fd
        uint32_t features
    struct io_uring_sqe:
        uint8_t opcode
        uint8_t flags
        uint16_t ioprio
        int32_t fd
        uint64_t off
        uint32_t cmd_op
        uint64_t addr
        uint32_t len
        int32_t rw_flags
        uint64_t user_data
        uint16_t buf_index
        uint8_t* cmd            # 80 bytes with SQE128
    struct io_uring_cqe:
        uint64_t user_data
        int32_t res
        uint32_t flags
        uint64_t* big_cqe       # 2 words with CQE32
    struct __kernel_timespec:
        long long tv_sec
        long long tv_nsec
    uint32_t IORING_SETUP_CLAMP, IORING_SETUP_COOP_TASKRUN, IORING_SETUP_SQE128, IORING_SETUP_CQE32
    uint8_t IOSQE_FIXED_FILE
    uint32_t IORING_FSYNC_DATASYNC
    int io_uring_queue_init_params(unsigned int entries, io_uring* ring, io_uring_params* params)
    void io_uring_queue_exit(io_uring* ring)
    io_uring_sqe* io_uring_get_sqe(io_uring* ring)
    unsigned int io_uring_sq_space_left(const io_uring* ring)
    int io_uring_submit(io_uring* ring)
    int io_uring_submit_and_wait_timeout(io_uring* ring, io_uring_cqe** cqe, unsigned int wait_nr,
                                         __kernel_timespec* timeout, void* sigmask)
    int io_uring_peek_cqe(io_uring* ring, io_uring_cqe** cqe)
    void io_uring_cqe_seen(io_uring* ring, io_uring_cqe* cqe)
    void io_uring_sqe_set_data64(io_uring_sqe* sqe, uint64_t data)
    void io_uring_prep_read(io_uring_sqe* sqe, int fd, void* memory, unsigned int n, uint64_t offset)
    void io_uring_prep_write(io_uring_sqe* sqe, int fd, const void* memory, unsigned int n, uint64_t offset)
    void io_uring_prep_read_fixed(io_uring_sqe* sqe, int fd, void* memory, unsigned int n, uint64_t offset, int index)
    void io_uring_prep_write_fixed(io_uring_sqe* sqe, int fd, const void* memory, unsigned int n, uint64_t offset,
                                   int index)
    void io_uring_prep_fsync(io_uring_sqe* sqe, int fd, unsigned int flags)
    void io_uring_prep_cancel64(io_uring_sqe* sqe, uint64_t user_data, int flags)
    int io_uring_register_buffers_sparse(io_uring* ring, unsigned int n)
    int io_uring_register_buffers_update_tag(io_uring* ring, unsigned int at, const iovec* vectors,
                                             const unsigned long long* tags, unsigned int n)
    int io_uring_register_files_sparse(io_uring* ring, unsigned int n)
    int io_uring_register_files_update(io_uring* ring, unsigned int at, const int* files, unsigned int n)

cdef extern from "sys/mman.h" nogil:
    void* mmap(void* address, size_t n, int protection, int flags, int fd, long offset)
    int munmap(void* address, size_t n)
    void* MAP_FAILED
    int PROT_READ, PROT_WRITE, MAP_PRIVATE, MAP_ANONYMOUS, MAP_POPULATE

cdef extern from "sys/uio.h" nogil:
    int RWF_DSYNC
