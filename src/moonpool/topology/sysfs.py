"""Where the parser reads from: the live kernel, or a tree held in a mapping (another machine's dump)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Protocol

READ_BYTES_MAX = 64 * 1024
"""Longest prefix read of one file: attributes are one page, and /proc/cpuinfo begins with what we need."""


class SysfsReader(Protocol):
    """A read-only tree of small text files with absolute paths, as /sys and /proc are."""

    def read(self, path: str) -> str | None:
        """Text of a file without surrounding white space; None when it is missing or cannot be read."""

    def list(self, path: str) -> tuple[str, ...]:
        """Sorted names in a directory; empty when it is missing or cannot be read."""


class LiveSysfs:
    """The tree of the running kernel below ``root`` ("/" or where a container mounts the host's tree)."""

    def __init__(self, root: str = "/") -> None:
        self.root = root.rstrip("/")

    def read(self, path: str) -> str | None:
        # Opened without buffering: an attribute is made anew on each read(), so one read() is one consistent
        # value.
        try:
            fd = os.open(self.root + path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError):
            return None
        try:
            return os.read(fd, READ_BYTES_MAX).decode("utf-8", "replace").strip()
        except OSError:  # e.g. EINVAL from the speed of an interface that is down
            return None
        finally:
            os.close(fd)

    def list(self, path: str) -> tuple[str, ...]:
        try:
            return tuple(sorted(os.listdir(self.root + path)))
        except (OSError, ValueError):
            return ()


class MappedTree:
    """A tree from a mapping of absolute path to content.

    A path that ends in "/" is a directory, its content the names in it, parted by white space; names that no
    other path goes through are there, but hold nothing.
    """

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files: dict[str, str] = {}
        self.folders: dict[str, set[str]] = {}
        for path, content in files.items():
            parts = [part for part in path.split("/") if part]
            for depth, name in enumerate(parts):
                self.folders.setdefault("/" + "/".join(parts[:depth]), set()).add(name)
            whole = "/" + "/".join(parts)
            if path.endswith("/"):
                self.folders.setdefault(whole, set()).update(content.split())
            else:
                self.files[whole] = content

    def read(self, path: str) -> str | None:
        content = self.files.get(path)
        return None if content is None else content.strip()

    def list(self, path: str) -> tuple[str, ...]:
        return tuple(sorted(self.folders.get(path.rstrip("/") or "/", ())))


class RecordingReader:
    """Passes reads on and keeps what they gave: ``files`` then makes a ``MappedTree`` of the same host."""

    def __init__(self, source: SysfsReader) -> None:
        self.source = source
        self.files: dict[str, str] = {}

    def read(self, path: str) -> str | None:
        content = self.source.read(path)
        if content is not None:
            self.files[path] = content
        return content

    def list(self, path: str) -> tuple[str, ...]:
        names = self.source.list(path)
        if names:
            self.files[path.rstrip("/") + "/"] = " ".join(names)
        return names
