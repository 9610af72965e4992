"""The topology parser against golden trees, broken trees, and the running kernel."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.topology import (
    LinkState,
    LiveSysfs,
    MappedTree,
    ParseLimits,
    RecordingReader,
    Topology,
    parse_topology,
    pool_identity,
    priority_matrix,
    read_topology,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "topology"
NAMES = sorted(path.name.removesuffix(".tree.json") for path in GOLDEN.glob("*.tree.json"))
PCI = "/sys/bus/pci/devices"


def golden_files(name: str) -> dict[str, str]:
    files: dict[str, str] = json.loads((GOLDEN / f"{name}.tree.json").read_text())
    return files


def golden(name: str) -> Topology:
    return parse_topology(MappedTree(golden_files(name)))


def plain(value: Any) -> Any:
    """The value as JSON knows it (tuples become lists)."""
    return json.loads(json.dumps(value))


def test_the_golden_hosts_are_there() -> None:
    assert NAMES == [
        "broken",
        "cxl-node-without-cpus",
        "eight-gpu-two-socket",
        "lab-dax",
        "lab-fabrics",
        "lab-node",
        "lab-type3",
        "sriov-single-nic",
        "vm-without-numa",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_golden_tree_gives_the_expected_topology_and_matrix(name: str) -> None:
    topology = golden(name)
    expected = json.loads((GOLDEN / f"{name}.expected.json").read_text())
    assert plain(topology.to_dict()) == expected["topology"]
    assert json.loads(priority_matrix(topology).to_json()) == expected["matrix"]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "broken"])
def test_sound_tree_gives_no_warning(name: str) -> None:
    assert golden(name).warnings == ()


def test_eight_gpu_host() -> None:
    topology = golden("eight-gpu-two-socket")
    assert [gpu.location for gpu in topology.gpus if gpu.location] == [f"cuda:{i}" for i in range(8)]
    assert [gpu.vendor for gpu in topology.gpus if gpu.location is None] == ["ASPEED"]
    rdma = [nic for nic in topology.nics if nic.rdma_devices]
    assert [nic.name for nic in rdma] == [f"mlx5_{i}" for i in range(8)]
    assert {nic.speed_mbps for nic in rdma} == {200_000}
    assert [nic.numa_node for nic in rdma] == [0, 0, 0, 0, 1, 1, 1, 1]
    # The interface is down, its InfiniBand port is not: the NIC carries bytes.
    assert next(nic for nic in rdma if nic.name == "mlx5_5").state is LinkState.ACTIVE
    assert [disk.numa_node for disk in topology.nvmes] == [0, 0, 1, 1]
    assert topology.nvmes[0].namespaces[0].size_bytes == 7_501_476_528 * 512
    assert len(topology.numa_nodes[0].cpus) == 128
    assert topology.numa_nodes[0].distance_to(1) == 32


def test_vm_without_numa_puts_its_nic_on_the_only_node() -> None:
    topology = golden("vm-without-numa")
    nic = next(nic for nic in topology.nics if nic.netdevs == ("eth0",))
    assert nic.numa_node is None
    assert topology.numa_of(nic) == 0
    assert nic.pci_address == "0000:00:03.0"
    assert nic.speed_mbps is None
    assert not nic.virtual
    assert topology.host.hypervisor
    assert {nic.name for nic in topology.nics if nic.virtual} == {"lo", "ifb0", "ifb1"}
    assert next(nic for nic in topology.nics if nic.loopback).state is LinkState.ACTIVE


def test_cxl_memory_is_a_node_without_cpus() -> None:
    topology = golden("cxl-node-without-cpus")
    assert [node.cpu_less for node in topology.numa_nodes] == [False, False, True]
    assert topology.numa_nodes[2].memory_bytes > 100 << 30
    assert [(dax.driver, dax.target_node) for dax in topology.dax_devices] == [("kmem", 2), ("device_dax", 3)]
    assert [memory.pci_address for memory in topology.cxl_memories] == ["0000:38:00.0", "0000:b8:00.0"]
    assert topology.cxl_memories[0].volatile_bytes == 128 << 30
    assert topology.cxl_memories[0].persistent_bytes == 0


def test_sriov_functions_know_their_parent() -> None:
    topology = golden("sriov-single-nic")
    physical, virtual = (nic for nic in topology.nics if nic.pci_address)
    assert (physical.virtual_functions, physical.physical_function) == (2, None)
    assert (virtual.virtual_functions, virtual.physical_function) == (0, physical.pci_address)
    assert not virtual.virtual, "a virtual function is hardware"
    assert virtual.state is LinkState.DOWN
    assert [space.name for space in topology.nvmes[0].namespaces] == ["nvme0n1"], "multipath head"


def test_broken_tree_keeps_what_makes_sense_and_says_what_does_not() -> None:
    topology = golden("broken")
    assert topology.numa_nodes[0].cpus == (0, 1, 2, 3)
    assert topology.numa_nodes[0].distances == ()
    text = "\n".join(topology.warnings)
    for piece in ("class", "form no tree", "99999 cannot be", "'one'", "0-99999", "twenty", "physfn"):
        assert piece in text, f"no warning mentions {piece}"
    assert "not-an-address" not in {device.address for device in topology.pci_devices}


def test_empty_tree_is_one_node_of_nothing() -> None:
    topology = parse_topology(MappedTree({}))
    assert [node.id for node in topology.numa_nodes] == [0]
    assert topology.warnings == ()
    assert (topology.nics, topology.gpus, topology.nvmes) == ((), (), ())
    assert json.loads(priority_matrix(topology).to_json()) == {"cpu:0": [[], []], "*": [[], []]}


def test_kernel_without_numa_support_gives_one_node_with_everything() -> None:
    topology = parse_topology(
        MappedTree({"/sys/devices/system/cpu/online": "0-3", "/proc/meminfo": "MemTotal:       1024 kB\n"})
    )
    assert topology.numa_nodes[0].cpus == (0, 1, 2, 3)
    assert topology.numa_nodes[0].memory_bytes == 1024 * 1024


@pytest.mark.parametrize(
    "attribute", ["/sys/class/infiniband/rxe0/parent", "/sys/class/infiniband/rxe0/ports/1/gid_attrs/ndevs/0"]
)
def test_software_rdma_belongs_to_its_interface(attribute: str) -> None:
    files = {
        "/sys/class/net/veth0/operstate": "up",
        "/sys/class/infiniband/rxe0/ports/1/state": "4: ACTIVE",
        "/sys/class/infiniband/rxe0/ports/1/rate": "2.5 Gb/sec (1X SDR)",
        attribute: "veth0",
    }
    (nic,) = parse_topology(MappedTree(files)).nics
    assert (nic.name, nic.netdevs, nic.virtual, nic.speed_mbps) == ("rxe0", ("veth0",), True, 2500)


def test_subfunctions_and_virtio_interfaces_belong_to_their_pci_function() -> None:
    files = {
        f"{PCI}/0000:01:00.0/class": "0x020000",
        f"{PCI}/0000:01:00.0/net/": "eth10 eth2",
        f"{PCI}/0000:01:00.0/mlx5_core.sf.4/net/": "eth3",
        f"{PCI}/0000:02:00.0/virtio7/net/": "ens2",
        **{f"/sys/class/net/{name}/operstate": "up" for name in ("eth2", "eth3", "eth10", "ens2")},
    }
    nics = parse_topology(MappedTree(files)).nics
    assert [nic.netdevs for nic in nics] == [("eth2", "eth3", "eth10"), ("ens2",)]


def test_amd_accelerators_are_gpus_without_a_cuda_number() -> None:
    files = {}
    for address, class_code, vendor in (
        ("10000:01:00.0", "0x120000", "0x1002"),
        ("0000:c1:00.0", "0x030200", "0x10de"),
        ("0000:0a:00.0", "0x030000", "0x10de"),
    ):
        files[f"{PCI}/{address}/class"] = class_code
        files[f"{PCI}/{address}/vendor"] = vendor
    gpus = parse_topology(MappedTree(files)).gpus
    assert [(gpu.pci_address, gpu.cuda_index) for gpu in gpus] == [
        ("0000:0a:00.0", 0),
        ("0000:c1:00.0", 1),
        ("10000:01:00.0", None),
    ]


def test_endless_bridges_end_at_the_limit() -> None:
    files = {f"{PCI}/0000:{bus:02x}:00.0/0000:{bus + 1:02x}:00.0/": "" for bus in range(20)}
    files |= {f"{PCI}/0000:{bus:02x}:00.0/class": "0x060400" for bus in range(21)}
    topology = parse_topology(MappedTree(files), ParseLimits(pci_depth_max=8))
    assert max(len(device.pci_path) for device in topology.pci_devices) <= 8 + 2
    assert any("form no tree" in warning for warning in topology.warnings)


def test_names_and_warnings_are_bounded() -> None:
    files = {f"{PCI}/0000:00:{slot:02x}.0/class": "zebra" for slot in range(32)}
    topology = parse_topology(MappedTree(files), ParseLimits(names_max=10, warnings_max=5))
    assert len(topology.pci_devices) == 10
    assert len(topology.warnings) == 5


PATHS = [path for name in NAMES for path in golden_files(name)]
SEGMENTS = sorted(
    {segment for path in PATHS for segment in path.split("/") if segment} | {"..", "node9999", ""}
)
CONTENT = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        ["-1", "0", "0-3,9", "0x10de", "0x030200", "4: ACTIVE", "9" * 5000, "\x00\xff", "1_0", "٣"]
    ),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.dictionaries(
        st.one_of(
            st.sampled_from(PATHS),
            st.lists(st.sampled_from(SEGMENTS), max_size=9).map(lambda parts: "/" + "/".join(parts)),
            st.tuples(st.sampled_from(PATHS), st.sampled_from(SEGMENTS)).map("/".join),
            st.text(max_size=20),
        ),
        CONTENT,
        max_size=40,
    )
)
def test_no_tree_makes_the_parser_raise(files: dict[str, str]) -> None:
    topology = parse_topology(MappedTree(files))
    assert plain(topology.to_dict())["schema"] == 1
    priority_matrix(topology)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.sampled_from(NAMES), st.data())
def test_no_damage_to_a_real_tree_makes_the_parser_raise(name: str, data: st.DataObject) -> None:
    files = golden_files(name)
    for path in data.draw(st.lists(st.sampled_from(sorted(files)), max_size=12)):
        if data.draw(st.booleans()):
            files.pop(path, None)
        else:
            files[path] = data.draw(CONTENT)
    topology = parse_topology(MappedTree(files))
    assert len(topology.warnings) <= ParseLimits().warnings_max
    priority_matrix(topology)


def test_the_running_kernel_can_be_read_and_replayed() -> None:
    recorder = RecordingReader(LiveSysfs())
    topology = parse_topology(recorder)
    assert any(nic.loopback for nic in topology.nics)
    assert sum(len(node.cpus) for node in topology.numa_nodes) >= 1
    assert topology.host.memory_bytes is not None
    assert parse_topology(MappedTree(recorder.files)) == topology
    assert read_topology().numa_nodes == topology.numa_nodes


def test_live_reader_gives_none_for_what_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    (tmp_path / "sys" / "plain").write_text(" 12\n")
    (tmp_path / "sys" / "binary").write_bytes(b"\xff\xfe\x00ok")
    os.mkfifo(tmp_path / "sys" / "pipe")
    reader = LiveSysfs(str(tmp_path))
    assert reader.read("/sys/plain") == "12"
    assert reader.read("/sys/missing") is None
    assert reader.read("/sys") is None, "a directory is no file"
    assert reader.read("/sys/\x00") is None
    assert (reader.read("/sys/binary") or "").endswith("ok")
    assert reader.read("/sys/pipe") == "", "a pipe without a writer must not block"
    assert reader.list("/sys") == ("binary", "pipe", "plain")
    assert reader.list("/nowhere") == ()
    assert reader.list("/\x00") == ()


def test_a_cxl_region_of_the_lab_is_named_by_its_device() -> None:
    topology = golden("lab-type3")
    (dax,) = topology.dax_devices
    assert (dax.mappable, dax.cxl_region, dax.device_number is not None) == (True, "region0", True)
    assert topology.cxl_regions[0].memories == ("mem0",)
    assert pool_identity(dax, topology.cxl_regions, topology.cxl_memories) == "serial:c0ffee"
    assert [node.location for node in golden("lab-node").far_nodes] == ["cxl:2"]
