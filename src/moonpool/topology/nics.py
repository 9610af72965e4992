"""Network functions.

Sources: the kernel's Documentation/ABI/testing/sysfs-class-net and stable/sysfs-class-infiniband.
A NIC shows up as interfaces (/sys/class/net), as RDMA devices (/sys/class/infiniband), or both; what hangs
below one PCI function is one ``Nic``. Interfaces that no PCI function owns are on another bus (``device``
exists) or virtual.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from moonpool.topology.attributes import Attributes, natural_key
from moonpool.topology.model import LinkState, Nic
from moonpool.topology.pci import PCI_ADDRESS, PciFunction

NET = "/sys/class/net"
INFINIBAND = "/sys/class/infiniband"

# Devices between a PCI function and its interfaces: virtio, and the sub-functions of mlx5.
_BETWEEN = re.compile(r"virtio[0-9]+|[a-z0-9_]+\.sf\.[0-9]+")
_RATE = re.compile(r"([0-9]{1,6})(?:\.([0-9]))?[0-9]* Gb/sec.*")
_SLOT = re.compile(r"PCI_SLOT_NAME=(\S+)")


@dataclass(slots=True)
class _Draft:
    """A NIC while its interfaces and RDMA devices are being gathered."""

    function: PciFunction | None = None
    netdevs: set[str] = field(default_factory=set)
    rdma_devices: set[str] = field(default_factory=set)


def parse_nics(attributes: Attributes, functions: Mapping[str, PciFunction]) -> tuple[Nic, ...]:
    """All NICs, those on PCI first by address, then the others by name."""
    drafts = [
        draft for function in functions.values() if (draft := _draft_of(attributes, function)) is not None
    ]
    owners = {name: draft for draft in drafts for name in draft.netdevs}
    for name in attributes.names(NET):
        # A file here (bonding_masters) is no interface, and lists nothing.
        if name not in owners and attributes.names(f"{NET}/{name}"):
            owners[name] = _Draft(netdevs={name})
            drafts.append(owners[name])
    owned = {name for draft in drafts for name in draft.rdma_devices}
    for name in attributes.names(INFINIBAND):
        if name in owned:
            continue
        owner = owners.get(_netdev_under(attributes, name) or "")
        if owner is None:
            drafts.append(_Draft(rdma_devices={name}))
        else:
            owner.rdma_devices.add(name)
    return tuple(_finish(attributes, draft) for draft in drafts)


def _draft_of(attributes: Attributes, function: PciFunction) -> _Draft | None:
    draft = _Draft(function)
    for folder, names in _folders_below(attributes, function):
        if "net" in names:
            draft.netdevs.update(attributes.names(f"{folder}/net"))
        if "infiniband" in names:
            draft.rdma_devices.update(attributes.names(f"{folder}/infiniband"))
    return draft if draft.netdevs or draft.rdma_devices else None


def _folders_below(attributes: Attributes, function: PciFunction) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield function.folder, function.names
    for name in function.names:
        if _BETWEEN.fullmatch(name):
            folder = f"{function.folder}/{name}"
            yield folder, attributes.names(folder)


def _netdev_under(attributes: Attributes, rdma_device: str) -> str | None:
    """The interface a software RDMA device (rxe, siw) runs on: its ``parent``, or that of its first GID."""
    return attributes.text(f"{INFINIBAND}/{rdma_device}/parent") or attributes.text(
        f"{INFINIBAND}/{rdma_device}/ports/1/gid_attrs/ndevs/0"
    )


def _finish(attributes: Attributes, draft: _Draft) -> Nic:
    netdevs = tuple(sorted(draft.netdevs, key=natural_key))
    rdma_devices = tuple(sorted(draft.rdma_devices, key=natural_key))
    states = {_netdev_state(attributes, name) for name in netdevs}
    speeds = [_netdev_speed(attributes, name) for name in netdevs]
    for name in rdma_devices:
        for port in attributes.names(f"{INFINIBAND}/{name}/ports"):
            states.add(_port_state(attributes, f"{INFINIBAND}/{name}/ports/{port}"))
            speeds.append(_port_speed(attributes, f"{INFINIBAND}/{name}/ports/{port}"))
    state = next((s for s in (LinkState.ACTIVE, LinkState.DOWN) if s in states), LinkState.UNKNOWN)
    speed = max((s for s in speeds if s is not None), default=None)
    if draft.function is None:
        device = f"{NET}/{netdevs[0]}" if netdevs else f"{INFINIBAND}/{rdma_devices[0]}"
        return Nic(
            netdevs=netdevs,
            rdma_devices=rdma_devices,
            state=state,
            speed_mbps=speed,
            numa_node=attributes.numa_node(f"{device}/device/numa_node"),
            virtual="device" not in attributes.names(device),
        )
    pci = draft.function.device
    return Nic(
        netdevs=netdevs,
        rdma_devices=rdma_devices,
        state=state,
        speed_mbps=speed,
        numa_node=pci.numa_node,
        pci_address=pci.address,
        pci_path=pci.pci_path,
        physical_function=_physical_function(attributes, draft.function),
        virtual_functions=max(0, attributes.integer(f"{draft.function.folder}/sriov_numvfs") or 0),
    )


def _physical_function(attributes: Attributes, function: PciFunction) -> str | None:
    """PCI address of the physical function behind a virtual one; None for any other function."""
    if "physfn" not in function.names:
        return None
    match = _SLOT.search(attributes.text(f"{function.folder}/physfn/uevent") or "")
    if match is None or not PCI_ADDRESS.fullmatch(match[1]):
        attributes.warn(f"{function.folder}/physfn: the physical function cannot be told")
        return None
    return match[1]


def _netdev_state(attributes: Attributes, name: str) -> LinkState:
    match attributes.text(f"{NET}/{name}/operstate"):
        case "up":
            return LinkState.ACTIVE
        case "down" | "lowerlayerdown" | "dormant" | "notpresent":
            return LinkState.DOWN
    # Drivers without operational state (loopback, tun) still tell whether they have a carrier.
    carrier = attributes.text(f"{NET}/{name}/carrier")
    return {"1": LinkState.ACTIVE, "0": LinkState.DOWN}.get(carrier or "", LinkState.UNKNOWN)


def _netdev_speed(attributes: Attributes, name: str) -> int | None:
    speed = attributes.integer(f"{NET}/{name}/speed")
    # -1, or 2**32 - 1 from old kernels: the driver does not know.
    return speed if speed is not None and 0 < speed < 0xFFFFFFFF else None


def _port_state(attributes: Attributes, port: str) -> LinkState:
    state = attributes.text(f"{port}/state")  # e.g. "4: ACTIVE"
    if state is None:
        return LinkState.UNKNOWN
    return LinkState.ACTIVE if state.startswith("4:") else LinkState.DOWN


def _port_speed(attributes: Attributes, port: str) -> int | None:
    match = _RATE.fullmatch(attributes.text(f"{port}/rate") or "")  # e.g. "400 Gb/sec (4X NDR)"
    return int(match[1]) * 1000 + int(match[2] or 0) * 100 if match else None
