"""Far memory: DAX devices, CXL memory devices and regions, and what of them can be told apart across hosts.

Sources: the kernel's Documentation/ABI/testing/sysfs-bus-cxl and testing/sysfs-bus-dax.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from moonpool.topology.attributes import Attributes, natural_key
from moonpool.topology.model import CxlMemory, CxlRegion, DaxDevice
from moonpool.topology.pci import PciFunction

DAX: Final = "/sys/bus/dax"
CXL: Final = "/sys/bus/cxl/devices"

_CXL_MEMORY = re.compile(r"mem[0-9]+")
_CXL_REGION = re.compile(r"region[0-9]+")
_CXL_MEMORY_NODE = re.compile(r"^DEVNAME=cxl/(mem[0-9]+)$", re.MULTILINE)
_DECODER = re.compile(r"decoder([0-9]+)\.[0-9]+")
_DAX_DEVICE = re.compile(r"dax[0-9]+\.[0-9]+")
_DAX_REGION = re.compile(r"dax_region[0-9]+")
_DEVICE_NUMBER = re.compile(r"([0-9]{1,7}):([0-9]{1,7})")
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
#: More devices than any region is woven of.
WAYS_MAX: Final = 64


def parse_dax_devices(attributes: Attributes, regions: tuple[CxlRegion, ...] = ()) -> tuple[DaxDevice, ...]:
    """Device-DAX ranges by name, with the driver that holds each and the CXL region each is made of."""
    drivers = {
        name: driver
        for driver in ("device_dax", "kmem")
        for name in attributes.names(f"{DAX}/drivers/{driver}")
    }
    made_of = {name: region.name for region in regions for name in region.dax_devices}
    return tuple(
        DaxDevice(
            name=name,
            size_bytes=attributes.size(f"{DAX}/devices/{name}/size"),
            align_bytes=attributes.size(f"{DAX}/devices/{name}/align"),
            target_node=attributes.numa_node(f"{DAX}/devices/{name}/target_node"),
            numa_node=attributes.numa_node(f"{DAX}/devices/{name}/numa_node"),
            driver=drivers.get(name),
            device_number=_device_number(attributes, f"{DAX}/devices/{name}/dev"),
            cxl_region=made_of.get(name),
        )
        for name in attributes.names(f"{DAX}/devices")
        if _DAX_DEVICE.fullmatch(name)
    )


def _device_number(attributes: Attributes, path: str) -> tuple[int, int] | None:
    text = attributes.text(path)
    if text is None:
        return None
    match = _DEVICE_NUMBER.fullmatch(text)
    if match is None:
        attributes.warn(f"{path}: expected major:minor, found {text[:40]!r}")
        return None
    return int(match[1]), int(match[2])


def parse_cxl_memories(attributes: Attributes, functions: Mapping[str, PciFunction]) -> tuple[CxlMemory, ...]:
    """CXL memory devices by name."""
    owners = {name: f for f in functions.values() for name in f.names if _CXL_MEMORY.fullmatch(name)}
    found: list[CxlMemory] = []
    for name in filter(_CXL_MEMORY.fullmatch, attributes.names(CXL)):
        function = owners.get(name)
        numa_node = attributes.numa_node(f"{CXL}/{name}/numa_node")
        found.append(
            CxlMemory(
                name=name,
                volatile_bytes=attributes.size(f"{CXL}/{name}/ram/size"),
                persistent_bytes=attributes.size(f"{CXL}/{name}/pmem/size"),
                numa_node=function.device.numa_node if function and numa_node is None else numa_node,
                # QEMU, and devices without one, give 0: that tells nobody from anybody.
                serial=attributes.hexadecimal(f"{CXL}/{name}/serial") or None,
                pci_address=function.device.address if function else None,
                pci_path=function.device.pci_path if function else (),
            )
        )
    return tuple(found)


def parse_cxl_regions(attributes: Attributes) -> tuple[CxlRegion, ...]:
    """CXL regions by name: the ranges of memory that decoders weave of memory devices."""
    return tuple(
        CxlRegion(
            name=name,
            size_bytes=attributes.size(f"{CXL}/{name}/size"),
            mode=attributes.text(f"{CXL}/{name}/mode"),
            uuid=_uuid(attributes, f"{CXL}/{name}/uuid"),
            memories=_memories_of(attributes, name),
            dax_devices=_dax_devices_of(attributes, name),
        )
        for name in filter(_CXL_REGION.fullmatch, attributes.names(CXL))
    )


def _uuid(attributes: Attributes, path: str) -> str | None:
    """The uuid of a region of persistent memory; regions of volatile memory have none."""
    text = (attributes.text(path) or "").lower()
    if not text or not text.strip("0-"):
        return None
    if _UUID.fullmatch(text) is None:
        attributes.warn(f"{path}: expected a uuid, found {text[:40]!r}")
        return None
    return text


def _memories_of(attributes: Attributes, region: str) -> tuple[str, ...]:
    """The memory devices that a region is woven of, in order; "" for one that cannot be told."""
    found: list[str] = []
    ways = attributes.integer(f"{CXL}/{region}/interleave_ways") or 0
    if not 0 <= ways <= WAYS_MAX:
        attributes.warn(f"{CXL}/{region}/interleave_ways: {ways} cannot be")
        return ()
    for way in range(ways):
        decoder = _DECODER.fullmatch(attributes.text(f"{CXL}/{region}/target{way}") or "")
        device = attributes.text(f"{CXL}/endpoint{decoder[1]}/uport/uevent") if decoder else None
        match = _CXL_MEMORY_NODE.search(device or "")
        found.append(match[1] if match else "")
    return tuple(found)


def _dax_devices_of(attributes: Attributes, region: str) -> tuple[str, ...]:
    folders = [name for name in attributes.names(f"{CXL}/{region}") if _DAX_REGION.fullmatch(name)]
    return tuple(
        sorted(
            (
                name
                for folder in folders
                for name in attributes.names(f"{CXL}/{region}/{folder}")
                if _DAX_DEVICE.fullmatch(name)
            ),
            key=natural_key,
        )
    )


def pool_identity(
    dax: DaxDevice, regions: tuple[CxlRegion, ...], memories: tuple[CxlMemory, ...]
) -> str | None:
    """What names the memory behind a DAX device on every host that is attached to it; None when nothing does.

    "uuid:<uuid>" of its CXL region, or "serial:<hex>[,<hex>...]" of the memory devices that it is woven of,
    in order. A device that two hosts see as different regions has two identities: then they do not meet.
    """
    region = next((one for one in regions if one.name == dax.cxl_region), None)
    if region is None:
        return None
    if region.uuid is not None:
        return f"uuid:{region.uuid}"
    serials = {memory.name: memory.serial for memory in memories}
    found = [serials.get(name) for name in region.memories]
    if not found or None in found:
        return None
    return "serial:" + ",".join(f"{serial:x}" for serial in found)
