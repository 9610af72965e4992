"""What an errno of libibverbs means to a user: typed errors that say what to do."""

from __future__ import annotations

import errno
import os
import resource
from typing import Final

from moonpool.errors import MoonpoolError, OutOfMemory, ResourceError, UnsupportedMemory, UnsupportedOperation
from moonpool.units import format_size

_GONE: Final = frozenset({errno.EIO, errno.ENODEV, errno.ENXIO})
_UNSUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EPROTONOSUPPORT})


def call_problem(code: int, doing: str, device: str) -> MoonpoolError:
    """The error (not raised) of a call of the control path that failed with this errno."""
    where = f"{doing} on {device}: {os.strerror(code)}"
    if code == errno.ENOMEM:
        return OutOfMemory(
            f"{where}; the device or the kernel has no more to give: use fewer peers, or shallower queues",
            errno=code,
        )
    if code in _GONE:
        return ResourceError(
            f"{where}; the device is gone or being reset: look at the kernel's log", errno=code
        )
    if code in (errno.EACCES, errno.EPERM):
        return ResourceError(
            f"{where}; let this user open /dev/infiniband/uverbs* (in a container pass the devices on)",
            errno=code,
        )
    if code in _UNSUPPORTED:
        return UnsupportedOperation(f"{where}; this device, its driver or this kernel lacks that", errno=code)
    return ResourceError(where, errno=code)


def registration_problem(
    code: int, device: str, address: int, length_bytes: int, dmabuf: bool = False
) -> MoonpoolError:
    """The error (not raised) of a memory region that could not be registered."""
    what = f"registering {format_size(length_bytes)} on {device}: {os.strerror(code)}"
    if code == errno.ENOMEM:
        return _no_memory(what, length_bytes)
    if code == errno.EFAULT:
        return UnsupportedMemory(
            f"{what}; all of the range must be mapped, and Linux pins no pages of an ordinary file for a "
            "device to write: use memory of Engine.allocate, a memfd, tmpfs, hugetlbfs or DAX",
            address=address,
            length_bytes=length_bytes,
        )
    if code in _UNSUPPORTED:
        kind = "a dma-buf" if dmabuf else "this memory"
        return UnsupportedMemory(
            f"{what}; the device, its driver or this kernel cannot register {kind}",
            address=address,
            length_bytes=length_bytes,
        )
    if code == errno.EINVAL:
        return UnsupportedMemory(
            f"{what}; the driver takes no such range or access (device memory needs a dma-buf or peer memory "
            "module)",
            address=address,
            length_bytes=length_bytes,
        )
    return call_problem(code, f"registering {format_size(length_bytes)}", device)


def _no_memory(what: str, length_bytes: int) -> OutOfMemory:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY:
        return OutOfMemory(
            f"{what}; RLIMIT_MEMLOCK allows this user {format_size(limit)} of pinned memory: raise it "
            "(ulimit -l unlimited, LimitMEMLOCK=infinity, docker --ulimit memlock=-1)",
            length_bytes=length_bytes,
            field="RLIMIT_MEMLOCK",
            limit=limit,
        )
    return OutOfMemory(
        f"{what}; RLIMIT_MEMLOCK is unlimited, so the machine's memory or the device's regions are used up",
        length_bytes=length_bytes,
    )
