"""Runs worlds of the simulator: one seed with its traceback, or many over all processors.

usage: run.py --seed N [--workload NAME --fault NAME] | run.py [--seeds N] [--first N] [--steps N]
[--seconds N]
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from simworld.cases import Outcome, run_seed, world_of
from simworld.loop import SECOND


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, help="run this one and show where it breaks")
    parser.add_argument("--workload", help="of that one, instead of the one that it stands for")
    parser.add_argument("--fault", help="the same")
    parser.add_argument("--seeds", type=int, default=1_000, help="how many to run")
    parser.add_argument("--first", type=int, default=1, help="the first of them")
    parser.add_argument("--steps", type=int, default=0, help="go on until so many steps were run")
    parser.add_argument("--seconds", type=float, default=3.0, help="simulated time with faults of each world")
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    options = parser.parse_args()
    if options.seed is not None:
        names = (options.workload, options.fault) if options.workload and options.fault else None
        return show(options.seed, int(options.seconds * SECOND), names)
    return run_many(options)


def show(seed: int, active_us: int, names: tuple[str, str] | None) -> int:
    """One world; an error comes through with its traceback."""
    world = world_of(seed, active_us=active_us, names=names)
    print(f"seed={seed}: {world.options.workload.name}, {world.options.fault.name}")
    try:
        world.run()
    finally:
        print(f"{world.loop.steps} steps, {world.loop.now / SECOND:.3f} s; {world.notes}")
    print(f"all invariants held; trace {world.watch.trace[-1]:016x}")
    return 0


def run_many(options: argparse.Namespace) -> int:
    """Many worlds, a line for each that breaks."""
    started, steps, runs, failed = time.monotonic(), 0, 0, 0
    work = Run(int(options.seconds * SECOND))
    at, end = options.first, options.first + options.seeds
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        while steps < options.steps if options.steps else at < end:
            batch = range(at, at + 50 if options.steps else min(at + 50, end))
            for outcome in pool.imap_unordered(work, batch):
                runs, steps = runs + 1, steps + outcome.steps
                if outcome.broken:
                    failed += 1
                    print(outcome.told(), flush=True)
            at = batch.stop
    spent = time.monotonic() - started
    print(
        f"{runs} worlds from seed {options.first}, {steps:,} steps, {failed} broken,"
        f" {spent:.0f} s, {steps / spent:,.0f} steps/s"
    )
    return 1 if failed else 0


class Run:
    """One world, in a worker."""

    def __init__(self, active_us: int) -> None:
        self._active_us = active_us

    def __call__(self, seed: int) -> Outcome:
        return run_seed(seed, active_us=self._active_us)


if __name__ == "__main__":
    sys.exit(main())
