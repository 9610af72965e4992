"""The native modules put together without an engine: a target that serves regions, and lanes to it.

Both ends live in this process, over real tcp connections on loopback. A lane is accepted in the very call
that connects it, so nothing here waits for a thread to get somewhere.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from moonpool.errors import OutOfMemory
from moonpool.native.io.batch import Batch
from moonpool.native.io.carry import add_tcp_path
from moonpool.native.io.lanes import LanePool, set_notice_lanes
from moonpool.native.io.regions import LocalRegions
from moonpool.native.io.segment import NativeSegment
from moonpool.native.io.server import TargetServer

Bytes = npt.NDArray[np.uint8]

READ, WRITE = 1, 2
READ_ACCESS, WRITE_ACCESS, LOCAL_WRITABLE = 1, 2, 4
INSTANCE = bytes(range(1, 17))
READ_KEY, WRITE_KEY = b"the read key 16b", b"the write key 16"
WAIT_S = 20.0
GUARD = 0xA5
GUARD_BYTES = 128
NS_PER_S = 10**9
#: The three ways to wait, as stream.pxd numbers them.
IO_WAYS = {"blocking": 0, "epoll": 1, "io_uring": 2}


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Waits for something that another thread brings about; fails after a generous bound."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"did not happen: {what}"
        time.sleep(0.0005)


def native_threads() -> list[str]:
    """Names of the threads of this process that a native module started."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            names.append((task / "comm").read_text().strip())
    return [name for name in names if name.startswith("moonpool-")]


def open_descriptors() -> int:
    """How many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Threads and descriptors are as they were before the test."""
    before = open_descriptors()
    yield
    wait_until(lambda: not native_threads(), f"native threads end: {native_threads()}")
    wait_until(lambda: open_descriptors() <= before, f"{before} descriptors before, now {open_descriptors()}")


@functools.cache
def ring_works() -> bool:
    """Whether a lane can be opened by io_uring here."""
    target = Target(IO_WAYS["io_uring"])
    try:
        target.connect().close()
    except OutOfMemory:
        return False
    finally:
        target.close()
    return True


class Memory:
    """Bytes between two guards, registered in a table: `array` is the registered part."""

    def __init__(self, table: LocalRegions, size: int, access: int, shift: int = 0) -> None:
        self._whole = np.full(size + 2 * GUARD_BYTES + 4096, GUARD, dtype=np.uint8)
        start = GUARD_BYTES + (-(self._whole.ctypes.data + GUARD_BYTES) % 4096) % 4096 + shift
        self._start, self._stop = start, start + size
        self.array: Bytes = self._whole[start : start + size]
        self.address = int(self.array.ctypes.data)
        self.size = size
        self.handle = table.add(self.address, size, access, READ_KEY, WRITE_KEY)

    def check_guards(self) -> None:
        """Fails when a byte beside the registered range was touched."""
        assert (self._whole[: self._start] == GUARD).all(), "bytes before the region were overwritten"
        assert (self._whole[self._stop :] == GUARD).all(), "bytes behind the region were overwritten"


def pattern(size: int, seed: int) -> Bytes:
    """Bytes that depend on their position, so that a piece at the wrong place shows."""
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


class Target:
    """A table of regions and the threads that serve it, with a listening socket of its own."""

    def __init__(
        self, io: int = 0, *, notices_max: int = 64, lanes_max: int = 64, stall_s: float = 30.0
    ) -> None:
        self.regions = LocalRegions(64)
        self.memories: list[Memory] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self._limits = {"notices_max": notices_max, "lanes_max": lanes_max}
        self._io, self._stall_ns = io, int(stall_s * NS_PER_S)
        self._connecting = threading.Lock()
        self._lanes: list[socket.socket] = []
        self.server = self._serve()

    def _serve(self) -> TargetServer:
        return TargetServer(
            self.regions, io=self._io, spin_ns=0, spin_max_bytes=0, stall_ns=self._stall_ns, **self._limits
        )

    def restart(self) -> None:
        """Close every lane and serve on with a fresh server."""
        assert self.server.close(WAIT_S)
        self.server = self._serve()

    def connect(self, instance: bytes = INSTANCE) -> socket.socket:
        """A lane to this target: the initiator's end, closed with the target unless it was detached."""
        with self._connecting:
            ours = socket.create_connection(self.listener.getsockname())
            theirs, _ = self.listener.accept()
            self._lanes.append(ours)
        for end in (ours, theirs):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ours.settimeout(None)
        try:
            self.server.add_lane(theirs.fileno(), instance)
        except BaseException:
            theirs.close()
            raise
        theirs.detach()
        return ours

    def offer(self, size: int, access: int = READ_ACCESS | WRITE_ACCESS, *, seed: int = 1) -> Memory:
        """A region full of pseudo-random bytes."""
        memory = Memory(self.regions, size, access)
        memory.array[:] = pattern(size, seed)
        self.memories.append(memory)
        return memory

    def close(self) -> None:
        """End every lane."""
        for lane in self._lanes:
            lane.close()
        self.listener.close()
        assert self.server.close(WAIT_S), "lane threads did not end"


