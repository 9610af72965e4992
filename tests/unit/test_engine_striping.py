"""Large batches as stripes: judged as one batch, ended as one batch, whatever happens on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moonpool.engine.striping import Stripe, run_striped
from moonpool.errors import Status
from moonpool.native.io.batch import Batch
from moonpool.native.io.regions import LocalRegions
from moonpool.native.io.segment import NativeSegment
from moonpool.native.io.shm import add_mapped_path
from moonpool.native.io.workers import WorkerPool

KEYS = (bytes(16), bytes(16))
SIZE = 1 << 16


class Here:
    """A segment over this process's memory, and batches on it."""

    def __init__(self) -> None:
        self.source = np.arange(SIZE, dtype=np.uint64).astype(np.uint8)
        self.target = np.zeros(SIZE, dtype=np.uint8)
        self.own = LocalRegions(2)
        self.segment = NativeSegment(self.own, 2, 262144)
        add_mapped_path(self.segment)
        self.own.add(self.target.ctypes.data, SIZE, 7, *KEYS)
        self.segment.put_region(1 << 32, self.source.ctypes.data, SIZE, 3, *KEYS)
        self.segment.set_mapping(1 << 32, self.source.ctypes.data, True, self.source)

    def batch(self, places: list[int], length: int, regions: list[int] | None = None) -> Batch:
        batch = Batch(1, len(places))
        local = [self.target.ctypes.data + place for place in places]
        batch.fill(local, regions or 1 << 32, places, length, None, False)
        batch.set_timeout(20.0)
        self.segment.bind(batch)
        return batch

    def stripes(self, whole: Batch, pieces: list[tuple[list[int], list[int]]]) -> list[Stripe]:
        """One stripe for each (places, owners), of 1 KiB slices."""
        made = []
        for places, owners in pieces:
            part = self.batch(places, 1024)
            part.be_part_of(whole)
            made.append(Stripe(part, owners))
        return made


PIECES = [([0, 4096], [0, 1]), ([1024, 5120], [0, 1]), ([2048, 6144], [0, 1]), ([3072, 7168], [0, 1])]


@pytest.mark.parametrize(("threads", "queued_max"), [(2, 10), (0, 10), (1, 1), (0, 0)])
def test_stripes_end_as_one_batch_with_any_workers(threads: int, queued_max: int) -> None:
    here = Here()
    workers = WorkerPool(threads, queued_max)
    whole = here.batch([0, 4096], 4096)
    run_striped(whole, here.stripes(whole, PIECES), workers)
    assert whole.done
    assert list(whole.statuses()) == [0, 0]
    assert whole.bytes_done == 8192
    assert np.array_equal(here.target[:8192], here.source[:8192])
    assert not here.target[8192:].any()
    workers.close()


def test_a_failed_slice_fails_its_transfer_alone() -> None:
    here = Here()
    workers = WorkerPool(1, 10)
    whole = here.batch([0, 4096], 4096)
    stripes = here.stripes(whole, PIECES[:3])
    broken = here.batch([3072, 7168], 1024, [1 << 32, 5 << 32])
    run_striped(whole, [*stripes, Stripe(broken, [0, 1])], workers)
    assert list(whole.statuses()) == [Status.COMPLETE, Status.STALE_HANDLE]
    assert whole.first_failure() == 1
    workers.close()


def test_an_interrupt_leaves_no_stripe_behind() -> None:
    here = Here()
    whole = here.batch([0, 4096], 4096)
    stripes = here.stripes(whole, PIECES)

    class Interrupted:
        """A pool whose second submission is interrupted."""

        def __init__(self) -> None:
            self.pool = WorkerPool(0, 10)
            self.submitted = 0

        def submit(self, batch: Batch) -> None:
            self.submitted += 1
            if self.submitted == 2:
                raise KeyboardInterrupt
            self.pool.submit(batch)

    workers: Any = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        run_striped(whole, stripes, workers)
    assert all(stripe.native.done for stripe in stripes)
    assert {stripe.native.worst for stripe in stripes} == {Status.CANCELLED}
    assert not here.target.any()
    workers.pool.close()
