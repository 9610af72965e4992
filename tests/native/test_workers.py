"""Worker threads: the bound of their queue, waiters that take over, and the end."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from moonpool.errors import EngineClosed, QueueFull, Status, UsageError
from moonpool.native.io.workers import WORKERS_MAX, WorkerPool


@pytest.fixture
def make_pool() -> Any:
    pools: list[WorkerPool] = []

    def make(threads: int, queued_max: int = 100, **order: Any) -> WorkerPool:
        pools.append(WorkerPool(threads, queued_max, **order))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def idle(make_target: Any, make_rig: Any, tools: Any) -> Any:
    """`new(op)` makes a batch over a lane to a living target."""
    target = make_target()
    rig = make_rig(target.connect)
    remote = target.offer(4096)
    rig.know(remote)
    mine = rig.buffer(4096)

    class Idle:
        def new(self, op: int = tools.READ) -> Any:
            return rig.make(op, mine.address, remote.handle, 0, 4096)

    return Idle()


def test_a_worker_drives_what_nobody_waits_on(make_pool: Any, idle: Any, tools: Any) -> None:
    pool = make_pool(1)
    batches = [idle.new() for _ in range(20)]
    for batch in batches:
        pool.submit(batch)
    tools.wait_until(lambda: all(batch.done for batch in batches), "all end without a waiter")
    assert {batch.worst for batch in batches} == {Status.COMPLETE}
    assert pool.queued == 0


def test_the_queue_is_bounded(make_pool: Any, idle: Any) -> None:
    pool = make_pool(0, 3)
    batches = [idle.new() for _ in range(4)]
    for batch in batches[:3]:
        pool.submit(batch)
    assert pool.queued == 3
    with pytest.raises(QueueFull, match="queued_batches_max") as caught:
        pool.submit(batches[3])
    assert caught.value.retryable
    assert caught.value.limit == 3
    assert not batches[3].done
    batches[3].drive_here()
    assert batches[3].worst == Status.COMPLETE, "a refused batch is as new"


def test_a_waiter_takes_a_queued_batch_over(make_pool: Any, idle: Any) -> None:
    pool = make_pool(0)
    first, second = idle.new(), idle.new()
    pool.submit(first)
    pool.submit(second)
    assert second.wait()
    assert second.worst == Status.COMPLETE
    assert not first.done
    assert not first.wait(0.01), "a wait with a bound never starts what it could not stop"
    assert first.wait()
    assert pool.queued == 2, "ended batches leave the queue when a thread gets to them"


def test_a_worker_skips_what_was_taken_over(make_pool: Any, idle: Any, make_stalled: Any, tools: Any) -> None:
    pool = make_pool(1)
    stalled = make_stalled()
    mine, remote = stalled.rig.buffer(4096), stalled.memory()
    busy = stalled.rig.make(tools.READ, mine.address, remote.handle, 0, 4096)
    pool.submit(busy)
    stalled.request()
    taken, left = (stalled.rig.make(tools.READ, mine.address, remote.handle, 0, 4096) for _ in range(2))
    pool.submit(taken)
    pool.submit(left)
    taken.cancel()
    assert taken.worst == Status.CANCELLED
    assert not left.done
    stalled.peers[0].close()
    tools.wait_until(lambda: busy.done, "the worker goes on")
    assert busy.worst == Status.PEER_GONE
    left.cancel()
    assert left.wait()


def test_a_stalled_peer_holds_up_no_other(make_pool: Any, idle: Any, make_stalled: Any, tools: Any) -> None:
    pool = make_pool(1)
    stalled = make_stalled()
    mine, remote = stalled.rig.buffer(4096), stalled.memory()
    stuck = [stalled.rig.make(tools.READ, mine.address, remote.handle, 0, 4096) for _ in range(5)]
    for batch in stuck:
        pool.submit(batch)
    stalled.request()
    others = [idle.new() for _ in range(20)]
    for batch in others:
        pool.submit(batch)
    tools.wait_until(lambda: all(batch.done for batch in others), "those of another segment go on")
    assert {batch.worst for batch in others} == {Status.COMPLETE}
    assert not any(batch.done for batch in stuck)
    assert pool.queued == 4, "a stalled segment has no more threads than its share"
    for batch in stuck:
        batch.cancel()
        assert batch.wait()


def test_cancelling_a_queued_batch_ends_it_here(make_pool: Any, idle: Any) -> None:
    pool = make_pool(0)
    batch = idle.new()
    pool.submit(batch)
    batch.cancel()
    assert batch.done
    assert batch.worst == Status.CANCELLED


def test_a_batch_is_submitted_once(make_pool: Any, idle: Any) -> None:
    pool = make_pool(0)
    batch = idle.new()
    pool.submit(batch)
    with pytest.raises(UsageError, match="submitted once"):
        pool.submit(batch)
    driven = idle.new()
    driven.drive_here()
    with pytest.raises(UsageError, match="submitted once"):
        pool.submit(driven)
    assert pool.queued == 1


def test_closing_ends_what_is_queued_even_without_threads(make_pool: Any, idle: Any) -> None:
    pool = make_pool(0)
    batches = [idle.new() for _ in range(5)]
    for batch in batches:
        pool.submit(batch)
    batches[2].cancel()
    pool.close()
    assert [batch.worst for batch in batches] == [0, 0, Status.CANCELLED, 0, 0]
    assert all(batch.done for batch in batches)
    assert pool.queued == 0
    pool.close()
    with pytest.raises(EngineClosed):
        pool.submit(idle.new())


def test_closing_waits_for_what_runs(make_pool: Any, make_stalled: Any, tools: Any) -> None:
    pool = make_pool(1)
    stalled = make_stalled()
    mine, remote = stalled.rig.buffer(4096), stalled.memory()
    running = stalled.rig.make(tools.READ, mine.address, remote.handle, 0, 4096)
    queued = stalled.rig.make(tools.READ, mine.address, remote.handle, 0, 4096)
    pool.submit(running)
    stalled.request()
    pool.submit(queued)
    for batch in (running, queued):
        batch.cancel()
    pool.close()
    assert (running.worst, queued.worst) == (Status.CANCELLED, Status.CANCELLED)


def test_dropping_a_pool_closes_it(idle: Any) -> None:
    pool = WorkerPool(2, 10)
    batch = idle.new()
    pool.submit(batch)
    del pool
    assert batch.done


def test_a_stalled_batch_does_not_hold_up_the_next_while_a_thread_is_free(
    make_pool: Any, make_stalled: Any, idle: Any, tools: Any
) -> None:
    pool = make_pool(2)
    warm = idle.new()
    pool.submit(warm)
    tools.wait_until(lambda: warm.done, "the first thread is up")
    stalled = [make_stalled(), make_stalled()]
    batches = []
    for one in stalled:
        mine, remote = one.rig.buffer(4096), one.memory()
        batches.append(one.rig.make(tools.READ, mine.address, remote.handle, 0, 4096))
    # Back to back: the thread that the first one wakes still counts as idle at the second.
    for batch in batches:
        pool.submit(batch)
    for one in stalled:
        assert one.request(), "both are on their way at once"
    for one in stalled:
        one.peers[0].close()
    tools.wait_until(lambda: all(batch.done for batch in batches), "both end")


@pytest.mark.parametrize(("asked", "given"), [(0, 0), (1, 1), (64, 64), (65, 64), (4_000_000_000, 64)])
def test_threads_are_bounded(make_pool: Any, asked: int, given: int) -> None:
    pool = make_pool(asked, 7)
    assert (pool.threads, pool.queued_max) == (given, 7)
    assert WORKERS_MAX == 64


def test_what_is_no_batch_is_refused(make_pool: Any) -> None:
    with pytest.raises(TypeError):
        make_pool(1).submit(None)
    with pytest.raises(TypeError):
        make_pool(1).submit(object())


HIGH, LOW, NORMAL = 2, 0, 1
HOUR_NS = 3_600 * 10**9


def test_a_higher_class_goes_first(make_pool: Any, idle: Any, make_stalled: Any, tools: Any) -> None:
    """The only thread is busy while three come; then they end in the order of their classes."""
    pool = make_pool(1, head_start_ns=HOUR_NS)
    stalled = make_stalled()
    mine, remote = stalled.rig.buffer(4096), stalled.memory()
    busy, *waiting = (stalled.rig.make(tools.READ, mine.address, remote.handle, 0, 4096) for _ in range(4))
    pool.submit(busy)
    tools.wait_until(lambda: bool(stalled.peers), "the thread is busy")
    for batch, of in zip(waiting, (LOW, NORMAL, HIGH), strict=True):
        pool.submit(batch, of)
    started = []
    for turn, batch in enumerate((busy, *reversed(waiting))):
        assert stalled.request(turn), "the next one is on its way"
        stalled.peers[turn].close()
        tools.wait_until(lambda batch=batch: batch.done, "it ends when its lane does")
        started.append([each.done for each in waiting])
    assert started == [[False, False, False], [False, False, True], [False, True, True], [True, True, True]]
    assert [pool.counts(of)["started"] for of in (LOW, NORMAL, HIGH)] == [1, 1, 1]


def test_a_cap_holds_batches_up_and_not_their_ends(make_pool: Any, idle: Any, tools: Any) -> None:
    pool = make_pool(1, caps=[(LOW, 1)])  # a byte a second: the first one pays for an hour
    first, second, third, fourth = (idle.new() for _ in range(4))
    pool.submit(first, LOW)
    tools.wait_until(lambda: first.done, "the bucket is not empty at first")
    for batch in (second, third, fourth):
        pool.submit(batch, LOW)
    other = idle.new()
    pool.submit(other, NORMAL)
    tools.wait_until(lambda: other.done, "other classes go on")
    assert not any(batch.done for batch in (second, third, fourth))
    assert not second.wait(0.01), "a waiter does not get around the cap"
    assert not second.done
    third.cancel()
    assert third.done, "but an end comes at once"
    assert third.worst == Status.CANCELLED
    assert pool.counts(LOW)["held"] >= 1
    pool.close()
    assert second.worst == fourth.worst == Status.COMPLETE, "closing lets them run"


def test_a_capped_batch_ends_at_its_deadline(make_pool: Any, idle: Any, tools: Any) -> None:
    for waited in (True, False):
        pool = make_pool(1, caps=[(LOW, 1)])
        first, late = idle.new(), idle.new()
        pool.submit(first, LOW)
        tools.wait_until(lambda first=first: first.done, "the bucket is not empty at first")
        late.set_timeout(0.02)
        pool.submit(late, LOW)
        if waited:
            assert late.wait()
        else:
            tools.wait_until(lambda late=late: late.done, "a worker ends it")
        assert late.worst == Status.TIMED_OUT


def test_a_cap_and_a_full_queue(make_pool: Any, idle: Any) -> None:
    pool = make_pool(0, 2, caps=[(LOW, 1)])
    batches = [idle.new() for _ in range(3)]
    pool.submit(batches[0], LOW)
    pool.submit(batches[1], LOW)
    with pytest.raises(QueueFull):
        pool.submit(batches[2], LOW)
    batches[0].cancel()
    pool.submit(batches[2], LOW)  # the cancelled one is swept
    assert pool.queued == 2
    assert pool.counts(LOW)["gone"] == 1


@pytest.mark.parametrize("of", [-1, 4])
def test_there_are_four_classes(make_pool: Any, idle: Any, of: int) -> None:
    pool = make_pool(0)
    with pytest.raises(UsageError, match="class"):
        pool.submit(idle.new(), of)
    with pytest.raises(UsageError, match="class"):
        pool.counts(of)
    with pytest.raises(UsageError, match="capped"):
        WorkerPool(0, 1, caps=[(3, 1)])


def test_every_batch_ends_once_whoever_drives_it(make_pool: Any, idle: Any, tools: Any) -> None:
    """Threads submit to all classes, some of them capped, while waiters take over, cancel and walk away."""
    pool = make_pool(2, 4_096, head_start_ns=10**6, caps=[(LOW, 1 << 20), (NORMAL, 1 << 24)])
    batches: list[Any] = []
    lock = threading.Lock()

    def work(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(60):
            batch = idle.new()
            if dice.random() < 0.2:
                batch.set_timeout(dice.choice([0.0, 0.001, 0.01]))
            pool.submit(batch, dice.randrange(4))
            with lock:
                batches.append(batch)
            what = dice.random()
            if what < 0.3:
                assert batch.wait()
            elif what < 0.6:
                batch.cancel()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    pool.close()
    assert len(batches) == 240
    assert all(batch.done for batch in batches)
    assert {batch.worst for batch in batches} <= {Status.COMPLETE, Status.CANCELLED, Status.TIMED_OUT}
    found = [pool.counts(of) for of in range(4)]
    assert sum(one["submitted"] for one in found) == 240
    assert all(one["submitted"] == one["started"] + one["gone"] for one in found)
    assert pool.queued == 0
