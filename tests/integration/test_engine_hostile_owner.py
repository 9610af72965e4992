"""Owners that lie about their memory: an error or another way, and never a wrong address."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from moonpool import Access, Engine, EngineConfig, MoonpoolError, ProtocolError, StaleHandle, Status
from moonpool.engine.control import ControlService, Reply, ServiceHooks
from moonpool.ids import new_instance_id
from moonpool.native.io.memory import create_memory
from moonpool.native.io.regions import LocalRegions
from moonpool.native.io.server import TargetServer

HANDLE = 1 << 32
KEY = bytes(range(16))
GOOD: dict[str, Any] = {
    "handle": HANDLE,
    "address": 1 << 40,
    "length": 4096,
    "location": "cpu:0",
    "access": 3,
    "read_key": KEY,
    "write_key": KEY,
    "attributes": {"tcp": b"", "shm": b"memfd"},
}


class Liar:
    """A control plane and a target of its own making, which say what a test wants."""

    def __init__(self) -> None:
        self.description: Any = {"name": "liar", "instance": b"", "generation": 1, "regions": [GOOD]}
        self.mapping: Any = {}
        self.fds: list[int] = []
        self.memory = np.full(4096, 0x42, dtype=np.uint8)
        self.table = LocalRegions(16)
        address = int(self.memory.ctypes.data)
        assert self.table.add(address, 4096, int(Access.READ_WRITE), KEY, KEY) == HANDLE
        self.server = TargetServer(
            self.table, io=0, spin_ns=0, spin_max_bytes=0, stall_ns=10**9, lanes_max=8, notices_max=8
        )
        hooks = ServiceHooks(
            handlers={
                "describe": lambda _session, _params: self.description,
                "map": lambda _session, _params: Reply(self.mapping, self.fds),
                "grant_vm": lambda _session, _params: {},
                "release": lambda _session, _params: {},
            },
            on_lane=lambda fd, info: self.server.add_lane(fd, info.peer_instance),
        )
        self.service = ControlService(EngineConfig(), new_instance_id(), hooks)
        self.service.start()

    def close(self) -> None:
        self.service.close()
        assert self.server.close(10.0)


@pytest.fixture
def liar() -> Iterator[Liar]:
    made = Liar()
    yield made
    made.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(transports=("shm", "tcp"), regions_max=64, transfer_timeout_ms=5_000) as made:
        yield made


def changed(**changes: Any) -> dict[str, Any]:
    return {**GOOD, **changes}


LIES: dict[str, Any] = {
    "no regions": {"name": "liar"},
    "regions of another kind": {"regions": {"a": 1}},
    "a list": [GOOD],
    "nothing": None,
    "a region that is none": {"regions": [17]},
    "missing fields": {"regions": [{"handle": HANDLE}]},
    "handle 0": {"regions": [changed(handle=0)]},
    "handle without generation": {"regions": [changed(handle=5)]},
    "negative handle": {"regions": [changed(handle=-1)]},
    "length 0": {"regions": [changed(length=0)]},
    "negative length": {"regions": [changed(length=-4096)]},
    "length beyond all": {"regions": [changed(length=(1 << 64) - 1)]},
    "range that wraps around": {"regions": [changed(address=(1 << 64) - 10, length=4096)]},
    "text for a number": {"regions": [changed(address="far away")]},
    "short key": {"regions": [changed(read_key=b"short")]},
    "no key": {"regions": [changed(write_key=None)]},
    "attributes of another kind": {"regions": [changed(attributes=[1, 2])]},
    "attributes without end": {"regions": [changed(attributes={"tcp": bytes(100_000)})]},
    "slot beyond the table": {"regions": [changed(handle=HANDLE | 64)]},
    "slot far beyond the table": {"regions": [changed(handle=HANDLE | 0xFFFFFFFF)]},
}


@pytest.mark.parametrize("lie", LIES)
def test_an_impossible_description_opens_nothing(engine: Engine, liar: Liar, lie: str) -> None:
    liar.description = LIES[lie]
    for _ in range(3):
        with pytest.raises(MoonpoolError):
            engine.open(liar.service.endpoint)
    assert engine.metrics()["gauges"]["segments_open"] == 0
    liar.description = {"name": "liar", "regions": [GOOD]}
    back = bytearray(4096)
    engine.read(engine.open(liar.service.endpoint), HANDLE, 0, back)
    assert back == bytes([0x42]) * 4096


def test_a_description_gone_bad_leaves_the_segment_as_it_was(engine: Engine, liar: Liar) -> None:
    segment = engine.open(liar.service.endpoint)
    # Those of the last two are well formed, so the region that they no longer have is stale.
    for lie in list(LIES.values())[:-2]:
        liar.description = lie
        with pytest.raises(MoonpoolError):
            engine.refresh(segment)
        back = bytearray(4096)
        engine.read(segment, HANDLE, 0, back)
        assert back == bytes([0x42]) * 4096


def test_twice_the_same_slot_is_one_region(engine: Engine, liar: Liar) -> None:
    liar.description = {"regions": [GOOD, changed(handle=HANDLE * 2, length=8192), GOOD]}
    with contextlib.suppress(MoonpoolError):
        segment = engine.open(liar.service.endpoint)
        for handle in (HANDLE, HANDLE * 2):
            with contextlib.suppress(StaleHandle):
                engine.read(segment, handle, 0, bytearray(4096))


def unsealed_file(size: int) -> int:
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


def plain_file(size: int) -> int:
    fd, name = tempfile.mkstemp()
    os.unlink(name)
    os.ftruncate(fd, size)
    return fd


def pipe_end(_size: int) -> int:
    read, write = os.pipe()
    os.close(write)
    return read


def sealed_memory(size: int) -> int:
    memory = create_memory(size)
    return os.dup(memory.fd)


MAPPINGS: dict[str, tuple[Any, Any]] = {
    "an unsealed memfd": (unsealed_file, {"offset": 0, "size": 4096, "writable": True}),
    "a plain file": (plain_file, {"offset": 0, "size": 4096, "writable": True}),
    "a pipe": (pipe_end, {"offset": 0, "size": 4096, "writable": True}),
    "no descriptor": (None, {"offset": 0, "size": 4096, "writable": True}),
    "shorter than said": (sealed_memory, {"offset": 0, "size": 1 << 20, "writable": True}),
    "region behind the end": (sealed_memory, {"offset": 4096, "size": 4096, "writable": True}),
    "negative offset": (sealed_memory, {"offset": -4096, "size": 4096, "writable": True}),
    "offset that wraps around": (sealed_memory, {"offset": (1 << 64) - 4096, "size": 4096, "writable": True}),
    "size 0": (sealed_memory, {"offset": 0, "size": 0, "writable": True}),
    "size beyond all": (sealed_memory, {"offset": 0, "size": 1 << 62, "writable": True}),
    "text for a number": (sealed_memory, {"offset": "0", "size": "4096 bytes", "writable": True}),
    "nothing at all": (sealed_memory, {}),
    "a list": (sealed_memory, [0, 4096]),
}


@pytest.mark.parametrize("lie", MAPPINGS)
def test_what_cannot_be_mapped_goes_over_tcp(engine: Engine, liar: Liar, lie: str) -> None:
    make, liar.mapping = MAPPINGS[lie]
    before = len(os.listdir("/proc/self/fd"))
    liar.fds = [make(4096)] if make else []
    try:
        segment = engine.open(liar.service.endpoint)
        back = bytearray(4096)
        engine.read(segment, HANDLE, 0, back)
        assert back == bytes([0x42]) * 4096, "it came from the lane"
        carried = {row["transport"] for row in engine.metrics()["paths"] if row["transfers"]}
        assert carried == {"tcp"}
        assert (HANDLE, "shm") in segment.unreachable
        engine.close_segment(segment)
    finally:
        for fd in liar.fds:
            os.close(fd)
    assert len(os.listdir("/proc/self/fd")) <= before + 4, "descriptors of refused mappings are closed"


def test_more_descriptors_than_asked_for_are_closed(engine: Engine, liar: Liar) -> None:
    liar.mapping = {"offset": 0, "size": 4096, "writable": True}
    liar.fds = [sealed_memory(4096) for _ in range(3)]
    try:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            segment = engine.open(liar.service.endpoint)
            engine.read(segment, HANDLE, 0, bytearray(4096))
            engine.close_segment(segment)
        assert len(os.listdir("/proc/self/fd")) <= before + 8
    finally:
        for fd in liar.fds:
            os.close(fd)


def test_a_region_without_the_transports_key_is_out_of_its_reach(engine: Engine, liar: Liar) -> None:
    liar.description = {"regions": [changed(attributes={"carrier-pigeon": b"coo"})]}
    segment = engine.open(liar.service.endpoint)
    assert segment.region(HANDLE).attributes == {"carrier-pigeon": b"coo"}, "unknown ones are kept"
    batch = engine.transfer(1, segment, bytearray(4096), HANDLE, 0, check=False)  # type: ignore[arg-type]
    assert list(batch.status) in ([Status.UNSUPPORTED], [Status.COMPLETE])


def test_a_lane_that_answers_nonsense_is_a_protocol_error(engine: Engine, liar: Liar) -> None:
    import socket
    import threading

    ours, theirs = socket.socketpair()
    taken: list[int] = []

    def take(fd: int, _info: Any) -> None:
        taken.append(fd)

    hooks = ServiceHooks(handlers={"describe": lambda _s, _p: {"regions": [GOOD]}}, on_lane=take)
    ours.close()
    theirs.close()
    with ControlService(EngineConfig(), new_instance_id(), hooks) as service:
        service.start()
        segment = engine.open(service.endpoint)

        def answer() -> None:
            while not taken:
                threading.Event().wait(0.001)
            with socket.socket(fileno=taken[0]) as lane:
                lane.recv(1 << 16)
                lane.sendall(b"\x99" * 4096)

        talker = threading.Thread(target=answer)
        talker.start()
        try:
            with pytest.raises(ProtocolError):
                engine.read(segment, HANDLE, 0, bytearray(4096))
        finally:
            talker.join()
        engine.close_segment(segment)
