"""Batches over several paths: shares by what was seen, and what one path leaves another one carries."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moonpool.engine.spraying import REST_NS_MAX, REST_NS_MIN, SHARE_MIN_BYTES, Sprayer, Way, deal
from moonpool.errors import Status
from moonpool.native.io.batch import Batch
from moonpool.native.io.regions import LocalRegions
from moonpool.native.io.segment import NativeSegment
from moonpool.native.io.shm import VmSession, add_mapped_path, add_vm_path
from moonpool.native.io.workers import WorkerPool
from moonpool.transport.base import PathInfo

KEYS = (bytes(16), bytes(16))
MIB = 1 << 20
SIZE = 16 * MIB
HANDLE = 1 << 32


class Here:
    """A segment over this process's memory with two paths: one that copies, and one by process_vm."""

    def __init__(self) -> None:
        self.source = np.arange(SIZE, dtype=np.uint32).astype(np.uint8)
        self.target = np.zeros(SIZE, dtype=np.uint8)
        own = LocalRegions(2)
        self.native = NativeSegment(own, 2, 262144)
        self.pidfd = os.pidfd_open(os.getpid())
        self.vm = VmSession(os.getpid(), self.pidfd)
        add_vm_path(self.native, self.vm)
        add_mapped_path(self.native)
        own.add(self.target.ctypes.data, SIZE, 7, *KEYS)
        self.native.put_region(HANDLE, self.source.ctypes.data, SIZE, 3, *KEYS)
        self.native.set_mapping(HANDLE, self.source.ctypes.data, True, self.source)
        self.native.set_process_vm(HANDLE)
        paths = [PathInfo(0, "shm", "", ""), PathInfo(1, "local", "", "")]
        self.segment: Any = SimpleNamespace(native=self.native, paths=paths, handle=HANDLE)
        self.workers = WorkerPool(1, 10)
        self.sprayer = Sprayer(self.workers, MIB)

    def batch(self, lengths: list[int], region: int | list[int] = HANDLE) -> Batch:
        """Transfers one after the other, from the region's start."""
        places = [sum(lengths[:k]) for k in range(len(lengths))]
        batch = Batch(1, len(lengths))
        local = [self.target.ctypes.data + place for place in places]
        batch.fill(local, region, places, lengths, None, False)
        batch.set_timeout(20.0)
        self.native.bind(batch)
        return batch

    def bytes_by(self, path: int) -> int:
        return int(self.native.path_stats(path)["READ"]["bytes"])


@pytest.fixture
def here() -> Iterator[Here]:
    one = Here()
    yield one
    one.workers.close()
    os.close(one.pidfd)


def test_a_batch_goes_by_both_paths_and_is_whole(here: Here) -> None:
    batch = here.batch([5 * MIB, 4 * MIB, 7 * MIB])
    assert here.sprayer.carry(batch, here.segment)
    assert list(batch.statuses()) == [0, 0, 0]
    assert batch.bytes_done == SIZE
    assert np.array_equal(here.source, here.target)
    assert here.bytes_by(0) + here.bytes_by(1) == SIZE
    assert min(here.bytes_by(0), here.bytes_by(1)) >= SHARE_MIN_BYTES
    assert here.sprayer.counters() == {"spray_batches": 1, "spray_slices": 4, "spray_failovers": 0}


def test_what_one_path_leaves_the_other_carries(here: Here) -> None:
    here.vm.refuse()
    for _ in range(2):
        batch = here.batch([SIZE])
        carried = here.sprayer.carry(batch, here.segment)
        batch.drive_here()
        assert batch.worst == Status.COMPLETE
        assert np.array_equal(here.source, here.target)
        here.target[:] = 0
    assert not carried, "the path rests: the second batch goes by one path alone"
    assert here.bytes_by(0) == 0
    assert here.sprayer.counters()["spray_failovers"] == 1


def test_a_transfer_that_cannot_be_done_fails_alone(here: Here) -> None:
    batch = here.batch([8 * MIB, 8 * MIB], [HANDLE, 5 << 32])
    assert here.sprayer.carry(batch, here.segment)
    assert list(batch.statuses()) == [Status.COMPLETE, Status.STALE_HANDLE]
    assert np.array_equal(here.source[: 8 * MIB], here.target[: 8 * MIB])


def test_a_cancelled_batch_is_not_sent_again(here: Here) -> None:
    batch = here.batch([SIZE])
    here.vm.refuse()
    here.native.mark_dead(int(Status.CANCELLED))
    assert here.sprayer.carry(batch, here.segment)
    assert batch.worst == Status.CANCELLED


def test_small_batches_and_single_paths_are_left_alone(here: Here) -> None:
    assert not here.sprayer.carry(here.batch([MIB]), here.segment)
    here.segment.paths = here.segment.paths[:1]
    assert not here.sprayer.carry(here.batch([SIZE]), here.segment)
    assert here.sprayer.counters()["spray_batches"] == 0


def test_shares_follow_what_was_seen() -> None:
    ways = [Way((0,), 1_000), Way((1,), 1_000)]
    batch = Batch(1, 1)
    batch.fill(4096, HANDLE, 0, 64 * MIB, None, False)
    assert deal(batch, ways).length.tolist() == [32 * MIB, 32 * MIB]
    ways[0].carried(32 * MIB, 1_000_000)
    ways[1].carried(32 * MIB, 3_000_000)
    shares = deal(batch, ways).length.tolist()
    assert shares[0] / shares[1] == pytest.approx(3, rel=0.01)
    ways[1].carried(16 * MIB, 500_000)
    assert ways[1].rate > 11_000_000_000, "a quarter at a time"
    assert ways[1].rate < 33_000_000_000


def test_a_path_that_leaves_all_rests_longer_each_time() -> None:
    way = Way((0,), 1_000)
    rests = []
    for _ in range(8):
        way.left(0)
        rests.append(way.until_ns)
    assert rests[:3] == [REST_NS_MIN, 2 * REST_NS_MIN, 4 * REST_NS_MIN]
    assert rests[-1] == REST_NS_MAX
    way.carried(1, 1)
    assert way.rest_ns == REST_NS_MAX // 2, "one success does not clear the memory"


def test_the_paths_of_a_transport_have_their_turns_before_it_rests() -> None:
    way = Way((4, 5), 1_000)
    way.left(7)
    assert (way.path, way.until_ns) == (5, 0)
    way.left(7)
    assert (way.path, way.until_ns) == (4, 7 + REST_NS_MIN)
