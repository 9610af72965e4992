"""Engine memory: sealed memfds, read-only descriptors, mappings of a peer's, and views that hold them."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from moonpool.errors import ResourceError, UsageError
from moonpool.native.io.memory import (
    HUGE_PAGE_BYTES,
    MAPPING_BYTES_MAX,
    PAGE_BYTES,
    SharedMemory,
    create_memory,
    map_memory,
)

NEEDED_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def plain_memfd(size: int, seals: int = 0) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("asked", [1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 3 << 20])
@pytest.mark.parametrize("prefault", [True, False])
def test_memory_is_whole_zeroed_pages(asked: int, prefault: bool) -> None:
    memory = create_memory(asked, prefault=prefault)
    assert memory.size_bytes == -(-asked // PAGE_BYTES) * PAGE_BYTES
    assert memory.address % PAGE_BYTES == 0
    assert memory.writable
    assert memory.owner
    view = np.frombuffer(memory, dtype=np.uint8)
    assert view.size == memory.size_bytes
    assert view.ctypes.data == memory.address
    assert not view.any()
    view[-1] = 7
    assert view[-1] == 7
    del view
    memory.close()


def test_pre_faulted_memory_is_resident() -> None:
    size = 8 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory = create_memory(size)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    view = np.frombuffer(memory, dtype=np.uint8)
    view[::PAGE_BYTES] = 1
    touched = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - after
    assert touched < size // PAGE_BYTES // 2, "the pages were faulted in one by one"
    assert before <= after
    del view
    memory.close()


@pytest.mark.parametrize("size", [0, PAGE_BYTES - 1, PAGE_BYTES + 1, 1 << 30])
def test_the_size_is_sealed(size: int) -> None:
    memory = create_memory(PAGE_BYTES)
    seals = fcntl.fcntl(memory.fd, fcntl.F_GET_SEALS)
    assert seals & NEEDED_SEALS == NEEDED_SEALS
    assert seals & fcntl.F_SEAL_SEAL, "nobody may add a seal against writing later"
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert os.fstat(memory.fd).st_size == PAGE_BYTES
    memory.close()


def test_nothing_is_left_in_a_file_system_or_to_a_child() -> None:
    before = set(os.listdir("/dev/shm"))
    memory = create_memory(PAGE_BYTES)
    assert set(os.listdir("/dev/shm")) == before
    assert not os.get_inheritable(memory.fd)
    assert os.readlink(f"/proc/self/fd/{memory.fd}").startswith("/memfd:moonpool")
    memory.close()


@pytest.mark.parametrize("size", [0, MAPPING_BYTES_MAX + 1])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(UsageError, match="size_bytes"):
        create_memory(size)
    fd = plain_memfd(PAGE_BYTES, NEEDED_SEALS)
    with pytest.raises(UsageError, match="size_bytes"):
        map_memory(fd, size, writable=False)
    assert not is_open(fd), "the descriptor is taken over on failure too"


@pytest.mark.parametrize("size", [-1, 1 << 64, 1.5, "1"])
def test_what_is_no_size_is_refused(size: object) -> None:
    with pytest.raises((OverflowError, TypeError)):
        create_memory(size)  # type: ignore[arg-type]


def test_huge_pages_come_whole_or_not_at_all() -> None:
    rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(rows.get("HugePages_Free", "0").split()[0])
    if free and rows["Hugepagesize"].split() == ["2048", "kB"]:
        memory = create_memory(1, huge_pages=True)
        assert memory.size_bytes == HUGE_PAGE_BYTES
        memory.close()
    else:
        with pytest.raises(ResourceError) as caught:
            create_memory(1, huge_pages=True)
        assert caught.value.errno is not None


def test_a_mapping_is_the_same_memory() -> None:
    memory = create_memory(2 * PAGE_BYTES)
    mapping = map_memory(os.dup(memory.fd), memory.size_bytes, writable=True)
    assert not mapping.owner
    assert mapping.address != memory.address
    memoryview(memory)[PAGE_BYTES] = 42
    assert memoryview(mapping)[PAGE_BYTES] == 42
    memoryview(mapping)[0] = 43
    assert memoryview(memory)[0] == 43
    memory.close()
    assert memoryview(mapping)[PAGE_BYTES] == 42, "a mapping outlives its owner"
    mapping.close()


def test_a_read_only_descriptor_cannot_be_mapped_for_writing() -> None:
    memory = create_memory(PAGE_BYTES)
    fd = memory.read_only_fd()
    assert not os.get_inheritable(fd)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, PAGE_BYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match=r"Bad file descriptor|Operation not permitted"):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(ResourceError):
        map_memory(os.dup(fd), PAGE_BYTES, writable=True)
    mapping = map_memory(fd, PAGE_BYTES, writable=False)
    view = memoryview(mapping)
    assert view.readonly
    memoryview(memory)[9] = 9
    assert view[9] == 9
    with pytest.raises(TypeError):
        view[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        np.frombuffer(mapping, dtype=np.uint8).setflags(write=True)
    view.release()
    mapping.close()
    memory.close()


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW])
def test_memory_without_the_seals_is_refused(seals: int) -> None:
    fd = plain_memfd(PAGE_BYTES, seals)
    with pytest.raises(UsageError, match="not sealed"):
        map_memory(fd, PAGE_BYTES, writable=True)
    assert not is_open(fd)


def test_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGE_BYTES))
    fd = os.open(path, os.O_RDWR)
    with pytest.raises(UsageError, match="not sealed"):
        map_memory(fd, PAGE_BYTES, writable=True)
    assert not is_open(fd)


def test_a_descriptor_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="not sealed"):
        map_memory(-1, PAGE_BYTES, writable=False)


def test_memory_shorter_than_announced_is_refused() -> None:
    fd = plain_memfd(PAGE_BYTES, NEEDED_SEALS)
    with pytest.raises(UsageError, match="shorter"):
        map_memory(fd, PAGE_BYTES + 1, writable=True)
    assert not is_open(fd)


def test_views_hold_memory_open() -> None:
    memory = create_memory(PAGE_BYTES)
    first, second = memoryview(memory), np.frombuffer(memory, dtype=np.uint8)
    assert memory.exported == 2
    with pytest.raises(UsageError, match="2 views"):
        memory.close()
    first.release()
    with pytest.raises(UsageError, match="1 views"):
        memory.close()
    second[0] = 5
    del second
    assert memory.exported == 0
    fd = memory.fd
    memory.close()
    assert not is_open(fd)
    memory.close()
    assert (memory.fd, memory.address) == (-1, 0)


def test_closed_memory_gives_nothing() -> None:
    memory = create_memory(PAGE_BYTES)
    memory.close()
    with pytest.raises(UsageError, match="closed"):
        memoryview(memory)
    with pytest.raises(UsageError, match="closed"):
        memory.read_only_fd()


def test_memory_never_made_gives_nothing() -> None:
    memory = SharedMemory()
    with pytest.raises(UsageError, match="closed"):
        memoryview(memory)
    memory.close()


def test_dropped_memory_is_unmapped() -> None:
    memory = create_memory(PAGE_BYTES)
    fd, first_page = memory.fd, f"{memory.address:x}-"
    assert first_page in Path("/proc/self/maps").read_text()
    del memory
    assert not is_open(fd)
    assert not any(
        line.startswith(first_page) and "memfd:moonpool" in line
        for line in Path("/proc/self/maps").read_text().splitlines()
    )


def test_a_view_outlives_the_name_of_its_memory() -> None:
    view = np.frombuffer(create_memory(PAGE_BYTES), dtype=np.uint8)
    view[:] = 3
    assert int(view.sum()) == 3 * PAGE_BYTES


def test_no_free_descriptor_is_a_typed_error() -> None:
    memory = create_memory(PAGE_BYTES)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        with pytest.raises(ResourceError) as caught:
            create_memory(PAGE_BYTES)
        with pytest.raises(ResourceError) as reopened:
            memory.read_only_fd()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caught.value.errno == reopened.value.errno == 24
    memory.close()


@pytest.mark.parametrize("size_bytes", [2 << 20, (6 << 20) + 4096])
def test_large_memory_is_zeroed_and_starts_on_a_huge_page(size_bytes: int) -> None:
    ours = create_memory(size_bytes)
    theirs = map_memory(os.dup(ours.fd), size_bytes, writable=True)
    try:
        assert ours.address % (2 << 20) == theirs.address % (2 << 20) == 0
        # Whether the kernel gives huge pages is its choice; how many is then all or nothing of what is whole.
        assert ours.huge_bytes in (0, size_bytes // (2 << 20) * (2 << 20))
        assert not any(memoryview(ours)[:: 64 << 10])
        memoryview(ours)[-1] = 7
        assert memoryview(theirs)[-1] == 7
    finally:
        theirs.close()
        ours.close()


def test_memory_below_a_huge_page_asks_for_none() -> None:
    ours = create_memory(64 << 10)
    try:
        assert ours.huge_bytes == 0
    finally:
        ours.close()
