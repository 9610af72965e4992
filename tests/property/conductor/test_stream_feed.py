"""A stream through a bad network: whatever is lost, doubled, late or garbage, the index ends up right."""

from __future__ import annotations

import random
from typing import Any

import pytest

from moonpool.bench.stream_fuzz import run
from moonpool.conductor.engine_source import SourceSpec
from moonpool.conductor.index import PrefixIndex
from moonpool.conductor.stream_feed import StreamFeed
from moonpool.conductor.stream_order import Apply, AskReplay, Lost, Restarted, StreamOrder
from moonpool.events import CacheContext

CONTEXT = CacheContext("m", 16)


@pytest.mark.parametrize("seed", range(8))
def test_with_whole_replays_the_index_equals_the_publisher(seed: int) -> None:
    report = run(6_000, seed, exact=True)
    assert not report["broken"], report
    assert report["looks"]
    for seen in ("unreadable", "duplicates", "replays"):
        assert report[seen], seen
    assert report["lost"] == 0


@pytest.mark.parametrize("seed", range(8))
def test_with_short_replays_and_restarts_nothing_false_is_believed(seed: int) -> None:
    report = run(8_000, 100 + seed, exact=False)
    assert not report["broken"], report
    for seen in ("unreadable", "duplicates", "replays", "lost", "restarts"):
        assert report[seen], seen


@pytest.mark.parametrize("seed", range(20))
def test_order_is_kept_and_each_message_is_applied_once(seed: int) -> None:
    draw = random.Random(seed)
    order: StreamOrder[int] = StreamOrder(can_replay=True, held_max=16)
    applied: list[int] = []
    lost: list[int] = []

    def take(steps: list[Any]) -> None:
        for step in steps:
            if isinstance(step, Apply):
                applied.append(step.message)
            elif isinstance(step, Lost):
                lost.extend(range(step.first, step.end))
            else:
                assert isinstance(step, AskReplay)
        order.check()

    numbers = [number for number in range(500) if draw.random() > 0.1]
    for at, number in enumerate(numbers):
        other = draw.randrange(max(0, at - 3), min(len(numbers), at + 4))
        take(order.live(numbers[other], 0.0, numbers[other]))
        take(order.live(number, 0.0, number))
        if draw.random() < 0.05:
            take(order.replay_ended())
    take(order.replay_ended())
    assert applied == sorted(set(applied))
    assert not set(applied) & set(lost)
    assert order.expected == len(applied) + len(lost)


def test_newer_stamps_under_earlier_numbers_are_a_restart() -> None:
    order: StreamOrder[str] = StreamOrder(can_replay=False)
    assert order.live(0, 1.0, "a") == [Apply("a")]
    assert order.live(1, 2.0, "b") == [Apply("b")]
    assert order.live(1, 2.0, "b") == []
    assert order.live(0, 3.0, "c") == [Restarted(), Apply("c")]
    assert order.live(3, 4.0, "d") == [Lost(1, 3), Apply("d")]
    assert order.duplicates == 1
    assert order.live(1, 5.0, "e") == [Restarted(), Lost(0, 1), Apply("e")]


def test_drift_follows_what_engines_report() -> None:
    feed = StreamFeed(SourceSpec(instance="i", context=CONTEXT), PrefixIndex(), can_replay=False)
    for _ in range(500):
        feed.note_feedback(100, 100)
    assert feed.drift == 0.0
    for _ in range(500):
        feed.note_feedback(100, 50)
    assert 0.45 < feed.drift <= 0.5
    feed.note_feedback(0, 0)


def test_a_restart_that_came_past_the_expected_number_is_seen_in_the_replay() -> None:
    order: StreamOrder[str] = StreamOrder(can_replay=True)
    for number in range(3):
        order.live(number, float(number), f"old {number}")
    assert order.live(5, 50.0, "new 5") == [AskReplay(2)]
    assert order.replayed(2, 42.0, "new 2") == [Restarted(), AskReplay(0)]
    for number in range(2):
        assert order.replayed(number, 40.0 + number, f"new {number}")[0] == Apply(f"new {number}")
    assert order.expected == 3
    assert order.live(3, 43.0, "new 3") == [Apply("new 3")]


def test_a_replay_that_begins_with_the_last_message_goes_on_behind_it() -> None:
    order: StreamOrder[str] = StreamOrder(can_replay=True)
    order.live(0, 1.0, "a")
    assert order.live(2, 3.0, "c") == [AskReplay(0)]
    assert order.replayed(0, 1.0, "a") == []
    assert order.replayed(1, 2.0, "b") == [Apply("b"), Apply("c")]
    assert order.replay_ended() == []
