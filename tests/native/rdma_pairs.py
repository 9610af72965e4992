"""Two engines over the fake fabric, for the tests of RDMA: what they have in common."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tests.native.fake_verbs.fabric import FakeFabric

from moonpool import Engine, Region, Segment
from moonpool.native.verbs import devices
from moonpool.transport.rdma import RdmaTransport
from moonpool.transport.rdma_links import PeerLink, RailState

Bytes = npt.NDArray[np.uint8]
WAIT_S: Final = 30.0
MIB: Final = 1 << 20
#: Quick to notice a silent rail, and bounds that end a broken test soon.
SETTINGS: Final[dict[str, Any]] = {
    "rdma_timeout": 8,
    "rdma_retries": 1,
    "transfer_timeout_ms": 20_000,
    "stall_timeout_ms": 8_000,
}


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Waits for something that another thread brings about; fails after a generous bound."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"did not happen: {what}"
        time.sleep(0.001)


def pattern(size: int, seed: int) -> Bytes:
    """Bytes that depend on their position and the seed: uint8[size]."""
    place = np.arange(size, dtype=np.uint64)
    mixed = (place + np.uint64(seed * 1_000_003 + 1)) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(37)).astype(np.uint8)


@dataclass
class RdmaPair:
    """An initiator and a target, a region of each, and the segment between them."""

    initiator: Engine
    target: Engine
    segment: Segment
    region: Region
    mine: Region

    @property
    def content(self) -> Bytes:
        """The target's bytes."""
        return np.frombuffer(self.region.view, dtype=np.uint8)

    @property
    def own(self) -> Bytes:
        """The initiator's bytes."""
        return np.frombuffer(self.mine.view, dtype=np.uint8)

    @property
    def transport(self) -> RdmaTransport:
        """The initiator's transport."""
        return transport_of(self.initiator)

    @property
    def link(self) -> PeerLink:
        """The initiator's link to the target."""
        (link,) = self.transport.links()
        return link

    def rails(self) -> list[RailState]:
        """The link's rails as they are."""
        return self.link.rails()

    def states(self) -> list[str]:
        """Their states."""
        return [rail.state for rail in self.rails()]

    def check_read(self, seed: int) -> None:
        """Reads the whole region and compares every byte."""
        self.content[:] = pattern(self.region.size_bytes, seed)
        self.own[:] = 0
        self.initiator.read(self.segment, self.region.handle, 0, self.mine.address, self.region.size_bytes)
        assert np.array_equal(self.own, self.content)

    def check_write(self, seed: int) -> None:
        """Writes the whole region and compares every byte."""
        self.own[:] = pattern(self.region.size_bytes, seed)
        self.content[:] = 0
        self.initiator.write(self.segment, self.region.handle, 0, self.mine.address, self.region.size_bytes)
        assert np.array_equal(self.own, self.content)

    def carried_by(self, transport: str) -> int:
        """Bytes that a transport's paths of the segment carried."""
        total = 0
        for path in self.segment.paths:
            if path.transport == transport:
                stats = self.segment.native.path_stats(path.id)
                total += stats["READ"]["bytes"] + stats["WRITE"]["bytes"]
        return total


def transport_of(engine: Engine) -> RdmaTransport:
    """An engine's RDMA transport."""
    found = engine._by_name["rdma"]
    assert isinstance(found, RdmaTransport)
    return found


@contextlib.contextmanager
def rdma_pair(
    size: int = 4 * MIB, transports: tuple[str, ...] = ("rdma",), **changes: Any
) -> Iterator[RdmaPair]:
    """Makes a pair and closes both ends."""
    config = {**SETTINGS, **changes}
    with (
        Engine(transports=("rdma", "tcp"), **config) as target,
        Engine(transports=transports, **config) as initiator,
    ):
        region, mine = target.allocate(size), initiator.allocate(size)
        segment = initiator.open(target.endpoint)
        assert segment.paths[0].transport == "rdma"
        made = RdmaPair(initiator, target, segment, region, mine)
        del region, mine
        try:
            yield made
        finally:
            vars(made).clear()  # a test's arguments outlive it, and would keep the regions' descriptors


@contextlib.contextmanager
def fake_fabric(n_devices: int = 2) -> Iterator[FakeFabric]:
    """The fake, clean, with so many devices; afterwards nothing of it is left."""
    fabric = FakeFabric()
    fabric.devices(n_devices)
    fabric.clear()
    devices.use_library(fabric.path)
    try:
        yield fabric
        gc.collect()  # an error that was caught keeps what its frames held
        assert not any(devices.live_objects().values()), devices.live_objects()
    finally:
        fabric.clear()
        fabric.devices(2)
        devices.use_library("")
