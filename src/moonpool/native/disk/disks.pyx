"""Disks: what a region of a file or device is reached by, and the path that carries transfers to and from them."""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy, memset
from moonpool.native.disk.drive cimport disk_run
from moonpool.native.disk.rings cimport BOUNCE_BYTES, DiskRings
from moonpool.native.io.guard cimport mp_load32
from moonpool.native.io.regions cimport EXTRAS
from moonpool.native.io.segment cimport NativeSegment

import os

from moonpool.errors import UsageError

cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <fcntl.h>
    #include <sys/syscall.h>
    #include <sys/uio.h>
    #include <unistd.h>
    static long mp_statx(int fd, unsigned char *answer) {
        return syscall(SYS_statx, fd, "", AT_EMPTY_PATH, 0x2000u, answer);
    }
    """
    long mp_statx(int fd, unsigned char* answer) nogil
    int RWF_DSYNC

# Longest I/O: what lets a device work at full speed, and a cancel wait little.
PIECE_BYTES = 1 << 20
PAGE_BYTES = os.sysconf("SC_PAGESIZE")

cdef enum:
    STATX_DIOALIGN = 0x2000

cdef uint64_t next_serial = 0


def direct_alignment(int fd):
    """(of memory, of positions) in bytes that O_DIRECT asks for, as statx(2) tells since Linux 6.1.

    (0, 0) where the file takes no direct I/O at all; None where the kernel does not tell.
    """
    cdef unsigned char answer[256]
    cdef uint32_t mask = 0, of_memory = 0, of_positions = 0
    memset(answer, 0, sizeof(answer))
    if mp_statx(fd, answer) != 0:
        return None
    memcpy(&mask, answer, 4)
    memcpy(&of_memory, answer + 0x98, 4)
    memcpy(&of_positions, answer + 0x9C, 4)
    return (of_memory, of_positions) if mask & STATX_DIOALIGN else None


cdef class Disk:
    """Two descriptors of one file or device, owned: `fd` takes whole blocks, `edge_fd` anything; -1 for none.

    `start` is where its region begins, in bytes. With `durable` each WRITE is on stable storage when it ends.
    """

    def __cinit__(self, DiskRings rings not None, int fd, int edge_fd, uint64_t start, uint32_t block,
                  uint32_t memory_block, bint writable, bint durable=False, bint is_device=False):
        global next_serial
        self.closed = True
        if fd < 0 and edge_fd < 0:
            raise UsageError("a disk has a descriptor")
        if fd >= 0 and (not is_power(block) or not is_power(memory_block) or block > BOUNCE_BYTES or start % block):
            raise UsageError(f"no blocks of {block} bytes, {memory_block} in memory, from {start} on")
        next_serial += 1
        self.rings = rings
        self.raw.serial = next_serial
        self.raw.fd = fd
        self.raw.edge_fd = edge_fd
        self.raw.start = start
        self.raw.block = block if fd >= 0 else 1
        self.raw.memory_block = memory_block if fd >= 0 else 1
        self.raw.piece_bytes = PIECE_BYTES
        self.raw.writable = writable
        self.raw.is_device = is_device
        self.raw.write_flags = RWF_DSYNC if durable else 0
        self.closed = False

    def __dealloc__(self):
        if not self.closed:
            self.close()

    def close(self) -> None:
        """Close the descriptors, also in every ring; idempotent. No batch uses the disk any more."""
        if self.closed:
            return
        self.closed = True
        self.rings.drop_disk(self.raw.serial)
        for fd in (self.raw.fd, self.raw.edge_fd):
            if fd >= 0:
                os.close(fd)
        self.raw.fd = self.raw.edge_fd = -1

    def reach(self, NativeSegment segment not None, uint64_t handle, int which) -> None:
        """Let a segment's region be reached by this disk, under EXTRA_* `which`; the segment keeps the disk."""
        if not 0 <= which < EXTRAS:
            raise UsageError(f"there is no place {which} for what a transport keeps")
        segment.set_extra(handle, which, &self.raw, self)

    def take_dirty(self) -> bool:
        """Whether it was written since the last call."""
        dirty = self.raw.dirty != 0
        self.raw.dirty = 0
        return dirty

    def mark_dirty(self) -> None:
        """What was written is not durable yet after all."""
        self.raw.dirty = 1

    @property
    def any_fd(self) -> int:
        """A descriptor of it, borrowed; -1 once closed."""
        return self.raw.edge_fd if self.raw.edge_fd >= 0 else self.raw.fd

    @property
    def direct(self) -> bool:
        """True while whole blocks go around the page cache."""
        return self.raw.fd >= 0 and not mp_load32(&self.raw.buffered)

    @property
    def writable(self) -> bool:
        return self.raw.writable != 0


cdef bint is_power(uint32_t n):
    return n != 0 and n & (n - 1) == 0


cdef class DiskPath:
    """A path's context; lives as long as its segment."""

    def __cinit__(self, DiskRings rings not None, int which):
        self.rings = rings
        self.raw.pool = rings.pool
        self.raw.which = which


def add_disk_path(NativeSegment segment not None, DiskRings rings not None, int which) -> int:
    """Let a segment's regions that have a disk under EXTRA_* `which` be reached; returns the path id."""
    context = DiskPath(rings, which)
    return segment.add_path(disk_run, &(<DiskPath>context).raw, context).id
