"""What a host is made of, as plain frozen values: memory, NICs, GPUs, disks, CXL and their places.

Conventions of every class here: a value that the kernel does not tell is None, never a guess; ``pci_path`` is
the chain of PCI addresses from the host bridge down to the device itself, empty for what is not on PCI; names
are the kernel's.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

TOPOLOGY_SCHEMA = 1
"""Version of the JSON form that ``Topology.to_dict`` gives; it grows when a field changes its meaning."""


class LinkState(StrEnum):
    """Whether a NIC can carry bytes now."""

    ACTIVE = "active"
    DOWN = "down"
    UNKNOWN = "unknown"


class Located(Protocol):
    """Anything that has a place in the host, so that a distance to it can be told."""

    @property
    def pci_path(self) -> tuple[str, ...]:
        """PCI addresses from the host bridge down to the device; empty for what is not on PCI."""

    @property
    def numa_node(self) -> int | None:
        """Id of the numa node that the device is attached to; None when the firmware does not say."""


@dataclass(frozen=True, slots=True)
class Host:
    """The machine as a whole."""

    hostname: str | None
    kernel: str | None
    cpu_model: str | None
    product: str | None
    hypervisor: bool
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One numa node.

    ``distances`` holds (node id, ACPI SLIT distance) pairs: 10 means local, 20 twice as slow.
    ``memory_bytes`` is what the kernel manages there, 0 on a node without memory.
    """

    id: int
    cpus: tuple[int, ...]
    memory_bytes: int
    distances: tuple[tuple[int, int], ...] = ()

    @property
    def cpu_less(self) -> bool:
        """True for memory with no CPU of its own: CXL, HBM or persistent memory shown as a node."""
        return not self.cpus

    @property
    def location(self) -> str:
        """As regions are tagged: memory without a CPU is far memory."""
        return f"cxl:{self.id}" if self.cpu_less and self.memory_bytes else f"cpu:{self.id}"

    @property
    def pci_path(self) -> tuple[str, ...]:
        return ()

    @property
    def numa_node(self) -> int | None:
        return self.id

    def distance_to(self, node: int) -> int | None:
        """ACPI SLIT distance to another node, None when the firmware gives none."""
        return next((value for id_, value in self.distances if id_ == node), None)


