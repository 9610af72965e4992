"""The loop that carries batches to namespaces, over a file that plays the block device."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonpool.errors import PeerStalled, Status, UsageError
from moonpool.native.disk.rings import DiskRings, probe_rings
from moonpool.native.io.batch import Batch
from moonpool.native.io.copying import chunk_digests
from moonpool.native.io.regions import LocalRegions
from moonpool.native.io.segment import NativeSegment
from moonpool.native.nvmeof.namespace import NamespaceRegion, NativeNamespace
from moonpool.native.nvmeof.ways import NamespaceWay, add_way, flush_range, write_pieces

READ, WRITE = 1, 2
KEYS = (b"r" * 16, b"w" * 16)
NS_PER_S = 10**9
GONE, COMING_BACK, LIVE = 0, 1, 2
HANDLE = 1 << 32 | 1
SIZE = 1 << 20
#: Where the region begins in the namespace.
START = 1 << 16

pytestmark = pytest.mark.skipif(probe_rings() != 0, reason="needs a kernel with io_uring")


# ---- the loop, over a file


class Drive:
    """A file that plays a namespace's block device, and comes and goes as a test says."""

    def __init__(self, path: Path, *, block: int = 512, away_s: float = 20.0, longest: int = 1 << 16) -> None:
        self.path = path
        self.content = bytearray(random.Random(3).randbytes(START + SIZE))
        path.write_bytes(self.content)
        #: What `look` says, one after the other; the last for ever.
        self.states = [LIVE]
        self.looks = 0
        #: Called before the file is opened; may return another descriptor to use.
        self.opening: Callable[[], int] = self.open_file
        self.appearance = 0
        self.namespace = NativeNamespace(1, block, 512, longest, 33, int(away_s * NS_PER_S), 5000, self.look)

    def open_file(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)

    def look(self, devices: Any) -> tuple[int, Any]:
        self.looks += 1
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if state != LIVE:
            return state, None if state == GONE else devices
        if devices is not None and devices[2] == self.appearance:
            return state, devices
        return state, (-1, self.opening(), self.appearance)


class Rig:
    """An initiator, or the owner itself (`ask` is None), with a segment of one range of a drive."""

    def __init__(self, drive: Drive, *, ask: Any = None, way: str = "auto", **how: Any) -> None:
        self.own = LocalRegions(16)
        self.segment = NativeSegment(self.own, 16, 262144)
        self.rings = {True: DiskRings(2, 32, True), False: DiskRings(2, 32)}
        self.paths = [
            add_way(self.segment, NamespaceWay(self.rings[big], ask, passthrough=big))
            for big in (True, False)
        ]
        self.drive = drive
        drive.namespace.open_devices()
        self.range = NamespaceRegion(
            drive.namespace,
            START,
            SIZE,
            fua=how.get("fua", False),
            way=way,
            writable=how.get("writable", True),
        )
        self.segment.put_region(HANDLE, 0, SIZE, 3, *KEYS)
        self.range.attach(self.segment, HANDLE)
        self.memory = np.zeros(SIZE + 8192, dtype=np.uint8)
        base = self.memory.ctypes.data
        self.shift = -base % 4096
        self.address = base + self.shift
        self.own.add(base, self.memory.nbytes, 7, *KEYS)

    def run(self, op: int, local: list[int], offset: list[int], length: list[int], **how: Any) -> list[int]:
        """The statuses of a batch driven to its end; `local` counts from a page's beginning."""
        return list(self.carry(op, local, offset, length, **how).statuses())

    def carry(self, op: int, local: list[int], offset: list[int], length: list[int], **how: Any) -> Batch:
        """A batch driven to its end."""
        batch = Batch(op, len(local))
        batch.fill(
            [self.address + at for at in local],
            [HANDLE] * len(local),
            offset,
            length,
            None,
            how.get("digest", False),
        )
        batch.set_timeout(how.get("timeout_s", 20.0))
        self.segment.bind(batch)
        batch.drive_here()
        assert self.segment.users == self.own.users == 0
        assert all(not rings.busy for rings in self.rings.values())
        return batch

    def bytes_at(self, at: int, size: int) -> bytes:
        return self.memory[self.shift + at : self.shift + at + size].tobytes()

    def close(self) -> None:
        for rings in self.rings.values():
            rings.close()
        self.drive.namespace.close()


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(*, drive: dict[str, Any] | None = None, **how: Any) -> Rig:
        made.append(Rig(Drive(tmp_path / f"drive{len(made)}", **(drive or {})), **how))
        return made[-1]

    before = len(os.listdir("/proc/self/fd"))
    yield make
    for rig in made:
        rig.close()
    assert len(os.listdir("/proc/self/fd")) == before


