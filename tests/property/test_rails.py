"""Rails: the native core against its twin on random histories, and what must hold whatever happens."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from moonpool.native.paths.rails import Rails
from moonpool.native.paths.rails_reference import RAIL_NONE, RAIL_WAIT, UP, PlainRails

GB_PER_S = 1_000_000_000
OVERHEAD = 4_096  # what a slice counts besides its bytes
LEAST = 16_384 + OVERHEAD
#: Half of what the least slice takes on one of six rails: a smaller share is not worth a slice.
SLACK_NS = 1_500
LINKS = [GB_PER_S // 8, 3 * GB_PER_S, 12_500_000_000, 25 * GB_PER_S, 50 * GB_PER_S]


@dataclass
class History:
    """One seed's life of both: what is in flight, and the clock."""

    seed: int
    native: Rails = field(init=False)
    twin: PlainRails = field(init=False)
    now: int = 1_000_000
    flying: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        probes, least = self.dice.random() < 0.5, self.dice.choice([4096, 16384, 65536])
        self.native = Rails(data_probes=probes, slice_min_bytes=least)
        self.twin = PlainRails(data_probes=probes, slice_min_bytes=least)
        for _ in range(self.dice.choice([1, 2, 3, 4, 8, 32])):
            link, latency = self.dice.choice(LINKS), self.dice.choice([0, 900, 5_000, 80_000])
            penalty, slots = self.dice.choice([1.0, 1.0, 1.25, 2.0]), self.dice.choice([1, 2, 16, 64])
            for each in (self.native, self.twin):
                each.add(link, latency, penalty=penalty, slots=slots)
        self.n = len(self.twin.rails)
        # What the rails really do, so that histories are not all noise.
        self.speed = [self.dice.choice([1.0, 1.0, 1.0, 0.5, 0.25, 0.02]) for _ in range(self.n)]

    def step(self) -> None:
        kind = self.dice.random()
        if kind < 0.5:
            self.choose()
        elif kind < 0.9:
            self.end_some()
        else:
            self.disturb()
        self.now += self.dice.choice([0, 0, 100, 1_000, 10_000, 1_000_000]) * self.dice.randint(1, 20)
        rail = self.dice.randrange(self.n)
        assert self.native.state(rail) == self.twin.state(rail), f"seed {self.seed}"
        assert self.native.usable == self.twin.usable

    def choose(self) -> None:
        allowed = self.dice.choice([0xFFFFFFFF] * 3 + [self.dice.getrandbits(32)])
        size = round(1 << self.dice.randint(0, 34)) + self.dice.choice([0, 0, 1, 4097])
        backlog = self.dice.choice([0, 0, 4096, 1 << 20, 1 << 33])
        if self.dice.random() < 0.3:
            size = min(size, 1 << 20)
            chosen = self.native.choose(size, backlog, self.now, allowed)
            assert chosen == self.twin.choose(size, backlog, self.now, allowed), f"seed {self.seed}"
        else:
            left = size
            chosen, size = self.native.next(left, backlog, self.now, allowed)
            assert (chosen, size) == self.twin.next(left, backlog, self.now, allowed), f"seed {self.seed}"
            assert (size > 0) == (chosen >= 0)
            assert size <= left
            assert size == left or size % 4096 == 0
        if chosen >= 0:
            assert allowed >> chosen & 1
            self.flying.append((chosen, size))
        if chosen == RAIL_WAIT:
            assert self.flying, "nobody would ever wake who waits"

    def end_some(self) -> None:
        """Some of the oldest of one rail end together, as one look finds them."""
        if not self.flying:
            return
        rail = self.flying[0][0]
        mine = [each for each in self.flying if each[0] == rail][: self.dice.randint(1, 5)]
        link = self.twin.rails[rail].link_rate / 65536
        self.now += round(sum(size for _rail, size in mine) / (link * self.speed[rail]))
        fails = self.dice.random() < 0.03
        for each in mine:
            self.flying.remove(each)
            for core in (self.native, self.twin):
                (core.failed if fails else core.done)(*each, self.now)

    def disturb(self) -> None:
        rail, flag = self.dice.randrange(self.n), self.dice.random() < 0.7
        what = self.dice.choice(["link", "probe", "unbook", "slice", "speed"])
        if what == "link":
            self.native.link(rail, flag, self.now)
            self.twin.link(rail, flag, self.now)
        elif what == "probe":
            due = self.native.idle_probe(self.now)
            assert due == self.twin.idle_probe(self.now)
            if due >= 0:
                self.native.probed(due, flag, self.now + 5_000)
                self.twin.probed(due, flag, self.now + 5_000)
        elif what == "unbook" and self.flying:
            taken = self.flying.pop()
            self.native.unbook(*taken)
            self.twin.unbook(*taken)
        elif what == "slice":
            size = self.dice.randint(1, 1 << 30)
            cut = self.native.slice_bytes(size)
            assert cut == self.twin.slice_bytes(size)
            assert 0 < cut <= size
        elif what == "speed":
            self.speed[rail] = self.dice.choice([1.0, 0.5, 0.05])


