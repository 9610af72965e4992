"""Device memory through engines, over the stub: every pair of sides, and what goes wrong in the middle."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.native.stub_device.device import OUT_OF_MEMORY, Bytes, DeviceArray, Stub, the_stub

from moonpool import Engine
from moonpool.errors import (
    InternalError,
    MoonpoolError,
    OutOfMemory,
    PeerStalled,
    StaleHandle,
    TransferTimeout,
    UnsupportedMemory,
)
from moonpool.native.io.copying import chunk_digests
from moonpool.operations import Op
from moonpool.transport import cuda
from moonpool.transport.base import OnDevice

SIZE = 3 * (1 << 20) + 4097
STAGING = 2 << 20
WAYS = {
    "own": (("local", "cuda"), {}),
    "by-address": (("cuda", "shm", "tcp"), {}),
    "served-shm": (("cuda", "shm"), {"device_ipc": False}),
    "served-tcp": (("cuda", "tcp"), {"device_ipc": False}),
}


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "device_library": the_stub().path,
        "device_staging_bytes": STAGING,
        "stall_timeout_ms": 8_000,
        "transfer_timeout_ms": 20_000,
        **changes,
    }


def noise(size: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 255, size, dtype=np.uint8)


@pytest.fixture
def stub() -> Iterator[Stub]:
    made = the_stub()
    made.reset()
    yield made
    made.reset()


@pytest.fixture(params=list(WAYS))
def ends(request: pytest.FixtureRequest, stub: Stub) -> Iterator[tuple[Engine, Engine]]:
    """An initiator and a target."""
    transports, config = WAYS[request.param]
    before = stub.live()
    with contextlib.ExitStack() as stack:
        initiator = stack.enter_context(Engine(transports=transports, **settings(**config)))
        own = request.param == "own"
        target = (
            initiator if own else stack.enter_context(Engine(transports=transports, **settings(**config)))
        )
        yield initiator, target
    assert stub.live() | {"allocations": 0} == before | {"allocations": 0}


class Side:
    """Memory of one end: on the host or on a device, as a region of its engine."""

    def __init__(self, engine: Engine, on_device: bool, seed: int, device: int = 0) -> None:
        self.array = DeviceArray(SIZE, device) if on_device else None
        self.host = np.zeros(SIZE, dtype=np.uint8)
        self.set(noise(SIZE, seed))
        if self.array is not None:
            self.region = engine.register(self.array)
            self.address = self.region.device_address
        else:
            self.region = engine.register(self.host)
            self.address = self.region.address

    def get(self) -> Bytes:
        return self.host.copy() if self.array is None else self.array.load()

    def set(self, data: Bytes) -> None:
        if self.array is None:
            self.host[:] = data
        else:
            self.array.store(data)


@pytest.mark.parametrize("digest", [False, True], ids=["plain", "digest"])
@pytest.mark.parametrize("op", [Op.READ, Op.WRITE], ids=["read", "write"])
@pytest.mark.parametrize("there", [False, True], ids=["host-there", "device-there"])
@pytest.mark.parametrize("here", [False, True], ids=["host-here", "device-here"])
def test_between_any_two_sides(
    ends: tuple[Engine, Engine], here: bool, there: bool, op: Op, digest: bool
) -> None:
    initiator, target = ends
    near, far = Side(initiator, here, 1), Side(target, there, 2, device=1)
    segment = initiator.open(target.endpoint)
    source, sink = (far, near) if op == Op.READ else (near, far)
    expected = source.get()
    batch = initiator.transfer(op, segment, near.address, far.region.handle, 0, SIZE, digest=digest)
    assert np.array_equal(sink.get(), expected)
    assert np.array_equal(source.get(), expected)
    if digest:
        assert batch.digests is not None
        assert batch.digests[0] == chunk_digests(expected.tobytes())


def test_a_batch_of_all_kinds_at_once(ends: tuple[Engine, Engine]) -> None:
    initiator, target = ends
    near = [Side(initiator, False, 1), Side(initiator, True, 2), Side(initiator, True, 3, device=1)]
    far = [Side(target, False, 4), Side(target, True, 5), Side(target, True, 6, device=1)]
    segment = initiator.open(target.endpoint)
    rng = np.random.default_rng(11)
    n = 3000
    sizes = rng.integers(0, 1200, n).astype(np.uint64)
    # In order, so that no two land on the same bytes.
    places = (np.arange(n, dtype=np.uint64) // np.uint64(3)) * np.uint64(1200)
    which_near, which_far = np.arange(n) % 3, rng.integers(0, 3, n)
    local = np.array([near[k].address for k in which_near], dtype=np.uint64) + places
    region = np.array([far[k].region.handle for k in which_far], dtype=np.uint64)
    offset = rng.integers(0, SIZE - 1200, n).astype(np.uint64)
    wanted = [side.get() for side in near]
    sources = [side.get() for side in far]
    for i in range(n):
        start, size, at = int(places[i]), int(sizes[i]), int(offset[i])
        wanted[which_near[i]][start : start + size] = sources[which_far[i]][at : at + size]
    initiator.transfer(Op.READ, segment, local, region, offset, sizes)
    for side, expected in zip(near, wanted, strict=True):
        assert np.array_equal(side.get(), expected)


def test_arrays_need_no_registration(ends: tuple[Engine, Engine]) -> None:
    initiator, target = ends
    far = Side(target, False, 4)
    segment = initiator.open(target.endpoint)
    array = DeviceArray(SIZE, device=1)
    initiator.read(segment, far.region.handle, 0, array)
    assert np.array_equal(array.load(), far.get())
    array.store(noise(SIZE, 9))
    initiator.write(segment, far.region.handle, 0, array)
    assert np.array_equal(array.load(), far.get())
    array.free()


def test_what_a_region_on_a_device_says_of_itself(stub: Stub) -> None:
    with Engine(transports=("local", "cuda"), **settings()) as engine:
        array = DeviceArray(SIZE, device=1)
        region = engine.register(array)
        assert (region.address, region.device_address, region.location) == (0, array.address, "cuda:1")
        assert isinstance(region.backing, OnDevice)
        fd, offset = region.backing.dma_buf()
        os.close(fd)
        assert offset == 0
        with pytest.raises(MoonpoolError, match="overlaps"):
            engine.register(array)
        engine.revoke(region)
        again = engine.register(array)
        assert again.handle != region.handle
    with Engine(transports=("local",), **settings()) as plain, pytest.raises(UnsupportedMemory, match="cuda"):
        plain.register(array)
    array.free()


# ---- what goes wrong ---------------------------------------------------------------------------------------


def test_a_copy_that_fails_ends_its_transfers_and_no_others(ends: tuple[Engine, Engine], stub: Stub) -> None:
    initiator, target = ends
    near, far = Side(initiator, True, 1), Side(target, False, 2)
    segment = initiator.open(target.endpoint)
    stub.fail("copy", 700, after=3)
    with pytest.raises(InternalError):
        initiator.read(segment, far.region.handle, 0, near.address, SIZE)
    stub.reset()
    initiator.read(segment, far.region.handle, 0, near.address, SIZE)
    assert np.array_equal(near.get(), far.get())
    assert initiator._by_name["cuda"].counters()["device_errors"] >= 1


@pytest.mark.parametrize("call", ["stream", "record", "context"])
def test_calls_that_fail_are_told_and_the_next_ones_work(
    ends: tuple[Engine, Engine], stub: Stub, call: str
) -> None:
    initiator, target = ends
    near, far = Side(initiator, True, 1), Side(target, False, 2)
    segment = initiator.open(target.endpoint)
    stub.fail(call, OUT_OF_MEMORY)
    batch = initiator.transfer(Op.READ, segment, near.address, far.region.handle, 0, SIZE, check=False)
    if not batch.ok:
        with pytest.raises(OutOfMemory):
            batch.check()
    stub.reset()
    initiator.read(segment, far.region.handle, 0, near.address, SIZE)
    assert np.array_equal(near.get(), far.get())


def test_a_runtime_that_vanishes_fails_transfers_and_lets_the_engine_close(stub: Stub) -> None:
    with Engine(transports=("local", "cuda"), **settings()) as engine:
        near, far = Side(engine, True, 1), Side(engine, False, 2)
        segment = engine.open(engine.endpoint)
        engine.read(segment, far.region.handle, 0, near.address, SIZE)
        stub.gone(True)
        with pytest.raises(InternalError):
            engine.read(segment, far.region.handle, 0, near.address, SIZE)
        target = bytearray(SIZE)
        engine.read(segment, far.region.handle, 0, target)  # the host goes on
        assert target == far.host.tobytes()
    stub.gone(False)


def test_without_pinned_memory_it_works_and_says_so(stub: Stub) -> None:
    stub.pin_limit(0)
    with Engine(transports=("local", "cuda"), **settings()) as engine:
        near, far = Side(engine, True, 1), Side(engine, False, 2)
        segment = engine.open(engine.endpoint)
        engine.read(segment, far.region.handle, 0, near.address, SIZE)
        assert np.array_equal(near.get(), far.get())
        assert engine._by_name["cuda"].counters()["staging_pinned"] == 0


def test_a_copy_that_never_ends_costs_its_stage_and_nothing_else(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[object] = []
    monkeypatch.setattr(cuda, "_never_freed", kept)
    _stall_one(stub)
    assert len(kept) == 1, "the memory that a device may still touch is kept"
    kept.clear()
    gc.collect()


def _stall_one(stub: Stub) -> None:
    with Engine(transports=("local", "cuda"), **settings(stall_timeout_ms=200)) as engine:
        near, far = Side(engine, True, 1), Side(engine, False, 2)
        segment = engine.open(engine.endpoint)
        stub.hang(True)
        with pytest.raises(PeerStalled):
            engine.read(segment, far.region.handle, 0, near.address, SIZE)
        stub.hang(False)
        engine.read(segment, far.region.handle, 0, near.address, SIZE)
        assert np.array_equal(near.get(), far.get())
        assert engine._by_name["cuda"].counters()["stages_lost"] == 1


def test_a_deadline_waits_for_the_copies_that_run(ends: tuple[Engine, Engine], stub: Stub) -> None:
    initiator, target = ends
    near, far = Side(initiator, True, 1), Side(target, True, 2, device=1)
    segment = initiator.open(target.endpoint)
    stub.delay(0.002)
    local = np.full(200, near.address, dtype=np.uint64)
    with pytest.raises(TransferTimeout):
        initiator.transfer(Op.READ, segment, local, far.region.handle, 0, 1 << 20, timeout_s=0.05)
    stub.delay(0)
    at_rest = near.get()
    time.sleep(0.05)
    assert np.array_equal(near.get(), at_rest), "bytes came after the batch had ended"


def test_cancelling_a_batch_of_device_memory(ends: tuple[Engine, Engine], stub: Stub) -> None:
    initiator, target = ends
    near, far = Side(initiator, True, 1), Side(target, False, 2)
    segment = initiator.open(target.endpoint)
    stub.delay(0.005)
    local = np.full(200, near.address, dtype=np.uint64)
    batch = initiator.submit(Op.READ, segment, local, far.region.handle, 0, 1 << 20)
    deadline = time.monotonic() + 10
    while stub.count("copies") < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    batch.cancel()
    assert batch.wait(10)
    assert 3 in set(bytes(batch.status))
    assert initiator._by_name["cuda"]._stages.busy == 0  # type: ignore[attr-defined]


def test_where_an_address_is_of_no_use_the_owner_serves(stub: Stub) -> None:
    """A device copy between processes fails: the same transfer goes by the owner's slots."""
    ends = ("cuda", "shm", "tcp")
    with Engine(transports=ends, **settings()) as initiator, Engine(transports=ends, **settings()) as target:
        far = Side(target, True, 2, device=1)
        segment = initiator.open(target.endpoint)
        into = np.zeros(SIZE, dtype=np.uint8)
        stub.fail_once("copy", 700)
        initiator.read(segment, far.region.handle, 0, into)
        assert np.array_equal(into, far.get())
        assert target._by_name["cuda"].counters()["served_bytes"] == SIZE


