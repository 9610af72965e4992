"""NVMe: drives, remote namespaces and their paths, and whether more can be attached."""

from __future__ import annotations

import os
from typing import Final

from moonpool.cli.checks.check import Check, Level
from moonpool.topology import Nvme, SysfsReader, Topology, parse_topology
from moonpool.units import format_size

GROUP: Final = "nvme"
FABRICS: Final = "/dev/nvme-fabrics"
MODULES: Final = (("tcp", "nvme_tcp"), ("rdma", "nvme_rdma"))
LIVE: Final = "live"


def check_nvme(reader: SysfsReader) -> list[Check]:
    """A line for each controller, and one for the kernel's fabrics initiator."""
    topology = parse_topology(reader)
    loaded = [name for name, module in MODULES if reader.list(f"/sys/module/{module}")]
    return [
        *judge_controllers(topology),
        judge_fabrics(os.path.exists(FABRICS), os.access(FABRICS, os.W_OK), loaded),
    ]


def judge_controllers(topology: Topology) -> list[Check]:
    """One finding for each controller; one that says so where there is none. Pure but for access rights."""
    found = [judge_controller(disk, _closed(disk)) for disk in topology.nvmes]
    return found or [Check(GROUP, "controllers", Level.INFO, "none")]


def _closed(disk: Nvme) -> list[str]:
    """Devices of its namespaces that this user may not open."""
    paths = [
        f"/dev/{space.name.replace('nvme', kind, 1)}" for space in disk.namespaces for kind in ("ng", "nvme")
    ]
    return [path for path in paths if os.path.exists(path) and not os.access(path, os.R_OK | os.W_OK)]


def judge_controller(disk: Nvme, closed: list[str]) -> Check:
    """A controller that is not live is a path that is away; devices that this user may not open. Pure."""
    spaces = " ".join(
        f"{space.name} ({format_size(space.size_bytes)})" if space.size_bytes else space.name
        for space in disk.namespaces
    )
    about = ", ".join(fact for fact in (disk.transport, disk.model, spaces or "no namespace") if fact)
    if disk.state not in (LIVE, None):
        advice = f"look at the target and the network; `moonpool nvmf detach {disk.controller}` gives it up"
        return Check(GROUP, disk.controller, Level.WARN, f"{about}: its state is {disk.state}", advice)
    if closed:
        advice = f"let this user read and write {' '.join(closed)} (group disk, or a udev rule)"
        return Check(GROUP, disk.controller, Level.INFO, f"{about}: this user may not open it", advice)
    return Check(GROUP, disk.controller, Level.OK, about)


def judge_fabrics(there: bool, allowed: bool, loaded: list[str]) -> Check:
    """Whether remote namespaces can be attached: the kernel's control device, its transports. Pure."""
    if not there or not loaded:
        detail = f"no initiator: {'no transport is loaded' if there else FABRICS + ' is not there'}"
        return Check(GROUP, "fabrics", Level.INFO, detail, "modprobe nvme-tcp, or modprobe nvme-rdma")
    if not allowed:
        advice = "attach as root (`moonpool nvmf attach`); using what is attached needs no root"
        return Check(
            GROUP, "fabrics", Level.INFO, f"by {', '.join(loaded)}, but only root may attach", advice
        )
    return Check(GROUP, "fabrics", Level.OK, f"namespaces can be attached by {', '.join(loaded)}")
