"""Worlds of the simulator.

Every workload under every fault, the seeds that failed once, and the same run twice.

A failure prints its seed and the command that shows it again.
"""

from __future__ import annotations

import pytest
from simworld.cases import Outcome, kept_seeds, run_seed
from simworld.faults import FAULTS
from simworld.loop import SECOND
from simworld.workloads import WORKLOADS

#: The seeds of every run: fixed, so that a run says something about the change and not about its luck.
FIRST_SEED = 1_000
SEEDS = 200
BATCH = 10
ACTIVE_US = 2 * SECOND


def check(outcome: Outcome) -> None:
    print(f"seed={outcome.seed} ({outcome.name}): {outcome.steps} steps, {outcome.notes}")
    assert not outcome.broken, outcome.told()


@pytest.mark.parametrize(("seed", "workload", "fault"), kept_seeds())
def test_a_seed_that_failed_once(seed: int, workload: str, fault: str) -> None:
    check(run_seed(seed, names=(workload, fault)))


@pytest.mark.parametrize("first", range(FIRST_SEED, FIRST_SEED + SEEDS, BATCH))
def test_new_seeds(first: int) -> None:
    for seed in range(first, first + BATCH):
        check(run_seed(seed, active_us=ACTIVE_US))


def test_the_seeds_meet_every_workload_and_every_fault() -> None:
    pairs = {
        (seed % len(WORKLOADS), seed // len(WORKLOADS) % len(FAULTS))
        for seed in range(FIRST_SEED, FIRST_SEED + SEEDS)
    }
    assert len(pairs) == len(WORKLOADS) * len(FAULTS)


@pytest.mark.parametrize("seed", [69, 4])
def test_the_same_seed_is_the_same_run(seed: int) -> None:
    first, second = run_seed(seed, active_us=ACTIVE_US), run_seed(seed, active_us=ACTIVE_US)
    assert (first.steps, first.trace, first.notes) == (second.steps, second.trace, second.notes)
    assert len(first.trace) > 1
    other = run_seed(seed + 70, active_us=ACTIVE_US)
    assert other.trace != first.trace


@pytest.mark.parametrize("seed", [0, 8])
def test_native_tables_and_their_twins_live_the_same_life(seed: int) -> None:
    native = run_seed(seed, native=True, active_us=ACTIVE_US)
    twins = run_seed(seed, native=False, active_us=ACTIVE_US)
    # Free space is searched otherwise, so offsets differ, and with them the hashes of states.
    assert (native.steps, native.notes, native.broken) == (twins.steps, twins.notes, "")