@pytest.mark.parametrize("block", range(4))
def test_the_native_rails_decide_as_their_twin(block: int) -> None:
    for seed in range(block * 40, block * 40 + 40):
        history = History(seed)
        for _ in range(250):
            history.step()


def test_nothing_is_ever_empty_lost_or_stuck() -> None:
    """Transfers of any size arrive whole over any rails, however often slices fail; no wait is in vain."""
    for seed in range(1_500):
        dice = random.Random(seed)
        rails = Rails(data_probes=True)
        for _ in range(dice.randint(1, 8)):
            rails.add(dice.choice(LINKS), dice.choice([0, 5_000]), slots=dice.choice([1, 4, 64]))
        left, arrived, now = round(2 ** dice.uniform(0, 27)), 0, 1
        whole = left
        flying: list[tuple[int, int]] = []
        for _ in range(20_000):
            if arrived == whole:
                break
            chosen, size = rails.next(left, 0, now) if left else (RAIL_WAIT, 0)
            if chosen >= 0:
                assert 0 < size <= left
                left -= size
                flying.append((chosen, size))
                continue
            assert size == 0
            if chosen == RAIL_NONE and not flying:
                now += 50_000_000  # until the pauses end
                continue
            assert flying, f"seed {seed}: a wait for nothing"
            rail, size = flying.pop(dice.randrange(len(flying)))
            now += dice.randint(0, 20_000)
            if dice.random() < 0.05:
                rails.failed(rail, size, now)
                left += size
            else:
                rails.done(rail, size, now)
                arrived += size
        assert arrived == whole, f"seed {seed}"
        assert not flying


def test_no_rail_is_idle_while_an_equal_one_queues() -> None:
    for seed in range(300):
        dice = random.Random(seed)
        rails = Rails()
        n = dice.randint(2, 8)
        link = dice.choice(LINKS)
        for _ in range(n):
            rails.add(link, 5_000)
        now, flying = 1, [0] * n
        for _ in range(60):
            sizes = dice.choice([4096, 65536, 1 << 20, 1 << 28])
            if sizes < 1 << 20:
                chosen = rails.choose(sizes, dice.choice([0, 1 << 20]), now)
            else:
                chosen, _size = rails.next(sizes, dice.choice([0, 1 << 20]), now)
            if chosen == RAIL_WAIT:
                assert min(flying) > 0, f"seed {seed}: a rail is idle"
                break
            assert flying[chosen] == 0 or min(flying) > 0, f"seed {seed}: rail {chosen} queues"
            flying[chosen] += 1


def water_level(pipes: list[tuple[float, float]], amount: float) -> float:
    """By when pipes of (free from, speed) together move an amount."""
    pipes = sorted(pipes)
    for count in range(1, len(pipes) + 1):
        speed = sum(each for _free, each in pipes[:count])
        level = (amount + sum(free * each for free, each in pipes[:count])) / speed
        if count == len(pipes) or level <= pipes[count][0]:
            return level
    raise AssertionError("no pipes")


