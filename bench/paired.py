"""Runs the contenders in turn, job by job in each round: all meet the same minutes of a noisy machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from moonpool.bench.ceiling import CeilingUnavailable
from moonpool.bench.contenders import Contender, Group, ProcessRecipe
from moonpool.bench.interval import Interval, bootstrap_median, paired_ratios
from moonpool.bench.pair import ProcessPair
from moonpool.bench.plan import Cell, Plan, Shape
from moonpool.bench.workers.protocol import JobReport, WorkerFailed
from moonpool.errors import UsageError
from moonpool.units import KIB, MIB

Measure = Literal["throughput", "cpu", "p50", "p99"]
GROUPS: Final[tuple[Group, ...]] = ("tcp", "shm")
CHECK_SHAPES: Final = (Shape(4 * KIB, 1), Shape(64 * KIB, 16), Shape(1 * MIB, 1))


def value_of(report: JobReport, measure: Measure) -> float:
    """One measure of one job."""
    if measure == "throughput":
        return report.gigabytes_per_s
    if measure == "cpu":
        return report.cpu_s_per_gigabyte
    return report.p50_us if measure == "p50" else report.p99_us


@dataclass(slots=True)
class Measurements:
    """All reports of a run, by cell, contender and round, and why anything is missing."""

    reports: dict[tuple[Cell, str], dict[int, JobReport]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # contender, or "contender, cell" -> sentence
    load_before: float = 0.0  # of the machine, one minute's average, before the first process started
    elapsed_s: float = 0.0

    def add(self, cell: Cell, contender: str, round_number: int, report: JobReport) -> None:
        """Keeps what one job of one round reported."""
        self.reports.setdefault((cell, contender), {})[round_number] = report

    def median(self, cell: Cell, contender: str, measure: Measure) -> Interval | None:
        """Median over the rounds with its interval; None when the cell was not measured."""
        rounds = self.reports.get((cell, contender))
        return bootstrap_median([value_of(report, measure) for report in rounds.values()]) if rounds else None

    def ratio(self, cell: Cell, ours: str, other: str, measure: Measure = "throughput") -> Interval | None:
        """Median of the per-round ratios ours / other; None when no round has both."""
        left = {n: value_of(report, measure) for n, report in self.reports.get((cell, ours), {}).items()}
        right = {n: value_of(report, measure) for n, report in self.reports.get((cell, other), {}).items()}
        ratios = paired_ratios(left, right)
        return bootstrap_median(ratios) if ratios else None


def rotated(contenders: tuple[Contender, ...], steps: int) -> tuple[Contender, ...]:
    """The same contenders, another one first."""
    if not contenders:
        return ()
    start = steps % len(contenders)
    return contenders[start:] + contenders[:start]


def order_of(plan: Plan, contenders: tuple[Contender, ...]) -> Iterator[tuple[int, Cell, Contender]]:
    """Every job of the run in the order it is done: round, cell, then contender, whose order rotates."""
    for round_number in range(plan.rounds):
        for cell_number, cell in enumerate(plan.cells):
            for group in GROUPS:
                members = tuple(contender for contender in contenders if contender.group == group)
                for contender in rotated(members, round_number + cell_number):
                    if round_number % contender.round_stride == 0:
                        yield round_number, cell, contender


class PairedRun:
    """Owns the process pairs of one run."""

    def __init__(
        self,
        plan: Plan,
        contenders: tuple[Contender, ...],
        ceiling_directory: Path,
        peers_directory: Path | None = None,
    ) -> None:
        self._plan = plan
        self._contenders = contenders
        self._ceiling_directory = ceiling_directory
        self._peers_directory = peers_directory
        self._pairs: dict[ProcessRecipe, ProcessPair] = {}
        self._measurements = Measurements()

    def run(self, progress: Callable[[str, int, int], None]) -> Measurements:
        """Starts the pairs, checks that each moves the right bytes, measures, and ends them.

        ``progress`` is called before each job with what is done, its number and the number of jobs. A
        contender that cannot start, fails its check or dies is left out with the reason; the others go on.
        """
        started = time.monotonic()
        self._measurements.load_before = os.getloadavg()[0]
        jobs = list(order_of(self._plan, self._contenders))
        with ExitStack() as whole:
            running = whole.enter_context(ExitStack())
            begun = -1
            for number, (round_number, cell, contender) in enumerate(jobs):
                if round_number // self._plan.rounds_per_start != begun:
                    # New processes get other pages: which ones changes the speed of copies by some 10 %, so
                    # one draw must not decide a whole run.
                    begun = round_number // self._plan.rounds_per_start
                    running.close()
                    self._pairs.clear()
                    self._start_all(running)
                progress(f"round {round_number + 1}, {cell}: {contender.title}", number, len(jobs))
                self._measure(round_number, cell, contender)
        self._measurements.elapsed_s = time.monotonic() - started
        return self._measurements

    def _start_all(self, running: ExitStack) -> None:
        for contender in self._contenders:
            if contender.name not in self._measurements.failures:
                self._start(contender, running)

    def pair_of(self, recipe: ProcessRecipe) -> ProcessPair:
        """The running pair of that recipe; ``KeyError`` before it is started."""
        return self._pairs[recipe]

    def _start(self, contender: Contender, stack: ExitStack) -> None:
        plan, recipe = self._plan, contender.recipe
        try:
            pair = self._pairs.get(recipe)
            if pair is None:
                command = recipe.command(plan.buffer_bytes, self._ceiling_directory, self._peers_directory)
                pair = ProcessPair(
                    command, spins_when_idle=recipe.spins_when_idle, start_timeout_s=plan.start_timeout_s
                )
                self._pairs[recipe] = stack.enter_context(pair)
            for shape in CHECK_SHAPES:
                if shape.operation_bytes <= plan.buffer_bytes:
                    pair.check(shape, contender.variant, plan.job_timeout_s)
        except (WorkerFailed, UsageError, CeilingUnavailable) as failure:
            self._measurements.failures[contender.name] = str(failure)

    def _measure(self, round_number: int, cell: Cell, contender: Contender) -> None:
        if contender.name in self._measurements.failures:
            return
        pair = self._pairs[contender.recipe]
        try:
            job = self._plan.job(cell, contender.variant, contender.warmup_s)
            report = pair.run(job, self._plan.job_timeout_s)
        except WorkerFailed as failure:
            where = contender.name if pair.failure else f"{contender.name}, {cell}"
            self._measurements.failures[where] = str(failure)
        else:
            self._measurements.add(cell, contender.name, round_number, report)
