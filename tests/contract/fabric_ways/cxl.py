"""Far memory as the contract suite's target: memory bound to a numa node, and ranges of a DAX device."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

from fabric_ways.far import Place, Store, Way
from moonpool import Access, Engine, Region
from moonpool.topology import DaxDevice, read_topology

SOFTWARE = {"cxl_coherence": "software"}
NEEDS_DAX = "needs a DAX device that can be mapped (tests/lab/run.py --cxl MB)"
NEEDS_NODE = "needs a numa node without CPUs (tests/lab/run.py --cxl MB --cxl-mode node)"


def mappable() -> DaxDevice | None:
    """The first DAX device of this host that processes can map."""
    return next((dax for dax in read_topology().dax_devices if dax.mappable), None)


def far_location() -> str:
    """The location of the first numa node without CPUs."""
    return next((node.location for node in read_topology().far_nodes), "cxl:0")


class _Range:
    """A range of the device, looked at by a mapping of its own."""

    def __init__(self, whole: mmap.mmap, offset: int) -> None:
        self._whole, self._offset = whole, offset

    def load(self, start: int, size_bytes: int) -> bytes:
        return self._whole[self._offset + start : self._offset + start + size_bytes]

    def store(self, start: int, data: bytes) -> None:
        self._whole[self._offset + start : self._offset + start + len(data)] = data


class _Device:
    """Gives each region a range of its own, from the start of the device on."""

    def __init__(self, name: str, align_bytes: int, whole: mmap.mmap) -> None:
        self._location = f"dax:/dev/{name}"
        self._align, self._whole, self._next = align_bytes, whole, 0

    def offer(self, engine: Engine, size_bytes: int, access: Access, granted: bool) -> tuple[Region, Store]:
        offset = self._next
        region = engine.offer(self._location, size_bytes, access=access, granted=granted, offset=offset)
        self._next += -(-size_bytes // self._align) * self._align
        return region, _Range(self._whole, offset)


@contextlib.contextmanager
def dax_place() -> Iterator[Place]:
    """The host's DAX device."""
    dax = mappable()
    assert dax is not None, NEEDS_DAX
    assert dax.size_bytes
    assert dax.align_bytes
    descriptor = os.open(Path("/dev") / dax.name, os.O_RDWR | os.O_CLOEXEC)
    try:
        whole = mmap.mmap(descriptor, dax.size_bytes, mmap.MAP_SHARED)
    finally:
        os.close(descriptor)
    with whole:
        yield _Device(dax.name, dax.align_bytes, whole)


class _View:
    """Engine memory, looked at by its owner."""

    def __init__(self, region: Region) -> None:
        self._view = region.view

    def load(self, start: int, size_bytes: int) -> bytes:
        return bytes(self._view[start : start + size_bytes])

    def store(self, start: int, data: bytes) -> None:
        self._view[start : start + len(data)] = data


class _Node:
    """Allocates on a numa node."""

    def __init__(self, location: str) -> None:
        self._location = location

    def offer(self, engine: Engine, size_bytes: int, access: Access, granted: bool) -> tuple[Region, Store]:
        region = engine.allocate(size_bytes, access=access, granted=granted, location=self._location)
        return region, _View(region)


TARGETS = ("shm", "cxl", "tcp")
WAYS = [
    Way("cxl-numa", ("cxl",), place=lambda: nullcontext(_Node("numa:0")), target_transports=TARGETS),
    Way(
        "cxl-node",
        ("cxl",),
        place=lambda: nullcontext(_Node(far_location())),
        target_transports=TARGETS,
        on_request=NEEDS_NODE,
    ),
    Way("cxl-dax", ("cxl",), place=dax_place, target_transports=TARGETS, on_request=NEEDS_DAX),
    Way(
        "cxl-dax-software",
        ("cxl",),
        SOFTWARE,
        place=dax_place,
        target_transports=TARGETS,
        on_request=NEEDS_DAX,
    ),
]