@pytest.mark.parametrize("block", range(4))
def test_in_a_hundred_thousand_dealings_no_slice_is_empty_or_waits_beside_an_idle_rail(block: int) -> None:
    """At any speeds, no slice waits behind another one where an idle rail would end it sooner."""
    dice = random.Random(block)
    for case in range(25_000):
        rails = Rails()
        speed, latency = [], []
        unlike = dice.random() < 0.5  # latencies that no rails of one transport have
        usual = dice.choice([500, 5_000, 50_000])
        for _ in range(dice.randint(2, 6)):
            speed.append(2 ** dice.uniform(-3, 6))  # bytes a nanosecond
            latency.append(dice.choice([500, 5_000, 50_000]) if unlike else usual)
            rails.add(round(speed[-1] * GB_PER_S), latency[-1])
        left = round(2 ** dice.uniform(0, 25))
        held: list[list[int]] = [[] for _ in speed]
        while left:
            rail, size = rails.next(left, 0, 1)
            if rail < 0:
                break
            assert 0 < size <= left, f"case {case}"
            left -= size
            held[rail].append(size + OVERHEAD)
        idle = [k for k, slices in enumerate(held) if not slices]
        busy = [k for k, slices in enumerate(held) if len(slices) > 1]
        for other in busy:
            ends = latency[other] + sum(held[other]) / speed[other]
            for k in idle:
                sooner = ends - (latency[k] + held[other][-1] / speed[k])
                assert sooner <= 0.01 * ends + SLACK_NS, f"case {case}: rail {k} is idle"
        if left:  # then an idle rail is one that would end its least slice after the others end everything
            free = [latency[k] + sum(held[k]) / speed[k] for k in range(len(speed))]
            rest = water_level([(free[k], speed[k]) for k in range(len(speed)) if k not in idle], left)
            for k in idle:
                sooner = rest - (latency[k] + LEAST / speed[k])
                assert sooner <= 0.02 * rest + SLACK_NS or unlike, f"case {case}: rail {k} could help"


def test_state_of_a_rail_that_fails_heals_and_slows() -> None:
    rails, now = Rails(pause_min_ns=1_000_000, pause_max_ns=1_000_000_000), 1_000
    for _ in range(2):
        rails.add(25 * GB_PER_S, 5_000)
    pauses = []
    for _ in range(4):
        chosen = rails.choose(65536, 0, now, 1)
        assert chosen == 0
        rails.failed(0, 65536, now)
        pauses.append(rails.state(0)["pause_ns"])
        assert rails.choose(65536, 0, now, 1) == RAIL_NONE, "paused"
        assert rails.idle_probe(now) == -1, "too early"
        now += pauses[-1]
        assert rails.idle_probe(now) == 0
        assert rails.idle_probe(now) == -1, "one probe at a time"
        assert rails.choose(65536, 0, now, 1) == RAIL_NONE, "not before the probe has ended"
        rails.probed(0, True, now)
    assert pauses == [1_000_000, 2_000_000, 4_000_000, 8_000_000], "one success does not clear the memory"
    healed = []
    for _ in range(5):
        now += 8_000_000
        assert rails.choose(65536, 0, now, 1) == 0
        rails.done(0, 65536, now + 8_000)
        healed.append(rails.state(0)["pause_ns"])
    assert healed == [4_000_000, 2_000_000, 1_000_000, 0, 0], "healthy service does, step by step"


def test_a_slow_rail_is_demoted_probed_and_taken_back() -> None:
    rails, now = Rails(), 1_000
    for _ in range(3):
        rails.add(25 * GB_PER_S, 5_000)
    for _ in range(40):  # rail 2 does a hundredth of its link
        if rails.choose(1 << 20, 0, now, 4) != 2:
            break
        now += 5_000 + (100 << 20) // 25
        rails.done(2, 1 << 20, now)
    assert rails.usable == 0b011
    assert rails.state(2)["demotions"] == 1
    assert rails.choose(1 << 20, 0, now, 4) == 2, "where no other rail may carry it, it does"
    rails.unbook(2, 1 << 20)
    due = now + rails.state(2)["pause_ns"] + 5_000
    assert rails.idle_probe(due) == 2
    rails.probed(2, True, due)
    assert rails.usable == 0b111
    assert rails.state(2)["state"] == UP


def test_a_link_that_is_down_is_not_probed_before_it_is_back() -> None:
    rails = Rails()
    rails.add(25 * GB_PER_S, 5_000)
    rails.link(0, False, 1_000)
    assert rails.choose(4096, 0, 1_000) == RAIL_NONE
    assert rails.idle_probe(10**15) == -1
    rails.link(0, True, 2_000)
    assert rails.idle_probe(2_000) == 0
    rails.probed(0, True, 3_000)
    assert rails.choose(4096, 0, 4_000) == 0


def test_one_look_is_one_measurement() -> None:
    """Sixteen completions that were found together say what they took together."""
    rails, now = Rails(), 1_000
    rails.add(25 * GB_PER_S, 1_000, slots=64)
    for _ in range(30):
        taken = [rails.choose(65536, 1 << 30, now) for _ in range(16)]
        many = sum(chosen == 0 for chosen in taken)
        now += round(many * (65536 + 4096) / 6.25)  # a quarter of the link
        for _ in range(many):
            rails.done(0, 65536, now)
    assert rails.state(0)["rate"] / 65536 == pytest.approx(6.25, rel=0.1)
