"""Regions on a device of the stub runtime: by their address, served by the owner, and of one's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tests.native.stub_device.device import DeviceArray, library_path, the_stub

from fabric_ways.far import Way
from moonpool import Access, Engine, Region
from moonpool.errors import UnsupportedOperation


@dataclass
class DeviceStore:
    """A region's bytes behind the runtime's back."""

    array: DeviceArray

    def load(self, start: int, size_bytes: int) -> bytes:
        """The bytes of the shadow that the stub keeps."""
        return self.array.load(start, size_bytes).tobytes()

    def store(self, start: int, data: bytes) -> None:
        """Sets them there."""
        self.array.store(np.frombuffer(data, dtype=np.uint8), start)


class DevicePlace:
    """Device arrays, on both devices in turn."""

    def __init__(self) -> None:
        self._arrays: list[DeviceArray] = []

    def offer(
        self, engine: Engine, size_bytes: int, access: Access, granted: bool
    ) -> tuple[Region, DeviceStore]:
        """A new array; device arrays are not offered as granted regions."""
        if granted:
            raise UnsupportedOperation("device arrays are registered, and those are not granted")
        array = DeviceArray(size_bytes, device=len(self._arrays) % 2)
        self._arrays.append(array)
        return engine.register(array, access=access), DeviceStore(array)

    def close(self) -> None:
        """Give the memory back."""
        for array in self._arrays:
            array.free()


@contextlib.contextmanager
def device_place() -> Iterator[DevicePlace]:
    """A place for one test."""
    place = DevicePlace()
    try:
        yield place
    finally:
        place.close()


def prepare() -> None:
    """Nothing that an earlier test had go wrong does so any more."""
    the_stub().reset()


def _way(name: str, ends: tuple[str, ...], *, to_itself: bool = False, **config: Any) -> Way:
    settings = {"device_library": library_path(), "device_staging_bytes": 16 << 20, **config}
    return Way(
        name,
        ends,
        settings,
        to_itself=to_itself,
        place=device_place,
        target_transports=ends,
        prepare=prepare,
        grants=False,
    )


WAYS = [
    _way("cuda", ("cuda", "shm", "tcp")),
    _way("cuda-served", ("cuda", "tcp"), device_ipc=False),
    _way("cuda-served-shm", ("cuda", "shm"), device_ipc=False),
    _way("cuda-own", ("cuda", "local"), to_itself=True),
    _way("cuda-hip", ("cuda", "tcp"), device_runtime="hip"),
]
