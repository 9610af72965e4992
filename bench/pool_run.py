"""Runs the stores in turn, job by job in each round: all meet the same minutes of a noisy machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from moonpool.bench.interval import Interval, bootstrap_median, paired_ratios
from moonpool.bench.pair import ProcessPair
from moonpool.bench.plan import Shape
from moonpool.bench.pool_cells import PoolCell, PoolFloor, PoolLine
from moonpool.bench.pool_contenders import PoolContender, PoolRecipe
from moonpool.bench.workers.pool_protocol import PoolJob, PoolReport
from moonpool.bench.workers.protocol import WorkerFailed, encode
from moonpool.errors import UsageError
from moonpool.units import KIB, MIB

CHECK_SHAPES: Final = (Shape(4 * KIB, 1), Shape(4 * KIB, 128), Shape(1 * MIB, 1))
OPERATIONS_MAX: Final = 100_000
ROUNDS_MAX: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """A whole run. Jobs last ``job_s`` or, for large objects, as long as their fewest calls take."""

    jobs: Mapping[PoolCell, tuple[str, ...]]
    rounds: int = 10
    job_s: float = 0.1
    job_timeout_s: float = 60.0
    start_timeout_s: float = 90.0

    def __post_init__(self) -> None:
        if not 1 <= self.rounds <= ROUNDS_MAX:
            raise UsageError(f"rounds must be between 1 and {ROUNDS_MAX}, not {self.rounds}")
        if not 0.001 <= self.job_s <= 60:
            raise UsageError(f"a job must last between 0.001 and 60 s, not {self.job_s}")

    def job(self, measured: PoolCell, variant: str) -> PoolJob:
        """The request that measures a cell once."""
        return PoolJob(
            operation=measured.operation,
            block_bytes=measured.shape.block_bytes,
            count=measured.shape.count,
            minimum_s=self.job_s,
            minimum_operations=3,
            maximum_operations=OPERATIONS_MAX,
            variant=variant,
        )


@dataclass(slots=True)
class PoolMeasurements:
    """All reports of a run, by cell, contender and round, and why anything is missing."""

    reports: dict[tuple[PoolCell, str], dict[int, PoolReport]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)  # of workers that failed in a job
    load_before: float = 0.0
    elapsed_s: float = 0.0

    def p50(self, measured: PoolCell, name: str) -> Interval | None:
        """Median over the rounds of the median latency, in us."""
        rounds = self.reports.get((measured, name))
        return bootstrap_median([report.p50_us for report in rounds.values()]) if rounds else None

    def ratio(self, measured: PoolCell, ours: str, other: str) -> Interval | None:
        """Ours over the other's calls per second, median of the rounds; None when no round has both."""
        left, right = (
            {
                number: report.operations_per_s
                for number, report in self.reports.get((measured, name), {}).items()
            }
            for name in (ours, other)
        )
        ratios = paired_ratios(left, right)
        return bootstrap_median(ratios) if ratios else None

    def redis_us_per_put(self, name: str) -> Interval | None:
        """CPU microseconds of Redis for each key put, over all put cells of the contender."""
        spent = [
            report.redis_us_per_key
            for (measured, who), rounds in self.reports.items()
            if who == name and measured.operation == "put"
            for report in rounds.values()
        ]
        return bootstrap_median(spent) if any(spent) else None


def order_of(plan: PoolPlan, known: Iterable[str]) -> Iterator[tuple[int, PoolCell, str]]:
    """Every job in the order it is done: round, cell, contender; who begins rotates."""
    there = frozenset(known)
    for round_number in range(plan.rounds):
        for number, (measured, names) in enumerate(plan.jobs.items()):
            members = [name for name in names if name in there]
            for at in range(len(members)):
                yield round_number, measured, members[(at + round_number + number) % len(members)]


