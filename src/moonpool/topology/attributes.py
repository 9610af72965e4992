"""Typed reading of kernel attributes that may be missing or nonsense: never raises, keeps warnings."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moonpool.topology.sysfs import SysfsReader

_DECIMAL = re.compile(r"-?[0-9]{1,19}")
_HEXADECIMAL = re.compile(r"(?:0x)?[0-9a-fA-F]{1,16}")
_DIGITS = frozenset("0123456789")
_PIECE = re.compile(r"[0-9]+|[^0-9]+")
_CPU_RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseLimits:
    """Bounds that keep a broken or hostile tree from costing more than a moment and a few MiB."""

    #: PCI bridges between a host bridge and a device.
    pci_depth_max: int = 32
    #: Names looked at in one directory.
    names_max: int = 16_384
    #: Highest CPU number taken from a list, plus one.
    cpus_max: int = 65_536
    #: Highest numa node id, plus one (the kernel's own limit is 1024).
    numa_nodes_max: int = 4_096
    #: Warnings kept.
    warnings_max: int = 256


def natural_key(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key that puts eth2 before eth10."""
    return tuple((len(piece), piece) if piece[0] in _DIGITS else (0, piece) for piece in _PIECE.findall(name))


class Attributes:
    """A reader with types on it. Paths are absolute; ``warnings`` has what was there but made no sense."""

    def __init__(self, reader: SysfsReader, limits: ParseLimits) -> None:
        self.reader = reader
        self.limits = limits
        self.warnings: list[str] = []

    def warn(self, message: str) -> None:
        """Keeps a warning, unless there are too many already."""
        if len(self.warnings) < self.limits.warnings_max:
            self.warnings.append(message)

    def names(self, path: str) -> tuple[str, ...]:
        """Names in a directory in natural order, at most ``names_max`` of them."""
        names = sorted(self.reader.list(path), key=natural_key)
        if len(names) > self.limits.names_max:
            self.warn(f"{path}: {len(names)} names, only the first {self.limits.names_max} are looked at")
        return tuple(names[: self.limits.names_max])

    def text(self, path: str) -> str | None:
        """Content without surrounding white space; None for a missing or an empty file."""
        return self.reader.read(path) or None

    def integer(self, path: str) -> int | None:
        """A decimal number, None with a warning for anything else."""
        text = self.text(path)
        if text is None:
            return None
        if _DECIMAL.fullmatch(text) is None:
            self.warn(f"{path}: expected a number, found {text[:40]!r}")
            return None
        return int(text)

    def hexadecimal(self, path: str) -> int | None:
        """A hexadecimal number with or without 0x, None with a warning for anything else."""
        text = self.text(path)
        if text is None:
            return None
        if _HEXADECIMAL.fullmatch(text) is None:
            self.warn(f"{path}: expected a hexadecimal number, found {text[:40]!r}")
            return None
        return int(text, 16)

    def size(self, path: str) -> int | None:
        """A byte count, which the kernel writes in decimal or with 0x."""
        text = self.text(path)
        value = self.hexadecimal(path) if text is not None and text.startswith("0x") else self.integer(path)
        return None if value is None or value < 0 else value

    def numa_node(self, path: str) -> int | None:
        """A numa node id. The kernel's -1 ("the firmware did not say") is None, and not worth a warning."""
        node = self.integer(path)
        if node is None or node == -1:
            return None
        if not 0 <= node < self.limits.numa_nodes_max:
            self.warn(f"{path}: numa node {node} cannot be")
            return None
        return node

    def id_list(self, path: str, bound: int) -> tuple[int, ...]:
        """Ids below ``bound`` from a list such as "0-3,8", ascending; bad pieces are left out."""
        found: set[int] = set()
        for piece in (self.text(path) or "").split(","):
            match = _CPU_RANGE.fullmatch(piece.strip())
            if match is None:
                if piece.strip():
                    self.warn(f"{path}: expected a range such as 0-3, found {piece[:40]!r}")
                continue
            first, last = int(match[1]), int(match[2] or match[1])
            if last >= bound or first > last:
                self.warn(f"{path}: range {piece[:40]!r} cannot be")
                continue
            found.update(range(first, last + 1))
        return tuple(sorted(found))
