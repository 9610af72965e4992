"""Regions in files: with O_DIRECT where the file system has it, through the page cache, and of one's own."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric_ways.far import Way
from moonpool import Access, Engine, Region


@dataclass
class FileStore:
    """A region's bytes by way of the file itself."""

    path: Path
    start: int

    def load(self, start: int, size_bytes: int) -> bytes:
        """The bytes as the page cache has them, which direct writes go around and invalidate."""
        with self.path.open("rb", buffering=0) as file:
            data = os.pread(file.fileno(), size_bytes, self.start + start)
        assert len(data) == size_bytes
        return data

    def store(self, start: int, data: bytes) -> None:
        """Sets them through the page cache."""
        with self.path.open("r+b", buffering=0) as file:
            assert os.pwrite(file.fileno(), data, self.start + start) == len(data)


class FilePlace:
    """A folder; each region is in a file of its own, from `start` on."""

    def __init__(self, folder: Path, start: int, how: dict[str, Any]) -> None:
        self._folder = folder
        self._start = start
        self._how = how
        self._made = 0

    def offer(
        self, engine: Engine, size_bytes: int, access: Access, granted: bool
    ) -> tuple[Region, FileStore]:
        """A new file with exactly that many bytes behind `start`."""
        self._made += 1
        path = self._folder / f"region-{self._made}"
        region = engine.offer(
            f"file:{path}", size_bytes, access=access, granted=granted, offset=self._start, **self._how
        )
        return region, FileStore(path, self._start)


@contextlib.contextmanager
def file_place(start: int, how: dict[str, Any]) -> Iterator[FilePlace]:
    """A folder for one test, removed with all that is in it."""
    with tempfile.TemporaryDirectory(prefix="moonpool-file-") as folder:
        yield FilePlace(Path(folder), start, how)


_ENDS = ("file", "shm", "tcp")
WAYS = [
    Way("file", ("file",), place=lambda: file_place(0, {}), target_transports=_ENDS),
    Way(
        "file-buffered",
        ("file",),
        place=lambda: file_place(777, {"direct": False, "preallocate": False}),
        target_transports=_ENDS,
    ),
    Way("file-own", ("file",), to_itself=True, place=lambda: file_place(4096, {"sync": "data"})),
]
