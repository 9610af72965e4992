"""NVMe controllers and namespaces of this host, as sysfs shows them: a pure parser over a `SysfsReader`.

A namespace is known by what it is (subsystem, number, world-wide id), never by what the kernel calls its
devices: names change when a controller goes and another comes. With multipath on, a namespace has one device
under its subsystem and a hidden one for each controller (nvme<subsystem>c<controller>n<k>); with it off, each
controller has a device of its own. Source: drivers/nvme/host/sysfs.c and multipath.c of Linux 6.12.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, final

from moonpool.topology.sysfs import LiveSysfs, SysfsReader
from moonpool.units import KIB

#: What `size` in sysfs counts in, whatever the block size.
SECTOR_BYTES: Final = 512
PAGE_BYTES: Final = 4096
#: More entries than this in one directory are not looked at.
ENTRIES_MAX: Final = 4096
#: States of a controller in which commands run, and in which they may run again without anybody's doing.
LIVE: Final = "live"
COMING_BACK: Final = ("connecting", "resetting", "new")

_CLASS: Final = "/sys/class/nvme-subsystem"
_CONTROLLER: Final = re.compile(r"nvme(\d{1,9})\Z", re.ASCII)
_NAMESPACE: Final = re.compile(r"nvme(\d{1,9})n(\d{1,9})\Z", re.ASCII)
_PATH: Final = re.compile(r"nvme(\d{1,9})c(\d{1,9})n(\d{1,9})\Z", re.ASCII)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Controller:
    """One association with a subsystem. Times are None where the kernel has no such bound (or says off)."""

    name: str
    transport: str
    state: str
    #: Of fabrics: traddr, trsvcid, host_traddr and so on; of PCIe empty.
    address: tuple[tuple[str, str], ...]
    #: The address as the kernel writes it.
    address_text: str
    host_nqn: str
    reconnect_delay_s: int | None
    loss_timeout_s: int | None
    fail_fast_s: int | None

    @property
    def is_fabric(self) -> bool:
        """True for a subsystem reached over a network: tcp, rdma or Fibre Channel."""
        return self.transport in ("tcp", "rdma", "fc")

    @property
    def is_live(self) -> bool:
        """True while commands run."""
        return self.state == LIVE

    @property
    def may_return(self) -> bool:
        """True while the kernel itself tries to bring it back."""
        return self.state in COMING_BACK


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """One namespace that this host sees, and the controllers that lead to it."""

    subsystem_nqn: str
    nsid: int
    #: "uuid.<uuid>", "eui.<hex>", or "nvme.<vendor>-<serial>-<model>-<nsid>" for one with no id of its own.
    wwid: str
    #: The block device, for example "nvme0n1", and the char device, "ng0n1" ("" before Linux 5.13).
    block_name: str
    generic_name: str
    #: "major:minor" of each; "" when there is none.
    block_device: str
    generic_device: str
    #: Of the block device: never given twice, so the same name with another number is another appearance.
    disk_sequence: str
    block_bytes: int
    metadata_bytes: int
    #: As the kernel names the protection format: "none", "T10-DIF-TYPE1-CRC".
    protection: str
    size_bytes: int
    read_only: bool
    #: The longest command, and the most separate pages of memory in one.
    command_bytes_max: int
    segments_max: int
    #: Of memory that the block device reads and writes by itself; the char device takes 4 everywhere.
    memory_align: int
    is_shared: bool
    controllers: tuple[Controller, ...] = field(repr=False)

    @property
    def is_live(self) -> bool:
        """True when a controller leads to it at this moment."""
        return any(controller.is_live for controller in self.controllers)

    @property
    def may_return(self) -> bool:
        """True when it is not there now, but the kernel tries."""
        return not self.is_live and any(controller.may_return for controller in self.controllers)

    @property
    def is_fabric(self) -> bool:
        """True when every way to it is a fabric's."""
        return bool(self.controllers) and all(controller.is_fabric for controller in self.controllers)

    @property
    def appearance(self) -> tuple[str, str, str]:
        """Differs when the same namespace went and came back."""
        return self.generic_device, self.block_device, self.disk_sequence

    @property
    def ids(self) -> frozenset[str]:
        """What names it: its world-wide id with and without what kind of id that is."""
        return frozenset({self.wwid, self.wwid.partition(".")[2]}) - {""}

    def is_same(self, subsystem_nqn: str, nsid: int, wwid: str) -> bool:
        """True when it is the namespace that a peer speaks of."""
        return (self.subsystem_nqn, self.nsid, self.wwid) == (subsystem_nqn, nsid, wwid)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Subsystem:
    """One NVMe subsystem: its controllers and namespaces, by name."""

    name: str
    nqn: str
    model: str
    controllers: tuple[Controller, ...]
    namespaces: tuple[Namespace, ...]


