"""Hosts with NVMe for tests: recorded trees, and variations on them."""

from __future__ import annotations

import json
from pathlib import Path

from moonpool.topology.sysfs import MappedTree

GOLDEN = Path(__file__).parents[2] / "golden" / "nvme"
SUBSYSTEM = "/sys/class/nvme-subsystem/nvme-subsys0"


def files_of(name: str) -> dict[str, str]:
    """The recorded tree of a host, to be changed."""
    found: dict[str, str] = json.loads((GOLDEN / f"{name}.tree.json").read_text())
    return found


def recorded(name: str) -> MappedTree:
    """A host as it was recorded."""
    return MappedTree(files_of(name))


def two_controllers(state: str = "connecting") -> MappedTree:
    """The tcp host with a second way to the same namespace, in some state; its longest command is 64 KiB."""
    files = files_of("tcp")
    for path, content in list(files.items()):
        if f"{SUBSYSTEM}/nvme0/" in path:
            second = path.replace("/nvme0/", "/nvme1/").replace("nvme0c0n1", "nvme0c1n1")
            files[second] = content.replace("nvme0c0n1", "nvme0c1n1").replace("10.99.0.2", "10.99.0.3")
    files[f"{SUBSYSTEM}/"] += " nvme1"
    files[f"{SUBSYSTEM}/nvme1/state"] = state
    files[f"{SUBSYSTEM}/nvme1/nvme0c1n1/queue/max_hw_sectors_kb"] = "64"
    return MappedTree(files)


def without_multipath() -> MappedTree:
    """The PCIe host as a kernel with nvme_core.multipath=N shows it."""
    files = {}
    for path, content in files_of("pcie").items():
        moved = path.replace(f"{SUBSYSTEM}/nvme0n1", f"{SUBSYSTEM}/nvme0/nvme0n1")
        moved = moved.replace(f"{SUBSYSTEM}/ng0n1", f"{SUBSYSTEM}/nvme0/ng0n1")
        if "nvme0c0n1/" not in moved:
            files[moved] = content.replace("nvme0c0n1", "nvme0n1 ng0n1")
    files[f"{SUBSYSTEM}/"] = "nvme0 subsysnqn model"
    return MappedTree(files)
