"""Second reads: begun when the first is slow, believed only when they are right and first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from moonpool.store.hedging import Hedger, Staged

WAIT_S = 10.0


class FakeBatch:
    """A first read of `n` keys that runs until it is told to end."""

    def __init__(self, n: int = 1, total_bytes: int = 100) -> None:
        self.n = n
        self.total_bytes = total_bytes
        self.done = False
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.done = True
        self.cancelled.set()


class FakeValue:
    """Stands for staged bytes: only its identity counts here."""


def staged(*numbers: int) -> list[Staged]:
    return [Staged(number, FakeValue()) for number in numbers]  # type: ignore[arg-type]


@pytest.fixture
def hedger() -> Iterator[Hedger]:
    hedger = Hedger(after_us=100, at_once_max=2)
    yield hedger
    hedger.close()


def watch(hedger: Hedger, batch: Any, again: Any) -> Any:
    return hedger.watch(batch, again)


def test_a_slow_read_is_cancelled_once_the_second_is_right(hedger: Hedger) -> None:
    batch, brought = FakeBatch(2), staged(0, 1)
    guard = watch(hedger, batch, lambda: brought)
    assert batch.cancelled.wait(WAIT_S)
    assert hedger.settle(guard) is brought
    assert (hedger.begun, hedger.won) == (1, 1)


def test_a_second_read_that_lacks_a_key_changes_nothing(hedger: Hedger) -> None:
    batch, asked = FakeBatch(2), threading.Event()

    def again() -> list[Staged]:
        asked.set()
        return staged(0)

    guard = watch(hedger, batch, again)
    assert asked.wait(WAIT_S)
    hedger.close()  # returns when the second read is over
    assert not batch.cancelled.is_set()
    assert hedger.settle(guard) == ()
    assert (hedger.begun, hedger.won) == (1, 0)


def test_a_read_that_ended_in_time_is_left_alone() -> None:
    hedger = Hedger(after_us=60_000_000, at_once_max=2)
    asked: list[int] = []
    for _ in range(3):
        guard = watch(hedger, FakeBatch(), lambda: asked.append(1) or staged(0))
        assert hedger.settle(guard) == ()
    hedger.close()
    assert (asked, hedger.begun) == ([], 0)


def test_a_second_read_that_comes_after_the_first_is_not_taken(hedger: Hedger) -> None:
    batch, asked, go_on = FakeBatch(), threading.Event(), threading.Event()

    def again() -> list[Staged]:
        asked.set()
        go_on.wait(WAIT_S)
        return staged(0)

    guard = watch(hedger, batch, again)
    assert asked.wait(WAIT_S)
    batch.done = True
    assert hedger.settle(guard) == ()
    go_on.set()
    hedger.close()
    assert not batch.cancelled.is_set()
    assert guard.staged == ()


def test_no_more_second_reads_at_once_than_allowed(hedger: Hedger) -> None:
    running, most, lock, go_on = 0, 0, threading.Lock(), threading.Event()
    two = threading.Event()

    def again() -> list[Staged]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if running == 2:
                two.set()
        go_on.wait(WAIT_S)
        with lock:
            running -= 1
        return staged(0)

    batches = [FakeBatch() for _ in range(6)]
    guards = [watch(hedger, batch, again) for batch in batches]
    assert two.wait(WAIT_S)
    go_on.set()
    for batch in batches:
        assert batch.cancelled.wait(WAIT_S)
    assert most == 2
    assert all(hedger.settle(guard) for guard in guards)


def test_it_can_be_switched_off_and_closed_twice() -> None:
    hedger = Hedger(after_us=0, at_once_max=1)
    assert not hedger.is_on
    hedger.close()
    hedger.close()
    assert Hedger(after_us=1, at_once_max=1).is_on


def test_what_counts_as_slow_follows_what_is_seen(hedger: Hedger) -> None:
    before = hedger.delay_ns
    for _ in range(200):
        guard = watch(hedger, FakeBatch(), list)
        guard.started_ns -= 10**9  # as if it had taken a second
        hedger.settle(guard)
    assert hedger.delay_ns > 10 * before