def read_subsystems(reader: SysfsReader | None = None) -> tuple[Subsystem, ...]:
    """All subsystems that this host is attached to; what cannot be read is left out. Costs some 1 ms each."""
    source = LiveSysfs() if reader is None else reader
    names = _natural(name for name in source.list(_CLASS) if name.startswith("nvme-subsys"))
    found = (_subsystem(source, name) for name in names[:ENTRIES_MAX])
    return tuple(subsystem for subsystem in found if subsystem is not None)


def find_namespace(
    subsystems: Iterable[Subsystem], subsystem_nqn: str, nsid: int, wwid: str
) -> Namespace | None:
    """The namespace of that identity; of several devices for it, one that a live controller leads to."""
    found = [one for one in _namespaces(subsystems) if one.is_same(subsystem_nqn, nsid, wwid)]
    return max(found, key=_liveness, default=None)


def namespace_by_name(subsystems: Iterable[Subsystem], name: str) -> Namespace | None:
    """The namespace that a user names: "nvme0n1", "ng0n1", either under /dev, or one of its ids."""
    short = name.removeprefix("/dev/")
    wanted = short.lower()
    found = [
        one
        for one in _namespaces(subsystems)
        if short in (one.block_name, one.generic_name) or wanted in {each.lower() for each in one.ids}
    ]
    return max(found, key=_liveness, default=None)


def _namespaces(subsystems: Iterable[Subsystem]) -> list[Namespace]:
    return [namespace for subsystem in subsystems for namespace in subsystem.namespaces]


def _liveness(namespace: Namespace) -> tuple[bool, bool]:
    return namespace.is_live, namespace.may_return


def _subsystem(reader: SysfsReader, name: str) -> Subsystem | None:
    base = f"{_CLASS}/{name}"
    nqn = reader.read(f"{base}/subsysnqn")
    if not nqn:
        return None
    entries = reader.list(base)[:ENTRIES_MAX]
    controllers = tuple(
        _controller(reader, f"{base}/{entry}", entry)
        for entry in _natural(filter(_CONTROLLER.match, entries))
    )
    found: list[Namespace] = []
    for entry in _natural(filter(_NAMESPACE.match, entries)):
        found.extend(_shared(reader, base, nqn, (entry, controllers)))
    for controller in controllers:
        folder = f"{base}/{controller.name}"
        for entry in _natural(filter(_NAMESPACE.match, reader.list(folder)[:ENTRIES_MAX])):
            found.extend(_namespace(reader, folder, nqn, (entry, (controller,), ())))
    return Subsystem(
        name=name,
        nqn=nqn,
        model=reader.read(f"{base}/model") or "",
        controllers=controllers,
        namespaces=tuple(found),
    )


def _controller(reader: SysfsReader, base: str, name: str) -> Controller:
    address = reader.read(f"{base}/address") or ""
    pairs = (part.partition("=") for part in address.split(",") if "=" in part)
    return Controller(
        name=name,
        transport=reader.read(f"{base}/transport") or "unknown",
        state=reader.read(f"{base}/state") or "unknown",
        address=tuple((key.strip(), value.strip()) for key, _, value in pairs),
        address_text=address,
        host_nqn=reader.read(f"{base}/hostnqn") or "",
        reconnect_delay_s=_number(reader, f"{base}/reconnect_delay"),
        loss_timeout_s=_number(reader, f"{base}/ctrl_loss_tmo"),
        fail_fast_s=_number(reader, f"{base}/fast_io_fail_tmo"),
    )


