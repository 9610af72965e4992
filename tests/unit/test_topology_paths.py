"""Distances inside a host, and the classic priority matrix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moonpool.errors import UsageError
from moonpool.topology import (
    Gpu,
    Host,
    LinkState,
    Located,
    MappedTree,
    Nic,
    NumaNode,
    Preference,
    PriorityMatrix,
    Proximity,
    Topology,
    distance,
    distances,
    misfits,
    parse_topology,
    priority_matrix,
    proximity,
    usable_nics,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "topology"
BARE_HOST = Host(None, None, None, None, False, None)


def golden(name: str) -> Topology:
    return parse_topology(MappedTree(json.loads((GOLDEN / f"{name}.tree.json").read_text())))


def place(topology: Topology, name: str) -> Located:
    everything: dict[str, Located] = {node.location: node for node in topology.numa_nodes}
    everything |= {gpu.location: gpu for gpu in topology.gpus if gpu.location}
    everything |= {nic.name: nic for nic in topology.nics}
    everything |= {disk.controller: disk for disk in topology.nvmes}
    return everything[name]


@pytest.mark.parametrize(
    ("a", "b", "level", "number"),
    [
        ("mlx5_0", "mlx5_0", Proximity.SAME_DEVICE, 0),
        ("cuda:0", "mlx5_0", Proximity.SAME_SWITCH, 104),
        ("cuda:0", "mlx5_1", Proximity.SAME_SWITCH, 104),
        ("cuda:0", "nvme0", Proximity.SAME_ROOT, 206),
        ("cuda:0", "mlx5_2", Proximity.SAME_NUMA, 300),
        ("cuda:0", "cpu:0", Proximity.SAME_NUMA, 300),
        ("cuda:0", "mlx5_4", Proximity.CROSS_NUMA, 432),
        ("cpu:0", "cpu:1", Proximity.CROSS_NUMA, 432),
        ("cpu:0", "docker0", Proximity.UNKNOWN, 500),
    ],
)
def test_distance_on_the_two_socket_host(a: str, b: str, level: Proximity, number: int) -> None:
    topology = golden("eight-gpu-two-socket")
    assert proximity(topology, place(topology, a), place(topology, b)) is level
    assert distance(topology, place(topology, a), place(topology, b)) == number
    assert distance(topology, place(topology, b), place(topology, a)) == number


def test_distance_is_zero_only_to_itself_and_symmetric() -> None:
    topology = golden("eight-gpu-two-socket")
    places: list[Located] = [*topology.numa_nodes, *topology.gpus, *topology.nics, *topology.nvmes]
    for a in places:
        for b in places:
            assert distance(topology, a, b) == distance(topology, b, a)
            assert (distance(topology, a, b) == 0) == (a is b)


def test_far_memory_is_nearer_than_the_other_socket() -> None:
    topology = golden("cxl-node-without-cpus")
    near, far = place(topology, "cpu:0"), place(topology, "cpu:1")
    memory = place(topology, "cxl:2")
    assert distance(topology, near, memory) == 414
    assert distance(topology, near, memory) < distance(topology, far, memory) == 424


def test_functions_of_one_card_are_one_device() -> None:
    topology = golden("sriov-single-nic")
    assert proximity(topology, place(topology, "mlx5_0"), place(topology, "mlx5_1")) is Proximity.SAME_DEVICE
    # On a host with one node an unknown numa node is that one.
    assert proximity(topology, place(topology, "cpu:0"), place(topology, "mlx5_0")) is Proximity.SAME_NUMA


def test_without_slit_another_node_is_as_far_as_can_be() -> None:
    nodes = (NumaNode(0, (0,), 1), NumaNode(1, (1,), 1))
    assert distance(Topology(BARE_HOST, nodes), nodes[0], nodes[1]) == 499


def nic(name: str, path: tuple[str, ...], numa: int | None, state: LinkState = LinkState.ACTIVE) -> Nic:
    return Nic((f"if-{name}",), (name,), state, numa_node=numa, pci_address=path[-1], pci_path=path)


def gpu(path: tuple[str, ...], numa: int | None) -> Gpu:
    return Gpu(path[-1], "NVIDIA", 0x10DE, 0x2330, 0x0302, numa, path, cuda_index=0)


def test_gpu_prefers_the_nearest_nics_of_its_node_with_all_ties() -> None:
    topology = Topology(
        BARE_HOST,
        (NumaNode(0, (0,), 1), NumaNode(1, (1,), 1)),
        nics=(
            nic("far", ("pci1", "1:1.0"), 1),
            nic("near0", ("pci0", "0:1.0", "0:2.0"), 0),
            nic("root", ("pci0", "0:9.0", "0:a.0"), 0),
            nic("near1", ("pci0", "0:1.0", "0:3.0"), 0),
        ),
        gpus=(gpu(("pci0", "0:1.0", "0:4.0"), 0),),
    )
    matrix = priority_matrix(topology)
    assert matrix.rows["cuda:0"] == Preference(("near0", "near1"), ("far", "root"))
    assert matrix.rows["cpu:0"] == Preference(("near0", "root", "near1"), ("far",))
    assert matrix.rows["cpu:1"] == Preference(("far",), ("near0", "root", "near1"))
    assert matrix.rows["*"].ordered == ("far", "near0", "root", "near1")


def test_gpu_without_a_nic_on_its_node_takes_the_nearest_of_all() -> None:
    topology = Topology(
        BARE_HOST,
        (NumaNode(0, (0,), 1), NumaNode(1, (1,), 1)),
        nics=(nic("a", ("pci1", "1:1.0"), 1), nic("b", ("pci2", "2:1.0"), 1)),
        gpus=(gpu(("pci0", "0:1.0"), 0),),
    )
    assert priority_matrix(topology).rows["cuda:0"] == Preference(("a", "b"), ())


def test_nics_that_are_down_are_not_in_the_matrix() -> None:
    topology = Topology(
        BARE_HOST,
        (NumaNode(0, (0,), 1),),
        nics=(nic("up", ("pci0", "1"), 0), nic("cut", ("pci0", "2"), 0, LinkState.DOWN)),
    )
    assert [found.name for found in usable_nics(topology)] == ["up"]


def test_only_restricts_by_either_name_and_rejects_unknown_ones() -> None:
    topology = golden("eight-gpu-two-socket")
    chosen = usable_nics(topology, only=("mlx5_3", "ibp5s0"))
    assert [found.name for found in chosen] == ["mlx5_0", "mlx5_3"]
    assert priority_matrix(topology, chosen).rows["cpu:1"] == Preference((), ("mlx5_0", "mlx5_3"))
    with pytest.raises(UsageError, match="no NIC is called mlx9"):
        usable_nics(topology, only=("mlx9",))


def test_host_without_rdma_uses_its_real_interfaces() -> None:
    assert json.loads(priority_matrix(golden("vm-without-numa")).to_json()) == {
        "cpu:0": [["eth0"], []],
        "*": [["eth0"], []],
    }


def test_matrix_text_round_trip() -> None:
    matrix = priority_matrix(golden("eight-gpu-two-socket"))
    assert PriorityMatrix.from_json(matrix.to_json()) == matrix


def test_matrix_reads_the_classic_form() -> None:
    text = '{"cpu:0": [["mlx5_0"], ["mlx5_1"]], "cuda:0": [["mlx5_0"]], "*": [["mlx5_0", "mlx5_1"], []]}'
    matrix = PriorityMatrix.from_json(text)
    assert matrix.lookup("cpu:0").ordered == ("mlx5_0", "mlx5_1")
    assert matrix.lookup("cuda:0") == Preference(("mlx5_0",), ())
    assert matrix.lookup("cuda:7").preferred == ("mlx5_0", "mlx5_1"), "an unlisted location gets the row *"
    assert PriorityMatrix.from_json("{}").lookup("cpu:0") == Preference((), ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "JSON object"),
        ('{"cpu:0": "mlx5_0"}', "preferred NICs"),
        ('{"cpu:0": []}', "preferred NICs"),
        ('{"cpu:0": [[], [], []]}', "preferred NICs"),
        ('{"cpu:0": [[1]]}', "not a NIC name"),
        ('{"cpu:0": [[""]]}', "not a NIC name"),
        ('{"cpu:0": [["a"], ["a"]]}', "listed twice"),
        ('{"CPU zero": [["a"], []]}', "not a location"),
        ('{"cpu:0": ["mlx5_0"]}', "list of at most"),
        (json.dumps({"cpu:0": [["n" * 300]]}), "not a NIC name"),
        (json.dumps({f"cpu:{i}": [[], []] for i in range(5000)}), "at most 4096 locations"),
        (" " * (1 << 21), "longer than"),
    ],
)
def test_matrix_refuses_what_is_not_one(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PriorityMatrix.from_json(text)


def test_a_matrix_is_compared_with_the_host() -> None:
    topology = golden("eight-gpu-two-socket")
    matrix = priority_matrix(topology)
    assert misfits(PriorityMatrix.from_json(matrix.to_json()), topology) == []
    text = '{"cpu:0": [["mlx5_0"], ["mlx5_77"]], "*": [["mlx5_1"], []]}'
    found = misfits(PriorityMatrix.from_json(text), topology)
    assert found[0] == "mlx5_77 (in cpu:0): this host has no such NIC"
    assert "mlx5_2: no row names it" in found
    assert not [line for line in found if line.startswith(("mlx5_0", "mlx5_1:"))]


def test_far_memory_prefers_the_nics_of_the_nearest_nodes() -> None:
    topology = golden("cxl-node-without-cpus")
    assert priority_matrix(topology).rows["cxl:2"].preferred == ("mlx5_0",)
    lonely = NumaNode(1, (), 1 << 30)
    bare = Topology(BARE_HOST, (NumaNode(0, (0,), 1 << 30), lonely), nics=topology.nics)
    # Nobody says how far anything is; what hangs at the node itself is there all the same.
    assert priority_matrix(bare).rows["cxl:1"].preferred == ("mlx5_1",)


@pytest.mark.parametrize("name", ["eight-gpu-two-socket", "broken", "vm-without-numa", "lab-node"])
def test_the_table_of_distances_is_symmetric(name: str) -> None:
    table = distances(golden(name))
    for a, row in table.items():
        assert row[a] == 0
        assert all(table[b][a] == way for b, way in row.items())
    if name == "eight-gpu-two-socket":
        near = min(other for other in table if other.startswith("mlx5"))
        assert table["cuda:0"][near] < table["cuda:7"][near]
        assert table["cuda:0"]["nvme0"] < 600
        assert len([other for other in table if other.startswith("cuda")]) == 8
