"""Open segments: the table of a peer's regions, what each transfer may do, and the choice among paths."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from moonpool.errors import LimitExceeded, RevokeIncomplete, StaleHandle, Status, UsageError
from moonpool.native.io.batch import Batch
from moonpool.native.io.carry import add_tcp_path
from moonpool.native.io.copying import chunk_digests
from moonpool.native.io.lanes import LanePool, announce_by_lane, set_notice_lanes
from moonpool.native.io.regions import LocalRegions
from moonpool.native.io.segment import NativeSegment
from moonpool.native.io.server import TargetServer
from moonpool.native.io.shm import VmSession, add_mapped_path, add_vm_path

KEYS = (b"r" * 16, b"w" * 16)
READ, WRITE = 1, 2
U64_MAX = (1 << 64) - 1
SIZE = 1 << 16
NS_PER_S = 10**9


class Here:
    """A segment whose "peer" is this process: its region is mapped where it is."""

    def __init__(self, *, own_access: int = 7, access: int = 3, writable: bool = True) -> None:
        self.own = LocalRegions(8)
        self.segment = NativeSegment(self.own, 8, 262144)
        self.path = add_mapped_path(self.segment)
        self.mine = np.zeros(SIZE, dtype=np.uint8)
        self.theirs = np.arange(SIZE, dtype=np.uint64).astype(np.uint8)
        self.local = self.mine.ctypes.data
        self.own.add(self.local, SIZE, own_access, *KEYS)
        self.handle = 1 << 32 | 3
        self.segment.put_region(self.handle, self.theirs.ctypes.data, SIZE, access, *KEYS)
        self.segment.set_mapping(self.handle, self.theirs.ctypes.data, writable, self.theirs)

    def one(self, op: int, *, local: int | None = None, region: int | None = None, **where: int) -> Status:
        """One transfer by the quick way, checked to end the same as a batch of one and in a larger one."""
        at = self.local if local is None else local
        handle = self.handle if region is None else region
        offset, length = where.get("offset", 0), where.get("length", 4096)
        quick = self.segment.transfer_one(op, at, handle, offset, length, 20 * NS_PER_S)
        for n in (1, 3):
            batch = Batch(op, n)
            batch.fill(
                [self.local] * (n - 1) + [at],
                [self.handle] * (n - 1) + [handle],
                [0] * (n - 1) + [offset],
                [16] * (n - 1) + [length],
                None,
                False,
            )
            self.segment.bind(batch)
            batch.drive_here()
            assert batch.statuses()[-1] == quick, (n, batch.statuses())
        assert self.segment.users == self.own.users == 0
        return Status(quick)


def test_a_read_and_a_write_move_the_bytes() -> None:
    here = Here()
    assert here.one(READ, offset=100, length=1000) is Status.COMPLETE
    assert np.array_equal(here.mine[:1000], here.theirs[100:1100])
    here.mine[:] = 7
    assert here.one(WRITE, offset=5000, length=60000) is Status.COMPLETE
    assert (here.theirs[5000:65000] == 7).all()
    assert here.theirs[4999] == 4999 % 256
    assert here.theirs[65000] == 65000 % 256


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (SIZE, 1),
        (SIZE - 1, 2),
        (0, SIZE + 1),
        (U64_MAX, 1),
        (1, U64_MAX),
        (U64_MAX, U64_MAX),
        (U64_MAX - 4095, 4096),
    ],
)
def test_bytes_outside_the_region_are_out_of_range(offset: int, length: int) -> None:
    here = Here()
    # What is longer than the local region fails on this side already.
    expected = Status.OUT_OF_RANGE if length <= SIZE else Status.NOT_REGISTERED
    for op in (READ, WRITE):
        assert here.one(op, offset=offset, length=length) is expected


def test_the_last_byte_and_the_empty_transfer_at_the_end_are_inside() -> None:
    here = Here()
    assert here.one(READ, offset=SIZE - 1, length=1) is Status.COMPLETE
    assert here.one(READ, offset=SIZE, length=0) is Status.COMPLETE
    assert here.one(READ, local=here.local + SIZE, length=0) is Status.COMPLETE
    assert here.one(READ, offset=SIZE + 1, length=0) is Status.OUT_OF_RANGE
    assert here.one(READ, local=here.local + SIZE + 1, length=0) is Status.NOT_REGISTERED


@pytest.mark.parametrize("shift", [-1, 1, SIZE, -SIZE])
def test_local_bytes_outside_a_region_are_not_registered(shift: int) -> None:
    here = Here()
    for op in (READ, WRITE):
        assert here.one(op, local=here.local + shift, length=SIZE) is Status.NOT_REGISTERED


@pytest.mark.parametrize("local", [0, 1, U64_MAX, U64_MAX - 4095])
def test_wild_addresses_are_not_registered(local: int) -> None:
    assert Here().one(READ, local=local) is Status.NOT_REGISTERED


def test_a_range_over_two_registered_neighbours_is_in_neither() -> None:
    here = Here()
    own, whole = LocalRegions(8), np.zeros(8192, dtype=np.uint8)
    for half in (0, 4096):
        own.add(whole.ctypes.data + half, 4096, 7, *KEYS)
    here.segment = NativeSegment(own, 8, 262144)
    add_mapped_path(here.segment)
    here.segment.put_region(here.handle, here.theirs.ctypes.data, SIZE, 3, *KEYS)
    here.segment.set_mapping(here.handle, here.theirs.ctypes.data, True, None)
    statuses = [
        here.segment.transfer_one(READ, whole.ctypes.data + at, here.handle, 0, 4096, NS_PER_S)
        for at in (0, 1, 4095, 4096)
    ]
    assert statuses == [Status.COMPLETE, Status.NOT_REGISTERED, Status.NOT_REGISTERED, Status.COMPLETE]


@pytest.mark.parametrize(
    "handle", [0, 1, 3, 2 << 32 | 3, 1 << 32 | 4, 1 << 32 | 8, 1 << 32 | 0xFFFFFFFF, U64_MAX]
)
def test_made_up_handles_are_stale(handle: int) -> None:
    here = Here()
    for op in (READ, WRITE):
        assert here.one(op, region=handle) is Status.STALE_HANDLE
    assert not here.segment.has_region(handle)


@pytest.mark.parametrize(("access", "op"), [(2, READ), (1, WRITE), (0, READ), (0, WRITE)])
def test_a_region_must_allow_the_operation(access: int, op: int) -> None:
    here = Here(access=access)
    before = here.theirs.copy()
    assert here.one(op) is Status.ACCESS_DENIED
    assert np.array_equal(here.theirs, before)
    assert not here.mine.any()


def test_a_read_only_mapping_takes_no_write() -> None:
    here = Here(writable=False)
    assert here.one(READ) is Status.COMPLETE
    assert here.one(WRITE) is Status.ACCESS_DENIED


def test_a_read_only_local_region_is_no_target() -> None:
    here = Here(own_access=3)
    assert here.one(WRITE) is Status.COMPLETE
    assert here.one(READ) is Status.NOT_REGISTERED


@pytest.mark.parametrize("status", [Status.PEER_GONE, Status.STALE_HANDLE])
def test_a_dead_segment_fails_everything(status: Status) -> None:
    here = Here()
    assert here.segment.dead == 0
    here.segment.mark_dead(status)
    assert here.segment.dead == status
    assert here.one(READ) is status
    assert here.one(WRITE) is status
    assert not here.mine.any()


@pytest.mark.parametrize("op", [0, 3, 4, 5, -1, 99])
def test_other_operations_are_refused(op: int) -> None:
    here = Here()
    with pytest.raises(UsageError, match="no operation"):
        here.segment.transfer_one(op, here.local, here.handle, 0, 16, NS_PER_S)


@pytest.mark.parametrize("numbers", [(-1, 0, 0), (0, -1, 0), (0, 0, -1), (1 << 64, 0, 0), (0, 0, 1 << 64)])
def test_numbers_beyond_64_bits_are_refused(numbers: tuple[int, int, int]) -> None:
    local, offset, length = numbers
    here = Here()
    with pytest.raises(OverflowError):
        here.segment.transfer_one(READ, local, here.handle, offset, length, NS_PER_S)


# ---- the table -------------------------------------------------------------------------------------------


def test_regions_come_and_go() -> None:
    here = Here()
    assert here.segment.has_region(here.handle)
    assert here.segment.drop_region(here.handle, 1.0)
    assert not here.segment.has_region(here.handle)
    assert here.segment.drain(1.0)
    assert here.segment.transfer_one(READ, here.local, here.handle, 0, 16, NS_PER_S) == Status.STALE_HANDLE
    with pytest.raises(StaleHandle):
        here.segment.drop_region(here.handle, 1.0)
    with pytest.raises(StaleHandle):
        here.segment.set_mapping(here.handle, here.theirs.ctypes.data, True, None)
    with pytest.raises(StaleHandle):
        here.segment.set_process_vm(here.handle)


def test_a_new_generation_takes_the_slot_and_the_old_mapping_is_gone() -> None:
    here = Here()
    newer = 2 << 32 | 3
    here.segment.put_region(newer, here.theirs.ctypes.data, SIZE, 3, *KEYS)
    assert here.segment.has_region(newer)
    assert not here.segment.has_region(here.handle)
    assert here.one(READ, region=newer) is Status.UNSUPPORTED, "nothing maps the new one yet"


def test_the_same_region_again_changes_nothing() -> None:
    here = Here()
    here.segment.put_region(here.handle, 1, 1, 0, *KEYS)
    assert here.one(READ) is Status.COMPLETE


def test_a_slot_beyond_the_table_is_a_typed_limit() -> None:
    here = Here()
    with pytest.raises(LimitExceeded, match="regions_max") as caught:
        here.segment.put_region(1 << 32 | 8, 4096, 4096, 3, *KEYS)
    assert (caught.value.field, caught.value.limit) == ("regions_max", 8)


@pytest.mark.parametrize("wrong", ["handle", "read key", "write key"])
def test_a_region_without_generation_or_keys_is_refused(wrong: str) -> None:
    here = Here()
    with pytest.raises(UsageError):
        here.segment.put_region(
            5 if wrong == "handle" else 1 << 32 | 5,
            4096,
            4096,
            3,
            b"short" if wrong == "read key" else KEYS[0],
            b"" if wrong == "write key" else KEYS[1],
        )
    assert here.one(READ, region=1 << 32 | 5) is Status.STALE_HANDLE


def test_mappings_are_kept_until_released() -> None:
    here = Here()

    class Mapping:
        def __init__(self, log: list[str]) -> None:
            self.log = log

        def __del__(self) -> None:
            self.log.append("gone")

    log: list[str] = []
    mapping = Mapping(log)
    here.segment.set_mapping(here.handle, here.theirs.ctypes.data, True, mapping)
    kept = [mapping]
    del mapping
    assert not log
    here.segment.release_mapping(kept.pop())
    assert log == ["gone"]


def test_a_reused_slot_waits_for_those_who_use_the_old_region(make_stalled: Any, tools: Any) -> None:
    stalled = make_stalled()
    rig = stalled.rig
    mine, remote = rig.buffer(4096), stalled.memory()
    newer = remote.handle + (1 << 32)
    batch = rig.make(tools.READ, mine.address, remote.handle, 0, 4096)
    with tools.background(batch.drive_here):
        stalled.request()
        assert rig.segment.users == 1
        assert not rig.segment.drop_region(remote.handle, 0.01)
        with pytest.raises(RevokeIncomplete, match="still uses"):
            rig.segment.put_region(newer, 4096, 4096, 3, *KEYS)
        assert not rig.segment.has_region(newer)
        assert not rig.segment.drain(0.01)
        stalled.peers[0].close()
    assert rig.segment.drain(tools.WAIT_S)
    rig.segment.put_region(newer, 4096, 4096, 3, *KEYS)
    assert rig.segment.has_region(newer)


# ---- paths -----------------------------------------------------------------------------------------------


def test_without_a_path_nothing_is_supported() -> None:
    here = Here()
    segment = NativeSegment(here.own, 8, 262144)
    segment.put_region(here.handle, here.theirs.ctypes.data, SIZE, 3, *KEYS)
    assert segment.transfer_one(READ, here.local, here.handle, 0, 16, NS_PER_S) == Status.UNSUPPORTED


def test_a_segment_has_32_paths() -> None:
    here = Here()
    assert [add_mapped_path(here.segment) for _ in range(31)] == list(range(1, 32))
    with pytest.raises(LimitExceeded, match="32 paths"):
        add_mapped_path(here.segment)


def test_each_transfer_goes_by_its_path() -> None:
    here = Here()
    second = add_mapped_path(here.segment)
    batch = Batch(READ, 5)
    path = np.array([here.path, second, second, 0xFFFF, 9], dtype=np.uint16)
    batch.fill([here.local] * 5, here.handle, 0, 100, path, False)
    here.segment.bind(batch)
    batch.drive_here()
    assert list(batch.statuses()) == [0, 0, 0, 0, Status.UNSUPPORTED]
    assert batch.bytes_done == 400
    assert batch.first_failure() == 4
    counted = [here.segment.path_stats(index)["READ"]["transfers"] for index in (here.path, second)]
    assert counted == [2, 2], "an unbound transfer goes by the first path that takes it"


def test_counters_say_what_each_operation_did() -> None:
    here = Here()
    for length in (16, 4096, 60000):
        here.segment.transfer_one(READ, here.local, here.handle, 0, length, NS_PER_S)
    here.segment.transfer_one(WRITE, here.local, here.handle, 0, 100, NS_PER_S)
    stats = here.segment.path_stats(here.path)
    assert stats["fallbacks"] == 0
    read, write = stats["READ"], stats["WRITE"]
    assert (read["batches"], read["transfers"], read["bytes"]) == (3, 3, 64112)
    assert (write["batches"], write["transfers"], write["bytes"]) == (1, 1, 100)
    for one in (read, write):
        uppers = [upper for upper, _ in one["latency_ns_buckets"]]
        assert uppers == sorted(uppers)
        assert sum(count for _, count in one["latency_ns_buckets"]) == one["batches"]
        assert one["latency_sum_ns"] > 0
    with pytest.raises(UsageError, match="no path"):
        here.segment.path_stats(1)


@pytest.mark.parametrize("length", [262143, 262144, (8 << 20) + 17, (16 << 20) + 1])
@pytest.mark.parametrize("op", [READ, WRITE])
def test_long_copies_with_digests(op: int, length: int) -> None:
    own = LocalRegions(2)
    segment = NativeSegment(own, 2, 262144)
    add_mapped_path(segment)
    data = np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8)
    mine, theirs = (np.zeros_like(data), data) if op == READ else (data, np.zeros_like(data))
    own.add(mine.ctypes.data, length, 7, *KEYS)
    segment.put_region(1 << 32, theirs.ctypes.data, length, 3, *KEYS)
    segment.set_mapping(1 << 32, theirs.ctypes.data, True, theirs)
    batch = Batch(op, 1)
    batch.fill(mine.ctypes.data, 1 << 32, 0, length, None, True)
    segment.bind(batch)
    batch.drive_here()
    assert batch.worst == Status.COMPLETE
    assert np.array_equal(mine, theirs)
    assert batch.digests() == [chunk_digests(data)]


# ---- process_vm ------------------------------------------------------------------------------------------


@pytest.fixture
def own_pidfd() -> Iterator[int]:
    fd = os.pidfd_open(os.getpid())
    yield fd
    os.close(fd)


@pytest.mark.parametrize(("pid", "pidfd"), [(0, 3), (-1, 3), (1, -1)])
def test_a_process_needs_a_pid_and_a_pidfd(pid: int, pidfd: int) -> None:
    with pytest.raises(UsageError, match="pidfd"):
        VmSession(pid, pidfd)


@pytest.mark.parametrize("op", [READ, WRITE])
def test_process_vm_carries_granted_regions(own_pidfd: int, op: int) -> None:
    here = Here()
    segment = NativeSegment(here.own, 8, 262144)
    session = VmSession(os.getpid(), own_pidfd)
    path = add_vm_path(segment, session)
    segment.put_region(here.handle, here.theirs.ctypes.data, SIZE, 3, *KEYS)
    batch = Batch(op, 300)
    offsets = np.arange(300, dtype=np.uint64) * np.uint64(128)
    batch.fill(offsets + np.uint64(here.local), here.handle, offsets, 128, None, True)
    segment.bind(batch)
    here.mine[:] = 9
    before = here.theirs.copy()
    assert segment.transfer_one(op, here.local, here.handle, 0, 128, NS_PER_S) == Status.UNSUPPORTED
    segment.set_process_vm(here.handle)
    batch.drive_here()
    assert set(batch.statuses()) == {Status.COMPLETE}
    if op == READ:
        assert np.array_equal(here.mine[: 300 * 128], before[: 300 * 128])
    else:
        assert (here.theirs[: 300 * 128] == 9).all()
    assert np.array_equal(here.theirs[300 * 128 :], before[300 * 128 :])
    digests = batch.digests()
    assert digests is not None
    assert len(digests) == 300
    assert segment.path_stats(path)[("READ", "WRITE")[op == WRITE]]["transfers"] == 300
    assert not session.refused


def test_memory_that_the_owner_unmapped_is_stale_not_fatal(own_pidfd: int) -> None:
    here = Here()
    segment = NativeSegment(here.own, 8, 262144)
    add_vm_path(segment, VmSession(os.getpid(), own_pidfd))
    segment.put_region(here.handle, 4096, SIZE, 3, *KEYS)  # the page at 4096 is never mapped
    segment.set_process_vm(here.handle)
    assert segment.transfer_one(READ, here.local, here.handle, 0, 128, NS_PER_S) == Status.STALE_HANDLE
    assert segment.transfer_one(WRITE, here.local, here.handle, 0, SIZE, NS_PER_S) == Status.STALE_HANDLE


def test_a_session_told_to_stop_leaves_all_to_the_next_path(own_pidfd: int) -> None:
    here = Here()
    segment = NativeSegment(here.own, 8, 262144)
    session = VmSession(os.getpid(), own_pidfd)
    path = add_vm_path(segment, session)
    segment.put_region(here.handle, here.theirs.ctypes.data, SIZE, 3, *KEYS)
    segment.set_process_vm(here.handle)
    session.refuse()
    assert session.refused
    assert segment.transfer_one(READ, here.local, here.handle, 0, 128, NS_PER_S) == Status.UNSUPPORTED
    assert segment.path_stats(path)["fallbacks"] == 1


# ---- what is nothing -------------------------------------------------------------------------------------


def test_none_is_no_part_of_anything(own_pidfd: int) -> None:
    segment = NativeSegment(LocalRegions(1), 1, 0)
    pool = LanePool(lambda *_: -1, lanes_max=1, io=0, spin_ns=0, spin_max_bytes=0, stall_ns=0)
    limits = {"io": 0, "spin_ns": 0, "spin_max_bytes": 0, "stall_ns": 0, "lanes_max": 1, "notices_max": 1}
    calls: list[Any] = [
        lambda: NativeSegment(None, 1, 0),
        lambda: segment.bind(None),
        lambda: segment.put_region(1 << 32, 4096, 4096, 3, None, None),
        lambda: add_mapped_path(None),
        lambda: add_vm_path(None, VmSession(os.getpid(), own_pidfd)),
        lambda: add_vm_path(segment, None),
        lambda: add_tcp_path(None, pool),
        lambda: add_tcp_path(segment, None),
        lambda: set_notice_lanes(None, pool),
        lambda: set_notice_lanes(segment, None),
        lambda: announce_by_lane(None),
        lambda: Batch(READ, 1).be_part_of(None),
        lambda: Batch(READ, 1).attach_notice(None),
        lambda: TargetServer(None, **limits),
        lambda: LocalRegions(1).add(4096, 4096, 3, None, None),
        lambda: pool.call(5, None, 1.0),
    ]
    for call in calls:
        with pytest.raises(TypeError):
            call()