def _shared(
    reader: SysfsReader, base: str, nqn: str, what: tuple[str, tuple[Controller, ...]]
) -> list[Namespace]:
    """A namespace with multipath: its controllers are those that have a hidden device for it."""
    entry, controllers = what
    match = _NAMESPACE.match(entry)
    assert match is not None
    leading, hidden = [], []
    for controller in controllers:
        folder = f"{base}/{controller.name}"
        for path in reader.list(folder)[:ENTRIES_MAX]:
            of = _PATH.match(path)
            if of is not None and (of[1], of[3]) == (match[1], match[2]):
                leading.append(controller)
                hidden.append(f"{folder}/{path}")
    return _namespace(reader, base, nqn, (entry, tuple(leading), tuple(hidden)))


def _namespace(
    reader: SysfsReader, folder: str, nqn: str, what: tuple[str, tuple[Controller, ...], tuple[str, ...]]
) -> list[Namespace]:
    """One namespace, or none when sysfs does not say what it takes to use it."""
    entry, controllers, hidden = what
    base = f"{folder}/{entry}"
    nsid, sectors = _number(reader, f"{base}/nsid"), _number(reader, f"{base}/size")
    block_bytes = _number(reader, f"{base}/queue/logical_block_size")
    wwid = reader.read(f"{base}/wwid")
    if not nsid or sectors is None or not wwid or not _is_block(block_bytes):
        return []
    assert block_bytes is not None
    limits = [base, *hidden]
    longest = [_number(reader, f"{each}/queue/max_hw_sectors_kb") for each in limits]
    pieces = [_number(reader, f"{each}/queue/max_segments") for each in limits]
    generic = "ng" + entry.removeprefix("nvme")
    return [
        Namespace(
            subsystem_nqn=nqn,
            nsid=nsid,
            wwid=wwid,
            block_name=entry,
            generic_name=generic if generic in reader.list(folder) else "",
            block_device=reader.read(f"{base}/dev") or "",
            generic_device=reader.read(f"{folder}/{generic}/dev") or "",
            disk_sequence=reader.read(f"{base}/diskseq") or "",
            block_bytes=block_bytes,
            metadata_bytes=_number(reader, f"{base}/metadata_bytes") or 0,
            protection=reader.read(f"{base}/integrity/format") or "none",
            size_bytes=sectors * SECTOR_BYTES,
            read_only=reader.read(f"{base}/ro") == "1",
            command_bytes_max=max(block_bytes, KIB * min((n for n in longest if n), default=128)),
            segments_max=max(2, min((n for n in pieces if n), default=32)),
            memory_align=_alignment(_number(reader, f"{base}/queue/dma_alignment")),
            is_shared=bool(hidden),
            controllers=controllers,
        )
    ]


def _is_block(size: int | None) -> bool:
    return size is not None and SECTOR_BYTES <= size <= 64 * KIB and size & (size - 1) == 0


def _alignment(mask: int | None) -> int:
    """From the mask in sysfs; what every kernel took before it told."""
    if mask is None or mask >= PAGE_BYTES or mask & (mask + 1):
        return SECTOR_BYTES
    return mask + 1


def _number(reader: SysfsReader, path: str) -> int | None:
    """A decimal number; None for what is missing, "off", or no number."""
    text = reader.read(path)
    if text is None or len(text) > 20 or not text.isascii() or not text.isdigit():
        return None
    return int(text)


def _natural(names: Iterable[str]) -> list[str]:
    """By the numbers in them: nvme2 before nvme10."""
    return sorted(names, key=lambda name: [int(part) for part in re.findall(r"\d+", name)[:4]])
