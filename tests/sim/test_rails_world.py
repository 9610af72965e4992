"""Rails in a seeded world: how near to the optimum our choice comes, and how others fare on the same seeds.

`python -m moonpool.bench.path_study` runs many more seeds.
"""

from __future__ import annotations

import random
from statistics import median

import pytest

from moonpool.bench.path_policies import POLICIES, LeastCompletion, Piece
from moonpool.bench.path_run import Load, Run
from moonpool.bench.path_scenarios import MIB, SCENARIOS, steady
from moonpool.bench.path_study import Cell, latencies, makespans, play, slices
from moonpool.bench.path_world import DEAD, RailPlan, Sender, fluid_makespan_ns

OURS = "least completion"
SEEDS = range(700, 712)
FEW = range(700, 704)


@pytest.mark.parametrize(
    ("scenario", "bound"),
    [
        ("equal", 1.03),
        ("eight equal", 1.03),
        ("half", 1.05),
        ("quarter", 1.05),
        ("slows", 1.05),
        ("dies", 1.05),
        ("blocks", 1.05),
    ],
)
def test_the_makespan_is_near_the_optimum_on_every_seed(scenario: str, bound: float) -> None:
    cell = play(scenario, OURS, SEEDS)
    assert cell.over_optimum[0] >= 1.0, "nobody beats the optimum"
    assert cell.over_optimum[-1] <= bound, f"{scenario}: {cell.over_optimum}"
    assert all(outcome.empty_slices == 0 for outcome in cell.outcomes)


@pytest.mark.parametrize("scenario", ["equal", "half", "quarter", "slows", "dies", "flaps", "congested"])
def test_it_beats_the_others_on_the_same_seeds(scenario: str) -> None:
    ours = median(play(scenario, OURS, FEW).over_optimum)
    for policy in POLICIES:
        if policy != OURS:
            assert ours < median(play(scenario, policy, FEW).over_optimum), policy


def test_every_rail_works_to_the_end() -> None:
    """With all bytes at hand, no rail is done long before another, be it fast or slow."""
    for seed in FEW:
        world = SCENARIOS["quarter"](random.Random(seed))
        outcome = Run(world.plans, world.sender, seed).play(LeastCompletion, world.load, seed)
        assert min(outcome.busy) > 0.95, f"seed {seed}: {outcome.busy}"


def test_a_run_is_the_same_each_time() -> None:
    first, second = (play("congested", OURS, [5]).outcomes[0] for _ in range(2))
    assert first == second


def test_a_rail_that_returns_is_used_again() -> None:
    plans = [*steady(1), RailPlan(25_000_000_000, ((0, 25e9), (100_000, DEAD), (1_000_000, 25e9)))]
    load = Load(tuple((index * 1_000_000, 16 * MIB) for index in range(40)))
    made: list[LeastCompletion] = []

    def make(plans: object, seed: int) -> LeastCompletion:
        made.append(LeastCompletion(plans, seed))  # type: ignore[arg-type]
        return made[0]

    outcome = Run(plans, Sender(detect_ns=50_000), 1).play(make, load, 1)
    state = made[0].rails.state(1)
    assert outcome.lost_slices > 0
    assert (state["pauses"], state["probes"]) == (1, 1)
    assert outcome.rail_bytes[1] > 0.3 * load.total_bytes, "its share again, after one probe"


def test_bytes_and_slices_add_up() -> None:
    for policy in POLICIES:
        world = SCENARIOS["dies"](random.Random(3))
        outcome = Run(world.plans, world.sender, 3).play(POLICIES[policy], world.load, 3)
        assert sum(outcome.rail_bytes) == world.load.total_bytes, policy


def test_the_optimum_is_that_of_water_in_pipes() -> None:
    slow = RailPlan(100, ((0, 10.0), (1_000_000_000, 30.0)), latency_ns=7)
    fast = RailPlan(100, ((0, 20.0), (2_000_000_000, DEAD)), latency_ns=9)
    # 30 in the first second, 50 in the second, then 30 a second.
    assert fluid_makespan_ns([slow, fast], 30) == 1_000_000_007
    assert fluid_makespan_ns([slow, fast], 80) == 2_000_000_007
    assert fluid_makespan_ns([slow, fast], 110) == 3_000_000_007
    with pytest.raises(ValueError, match="never"):
        fluid_makespan_ns([fast], 41)


def test_a_policy_that_stops_is_found_out() -> None:
    class Lazy(LeastCompletion):
        def take(self, now_ns: int) -> Piece | None:
            return None

    with pytest.raises(RuntimeError, match="left"):
        Run(steady(1), Sender(), 1).play(Lazy, Load(((0, 4096),)), 1)


def test_the_tables_have_a_column_for_each_policy() -> None:
    cells: list[Cell] = [
        play(scenario, policy, [1]) for scenario in ("equal", "repeated") for policy in POLICIES
    ]
    for table in (makespans(cells), latencies(cells), slices(cells)):
        rows = table.splitlines()
        assert all(policy in rows[0] for policy in POLICIES)
        filled = [row for row in rows[2:] if row.count("|") == len(POLICIES) + 2]
        assert filled, table
