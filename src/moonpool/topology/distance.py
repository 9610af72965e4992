"""How far two things in a host are from each other.

Five classes, near to far, by what their traffic has to cross. Inside a class PCI hops, or the SLIT distance
between numa nodes, tell near from far, so a distance is one number: ``100 * class + detail``.
"""

from __future__ import annotations

from enum import IntEnum

from moonpool.topology.model import Located, Topology

CLASS_STEP = 100
DETAIL_MAX = CLASS_STEP - 1


class Proximity(IntEnum):
    """What lies between two devices."""

    SAME_DEVICE = 0
    """The same PCI function, or functions of one card."""
    SAME_SWITCH = 1
    """A PCI bridge or switch below the host bridge: peer-to-peer traffic does not reach the CPU."""
    SAME_ROOT = 2
    """One host bridge, on different ports of it."""
    SAME_NUMA = 3
    """Different host bridges of one numa node, or memory and a device of that node."""
    CROSS_NUMA = 4
    """The link between sockets."""
    UNKNOWN = 5
    """The firmware does not say where one of them is."""


def proximity(topology: Topology, a: Located, b: Located) -> Proximity:
    """The class of the way from ``a`` to ``b``; symmetric."""
    if a == b:
        return Proximity.SAME_DEVICE
    if a.pci_path and b.pci_path:
        if _card(a.pci_path) == _card(b.pci_path):
            return Proximity.SAME_DEVICE
        shared = _shared(a.pci_path, b.pci_path)
        if shared >= 2:  # the host bridge itself is the first address of each path
            return Proximity.SAME_SWITCH
        if shared == 1:
            return Proximity.SAME_ROOT
    node_a, node_b = topology.numa_of(a), topology.numa_of(b)
    if node_a is None or node_b is None:
        return Proximity.UNKNOWN
    return Proximity.SAME_NUMA if node_a == node_b else Proximity.CROSS_NUMA


def distance(topology: Topology, a: Located, b: Located) -> int:
    """One number that grows with the length of the way; 0 for the same device, symmetric.

    The detail is the number of PCI links between the two on one switch or root, the larger SLIT distance of
    both directions across numa nodes (99 when the firmware gives none), and 0 otherwise.
    """
    level = proximity(topology, a, b)
    detail = 0
    if level in (Proximity.SAME_SWITCH, Proximity.SAME_ROOT):
        detail = len(a.pci_path) + len(b.pci_path) - 2 * _shared(a.pci_path, b.pci_path)
    elif level is Proximity.CROSS_NUMA:
        detail = max(_slit(topology, a, b), _slit(topology, b, a))
    return int(level) * CLASS_STEP + min(detail, DETAIL_MAX)


def places(topology: Topology) -> dict[str, Located]:
    """Everything that has a place, by name: memory, GPUs, real NICs, NVMe controllers, CXL devices."""
    found: dict[str, Located] = {node.location: node for node in topology.numa_nodes}
    found |= {gpu.location or f"gpu {gpu.pci_address}": gpu for gpu in topology.gpus}
    found |= {nic.name: nic for nic in topology.nics if not nic.virtual}
    found |= {disk.controller: disk for disk in topology.nvmes}
    return found | {memory.name: memory for memory in topology.cxl_memories}


def distances(topology: Topology) -> dict[str, dict[str, int]]:
    """The distance from each place to each, by the names of `places`; symmetric, 0 to itself."""
    found = places(topology)
    return {a: {b: distance(topology, found[a], found[b]) for b in found} for a in found}


def _card(path: tuple[str, ...]) -> tuple[str, ...]:
    """The path with the last function number taken off: what all functions of one card have in common."""
    return (*path[:-1], path[-1].rpartition(".")[0])


def _shared(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    """Addresses that both paths begin with."""
    length = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        length += 1
    return length


def _slit(topology: Topology, a: Located, b: Located) -> int:
    node_a, node_b = topology.numa_of(a), topology.numa_of(b)
    source = None if node_a is None else topology.numa_node(node_a)
    found = None if source is None or node_b is None else source.distance_to(node_b)
    return DETAIL_MAX if found is None else found
