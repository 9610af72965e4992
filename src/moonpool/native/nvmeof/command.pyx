"""What the kernel's answers to NVMe commands mean.

A passthrough command is answered with 0, an NVMe status (positive) or an errno (negative); it is never tried again by
the kernel (REQ_FAILFAST_DRIVER), so that is ours to do. A request to the block device is answered with bytes or an
errno, after the kernel has tried for itself. Sources: NVM Express base specification 2.0, figures 93 to 98;
drivers/nvme/host/ioctl.c and core.c, block/blk-core.c of Linux 6.12.
"""

from libc.errno cimport (
    EACCES,
    EAGAIN,
    EBADF,
    EBUSY,
    EFAULT,
    EINTR,
    EINVAL,
    EIO,
    ENODEV,
    ENOMEM,
    ENOSPC,
    ENOSYS,
    ENOTTY,
    ENXIO,
    EOPNOTSUPP,
    EPERM,
    EROFS,
    ETIMEDOUT,
)
from libc.stdint cimport uint32_t, uint64_t
from moonpool.native.io.batch cimport (
    ACCESS_DENIED,
    INTERNAL,
    NOT_REGISTERED,
    NO_MEMORY,
    OUT_OF_RANGE,
    PEER_GONE,
)

cdef extern from "errno.h" nogil:
    int ECANCELED
    int ENOLINK
    int EREMOTEIO
    int EBADE

cdef enum:
    STATUS_MASK = 0x7FF     # code and type, without the hints about trying again
    DO_NOT_RETRY = 0x4000
    # Generic, by the numbers of the specification.
    SC_INVALID_OPCODE = 0x01
    SC_INVALID_FIELD = 0x02
    SC_TRANSFER_ERROR = 0x04
    SC_POWER_LOSS = 0x05
    SC_INTERNAL = 0x06
    SC_ABORTED = 0x07
    SC_QUEUE_DELETED = 0x08
    SC_INVALID_NAMESPACE = 0x0B
    SC_DENIED = 0x15
    SC_SANITIZING = 0x1D
    SC_WRITE_PROTECTED = 0x20
    SC_INTERRUPTED = 0x21
    SC_TRANSIENT = 0x22
    SC_LBA_RANGE = 0x80
    SC_CAPACITY = 0x81
    SC_NOT_READY = 0x82
    SC_RESERVED = 0x83
    SC_READ_ONLY_RANGE = 0x182
    SC_MEDIA_DENIED = 0x286
    # Path related: asymmetric access, pathing, and commands that the host itself ended with their queue.
    SC_PATH_FIRST = 0x300
    SC_PATH_LAST = 0x37F


cdef int command_verdict(int result) noexcept nogil:
    """V_DONE, another V_*, or the status that a passthrough command failed with."""
    cdef int code
    if result == 0:
        return V_DONE
    if result < 0:
        return errno_verdict(-result, True)
    code = result & STATUS_MASK
    if SC_PATH_FIRST <= code <= SC_PATH_LAST:
        return V_LOST
    if code == SC_INVALID_NAMESPACE or code == SC_QUEUE_DELETED or code == SC_POWER_LOSS:
        return V_LOST  # a namespace that its target took away says so, and may be given back
    if code == SC_LBA_RANGE:
        return OUT_OF_RANGE
    if code == SC_CAPACITY:
        return NO_MEMORY
    if code in (SC_DENIED, SC_WRITE_PROTECTED, SC_RESERVED, SC_READ_ONLY_RANGE, SC_MEDIA_DENIED):
        return ACCESS_DENIED
    if code == SC_INVALID_FIELD or code == SC_INVALID_OPCODE:
        return INTERNAL
    if result & DO_NOT_RETRY:
        return PEER_GONE  # the device failed for good, a block that cannot be read, say
    if code in (SC_TRANSFER_ERROR, SC_INTERNAL, SC_ABORTED, SC_SANITIZING, SC_INTERRUPTED, SC_TRANSIENT, SC_NOT_READY):
        return V_AGAIN
    return PEER_GONE


cdef int request_verdict(int result) noexcept nogil:
    """V_DONE for bytes moved, another V_*, or the status that a request to a block device failed with.

    A device that its controller took away has no bytes: reads find its end, writes no space.
    """
    if result > 0:
        return V_DONE
    return V_DOUBT if result == 0 or result == -ENOSPC else errno_verdict(-result, False)


cdef int errno_verdict(int code, bint passthrough) noexcept nogil:
    if code in (EINTR, ECANCELED, ENODEV, ENXIO, ENOLINK, ETIMEDOUT):
        return V_LOST
    if code == EIO or code == EREMOTEIO:
        return V_DOUBT  # without a way, or a block that cannot be read: time tells
    if code == EINVAL:
        return V_INVALID if passthrough else INTERNAL
    if code in (EAGAIN, EBUSY, ENOMEM):
        return V_AGAIN
    if code in (EOPNOTSUPP, ENOTTY, ENOSYS, EBADF):
        return V_ELSEWHERE
    if code in (EACCES, EPERM):
        return V_ELSEWHERE if passthrough else ACCESS_DENIED
    if code in (EROFS, EBADE):
        return ACCESS_DENIED
    if code == ENOSPC:
        return NO_MEMORY
    if code == EFAULT:
        return NOT_REGISTERED
    return INTERNAL


VERDICTS = {
    V_DONE: "done", V_AGAIN: "again", V_LOST: "lost", V_DOUBT: "doubt", V_ELSEWHERE: "elsewhere", V_INVALID: "invalid"
}


def verdict(int result, *, bint passthrough) -> str | int:
    """What an answer of the kernel means: a word of `VERDICTS`, or the status to fail with."""
    cdef int said = command_verdict(result) if passthrough else request_verdict(result)
    return VERDICTS.get(said, said)


def entry_bytes(int opcode, int fd, uint32_t nsid, uint64_t first, uint32_t blocks, uint64_t address,
                uint32_t data_bytes, *, bint fua, uint32_t timeout_ms) -> bytes:
    """The 128 bytes of the submission entry for a command, as the kernel gets them."""
    cdef nvme_uring_cmd command
    cdef char entry[128]
    mp_nvme_fill(&command, opcode, nsid, first, blocks, <void*><size_t>address, data_bytes, fua, timeout_ms)
    mp_nvme_prepare(<io_uring_sqe*>entry, fd, &command)
    return entry[:128]
