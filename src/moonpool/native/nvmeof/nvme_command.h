/* One NVMe I/O command as io_uring passes it to the kernel's driver (struct nvme_uring_cmd, IORING_OP_URING_CMD). */
#ifndef MOONPOOL_NVME_COMMAND_H
#define MOONPOOL_NVME_COMMAND_H
#include <liburing.h>
#include <linux/nvme_ioctl.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>

#ifndef NVME_URING_CMD_IO
#error "the kernel headers are older than Linux 5.19: install linux-libc-dev of 5.19 or later"
#endif

enum { MP_NVME_FLUSH = 0, MP_NVME_WRITE = 1, MP_NVME_READ = 2 };
/* Command dword 12 of reads and writes: force unit access. NVM command set specification 1.0, 3.2.4. */
#define MP_NVME_FUA (1u << 30)

/* `blocks` counts from 1 (the command counts from 0); 0 for a flush, which has no range. */
static inline void mp_nvme_fill(struct nvme_uring_cmd *cmd, int opcode, uint32_t nsid, uint64_t first, uint32_t blocks,
                                void *data, uint32_t data_bytes, int fua, uint32_t timeout_ms) {
    memset(cmd, 0, sizeof *cmd);
    cmd->opcode = (uint8_t)opcode;
    cmd->nsid = nsid;
    cmd->timeout_ms = timeout_ms;
    if (opcode == MP_NVME_FLUSH)
        return;
    cmd->addr = (uint64_t)(uintptr_t)data;
    cmd->data_len = data_bytes;
    cmd->cdw10 = (uint32_t)first;
    cmd->cdw11 = (uint32_t)(first >> 32);
    cmd->cdw12 = ((blocks - 1) & 0xffffu) | (fua ? MP_NVME_FUA : 0);
}

/* The entry has 128 bytes (IORING_SETUP_SQE128): the command lies behind its first 48. */
static inline void mp_nvme_prepare(struct io_uring_sqe *sqe, int fd, const struct nvme_uring_cmd *cmd) {
    memset(sqe, 0, 128);
    sqe->opcode = IORING_OP_URING_CMD;
    sqe->fd = fd;
    sqe->cmd_op = NVME_URING_CMD_IO;
    memcpy(sqe->cmd, cmd, sizeof *cmd);
}

/* A write to a block device that is on stable media when it is answered. */
static inline void mp_nvme_durable(struct io_uring_sqe *sqe) { sqe->rw_flags = RWF_DSYNC; }
#endif
