"""What an owner offers of a namespace: a range, checked, and claimed among the others of its process."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from moonpool.errors import ResourceError, UsageError
from moonpool.native.nvmeof.namespace import NamespaceRegion
from moonpool.topology.sysfs import SysfsReader
from moonpool.transport.nvme_attribute import TARGETS_MAX, NamespaceRange, Target
from moonpool.transport.nvme_devices import check_unused
from moonpool.transport.nvme_sysfs import Namespace, namespace_by_name, read_subsystems

PREFIX: Final = "nvme:"
_HOW: Final = frozenset({"offset", "passthrough", "fua"})
#: The kernel itself makes and checks protection information of these namespaces, on their block device.
_PROTECTED: Final = "T10-DIF"


@final
@dataclass(eq=False, slots=True)
class NamespaceBacking:
    """A range of a namespace as a region; it has no address here. Its blocks are its own to the last."""

    about: NamespaceRange
    writable: bool
    location: str
    range: NamespaceRegion
    claims: Claims

    @property
    def address(self) -> int:
        """None: bytes of a device."""
        return 0

    @property
    def size_bytes(self) -> int:
        """The size that was asked for, whole blocks or not."""
        return self.about.size_bytes

    def close(self) -> None:
        """Others may offer the range."""
        self.claims.give_up(self.about)


@final
class Claims:
    """The ranges that this process offers: none overlaps another, not even in one block. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: list[NamespaceRange] = []

    def take(self, about: NamespaceRange) -> None:
        """UsageError when a block of it is offered already."""
        with self._lock:
            for other in self._taken:
                if identity_of(other) == identity_of(about) and _overlap(other, about):
                    raise UsageError(
                        f"bytes {about.offset} to {about.offset + about.size_bytes} share a block with a "
                        f"range that is offered already, {other.offset} to {other.offset + other.size_bytes}",
                        field="offset",
                    )
            self._taken.append(about)

    def give_up(self, about: NamespaceRange) -> None:
        """The range is free again; idempotent."""
        with self._lock:
            self._taken = [other for other in self._taken if other is not about]


def identity_of(about: NamespaceRange) -> tuple[str, int, str]:
    """Which namespace it is."""
    return about.subsystem_nqn, about.nsid, about.wwid


def _overlap(one: NamespaceRange, other: NamespaceRange) -> bool:
    def end(about: NamespaceRange) -> int:
        return about.offset + -(-about.size_bytes // about.block_bytes) * about.block_bytes

    return one.offset < end(other) and other.offset < end(one)


def find_offered(location: str, reader: SysfsReader | None = None) -> Namespace:
    """The namespace that an offer names; UsageError says which there are."""
    subsystems = read_subsystems(reader)
    name = location.removeprefix(PREFIX)
    found = namespace_by_name(subsystems, name)
    if found is None:
        names = [one.block_name for subsystem in subsystems for one in subsystem.namespaces]
        seen = f"there are {', '.join(names)}" if names else "it sees none (see `moonpool nvmf list`)"
        raise UsageError(f"this host sees no NVMe namespace {name!r}: {seen}", field="location")
    return found


def plan_range(namespace: Namespace, size_bytes: int | None, how: Mapping[str, Any]) -> NamespaceRange:
    """The range that is asked for; UsageError names what is wrong, with the geometry that would be right."""
    unknown = sorted(how.keys() - _HOW)
    if unknown:
        raise UsageError(f"an nvme region has no option {unknown[0]!r}", field=unknown[0])
    offset, fua = how.get("offset", 0), how.get("fua", False)
    passthrough = how.get("passthrough", "auto")
    block = namespace.block_bytes
    if type(offset) is not int or offset < 0 or offset % block:
        raise UsageError(f"offset={offset!r} must be a multiple of the block size, {block}", field="offset")
    if passthrough not in ("auto", "yes", "no"):
        raise UsageError(f"passthrough={passthrough!r} must be auto, yes or no", field="passthrough")
    if type(fua) is not bool:
        raise UsageError(f"fua={fua!r} must be true or false", field="fua")
    room = namespace.size_bytes - offset
    size = room if size_bytes is None else size_bytes
    if type(size) is not int or not 0 < size <= room:
        raise UsageError(
            f"{size} bytes at {offset} are not inside the namespace's {namespace.size_bytes}",
            field="size_bytes",
        )
    return NamespaceRange(
        subsystem_nqn=namespace.subsystem_nqn,
        nsid=namespace.nsid,
        wwid=namespace.wwid,
        block_bytes=block,
        offset=offset,
        size_bytes=size,
        fua=fua,
        passthrough=_possible_way(namespace, passthrough),
        targets=targets_of(namespace),
    )


def _possible_way(namespace: Namespace, wanted: str) -> str:
    """How it can be reached at all: metadata that commands would have to carry leaves the block device."""
    if not namespace.metadata_bytes:
        return wanted
    if not namespace.protection.startswith(_PROTECTED):
        raise UsageError(
            f"{namespace.block_name} has {namespace.metadata_bytes} bytes of metadata with each block, which "
            "no transfer fills: format it without (`nvme format --lbaf`)",
            field="location",
        )
    if wanted == "yes":
        raise UsageError(
            f"{namespace.block_name} has protection information, which passthrough does not make: use "
            "passthrough='auto'",
            field="passthrough",
        )
    return "no"


def targets_of(namespace: Namespace) -> tuple[Target, ...]:
    """Where this host reaches it over a network: what a peer can attach."""
    found = []
    for controller in namespace.controllers:
        address = dict(controller.address)
        target = Target(controller.transport, address.get("traddr", ""), address.get("trsvcid", ""))
        if target.is_valid and target not in found:
            found.append(target)
    return tuple(found[:TARGETS_MAX])


def check_offered(namespace: Namespace) -> None:
    """ResourceError when the namespace cannot be offered now: in use by this host, or without a way."""
    if not namespace.is_live:
        raise ResourceError(
            f"no live controller leads to {namespace.block_name}: see `moonpool nvmf list`, and try again"
        )
    check_unused(namespace)
