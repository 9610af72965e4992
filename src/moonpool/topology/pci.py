"""The PCI tree. Source: the kernel's Documentation/ABI/testing/sysfs-bus-pci.

Each directory below /sys/bus/pci/devices lists its child functions by address, so the tree follows from those
listings alone, wherever the host bridge hangs (ACPI root, platform bus on ARM, VMBus in a guest).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from moonpool.topology.attributes import Attributes
from moonpool.topology.model import Gpu, PciDevice

PCI_DEVICES = "/sys/bus/pci/devices"
PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

GPU_CLASSES = frozenset({0x0300, 0x0302, 0x0380, 0x1200})
"""VGA and 3D controllers; AMD Instinct and Gaudi call themselves "other display" or "accelerator"."""

VENDORS: Mapping[int, str] = {
    0x1002: "AMD",
    0x10DE: "NVIDIA",
    0x1234: "QEMU",
    0x13A3: "Iluvatar",
    0x15B3: "Mellanox",
    0x1A03: "ASPEED",
    0x1AF4: "virtio",
    0x1DA3: "Habana",
    0x1D0F: "Amazon",
    0x1ED5: "Moore Threads",
    0x19E5: "Huawei",
    0x8086: "Intel",
    0x9999: "MetaX",
    0xCABC: "Cambricon",
}
"""Names of the vendor ids met as GPU or NIC, from the PCI id registry; others are shown as a number."""

NVIDIA = 0x10DE


@dataclass(frozen=True, slots=True)
class PciFunction:
    """A device of the tree, and the names in its directory: the kernel objects that hang below it."""

    device: PciDevice
    names: tuple[str, ...]

    @property
    def folder(self) -> str:
        return f"{PCI_DEVICES}/{self.device.address}"


def parse_pci(attributes: Attributes) -> dict[str, PciFunction]:
    """All PCI functions by address, ascending; empty on a host without PCI."""
    listings = {
        address: attributes.names(f"{PCI_DEVICES}/{address}")
        for address in attributes.names(PCI_DEVICES)
        if PCI_ADDRESS.fullmatch(address)
    }
    parents = {
        child: address
        for address, names in listings.items()
        for child in names
        if child in listings and child != address
    }
    functions: dict[str, PciFunction] = {}
    for address in sorted(listings, key=_pci_order):
        path = _path_to(address, parents, attributes)
        functions[address] = PciFunction(_parse_function(attributes, address, path), listings[address])
    return functions


def _pci_order(address: str) -> tuple[int, ...]:
    """Sort key: domain, bus, device and function as numbers, since domains differ in length."""
    return tuple(int(part, 16) for part in re.split("[:.]", address))


def _path_to(address: str, parents: Mapping[str, str], attributes: Attributes) -> tuple[str, ...]:
    """Addresses from the host bridge (written pci<domain>:<bus> as the kernel does) down to ``address``."""
    chain = [address]
    while (parent := parents.get(chain[-1])) is not None:
        if parent in chain or len(chain) > attributes.limits.pci_depth_max:
            attributes.warn(f"{PCI_DEVICES}/{address}: its bridges form no tree, its place is not known")
            return (address,)
        chain.append(parent)
    domain, bus, _ = chain[-1].split(":")
    return (f"pci{domain}:{bus}", *reversed(chain))


def _parse_function(attributes: Attributes, address: str, path: tuple[str, ...]) -> PciDevice:
    folder = f"{PCI_DEVICES}/{address}"
    class_code = attributes.hexadecimal(f"{folder}/class")
    return PciDevice(
        address=address,
        class_code=0 if class_code is None else class_code >> 8,  # the low byte is the programming interface
        vendor=attributes.hexadecimal(f"{folder}/vendor") or 0,
        device=attributes.hexadecimal(f"{folder}/device") or 0,
        numa_node=attributes.numa_node(f"{folder}/numa_node"),
        pci_path=path,
    )


def parse_gpus(functions: Mapping[str, PciFunction]) -> tuple[Gpu, ...]:
    """GPUs and accelerators by PCI address; NVIDIA's are numbered as CUDA does in PCI order."""
    gpus: list[Gpu] = []
    cuda_devices = 0
    for function in functions.values():
        device = function.device
        if device.class_code not in GPU_CLASSES:
            continue
        gpus.append(
            Gpu(
                pci_address=device.address,
                vendor=VENDORS.get(device.vendor, f"vendor {device.vendor:#06x}"),
                vendor_id=device.vendor,
                device_id=device.device,
                class_code=device.class_code,
                numa_node=device.numa_node,
                pci_path=device.pci_path,
                cuda_index=cuda_devices if device.vendor == NVIDIA else None,
            )
        )
        cuda_devices += device.vendor == NVIDIA
    return tuple(gpus)
