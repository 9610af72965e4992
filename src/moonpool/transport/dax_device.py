"""DAX devices of this host: which there are, and ranges of them as what backs a region."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from moonpool.errors import ResourceError, UnsupportedOperation, UsageError
from moonpool.native.cxl.mapping import FarMapping, lock_range
from moonpool.topology import DaxDevice, Topology, pool_identity, read_far_memory
from moonpool.transport.cxl_attribute import DaxRange
from moonpool.units import format_size

PREFIX: Final = "dax:"
DEV: Final = "/dev/"
OFFSET_MAX: Final = 1 << 62


@final
class DaxBacking:
    """A range of a DAX device, mapped and locked here: the backing of an offered region.

    With software coherence it has no address for others than the far-memory path: a lane, or a plain copy,
    would read what the cache kept.
    """

    def __init__(self, mapping: FarMapping, about: DaxRange, location: str) -> None:
        self._mapping = mapping
        self._read_only_fd = -1
        self.about = about
        self.location = location

    @property
    def address(self) -> int:
        """Where the range is mapped; 0 with software coherence."""
        return 0 if self.about.software_coherence else self._mapping.address

    @property
    def mapped_at(self) -> int:
        """Where the far-memory path finds it; 0 once closed."""
        return self._mapping.address

    @property
    def size_bytes(self) -> int:
        """Of the region; never 0."""
        return self._mapping.size_bytes

    @property
    def writable(self) -> bool:
        """Always: who offers a range opens it for both."""
        return True

    def share(self, *, writable: bool) -> tuple[int, int, int]:
        """A descriptor for a peer (borrowed), where in it the range starts, and the device's size.

        For writing it is the very one that holds the lock: the range stays locked while any peer maps it.
        """
        if writable:
            return self._mapping.fd, self.about.offset, self.about.device_bytes
        if self._read_only_fd < 0:
            flags = os.O_RDONLY | os.O_CLOEXEC
            try:
                self._read_only_fd = os.open(f"/proc/self/fd/{self._mapping.fd}", flags)
            except OSError as problem:
                raise ResourceError(
                    f"opening a DAX device for reading failed: {problem.strerror}", errno=problem.errno or 0
                ) from problem
        return self._read_only_fd, self.about.offset, self.about.device_bytes

    def close(self) -> None:
        """Unmap, and unlock unless a peer still maps it. Idempotent."""
        self._mapping.close()
        if self._read_only_fd >= 0:
            os.close(self._read_only_fd)
            self._read_only_fd = -1

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class FoundDevice:
    """A DAX device that can be mapped, with its numbers known."""

    device: DaxDevice
    size_bytes: int
    align_bytes: int
    identity: str


def look(topology: Topology, device_number: tuple[int, int], named: str) -> FoundDevice:
    """The device with a number, fit to be mapped; errors that say what to do otherwise. Pure."""
    found = next((dax for dax in topology.dax_devices if dax.device_number == device_number), None)
    if found is None:
        have = ", ".join(DEV + dax.name for dax in topology.dax_devices) or "none"
        raise UsageError(f"{named} is no DAX device; this host has: {have}", field="location", value=named)
    if found.driver == "kmem":
        raise UsageError(
            f"{found.name} is numa node {found.target_node} of this host: allocate with "
            f'location="cxl:{found.target_node}", or make it mappable '
            f"(daxctl reconfigure-device --mode=devdax {found.name})",
            field="location",
            value=named,
        )
    if not found.mappable or not found.size_bytes or not found.align_bytes:
        raise UnsupportedOperation(
            f"{found.name} cannot be mapped: the kernel gives it no driver or no size "
            f"(daxctl enable-device {found.name})"
        )
    identity = pool_identity(found, topology.cxl_regions, topology.cxl_memories) or ""
    return FoundDevice(found, found.size_bytes, found.align_bytes, identity)


def device_of(fd: int, named: str) -> FoundDevice:
    """The DAX device behind a descriptor; UsageError for anything else."""
    about = os.fstat(fd)
    if not stat.S_ISCHR(about.st_mode):
        raise UsageError(f"{named} is no DAX device but an ordinary file", field="location", value=named)
    return look(read_far_memory(), (os.major(about.st_rdev), os.minor(about.st_rdev)), named)


def open_device(name: str, flags: int = os.O_RDWR) -> tuple[int, FoundDevice]:
    """Opens "dax0.0" or "/dev/dax0.0": a descriptor that the caller owns, and the device."""
    path = name if name.startswith("/") else DEV + name
    try:
        fd = os.open(path, flags | os.O_CLOEXEC)
    except OSError as problem:
        raise _cannot_open(path, problem) from problem
    try:
        return fd, device_of(fd, path)
    except BaseException:
        os.close(fd)
        raise


def _cannot_open(path: str, problem: OSError) -> UsageError | ResourceError:
    if problem.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
        have = ", ".join(DEV + dax.name for dax in read_far_memory().dax_devices) or "none"
        return UsageError(
            f"there is no DAX device {path}; this host has: {have}", field="location", value=path
        )
    advice = "; let this user open it (its owner, group or a udev rule)"
    denied = problem.errno in (errno.EACCES, errno.EPERM)
    return ResourceError(
        f"cannot open {path}: {problem.strerror}{advice if denied else ''}", errno=problem.errno or 0
    )


def offer_range(
    location: str, size_bytes: int | None, how: Mapping[str, Any], *, software: bool
) -> DaxBacking:
    """Open, lock and map a range of "dax:<device>"; `how` may have `offset`. Size None or 0: all the rest."""
    unknown = set(how) - {"offset"}
    if unknown:
        raise UsageError(
            f"{location} takes the option offset, not {sorted(unknown)[0]!r}", field=sorted(unknown)[0]
        )
    fd, found = open_device(location.removeprefix(PREFIX))
    try:
        offset, size = fit(found, size_bytes, how.get("offset", 0))
        whole = -(-size // found.align_bytes) * found.align_bytes
        if not lock_range(fd, offset, whole):
            raise ResourceError(
                f"{size} bytes at {offset} of {found.device.name} overlap a range that is offered already, "
                "or that a process still maps: take another range, or end that process",
                errno=errno.EBUSY,
            )
    except BaseException:
        os.close(fd)
        raise
    mapping = FarMapping(fd, offset, size, align=found.align_bytes, writable=True, by_hand=software)
    about = DaxRange(
        device_bytes=found.size_bytes,
        align_bytes=found.align_bytes,
        offset=offset,
        length=size,
        software_coherence=software,
        identity=found.identity,
    )
    return DaxBacking(mapping, about, tag_of(found.device))


def fit(found: FoundDevice, size_bytes: int | None, offset: object) -> tuple[int, int]:
    """Offset and size in bytes, checked against the device. Pure."""
    if type(offset) is not int or not 0 <= offset <= OFFSET_MAX:
        raise UsageError(f"offset={offset!r}: it is a number of bytes", field="offset")
    if offset % found.align_bytes:
        raise UsageError(
            f"offset={offset}: ranges of {found.device.name} start at multiples of its alignment, "
            f"{found.align_bytes} bytes ({format_size(found.align_bytes)})",
            field="offset",
        )
    if size_bytes is not None and (type(size_bytes) is not int or size_bytes < 0):
        raise UsageError(f"size_bytes={size_bytes!r}: it is a number of bytes", field="size_bytes")
    room = found.size_bytes - offset
    size = size_bytes or room
    if room <= 0 or size > room:
        raise UsageError(
            f"{found.device.name} has {found.size_bytes} bytes: {size_bytes or 'some'} at {offset} "
            "are not inside",
            field="size_bytes",
        )
    return offset, size


def tag_of(device: DaxDevice) -> str:
    """The location of its regions: cxl:<the numa node that it would be>, or cxl:<its number>."""
    node = device.target_node
    return f"cxl:{int(device.name[3:].partition('.')[0]) if node is None else node}"


def attached_device(about: DaxRange) -> tuple[int, FoundDevice]:
    """This host's device for the memory that a peer of another host names; opened for both directions.

    The caller owns the descriptor. UnsupportedOperation when this host has no such device.
    """
    topology = read_far_memory()
    for dax in topology.dax_devices:
        if dax.mappable and about.identity == pool_identity(dax, topology.cxl_regions, topology.cxl_memories):
            fd, found = open_device(dax.name)
            if (found.size_bytes, found.align_bytes) == (about.device_bytes, about.align_bytes):
                return fd, found
            os.close(fd)
    raise UnsupportedOperation(
        f"no DAX device of this host is {about.identity} with {about.device_bytes} bytes: attach it here "
        "(cxl list -R, daxctl list), or leave it out of the config field cxl_shared"
    )
