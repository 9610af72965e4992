"""Engine memory: sealed memfds, mappings of a peer's memfd, and acceptance of foreign host buffers.

Engine memory is a memfd sealed against shrinking and growing (memfd_create(2), fcntl(2) F_ADD_SEALS), so a peer that
maps it can never be hit by SIGBUS, and nothing is left in any file system when its processes die.
"""

cimport cython
from cpython.buffer cimport PyBUF_ANY_CONTIGUOUS, PyBUF_FORMAT, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_FillInfo
from cpython.buffer cimport PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer, Py_buffer
from cpython.number cimport PyNumber_Index
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from libc.errno cimport EINVAL, errno
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint64_t
from libc.string cimport strchr

import os
from itertools import zip_longest

from moonpool.errors import ResourceError, UnsupportedMemory, UsageError

cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <fcntl.h>
    #include <stdint.h>
    #include <linux/memfd.h>
    #include <sys/mman.h>
    #include <unistd.h>
    #ifndef MADV_POPULATE_READ
    #define MADV_POPULATE_READ 22
    #define MADV_POPULATE_WRITE 23
    #endif
    #ifndef MADV_COLLAPSE
    #define MADV_COLLAPSE 25
    #endif
    #define MP_HUGE ((size_t)2 << 20)
    #define MP_CHUNK ((size_t)64 << 20)
    /* A mapping that starts on a huge page, so that huge pages of the file can be mapped as such. */
    static void *mp_map_aligned(size_t n, int protection, int fd) {
        char *room, *start;
        if (n < MP_HUGE) return mmap(0, n, protection, MAP_SHARED, fd, 0);
        room = mmap(0, n + MP_HUGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (room == MAP_FAILED) return room;
        start = (char *)(((uintptr_t)room + MP_HUGE - 1) & ~(uintptr_t)(MP_HUGE - 1));
        if (mmap(start, n, protection, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
            munmap(room, n + MP_HUGE);
            return MAP_FAILED;
        }
        if (start > room) munmap(room, (size_t)(start - room));
        munmap(start + ((n + 4095) & ~(size_t)4095), MP_HUGE - (size_t)(start - room));
        return start;
    }
    /* Ask for huge pages now (madvise(2), MADV_COLLAPSE, Linux 6.1): works for a memfd also where shmem_enabled says
     * "never". The kernel wants one page of each to be there. Returns the bytes that became huge. */
    static size_t mp_make_huge(char *start, size_t n) {
        size_t at, done = 0, end = n & ~(MP_HUGE - 1);
        for (at = 0; at < end; at += MP_CHUNK) {
            size_t piece = end - at < MP_CHUNK ? end - at : MP_CHUNK, k;
            for (k = 0; k < piece; k += MP_HUGE) *(volatile char *)(start + at + k) = 0;
            if (madvise(start + at, piece, MADV_COLLAPSE) != 0) break;
            done += piece;
        }
        return done;
    }
    """
    void* mp_map_aligned(size_t n, int protection, int fd) nogil
    size_t mp_make_huge(char* start, size_t n) nogil
    int memfd_create(const char* name, unsigned int flags) nogil
    int ftruncate(int fd, int64_t length) nogil
    int fcntl(int fd, int cmd, ...) nogil
    int munmap(void* addr, size_t length) nogil
    int madvise(void* addr, size_t length, int advice) nogil
    int close(int fd) nogil
    void* MAP_FAILED
    int PROT_READ, PROT_WRITE, MAP_SHARED, F_ADD_SEALS, F_GET_SEALS, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_SEAL
    unsigned int MFD_CLOEXEC, MFD_ALLOW_SEALING, MFD_HUGETLB
    int MADV_HUGEPAGE, MADV_POPULATE_READ, MADV_POPULATE_WRITE

PAGE_BYTES = os.sysconf("SC_PAGESIZE")
HUGE_PAGE_BYTES = 2 << 20
MAPPING_BYTES_MAX = 1 << 46


cdef class SharedMemory:
    """A memfd mapped in this process: our own (``create_memory``) or a peer's (``map_memory``).

    Supports the buffer protocol (bytes); ``close`` refuses while a view of it lives. The fd is owned and close-on-exec.
    """

    def __cinit__(self):
        self.fd = -1
        self.address = 0

    def __getbuffer__(self, Py_buffer* view, int flags):
        if self.address == 0:
            raise UsageError("this memory is closed")
        PyBuffer_FillInfo(view, self, <void*><size_t>self.address, self.size_bytes, not self.writable, flags)
        self.exports += 1

    def __releasebuffer__(self, Py_buffer* view):
        self.exports -= 1

    @property
    def exported(self) -> int:
        """Number of live buffer views of this memory."""
        return self.exports

    def read_only_fd(self) -> int:
        """A new fd of the same memory that can be mapped for reading only; the caller closes it."""
        if self.fd < 0:
            raise UsageError("this memory is closed")
        try:
            return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as problem:
            raise ResourceError(f"opening a memfd for reading failed: {problem.strerror}",
                                errno=problem.errno) from problem

    def close(self) -> None:
        """Unmap and close. Idempotent; UsageError while buffer views of it are alive."""
        if self.exports:
            raise UsageError(f"{self.exports} views of this memory are still alive; release them before closing it")
        self.release()

    cdef release(self):
        if self.address:
            munmap(<void*><size_t>self.address, self.size_bytes)
            self.address = 0
        if self.fd >= 0:
            close(self.fd)
            self.fd = -1

    def __dealloc__(self):
        if self.address:
            munmap(<void*><size_t>self.address, self.size_bytes)
        if self.fd >= 0:
            close(self.fd)


def create_memory(size_bytes, *, bint huge_pages=False, bint prefault=True) -> SharedMemory:
    """New zeroed engine memory of ``size_bytes``, in whole pages, pre-faulted, of huge pages where it can be.

    Huge pages come by MADV_COLLAPSE, best effort and without any setting; ``huge_pages`` insists on reserved ones.

    Pre-faulting matters: the first touch of a fresh page costs several times the copy into it. ResourceError (with
    errno) when the kernel has not enough memory or, with ``huge_pages``, no reserved 2 MiB pages.
    """
    cdef uint64_t page = HUGE_PAGE_BYTES if huge_pages else PAGE_BYTES
    cdef uint64_t asked = PyNumber_Index(size_bytes)  # a float would be cut without a word
    cdef unsigned int flags = MFD_CLOEXEC | MFD_ALLOW_SEALING
    if asked == 0 or asked > <uint64_t>MAPPING_BYTES_MAX:
        raise UsageError(f"size_bytes={size_bytes}: engine memory takes 1 byte to {MAPPING_BYTES_MAX} bytes")
    if huge_pages:
        flags |= MFD_HUGETLB
    memory = SharedMemory.__new__(SharedMemory)
    cdef SharedMemory made = memory
    made.size_bytes = (asked + page - 1) // page * page
    made.writable = True
    made.owner = True
    made.hugetlb = huge_pages
    made.fd = memfd_create(b"moonpool", flags)
    if made.fd < 0:
        raise _os_error("memfd_create", made.size_bytes)
    if ftruncate(made.fd, <int64_t>made.size_bytes) != 0:
        raise _os_error("ftruncate of a memfd", made.size_bytes)
    if fcntl(made.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0:
        raise _os_error("sealing a memfd", made.size_bytes)
    _map(made, prefault)
    return memory


def map_memory(int fd, uint64_t size_bytes, *, bint writable, bint prefault=True) -> SharedMemory:
    """Map a peer's memfd; takes ownership of ``fd``, also on failure.

    The fd must carry the seals of engine memory and be at least ``size_bytes`` long: else UsageError, because an
    unsealed file could be cut under the mapping and kill this process.
    """
    memory = SharedMemory.__new__(SharedMemory)
    cdef SharedMemory made = memory
    cdef int needed = F_SEAL_SHRINK | F_SEAL_GROW
    made.fd = fd
    made.size_bytes = size_bytes
    made.writable = writable
    if size_bytes == 0 or size_bytes > <uint64_t>MAPPING_BYTES_MAX:
        raise UsageError(f"size_bytes={size_bytes}: a mapping takes 1 byte to {MAPPING_BYTES_MAX} bytes")
    cdef int seals = fcntl(fd, F_GET_SEALS)
    if seals < 0 or (seals & needed) != needed:
        raise UsageError("the peer's memory is not sealed against shrinking: refusing to map it")
    if <uint64_t>os.fstat(fd).st_size < size_bytes:
        raise UsageError(f"the peer's memory is shorter than the {size_bytes} bytes it announced")
    _map(made, prefault)
    return memory


cdef _map(SharedMemory memory, bint prefault):
    cdef int protection = PROT_READ | (PROT_WRITE if memory.writable else 0)
    cdef void* where
    cdef size_t n = memory.size_bytes
    where = mp_map_aligned(n, protection, memory.fd)
    if where == MAP_FAILED:
        raise _os_error("mmap", n)
    memory.address = <uint64_t><size_t>where
    madvise(where, n, MADV_HUGEPAGE)  # advice only: the kernel may have it switched off
    if prefault:
        prefault_memory(memory)


def prefault_memory(SharedMemory memory not None) -> None:
    """Make every page of a mapping be there now; of our own memory, in huge pages where that can be."""
    cdef void* where = <void*><size_t>memory.address
    cdef size_t n = memory.size_bytes
    cdef int rc = 0, advice = MADV_POPULATE_WRITE if memory.owner else MADV_POPULATE_READ
    with nogil:
        if memory.owner and not memory.hugetlb:
            memory.huge_bytes = mp_make_huge(<char*>where, n)
        rc = madvise(where, n, advice)
    if rc != 0 and errno != EINVAL:  # EINVAL: a kernel before 5.14; the pages then fault in one by one
        raise _os_error("pre-faulting memory", n)


cdef _os_error(str doing, uint64_t size_bytes):
    cdef int code = errno
    return ResourceError(f"{doing} of {size_bytes} bytes failed: {os.strerror(code)}", errno=code)


# DLPack's C structures, as far as a host consumer needs them (dlpack.h of the DLPack project, v0 and v1 layouts).
cdef struct DLTensor:
    void* data
    int32_t device_type
    int32_t device_id
    int32_t ndim
    uint8_t code
    uint8_t bits
    uint16_t lanes
    int64_t* shape
    int64_t* strides
    uint64_t byte_offset

cdef enum:
    DL_CPU = 1
    DL_CUDA = 2
    DL_CUDA_HOST = 3
    DL_ROCM = 10
    DL_ROCM_HOST = 11
    DL_EXT_DEV = 12
    DL_CUDA_MANAGED = 13
    DL_MAIA = 17


@cython.no_gc_clear  # else a collection drops the buffer's owner, and the export is never given back
cdef class BufferHold:
    """A foreign buffer held in place: its address and length, valid until this object is released.

    Accepts the buffer protocol, ``__array_interface__`` and DLPack, C-contiguous. Device memory
    (``__cuda_array_interface__``, DLPack) is taken with ``device``, and `on_device` is then set; else it is refused
    with UnsupportedMemory, which names the transport that takes it.
    """

    def __init__(self, source, *, bint writable, bint device=False):
        self.ordinal = -1
        self.device = device
        if isinstance(source, int):
            raise UsageError("got an integer where a buffer is expected; addresses must lie in registered memory")
        if hasattr(source, "__cuda_array_interface__"):
            if not device:
                raise UnsupportedMemory("it is device memory (it has __cuda_array_interface__)", "cuda")
            self._take_cuda_array(source)
            self._check_writable(writable)
            return
        if hasattr(source, "__dlpack_device__"):
            self._check_device(source.__dlpack_device__())
            if self.on_device:
                self._take_dlpack(source)
                self._check_writable(writable)
                return
        if PyObject_CheckBuffer(source):
            self._take_buffer(source, writable)
        elif hasattr(source, "__array_interface__"):
            self._take_array_interface(source)
        elif hasattr(source, "__dlpack__"):
            self._take_dlpack(source)
        else:
            raise UsageError(
                f"{type(source).__name__} is no buffer: pass an object with the buffer protocol, "
                "__array_interface__ or DLPack (bytes, bytearray, memoryview, numpy, torch on CPU)"
            )
        self._check_writable(writable)

    def _check_writable(self, bint writable):
        if writable and not self.writable:
            raise UsageError("this buffer is read-only, but the transfer would write into it")

    def _check_device(self, device):
        kind = int(device[0])
        if kind in (DL_CPU, DL_CUDA_HOST, DL_ROCM_HOST):
            return
        if not self.device:
            raise UnsupportedMemory(f"it is device memory (DLPack device type {kind})", "cuda")
        if kind not in (DL_CUDA, DL_ROCM, DL_EXT_DEV, DL_CUDA_MANAGED, DL_MAIA):
            raise UnsupportedMemory(f"no device runtime is known for its memory (DLPack device type {kind})")
        self.on_device = True
        self.ordinal = int(device[1])

    def _take_cuda_array(self, source):
        about = source.__cuda_array_interface__
        self._take_array(source, about)
        stream = about.get("stream")
        self.stream = 0 if stream is None else int(stream)
        self.on_device = True

    def _take_buffer(self, source, bint writable):
        flags = PyBUF_ANY_CONTIGUOUS | PyBUF_FORMAT | (PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
        try:
            PyObject_GetBuffer(source, &self.view, flags)
        except (BufferError, ValueError) as problem:
            raise UsageError(f"this buffer cannot be used ({problem}): it must be contiguous"
                             + (" and writable" if writable else "")) from problem
        self.has_view = True
        if self.view.format != NULL and strchr(self.view.format, c"O") != NULL:
            # Pointers to Python objects: a peer's bytes in their place would crash the interpreter.
            self.release()
            raise UsageError("this buffer holds Python objects, no plain bytes")
        self.address = <uint64_t><size_t>self.view.buf
        self.size_bytes = self.view.len
        self.writable = not self.view.readonly

    def _take_array_interface(self, source):
        self._take_array(source, source.__array_interface__)

    def _take_array(self, source, about):
        data, kind = about.get("data"), about["typestr"]
        if not isinstance(data, tuple):
            # It may be a buffer instead, whose first byte would then pass for an address.
            raise UsageError("its array interface gives no data pointer: pass the buffer itself")
        if kind[1] not in "biufcSV":
            raise UsageError(f"elements of type {kind!r} are no plain bytes: pass a view of the array as uint8")
        size = int(kind[2:])
        strides = about.get("strides") or ()
        for extent, stride in zip_longest(reversed(about["shape"]), reversed(strides)):
            if stride is not None and extent != 1 and stride != size:
                raise UsageError("this array is strided: pass a C-contiguous one")
            if extent < 0:
                raise UsageError(f"its array interface gives the impossible shape {about['shape']}")
            size *= int(extent)
        self.keep = source
        self.address = int(data[0])
        self.writable = not data[1]
        self.size_bytes = size

    def _take_dlpack(self, source):
        try:
            capsule = source.__dlpack__()
        except (BufferError, RuntimeError) as problem:
            raise UsageError(f"this tensor cannot be used ({problem})") from problem
        if not PyCapsule_IsValid(capsule, b"dltensor"):
            raise UsageError("__dlpack__ gave no unversioned capsule")
        cdef DLTensor* tensor = <DLTensor*>PyCapsule_GetPointer(capsule, b"dltensor")
        cdef int64_t expected = 1
        cdef int axis
        self._check_device((tensor.device_type, tensor.device_id))
        for axis in range(tensor.ndim - 1, -1, -1):
            if tensor.strides != NULL and tensor.shape[axis] != 1 and tensor.strides[axis] != expected:
                raise UsageError("this tensor is strided: pass a contiguous one")
            expected *= tensor.shape[axis]
        self.keep = (capsule, source)
        self.address = <uint64_t><size_t>tensor.data + tensor.byte_offset
        self.size_bytes = <uint64_t>expected * <uint64_t>((tensor.bits * tensor.lanes + 7) // 8)
        self.writable = True

    def release(self) -> None:
        """Let the buffer go. Idempotent."""
        if self.has_view:
            self.has_view = False
            PyBuffer_Release(&self.view)
        self.keep = None
        self.address = 0
        self.size_bytes = 0

    def __dealloc__(self):
        if self.has_view:
            PyBuffer_Release(&self.view)
