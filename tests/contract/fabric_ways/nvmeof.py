"""Ways over an NVMe namespace, by passthrough commands and by the block device: ranges of one drive.

LAB_NVME_DEVICE names the block device (nvme0n1 in the lab); its content is overwritten.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from fabric_ways.far import Store, Way
from moonpool import Access, Engine, Region

#: Ranges begin at multiples of this, so that none shares a block with another.
STEP = 1 << 20
WHY = "needs the lab: an NVMe namespace that may be overwritten"


class DeviceStore:
    """The bytes of a range, by plain reads and writes; nothing stays in the page cache."""

    def __init__(self, path: str, start: int) -> None:
        self._path = path
        self._start = start

    def load(self, start: int, size_bytes: int) -> bytes:
        """The bytes as the drive has them now."""
        with self._open(os.O_RDONLY) as fd:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            data = os.pread(fd, size_bytes, self._start + start)
        assert len(data) == size_bytes
        return data

    def store(self, start: int, data: bytes) -> None:
        """Sets them on the drive."""
        with self._open(os.O_RDWR) as fd:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            done = 0
            while done < len(data):
                done += os.pwrite(fd, data[done:], self._start + start + done)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    @contextlib.contextmanager
    def _open(self, flags: int) -> Iterator[int]:
        fd = os.open(self._path, flags | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)


class Drive:
    """Gives each region of a pair its own range of the drive."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._next = 0

    def offer(self, engine: Engine, size_bytes: int, access: Access, granted: bool) -> tuple[Region, Store]:
        """A region of that size, in the next free range."""
        start = self._next
        self._next += -(-size_bytes // STEP) * STEP
        region = engine.offer(
            f"nvme:{self._device}", size_bytes, access=access, granted=granted, offset=start
        )
        return region, DeviceStore(f"/dev/{self._device}", start)


@contextlib.contextmanager
def drive() -> Iterator[Drive]:
    """The drive that the environment names."""
    yield Drive(os.environ.get("LAB_NVME_DEVICE", "nvme0n1"))


def _way(name: str, passthrough: str, **more: Any) -> Way:
    return Way(
        name,
        ("nvmeof",),
        {"nvmeof_passthrough": passthrough},
        place=drive,
        target_transports=("nvmeof", "tcp"),
        on_request=WHY,
        **more,
    )


WAYS = [_way("nvmeof-pass", "yes"), _way("nvmeof-block", "no")]
