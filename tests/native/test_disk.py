"""The loop between memory and files: every alignment, every kind of failure, what rings keep registered."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonpool.errors import ResourceError, Status, TransferTimeout, UsageError
from moonpool.native.disk.disks import PIECE_BYTES, Disk, add_disk_path, direct_alignment
from moonpool.native.disk.rings import COUNTERS, DiskRings, probe_rings
from moonpool.native.io.batch import Batch
from moonpool.native.io.copying import chunk_digests
from moonpool.native.io.regions import LocalRegions
from moonpool.native.io.segment import NativeSegment

READ, WRITE = 1, 2
KEYS = (b"r" * 16, b"w" * 16)
#: EXTRA_FILE of regions.pxd.
PLACE = 1
BLOCK = 4096
WAIT_S = 20.0


class Rig:
    """An initiator whose segment reaches regions by disks."""

    def __init__(self, tools: Any, *, rings_max: int = 2, depth: int = 16) -> None:
        self.tools = tools
        self.own = LocalRegions(64)
        self.rings = DiskRings(rings_max, depth)
        self.segment = NativeSegment(self.own, 64, 262144)
        self.path = add_disk_path(self.segment, self.rings, PLACE)
        self.disks: list[Disk] = []
        self.memories: list[Any] = []

    def reach(self, path: Path, size: int, *, start: int = 0, access: int = 3, **how: Any) -> int:
        """A region in a file, by its handle. `how`: direct, edges, writable, block, memory_block, mode."""
        mode = how.get("mode", os.O_RDWR)
        direct = how.get("direct", True)
        fd = os.open(path, mode | os.O_DIRECT) if direct else -1
        edge_fd = os.open(path, mode) if how.get("edges", True) else -1
        disk = Disk(
            self.rings,
            fd,
            edge_fd,
            start,
            how.get("block", BLOCK),
            how.get("memory_block", 512),
            how.get("writable", True),
            how.get("durable", False),
        )
        handle = 1 << 32 | len(self.disks) + 1
        self.segment.put_region(handle, 0, size, access, *KEYS)
        disk.reach(self.segment, handle, PLACE)
        self.disks.append(disk)
        return handle

    def buffer(self, size: int, fill: int = 0, shift: int = 0) -> Any:
        """Registered memory between guards."""
        memory = self.tools.Memory(self.own, size, self.tools.LOCAL_WRITABLE, shift)
        memory.array[:] = fill
        self.memories.append(memory)
        return memory

    def run(self, op: int, local: Any, region: Any, offset: Any, length: Any, **how: Any) -> Batch:
        """A batch driven to its end."""
        n = max([1, *(len(v) for v in (local, region, offset, length) if hasattr(v, "__len__"))])
        batch = Batch(op, n)
        batch.fill(local, region, offset, length, None, how.get("digest", False))
        batch.set_timeout(how.get("timeout_s", WAIT_S))
        self.segment.bind(batch)
        batch.drive_here()
        assert batch.done
        return batch

    def status(self, *what: Any) -> Status:
        """That of a single transfer."""
        return Status(self.run(*what).statuses()[0])

    def close(self) -> None:
        """Close what it opened."""
        for disk in self.disks:
            disk.close()
        self.rings.close()
        for memory in self.memories:
            memory.check_guards()


@pytest.fixture
def make_rig(tools: Any) -> Iterator[Callable[..., Rig]]:
    """Rigs that are closed after the test."""
    with contextlib.ExitStack() as stack:

        def make(**how: Any) -> Rig:
            rig = Rig(tools, **how)
            stack.callback(rig.close)
            return rig

        yield make


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


def new_file(folder: Path, size: int, seed: int = 1) -> tuple[Path, Any]:
    """A file of pseudo-random bytes, and those."""
    content = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    path = folder / f"file-{seed}-{size}"
    path.write_bytes(content.tobytes())
    return path, content


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["direct", "buffered", "one ring deep"])
def test_any_range_goes_to_its_place(
    make_rig: Callable[..., Rig], tmp_path: Path, kind: str, seed: int
) -> None:
    print(f"seed={seed}")
    choice = random.Random(seed)
    rig = make_rig(depth=1 if kind == "one ring deep" else choice.choice([2, 7, 64]))
    size = 3 * PIECE_BYTES + 4096 * 5 + choice.choice([0, 1, 511, 4095])
    start = choice.choice([0, BLOCK, 9 * BLOCK]) if kind != "buffered" else choice.randrange(9_999)
    path, whole = new_file(tmp_path, start + size + 777, seed)
    region = rig.reach(path, size, start=start, direct=kind != "buffered")
    content = whole[start : start + size].copy()
    mine = rig.buffer(2 * PIECE_BYTES + 70_000, shift=choice.choice([0, 1, 16, 512]))
    for _ in range(30):
        length = min(
            choice.choice([1, 100, 511, 512, 4095, 4096, 4097, 65_536, 300_001, 2 * PIECE_BYTES]), size
        )
        offset = choice.randrange(size - length + 1)
        if choice.random() < 0.5:
            offset &= ~4095
        at = choice.choice([0, 0, 512, 4096, choice.randrange(60_000)])
        piece = mine.array[at : at + length]
        if choice.random() < 0.5:
            piece[:] = 0
            batch = rig.run(READ, mine.address + at, region, offset, length, digest=True)
            assert batch.worst == Status.COMPLETE
            assert np.array_equal(piece, content[offset : offset + length])
        else:
            piece[:] = np.random.default_rng(choice.randrange(1 << 30)).integers(
                0, 256, length, dtype=np.uint8
            )
            batch = rig.run(WRITE, mine.address + at, region, offset, length, digest=True)
            assert batch.worst == Status.COMPLETE
            content[offset : offset + length] = piece
        assert batch.digests() == [chunk_digests(piece)]
    whole[start : start + size] = content
    assert path.read_bytes() == whole.tobytes(), "bytes beside the region or in it are wrong"


def test_neighbours_of_an_edge_survive_writers_of_many_threads(rig: Rig, tmp_path: Path) -> None:
    """Each thread writes its own 100 bytes of every block, unaligned, with whole blocks between them."""
    blocks, width, writers = 40, 100, 8
    path, _ = new_file(tmp_path, blocks * BLOCK)
    region = rig.reach(path, blocks * BLOCK)
    expected = np.frombuffer(path.read_bytes(), dtype=np.uint8).copy()
    stride = 2 * BLOCK

    def write(which: int) -> None:
        mine = np.full(width, which + 1, dtype=np.uint8)
        hold = rig.own.add(mine.ctypes.data, width, 4, *KEYS)
        for turn in range(10):
            mine[:] = which + 1 + turn
            offsets = [which * width + k * stride for k in range(blocks // 2)]
            batch = rig.run(WRITE, [mine.ctypes.data] * len(offsets), region, offsets, width)
            assert batch.worst == Status.COMPLETE
        rig.rings.drop_region(hold)
        assert rig.own.remove(hold, WAIT_S)

    def write_whole_blocks() -> None:
        mine = rig.buffer(BLOCK, fill=0x77)
        offsets = [BLOCK + k * stride for k in range(blocks // 2)]
        for _ in range(10):
            batch = rig.run(WRITE, [mine.address] * len(offsets), region, offsets, BLOCK)
            assert batch.worst == Status.COMPLETE

    problems: list[BaseException] = []

    def guarded(work: Callable[..., None], *arguments: int) -> None:
        try:
            work(*arguments)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=guarded, args=(write, which)) for which in range(writers)]
    threads.append(threading.Thread(target=guarded, args=(write_whole_blocks,)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert not problems
    for k in range(blocks // 2):
        for which in range(writers):
            at = which * width + k * stride
            expected[at : at + width] = which + 10
        expected[BLOCK + k * stride : (k + 1) * stride] = 0x77
    assert np.array_equal(np.frombuffer(path.read_bytes(), dtype=np.uint8), expected)


def test_a_file_that_was_cut_off_is_out_of_range(rig: Rig, tmp_path: Path) -> None:
    path, content = new_file(tmp_path, 64 * BLOCK)
    region = rig.reach(path, 64 * BLOCK)
    mine = rig.buffer(64 * BLOCK)
    os.truncate(path, 10 * BLOCK + 100)
    assert rig.status(READ, mine.address, region, 0, 64 * BLOCK) is Status.OUT_OF_RANGE
    assert rig.status(READ, mine.address, region, 10 * BLOCK, 101) is Status.OUT_OF_RANGE
    assert rig.status(READ, mine.address, region, 20 * BLOCK, BLOCK) is Status.OUT_OF_RANGE
    assert rig.status(READ, mine.address, region, 10 * BLOCK, 100) is Status.COMPLETE
    assert np.array_equal(mine.array[:100], content[10 * BLOCK : 10 * BLOCK + 100])
    assert rig.rings.counters()["errors_end"] >= 3


def test_one_bad_transfer_fails_alone(rig: Rig, tmp_path: Path) -> None:
    good_path, content = new_file(tmp_path, 64 * BLOCK)
    short_path, _ = new_file(tmp_path, BLOCK, seed=2)
    good = rig.reach(good_path, 64 * BLOCK)
    short = rig.reach(short_path, 64 * BLOCK)
    mine = rig.buffer(64 * BLOCK)
    places = [mine.address + k * BLOCK for k in range(60)]
    regions = [short if k % 7 == 3 else good for k in range(60)]
    offsets = [(k % 50 + 2) * BLOCK for k in range(60)]
    batch = rig.run(READ, places, regions, offsets, BLOCK)
    expected = [Status.OUT_OF_RANGE if k % 7 == 3 else Status.COMPLETE for k in range(60)]
    assert [Status(one) for one in batch.statuses()] == expected
    for k in range(60):
        if k % 7 != 3:
            assert np.array_equal(
                mine.array[k * BLOCK : (k + 1) * BLOCK], content[offsets[k] : offsets[k] + BLOCK]
            )


def test_a_descriptor_that_cannot_write_denies_access(rig: Rig, tmp_path: Path) -> None:
    path, content = new_file(tmp_path, 4 * BLOCK)
    honest = rig.reach(path, 4 * BLOCK, mode=os.O_RDONLY, writable=False)
    lying = rig.reach(path, 4 * BLOCK, mode=os.O_RDONLY)
    mine = rig.buffer(4 * BLOCK, fill=7)
    for region in (honest, lying):
        for offset, length in ((0, BLOCK), (5, 10)):
            assert rig.status(WRITE, mine.address, region, offset, length) is Status.ACCESS_DENIED
    assert rig.rings.counters()["errors_access"] == 2
    assert path.read_bytes() == content.tobytes()


def test_a_limit_of_file_size_is_no_room(rig: Rig, tmp_path: Path) -> None:
    path, _ = new_file(tmp_path, BLOCK)
    region = rig.reach(path, 64 * BLOCK)
    mine = rig.buffer(4 * BLOCK, fill=7)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * BLOCK, before[1]))
    try:
        assert rig.status(WRITE, mine.address, region, 2 * BLOCK, BLOCK) is Status.COMPLETE
        assert rig.status(WRITE, mine.address, region, 16 * BLOCK, BLOCK) is Status.NO_MEMORY
        assert rig.status(WRITE, mine.address, region, 16 * BLOCK + 1, 10) is Status.NO_MEMORY
        assert rig.status(WRITE, mine.address, region, 7 * BLOCK, 4 * BLOCK) is Status.NO_MEMORY
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert rig.rings.counters()["errors_space"] == 3


def test_a_refusal_of_direct_io_goes_on_through_the_page_cache(rig: Rig, tmp_path: Path) -> None:
    path, content = new_file(tmp_path, 64 * BLOCK)
    # Memory on odd addresses, which the file system refuses with EINVAL: the disk was told otherwise.
    region = rig.reach(path, 64 * BLOCK, memory_block=1)
    mine = rig.buffer(64 * BLOCK, shift=1)
    assert rig.disks[0].direct
    assert rig.status(READ, mine.address, region, 0, 64 * BLOCK) is Status.COMPLETE
    assert np.array_equal(mine.array, content)
    assert not rig.disks[0].direct
    assert rig.rings.counters()["direct_refused"] >= 1
    mine.array[:] = 9
    assert rig.status(WRITE, mine.address, region, 0, 64 * BLOCK) is Status.COMPLETE
    assert path.read_bytes() == bytes([9]) * (64 * BLOCK)


def test_edges_without_a_page_cache_are_left_to_the_next_path(rig: Rig, tmp_path: Path) -> None:
    path, content = new_file(tmp_path, 64 * BLOCK)
    region = rig.reach(path, 64 * BLOCK, edges=False)
    mine = rig.buffer(64 * BLOCK, fill=5)
    for offset, length in ((1, BLOCK), (0, BLOCK + 1), (BLOCK, 10)):
        assert rig.status(WRITE, mine.address, region, offset, length) is Status.UNSUPPORTED
    assert rig.segment.path_stats(rig.path)["fallbacks"] == 3
    assert rig.status(WRITE, mine.address, region, BLOCK, 2 * BLOCK) is Status.COMPLETE
    assert rig.status(READ, mine.address, region, 4 * BLOCK + 3, 5_000) is Status.COMPLETE
    assert np.array_equal(mine.array[:5_000], content[4 * BLOCK + 3 : 4 * BLOCK + 5_003])
    expected = content.copy()
    expected[BLOCK : 3 * BLOCK] = 5
    assert path.read_bytes() == expected.tobytes()


def test_windows_of_memory_are_registered_once_they_are_hot(rig: Rig, tmp_path: Path) -> None:
    path, content = new_file(tmp_path, 256 * BLOCK)
    region = rig.reach(path, 256 * BLOCK)
    mine = rig.buffer(256 * BLOCK)
    local = [mine.address + k * BLOCK for k in range(256)]
    batch = rig.run(READ, local, region, [k * BLOCK for k in range(256)], BLOCK)
    assert batch.worst == Status.COMPLETE
    assert np.array_equal(mine.array, content)
    counters = rig.rings.counters()
    assert counters["windows_registered"] == 1
    assert 200 < counters["ios_fixed"] < 256
    # Another region at the same address is another window: the pages of the first are not taken for its.
    rig.rings.drop_region(mine.handle)
    assert rig.own.remove(mine.handle, WAIT_S)
    mine.handle = rig.own.add(mine.address, mine.size, 4, *KEYS)
    mine.array[:] = 0
    assert rig.run(READ, local, region, [k * BLOCK for k in range(256)], BLOCK).worst == Status.COMPLETE
    assert np.array_equal(mine.array, content)
    assert rig.rings.counters()["windows_registered"] == 2


def test_memory_that_cannot_be_pinned_is_plain_io(rig: Rig, tmp_path: Path) -> None:
    import mmap

    path, content = new_file(tmp_path, 64 * BLOCK)
    other, _ = new_file(tmp_path, 64 * BLOCK, seed=2)
    region = rig.reach(path, 64 * BLOCK)
    with other.open("r+b") as file, mmap.mmap(file.fileno(), 64 * BLOCK) as mapped:
        # Linux refuses long-term pins of a file's pages.
        view = np.frombuffer(mapped, dtype=np.uint8)
        handle = rig.own.add(view.ctypes.data, 64 * BLOCK, 4, *KEYS)
        local = [view.ctypes.data + k * BLOCK for k in range(64)]
        assert rig.run(READ, local, region, [k * BLOCK for k in range(64)], BLOCK).worst == Status.COMPLETE
        assert np.array_equal(view, content)
        counters = rig.rings.counters()
        assert (counters["windows_refused"], counters["ios_fixed"]) == (1, 0)
        rig.rings.drop_region(handle)
        assert rig.own.remove(handle, WAIT_S)
        del view


def test_more_disks_than_a_ring_registers(rig: Rig, tmp_path: Path) -> None:
    count = 63
    regions, contents = [], []
    for k in range(count):
        path, content = new_file(tmp_path, 2 * BLOCK, seed=10 + k)
        regions.append(rig.reach(path, 2 * BLOCK))
        contents.append(content)
    closed = []
    for _ in range(100):  # serials that fall onto places in use
        fd = os.open(path, os.O_RDWR)
        closed.append(Disk(rig.rings, -1, fd, 0, 1, 1, True))
    for disk in closed:
        disk.close()
    mine = rig.buffer(count * 2 * BLOCK)
    local = [mine.address + k * 2 * BLOCK for k in range(count)]
    for _ in range(3):
        mine.array[:] = 0
        assert rig.run(READ, local, regions, 0, 2 * BLOCK).worst == Status.COMPLETE
        assert np.array_equal(mine.array, np.concatenate(contents))


def test_batches_wait_for_a_ring_and_give_up_at_their_deadline(
    make_rig: Callable[..., Rig], tmp_path: Path
) -> None:
    rig = make_rig(rings_max=1, depth=4)
    path, content = new_file(tmp_path, 64 * BLOCK)
    region = rig.reach(path, 64 * BLOCK)
    problems: list[BaseException] = []
    buffers = [rig.buffer(64 * BLOCK) for _ in range(6)]

    def read(mine: Any) -> None:
        try:
            for _ in range(20):
                assert rig.status(READ, mine.address, region, 0, 64 * BLOCK) is Status.COMPLETE
                assert np.array_equal(mine.array, content)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=read, args=(mine,)) for mine in buffers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not problems
    assert (rig.rings.rings, rig.rings.busy) == (1, 0)


def test_a_deadline_ends_a_batch_and_its_memory_rests(rig: Rig, tmp_path: Path) -> None:
    path, _ = new_file(tmp_path, 512 * BLOCK)
    region = rig.reach(path, 512 * BLOCK)
    mine = rig.buffer(512 * BLOCK)
    count = 4_000
    batch = rig.run(READ, [mine.address] * count, region, 0, 512 * BLOCK, timeout_s=0.03)
    assert set(batch.statuses()) <= {Status.COMPLETE, Status.TIMED_OUT}
    assert Status.TIMED_OUT in batch.statuses()
    mine.array[:] = 0xEE
    other = rig.buffer(512 * BLOCK)
    for _ in range(10):
        assert rig.status(READ, other.address, region, 0, 512 * BLOCK) is Status.COMPLETE
    assert (mine.array == 0xEE).all()


def test_durable_writes_and_syncs(rig: Rig, tmp_path: Path) -> None:
    path, _ = new_file(tmp_path, 64 * BLOCK)
    region = rig.reach(path, 64 * BLOCK, durable=True)
    disk = rig.disks[0]
    mine = rig.buffer(4 * BLOCK, fill=3)
    assert not disk.take_dirty()
    for offset, length in ((0, 4 * BLOCK), (9, 100)):
        assert rig.status(WRITE, mine.address, region, offset, length) is Status.COMPLETE
        assert disk.take_dirty()
    assert rig.status(READ, mine.address, region, 0, BLOCK) is Status.COMPLETE
    assert not disk.take_dirty()
    rig.rings.sync(disk.any_fd, WAIT_S)
    with pytest.raises(ResourceError) as caught:
        rig.rings.sync(1 << 20, WAIT_S)
    assert caught.value.errno == 9
    reader, writer = os.pipe()
    try:
        with pytest.raises(ResourceError):
            rig.rings.sync(reader, WAIT_S)
    finally:
        os.close(reader)
        os.close(writer)
    with contextlib.suppress(TransferTimeout):  # done before the first look at the clock, or not
        rig.rings.sync(disk.any_fd, 0.0)
    assert rig.status(READ, mine.address, region, 0, BLOCK) is Status.COMPLETE


def test_what_makes_no_disk_or_ring(rig: Rig, tmp_path: Path) -> None:
    path, _ = new_file(tmp_path, BLOCK)
    fd = os.open(path, os.O_RDONLY)
    try:
        for wrong in ((-1, -1, 0, 1, 1), (fd, -1, 1, 4096, 1), (fd, -1, 0, 3, 1), (fd, -1, 0, 1 << 17, 1)):
            with pytest.raises(UsageError):
                Disk(rig.rings, *wrong, True)
        rig.disks.append(Disk(rig.rings, -1, os.dup(fd), 0, 1, 1, False))
        with pytest.raises(UsageError):
            rig.disks[-1].reach(rig.segment, 1 << 32 | 9, 99)
    finally:
        os.close(fd)
    for sizes in ((0, 1), (65, 1), (1, 0), (1, 1025)):
        with pytest.raises(UsageError):
            DiskRings(*sizes)
    assert probe_rings() == 0
    assert set(rig.rings.counters()) == set(COUNTERS)


def test_no_descriptor_for_a_ring_is_said() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        with pytest.raises(ResourceError) as caught:
            DiskRings(1, 8)
        assert caught.value.errno == 24
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_closed_rings_carry_nothing(rig: Rig, tmp_path: Path) -> None:
    path, _ = new_file(tmp_path, BLOCK)
    region = rig.reach(path, BLOCK)
    mine = rig.buffer(BLOCK)
    rig.rings.close()
    assert rig.status(READ, mine.address, region, 0, BLOCK) is Status.CANCELLED


def test_the_kernel_tells_what_direct_io_asks_for(tmp_path: Path) -> None:
    path, _ = new_file(tmp_path, BLOCK)
    with path.open("rb") as file:
        told = direct_alignment(file.fileno())
    assert told is None or all(number & (number - 1) == 0 for number in told)
    assert direct_alignment(-1) is None
