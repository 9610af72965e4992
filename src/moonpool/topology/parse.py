"""The parser: a kernel tree in, a ``Topology`` out. Pure, and total: no tree makes it raise."""

from __future__ import annotations

from moonpool.topology.attributes import Attributes, ParseLimits
from moonpool.topology.far_memory import parse_cxl_memories, parse_cxl_regions, parse_dax_devices
from moonpool.topology.memory import parse_host, parse_numa_nodes, parse_nvmes
from moonpool.topology.model import Host, Topology
from moonpool.topology.nics import parse_nics
from moonpool.topology.pci import parse_gpus, parse_pci
from moonpool.topology.sysfs import LiveSysfs, SysfsReader


def parse_topology(root: SysfsReader, limits: ParseLimits | None = None) -> Topology:
    """Reads a host from its /sys and /proc.

    What is missing is left out; what is there but makes no sense is left out with a line in ``warnings``.
    Cost: a few reads for each PCI function and interface, about 10 ms on a host with a hundred of them.
    """
    attributes = Attributes(root, limits or ParseLimits())
    functions = parse_pci(attributes)
    regions = parse_cxl_regions(attributes)
    return Topology(
        host=parse_host(attributes),
        numa_nodes=parse_numa_nodes(attributes),
        nics=parse_nics(attributes, functions),
        gpus=parse_gpus(functions),
        nvmes=parse_nvmes(attributes, functions),
        dax_devices=parse_dax_devices(attributes, regions),
        cxl_memories=parse_cxl_memories(attributes, functions),
        cxl_regions=regions,
        pci_devices=tuple(function.device for function in functions.values()),
        warnings=tuple(attributes.warnings),
    )


def read_topology() -> Topology:
    """The topology of the machine this runs on."""
    return parse_topology(LiveSysfs())


def read_far_memory() -> Topology:
    """Only the DAX devices and CXL memory of the machine this runs on, without their places."""
    attributes = Attributes(LiveSysfs(), ParseLimits())
    regions = parse_cxl_regions(attributes)
    return Topology(
        host=Host(None, None, None, None, False, None),
        numa_nodes=(),
        dax_devices=parse_dax_devices(attributes, regions),
        cxl_memories=parse_cxl_memories(attributes, {}),
        cxl_regions=regions,
        warnings=tuple(attributes.warnings),
    )
