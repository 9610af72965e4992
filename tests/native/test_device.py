"""Device runtimes by their rows, over the stub: pointers, pinning, IPC, dma-buf, and what goes wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.native.stub_device.device import GONE, OUT_OF_MEMORY, DeviceArray, Stub, the_stub

from moonpool.errors import (
    OutOfMemory,
    ResourceError,
    TransportUnavailable,
    UnsupportedMemory,
    UnsupportedOperation,
    UsageError,
)
from moonpool.native.device.runtime import DeviceRuntime, row_names
from moonpool.native.device.serving import ENTRY_BYTES, Serving
from moonpool.native.io.memory import BufferHold, create_memory
from moonpool.native.io.regions import LocalRegions
from moonpool.transport.cuda_memory import DeviceBacking

SIZE = 1 << 20


@pytest.fixture
def stub() -> Any:
    made = the_stub()
    made.reset()
    yield made
    made.reset()


@pytest.fixture(params=["cuda", "hip"])
def runtime(request: pytest.FixtureRequest, stub: Stub) -> DeviceRuntime:
    return DeviceRuntime(request.param, stub.path)


def test_the_rows() -> None:
    assert row_names() == ["cuda", "hip", "musa", "maca", "ascend", "cambricon"]
    with pytest.raises(UsageError, match="cambricon"):
        DeviceRuntime("glide")


@pytest.mark.parametrize("row", ["musa", "maca", "ascend", "cambricon"])
def test_a_library_without_a_rows_functions_names_the_missing_one(stub: Stub, row: str) -> None:
    with pytest.raises(TransportUnavailable, match=r"has no (mu|mc|acl|cn)"):
        DeviceRuntime(row, stub.path)


def test_a_library_that_is_not_there() -> None:
    with pytest.raises(TransportUnavailable, match="cannot be opened"):
        DeviceRuntime("cuda", "/nowhere/libcuda.so")


def test_a_runtime_that_does_not_start_says_why(stub: Stub) -> None:
    stub.fail("init", GONE)
    with pytest.raises(TransportUnavailable, match="does not start"):
        DeviceRuntime("cuda", stub.path)
    stub.fail("init", 0)
    stub.fail("count", 100)
    with pytest.raises(TransportUnavailable, match="no device"):
        DeviceRuntime("cuda", stub.path)


def test_whose_memory_an_address_is(runtime: DeviceRuntime) -> None:
    array = DeviceArray(SIZE, device=1)
    about = runtime.classify(array.address + 5000)
    assert (about.kind, about.device) == ("device", 1)
    assert (about.base, about.size_bytes) == (array.address, SIZE)
    host = np.zeros(16)
    assert runtime.classify(host.ctypes.data).kind == "host"
    array.free()


def test_devices_have_names_of_their_own(runtime: DeviceRuntime) -> None:
    assert runtime.devices == 2
    assert len({runtime.uuid(0), runtime.uuid(1)}) == 2
    assert runtime.can_peer(0, 1)
    assert runtime.can_peer(1, 1)
    assert runtime.features["IPC"]
    assert runtime.features["dma-buf"] == (runtime.name == "cuda")
    with pytest.raises(UsageError):
        runtime.uuid(2)


def test_the_context_of_the_caller_is_left_alone(stub: Stub) -> None:
    runtime = DeviceRuntime("cuda", stub.path)
    array = DeviceArray(SIZE, device=1)
    runtime.classify(array.address)
    runtime.ipc_export(1, array.address)
    assert stub.library.stub_depth() == 0
    array.free()


def test_a_forked_child_touches_no_context_of_its_parent(stub: Stub) -> None:
    runtime = DeviceRuntime("cuda", stub.path)
    array = DeviceArray(SIZE)
    before = stub.count("contexts")
    runtime.ipc_export(0, array.address)
    assert stub.count("contexts") == before + 1
    runtime.abandon_after_fork()
    del runtime
    assert stub.count("contexts") == before + 1, "nothing was given back that is the parent's"
    stub.library.cuDevicePrimaryCtxRelease_v2(0)
    array.free()


def test_pinning_is_bounded_and_undone(stub: Stub, runtime: DeviceRuntime) -> None:
    memory = create_memory(SIZE)
    runtime.pin(memory.address, SIZE)
    assert stub.count("pins") == 1
    stub.pin_limit(0)
    other = create_memory(SIZE)
    with pytest.raises(OutOfMemory, match="pinning"):
        runtime.pin(other.address, SIZE)
    runtime.unpin(memory.address)
    assert stub.count("pins") == 0
    with pytest.raises(ResourceError, match="unpinning"):
        runtime.unpin(memory.address)


def test_a_dma_buf_is_of_whole_pages(stub: Stub) -> None:
    runtime = DeviceRuntime("cuda", stub.path)
    array = DeviceArray(SIZE)
    array.store(np.arange(SIZE, dtype=np.uint64).astype(np.uint8))
    fd, offset = runtime.dma_buf(0, array.address + 4096 + 100, 5000)
    try:
        assert offset == 100
        assert os.pread(fd, 4, 4096 + 100) == array.load(4096 + 100, 4).tobytes()
    finally:
        os.close(fd)
    stub.fail("dma_buf", 801)
    with pytest.raises(ResourceError, match="dma-buf"):
        runtime.dma_buf(0, array.address, SIZE)
    array.free()
    with pytest.raises(UnsupportedOperation, match="no function"):
        DeviceRuntime("hip", stub.path).dma_buf(0, 4096, 4096)


def test_errors_carry_the_runtimes_words(stub: Stub, runtime: DeviceRuntime) -> None:
    array = DeviceArray(SIZE)
    stub.fail("ipc_export", OUT_OF_MEMORY)
    with pytest.raises(OutOfMemory, match="error 2"):
        runtime.ipc_export(0, array.address)
    with pytest.raises(ResourceError, match="no such device"):
        runtime.ipc_export(5, array.address)
    with pytest.raises(UsageError, match="64 bytes"):
        runtime.ipc_open(0, b"short")
    assert runtime.last_error == OUT_OF_MEMORY
    array.free()


def test_a_process_does_not_open_what_it_exported(runtime: DeviceRuntime) -> None:
    array = DeviceArray(SIZE)
    with pytest.raises(ResourceError):
        runtime.ipc_open(0, runtime.ipc_export(0, array.address))
    with pytest.raises(ResourceError):
        runtime.ipc_open(0, bytes(64))
    array.free()


def test_another_process_maps_an_allocation(stub: Stub, runtime: DeviceRuntime) -> None:
    array = DeviceArray(SIZE, device=1, fill=7)
    handle = runtime.ipc_export(1, array.address)
    child = subprocess.run(
        [sys.executable, "-c", PATHS + CHILD, runtime.name, stub.path, handle.hex()],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == ["7", "1", "0"]
    assert (array.load() == 9).all()
    array.free()


PATHS = f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})\n"
CHILD = """
import sys
import numpy as np
from moonpool.native.device.runtime import DeviceRuntime
from tests.native.stub_device.device import DeviceArray, the_stub
stub = the_stub()
runtime = DeviceRuntime(sys.argv[1], sys.argv[2])
address = runtime.ipc_open(1, bytes.fromhex(sys.argv[3]))
size = runtime.classify(address).size_bytes
face = DeviceArray.__new__(DeviceArray)
face._stub, face.address, face.size = stub, address, size
print(face.load(0, 1)[0])
face.store(np.full(size, 9, dtype=np.uint8))
print(stub.count("imports"))
runtime.ipc_close(1, address)
print(stub.count("imports"))
face.address = 0
"""


class _Hold:
    """A held array of any address and size."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.address, self.size_bytes, self.writable, self.stream = address, size_bytes, True, 0
        self.released = False

    def release(self) -> None:
        """Note it."""
        self.released = True


