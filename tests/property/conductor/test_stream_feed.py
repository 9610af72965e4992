"""A stream through a bad network: whatever is lost, doubled, late or garbage, the index ends up right.

The oracle is the publisher's own set of blocks. Where everything can be replayed the index equals it; where
not, the index holds no block that the publisher has not.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import msgpack
import pytest

from moonpool.conductor.engine_source import SourceSpec
from moonpool.conductor.index import PrefixIndex
from moonpool.conductor.stream_feed import StreamFeed
from moonpool.conductor.stream_order import Apply, AskReplay, Lost, Restarted, StreamOrder
from moonpool.events import CacheContext, Holder

CONTEXT = CacheContext("m", 16)
ME = Holder("i")


class Publisher:
    """An engine: numbers its batches, remembers the last `kept`, and knows what it has."""

    def __init__(self, draw: random.Random, kept: int) -> None:
        self.draw = draw
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self.next = 0
        self.clock = 0.0
        self.blocks: set[int] = set()

    def restart(self) -> None:
        self.kept.clear()
        self.next = 0
        self.blocks.clear()

    def publish(self) -> tuple[int, bytes]:
        events: list[Any] = []
        for _ in range(self.draw.randrange(1, 4)):
            kind = self.draw.random()
            if kind < 0.6 or not self.blocks:
                new = [self.draw.randrange(1, 200) for _ in range(self.draw.randrange(1, 6))]
                self.blocks.update(new)
                events.append(["BlockStored", new, None, [], 16])
            elif kind < 0.99:
                gone = self.draw.sample(sorted(self.blocks), min(len(self.blocks), 3))
                self.blocks.difference_update(gone)
                events.append({"type": "BlockRemoved", "block_hashes": gone})
            else:
                self.blocks.clear()
                events.append(["AllBlocksCleared"])
        self.clock += 0.001
        made = (self.next, msgpack.packb([self.clock, events]))
        self.next += 1
        self.kept.append(made)
        return made


class World:
    def __init__(self, seed: int, kept: int, restarts: bool) -> None:
        self.draw = random.Random(seed)
        self.publisher = Publisher(self.draw, kept)
        self.index = PrefixIndex()
        self.feed = StreamFeed(
            SourceSpec(instance="i", context=CONTEXT), self.index, can_replay=True, held_max=64
        )
        self.restarts = restarts
        self.late: list[tuple[int, bytes]] = []
        self.asked: int | None = None

    def step(self, calm: bool = False) -> None:
        if self.restarts and not calm and self.draw.random() < 0.002:
            self.publisher.restart()
            self.late.clear()
        message = self.publisher.publish()
        chance = 1.0 if calm else self.draw.random()
        if chance < 0.05:
            return  # lost
        if chance < 0.10:
            self.late.append(message)
            return
        if chance < 0.15:
            self.deliver(message[0], bytes(self.draw.randrange(256) for _ in range(9)))
            return  # garbage instead of it
        self.deliver(*message)
        if chance < 0.20:
            self.deliver(*message)
        if self.late and self.draw.random() < 0.3:
            self.deliver(*self.late.pop(self.draw.randrange(len(self.late))))
        if self.asked is not None and (calm or self.draw.random() < 0.3):
            self.replay()

    def deliver(self, number: int, payload: bytes) -> None:
        asked = self.feed.live(number, payload)
        self.asked = asked if asked is not None else self.asked

    def replay(self) -> None:
        start, self.asked = self.asked, None
        assert start is not None
        for number, payload in list(self.publisher.kept):
            if number >= start and (not self.restarts or self.draw.random() < 0.97):
                self.feed.replayed(number, payload)
        self.feed.replay_ended()

    def known(self) -> set[int]:
        return {block for block in range(1, 200) if self.index.holds(CONTEXT, ME, block)}


@pytest.mark.parametrize("seed", range(8))
def test_with_whole_replays_the_index_equals_the_publisher(seed: int) -> None:
    world = World(seed, kept=1 << 20, restarts=False)
    for _ in range(2_000):
        world.step()
    for _ in range(2):
        world.step(calm=True)
    assert not world.feed.is_suspect
    assert world.known() == world.publisher.blocks
    assert world.feed.counters.lost == 0
    assert world.feed.counters.replays_asked
    assert world.feed.counters.unreadable
    world.index.check()


@pytest.mark.parametrize("seed", range(8))
def test_with_short_replays_and_restarts_nothing_false_is_believed(seed: int) -> None:
    world = World(100 + seed, kept=8, restarts=True)
    for _ in range(3_000):
        world.step()
    for _ in range(80):  # calm: gaps close or are given up
        world.step(calm=True)
    assert not world.feed.is_suspect
    assert world.known() <= world.publisher.blocks
    counters = world.feed.counters
    assert counters.lost
    assert counters.replays_asked
    assert counters.unreadable
    world.index.check()


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
