"""Four threads move bytes over four NICs under a seeded storm of failures; each byte is checked.

A batch that was cancelled ends before anything else may use its buffer, and nothing of it lands afterwards.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.native.fake_verbs.fabric import LOST, WC_FATAL, WC_RETRY, WC_RNR, FakeFabric
from tests.native.rdma_pairs import MIB, Bytes, RdmaPair, fake_fabric, pattern, rdma_pair, wait_until

from moonpool import Op

THREADS = 4
ROUNDS = 24
STRIKES = 40
SHARE = MIB


@pytest.fixture
def fabric() -> Iterator[FakeFabric]:
    with fake_fabric(4) as made:
        made.retry(5)
        yield made


class Mover:
    """One thread: its own part of the target's region, and a buffer of its own."""

    def __init__(self, pair: RdmaPair, number: int, seed: int) -> None:
        self._pair = pair
        self._random = random.Random(seed * 100 + number)
        self._start = number * SHARE
        self._far: Bytes = pair.content[self._start : self._start + SHARE]
        self._mine = np.zeros(SHARE, dtype=np.uint8)
        self._address = pair.initiator.register(self._mine).address
        self.rounds = 0
        self.problem: BaseException | None = None

    def run(self) -> None:
        """So many rounds of random kinds; the first problem ends it."""
        kinds: list[Callable[[int], None]] = [self.write, self.read, self.scatter, self.foreign, self.cancel]
        try:
            for turn in range(ROUNDS):
                self._random.choice(kinds)(turn)
                self.rounds += 1
        except BaseException as problem:
            self.problem = problem

    def write(self, turn: int) -> None:
        self._mine[:] = pattern(SHARE, turn)
        self._far[:] = 0
        self._pair.initiator.write(
            self._pair.segment, self._pair.region.handle, self._start, self._address, SHARE
        )
        assert np.array_equal(self._far, self._mine), "write"

    def read(self, turn: int) -> None:
        self._far[:] = pattern(SHARE, turn)
        self._mine[:] = 0
        self._pair.initiator.read(
            self._pair.segment,
            self._pair.region.handle,
            self._start,
            self._address,
            SHARE,
            digest=turn % 2 == 0,
        )
        assert np.array_equal(self._far, self._mine), "read"

    def scatter(self, turn: int) -> None:
        self._far[:] = pattern(SHARE, turn)
        self._mine[:] = 0
        block = self._random.choice([64, 512, 4096])
        at = np.array(self._random.sample(range(SHARE // block), 128), dtype=np.uint64) * np.uint64(block)
        self._pair.initiator.transfer(
            Op.READ,
            self._pair.segment,
            self._address + at,
            self._pair.region.handle,
            self._start + at,
            block,
        )
        touched = np.zeros(SHARE, dtype=bool)
        for one in at.tolist():
            touched[one : one + block] = True
        assert np.array_equal(self._far[touched], self._mine[touched]), "scatter"
        assert not self._mine[~touched].any(), "strayed"

    def foreign(self, turn: int) -> None:
        self._far[:] = pattern(SHARE, turn)
        target = np.zeros(self._random.choice([100, 70_000, 300_000]), dtype=np.uint8)
        self._pair.initiator.read(self._pair.segment, self._pair.region.handle, self._start + 13, target)
        assert np.array_equal(target, self._far[13 : 13 + target.size]), "foreign"

    def cancel(self, turn: int) -> None:
        self._far[:] = pattern(SHARE, turn)
        batch = self._pair.initiator.submit(
            Op.READ, self._pair.segment, self._address, self._pair.region.handle, self._start, SHARE
        )
        batch.cancel()
        assert batch.wait(20)
        self._mine[:] = 0x99
        self._pair.initiator.read(self._pair.segment, self._pair.region.handle, self._start, bytearray(64))
        assert (self._mine == 0x99).all(), "landed late"


def strike(fabric: FakeFabric, chance: random.Random, pause: threading.Event) -> None:
    """One failure of one NIC; those that last are ended after a moment."""
    device, moment = chance.randrange(4), chance.random() * 0.03
    lasting: list[tuple[Callable[[], None], Callable[[], None]]] = [
        (lambda: fabric.cut(device, True), lambda: fabric.cut(device, False)),
        (lambda: fabric.port(device, False), lambda: fabric.port(device, True)),
        (lambda: fabric.hold(device, True), lambda: fabric.hold(device, False)),
    ]
    quick: list[Callable[[], None]] = [
        lambda: fabric.complete(device, chance.choice([WC_RETRY, WC_RNR, WC_FATAL])),
        lambda: fabric.fail("post_send", 12, device=device),
        lambda: fabric.fail("create_qp", 12, times=2),
        lambda: fabric.complete(device, LOST),
    ]
    if chance.random() < 0.5:
        begin, end = chance.choice(lasting)
        begin()
        pause.wait(moment)
        end()
    else:
        chance.choice(quick)()
        pause.wait(moment)
        fabric.clear()


@pytest.mark.parametrize("seed", [1, 2])
def test_a_storm_of_failures_changes_no_byte(fabric: FakeFabric, seed: int) -> None:
    with rdma_pair(size=THREADS * SHARE, transports=("rdma", "tcp"), worker_threads=3) as pair:
        movers = [Mover(pair, number, seed) for number in range(THREADS)]
        threads = [threading.Thread(target=mover.run) for mover in movers]
        for thread in threads:
            thread.start()
        chance, never = random.Random(seed), threading.Event()
        for _ in range(STRIKES):
            strike(fabric, chance, never)
        fabric.clear()
        for thread in threads:
            thread.join(60)
        assert [mover.problem for mover in movers] == [None] * THREADS
        assert [mover.rounds for mover in movers] == [ROUNDS] * THREADS
        assert pair.transport.counters()["bounce_slots_unused"] == 64
        assert pair.transport.counters()["rail_breaks"] > 0
        wait_until(lambda: "up" in pair.states(), "rails come back")
        pair.check_read(seed)
