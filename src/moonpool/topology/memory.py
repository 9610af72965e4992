"""Memory and disks: numa nodes, NVMe controllers, and the host's own particulars.

Sources: the kernel's Documentation/ABI/stable/sysfs-devices-node, testing/sysfs-nvme and proc(5).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from moonpool.topology.attributes import Attributes, natural_key
from moonpool.topology.model import Host, NumaNode, Nvme, NvmeNamespace
from moonpool.topology.pci import PciFunction

NODES = "/sys/devices/system/node"
NVME = "/sys/class/nvme"
SECTOR_BYTES = 512
"""The unit of a block device's ``size`` attribute, whatever its own block size is."""

_NODE = re.compile(r"node([0-9]{1,4})")
_MEM_TOTAL = re.compile(r"^(?:Node [0-9]+ )?MemTotal:\s+([0-9]{1,15}) kB$", re.MULTILINE)
_MODEL_NAME = re.compile(r"^(?:model name|Model Name|cpu model|CPU part)\s*:\s*(.+)$", re.MULTILINE)
_HYPERVISOR = re.compile(r"^flags\s*:.*\bhypervisor\b", re.MULTILINE)
_NVME_CONTROLLER = re.compile(r"nvme[0-9]+")
# nvme0n1, or with native multipath nvme0c1n1: subsystem 0, controller 1, namespace 1, whose head is nvme0n1.
_NVME_NAMESPACE = re.compile(r"nvme([0-9]+)(?:c[0-9]+)?n([0-9]+)")


def parse_host(attributes: Attributes) -> Host:
    """Name, kernel, processor and memory of the machine."""
    cpuinfo = attributes.text("/proc/cpuinfo") or ""
    model = _MODEL_NAME.search(cpuinfo)
    return Host(
        hostname=attributes.text("/proc/sys/kernel/hostname"),
        kernel=attributes.text("/proc/sys/kernel/osrelease"),
        cpu_model=model[1].strip() if model else None,
        product=attributes.text("/sys/class/dmi/id/product_name"),
        hypervisor=_HYPERVISOR.search(cpuinfo) is not None,
        memory_bytes=_memory_total(attributes, "/proc/meminfo"),
    )


def parse_numa_nodes(attributes: Attributes) -> tuple[NumaNode, ...]:
    """Numa nodes by id; a kernel without numa support gives one node 0 that holds everything."""
    present = {int(m[1]) for name in attributes.names(NODES) if (m := _NODE.fullmatch(name))}
    online = set(attributes.id_list(f"{NODES}/online", attributes.limits.numa_nodes_max)) & present
    ids = sorted(online or present)
    if not ids:
        cpus = attributes.id_list("/sys/devices/system/cpu/online", attributes.limits.cpus_max)
        return (NumaNode(0, cpus, _memory_total(attributes, "/proc/meminfo") or 0),)
    return tuple(
        NumaNode(
            id=node,
            cpus=attributes.id_list(f"{NODES}/node{node}/cpulist", attributes.limits.cpus_max),
            memory_bytes=_memory_total(attributes, f"{NODES}/node{node}/meminfo") or 0,
            distances=_distances(attributes, node, ids),
        )
        for node in ids
    )


def _memory_total(attributes: Attributes, path: str) -> int | None:
    match = _MEM_TOTAL.search(attributes.text(path) or "")
    return int(match[1]) * 1024 if match else None


def _distances(attributes: Attributes, node: int, ids: list[int]) -> tuple[tuple[int, int], ...]:
    path = f"{NODES}/node{node}/distance"
    values = (attributes.text(path) or "").split()
    if not values:
        return ()
    if len(values) != len(ids) or not all(re.fullmatch("[0-9]{1,3}", value) for value in values):
        attributes.warn(f"{path}: expected {len(ids)} distances, found {' '.join(values)[:40]!r}")
        return ()
    return tuple(zip(ids, map(int, values), strict=True))


def parse_nvmes(attributes: Attributes, functions: Mapping[str, PciFunction]) -> tuple[Nvme, ...]:
    """NVMe controllers by name, local and over fabrics."""
    found: list[Nvme] = []
    for controller in filter(_NVME_CONTROLLER.fullmatch, attributes.names(NVME)):
        folder = f"{NVME}/{controller}"
        address = attributes.text(f"{folder}/address")
        function = functions.get(address or "")
        found.append(
            Nvme(
                controller=controller,
                transport=attributes.text(f"{folder}/transport"),
                model=attributes.text(f"{folder}/model"),
                state=attributes.text(f"{folder}/state"),
                namespaces=_namespaces(attributes, folder),
                numa_node=function.device.numa_node
                if function
                else attributes.numa_node(f"{folder}/numa_node"),
                pci_address=function.device.address if function else None,
                pci_path=function.device.pci_path if function else (),
                subsystem=attributes.text(f"{folder}/subsysnqn"),
                address=None if function else address,
            )
        )
    return tuple(found)


def _namespaces(attributes: Attributes, folder: str) -> tuple[NvmeNamespace, ...]:
    heads = {
        f"nvme{m[1]}n{m[2]}" for name in attributes.names(folder) if (m := _NVME_NAMESPACE.fullmatch(name))
    }
    found: list[NvmeNamespace] = []
    for name in sorted(heads, key=natural_key):
        sectors = attributes.size(f"/sys/block/{name}/size")
        found.append(
            NvmeNamespace(
                name=name,
                nsid=attributes.integer(f"/sys/block/{name}/nsid"),
                size_bytes=None if sectors is None else sectors * SECTOR_BYTES,
                block_bytes=attributes.size(f"/sys/block/{name}/queue/logical_block_size"),
            )
        )
    return tuple(found)
