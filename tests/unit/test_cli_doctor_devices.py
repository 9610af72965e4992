"""The doctor's verdicts on far memory and NVMe, on made-up hosts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from moonpool.cli.checks import Level, examine, far_memory, nvme
from moonpool.topology import (
    CxlMemory,
    CxlRegion,
    DaxDevice,
    Host,
    MappedTree,
    NumaNode,
    Nvme,
    NvmeNamespace,
    Topology,
    parse_topology,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "topology"
HOST = Host(None, None, None, None, False, None)
DAX = DaxDevice("dax0.0", 256 << 20, 2 << 20, 1, 0, "device_dax", cxl_region="region0")
BARE = Topology(HOST, (NumaNode(0, (0,), 1 << 30),))
POOLED = dataclasses.replace(
    BARE,
    cxl_regions=(CxlRegion("region0", 256 << 20, "ram", None, ("mem0",), ("dax0.0",)),),
    cxl_memories=(CxlMemory("mem0", 256 << 20, 0, 0, serial=0xC0FFEE),),
)
DISK = Nvme(
    "nvme0",
    "tcp",
    "Linux",
    "live",
    (NvmeNamespace("nvme0n1", 1, 64 << 20, 512), NvmeNamespace("nvme0n2", 2, None, None)),
)


def test_a_device_that_can_be_mapped_is_named_as_it_is_offered() -> None:
    check = far_memory.judge_device(DAX, True, POOLED)
    assert check.level is Level.OK
    assert '"dax:/dev/dax0.0"' in check.detail
    assert "256 MiB" in check.detail
    assert "serial:c0ffee" in check.detail


def test_devices_that_cannot_be_mapped_say_what_would_help() -> None:
    kmem = far_memory.judge_device(dataclasses.replace(DAX, driver="kmem"), False, BARE)
    assert (kmem.level, '"cxl:1"' in kmem.detail) == (Level.OK, True)
    for broken in (dataclasses.replace(DAX, driver=None), dataclasses.replace(DAX, size_bytes=None)):
        check = far_memory.judge_device(broken, True, BARE)
        assert (check.level, "daxctl" in check.advice) == (Level.WARN, True)
    closed = far_memory.judge_device(DAX, False, BARE)
    assert (closed.level, "/dev/dax0.0" in closed.advice) == (Level.WARN, True)


def test_far_nodes_are_listed_with_size_and_distance() -> None:
    node = NumaNode(2, (), 2 << 30, ((0, 40), (1, 50), (2, 10)))
    check = far_memory.judge_nodes([node])
    assert check.level is Level.OK
    assert check.detail == '"cxl:2" (2 GiB, distance 40)'
    assert far_memory.judge_nodes([]).level is Level.INFO
    assert far_memory.judge_nodes([dataclasses.replace(node, distances=())]).detail == '"cxl:2" (2 GiB)'


def test_binding_and_lines() -> None:
    assert far_memory.judge_binding(far_memory.OK).level is Level.OK
    refused = far_memory.judge_binding("Operation not permitted")
    assert (refused.level, "mbind" in refused.advice) == (Level.INFO, True)
    assert far_memory.judge_binding("").level is Level.INFO
    assert "clwb" in far_memory.judge_lines("clwb").detail
    assert "refused" in far_memory.judge_lines("").detail


def test_controllers() -> None:
    live = nvme.judge_controller(DISK, [])
    assert live.level is Level.OK
    assert live.detail == "tcp, Linux, nvme0n1 (64 MiB) nvme0n2"
    lost = nvme.judge_controller(dataclasses.replace(DISK, state="connecting"), [])
    assert (lost.level, "connecting" in lost.detail, "nvme0" in lost.advice) == (Level.WARN, True, True)
    closed = nvme.judge_controller(DISK, ["/dev/ng0n1"])
    assert (closed.level, "/dev/ng0n1" in closed.advice) == (Level.INFO, True)
    assert nvme.judge_controllers(BARE)[0].detail == "none"
    empty = nvme.judge_controller(dataclasses.replace(DISK, namespaces=()), [])
    assert "no namespace" in empty.detail


def test_fabrics() -> None:
    assert "modprobe" in nvme.judge_fabrics(False, False, []).advice
    assert "no transport" in nvme.judge_fabrics(True, True, []).detail
    assert "root" in nvme.judge_fabrics(True, False, ["tcp"]).advice
    assert nvme.judge_fabrics(True, True, ["tcp", "rdma"]).level is Level.OK


def test_the_doctor_reads_other_hosts_trees_without_a_failure_of_its_own() -> None:
    for tree in sorted(GOLDEN.glob("*.tree.json")):
        files = MappedTree(json.loads(tree.read_text()))
        report = examine([], files)
        shown = {check.name for check in report.checks if check.group in ("far memory", "nvme")}
        topology = parse_topology(files)
        assert {dax.name for dax in topology.dax_devices} <= shown
        assert {disk.controller for disk in topology.nvmes} <= shown
