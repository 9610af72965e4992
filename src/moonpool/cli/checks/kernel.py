"""The kernel's features, each tried for real where trying is harmless."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import re
from typing import Final

from moonpool.cli.checks.check import Check, Level
from moonpool.topology import SysfsReader

GROUP: Final = "kernel"
KERNEL_WANTED: Final = (5, 14)
"""The first with MADV_POPULATE_WRITE; pidfd_open came with 5.3, sealed memfds with 3.17."""

SYS_IO_URING_SETUP: Final = 425
"""The same on every architecture (kernel header asm-generic/unistd.h)."""

IO_URING_PARAMS_BYTES: Final = 120
"""sizeof(struct io_uring_params) in linux/io_uring.h."""


def check_kernel(reader: SysfsReader) -> list[Check]:
    """Kernel, memfd, pidfd and io_uring."""
    return [
        judge_release(platform.release()),
        check_memfd(),
        check_pidfd(),
        judge_io_uring(try_io_uring(), reader.read("/proc/sys/kernel/io_uring_disabled")),
    ]


def judge_release(release: str) -> Check:
    """Whether a kernel release such as "6.8.0-45-generic" is new enough."""
    match = re.match(r"(\d+)\.(\d+)", release)
    if match is None:
        return Check(GROUP, "release", Level.WARN, f"{release}: this release name cannot be read")
    if (int(match[1]), int(match[2])) < KERNEL_WANTED:
        wanted = ".".join(map(str, KERNEL_WANTED))
        return Check(
            GROUP,
            "release",
            Level.WARN,
            release,
            f"use Linux {wanted} or newer: memory is pre-faulted faster",
        )
    return Check(GROUP, "release", Level.OK, release)


def check_memfd() -> Check:
    """Makes a memfd as the engine does, seals it, and sees that the seal holds."""
    try:
        fd = os.memfd_create("moonpool-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as exc:
        return Check(
            GROUP,
            "memfd",
            Level.FAIL,
            f"memfd_create: {exc.strerror}",
            "allow memfd_create in the container's seccomp profile, and set vm.memfd_noexec below 2",
        )
    try:
        os.ftruncate(fd, 4096)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        for size_bytes in (0, 8192):
            try:
                os.ftruncate(fd, size_bytes)
            except PermissionError:
                continue
            return Check(GROUP, "memfd", Level.FAIL, "a sealed memfd changed its size", "use another kernel")
    except OSError as exc:
        return Check(
            GROUP, "memfd", Level.FAIL, f"sealing: {exc.strerror}", "use a kernel with sealed memfds (3.17)"
        )
    finally:
        os.close(fd)
    return Check(GROUP, "memfd", Level.OK, "created, sealed against shrinking and growing")


def check_pidfd() -> Check:
    """Opens a pidfd of this process, as shm does of a peer."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as exc:
        return Check(
            GROUP,
            "pidfd",
            Level.WARN,
            f"pidfd_open: {exc.strerror}",
            "use Linux 5.3 or newer, or allow pidfd_open in the seccomp profile: without it shm cannot copy "
            "memory that the engine did not allocate",
        )
    return Check(GROUP, "pidfd", Level.OK, "available")


def try_io_uring() -> int:
    """The errno of setting up a ring of one entry; 0 when it worked."""
    libc = ctypes.CDLL(None, use_errno=True)
    params = ctypes.create_string_buffer(IO_URING_PARAMS_BYTES)
    fd = libc.syscall(ctypes.c_long(SYS_IO_URING_SETUP), ctypes.c_uint(1), params)
    if fd < 0:
        return ctypes.get_errno()
    os.close(fd)
    return 0


def judge_io_uring(error: int, disabled: str | None) -> Check:
    """``error`` is what ``try_io_uring`` gave, ``disabled`` the sysctl kernel.io_uring_disabled."""
    if error == 0:
        return Check(GROUP, "io_uring", Level.OK, "available")
    if error == errno.ENOSYS:
        advice = "use Linux 5.10 or newer"
    elif disabled in ("1", "2"):
        advice = f"kernel.io_uring_disabled is {disabled}: set it to 0 with sysctl"
    else:
        advice = "allow io_uring_setup in the container's seccomp profile (Docker's default forbids it)"
    return Check(
        GROUP, "io_uring", Level.INFO, f"not available: {os.strerror(error)}; tcp uses plain sockets", advice
    )
