"""The far-memory path and its mappings: a memfd stands for the device, a file that is cut for bad memory."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from moonpool.errors import ResourceError, Status, UsageError
from moonpool.native.cxl.mapping import FarMapping, cache_line_kernel, lock_range
from moonpool.native.cxl.numa import bind_memory, pages_by_node
from moonpool.native.cxl.path import (
    FarView,
    add_far_path,
    bad_memory_faults,
    catch_bad_memory,
    copy_trapped,
    reach_far,
)
from moonpool.native.io.batch import Batch
from moonpool.native.io.copying import chunk_digests
from moonpool.native.io.memory import create_memory
from moonpool.native.io.regions import LocalRegions
from moonpool.native.io.segment import NativeSegment
from moonpool.native.io.shm import add_mapped_path

KEYS = (b"r" * 16, b"w" * 16)
READ, WRITE = 1, 2
PAGE = 4096
SIZE = 4 << 20
NS_PER_S = 10**9


def memfd(size: int) -> int:
    fd = os.memfd_create("far", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


class Far:
    """A segment with one region in a device (a memfd) that is mapped here, and a registered local buffer."""

    def __init__(self, *, writable: bool = True, by_hand: bool = False, access: int = 3) -> None:
        catch_bad_memory()
        self.fd = memfd(SIZE)
        self.device = mmap.mmap(self.fd, SIZE)
        self.mapping = FarMapping(
            os.dup(self.fd), PAGE, SIZE - PAGE, align=PAGE, writable=writable, by_hand=by_hand
        )
        self.own = LocalRegions(8)
        self.segment = NativeSegment(self.own, 8, 32768)
        self.path = add_far_path(self.segment)
        self.mine = np.zeros(SIZE, dtype=np.uint8)
        self.local = self.mine.ctypes.data
        self.own.add(self.local, SIZE, 7, *KEYS)
        self.handle = 1 << 32 | 3
        self.segment.put_region(self.handle, 0, SIZE - PAGE, access, *KEYS)
        view = FarView(self.mapping.address, SIZE - PAGE, self.mapping, writable=writable, by_hand=by_hand)
        reach_far(self.segment, self.handle, view)

    def run(self, op: int, ranges: list[tuple[int, int]], *, digest: bool = False) -> Batch:
        """Transfers (offset, length), local ranges one after the other."""
        batch = Batch(op, len(ranges))
        starts = np.cumsum([0, *(length for _, length in ranges)])[:-1]
        batch.fill(
            [self.local + int(start) for start in starts],
            [self.handle] * len(ranges),
            [offset for offset, _ in ranges],
            [length for _, length in ranges],
            None,
            digest,
        )
        self.segment.bind(batch)
        batch.drive_here()
        return batch

    def close(self) -> None:
        self.mapping.close()
        self.device.close()
        os.close(self.fd)


@pytest.fixture(params=[False, True], ids=["coherent", "by_hand"])
def far(request: pytest.FixtureRequest) -> Iterator[Far]:
    made = Far(by_hand=request.param)
    yield made
    made.close()


def test_writes_and_reads_go_to_their_place(far: Far) -> None:
    ranges = [(0, 1), (1, 63), (64, 5_000), (8_191, 700_001), (2 << 20, (2 << 20) - PAGE)]
    size = sum(length for _, length in ranges)
    far.mine[:size] = np.random.default_rng(7).integers(0, 256, size, dtype=np.uint8)
    batch = far.run(WRITE, ranges, digest=True)
    assert set(batch.statuses()) == {Status.COMPLETE}
    start = 0
    for offset, length in ranges:
        stored = far.device[PAGE + offset : PAGE + offset + length]
        assert stored == far.mine[start : start + length].tobytes()
        start += length
    assert far.device[:PAGE] == bytes(PAGE)
    wanted = far.mine[:size].copy()
    far.mine[:] = 0
    batch = far.run(READ, ranges, digest=True)
    assert set(batch.statuses()) == {Status.COMPLETE}
    assert np.array_equal(far.mine[:size], wanted)
    stats = far.segment.path_stats(far.path)
    assert (stats["READ"]["transfers"], stats["READ"]["bytes"]) == (len(ranges), size)
    assert (stats["WRITE"]["transfers"], stats["WRITE"]["bytes"]) == (len(ranges), size)


def test_digests_are_those_of_the_bytes(far: Far) -> None:
    far.device[PAGE:] = np.random.default_rng(8).integers(0, 256, SIZE - PAGE, dtype=np.uint8).tobytes()
    batch = far.run(READ, [(10, 3 << 20)], digest=True)
    assert batch.digests() == [chunk_digests(far.mine[: 3 << 20].tobytes())]


def test_what_may_not_be_written_is_not() -> None:
    far = Far(writable=False)
    assert list(far.run(WRITE, [(0, 10)]).statuses()) == [Status.ACCESS_DENIED]
    assert list(far.run(READ, [(0, 10)]).statuses()) == [Status.COMPLETE]
    far.close()


def test_regions_that_are_not_far_are_left_to_the_next_path() -> None:
    far = Far()
    add_mapped_path(far.segment)
    other = np.full(PAGE, 9, dtype=np.uint8)
    handle = 1 << 32 | 4
    far.segment.put_region(handle, other.ctypes.data, PAGE, 3, *KEYS)
    far.segment.set_mapping(handle, other.ctypes.data, True, other)
    batch = Batch(READ, 2)
    batch.fill([far.local, far.local + PAGE], [far.handle, handle], [0, 0], [PAGE, PAGE], None, False)
    far.segment.bind(batch)
    batch.drive_here()
    assert set(batch.statuses()) == {Status.COMPLETE}
    assert [far.segment.path_stats(path)["READ"]["transfers"] for path in (0, 1)] == [1, 1]
    assert (far.mine[PAGE : 2 * PAGE] == 9).all()
    far.close()


@pytest.mark.parametrize("op", [READ, WRITE])
def test_bad_memory_ends_its_transfer_and_nothing_else(far: Far, op: int) -> None:
    before = bad_memory_faults()
    far.device.close()
    os.ftruncate(far.fd, SIZE // 2)  # from here on its pages answer with SIGBUS
    good, bad = (0, 100_000), (SIZE // 2 - PAGE - 50_000, 200_000)
    batch = far.run(op, [good, bad, good], digest=True)
    assert list(batch.statuses()) == [Status.COMPLETE, Status.STALE_HANDLE, Status.COMPLETE]
    assert bad_memory_faults() == before + 1
    os.ftruncate(far.fd, SIZE)
    assert list(far.run(op, [bad]).statuses()) == [Status.COMPLETE]
    far.device = mmap.mmap(far.fd, SIZE)


def test_a_local_buffer_that_went_away_is_told_apart() -> None:
    far = Far()
    fd = memfd(2 * PAGE)
    gone = mmap.mmap(fd, 2 * PAGE)
    array = np.frombuffer(gone, dtype=np.uint8)
    far.own.add(array.ctypes.data, 2 * PAGE, 7, *KEYS)
    os.ftruncate(fd, 0)
    batch = Batch(READ, 1)
    batch.fill([array.ctypes.data], [far.handle], [0], [2 * PAGE], None, False)
    far.segment.bind(batch)
    batch.drive_here()
    assert list(batch.statuses()) == [Status.NOT_REGISTERED]
    os.close(fd)
    far.close()


def test_dead_segments_and_deadlines_end_transfers(far: Far) -> None:
    batch = Batch(READ, 1)
    batch.fill([far.local], [far.handle], [0], [3 << 20], None, False)
    batch.end_at(1)
    far.segment.bind(batch)
    batch.drive_here()
    assert list(batch.statuses()) == [Status.TIMED_OUT]
    far.segment.mark_dead(Status.PEER_GONE)
    assert list(far.run(READ, [(0, 10)]).statuses()) == [Status.PEER_GONE]


def test_other_faults_end_the_process_as_before() -> None:
    script = """
