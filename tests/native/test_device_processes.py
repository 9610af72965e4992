"""Device memory between two processes, over the stub: IPC, and an owner that is killed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.native.stub_device.device import DeviceArray, Stub, the_stub

from moonpool import Engine
from moonpool.errors import MoonpoolError
from moonpool.operations import Op

ROOT = Path(__file__).resolve().parents[2]
SIZE = 3 * (1 << 20) + 4097


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "device_library": the_stub().path,
        "device_staging_bytes": 2 << 20,
        "stall_timeout_ms": 8_000,
        "transfer_timeout_ms": 20_000,
        **changes,
    }


@pytest.fixture
def stub() -> Iterator[Stub]:
    made = the_stub()
    made.reset()
    yield made
    made.reset()


PATHS = f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})\n"
CHILD = """
import sys
import numpy as np
from moonpool import Engine
from tests.native.stub_device.device import DeviceArray
ends = tuple(sys.argv[1].split(","))
engine = Engine(transports=ends, device_library=sys.argv[2], device_staging_bytes=2 << 20)
array = DeviceArray(int(sys.argv[3]), device=1, fill=5)
region = engine.register(array)
print(engine.endpoint, region.handle, flush=True)
for line in sys.stdin:
    print(array.load()[:: 1 << 19].sum(), flush=True)
"""


@contextlib.contextmanager
def owner(ends: str) -> Iterator[tuple[Any, str, int]]:
    """An owner of a device region in a process of its own."""
    with subprocess.Popen(
        [sys.executable, "-c", PATHS + CHILD, ends, the_stub().path, str(SIZE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        try:
            assert process.stdout is not None
            endpoint, handle = process.stdout.readline().split()
            yield process, endpoint, int(handle)
        finally:
            process.kill()


@pytest.mark.parametrize("ends", ["cuda,shm,tcp", "cuda,tcp"])
def test_device_to_device_between_processes(stub: Stub, ends: str) -> None:
    with (
        owner(ends) as (process, endpoint, handle),
        Engine(transports=tuple(ends.split(",")), **settings()) as engine,
    ):
        near = DeviceArray(SIZE)
        segment = engine.open(endpoint)
        assert stub.count("imports") == 1
        engine.read(segment, handle, 0, near)
        assert (near.load() == 5).all()
        near.store(np.full(SIZE, 3, dtype=np.uint8))
        engine.write(segment, handle, 0, near)
        process.stdin.write("look\n")
        process.stdin.flush()
        assert int(process.stdout.readline()) == 3 * len(range(0, SIZE, 1 << 19))
        assert engine._by_name["cuda"].counters()["across_bytes"] == 2 * SIZE
        engine.close_segment(segment)
        assert stub.count("imports") == 0


def test_an_owner_that_is_killed(stub: Stub) -> None:
    with (
        owner("cuda,tcp") as (process, endpoint, handle),
        Engine(transports=("cuda", "tcp"), **settings(device_ipc=False)) as engine,
    ):
        near = DeviceArray(SIZE)
        engine.register(near)
        segment = engine.open(endpoint)
        engine.read(segment, handle, 0, near)
        local = np.full(20_000, near.address, dtype=np.uint64)
        batch = engine.submit(Op.READ, segment, local, handle, 0, 1 << 20)
        deadline = time.monotonic() + 10
        while engine._by_name["cuda"].counters()["up_bytes"] < 2 * SIZE and time.monotonic() < deadline:
            time.sleep(0.001)
        process.kill()
        assert batch.wait(20)
        assert not batch.ok
        assert set(bytes(batch.status)) <= {0, 4, 6}
        with pytest.raises(MoonpoolError):
            engine.read(segment, handle, 0, near)
