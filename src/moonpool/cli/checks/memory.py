"""Memory: huge pages, limits, where memfds live, and what the copies use of the CPU."""

from __future__ import annotations

import importlib
import mmap
import os
import re
import resource
from typing import Final

from moonpool.cli.checks.check import Check, Level
from moonpool.topology import SysfsReader
from moonpool.units import KIB, MIB, format_size

GROUP: Final = "memory"
NOFILE_WANTED: Final = 4096
"""Each peer costs a few descriptors (control session, lanes, memfds); the default soft limit is 1024."""

MEMLOCK_WANTED: Final = 64 * MIB
"""RDMA and io_uring's registered buffers lock what they register; tcp and shm lock nothing."""

COPY_FEATURES: Final = ("sse2", "avx2", "avx512f", "erms", "fsrm", "asimd", "sve")
"""CPU flags that the copy and digest kernels choose by, x86 then ARM."""


def check_memory(reader: SysfsReader) -> list[Check]:
    """Huge pages, limits, /dev/shm and CPU features."""
    return [
        check_huge_pages(reader),
        judge_transparent_huge_pages(reader.read("/sys/kernel/mm/transparent_hugepage/shmem_enabled")),
        judge_locked(*resource.getrlimit(resource.RLIMIT_MEMLOCK)),
        judge_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        check_dev_shm(),
        judge_cgroup(cgroup_limit(reader)),
        judge_cpu(reader.read("/proc/cpuinfo") or "", copy_kernel()),
    ]


def check_huge_pages(reader: SysfsReader) -> Check:
    """Maps one huge page from the pool, where there is one."""
    meminfo = reader.read("/proc/meminfo") or ""
    counts = dict(
        re.findall(r"^(HugePages_Total|HugePages_Free|Hugepagesize):\s+(\d+)", meminfo, re.MULTILINE)
    )
    page = int(counts.get("Hugepagesize", 0)) * KIB
    if page == 0:
        return Check(GROUP, "huge pages", Level.INFO, "this kernel has none (no hugetlb support)")
    free, total = int(counts.get("HugePages_Free", 0)), int(counts.get("HugePages_Total", 0))
    pool = f"{free} of {total} free, {format_size(page)} each"
    if total == 0:
        return Check(
            GROUP,
            "huge pages",
            Level.INFO,
            "none set aside: EngineConfig(huge_pages=True) will be refused",
            "sysctl vm.nr_hugepages=N for large pools",
        )
    problem = "" if free == 0 else _map_huge_page(page)
    if free == 0 or problem:
        return Check(
            GROUP, "huge pages", Level.WARN, f"{pool}; {problem or 'all in use'}", "raise vm.nr_hugepages"
        )
    return Check(GROUP, "huge pages", Level.OK, f"{pool}; one was mapped")


def _map_huge_page(page_bytes: int) -> str:
    """Why a memfd of one huge page could not be mapped; "" when it could."""
    try:
        fd = os.memfd_create("moonpool-doctor", os.MFD_CLOEXEC | os.MFD_HUGETLB)
    except OSError as exc:
        return f"memfd_create: {exc.strerror}"
    try:
        os.ftruncate(fd, page_bytes)
        mmap.mmap(fd, page_bytes).close()
    except OSError as exc:
        return f"mmap: {exc.strerror}"
    finally:
        os.close(fd)
    return ""


def judge_transparent_huge_pages(shmem_enabled: str | None) -> Check:
    """THP for shared memory, which is what memfds are; the engine advises it for what it allocates."""
    name = "transparent huge pages"
    chosen = re.search(r"\[(\w+)\]", shmem_enabled or "")
    if chosen is None:
        return Check(GROUP, name, Level.INFO, "not in this kernel")
    if chosen[1] in ("always", "within_size", "advise"):
        return Check(GROUP, name, Level.OK, f"shmem_enabled is {chosen[1]}")
    advice = (
        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled: fewer TLB misses in large copies"
    )
    return Check(GROUP, name, Level.INFO, f"shmem_enabled is {chosen[1]}", advice)


