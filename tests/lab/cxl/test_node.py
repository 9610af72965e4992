"""Memory bound to a far numa node of the lab."""

from __future__ import annotations

import pytest

from moonpool import Engine, OutOfMemory, UsageError
from moonpool.native.cxl.numa import pages_by_node
from moonpool.topology import NumaNode, Topology

MIB = 1 << 20
BLOCK = bytes(range(256)) * 4096


@pytest.fixture
def far(topology: Topology) -> NumaNode:
    """The node without CPUs."""
    if not topology.far_nodes:
        pytest.skip("needs the lab: tests/lab/run.py --cxl 256 --cxl-mode node")
    return topology.far_nodes[0]


def test_pages_come_from_the_far_node_and_peers_map_them(far: NumaNode) -> None:
    for location in (f"cxl:{far.id}", f"numa:{far.id}"):
        with Engine(transports=("cxl",)) as initiator, Engine(transports=("shm", "cxl", "tcp")) as owner:
            region = owner.allocate(16 * MIB, location=location)
            assert region.location == location
            assert set(pages_by_node(region.address, region.size_bytes)) == {far.id}
            segment = initiator.open(owner.endpoint)
            assert [path.transport for path in segment.paths] == ["cxl"]
            initiator.write(segment, region.handle, 5, BLOCK)
            assert region.view[5 : 5 + len(BLOCK)] == BLOCK
            assert set(pages_by_node(region.address, region.size_bytes)) == {far.id}


def test_memory_that_is_not_prefaulted_comes_from_there_too(far: NumaNode) -> None:
    with Engine(transports=("cxl", "tcp")) as owner:
        region = owner.allocate(4 * MIB, location=f"cxl:{far.id}", prefault=False)
        region.view[:] = bytes(4 * MIB)
        assert set(pages_by_node(region.address, region.size_bytes)) == {far.id}


def test_near_memory_stays_near_and_wrong_nodes_are_named(far: NumaNode, topology: Topology) -> None:
    near = next(node.id for node in topology.numa_nodes if not node.cpu_less)
    with Engine(transports=("cxl", "tcp")) as owner:
        region = owner.allocate(MIB, location=f"numa:{near}")
        assert set(pages_by_node(region.address, region.size_bytes)) == {near}
        for wrong in (f"cxl:{near}", "cxl:77", "numa:77"):
            with pytest.raises(UsageError, match=str(far.id)):
                owner.allocate(MIB, location=wrong)


def test_more_than_the_node_has_is_refused_before_it_is_touched(far: NumaNode) -> None:
    with Engine(transports=("cxl", "tcp")) as owner:
        with pytest.raises(OutOfMemory, match=f"numa node {far.id}"):
            owner.allocate(far.memory_bytes + MIB, location=f"cxl:{far.id}")
        assert owner.allocate(MIB, location=f"cxl:{far.id}").size_bytes == MIB
