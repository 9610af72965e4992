"""Commands and what became of them (see command.pyx)."""

from libc.stdint cimport uint32_t, uint64_t
from moonpool.native.disk.uring cimport io_uring_sqe

cdef extern from "nvme_command.h" nogil:
    struct nvme_uring_cmd:
        pass
    enum:
        MP_NVME_FLUSH
        MP_NVME_WRITE
        MP_NVME_READ
    void mp_nvme_fill(nvme_uring_cmd* cmd, int opcode, uint32_t nsid, uint64_t first, uint32_t blocks, void* data,
                      uint32_t data_bytes, int fua, uint32_t timeout_ms)
    void mp_nvme_prepare(io_uring_sqe* sqe, int fd, const nvme_uring_cmd* cmd)
    void mp_nvme_durable(io_uring_sqe* sqe)

# What became of a command or request; anything else is a status of batch.pxd to fail with.
cdef enum:
    V_DONE = 0
    V_AGAIN = 100      # a shortage or a busy device: the same once more, a little later
    V_LOST = 101       # no way to the namespace at this moment: wait for one, then the same once more
    V_ELSEWHERE = 102  # this way cannot do it at all: leave it to the next one
    V_DOUBT = 104      # the block device failed: for want of a way, or for good
    V_INVALID = 103    # the kernel took it for nonsense, which it also says of a namespace without a way

cdef int command_verdict(int result) noexcept nogil
cdef int request_verdict(int result) noexcept nogil
