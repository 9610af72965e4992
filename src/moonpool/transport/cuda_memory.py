"""Device arrays as regions, and allocations of other processes mapped here."""

from __future__ import annotations

import contextlib
from typing import final

from moonpool.errors import MoonpoolError, UnsupportedMemory
from moonpool.native.device.runtime import DeviceRuntime
from moonpool.transport.base import HeldBuffer


def unknown_memory(runtime: DeviceRuntime) -> str:
    """Why an array that says it is on a device is not taken."""
    return f"the {runtime.name} runtime of the transport cuda does not know it as memory of a device"


@final
class DeviceBacking:
    """A device array held in place for as long as its region lives."""

    def __init__(self, runtime: DeviceRuntime, hold: HeldBuffer) -> None:
        about = runtime.classify(hold.address)
        if about.kind == "host":
            raise UnsupportedMemory(unknown_memory(runtime), transport="cuda")
        if about.base and hold.address + hold.size_bytes > about.base + about.size_bytes:
            raise UnsupportedMemory("it reaches beyond its allocation on the device", transport="cuda")
        self._runtime = runtime
        self._hold = hold
        self.device = about.device
        #: Of the allocation that it lies in; its own address where the runtime does not tell.
        self.base = about.base or hold.address
        self.allocation_bytes = about.size_bytes or hold.size_bytes
        self.device_address = hold.address
        self.size_bytes = hold.size_bytes
        self.writable = hold.writable
        self.location = f"cuda:{about.device}"

    @property
    def address(self) -> int:
        """0: no CPU reaches it."""
        return 0

    def dma_buf(self) -> tuple[int, int]:
        """A dma-buf of the whole pages around the array, and where in it the array starts."""
        return self._runtime.dma_buf(self.device, self.device_address, self.size_bytes)

    def export(self) -> tuple[bytes, int]:
        """An IPC handle of the allocation, and where in it the array starts."""
        return self._runtime.ipc_export(self.device, self.base), self.device_address - self.base

    def close(self) -> None:
        """Let go of the array."""
        self._hold.release()


@final
class ImportedAllocation:
    """Another process's allocation, mapped here by an IPC handle."""

    def __init__(self, runtime: DeviceRuntime, device: int, ipc_handle: bytes) -> None:
        self._runtime = runtime
        self.device = device
        self.base = runtime.ipc_open(device, ipc_handle)

    def close(self) -> None:
        """Unmap. Idempotent; a runtime that is gone has unmapped it already."""
        if not self.base:
            return
        base, self.base = self.base, 0
        with contextlib.suppress(MoonpoolError):
            self._runtime.ipc_close(self.device, base)