def test_arrays_become_regions_only_when_the_runtime_knows_all_of_them(runtime: DeviceRuntime) -> None:
    array = DeviceArray(SIZE, device=1)
    hold = _Hold(array.address + 256, 1000)
    backing = DeviceBacking(runtime, hold)
    assert (backing.address, backing.device_address, backing.location) == (0, array.address + 256, "cuda:1")
    _ipc, offset = backing.export()
    assert offset == 256
    backing.close()
    assert hold.released
    with pytest.raises(UnsupportedMemory, match="beyond"):
        DeviceBacking(runtime, _Hold(array.address + 256, SIZE))
    with pytest.raises(UnsupportedMemory, match="does not know"):
        DeviceBacking(runtime, _Hold(np.zeros(9).ctypes.data, 8))
    array.free()


def test_device_arrays_are_held_only_where_they_are_welcome(stub: Stub) -> None:
    array = DeviceArray(100)
    with pytest.raises(UnsupportedMemory, match="cuda"):
        BufferHold(array, writable=True)
    hold = BufferHold(array, writable=True, device=True)
    assert hold.on_device
    assert (hold.address, hold.size_bytes, hold.ordinal, hold.stream) == (array.address, 100, -1, 0)
    hold.release()
    assert not BufferHold(bytearray(4), writable=True, device=True).on_device
    array.free()


