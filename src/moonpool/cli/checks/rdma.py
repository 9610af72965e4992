"""RDMA: each device opened for real: its ports, the GID that would be used, whether memory can be pinned."""

from __future__ import annotations

import importlib.util
import mmap
import re
import resource
from collections.abc import Sequence
from ctypes import addressof, c_char
from typing import TYPE_CHECKING, Final

from moonpool.cli.checks.check import Check, Level
from moonpool.errors import MoonpoolError, TransportUnavailable
from moonpool.topology import SysfsReader
from moonpool.units import KIB, MIB, TIB, format_size

if TYPE_CHECKING:
    from moonpool.native.verbs.attributes import DeviceAttributes, GidEntry, PortAttributes
    from moonpool.native.verbs.devices import Device

GROUP: Final = "rdma"
BINDING: Final = "moonpool.native.verbs.devices"
PINNED_WANTED: Final = 64 * MIB
TRIAL_BYTES: Final = 64 * KIB
CAP_IPC_LOCK: Final = 1 << 14
#: Devices and ports of one that are looked at.
DEVICES_MAX: Final = 64
#: Kernel modules by which drivers pin memory of GPUs where there are no dma-bufs.
PEER_MEMORY: Final = ("nvidia_peermem", "nv_peer_mem", "ib_peer_mem")


def check_rdma(reader: SysfsReader) -> list[Check]:
    """Devices, ports and limits; one line that says why where there is nothing to look at."""
    in_kernel = reader.list("/sys/class/infiniband")
    if importlib.util.find_spec(BINDING) is None:
        return [_absent("our binding is not built", "install libibverbs-dev, then reinstall moonpool")]
    from moonpool.native.verbs.devices import default_library

    try:
        library = default_library()
        names = library.device_names()[:DEVICES_MAX]
    except TransportUnavailable as exc:
        return [_absent(exc.reason or str(exc), exc.how_to_get_it or "")]
    except MoonpoolError as exc:
        return [Check(GROUP, "devices", Level.WARN, str(exc), "let this user open /dev/infiniband/uverbs*")]
    found = [judge_listing(names, in_kernel)]
    for name in names:
        found += examine_device(name)
    if names:
        found.append(judge_pinning(*_limits(reader)))
        found.append(judge_device_memory(library.has_dmabuf, reader.read("/proc/modules") or ""))
    return found


def _absent(detail: str, advice: str) -> Check:
    return Check(GROUP, "devices", Level.INFO, f"rdma cannot be used: {detail}", advice)


def judge_listing(names: Sequence[str], in_kernel: Sequence[str]) -> Check:
    """What libibverbs lists, against what the kernel has: it misses devices without a node or a provider."""
    lost = [name for name in in_kernel if name not in names]
    if lost:
        return Check(
            GROUP,
            "devices",
            Level.WARN,
            f"the kernel has {', '.join(lost)}, but libibverbs cannot use it",
            "apt-get install ibverbs-providers, and let /dev/infiniband/uverbs* into the container",
        )
    if not names:
        advice = "none is needed; where there should be one, look at the driver's messages in dmesg"
        return Check(GROUP, "devices", Level.INFO, "no RDMA device", advice)
    return Check(GROUP, "devices", Level.OK, ", ".join(names))


def examine_device(name: str) -> list[Check]:
    """Opens one device, looks at its ports, and registers a little memory on it; all is closed again."""
    from moonpool.native.verbs.devices import Device, default_library

    try:
        device = Device(default_library(), name)
        try:
            attributes = device.attributes()
            ports = range(1, min(attributes.ports, DEVICES_MAX) + 1)
            found = [judge_port(attributes, device.port(port), device.gids(port)) for port in ports]
            return [*found, *_try_pinning(device)]
        finally:
            device.close()
    except MoonpoolError as exc:
        return [Check(GROUP, name, Level.WARN, str(exc), "look at the driver's messages in dmesg")]


def _try_pinning(device: Device) -> list[Check]:
    """A finding when a small region cannot be registered, else nothing."""
    from moonpool.native.verbs.attributes import LOCAL_WRITE
    from moonpool.native.verbs.memory import register

    with mmap.mmap(-1, TRIAL_BYTES) as memory:
        first = c_char.from_buffer(memory)
        try:
            register([device], addressof(first), TRIAL_BYTES, LOCAL_WRITE).close()
        except MoonpoolError as exc:
            advice = "ulimit -l unlimited; in a container --ulimit memlock=-1"
            return [Check(GROUP, f"{device.name} memory", Level.WARN, str(exc), advice)]
        finally:
            del first  # it would keep the mapping open
    return []


