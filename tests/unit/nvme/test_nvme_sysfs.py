"""What a host's NVMe tree says, read from recorded and broken ones."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from moonpool.topology.sysfs import MappedTree
from moonpool.transport.nvme_sysfs import find_namespace, namespace_by_name, read_subsystems

sys.path.insert(0, str(Path(__file__).parent))
from nvme_hosts import SUBSYSTEM, files_of, recorded, two_controllers, without_multipath


@pytest.mark.parametrize(
    ("name", "transport", "is_fabric", "longest", "segments"),
    [
        ("tcp", "tcp", True, 2147483647 << 10, 65535),
        ("rdma", "rdma", True, 1 << 20, 256),
        ("pcie", "pcie", False, 512 << 10, 128),
    ],
)
def test_a_recorded_host(name: str, transport: str, is_fabric: bool, longest: int, segments: int) -> None:
    (subsystem,) = read_subsystems(recorded(name))
    (controller,) = subsystem.controllers
    (namespace,) = subsystem.namespaces
    assert (controller.name, controller.transport, controller.is_live) == ("nvme0", transport, True)
    assert (namespace.block_name, namespace.generic_name) == ("nvme0n1", "ng0n1")
    assert (namespace.nsid, namespace.block_bytes, namespace.metadata_bytes) == (1, 512, 0)
    assert namespace.controllers == (controller,)
    assert (namespace.is_fabric, namespace.is_live) == (is_fabric, True)
    assert (namespace.command_bytes_max, namespace.segments_max) == (longest, segments)
    assert namespace.block_device.startswith("259:")
    assert namespace.generic_device.endswith(":0")


def test_the_times_of_a_fabric_controller() -> None:
    (subsystem,) = read_subsystems(recorded("tcp"))
    (controller,) = subsystem.controllers
    assert (controller.reconnect_delay_s, controller.loss_timeout_s, controller.fail_fast_s) == (1, 30, None)
    assert ("traddr", "10.99.0.2") in controller.address


def test_two_controllers_lead_to_one_namespace() -> None:
    (subsystem,) = read_subsystems(two_controllers())
    (namespace,) = subsystem.namespaces
    assert [controller.name for controller in namespace.controllers] == ["nvme0", "nvme1"]
    assert namespace.is_live
    assert namespace.is_shared
    assert namespace.command_bytes_max == 64 << 10, "the shortest of both ways counts"


def test_a_namespace_whose_controllers_are_all_coming_back() -> None:
    files = files_of("tcp")
    files[f"{SUBSYSTEM}/nvme0/state"] = "connecting"
    (subsystem,) = read_subsystems(MappedTree(files))
    (namespace,) = subsystem.namespaces
    assert not namespace.is_live
    assert namespace.may_return
    files[f"{SUBSYSTEM}/nvme0/state"] = "deleting"
    (subsystem,) = read_subsystems(MappedTree(files))
    assert not subsystem.namespaces[0].may_return


def test_without_multipath_a_namespace_belongs_to_its_controller() -> None:
    (subsystem,) = read_subsystems(without_multipath())
    (namespace,) = subsystem.namespaces
    assert (namespace.block_name, namespace.generic_name, namespace.is_shared) == ("nvme0n1", "ng0n1", False)
    assert [controller.name for controller in namespace.controllers] == ["nvme0"]
    assert namespace.command_bytes_max == 512 << 10


def test_a_namespace_is_found_by_what_it_is() -> None:
    found = read_subsystems(recorded("tcp"))
    (namespace,) = found[0].namespaces
    nqn, wwid = namespace.subsystem_nqn, namespace.wwid
    assert find_namespace(found, nqn, 1, wwid) == namespace
    assert find_namespace(found, nqn, 2, wwid) is None
    assert find_namespace(found, "nqn.other", 1, wwid) is None
    for name in ("nvme0n1", "/dev/ng0n1", wwid, wwid.removeprefix("uuid.").upper()):
        assert namespace_by_name(found, name) == namespace
    assert namespace_by_name(found, "nvme1n1") is None
    assert namespace_by_name(found, "") is None


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("nvme0n1/nsid", "one"),
        ("nvme0n1/nsid", "0"),
        ("nvme0n1/size", "-1"),
        ("nvme0n1/wwid", ""),
        ("nvme0n1/queue/logical_block_size", "500"),
        ("nvme0n1/queue/logical_block_size", "9" * 40),
    ],
)
def test_a_namespace_that_sysfs_does_not_describe_is_left_out(path: str, content: str) -> None:
    files = files_of("tcp")
    files[f"{SUBSYSTEM}/{path}"] = content
    (subsystem,) = read_subsystems(MappedTree(files))
    assert subsystem.namespaces == ()
    assert len(subsystem.controllers) == 1


def test_damaged_trees_never_raise() -> None:
    chance = random.Random(5)
    for _ in range(300):
        files = files_of(chance.choice(["tcp", "rdma", "pcie"]))
        for path in chance.sample(sorted(files), 8):
            files[path] = chance.choice(["", "x" * 5000, "\0", "999999999999999999999", "nvme0 nvme0n1 .."])
        for path in chance.sample(sorted(files), 4):
            del files[path]
        for subsystem in read_subsystems(MappedTree(files)):
            for namespace in subsystem.namespaces:
                assert namespace.nsid > 0
                assert namespace.block_bytes >= 512
                assert namespace.size_bytes >= 0


def test_a_host_without_nvme() -> None:
    assert read_subsystems(MappedTree({})) == ()