import ctypes, mmap, os, sys
from moonpool.native.cxl.path import catch_bad_memory
catch_bad_memory()
catch_bad_memory()
fd = os.memfd_create("gone")
os.ftruncate(fd, 4096)
gone = mmap.mmap(fd, 4096)
os.ftruncate(fd, 0)
if sys.argv[1] == "kill":
    import signal
    os.kill(os.getpid(), signal.SIGBUS)
print(ctypes.string_at(ctypes.addressof(ctypes.c_char.from_buffer(gone)), 1))
"""
    # Where the sanitizers' handler was there before, it would be the one to end the process.
    environ = {**os.environ, "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":handle_sigbus=0"}
    for how in ("touch", "kill"):
        for options in ([], ["-X", "faulthandler"]):
            ended = subprocess.run(
                [sys.executable, *options, "-c", script, how],
                env=environ,
                capture_output=True,
                timeout=60,
                check=False,
            )
            assert ended.returncode == -signal.SIGBUS, ended.stderr
            assert (b"Bus error" in ended.stderr) == bool(options)


def test_copies_outside_a_trap_and_inside() -> None:
    catch_bad_memory()
    fd = memfd(2 * PAGE)
    with mmap.mmap(fd, 2 * PAGE) as half:
        target = bytearray(2 * PAGE)
        assert copy_trapped(target, half) == 0
        os.ftruncate(fd, PAGE)
        assert copy_trapped(target, half) == 1
        assert copy_trapped(half, target) == 2
    os.close(fd)
    with pytest.raises(UsageError):
        copy_trapped(bytearray(1), bytearray(2))


def test_a_range_has_one_owner_until_nobody_maps_it() -> None:
    fd = memfd(SIZE)

    def again() -> int:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)

    first, second = again(), again()
    assert lock_range(first, 0, SIZE // 2)
    assert lock_range(first, 0, SIZE // 2)  # the same owner may say so twice
    assert not lock_range(second, SIZE // 2 - 1, 1)
    assert lock_range(second, SIZE // 2, SIZE // 2)
    # A peer that was passed the descriptor and mapped the range keeps the lock after everybody closed it.
    passed = os.dup(first)
    mapped = FarMapping(passed, 0, PAGE, align=PAGE, writable=True)
    os.close(first)
    assert not lock_range(second, 0, PAGE)
    mapped.close()
    assert lock_range(second, 0, PAGE)
    os.close(second)
    os.close(fd)
    with pytest.raises(ResourceError):
        lock_range(-1, 0, 1)


def test_a_reader_cannot_map_for_writing() -> None:
    fd = memfd(SIZE)
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    with pytest.raises(ResourceError, match="mapping"):
        FarMapping(reader, 0, PAGE, align=PAGE, writable=True)
    assert not os.path.exists(f"/proc/self/fd/{reader}")  # taken over, also on failure
    os.close(fd)


@pytest.mark.parametrize(
    ("offset", "size", "align"), [(0, 0, PAGE), (0, 1, 0), (0, 1, 3), ((1 << 64) - PAGE, PAGE, PAGE)]
)
def test_impossible_ranges_are_refused(offset: int, size: int, align: int) -> None:
    with pytest.raises(UsageError):
        FarMapping(memfd(PAGE), offset, size, align=align, writable=True)


def test_mappings_are_widened_to_the_alignment_and_unmapped() -> None:
    fd = memfd(4 << 20)
    with mmap.mmap(fd, 4 << 20) as device:
        device[:] = bytes(range(256)) * (16 << 10)
        mapped = FarMapping(os.dup(fd), (2 << 20) + 100, 50, align=2 << 20, writable=False)
        # Its page starts 100 bytes before: what is read is the range's own first byte.
        assert mapped.address % PAGE == 100
        assert (mapped.size_bytes, mapped.writable, mapped.by_hand) == (50, False, False)
        mapped.close()
        mapped.close()
        assert (mapped.address, mapped.fd) == (0, -1)
    os.close(fd)


def test_views_close_their_owner_once() -> None:
    class Owner:
        closed = 0

        def close(self) -> None:
            self.closed += 1

    owner = Owner()
    view = FarView(PAGE, PAGE, owner, writable=True)
    view.close()
    view.close()
    assert owner.closed == 1
    FarView(PAGE, PAGE, None, writable=True).close()
    with pytest.raises(UsageError):
        FarView(0, PAGE, None, writable=True)


def test_memory_is_bound_to_a_node() -> None:
    memory = create_memory(SIZE, prefault=False)
    bind_memory(memory.address, memory.size_bytes, 0)
    assert pages_by_node(memory.address, memory.size_bytes) == {-1: SIZE // PAGE}
    memoryview(memory)[:] = bytes(SIZE)
    assert pages_by_node(memory.address, memory.size_bytes) == {0: SIZE // PAGE}
    memory.close()


@pytest.mark.parametrize("node", [1023, 4095])
def test_nodes_that_are_not_there_are_refused(node: int) -> None:
    memory = create_memory(PAGE, prefault=False)
    with pytest.raises(ResourceError, match="numa node"):
        bind_memory(memory.address, memory.size_bytes, node)
    with pytest.raises(UsageError):
        bind_memory(memory.address, memory.size_bytes, 5_000)
    memory.close()


def test_this_cpu_can_write_lines_back() -> None:
    assert cache_line_kernel() in ("clwb", "clflushopt", "clflush", "")