@dataclass(frozen=True, slots=True)
class PciDevice:
    """One PCI function, bridges included. ``class_code`` is base and subclass: 0x0200 is Ethernet."""

    address: str
    class_code: int
    vendor: int
    device: int
    numa_node: int | None
    pci_path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Nic:
    """One network function: a PCI function, another bus device, or a purely virtual interface.

    ``netdevs`` and ``rdma_devices`` are its kernel names, sorted. ``speed_mbps`` is the negotiated link speed
    in Mbit/s. ``virtual`` means that no hardware is behind it (loopback, bridge, veth, soft-RoCE over those);
    a virtual function of SR-IOV is hardware, and ``physical_function`` is then its parent's PCI address.
    """

    netdevs: tuple[str, ...]
    rdma_devices: tuple[str, ...]
    state: LinkState
    speed_mbps: int | None = None
    numa_node: int | None = None
    pci_address: str | None = None
    pci_path: tuple[str, ...] = ()
    virtual: bool = False
    physical_function: str | None = None
    virtual_functions: int = 0

    @property
    def name(self) -> str:
        """The name used in a priority matrix: the RDMA device's where there is one, else the interface's."""
        return (self.rdma_devices or self.netdevs)[0]

    @property
    def loopback(self) -> bool:
        return self.netdevs == ("lo",)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU or accelerator on PCI.

    ``cuda_index`` counts NVIDIA devices by PCI address, which is CUDA's numbering under
    ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` and without ``CUDA_VISIBLE_DEVICES``; None for other vendors.
    """

    pci_address: str
    vendor: str
    vendor_id: int
    device_id: int
    class_code: int
    numa_node: int | None
    pci_path: tuple[str, ...]
    cuda_index: int | None = None

    @property
    def location(self) -> str | None:
        return None if self.cuda_index is None else f"cuda:{self.cuda_index}"


@dataclass(frozen=True, slots=True)
class NvmeNamespace:
    """One namespace of an NVMe controller. Sizes in bytes; ``nsid`` is the controller's number for it."""

    name: str
    nsid: int | None
    size_bytes: int | None
    block_bytes: int | None


@dataclass(frozen=True, slots=True)
class Nvme:
    """One NVMe controller. ``transport`` is the kernel's word: pcie, tcp, rdma, fc, loop.

    ``subsystem`` is the NQN of the subsystem it belongs to; ``address`` where a remote one is, as the kernel
    writes it ("traddr=10.0.0.1,trsvcid=4420"), None for a local drive.
    """

    controller: str
    transport: str | None
    model: str | None
    state: str | None
    namespaces: tuple[NvmeNamespace, ...]
    numa_node: int | None = None
    pci_address: str | None = None
    pci_path: tuple[str, ...] = ()
    subsystem: str | None = None
    address: str | None = None


@dataclass(frozen=True, slots=True)
class DaxDevice:
    """One device-DAX range (persistent or CXL memory). ``driver`` is device_dax (mappable) or kmem (a numa
    node).

    ``target_node`` is the numa node that the memory forms or would form; ``numa_node`` the nearest one with
    CPUs. ``device_number`` is (major, minor) of /dev/<name>; ``cxl_region`` the CXL region it is made of.
    """

    name: str
    size_bytes: int | None
    align_bytes: int | None
    target_node: int | None
    numa_node: int | None
    driver: str | None
    pci_path: tuple[str, ...] = ()
    device_number: tuple[int, int] | None = None
    cxl_region: str | None = None

    @property
    def mappable(self) -> bool:
        """True when processes can map it: neither without a driver nor given to the kernel as a numa node."""
        return self.driver == "device_dax"


@dataclass(frozen=True, slots=True)
class CxlRegion:
    """A range of memory woven of CXL memory devices. ``mode`` is ram or pmem; ``uuid`` is of pmem only.

    ``memories`` are the names of its devices in order, "" for one that cannot be told; ``dax_devices`` what
    it is offered as.
    """

    name: str
    size_bytes: int | None
    mode: str | None
    uuid: str | None
    memories: tuple[str, ...] = ()
    dax_devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CxlMemory:
    """One CXL memory device (``/sys/bus/cxl/devices/mem<n>``). Sizes in bytes."""

    name: str
    volatile_bytes: int | None
    persistent_bytes: int | None
    numa_node: int | None
    pci_address: str | None = None
    pci_path: tuple[str, ...] = ()
    serial: int | None = None


@dataclass(frozen=True, slots=True)
class Topology:
    """Everything found on a host, each list in natural order; ``warnings`` has what made no sense."""

    host: Host
    numa_nodes: tuple[NumaNode, ...]
    nics: tuple[Nic, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    nvmes: tuple[Nvme, ...] = ()
    dax_devices: tuple[DaxDevice, ...] = ()
    cxl_memories: tuple[CxlMemory, ...] = ()
    cxl_regions: tuple[CxlRegion, ...] = ()
    pci_devices: tuple[PciDevice, ...] = field(default=(), repr=False)
    warnings: tuple[str, ...] = ()

    def numa_node(self, node: int) -> NumaNode | None:
        return next((found for found in self.numa_nodes if found.id == node), None)

    @property
    def far_nodes(self) -> tuple[NumaNode, ...]:
        """Numa nodes with memory and no CPU."""
        return tuple(node for node in self.numa_nodes if node.cpu_less and node.memory_bytes)

    def numa_of(self, place: Located) -> int | None:
        """The numa node of a device. Where there is only one it is that, though VMs tell none."""
        if place.numa_node is not None:
            return place.numa_node
        return self.numa_nodes[0].id if len(self.numa_nodes) == 1 else None

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers with the field names of these classes, ready for JSON."""
        body = dataclasses.asdict(self)
        for node, made in zip(self.numa_nodes, body["numa_nodes"], strict=True):
            made["cpu_less"] = node.cpu_less
            made["location"] = node.location
        for nic, made in zip(self.nics, body["nics"], strict=True):
            made["name"] = nic.name
        for gpu, made in zip(self.gpus, body["gpus"], strict=True):
            made["location"] = gpu.location
        return {"schema": TOPOLOGY_SCHEMA, **body}