def judge_locked(soft: int, hard: int) -> Check:
    """Limits of locked memory, in bytes."""
    shown = f"soft {_limit(soft)}, hard {_limit(hard)}"
    if soft == resource.RLIM_INFINITY or soft >= MEMLOCK_WANTED:
        return Check(GROUP, "RLIMIT_MEMLOCK", Level.OK, shown)
    advice = (
        "for RDMA and registered io_uring buffers: ulimit -l unlimited (LimitMEMLOCK=infinity in systemd)"
    )
    return Check(GROUP, "RLIMIT_MEMLOCK", Level.INFO, shown, advice)


def _limit(size_bytes: int) -> str:
    return "unlimited" if size_bytes == resource.RLIM_INFINITY else format_size(size_bytes)


def judge_files(soft: int, hard: int) -> Check:
    """Limits of open descriptors."""
    shown = ", ".join(
        f"{name} {'unlimited' if value == resource.RLIM_INFINITY else value}"
        for name, value in (("soft", soft), ("hard", hard))
    )
    if soft == resource.RLIM_INFINITY or soft >= NOFILE_WANTED:
        return Check(GROUP, "RLIMIT_NOFILE", Level.OK, shown)
    return Check(
        GROUP, "RLIMIT_NOFILE", Level.WARN, shown, f"ulimit -n {NOFILE_WANTED} or more, for many peers"
    )


def check_dev_shm() -> Check:
    """Sees that a memfd does not live on /dev/shm, so that the size of that mount (64 MiB in Docker) is no
    limit.
    """
    name = "/dev/shm"
    try:
        mount = os.stat("/dev/shm")
        space = os.statvfs("/dev/shm")
    except OSError:
        return Check(GROUP, name, Level.OK, "not mounted, and not needed")
    try:
        fd = os.memfd_create("moonpool-doctor", os.MFD_CLOEXEC)
    except OSError as exc:
        return Check(GROUP, name, Level.INFO, f"cannot be compared, memfd_create: {exc.strerror}")
    try:
        separate = os.fstat(fd).st_dev != mount.st_dev
    finally:
        os.close(fd)
    size = format_size(space.f_frsize * space.f_blocks)
    if separate:
        return Check(
            GROUP, name, Level.OK, f"{size}, not used: memory comes from memfds, which it does not limit"
        )
    return Check(GROUP, name, Level.WARN, f"memfds live on it, so its {size} limit them", "mount it larger")


def cgroup_limit(reader: SysfsReader) -> int | None:
    """The memory limit of this process's cgroup (version 2), in bytes; None without one."""
    match = re.search(r"^0::(/.*)$", reader.read("/proc/self/cgroup") or "", re.MULTILINE)
    path = match[1].rstrip("/") if match else ""
    limit = reader.read(f"/sys/fs/cgroup{path}/memory.max") or ""
    return int(limit) if re.fullmatch("[0-9]{1,19}", limit) else None


def judge_cgroup(limit_bytes: int | None) -> Check:
    """The limit in bytes, None for none: memfds count against it."""
    name = "cgroup limit"
    if limit_bytes is None:
        return Check(GROUP, name, Level.OK, "none")
    return Check(
        GROUP, name, Level.INFO, f"{format_size(limit_bytes)}; engine memory (memfds) counts against it"
    )


def copy_kernel() -> str:
    """The kernel that our native module runs for large copies; "" when it is not built."""
    try:
        copying = importlib.import_module("moonpool.native.io.copying")
    except ImportError:
        return ""
    return str(copying.stream_kernel())


def judge_cpu(cpuinfo: str, kernel: str) -> Check:
    """``kernel`` is the copy kernel in use, "" when the native module is not built."""
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    flags = set(match[1].split()) if match else set()
    found = [feature for feature in COPY_FEATURES if feature in flags]
    detail = " ".join(found) or "none of those that copies use"
    if kernel:
        detail += f"; large copies run the {kernel} kernel"
    return Check(GROUP, "CPU features", Level.OK if found else Level.INFO, detail)
