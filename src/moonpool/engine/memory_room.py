"""Whether this machine has room for memory that is about to be touched page by page.

Without the question a region larger than the machine's memory ends in the kernel killing a process, often
another one. Sources: proc(5) on MemAvailable, the kernel's cgroup-v2 document on memory.max.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from moonpool.errors import OutOfMemory, UsageError
from moonpool.units import KIB, MAPPING_BYTES_MAX

PROC: Final = Path("/proc")
CGROUPS: Final = Path("/sys/fs/cgroup")
NODES: Final = Path("/sys/devices/system/node")
_NODE_FACT = re.compile(r"Node [0-9]+ (\S+):\s+([0-9]{1,15}) kB$")


def check_request(size_bytes: int, prefault: bool) -> None:
    """Raises `UsageError` for a size no region has; when it is to be pre-faulted, `OutOfMemory` as below."""
    if not 1 <= size_bytes <= MAPPING_BYTES_MAX:
        raise UsageError(f"size_bytes={size_bytes}: a region has 1 to 2**47 bytes", field="size_bytes")
    if prefault:
        check_room(size_bytes)


def check_room(size_bytes: int, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
    """Raises `OutOfMemory` when less memory is available than is about to be taken."""
    room = available_bytes(proc, cgroups)
    if room is not None and size_bytes > room:
        raise OutOfMemory(
            f"{size_bytes} bytes were asked for and {room} are available here; ask for less, or free some",
            length_bytes=size_bytes,
            limit=room,
        )


def check_room_of_node(size_bytes: int, node: int, nodes: Path = NODES) -> None:
    """Raises `OutOfMemory` when one numa node has less memory left than is about to be taken from it."""
    about = dict(_facts(nodes / f"node{node}" / "meminfo"))
    if "MemFree" not in about:
        return
    # File pages that nobody changed are given up for others; dirty ones and other processes' memory are not.
    clean = sum(about.get(name, 0) for name in ("Active(file)", "Inactive(file)"))
    unclean = sum(about.get(name, 0) for name in ("Dirty", "Writeback"))
    room = about["MemFree"] + max(0, clean - unclean)
    if size_bytes > room:
        raise OutOfMemory(
            f"{size_bytes} bytes were asked for on numa node {node} and {room} are available there; "
            "ask for less, free some, or take another node",
            length_bytes=size_bytes,
            limit=room,
        )


def _facts(meminfo: Path) -> Iterator[tuple[str, int]]:
    """("MemFree", bytes) and so on, of a node's meminfo."""
    for line in _lines(meminfo):
        match = _NODE_FACT.match(line)
        if match is not None:
            yield match[1], int(match[2]) * KIB


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """The least of what the machine and the process's own cgroup have left; None when neither says."""
    rooms = [room for room in (_of_machine(proc), _of_cgroup(proc, cgroups)) if room is not None]
    return min(rooms, default=None)


def _of_machine(proc: Path) -> int | None:
    for line in _lines(proc / "meminfo"):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * KIB
    return None


def _of_cgroup(proc: Path, cgroups: Path) -> int | None:
    for line in _lines(proc / "self" / "cgroup"):
        number, _, path = line.partition("::")
        if number == "0":
            folder = cgroups / path.strip("/")
            limits = [_number(folder / "memory.max"), _number(folder / "memory.current")]
            if limits[0] is not None and limits[1] is not None:
                return max(0, limits[0] - limits[1])
    return None


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
