"""Mappings of far memory, and the lock by which one range of a device has one owner.

A DAX device is mapped MAP_SHARED in whole units of its alignment. Who offers a range locks it for writing with an
open file description lock (fcntl(2), F_OFD_SETLK) on the very descriptor that it maps and passes to peers: the kernel
keeps the lock until the last process that maps the range by it is gone, so a range that anybody may still write,
whoever was killed, cannot be offered again. The lock is on the device node: two nodes of one device (made by hand in a
container) do not see each other's.
"""

from libc.errno cimport EACCES, EAGAIN, errno
from libc.stdint cimport int64_t, uint64_t

import os

from moonpool.errors import ResourceError, UsageError

cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <fcntl.h>
    #include <stdint.h>
    #include <string.h>
    #include <sys/mman.h>
    #include <unistd.h>
    #ifndef MADV_POPULATE_READ
    #define MADV_POPULATE_READ 22
    #define MADV_POPULATE_WRITE 23
    #endif
    #ifndef F_OFD_SETLK
    #define F_OFD_SETLK 37
    #endif
    static int mp_lock_range(int fd, int64_t start, int64_t n) {
        struct flock lock;
        memset(&lock, 0, sizeof lock);
        lock.l_type = F_WRLCK;
        lock.l_whence = SEEK_SET;
        lock.l_start = start;
        lock.l_len = n;
        return fcntl(fd, F_OFD_SETLK, &lock);
    }
    /* Some kernels cannot pre-fault a device: its pages then come at first touch, and that is fine. */
    static void mp_fault_in(void *start, size_t n, int writable) {
        madvise(start, n, writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ);
    }
    """
    int mp_lock_range(int fd, int64_t start, int64_t n) nogil
    void mp_fault_in(void* start, size_t n, int writable) nogil
    void* mmap(void* addr, size_t length, int protection, int flags, int fd, int64_t offset) nogil
    int munmap(void* addr, size_t length) nogil
    int madvise(void* addr, size_t length, int advice) nogil
    int close(int fd) nogil
    void* MAP_FAILED
    int PROT_READ, PROT_WRITE, MAP_SHARED, MADV_DONTFORK

cdef extern from "cachelines.h" nogil:
    const char* mp_line_kernel()


def cache_line_kernel() -> str:
    """How this CPU writes a cache line back: ``clwb``, ``clflushopt`` or ``clflush``; "" where it cannot be told to."""
    return mp_line_kernel().decode()


def lock_range(int fd, uint64_t start, uint64_t size_bytes) -> bool:
    """Lock a range of a device or file for its one owner, by ``fd``'s open description; False when somebody has it.

    Locks overlap by bytes. It ends when the last descriptor and the last mapping made by it are gone.
    """
    cdef int rc = mp_lock_range(fd, <int64_t>start, <int64_t>size_bytes)
    if rc == 0:
        return True
    if errno in (EACCES, EAGAIN):
        return False
    raise ResourceError(f"locking a range of a device failed: {os.strerror(errno)}", errno=errno)


cdef class FarMapping:
    """One range of a device, mapped here; owns its descriptor. ``address`` is that of the range's first byte.

    The range starts ``offset`` bytes into the device; what is mapped is widened to ``align``. With ``by_hand`` copies
    write cache lines back and drop stale ones. Pages are there from the start where the kernel can do that.
    """

    def __cinit__(self, int fd, uint64_t offset, uint64_t size_bytes, *, uint64_t align, bint writable,
                  bint by_hand=False):
        cdef uint64_t first, last
        cdef void* where
        cdef size_t n
        self.fd = fd  # owned from here on, also on failure
        if size_bytes == 0 or align == 0 or align & (align - 1) or offset + size_bytes + align < offset:
            raise UsageError(f"cannot map {size_bytes} bytes at {offset} in units of {align}")
        first = offset & ~(align - 1)
        last = (offset + size_bytes + align - 1) & ~(align - 1)
        n = last - first
        where = mmap(NULL, n, PROT_READ | (PROT_WRITE if writable else 0), MAP_SHARED, fd, <int64_t>first)
        if where == MAP_FAILED:
            raise ResourceError(f"mapping {n} bytes of a device at {first} failed: {os.strerror(errno)}", errno=errno)
        self.start = where
        self.mapped_bytes = n
        self.size_bytes = size_bytes
        self.writable = writable
        self.far.map = <char*>where + (offset - first)
        self.far.length = size_bytes
        self.far.writable = writable
        self.far.by_hand = by_hand
        with nogil:
            madvise(where, n, MADV_DONTFORK)  # a child would hold the range for as long as it lives
            mp_fault_in(where, n, writable)

    @property
    def address(self) -> int:
        """Of the first byte here; 0 once it is closed."""
        return <uint64_t><size_t>self.far.map

    @property
    def by_hand(self) -> bool:
        """True when copies have to write cache lines back themselves."""
        return self.far.by_hand != 0

    def close(self) -> None:
        """Unmap and close. Idempotent. Nobody may be copying any more."""
        self.release()

    cdef release(self):
        if self.start != NULL:
            munmap(self.start, self.mapped_bytes)
            self.start = NULL
            self.far.map = NULL
        if self.fd >= 0:
            close(self.fd)
            self.fd = -1

    def __dealloc__(self):
        if self.start != NULL:
            munmap(self.start, self.mapped_bytes)
        if self.fd >= 0:
            close(self.fd)