def on_drive(rig: Rig, offset: int, size: int) -> bytes:
    return rig.drive.path.read_bytes()[START + offset : START + offset + size]


@pytest.mark.parametrize("block", [512, 4096])
def test_random_transfers_move_exactly_their_bytes(make_rig: Callable[..., Rig], block: int) -> None:
    rig = make_rig(drive={"block": block})
    chance = random.Random(block)
    shadow = bytearray(rig.drive.content)
    for round_ in range(40):
        n = chance.choice([1, 1, 3, 40])
        room = SIZE // n
        lengths = [chance.choice([1, 100, block, 3 * block + 5, min(room, 200_000)]) for _ in range(n)]
        lengths = [min(length, room) for length in lengths]
        offsets = [i * room + chance.randrange(room - lengths[i] + 1) for i in range(n)]
        local = [i * room + chance.randrange(room - lengths[i] + 1) for i in range(n)]
        if round_ % 2:
            for at, length in zip(local, lengths, strict=True):
                rig.memory[rig.shift + at : rig.shift + at + length] = np.frombuffer(
                    chance.randbytes(length), dtype=np.uint8
                )
            said = rig.run(WRITE, local, offsets, lengths)
            for at, offset, length in zip(local, offsets, lengths, strict=True):
                shadow[START + offset : START + offset + length] = rig.bytes_at(at, length)
        else:
            rig.memory[:] = 0xEE
            said = rig.run(READ, local, offsets, lengths)
            untouched = np.ones(rig.memory.nbytes, dtype=bool)
            for at, offset, length in zip(local, offsets, lengths, strict=True):
                want = shadow[START + offset : START + offset + length]
                assert rig.bytes_at(at, length) == want
                untouched[rig.shift + at : rig.shift + at + length] = False
            assert (rig.memory[untouched] == 0xEE).all()
        assert set(said) == {Status.COMPLETE}
        assert rig.drive.path.read_bytes() == shadow
    counters = rig.drive.namespace.counters
    assert counters["edge_blocks"] > 0
    assert counters["bounced"] > 0
    assert counters["commands"] == 0, "there is no char device: the block device carries all"


