"""A device runtime: CUDA's driver API by default, others by name, opened when asked for and never linked.

One object stands for one opened library. Its methods make the device current on the calling thread only while they
run, so that whatever else the process does with its devices is left as it was. Rows without a function answer
UnsupportedOperation for the feature that needs it.
"""

from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport calloc, free

from dataclasses import dataclass

from moonpool.errors import OutOfMemory, ResourceError, TransportUnavailable, UnsupportedOperation, UsageError

cdef enum:
    WHY_BYTES = 256
    PAGE_BYTES = 4096

KINDS = {MP_POINTER_HOST: "host", MP_POINTER_DEVICE: "device", MP_POINTER_MANAGED: "managed"}


@dataclass(frozen=True, slots=True)
class Pointer:
    """What a runtime says of an address; `base` and `size_bytes` of its allocation are 0 where it does not tell."""

    kind: str
    device: int
    base: int
    size_bytes: int


def row_names() -> list[str]:
    """The device runtimes that there are rows for; which of them are installed is another matter."""
    cdef int n = 0
    found = []
    while mp_device_row_at(n) != NULL:
        found.append(mp_device_row_at(n).name.decode())
        n += 1
    return found


cdef class DeviceRuntime:
    """An opened runtime. TransportUnavailable, with the reason, when the library or a device is not there."""

    def __cinit__(self, str row, str library=""):
        cdef char why[WHY_BYTES]
        cdef bytes name = row.encode()
        cdef bytes path = library.encode()
        cdef const char* path_chars = path
        cdef const mp_device_row* found = mp_device_row_named(name)
        cdef int rc
        if found == NULL:
            raise UsageError(f"no device runtime {row!r}; there are {', '.join(row_names())}", field="device_runtime")
        self.raw = <mp_runtime*>calloc(1, sizeof(mp_runtime))
        if self.raw == NULL:
            raise MemoryError
        with nogil:
            rc = mp_runtime_open(self.raw, found, path_chars, why, WHY_BYTES)
        if rc != 0:
            raise TransportUnavailable(
                why.decode(errors="replace"),
                f"install the driver that brings {found.libraries[0].decode()}, or name its file in device_library",
                transport="cuda",
            )

    def __dealloc__(self):
        if self.raw != NULL:
            mp_runtime_release(self.raw)
            free(self.raw)

    def release(self) -> None:
        """Give back the devices' contexts, as far as they are ours. A later call takes them again."""
        with nogil:
            mp_runtime_release(self.raw)

    def abandon_after_fork(self) -> None:
        """In a forked child: forget the parent's contexts, which no call of the child may touch."""
        cdef int device
        for device in range(self.raw.devices):
            self.raw.context[device] = NULL

    cdef int check(self, int code, str doing) except -1:
        """Raise what a call's answer means."""
        if code == MP_DEVICE_OK:
            return 0
        name = self.raw.row.name.decode()
        if code == MP_DEVICE_NO_CALL:
            raise UnsupportedOperation(f"the {name} runtime has no function for {doing}")
        if code == MP_DEVICE_GONE:
            raise ResourceError(f"{doing} failed: the {name} runtime has no such device")
        text = mp_runtime_error(self.raw, code).decode(errors="replace")
        if code == self.raw.row.no_memory:
            raise OutOfMemory(f"{doing} failed: {text} ({name} error {code})")
        raise ResourceError(f"{doing} failed: {text} ({name} error {code})")

    @property
    def name(self) -> str:
        """The row: cuda, hip, musa, maca, ascend or cambricon."""
        return self.raw.row.name.decode()

    @property
    def devices(self) -> int:
        """How many devices the runtime shows this process; at most 16 are used."""
        return self.raw.devices

    @property
    def features(self) -> dict[str, bool]:
        """What the library can do beyond the necessary: pinning, IPC, dma-buf, copies between devices."""
        cdef mp_runtime* rt = self.raw
        return {
            "pinning": rt.call[<int>MP_REGISTER] != NULL and rt.call[<int>MP_UNREGISTER] != NULL,
            "IPC": (
                rt.call[<int>MP_IPC_EXPORT] != NULL
                and rt.call[<int>MP_IPC_OPEN] != NULL
                and rt.call[<int>MP_IPC_CLOSE] != NULL
            ),
            "dma-buf": rt.call[<int>MP_DMA_BUF] != NULL,
            "peer access": rt.call[<int>MP_CAN_PEER] != NULL,
        }

    @property
    def last_error(self) -> int:
        """The latest error number that a call of the runtime gave; 0 when none did."""
        return self.raw.last_error

    def classify(self, uint64_t address) -> Pointer:
        """Whose memory an address is."""
        cdef mp_pointer about
        cdef int rc
        with nogil:
            rc = self.raw.classify(self.raw, address, &about)
        self.check(rc, "asking whose memory an address is")
        return Pointer(KINDS[about.kind], about.device, about.base, about.size)

    def uuid(self, int device) -> bytes:
        """16 bytes that name a device on every process of the host; zeros where the runtime does not tell."""
        cdef uint8_t found[16]
        cdef int k
        for k in range(16):
            found[k] = 0
        if not 0 <= device < self.raw.devices:
            raise UsageError(f"there is no device {device}: {self.raw.devices} are seen")
        if self.raw.uuid(self.raw, device, found) != MP_DEVICE_OK:
            return bytes(16)
        return (<const char*>found)[:16]

    def pin(self, uint64_t address, size_t size_bytes) -> None:
        """Lock a range of this process's host memory for quick copies; undo it with `unpin` before it is freed."""
        cdef int rc
        with nogil:
            rc = self.raw.pin(self.raw, <void*><size_t>address, size_bytes)
        self.check(rc, f"pinning {size_bytes} bytes of host memory")

    def unpin(self, uint64_t address) -> None:
        """The opposite of `pin`, by the address that was given there."""
        cdef int rc
        with nogil:
            rc = self.raw.unpin(self.raw, <void*><size_t>address)
        self.check(rc, "unpinning host memory")

    def can_peer(self, int device, int other) -> bool:
        """True when a device reaches another's memory without the host's."""
        return self.raw.can_peer(self.raw, device, other) != 0

    def sync_stream(self, int device, uint64_t stream) -> None:
        """Wait until what is queued on a stream of the caller's is done. The GIL is released."""
        cdef mp_current saved
        cdef int rc
        # 1 and 2 name the legacy and the per-thread default stream in __cuda_array_interface__, as in CUDA itself.
        with nogil:
            rc = self.raw.enter(self.raw, device, &saved)
            if rc == MP_DEVICE_OK:
                rc = self.raw.stream_sync(self.raw, <void*><size_t>stream)
            self.raw.leave(self.raw, &saved)
        self.check(rc, "waiting for a stream")

    def ipc_export(self, int device, uint64_t address) -> bytes:
        """64 bytes by which another process of this host opens the allocation that starts at `address`."""
        cdef uint8_t handle[64]
        cdef mp_current saved
        cdef int rc
        with nogil:
            rc = self.raw.enter(self.raw, device, &saved)
            if rc == MP_DEVICE_OK:
                rc = self.raw.ipc_export(self.raw, address, handle)
            self.raw.leave(self.raw, &saved)
        self.check(rc, "exporting an allocation")
        return (<const char*>handle)[:MP_IPC_BYTES]

    def ipc_open(self, int device, bytes handle) -> int:
        """Map another process's allocation: its address here, on `device`. Close it with `ipc_close`."""
        cdef const uint8_t* raw_handle = handle
        cdef mp_current saved
        cdef uint64_t address = 0
        cdef int rc
        if len(handle) != MP_IPC_BYTES:
            raise UsageError(f"an IPC handle has {MP_IPC_BYTES} bytes, not {len(handle)}")
        with nogil:
            rc = self.raw.enter(self.raw, device, &saved)
            if rc == MP_DEVICE_OK:
                rc = self.raw.ipc_open(self.raw, raw_handle, &address)
            self.raw.leave(self.raw, &saved)
        self.check(rc, "opening an allocation of another process")
        return address

    def ipc_close(self, int device, uint64_t address) -> None:
        """Unmap what `ipc_open` mapped."""
        cdef mp_current saved
        cdef int rc
        with nogil:
            rc = self.raw.enter(self.raw, device, &saved)
            if rc == MP_DEVICE_OK:
                rc = self.raw.ipc_close(self.raw, address)
            self.raw.leave(self.raw, &saved)
        self.check(rc, "closing an allocation of another process")

    def dma_buf(self, int device, uint64_t address, uint64_t size_bytes) -> tuple[int, int]:
        """A dma-buf of the whole pages that hold a range, and where in it the range starts; the caller closes the fd.

        For RDMA registration (ibv_reg_dmabuf_mr). UnsupportedOperation where the runtime cannot make one.
        """
        cdef uint64_t start = address & ~(<uint64_t>PAGE_BYTES - 1)
        cdef uint64_t stop = (address + size_bytes + PAGE_BYTES - 1) & ~(<uint64_t>PAGE_BYTES - 1)
        cdef mp_current saved
        cdef int fd = -1, rc
        with nogil:
            rc = self.raw.enter(self.raw, device, &saved)
            if rc == MP_DEVICE_OK:
                rc = self.raw.dma_buf(self.raw, start, stop - start, &fd)
            self.raw.leave(self.raw, &saved)
        self.check(rc, f"making a dma-buf of {size_bytes} bytes")
        return fd, address - start