def test_peers_beyond_the_bound_are_not_served(stub: Stub) -> None:
    config = settings(device_ipc=False)
    with Engine(transports=("cuda", "tcp"), **config, device_sessions_max=1) as target:
        far = Side(target, True, 2)
        with contextlib.ExitStack() as stack:
            first, second = (
                stack.enter_context(Engine(transports=("cuda", "tcp"), **config)) for _ in range(2)
            )
            into = bytearray(SIZE)
            first.read(first.open(target.endpoint), far.region.handle, 0, into)
            segment = second.open(target.endpoint)
            with pytest.raises(MoonpoolError):
                second.read(segment, far.region.handle, 0, bytearray(SIZE))
            assert "device_sessions_max" in str(segment.unreachable)
        # Their sessions have ended: another one is served.
        deadline = time.monotonic() + 10
        while target._by_name["cuda"].counters()["served_sessions"] and time.monotonic() < deadline:
            time.sleep(0.001)
        with Engine(transports=("cuda", "tcp"), **config) as third:
            third.read(third.open(target.endpoint), far.region.handle, 0, into)
            assert into == far.get().tobytes()
    gc.collect()  # the error that was caught keeps the engines


def test_a_thousand_cycles_leave_nothing(stub: Stub) -> None:
    with Engine(transports=("local", "cuda"), **settings()) as engine:
        segment = engine.open(engine.endpoint)
        array = DeviceArray(8192, device=1)
        into = bytearray(8192)
        before = None
        for turn in range(1000):
            region = engine.register(array)
            engine.read(segment, region.handle, 0, into)
            engine.revoke(region)
            if turn == 10:
                before = (stub.live(), len(os.listdir("/proc/self/fd")))
        assert (stub.live(), len(os.listdir("/proc/self/fd"))) == before
        with pytest.raises(StaleHandle):
            engine.read(segment, region.handle, 0, into)
        array.free()