# ---- serving ---------------------------------------------------------------------------------------------


def entry(handle: int, offset: int, length: int, at: int, key: bytes) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in (handle, offset, length, at)) + key


@pytest.fixture
def served(runtime: DeviceRuntime) -> Any:
    """A region on a device, and slots by which it is served."""
    from moonpool.native.device.path import NearRegion, set_near

    array = DeviceArray(SIZE, device=1)
    array.store(np.random.default_rng(3).integers(0, 255, SIZE, dtype=np.uint8))
    table = LocalRegions(8)
    handle = table.add(array.address, SIZE, 1 | 2 | 4 | 16 | 32, b"r" * 16, b"w" * 16)
    set_near(table, handle, NearRegion(1))
    memory = create_memory(2 * 65536)
    serving = Serving(runtime, table, memory.address, 65536, memory)
    yield serving, array, handle, memory, table
    assert serving.close()
    memory.close()
    array.free()


def finish(serving: Serving, slot: int) -> list[int]:
    deadline = time.monotonic() + 20
    while not serving.done(slot):
        assert time.monotonic() < deadline, "the copies do not end"
        time.sleep(0.0002)
    return list(serving.take(slot))


def test_serving_copies_both_ways(served: Any) -> None:
    serving, array, handle, memory, _table = served
    window = entry(handle, 1000, 5000, 64, b"r" * 16) + entry(handle, 0, 16, 60_000, b"r" * 16)
    serving.start(1, False, window)
    assert finish(serving, 1) == [0, 0]
    view = memoryview(memory)
    assert bytes(view[65536 + 64 : 65536 + 5064]) == array.load(1000, 5000).tobytes()
    view[:4] = b"abcd"
    serving.start(0, True, entry(handle, SIZE - 4, 4, 0, b"w" * 16))
    assert finish(serving, 0) == [0]
    assert array.load(SIZE - 4).tobytes() == b"abcd"
    view.release()


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"handle": 5}, 6),
        ({"key": b"w" * 16}, 8),
        ({"offset": SIZE - 3}, 7),
        ({"offset": 1 << 63}, 7),
        ({"length": 1 << 63}, 9),
        ({"at": 65535}, 9),
        ({"at": 1 << 63}, 9),
    ],
)
def test_serving_refuses_what_makes_no_sense(served: Any, change: dict[str, Any], status: int) -> None:
    serving, array, handle, _memory, _table = served
    before = array.load()
    about: dict[str, Any] = {"handle": handle, "offset": 0, "length": 4, "at": 0, "key": b"r" * 16} | change
    serving.start(0, False, entry(**about))
    assert finish(serving, 0) == [status]
    assert np.array_equal(array.load(), before)


def test_serving_takes_no_nonsense_for_a_window(served: Any) -> None:
    serving, _array, handle, _memory, _table = served
    good = entry(handle, 0, 4, 0, b"r" * 16)
    for slot, window in ((2, good), (-1, good), (0, good[:-1]), (0, good * 1025)):
        with pytest.raises(Exception, match="window"):
            serving.start(slot, False, window)
    serving.start(0, False, good)
    with pytest.raises(UsageError, match="in use"):
        serving.start(0, False, good)
    finish(serving, 0)
    with pytest.raises(UsageError, match="no window"):
        serving.take(0)
    assert len(good) == ENTRY_BYTES


def test_a_revoke_waits_for_what_is_served(stub: Stub, served: Any) -> None:
    serving, _array, handle, _memory, table = served
    stub.hang(True)
    serving.start(0, False, entry(handle, 0, 4096, 0, b"r" * 16))
    assert not serving.done(0)
    assert not serving.close()
    assert not table.remove(handle, 0.05)
    stub.hang(False)
    assert finish(serving, 0) == [0]
    assert table.drain(5.0)


def test_a_copy_that_fails_while_it_is_served(stub: Stub, served: Any) -> None:
    serving, _array, handle, _memory, _table = served
    stub.fail("copy", GONE)
    serving.start(0, False, entry(handle, 0, 4096, 0, b"r" * 16))
    assert finish(serving, 0) == [14]
    stub.fail("copy", 0)
    stub.fail("record", GONE)
    serving.start(0, False, entry(handle, 0, 4096, 0, b"r" * 16))
    assert finish(serving, 0) == [14]
    stub.fail("record", 0)
