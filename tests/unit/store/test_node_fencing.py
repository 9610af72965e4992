"""Fences over an engine that says who writes: lanes, processes that settle or do not, grants without room."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from moonpool.store.node_fencing import EngineFencing
from moonpool.store.node_holds import LANES_ONLY

WAIT_S = 20.0
REGION = 1 << 32
CLIENT = b"c" * 16
ANYBODY = bytes(16)


class Writers:
    """What `EngineFencing` asks of a gate, answered from plain sets."""

    def __init__(self) -> None:
        self.lanes: set[tuple[int, int]] = set()
        self.sessions: dict[int, bytes] = {}
        self.settled: set[int] = set()
        self.asked: list[set[int]] = []
        self.kicked: set[tuple[int, int]] = set()
        self.denied: list[tuple[int, int, int, int]] = []
        self.has_room = True

    def deny(self, region: int, start: int, tag: int, until_ns: int) -> bool:
        if self.has_room:
            self.denied.append((region, start, tag, until_ns))
        return self.has_room

    def writes_into(self, region: int, offset: int, length: int) -> set[tuple[int, int]]:
        return set(self.lanes)

    def kick(self, lanes: set[tuple[int, int]]) -> int:
        self.kicked |= lanes
        return len(lanes)

    def writers(self, region: int, instance: bytes | None) -> set[int]:
        return {number for number, name in self.sessions.items() if instance in (None, name)}

    def settle(self, region: int, sessions: set[int], timeout_s: float) -> set[int]:
        self.asked.append(set(sessions))
        return sessions & self.settled


class Fence:
    """A fencing over `Writers`."""

    def __init__(self) -> None:
        self.gate = Writers()
        gate: Any = self.gate
        self.fencing = EngineFencing(gate, [REGION], 50)

    def until_over(self, ticket: int, now_ms: int) -> None:
        """The thread that asks does so soon."""
        until(lambda: self.fencing.over(ticket, now_ms), "the fence is not over")


def until(what: Callable[[], bool], about: str) -> None:
    give_up = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < give_up, about
        time.sleep(0.001)


@pytest.fixture
def fence() -> Iterator[Fence]:
    before = threading.active_count()
    made = Fence()
    yield made
    made.fencing.close(WAIT_S)
    assert threading.active_count() == before


def test_nobody_writes(fence: Fence) -> None:
    assert fence.fencing.begin(0, 0, 4096, CLIENT, 0) == 0
    fence.gate.sessions = {1: CLIENT}
    assert fence.fencing.begin(0, 0, 4096, LANES_ONLY, 0) == 0
    assert fence.fencing.begin(0, 0, 4096, b"x" * 16, 0) == 0


def test_lanes_that_were_let_in_before_are_waited_for_and_later_ones_are_not(fence: Fence) -> None:
    fence.gate.lanes = {(1, 5), (2, 9)}
    ticket = fence.fencing.begin(0, 0, 4096, LANES_ONLY, 100)
    assert ticket
    assert not fence.fencing.over(ticket, 100)
    fence.gate.lanes = {(2, 9), (1, 6)}
    assert not fence.fencing.over(ticket, 110)
    assert fence.gate.kicked == set()
    assert not fence.fencing.over(ticket, 150)
    assert fence.gate.kicked == {(2, 9)}
    fence.gate.lanes = {(1, 6)}
    assert fence.fencing.over(ticket, 151)


def test_a_process_is_asked_when_its_time_is_over_and_counts_until_it_settled(fence: Fence) -> None:
    fence.gate.sessions = {1: CLIENT, 2: CLIENT, 3: b"x" * 16}
    ticket = fence.fencing.begin(0, 0, 4096, CLIENT, 500)
    assert not fence.fencing.over(ticket, 499)
    assert fence.gate.asked == []
    fence.gate.settled = {1}
    assert not fence.fencing.over(ticket, 500)
    until(lambda: fence.fencing.rounds >= 1, "nobody asked")
    assert fence.gate.asked[0] == {1, 2}
    assert not fence.fencing.over(ticket, 501)  # one of them said nothing: it is asked again
    until(lambda: {2} in fence.gate.asked, "the silent one is not asked again")
    del fence.gate.sessions[2]  # its process ended
    fence.until_over(ticket, 502)


def test_anybody_is_everybody(fence: Fence) -> None:
    fence.gate.sessions = {1: CLIENT, 3: b"x" * 16}
    fence.gate.settled = {1, 3}
    ticket = fence.fencing.begin(0, 0, 4096, ANYBODY, 0)
    fence.until_over(ticket, 1)
    assert fence.gate.asked[0] == {1, 3}


def test_a_dropped_fence_is_forgotten(fence: Fence) -> None:
    fence.gate.lanes = {(1, 5)}
    ticket = fence.fencing.begin(0, 0, 4096, LANES_ONLY, 0)
    fence.fencing.drop(ticket)
    with pytest.raises(KeyError):
        fence.fencing.over(ticket, 0)


def test_grants_that_could_not_be_denied_are_waited_for(fence: Fence) -> None:
    fence.fencing.deny(0, 4096, 7, 900)
    assert fence.gate.denied == [(REGION, 4096, 7, 900_000_000)]
    fence.gate.has_room = False
    fence.fencing.deny(0, 8192, 7, 900)
    assert fence.fencing.begin(0, 4096, 4096, LANES_ONLY, 0) == 0
    ticket = fence.fencing.begin(0, 8192, 4096, LANES_ONLY, 0)
    assert not fence.fencing.over(ticket, 899)
    assert fence.fencing.over(ticket, 900)
    fence.fencing.deny(0, 8192, 7, 900)
    fence.fencing.join_begins()
    assert fence.fencing.begin(0, 8192, 4096, LANES_ONLY, 0) == 0
