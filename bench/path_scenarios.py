"""Scenarios of the path study: rails and loads, each from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from moonpool.bench.path_run import Load
from moonpool.bench.path_world import DEAD, NS_PER_S, RailPlan, Sender, fluid_makespan_ns

MIB: Final = 1 << 20
GIB: Final = 1 << 30
#: Links of 200 Gb/s.
LINK: Final = 25_000_000_000


@dataclass(frozen=True, slots=True)
class Scenario:
    """Rails, what comes, and who sends it."""

    plans: tuple[RailPlan, ...]
    load: Load
    sender: Sender = field(default_factory=Sender)


def steady(*rates: float, link: int = LINK) -> tuple[RailPlan, ...]:
    """Rails that keep these rates (as shares of the link's), whatever the policies are told."""
    return tuple(RailPlan(link, ((0, link * rate),)) for rate in rates)


def noisy(dice: random.Random, plans: Sequence[RailPlan], load: Load, spread: float = 0.1) -> Scenario:
    """The rails in any order and with noise, as long as the slowest policy may take; a death shows soon."""
    whole = fluid_makespan_ns(plans, load.total_bytes)
    order = list(plans)
    dice.shuffle(order)
    rails = tuple(plan.jittery(dice, spread, 5 * whole) for plan in order)
    return Scenario(rails, load, Sender(detect_ns=max(whole // 20, 50_000)))


def one_transfer(dice: random.Random, least: int = 64 * MIB, most: int = GIB) -> Load:
    """One large transfer, between the bounds on a logarithmic scale, of no round size."""
    return Load(((0, round(least * (most / least) ** dice.random())),))


def equal(dice: random.Random) -> Scenario:
    """Four rails alike."""
    return noisy(dice, steady(1, 1, 1, 1), one_transfer(dice))


def eight_equal(dice: random.Random) -> Scenario:
    """Eight rails alike."""
    return noisy(dice, steady(*[1.0] * 8), one_transfer(dice, 128 * MIB))


def half(dice: random.Random) -> Scenario:
    """One of four at half the rate, which nobody was told."""
    return noisy(dice, steady(1, 1, 1, 0.5), one_transfer(dice))


def quarter(dice: random.Random) -> Scenario:
    """One of four at a quarter of the rate, which nobody was told."""
    return noisy(dice, steady(1, 1, 1, 0.25), one_transfer(dice))


def slows(dice: random.Random) -> Scenario:
    """One of four falls to a quarter of its rate between 20 % and 60 % of the run."""
    return _changes(dice, 0.25)


def dies(dice: random.Random) -> Scenario:
    """One of four dies between 20 % and 60 % of the run, which shows after a twentieth of the run."""
    return _changes(dice, DEAD)


def flaps(dice: random.Random) -> Scenario:
    """One of four dies and comes back, three times."""
    load = one_transfer(dice, 256 * MIB)
    whole = fluid_makespan_ns(steady(1, 1, 1, 1), load.total_bytes)
    steps = [(0, float(LINK))]
    for part in (0.1, 0.3, 0.5):
        down = round(whole * (part + 0.05 * dice.random()))
        steps += [(down, DEAD), (down + round(whole * 0.08), float(LINK))]
    return noisy(dice, [*steady(1, 1, 1), RailPlan(LINK, tuple(steps))], load)


def congested(dice: random.Random) -> Scenario:
    """Each rail alternates between its full rate and less, for spans of about a tenth of the run."""
    load = one_transfer(dice)
    span = fluid_makespan_ns(steady(1, 1, 1, 1), load.total_bytes) / 10
    plans = []
    for _ in range(4):
        at, steps = 0, []
        for index in range(60):
            rate = 1.0 if index % 2 == 0 else 0.2 + 0.6 * dice.random()
            steps.append((at, LINK * rate))
            at += 1 + round(dice.expovariate(1.0) * span)
        plans.append(RailPlan(LINK, tuple(steps)))
    return noisy(dice, plans, load)


def many_blocks(dice: random.Random) -> Scenario:
    """A batch of 512 blocks of 1 MiB, one of four rails at half the rate."""
    return noisy(dice, steady(1, 1, 1, 0.5), Load(tuple((0, MIB) for _ in range(512))))


def arrivals(dice: random.Random) -> Scenario:
    """Transfers of 64 KiB to 16 MiB that come at random, 70 % of what the rails can do, one at half rate."""
    at, row = 0.0, []
    for _ in range(400):
        n_bytes = round(65_536 * 256 ** dice.random())
        row.append((round(at), n_bytes))
        mean = 65_536 * 255 / 5.545  # of a size that is uniform on a logarithmic scale
        at += dice.expovariate(1.0) * mean / (0.7 * 3.5 * LINK) * NS_PER_S
    return noisy(dice, steady(1, 1, 1, 0.5), Load(tuple(row)))


def repeated(dice: random.Random) -> Scenario:
    """Forty transfers of 8 MiB with pauses between, one of four rails at a quarter: learning pays."""
    plans = steady(1, 1, 1, 0.25)
    alone = fluid_makespan_ns(plans, 8 * MIB)
    return noisy(dice, plans, Load(tuple((index * 4 * alone, 8 * MIB) for index in range(40))))


def alone_ns(scenario: Scenario) -> list[int]:
    """The least time of each transfer if it came alone at the start."""
    return [fluid_makespan_ns(scenario.plans, n_bytes) for _at, n_bytes in scenario.load.transfers]


def _changes(dice: random.Random, rate: float) -> Scenario:
    load = one_transfer(dice)
    whole = fluid_makespan_ns(steady(1, 1, 1, 1), load.total_bytes)
    begin = round(whole * (0.2 + 0.4 * dice.random()))
    changing = RailPlan(LINK, ((0, float(LINK)), (begin, LINK * rate)))
    return noisy(dice, [*steady(1, 1, 1), changing], load)


SCENARIOS: Final[dict[str, Callable[[random.Random], Scenario]]] = {
    "equal": equal,
    "eight equal": eight_equal,
    "half": half,
    "quarter": quarter,
    "slows": slows,
    "dies": dies,
    "flaps": flaps,
    "congested": congested,
    "blocks": many_blocks,
    "repeated": repeated,
    "arrivals": arrivals,
}
