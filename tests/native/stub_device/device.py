"""The stub of a device runtime (stub_device.c): built once, and spoken to by tests."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
SOURCE: Final = Path(__file__).with_name("stub_device.c")
#: Error numbers of the stub, as CUDA's.
OUT_OF_MEMORY: Final = 2
GONE: Final = 999


@functools.cache
def library_path() -> str:
    """The stub's file, compiled when there is none of this source yet."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"moonpool-stub-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    target = folder / f"libstubdevice-{digest}.so"
    if not target.exists():
        made = folder / f"{target.name}.{os.getpid()}"
        command = ["gcc", "-shared", "-fPIC", "-O1", "-g", "-pthread", "-o", str(made), str(SOURCE)]
        subprocess.run(command, check=True, timeout=120)
        made.rename(target)
    return str(target)


class Stub:
    """What tests tell the stub, and ask of it. One for the process: the library keeps what it was told."""

    def __init__(self) -> None:
        self.path = library_path()
        self.library = ctypes.CDLL(self.path)
        self.library.stub_alloc.restype = ctypes.c_uint64
        self.library.stub_alloc.argtypes = (ctypes.c_int, ctypes.c_size_t)
        self.library.cuMemFree_v2.argtypes = (ctypes.c_uint64,)
        for call in (self.library.stub_store, self.library.stub_load):
            call.argtypes = (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t)
        self.library.stub_count.restype = ctypes.c_long
        self.library.stub_delay.argtypes = (ctypes.c_long,)
        self.library.stub_pin_limit.argtypes = (ctypes.c_size_t,)

    def reset(self) -> None:
        """Nothing goes wrong any more."""
        self.library.stub_reset()

    def delay(self, seconds: float) -> None:
        """Each copy takes so long."""
        self.library.stub_delay(int(seconds * 1e9))

    def hang(self, on: bool) -> None:
        """Copies do not end while this is on."""
        self.library.stub_hang(int(on))

    def gone(self, on: bool) -> None:
        """The runtime answers every call with an error."""
        self.library.stub_gone(int(on))

    def fail(self, call: str, code: int, after: int = 0) -> None:
        """Calls of one kind fail from the `after`-th on; code 0 ends it."""
        self.library.stub_fail(call.encode(), after, code)

    def fail_once(self, call: str, code: int) -> None:
        """The next call of one kind fails, and no other."""
        self.library.stub_fail_once(call.encode(), code)

    def pin_limit(self, size_bytes: int) -> None:
        """So much host memory can be pinned."""
        self.library.stub_pin_limit(size_bytes)

    def count(self, what: str) -> int:
        """How many allocations, streams, events, contexts, imports or pins live; copies, copied: totals."""
        return int(self.library.stub_count(what.encode()))

    def live(self) -> dict[str, int]:
        """All that lives."""
        kinds = ("allocations", "streams", "events", "contexts", "imports", "pins")
        return {kind: self.count(kind) for kind in kinds}


@functools.cache
def the_stub() -> Stub:
    """The one stub of this process."""
    return Stub()


class DeviceArray:
    """Bytes on a device of the stub, with the interface of a CuPy array; freed with its end, or by `free`."""

    def __init__(self, size: int, device: int = 0, fill: int = 0) -> None:
        self._stub = the_stub()
        self.size = size
        self.device = device
        self.address = int(self._stub.library.stub_alloc(device, size))
        assert self.address, "the stub has no memory"
        self.store(np.full(size, fill, dtype=np.uint8))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.size,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }

    def load(self, start: int = 0, size: int | None = None) -> Bytes:
        """A copy of the bytes, behind the runtime's back."""
        out = np.empty(self.size - start if size is None else size, dtype=np.uint8)
        if len(out):
            rc = self._stub.library.stub_load(self.address + start, out.ctypes.data, len(out))
            assert rc == 0
        return out

    def store(self, data: Bytes, start: int = 0) -> None:
        """Sets bytes, behind the runtime's back."""
        whole = np.ascontiguousarray(data)
        if len(whole):
            rc = self._stub.library.stub_store(self.address + start, whole.ctypes.data, len(whole))
            assert rc == 0

    def free(self) -> None:
        """Give the memory back. Idempotent."""
        if self.address:
            assert self._stub.library.cuMemFree_v2(self.address) == 0
            self.address = 0

    def __del__(self) -> None:
        self.free()
