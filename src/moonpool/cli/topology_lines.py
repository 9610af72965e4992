"""One line of text for each part of a host."""

from __future__ import annotations

from collections.abc import Iterable

from moonpool.topology import (
    CxlMemory,
    CxlRegion,
    DaxDevice,
    Gpu,
    Host,
    Nic,
    NumaNode,
    Nvme,
    Topology,
    pool_identity,
)
from moonpool.units import format_size


def host_line(host: Host) -> str:
    """Name, processor, kernel and memory of a host."""
    facts = [host.cpu_model, host.product, f"Linux {host.kernel}" if host.kernel else None]
    facts.append("virtual machine" if host.hypervisor else None)
    facts.append(_size(host.memory_bytes) if host.memory_bytes else None)
    shown = ", ".join(fact for fact in facts if fact)
    return f"{host.hostname or 'host'}: {shown}" if shown else host.hostname or "host"


def node_line(node: NumaNode) -> str:
    """CPUs, memory and distances of a numa node."""
    cpus = f"CPUs {ranges(node.cpus)}" if node.cpus else "no CPUs"
    distances = ", ".join(f"{value} to {id_}" for id_, value in node.distances if id_ != node.id)
    return f"{node.location}: {cpus}, {_size(node.memory_bytes)}" + (
        f" (distance {distances})" if distances else ""
    )


def lines_by_node(topology: Topology) -> dict[int | None, list[str]]:
    """The lines of everything but numa nodes, by the node they are attached to, None for unknown ones."""
    grouped: dict[int | None, list[str]] = {}
    for gpu in topology.gpus:
        grouped.setdefault(topology.numa_of(gpu), []).append(gpu_line(gpu))
    for nic in topology.nics:
        node = None if nic.virtual and nic.numa_node is None else topology.numa_of(nic)
        grouped.setdefault(node, []).append(nic_line(nic))
    for disk in topology.nvmes:
        grouped.setdefault(topology.numa_of(disk), []).append(nvme_line(disk))
    for memory in topology.cxl_memories:
        grouped.setdefault(topology.numa_of(memory), []).append(cxl_line(memory))
    homes = {memory.name: topology.numa_of(memory) for memory in topology.cxl_memories}
    for region in topology.cxl_regions:
        home = next((homes[name] for name in region.memories if name in homes), None)
        grouped.setdefault(home, []).append(region_line(region))
    for dax in topology.dax_devices:
        identity = pool_identity(dax, topology.cxl_regions, topology.cxl_memories)
        grouped.setdefault(topology.numa_of(dax), []).append(dax_line(dax, identity))
    return grouped


def gpu_line(gpu: Gpu) -> str:
    """Kind and place of a GPU."""
    place = f"at {gpu.pci_address}{_bridges(gpu.pci_path)}"
    return f"GPU {gpu.location or '-'}: {gpu.vendor} {gpu.device_id:04x} {place}"


def nic_line(nic: Nic) -> str:
    """State, speed, names and place of a NIC."""
    facts = [str(nic.state)]
    if nic.speed_mbps is not None:
        facts.append(f"{nic.speed_mbps / 1000:g} Gbit/s")
    if nic.rdma_devices and nic.netdevs:
        facts.append(f"interface {' '.join(nic.netdevs)}")
    if nic.virtual:
        facts.append("virtual")
    if nic.virtual_functions:
        facts.append(f"{nic.virtual_functions} virtual functions")
    if nic.physical_function:
        facts.append(f"virtual function of {nic.physical_function}")
    place = f" at {nic.pci_address}{_bridges(nic.pci_path)}" if nic.pci_address else ""
    return f"NIC {nic.name}: {', '.join(facts)}{place}"


def nvme_line(disk: Nvme) -> str:
    """Model, namespaces and place of an NVMe controller."""
    spaces = " ".join(
        f"{space.name} ({_size(space.size_bytes)})" if space.size_bytes else space.name
        for space in disk.namespaces
    )
    remote = _remote_place(disk.address) if disk.address else ""
    facts = [fact for fact in (disk.model, disk.transport, remote, disk.state, spaces) if fact]
    place = f" at {disk.pci_address}{_bridges(disk.pci_path)}" if disk.pci_address else ""
    return f"NVMe {disk.controller}: {', '.join(facts)}{place}"


def _remote_place(address: str) -> str:
    """ "host:port" of a remote NVMe controller, or what else the kernel calls its address."""
    facts = dict(fact.split("=", 1) for fact in address.split(",") if "=" in fact)
    host, port = facts.get("traddr"), facts.get("trsvcid")
    return f"{host}:{port}" if host and port else host or address


def cxl_line(memory: CxlMemory) -> str:
    """Sizes, serial number and place of a CXL memory device."""
    place = f" at {memory.pci_address}" if memory.pci_address else ""
    serial = f", serial {memory.serial:x}" if memory.serial is not None else ""
    sizes = f"{_size(memory.volatile_bytes)} volatile, {_size(memory.persistent_bytes)} persistent"
    return f"CXL {memory.name}: {sizes}{serial}{place}"


def dax_line(dax: DaxDevice, identity: str | None = None) -> str:
    """Size, use and origin of a DAX range, and what names its memory on every host."""
    use = {
        "kmem": f"is numa node {dax.target_node}",
        "device_dax": f"can be mapped, would be numa node {dax.target_node}",
    }.get(dax.driver or "", "no driver")
    facts = [_size(dax.size_bytes), use, f"of {dax.cxl_region}" if dax.cxl_region else "", identity or ""]
    return f"DAX {dax.name}: {', '.join(fact for fact in facts if fact)}"


def region_line(region: CxlRegion) -> str:
    """Size, kind and parts of a CXL region."""
    parts = " ".join(name or "?" for name in region.memories)
    facts = [_size(region.size_bytes), region.mode, f"woven of {parts}" if parts else "", region.uuid]
    return f"CXL {region.name}: {', '.join(fact for fact in facts if fact)}"


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers the way the kernel writes them: "0-3,8"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _size(size_bytes: int | None) -> str:
    return "unknown size" if size_bytes is None else format_size(size_bytes)


def _bridges(path: tuple[str, ...]) -> str:
    """The way down to the device, without the device itself."""
    return f" below {' / '.join(path[:-1])}" if len(path) > 1 else ""