def judge_port(attributes: DeviceAttributes, port: PortAttributes, gids: Sequence[GidEntry]) -> Check:
    """Whether a port can be used, and by which GID it would be."""
    from moonpool.native.verbs.attributes import MTU_BYTES, GidKind, LinkLayer
    from moonpool.transport.rdma_gids import choose_gid, is_routable

    name = attributes.name if attributes.ports == 1 else f"{attributes.name}:{port.number}"
    shown = f"{port.state_name}, {port.link_layer}"
    if port.gbits_per_s:
        shown += f" {port.gbits_per_s:g} Gb/s"
    shown += f", MTU {MTU_BYTES.get(port.active_mtu, '?')}"
    if not port.active:
        advice = "set the network interface up, and look at cable and switch"
        if port.link_layer is LinkLayer.INFINIBAND:
            advice = "look at cable and switch; an INIT port waits for a subnet manager (opensm)"
        return Check(GROUP, name, Level.WARN, shown, advice)
    try:
        choice = choose_gid(gids, port.link_layer)
    except MoonpoolError as exc:
        return Check(GROUP, name, Level.WARN, f"{shown}; {exc}", "ip addr add ... on its network interface")
    shown += f"; GID {choice.entry.index}: {choice.reason}; {_bounds(attributes)}"
    if port.link_layer is LinkLayer.INFINIBAND:
        return Check(GROUP, name, Level.OK, f"{shown}; LID {port.lid}")
    if choice.entry.kind is not GidKind.ROCE_2:
        advice = "RoCE v1 is not routed: turn on RoCE v2 (cma_roce_mode, or the driver's setting)"
        return Check(GROUP, name, Level.WARN, shown, advice)
    if not is_routable(choice.entry.gid):
        advice = "give its network interface an address: a link-local one reaches one link only"
        return Check(GROUP, name, Level.WARN, shown, advice)
    return Check(GROUP, name, Level.OK, shown)


def _bounds(attributes: DeviceAttributes) -> str:
    largest = attributes.max_mr_bytes
    regions = "of any size" if largest >= 1024 * TIB else f"up to {format_size(largest)}"
    paging = "with" if attributes.on_demand_paging else "without"
    return f"regions {regions}, {paging} on-demand paging"


def judge_pinning(soft: int, unbound: bool) -> Check:
    """The soft RLIMIT_MEMLOCK in bytes; ``unbound``: CAP_IPC_LOCK frees this process of it."""
    name = "pinned memory"
    if unbound:
        return Check(GROUP, name, Level.OK, "no limit: this process has CAP_IPC_LOCK")
    if soft == resource.RLIM_INFINITY:
        return Check(GROUP, name, Level.OK, "no limit")
    level = Level.INFO if soft >= PINNED_WANTED else Level.WARN
    return Check(
        GROUP,
        name,
        level,
        f"RLIMIT_MEMLOCK is {format_size(soft)}: larger regions cannot be registered",
        "ulimit -l unlimited (LimitMEMLOCK=infinity in systemd, --ulimit memlock=-1 in Docker)",
    )


def judge_device_memory(has_dmabuf: bool, modules: str) -> Check:
    """Whether memory of GPUs could be registered; ``modules`` is /proc/modules."""
    name = "device memory"
    loaded = [each for each in PEER_MEMORY if re.search(rf"^{each} ", modules, re.MULTILINE)]
    ways = [*(["dma-bufs (the driver must agree)"] if has_dmabuf else []), *loaded]
    if ways:
        return Check(GROUP, name, Level.OK, f"libibverbs and kernel offer {', '.join(ways)}")
    advice = "install rdma-core 34 or newer, or load nvidia_peermem; without either GPU memory is staged"
    return Check(GROUP, name, Level.INFO, "cannot be registered", advice)


def _limits(reader: SysfsReader) -> tuple[int, bool]:
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)$", reader.read("/proc/self/status") or "", re.MULTILINE)
    unbound = capabilities is not None and bool(int(capabilities[1], 16) & CAP_IPC_LOCK)
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], unbound
