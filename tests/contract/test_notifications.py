"""Notifications: in order, each once, bounded; after the transfers of their batch."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from moonpool import Op, QueueFull, Status, UsageError

WAIT_S = 20.0


def take(pair: Any, count: int) -> list[Any]:
    """Exactly `count` notifications, waited for."""
    taken: list[Any] = []
    while len(taken) < count:
        more = pair.target.notifications(count - len(taken), timeout_s=WAIT_S)
        assert more, f"{len(taken)} of {count} notifications came"
        taken += more
    assert pair.target.notifications() == []
    return taken


def test_a_thousand_keep_their_order(pair: Any) -> None:
    sent = [f"message {number}".encode() * (number % 7) for number in range(1_000)]
    for message in sent:
        pair.initiator.notify(pair.segment, message)
    taken = take(pair, 1_000)
    assert [one.message for one in taken] == sent
    assert {one.sender for one in taken} == {pair.initiator.instance}
    numbers = [one.number for one in taken]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("size", [0, 1, 16_383, 16_384, 16_385, 65_536])
def test_messages_of_every_size_arrive_whole(pair: Any, pattern: Any, size: int) -> None:
    message = pattern(size, 6).tobytes()
    for like in (message, bytearray(message), memoryview(message)):
        pair.initiator.notify(pair.segment, like)
    assert [one.message for one in take(pair, 3)] == [message] * 3


def test_a_message_too_long_is_a_usage_error(make_pair: Any) -> None:
    pair = make_pair(notification_bytes_max=100)
    pair.initiator.notify(pair.segment, bytes(100))
    with pytest.raises(UsageError, match="100"):
        pair.initiator.notify(pair.segment, bytes(101))
    region, _ = pair.offer(4096)
    with pytest.raises(UsageError, match="100"):
        pair.initiator.submit(Op.READ, pair.segment, bytearray(8), region.handle, 0, notify=bytes(101))
    with pytest.raises(UsageError):
        pair.initiator.notify(pair.segment, "text")
    assert [one.message for one in take(pair, 1)] == [bytes(100)]


def test_a_full_queue_refuses_and_loses_nothing(make_pair: Any) -> None:
    pair = make_pair(notifications_max=10)
    for number in range(10):
        pair.initiator.notify(pair.segment, bytes([number]))
    for _ in range(3):
        with pytest.raises(QueueFull) as caught:
            pair.initiator.notify(pair.segment, b"one too many")
    assert caught.value.retryable
    assert [one.message for one in pair.target.notifications(4)] == [bytes([number]) for number in range(4)]
    for number in range(10, 14):
        pair.initiator.notify(pair.segment, bytes([number]))
    with pytest.raises(QueueFull):
        pair.initiator.notify(pair.segment, b"one too many")
    assert [one.message for one in take(pair, 10)] == [bytes([number]) for number in range(4, 14)]
    assert pair.target.metrics()["counters"]["target_notices_refused"] == 4


def test_a_batch_is_announced_after_its_bytes(pair: Any, pattern: Any) -> None:
    region, content = pair.offer(256 * 1024)
    for turn in range(50):
        sent = pattern(256 * 1024, turn)
        batch = pair.initiator.submit(
            Op.WRITE, pair.segment, sent.copy(), region.handle, 0, notify=b"turn %d" % turn
        )
        (notice,) = pair.target.notifications(timeout_s=WAIT_S)
        assert notice.message == b"turn %d" % turn
        assert np.array_equal(content, sent), "announced before its bytes were there"
        batch.result()


def test_a_failed_batch_is_not_announced(pair: Any) -> None:
    region, _ = pair.offer(4096)
    batch = pair.initiator.submit(
        Op.READ, pair.segment, bytearray(64), region.handle, 1 << 20, notify=b"done"
    )
    assert batch.wait(WAIT_S)
    assert batch.status[0] == Status.OUT_OF_RANGE
    pair.initiator.notify(pair.segment, b"later")
    assert [one.message for one in take(pair, 1)] == [b"later"]


def test_an_announcement_that_finds_no_room_fails_its_batch(make_pair: Any) -> None:
    pair = make_pair(notifications_max=1)
    region, content = pair.offer(4096)
    pair.initiator.notify(pair.segment, b"first")
    target = bytearray(4096)
    batch = pair.initiator.submit(Op.READ, pair.segment, target, region.handle, 0, notify=b"second")
    with pytest.raises(QueueFull):
        batch.result()
    assert target == content.tobytes(), "the bytes did arrive"
    assert [one.message for one in take(pair, 1)] == [b"first"]


def test_threads_of_one_engine_keep_an_order_each(pair: Any) -> None:
    failures: list[BaseException] = []

    def send(which: int) -> None:
        try:
            for number in range(100):
                pair.initiator.notify(pair.segment, bytes([which, number]))
        except BaseException as problem:
            failures.append(problem)

    threads = [threading.Thread(target=send, args=(which,)) for which in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    taken = take(pair, 600)
    for which in range(6):
        assert [one.message[1] for one in taken if one.message[0] == which] == list(range(100))
    numbers = [one.number for one in taken]
    assert numbers == sorted(set(numbers))


def test_a_receiver_waits_and_is_woken(pair: Any) -> None:
    got: list[Any] = []
    waiter = threading.Thread(target=lambda: got.extend(pair.target.notifications(timeout_s=WAIT_S)))
    waiter.start()
    pair.initiator.notify(pair.segment, b"wake up")
    waiter.join()
    assert [one.message for one in got] == [b"wake up"]
    assert pair.target.notifications(timeout_s=0.01) == []


def test_closing_wakes_who_waits_for_notifications(pair: Any) -> None:
    got: list[Any] = []
    waiter = threading.Thread(target=lambda: got.append(pair.target.notifications(timeout_s=None)))
    waiter.start()
    pair.target.close()
    waiter.join(WAIT_S)
    assert not waiter.is_alive()
    assert got == [[]]


@pytest.mark.parametrize("wrong", [-1, 1 << 40])
def test_how_many_to_take_is_a_sensible_number(pair: Any, wrong: int) -> None:
    with pytest.raises(UsageError):
        pair.target.notifications(wrong)


def test_flush_returns_once_writes_are_visible(pair: Any) -> None:
    region, content = pair.offer(4096)
    for turn in range(20):
        pair.initiator.write(pair.segment, region.handle, 0, bytes([turn]) * 4096)
        pair.initiator.flush(pair.segment)
        assert (content == turn).all()
    pair.initiator.close_segment(pair.segment)