class PoolRun:
    """Owns the workers of one run."""

    def __init__(
        self, plan: PoolPlan, contenders: tuple[PoolContender, ...], peers_directory: Path | None = None
    ) -> None:
        self._plan = plan
        self._contenders = {contender.name: contender for contender in contenders}
        self._peers_directory = peers_directory
        self._workers: dict[PoolRecipe, ProcessPair | str] = {}
        self._measurements = PoolMeasurements()
        self._stack = ExitStack()

    def run(self, progress: Callable[[str, int, int], None]) -> PoolMeasurements:
        """Starts the workers, checks that each returns the right bytes, measures, and ends them.

        ``progress`` is called before each job with what is done, its number and the number of jobs. A
        contender that cannot start, fails its check or dies is left out with the reason; the others go on.
        """
        started = time.monotonic()
        self._measurements.load_before = os.getloadavg()[0]
        jobs = list(order_of(self._plan, self._contenders))
        with self._stack:
            for contender in self._contenders.values():
                progress(f"starting {contender.title}", 0, len(jobs))
                self._start(contender)
            for number, (round_number, measured, name) in enumerate(jobs):
                progress(
                    f"round {round_number + 1}, {measured}: {self._contenders[name].title}", number, len(jobs)
                )
                self._measure(round_number, measured, name)
        self._measurements.elapsed_s = time.monotonic() - started
        return self._measurements

    def _start(self, contender: PoolContender) -> None:
        try:
            if contender.recipe not in self._workers:
                self._open(contender.recipe)
            worker = self._worker(contender)
            for shape in CHECK_SHAPES:
                worker.check(shape, contender.variant, self._plan.job_timeout_s)
        except WorkerFailed as failure:
            self._measurements.failures[contender.name] = str(failure)

    def _open(self, recipe: PoolRecipe) -> None:
        """Starts a worker; keeps the sentence instead where it does not start."""
        try:
            command = recipe.command(self._peers_directory)
            self._workers[recipe] = self._stack.enter_context(
                ProcessPair(command, spins_when_idle=False, start_timeout_s=self._plan.start_timeout_s)
            )
        except (WorkerFailed, UsageError) as failure:
            self._workers[recipe] = str(failure)

    def _worker(self, contender: PoolContender) -> ProcessPair:
        worker = self._workers[contender.recipe]
        if isinstance(worker, str):
            raise WorkerFailed(worker)
        return worker

    def _measure(self, round_number: int, measured: PoolCell, name: str) -> None:
        contender = self._contenders[name]
        if name in self._measurements.failures:
            return
        job = encode("job", self._plan.job(measured, contender.variant))
        try:
            values = self._ask(contender, job)
        except WorkerFailed as failure:
            self._measurements.failures[f"{name}, {measured}"] = str(failure)
            return
        self._measurements.reports.setdefault((measured, name), {})[round_number] = PoolReport(**values)

    def _ask(self, contender: PoolContender, job: str) -> Any:
        """The report of a job. A worker that fails is started anew, once: some stores do not get old well."""
        try:
            return self._worker(contender).ask("report", job, self._plan.job_timeout_s)
        except WorkerFailed:
            worker = self._workers.pop(contender.recipe)
            if isinstance(worker, ProcessPair):
                worker.stop()
            self._open(contender.recipe)
            self._measurements.restarts[contender.name] = (
                self._measurements.restarts.get(contender.name, 0) + 1
            )
        return self._worker(contender).ask("report", job, self._plan.job_timeout_s)


def judge(measurements: PoolMeasurements, floors: Iterable[PoolFloor]) -> list[PoolLine]:
    """Every floor, whether it was measured or not, in the order of the promise."""
    lines = []
    for floor in floors:
        own = measurements.p50(floor.cell, floor.ours)
        other = measurements.p50(floor.cell, floor.other) if floor.other else None
        seen = measurements.ratio(floor.cell, floor.ours, floor.other) if floor.other else own
        p50s = [None if each is None else each.median for each in (own, other)]
        lines.append(PoolLine(floor, seen, *p50s))
    return lines
