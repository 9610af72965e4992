"""`moonpool doctor` and `moonpool topology` in the lab's machines: whatever devices one has, both find them.

What is there is asked of the kernel here, by plain listings; suites run this file with each kind of device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SYS = Path("/sys")
TIMEOUT_S = 240


def names(folder: str, pattern: str = "*") -> list[str]:
    """Names in a folder of /sys; none when it is not there."""
    return sorted(path.name for path in (SYS / folder).glob(pattern))


RDMA = names("class/infiniband")
DAX = names("bus/dax/devices", "dax*.*")
CXL = names("bus/cxl/devices", "mem*")
NVME = names("class/nvme", "nvme*")
FAR_NODES = [
    name
    for name in names("devices/system/node", "node[0-9]*")
    if not (SYS / "devices/system/node" / name / "cpulist").read_text().strip()
]


def run(*arguments: str) -> Any:
    """The JSON that a command prints."""
    if "LAB_GUEST" not in os.environ:
        pytest.skip("needs the lab: tests/lab/run.py with any device")
    command = [sys.executable, "-m", "moonpool.cli", *arguments, "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    return json.loads(ended.stdout)


@pytest.fixture(scope="module")
def doctor() -> Any:
    return run("doctor")


@pytest.fixture(scope="module")
def topology() -> Any:
    return run("topology")


def state(doctor: Any, name: str) -> dict[str, Any]:
    """What it says of a transport."""
    return next(one for one in doctor["transports"] if one["name"] == name)


def checks(doctor: Any, group: str) -> dict[str, dict[str, Any]]:
    """The lines of a group by name."""
    return {one["name"]: one for one in doctor["checks"] if one["group"] == group}


def test_this_machine_has_something_to_find(doctor: Any) -> None:
    assert [*RDMA, *DAX, *CXL, *NVME, *FAR_NODES]
    assert doctor["ok"]
    for name in ("local", "shm", "cxl", "tcp"):
        assert state(doctor, name)["available"]


def test_every_transport_is_there_or_says_why_not(doctor: Any) -> None:
    for one in doctor["transports"]:
        if not one["available"]:
            assert one["reason"]
            assert one["how_to_get_it"]


def test_rdma(doctor: Any, topology: Any) -> None:
    assert state(doctor, "rdma")["available"] == bool(RDMA)
    lines = checks(doctor, "rdma")
    for device in RDMA:
        assert any(device in name for name in lines), lines
    found = sorted(name for nic in topology["nics"] for name in nic["rdma_devices"])
    assert found == RDMA


def test_nvme(doctor: Any, topology: Any) -> None:
    lines = checks(doctor, "nvme")
    for controller in NVME:
        kind = (SYS / "class/nvme" / controller / "transport").read_text().strip()
        assert lines[controller]["level"] == "ok", lines[controller]
        assert kind in lines[controller]["detail"]
    assert sorted(one["controller"] for one in topology["nvmes"]) == NVME
    for one in topology["nvmes"]:
        assert (one["address"] is None) == (one["transport"] == "pcie")
        assert one["subsystem"]


def test_far_memory(doctor: Any, topology: Any) -> None:
    lines = checks(doctor, "far memory")
    for device in DAX:
        assert lines[device]["level"] == "ok", lines[device]
    assert [one["name"] for one in topology["dax_devices"]] == DAX
    far = [f"node{one['id']}" for one in topology["numa_nodes"] if one["cpu_less"]]
    assert far == FAR_NODES
    for node in FAR_NODES:
        assert f"cxl:{node.removeprefix('node')}" in lines["far numa nodes"]["detail"]
    assert [one["name"] for one in topology["cxl_memories"]] == CXL
    assert lines["numa binding"]["level"] == "ok"
    reason = state(doctor, "cxl")["reason"]
    for name in (*[device for device in DAX if "can be offered" in lines[device]["detail"]],):
        assert name in reason


def test_a_cxl_region_names_its_parts(topology: Any) -> None:
    for region in topology["cxl_regions"]:
        assert region["memories"] == CXL
        assert region["dax_devices"] == DAX
        assert all(one["serial"] for one in topology["cxl_memories"])
    assert bool(topology["cxl_regions"]) == bool(CXL)


def test_nothing_of_the_tree_made_no_sense(topology: Any) -> None:
    assert topology["warnings"] == []
