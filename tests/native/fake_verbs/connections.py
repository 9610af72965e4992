"""Two connected queue pairs, with registered memory on both sides: over the fake, or real devices."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.native.fake_verbs.fabric import LIVE, FakeFabric

from moonpool.native.verbs.attributes import (
    LOCAL_WRITE,
    REMOTE_READ,
    REMOTE_WRITE,
    Completion,
    LinkLayer,
    Route,
)
from moonpool.native.verbs.devices import Device, VerbsLibrary, live_objects
from moonpool.native.verbs.memory import MemoryRegistration, register
from moonpool.native.verbs.queue_pairs import CompletionQueue, QueuePair
from moonpool.transport.rdma_gids import choose_gid

EVERYTHING = LOCAL_WRITE | REMOTE_READ | REMOTE_WRITE
WAIT_S = 60.0


class Memory:
    """Some bytes with an address."""

    def __init__(self, size: int, fill: int = 0) -> None:
        self.bytes = (ctypes.c_ubyte * size)(*([fill] * size if fill else []))
        self.address = ctypes.addressof(self.bytes)
        self.size = size

    def pattern(self, seed: int) -> bytes:
        """Fills it with bytes that depend on their position, and returns them."""
        content = bytes((i * 7 + (i >> 8) * 13 + seed) & 0xFF for i in range(self.size))
        ctypes.memmove(self.address, content, self.size)
        return content

    def read(self) -> bytes:
        return ctypes.string_at(self.address, self.size)


@contextlib.contextmanager
def fresh_fabric(n_devices: int) -> Iterator[FakeFabric]:
    """The fake with so many devices and no scripts; at the end, all that was made on it must be freed."""
    fabric = FakeFabric()
    fabric.devices(n_devices)
    fabric.clear()
    yield fabric
    fabric.clear()
    fabric.devices(2)
    gc.collect()
    assert not any(live_objects().values()), live_objects()
    assert {kind: fabric.live(kind) for kind in LIVE} == dict.fromkeys(LIVE, 0)


def route_between(own: QueuePair, peer: QueuePair, **changes: int) -> Route:
    """How `own` is connected to `peer`; packet numbers follow from the numbers of the pairs."""
    here, there = (choose_gid(end.device.gids(1), LinkLayer.ETHERNET).entry for end in (own, peer))
    fields: dict[str, Any] = {
        "local_psn": own.number + 100,
        "remote_psn": peer.number + 100,
        "gid_index": here.index,
        **changes,
    }
    return Route(remote_qp=peer.number, remote_gid=there.gid, **fields)


@dataclass
class End:
    """A device with a queue, a pair on it, and a registered buffer."""

    device: Device
    size: int
    depth: int = 16
    pieces: int = 4
    queue_depth: int = 64
    memory: Memory = field(init=False)
    registration: MemoryRegistration = field(init=False)
    queue: CompletionQueue = field(init=False)
    pair: QueuePair = field(init=False)

    def __post_init__(self) -> None:
        self.memory = Memory(self.size)
        self.registration = register([self.device], self.memory.address, self.size, EVERYTHING)
        self.queue = CompletionQueue(self.device, self.queue_depth)
        self.pair = QueuePair(self.queue, self.depth, self.pieces)
        self.pair.to_init(1, REMOTE_READ | REMOTE_WRITE)

    @property
    def lkey(self) -> int:
        return self.registration.lkeys(0)[0]

    @property
    def rkey(self) -> int:
        return self.registration.rkeys(0)[0]


class Connection:
    """Two ends, connected; `close` closes the devices and with them everything."""

    def __init__(
        self,
        library: VerbsLibrary,
        names: tuple[str, str] = ("fake0", "fake1"),
        size: int = 4096,
        **shape: int,
    ) -> None:
        self.near = End(Device(library, names[0]), size, **shape)
        self.far = End(Device(library, names[1]), size, **shape)
        self.connect()

    def connect(self, **changes: int) -> None:
        """INIT to RTS on both ends; `changes` are of the routes."""
        self.near.pair.to_ready(route_between(self.near.pair, self.far.pair, **changes))
        self.far.pair.to_ready(route_between(self.far.pair, self.near.pair, **changes))

    def post(
        self,
        id: int,
        *,
        write: bool = True,
        length: int | None = None,
        rkey: int | None = None,
        offset: int = 0,
        signalled: bool = True,
    ) -> None:
        """A request of the near end for the far end's bytes, both from `offset` on."""
        near, far = self.near, self.far
        size = near.size - offset if length is None else length
        piece = (near.memory.address + offset, size, near.lkey)
        key = far.rkey if rkey is None else rkey
        near.pair.post(id, write, [piece], far.memory.address + offset, key, signalled)

    def reap(self, n: int) -> list[Completion]:
        """The next n completions of the near end, waited for by notification."""
        return reap(self.near.queue, n)

    def close(self) -> None:
        self.near.device.close()
        self.far.device.close()


def reap(queue: CompletionQueue, n: int) -> list[Completion]:
    """The next n completions of a queue, waited for by notification; fails after a generous bound."""
    found: list[Completion] = []
    deadline = time.monotonic() + WAIT_S
    while True:
        found += queue.poll(n - len(found))
        if len(found) >= n:
            return found
        queue.arm()
        found += queue.poll(n - len(found))
        if len(found) < n:
            assert time.monotonic() < deadline, f"{len(found)} of {n} completions came: {found}"
            queue.wait(1.0)
