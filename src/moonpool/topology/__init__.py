"""What this host is made of, and how far its parts are from each other. Only reads."""

from moonpool.topology.attributes import ParseLimits
from moonpool.topology.distance import Proximity, distance, distances, places, proximity
from moonpool.topology.far_memory import pool_identity
from moonpool.topology.matrix import Preference, PriorityMatrix, misfits, priority_matrix, usable_nics
from moonpool.topology.model import (
    CxlMemory,
    CxlRegion,
    DaxDevice,
    Gpu,
    Host,
    LinkState,
    Located,
    Nic,
    NumaNode,
    Nvme,
    NvmeNamespace,
    PciDevice,
    Topology,
)
from moonpool.topology.parse import parse_topology, read_far_memory, read_topology
from moonpool.topology.sysfs import LiveSysfs, MappedTree, RecordingReader, SysfsReader

__all__ = [
    "CxlMemory",
    "CxlRegion",
    "DaxDevice",
    "Gpu",
    "Host",
    "LinkState",
    "LiveSysfs",
    "Located",
    "MappedTree",
    "Nic",
    "NumaNode",
    "Nvme",
    "NvmeNamespace",
    "ParseLimits",
    "PciDevice",
    "Preference",
    "PriorityMatrix",
    "Proximity",
    "RecordingReader",
    "SysfsReader",
    "Topology",
    "distance",
    "distances",
    "misfits",
    "parse_topology",
    "places",
    "pool_identity",
    "priority_matrix",
    "proximity",
    "read_far_memory",
    "read_topology",
    "usable_nics",
]
