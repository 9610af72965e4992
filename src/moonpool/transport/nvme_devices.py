"""Opening a namespace's devices by what it is, and once more when it went and came back under other names."""

from __future__ import annotations

import errno
import os
import stat
import time
from typing import Final, TypeAlias, final

from moonpool.errors import AccessDenied, ResourceError
from moonpool.topology.sysfs import SysfsReader
from moonpool.transport.nvme_sysfs import Namespace, find_namespace, read_subsystems

#: Char device and block device, each -1 when not open, and of which appearance of the namespace they are.
Devices: TypeAlias = tuple[int, int, object]

GONE: Final = 0
COMING_BACK: Final = 1
LIVE: Final = 2

#: How often, and how long, a device that somebody else may be looking at too is tried.
_TRIES: Final = 20
_PAUSE_S: Final = 0.02
_open_path = os.open
_NOT_OURS: Final = (errno.EACCES, errno.EPERM, errno.EROFS)


@final
class DeviceFinder:
    """Called with the devices that are open, by whoever lost the way: where the namespace is now.

    Thread-safe: it holds nothing that changes.
    """

    def __init__(
        self,
        subsystem_nqn: str,
        nsid: int,
        wwid: str,
        *,
        folder: str = "/dev",
        reader: SysfsReader | None = None,
    ) -> None:
        self._identity = (subsystem_nqn, nsid, wwid)
        self._folder = folder
        self._reader = reader

    def find(self) -> Namespace | None:
        """The namespace as sysfs shows it now."""
        return find_namespace(read_subsystems(self._reader), *self._identity)

    def __call__(self, devices: Devices | None) -> tuple[int, Devices | None]:
        """Its state, and its devices: the given ones while they are right, else new ones."""
        namespace = self.find()
        if namespace is None:
            return GONE, None
        if not namespace.is_live:
            return COMING_BACK if namespace.may_return else GONE, devices
        if devices is not None and devices[2] == namespace.appearance:
            return LIVE, devices
        opened = open_devices(namespace, self._folder)
        again = self.find()
        if again is None or again.appearance != namespace.appearance:
            # It went while it was opened: what is open now may be anybody's.
            close_devices(opened)
            return COMING_BACK, None
        return LIVE, opened


def open_devices(namespace: Namespace, folder: str = "/dev") -> Devices:
    """Its char device for commands and its block device, each -1 when this process may not or cannot open it.

    AccessDenied when it may open neither; ResourceError when there is none.
    """
    problems: list[OSError] = []
    generic = block = -1
    if namespace.generic_name and not namespace.metadata_bytes:
        generic = _open(folder, namespace.generic_name, namespace.generic_device, os.O_RDWR, problems)
    flags = os.O_DIRECT | (os.O_RDONLY if namespace.read_only else os.O_RDWR)
    block = _open(folder, namespace.block_name, namespace.block_device, flags, problems)
    if generic < 0 and block < 0:
        problem = problems[-1] if problems else OSError(errno.ENXIO, os.strerror(errno.ENXIO))
        message = f"{folder}/{namespace.block_name} cannot be opened: {problem.strerror}"
        if problem.errno in _NOT_OURS:
            raise AccessDenied(
                f"{message}; run as root, or give this user read and write access to the device",
                errno=problem.errno,
            ) from problem
        raise ResourceError(message, errno=problem.errno or 0) from problem
    return generic, block, namespace.appearance


def close_devices(devices: Devices) -> None:
    """Closes what is open of them."""
    for fd in devices[:2]:
        if fd >= 0:
            os.close(fd)


def _open(folder: str, name: str, device: str, flags: int, problems: list[OSError]) -> int:
    """A descriptor of the device with that number, or -1 and one problem more."""
    path = f"{folder}/{name}"
    try:
        fd = _open_path(path, flags | os.O_CLOEXEC)
    except OSError as problem:
        problems.append(problem)
        return -1
    if device_number(fd) != device:
        os.close(fd)
        problems.append(OSError(errno.ENXIO, f"{path} is not the device {device}"))
        return -1
    return fd


def device_number(fd: int) -> str:
    """Major and minor, with a colon between, of a device that is open; "" for anything else."""
    about = os.fstat(fd)
    is_device = stat.S_ISBLK(about.st_mode) or stat.S_ISCHR(about.st_mode)
    return f"{os.major(about.st_rdev)}:{os.minor(about.st_rdev)}" if is_device else ""


def check_unused(namespace: Namespace, folder: str = "/dev") -> None:
    """ResourceError when this host has mounted it, swaps on it, or made it part of an array.

    Asked by an exclusive open, which the kernel refuses for a device in such use; others may ask at this
    moment too, so it is tried a few times.
    """
    path = f"{folder}/{namespace.block_name}"
    for last in (*[False] * (_TRIES - 1), True):
        try:
            os.close(_open_path(path, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
            return
        except OSError as problem:
            if problem.errno != errno.EBUSY:
                return  # whoever opens it for use says why it cannot be opened
            if last:
                raise ResourceError(
                    f"{path} is in use on this host (mounted, swapped on, or part of an array): nobody else "
                    "may write its bytes",
                    errno=errno.EBUSY,
                ) from problem
        time.sleep(_PAUSE_S)