@dataclass
class Rig:
    """An initiator: its own table, its lanes, and the segment that goes by them."""

    connect: Callable[[], socket.socket]
    io: int = 0
    lanes_max: int = 4
    stall_s: float = 30.0
    own: LocalRegions = field(default_factory=lambda: LocalRegions(64))
    memories: list[Memory] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = LanePool(
            lambda *_: self.connect().detach(),
            lanes_max=self.lanes_max,
            io=self.io,
            spin_ns=0,
            spin_max_bytes=0,
            stall_ns=int(self.stall_s * NS_PER_S),
        )
        self.segment = NativeSegment(self.own, 64, 262144)
        self.path = add_tcp_path(self.segment, self.pool)
        set_notice_lanes(self.segment, self.pool)

    def know(self, memory: Memory, access: int = READ_ACCESS | WRITE_ACCESS, **changes: Any) -> int:
        """Enter a region of the target's, as its owner would have described it; returns the handle."""
        about = {
            "handle": memory.handle,
            "base": memory.address,
            "length": memory.size,
            "access": access,
            "read_key": READ_KEY,
            "write_key": WRITE_KEY,
            **changes,
        }
        self.segment.put_region(*about.values())
        return int(about["handle"])

    def buffer(self, size: int, fill: int = 0, *, shift: int = 0, access: int = LOCAL_WRITABLE) -> Memory:
        """Registered memory of the initiator's."""
        memory = Memory(self.own, size, access, shift)
        memory.array[:] = fill
        self.memories.append(memory)
        return memory

    def make(self, op: int, local: Any, region: Any, offset: Any, length: Any, **how: Any) -> Batch:
        """A batch bound to the segment; how: path, digest, timeout_s."""
        n = max([1, *(len(v) for v in (local, region, offset, length) if hasattr(v, "__len__"))])
        batch = Batch(op, n)
        batch.fill(local, region, offset, length, how.get("path"), how.get("digest", False))
        batch.set_timeout(how.get("timeout_s", WAIT_S))
        self.segment.bind(batch)
        return batch

    def run(self, op: int, local: Any, region: Any, offset: Any, length: Any, **how: Any) -> Batch:
        """A batch driven to its end here."""
        batch = self.make(op, local, region, offset, length, **how)
        batch.drive_here()
        assert batch.done
        return batch

    def close(self) -> None:
        """Close the lanes."""
        assert self.pool.close(WAIT_S), "batches still use lanes"


@contextlib.contextmanager
def background(work: Callable[[], object]) -> Iterator[threading.Thread]:
    """Runs something in a thread that has ended when the block is left; its error becomes the test's."""
    problems: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "the thread hangs"
    if problems:
        raise problems[0]


@dataclass
class Stalled:
    """An initiator whose peer never answers unless the test does; `peers` has its ends, one a lane."""

    rig: Rig
    peers: list[socket.socket]

    def memory(self, size: int = 4096) -> Memory:
        """A region that only the initiator believes in."""
        remote = Memory(LocalRegions(1), size, READ_ACCESS | WRITE_ACCESS)
        self.rig.know(remote)
        self.rig.memories.append(remote)
        return remote

    def request(self, index: int = 0) -> bytes:
        """What came first on a lane; waits for it."""
        wait_until(lambda: len(self.peers) > index, "a lane is opened")
        self.peers[index].settimeout(WAIT_S)
        return self.peers[index].recv(65536)


@pytest.fixture(params=IO_WAYS)
def io(request: pytest.FixtureRequest) -> int:
    """Each way to wait in turn."""
    if request.param == "io_uring":
        pytest.importorskip("moonpool.native.io.ring")  # makes it selectable
        if not ring_works():
            pytest.skip("needs a kernel with io_uring, and leave to use it")
    return IO_WAYS[request.param]


@pytest.fixture
def make_target() -> Iterator[Callable[..., Target]]:
    """Targets that are closed after the test."""
    with contextlib.ExitStack() as stack:

        def make(io: int = 0, **limits: Any) -> Target:
            target = Target(io, **limits)
            stack.callback(target.close)
            return target

        yield make


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    """Initiators that are closed after the test."""
    with contextlib.ExitStack() as stack:

        def make(connect: Callable[[], socket.socket], io: int = 0, **limits: Any) -> Rig:
            rig = Rig(connect, io, **limits)
            stack.callback(rig.close)
            return rig

        yield make


@pytest.fixture
def target(io: int, make_target: Callable[..., Target]) -> Target:
    """A target for each way to wait."""
    return make_target(io)


@pytest.fixture
def rig(io: int, target: Target, make_rig: Callable[..., Rig]) -> Rig:
    """An initiator with lanes to `target`."""
    return make_rig(target.connect, io)


@pytest.fixture
def make_stalled(make_rig: Callable[..., Rig]) -> Iterator[Callable[..., Stalled]]:
    """Initiators whose peer is the test itself."""
    with contextlib.ExitStack() as stack:

        def make(io: int = 0, **limits: Any) -> Stalled:
            peers: list[socket.socket] = []
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def connect() -> socket.socket:
                ours = socket.create_connection(listener.getsockname())
                ours.settimeout(None)
                theirs, _ = listener.accept()
                peers.append(stack.enter_context(theirs))
                return ours

            return Stalled(make_rig(connect, io, **limits), peers)

        yield make


@pytest.fixture
def tools() -> Any:
    """What tests of several files need of this module."""
    return Tools


class Tools:
    """Names of this file for tests, which cannot import it (pytest's importlib mode)."""

    Memory = Memory
    READ, WRITE = READ, WRITE
    READ_ACCESS, WRITE_ACCESS, LOCAL_WRITABLE = READ_ACCESS, WRITE_ACCESS, LOCAL_WRITABLE
    READ_KEY, WRITE_KEY, INSTANCE = READ_KEY, WRITE_KEY, INSTANCE
    WAIT_S = WAIT_S
    background = staticmethod(background)
    pattern = staticmethod(pattern)
    wait_until = staticmethod(wait_until)
