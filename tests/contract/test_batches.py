"""A batch always ends: complete, at its deadline, or cancelled, and then nothing touches its memory."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest

from moonpool import (
    Op,
    QueueFull,
    StaleHandle,
    Status,
    TransferCancelled,
    TransferTimeout,
    UsageError,
)

MIB = 1 << 20
#: Enough for a second and more on any machine, so that whatever is to happen on the way happens on the way.
LONG = 32_768
END_BOUND_S = 5.0
WAIT_S = 20.0

both_ops = pytest.mark.parametrize("op", [Op.READ, Op.WRITE], ids=["read", "write"])


class LongBatch:
    """The arguments of a batch that moves the same MiB over and over, and the memory at both ends."""

    def __init__(self, pair: Any) -> None:
        self.region, self.content = pair.offer(MIB)
        self.mine = pair.buffer(MIB)
        self.before = self.content.copy()
        local = np.full(LONG, self.mine.address, dtype=np.uint64)
        self.what = (local, self.region.handle, 0, MIB)

    def assert_at_rest(self, pair: Any, op: Op) -> None:
        """Local memory is not used any more: what is put there now stays, and reaches nobody."""
        self.mine.array[:] = 0xEE
        other, _ = pair.offer(MIB, seed=9)
        for _ in range(20):
            pair.initiator.read(pair.segment, other.handle, 0, bytearray(MIB))
        assert (self.mine.array == 0xEE).all()
        if op is Op.WRITE:
            # Zeros were written; bytes that were on their way when the lane was torn down may still land.
            assert ((self.content == self.before) | (self.content == 0)).all()
        self.mine.check_guards()


def wait_for_some(batch: Any) -> None:
    """Returns once a first transfer of a batch is complete, so that the batch is running."""
    deadline = time.monotonic() + WAIT_S
    while Status.COMPLETE not in bytes(batch.status):
        assert time.monotonic() < deadline, "no transfer was completed"
        time.sleep(0.0005)


@both_ops
def test_a_deadline_ends_a_running_batch(pair: Any, op: Op) -> None:
    long = LongBatch(pair)
    began = time.monotonic()
    batch = pair.initiator.transfer(op, pair.segment, *long.what, timeout_s=0.05, check=False)
    assert time.monotonic() - began < END_BOUND_S
    assert batch.done
    assert set(bytes(batch.status)) <= {Status.COMPLETE, Status.TIMED_OUT}
    with pytest.raises(TransferTimeout) as caught:
        batch.check()
    assert caught.value.retryable
    assert isinstance(caught.value, TimeoutError)
    assert batch.bytes_done == list(batch.status).count(Status.COMPLETE) * MIB
    long.assert_at_rest(pair, op)


def test_a_deadline_that_has_passed_moves_nothing(pair: Any) -> None:
    long = LongBatch(pair)
    batch = pair.initiator.transfer(Op.READ, pair.segment, *long.what, timeout_s=0, check=False)
    assert set(bytes(batch.status)) == {Status.TIMED_OUT}
    assert not long.mine.array.any()


@pytest.mark.parametrize("timeout_s", [-1, -0.001, float("nan"), float("inf"), 1e300])
def test_a_timeout_is_a_number_of_seconds(pair: Any, timeout_s: float) -> None:
    region, _ = pair.offer(4096)
    mine = pair.buffer(4096)
    with pytest.raises(UsageError, match="timeout_s"):
        pair.initiator.read(pair.segment, region.handle, 0, mine.address, 16, timeout_s=timeout_s)
    with pytest.raises(UsageError, match="timeout_s"):
        pair.initiator.read(pair.segment, region.handle, 0, bytearray(16), timeout_s=timeout_s)
    with pytest.raises(UsageError, match="timeout_s"):
        pair.initiator.submit(Op.READ, pair.segment, mine.address, region.handle, 0, 16, timeout_s=timeout_s)
    with pytest.raises(UsageError, match="timeout_s"):
        pair.initiator.flush(pair.segment, timeout_s=timeout_s)


@both_ops
def test_a_running_batch_can_be_cancelled(pair: Any, op: Op) -> None:
    long = LongBatch(pair)
    batch = pair.initiator.submit(op, pair.segment, *long.what)
    wait_for_some(batch)
    assert not batch.done
    began = time.monotonic()
    assert batch.cancel()
    assert time.monotonic() - began < END_BOUND_S
    assert batch.done
    assert set(bytes(batch.status)) == {Status.COMPLETE, Status.CANCELLED}
    with pytest.raises(TransferCancelled):
        batch.result()
    long.assert_at_rest(pair, op)


def test_a_batch_that_waits_for_a_worker_can_be_cancelled(make_pair: Any) -> None:
    pair = make_pair(worker_threads=1, bulk_lanes=1, bulk_lanes_remote=1)
    long = LongBatch(pair)
    running = pair.initiator.submit(Op.READ, pair.segment, *long.what)
    wait_for_some(running)
    target = bytearray(4096)
    waiting = pair.initiator.submit(Op.READ, pair.segment, target, long.region.handle, 0)
    try:
        assert waiting.cancel()
        assert set(bytes(waiting.status)) == {Status.CANCELLED}
        assert target == bytearray(4096)
        assert not running.done
    finally:
        assert running.cancel()


def test_cancelling_what_has_ended_changes_nothing(pair: Any) -> None:
    region, content = pair.offer(4096)
    target = bytearray(4096)
    batch = pair.initiator.submit(Op.READ, pair.segment, target, region.handle, 0).result()
    assert batch.cancel()
    assert batch.cancel()
    assert batch.ok
    batch.check()
    assert target == content.tobytes()


def test_a_waiter_takes_over_what_waits_for_a_worker(make_pair: Any) -> None:
    pair = make_pair(worker_threads=1, bulk_lanes=1, bulk_lanes_remote=1)
    long = LongBatch(pair)
    running = pair.initiator.submit(Op.READ, pair.segment, *long.what)
    wait_for_some(running)
    target = bytearray(4096)
    waiting = pair.initiator.submit(Op.READ, pair.segment, target, long.region.handle, 0)
    try:
        waiting.result()
        assert target == long.content[:4096].tobytes()
        assert not running.done
    finally:
        running.cancel()


def test_a_wait_has_its_own_bound(pair: Any) -> None:
    long = LongBatch(pair)
    batch = pair.initiator.submit(Op.READ, pair.segment, *long.what)
    wait_for_some(batch)
    assert not batch.wait(0)
    assert not batch.wait(0.01)
    with pytest.raises(TransferTimeout):
        batch.result(0.01)
    assert batch.done
    assert Status.CANCELLED in bytes(batch.status)
    assert batch.wait(0)
    long.assert_at_rest(pair, Op.READ)


@both_ops
def test_submitted_batches_arrive(pair: Any, pattern: Any, op: Op) -> None:
    region, content = pair.offer(64 * 4096)
    mine = pair.buffer(64 * 4096)
    mine.array[:] = pattern(mine.size, 4)
    batches = [
        pair.initiator.submit(op, pair.segment, mine.address + at, region.handle, at, 4096)
        for at in range(0, 64 * 4096, 4096)
    ]
    for batch in batches:
        assert batch.result() is batch
        assert batch.ok
        assert batch.bytes_done == 4096
        assert batch.elapsed_ns > 0
        assert "COMPLETE" in repr(batch)
    assert np.array_equal(mine.array, content)


def test_a_dropped_batch_still_arrives(pair: Any, eventually: Any) -> None:
    region, content = pair.offer(1 * MIB)
    sent = np.full(1 * MIB, 0x77, dtype=np.uint8)
    pair.initiator.submit(Op.WRITE, pair.segment, sent, region.handle, 0)
    del sent
    eventually(lambda: bool((content == 0x77).all()), "the dropped batch arrives")


def test_a_buffer_is_free_once_its_batch_has_ended(pair: Any) -> None:
    region, _ = pair.offer(4096)
    target = bytearray(4096)
    pair.initiator.submit(Op.READ, pair.segment, target, region.handle, 0).result()
    target.append(1)  # a buffer that is held cannot be resized
    target = bytearray(4096)
    pair.initiator.read(pair.segment, region.handle, 0, target)
    target.append(1)
    target = bytearray(4096)

    async def wait() -> None:
        await pair.initiator.submit(Op.READ, pair.segment, target, region.handle, 0)

    asyncio.run(wait())
    target.append(1)


def test_the_queue_of_batches_is_bounded(make_pair: Any) -> None:
    pair = make_pair(worker_threads=1, bulk_lanes=1, bulk_lanes_remote=1, queued_batches_max=3)
    long = LongBatch(pair)
    running = pair.initiator.submit(Op.READ, pair.segment, *long.what)
    wait_for_some(running)
    targets = [bytearray(64) for _ in range(4)]
    submit = lambda k: pair.initiator.submit(Op.READ, pair.segment, targets[k], long.region.handle, 0)  # noqa: E731
    waiting = [submit(k) for k in range(3)]
    try:
        for _ in range(200):
            with pytest.raises(QueueFull, match="queued_batches_max") as caught:
                submit(3)
        assert caught.value.retryable
        del caught  # its traceback has the refused batch
        targets[3].append(1)  # what was refused holds nothing
    finally:
        running.cancel()
    for batch in waiting:
        batch.result()
    targets[3].pop()
    submit(3).result()
    assert all(target == long.content[:64].tobytes() for target in targets)


async def _read_all(pair: Any, region: Any, targets: list[bytearray]) -> list[Any]:
    reads = [
        pair.initiator.submit(Op.READ, pair.segment, target, region.handle, k * 64)
        for k, target in enumerate(targets)
    ]

    async def wait(batch: Any) -> Any:
        return await batch

    return await asyncio.gather(*map(wait, reads))


def test_many_batches_are_awaited_at_once(pair: Any) -> None:
    region, content = pair.offer(400 * 64)
    targets = [bytearray(64) for _ in range(400)]
    batches = asyncio.run(_read_all(pair, region, targets))
    assert all(batch.ok for batch in batches)
    assert b"".join(targets) == content.tobytes()[: 400 * 64]


def test_one_batch_may_have_several_waiters(pair: Any) -> None:
    long = LongBatch(pair)

    async def wait_twice() -> list[BaseException | Any]:
        batch = pair.initiator.submit(Op.READ, pair.segment, *long.what, timeout_s=0.2)

        async def wait() -> Any:
            return await batch

        first, second = asyncio.create_task(wait()), asyncio.create_task(wait())
        return await asyncio.wait_for(asyncio.gather(first, second, return_exceptions=True), WAIT_S)

    assert [type(one) for one in asyncio.run(wait_twice())] == [TransferTimeout, TransferTimeout]


def test_awaiting_raises_what_failed(pair: Any) -> None:
    region, _ = pair.offer(4096)

    async def wait() -> None:
        await pair.initiator.submit(Op.READ, pair.segment, bytearray(16), region.handle + (1 << 32), 0)

    with pytest.raises(StaleHandle):
        asyncio.run(wait())


def test_cancelling_the_task_cancels_the_batch(pair: Any) -> None:
    long = LongBatch(pair)

    async def cancel_midway() -> Any:
        batch = pair.initiator.submit(Op.READ, pair.segment, *long.what)

        async def wait() -> Any:
            return await batch

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)  # a task that is cancelled before its first step awaits nothing
        while Status.COMPLETE not in bytes(batch.status):
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return batch

    batch = asyncio.run(cancel_midway())
    assert batch.done, "the awaiting task ended before its batch: somebody may reuse the memory"
    assert Status.CANCELLED in bytes(batch.status)
    long.assert_at_rest(pair, Op.READ)


def test_threads_share_an_engine(pair: Any, pattern: Any) -> None:
    region, content = pair.offer(8 * 65_536)
    failures: list[BaseException] = []

    def work(which: int) -> None:
        mine = content[which * 65_536 : (which + 1) * 65_536]
        try:
            for turn in range(30):
                sent = pattern(65_536, 100 * which + turn)
                pair.initiator.write(pair.segment, region.handle, which * 65_536, sent.tobytes())
                back = bytearray(65_536)
                pair.initiator.submit(Op.READ, pair.segment, back, region.handle, which * 65_536).result()
                assert back == sent.tobytes()
                assert np.array_equal(mine, sent)
        except BaseException as problem:
            failures.append(problem)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_segments_are_reached_by_handle_until_closed(pair: Any) -> None:
    region, content = pair.offer(4096)
    handle = pair.segment.handle
    target = bytearray(4096)
    pair.initiator.read(handle, region.handle, 0, target)
    assert target == content.tobytes()
    again = pair.initiator.open(pair.name)
    assert again.handle != handle
    pair.initiator.close_segment(handle)
    for gone in (handle, pair.segment, handle + (1 << 32), 0, 77, 1 << 63, -1):
        with pytest.raises(StaleHandle):
            pair.initiator.read(gone, region.handle, 0, bytearray(16))
        with pytest.raises(StaleHandle):
            pair.initiator.transfer(Op.READ, gone, bytearray(16), region.handle, 0)
        with pytest.raises(StaleHandle):
            pair.initiator.close_segment(gone)
    for wrong in ("a name", None, 1.5, [handle], pair.initiator):
        with pytest.raises(UsageError, match="segment"):
            pair.initiator.read(wrong, region.handle, 0, bytearray(16))
    pair.initiator.read(np.uint64(again.handle), region.handle, 0, target)
    # The other opening of the same peer is as good as before.
    pair.initiator.read(again, region.handle, 0, target)


def test_closing_a_segment_ends_its_batches(pair: Any) -> None:
    long = LongBatch(pair)
    batch = pair.initiator.submit(Op.READ, pair.segment, *long.what)
    wait_for_some(batch)
    pair.initiator.close_segment(pair.segment)
    assert batch.wait(WAIT_S)
    assert set(bytes(batch.status)) == {Status.COMPLETE, Status.CANCELLED}
    long.mine.array[:] = 0xEE
    other = pair.initiator.open(pair.name)
    for _ in range(20):
        pair.initiator.read(other, long.region.handle, 0, bytearray(MIB))
    assert (long.mine.array == 0xEE).all()