def test_digests(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    batch = rig.carry(READ, [0, 300_000], [10, 400_000], [200_000, 65_536], digest=True)
    assert batch.digests() == [
        list(chunk_digests(rig.bytes_at(0, 200_000))),
        list(chunk_digests(rig.bytes_at(300_000, 65_536))),
    ]


def test_a_write_to_what_may_only_be_read(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(writable=False)
    assert rig.run(WRITE, [0], [0], [512]) == [Status.ACCESS_DENIED]
    assert on_drive(rig, 0, 512) == bytes(rig.drive.content[START : START + 512])


def test_passthrough_only_leaves_what_it_cannot_carry(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(way="yes")
    assert rig.run(READ, [0], [0], [512]) == [Status.UNSUPPORTED]


def test_a_char_device_that_takes_no_commands_is_passed_over(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    plain = os.open(rig.drive.path, os.O_RDWR | os.O_CLOEXEC)
    rig.drive.namespace.close()
    rig.drive.look = lambda devices: (LIVE, devices or (plain, rig.drive.open_file(), 0))  # type: ignore[method-assign]
    namespace = NativeNamespace(1, 512, 512, 1 << 16, 33, NS_PER_S, 5000, rig.drive.look)
    namespace.open_devices()
    there = NamespaceRegion(namespace, START, SIZE, fua=False, way="auto", writable=True)
    there.attach(rig.segment, HANDLE)
    assert rig.run(READ, [0], [0], [5000]) == [Status.COMPLETE]
    assert rig.bytes_at(0, 5000) == bytes(rig.drive.content[START : START + 5000])
    assert rig.segment.path_stats(rig.paths[0])["fallbacks"] == 1
    assert namespace.counters["commands"] > 0
    namespace.close()


# ---- ways that are lost


def lose(rig: Rig, *states: int) -> None:
    """The device is gone as of now, and `look` says this from then on."""
    rig.drive.namespace.close()
    rig.drive.appearance += 1
    rig.drive.states = list(states)


def test_a_batch_waits_for_a_lost_namespace(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    lose(rig, GONE, COMING_BACK, COMING_BACK, LIVE)
    assert rig.run(READ, [0, 1000], [0, 5000], [700, 512]) == [Status.COMPLETE] * 2
    assert rig.bytes_at(0, 700) == bytes(rig.drive.content[START : START + 700])
    assert rig.drive.looks >= 5
    assert rig.drive.namespace.counters["ways_found"] == 1


@pytest.mark.parametrize(("state", "status"), [(GONE, Status.PEER_GONE), (COMING_BACK, Status.STALLED)])
def test_the_wait_has_an_end(make_rig: Callable[..., Rig], state: int, status: Status) -> None:
    rig = make_rig(drive={"away_s": 0.12})
    lose(rig, state)
    assert rig.run(READ, [0] * 100, [0] * 100, [700] * 100) == [status] * 100
    lose(rig, LIVE)
    assert rig.run(READ, [0], [0], [700]) == [Status.COMPLETE]


def test_a_deadline_and_a_cancel_end_the_wait(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    lose(rig, COMING_BACK)
    assert rig.run(READ, [0], [0], [700], timeout_s=0.1) == [Status.TIMED_OUT]
    batch = Batch(WRITE, 1)
    batch.fill([rig.address], [HANDLE], [100], [9000], None, False)
    rig.segment.bind(batch)
    seen = threading.Event()
    inner = rig.drive.look

    def look(devices: Any) -> tuple[int, Any]:
        seen.set()
        return inner(devices)

    namespace = NativeNamespace(1, 512, 512, 1 << 16, 33, 60 * NS_PER_S, 5000, look)
    there = NamespaceRegion(namespace, START, SIZE, fua=False, way="auto", writable=True)
    there.attach(rig.segment, HANDLE)

    def cancel_it() -> None:
        seen.wait(20.0)
        batch.cancel()

    canceller = threading.Thread(target=cancel_it)
    canceller.start()
    batch.drive_here()
    canceller.join()
    assert list(batch.statuses()) == [Status.CANCELLED]
    assert rig.drive.path.read_bytes() == rig.drive.content


def test_a_dead_descriptor_is_exchanged(make_rig: Callable[..., Rig], tmp_path: Path) -> None:
    """Requests answered with an error of a device that went: the namespace is found again elsewhere."""
    rig = make_rig()
    moved = tmp_path / "moved"
    rig.drive.namespace.close()
    rig.drive.path.rename(moved)
    rig.drive.path = moved
    rig.drive.appearance += 1
    assert rig.run(WRITE, [0], [0], [70_000]) == [Status.COMPLETE]
    assert moved.read_bytes()[START : START + 70_000] == rig.bytes_at(0, 70_000)


def test_look_may_fail(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(drive={"away_s": 0.1})
    lose(rig, LIVE)

    def cannot() -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    rig.drive.opening = cannot
    assert rig.run(READ, [0], [0], [512]) == [Status.STALLED]


def test_a_shrunk_device_is_out_of_range(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    os.truncate(rig.drive.path, START + 4096)
    assert rig.run(READ, [0, 8192], [0, 8192], [4096, 512]) == [
        Status.COMPLETE,
        Status.OUT_OF_RANGE,
    ]


# ---- edges


def test_edges_are_left_to_the_owner(make_rig: Callable[..., Rig]) -> None:
    asked: list[tuple[int, list[tuple[int, bytes]]]] = []

    def ask(handle: int, pieces: list[tuple[int, bytes]], timeout_s: float) -> list[int]:
        assert 0 < timeout_s <= 20.0
        asked.append((handle, pieces))
        return [Status.COMPLETE] * len(pieces)

    rig = make_rig(ask=ask, way="no")
    rig.memory[:] = np.arange(rig.memory.nbytes, dtype=np.uint64).astype(np.uint8)
    assert rig.run(WRITE, [0, 4000], [500, 8192], [1100, 100]) == [Status.COMPLETE] * 2
    pieces = [(500, rig.bytes_at(0, 12)), (1536, rig.bytes_at(1036, 64)), (8192, rig.bytes_at(4000, 100))]
    assert asked == [(HANDLE, pieces)]
    whole = rig.drive.path.read_bytes()
    assert whole[START + 512 : START + 1536] == rig.bytes_at(12, 1024)
    assert whole[: START + 512] == rig.drive.content[: START + 512]
    assert whole[START + 1536 :] == rig.drive.content[START + 1536 :]


def test_what_the_owner_says_of_an_edge_is_the_transfers_status(make_rig: Callable[..., Rig]) -> None:
    answers: list[Any] = [[0, Status.ACCESS_DENIED], PeerStalled(), ValueError("no"), SystemExit(), [0]]

    def ask(_handle: int, _pieces: list[tuple[int, bytes]], _timeout_s: float) -> list[int]:
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        said: list[int] = answer
        return said

    rig = make_rig(ask=ask)
    assert rig.run(WRITE, [0, 0], [0, 600], [10, 10]) == [0, Status.ACCESS_DENIED]
    assert rig.run(WRITE, [0, 0], [0, 512], [10, 512]) == [Status.STALLED, 0]
    assert rig.run(WRITE, [0], [0], [10]) == [Status.INTERNAL]
    assert rig.run(WRITE, [0], [0], [10]) == [Status.INTERNAL]
    assert rig.run(WRITE, [0], [0], [10]) == [Status.COMPLETE]


def test_an_interrupt_while_the_owner_is_asked_ends_the_batch_and_is_raised(
    make_rig: Callable[..., Rig],
) -> None:
    def ask(_handle: int, _pieces: list[tuple[int, bytes]], _timeout_s: float) -> list[int]:
        raise KeyboardInterrupt

    rig = make_rig(ask=ask)

    def write_then_read() -> list[int]:
        return rig.run(WRITE, [0], [0], [10]) + rig.run(READ, [0], [0], [10])

    with pytest.raises(KeyboardInterrupt):
        write_then_read()
    assert rig.segment.users == 0


def test_neighbours_in_one_block_lose_nothing(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rounds, writers = 60, 4

    def write(k: int) -> None:
        for round_ in range(rounds):
            piece = bytes([k * 50 + round_ % 50]) * 100
            answer = write_pieces(rig.rings[False], rig.range, [(k * 100, piece)], 20.0, passthrough=False)
            assert answer == [Status.COMPLETE]

    threads = [threading.Thread(target=write, args=(k,)) for k in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = b"".join(bytes([k * 50 + (rounds - 1) % 50]) * 100 for k in range(writers))
    assert on_drive(rig, 0, 400) == last
    assert on_drive(rig, 400, 112) == bytes(rig.drive.content[START + 400 : START + 512])


def test_pieces_must_lie_inside(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    for offset, data in ((SIZE, b"x"), (SIZE - 1, b"xy"), (0, b""), (-1, b"x")):
        with pytest.raises(UsageError):
            write_pieces(rig.rings[False], rig.range, [(offset, data)], 1.0, passthrough=False)


@pytest.mark.parametrize("fua", [False, True])
def test_flush_and_durable_writes(make_rig: Callable[..., Rig], fua: bool) -> None:
    rig = make_rig(fua=fua)
    assert rig.run(WRITE, [0], [0], [100_000]) == [Status.COMPLETE]
    assert flush_range(rig.rings[False], rig.range, 5.0, passthrough=False) == Status.COMPLETE
    assert flush_range(rig.rings[True], rig.range, 5.0, passthrough=True) == Status.PENDING
    assert rig.drive.namespace.counters["flushes"] == 2


def test_geometry() -> None:
    def look(devices: Any) -> tuple[int, Any]:
        return GONE, devices

    assert NativeNamespace(1, 4096, 4, 1 << 30, 33, 0, 5000, look).piece_bytes_max == 32 * 4096
    assert NativeNamespace(1, 4096, 4, 1 << 30, 1000, 0, 5000, look).piece_bytes_max == 512 << 10
    assert NativeNamespace(1, 512, 4, 20_000, 1000, 0, 5000, look).piece_bytes_max == 19_968
    assert NativeNamespace(1, 4096, 4, 1024, 2, 0, 5000, look).piece_bytes_max == 4096
    for block in (0, 500, 1 << 20):
        with pytest.raises(UsageError):
            NativeNamespace(1, block, 4, 1 << 20, 33, 0, 5000, look)
    there = NativeNamespace(1, 512, 4, 1 << 20, 33, 0, 5000, look)
    with pytest.raises(UsageError):
        NamespaceRegion(there, 100, 512, fua=False, way="auto", writable=True)


def test_a_revoke_does_not_wait_for_a_lost_namespace(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(drive={"away_s": 600.0})
    lose(rig, COMING_BACK)
    seen = threading.Event()
    inner = rig.drive.look

    def look(devices: Any) -> tuple[int, Any]:
        seen.set()
        return inner(devices)

    namespace = NativeNamespace(1, 512, 512, 1 << 16, 33, 600 * NS_PER_S, 5000, look)
    NamespaceRegion(namespace, START, SIZE, fua=False, way="auto", writable=True).attach(rig.segment, HANDLE)
    batch = Batch(READ, 1)
    batch.fill([rig.address], [HANDLE], [0], [700], None, False)
    rig.segment.bind(batch)
    thread = threading.Thread(target=batch.drive_here)
    thread.start()
    assert seen.wait(20.0)
    assert rig.segment.drop_region(HANDLE, 20.0), "the batch ended while its device was away"
    thread.join(20.0)
    assert list(batch.statuses()) == [Status.STALE_HANDLE]


def test_more_batches_than_rings(make_rig: Callable[..., Rig]) -> None:
    """Eight threads share two rings, each with a part of memory and namespace of its own."""
    rig = make_rig()
    part, rounds = SIZE // 8, 25
    problems: list[object] = []

    def work(k: int) -> None:
        chance = random.Random(k)
        for _ in range(rounds):
            size = chance.choice([100, 512, 5000, 60_000])
            offset = k * part + chance.randrange(part - size)
            data = np.frombuffer(chance.randbytes(size), dtype=np.uint8)
            here = rig.memory[rig.shift + k * part : rig.shift + k * part + size]
            here[:] = data
            batch = Batch(WRITE, 1)
            batch.fill([rig.address + k * part], [HANDLE], [offset], [size], None, False)
            rig.segment.bind(batch)
            batch.drive_here()
            here[:] = 0
            back = Batch(READ, 1)
            back.fill([rig.address + k * part], [HANDLE], [offset], [size], None, False)
            rig.segment.bind(back)
            back.drive_here()
            if batch.worst or back.worst or not (here == data).all():
                problems.append((k, size, batch.worst, back.worst))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert rig.rings[False].rings <= 2


def test_a_thousand_appearances_leak_nothing(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(1000):
        rig.drive.appearance += 1
        assert rig.drive.namespace.open_devices() == LIVE
    assert len(os.listdir("/proc/self/fd")) == before
    rig.drive.namespace.close()
    rig.drive.namespace.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    assert rig.run(READ, [0], [0], [512]) == [Status.COMPLETE]
