"""The prefix index against Dynamo's, paired: ``python -m moonpool.bench.conductor_pair [--trace FILE]``.

Both are driven inside a process of their own, in turn, with the same chains; costs are CPU time. Beside them
stands the scheduler's decision with booking over 16 instances, which has a floor but no peer in this form.
"""

from __future__ import annotations

import json
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import click

from moonpool.bench.interval import Interval, bootstrap_median, paired_ratios
from moonpool.bench.peers_setup import load_peer
from moonpool.bench.program import Program

PEER: Final = "dynamo-1.6.1"
SOURCE: Final = Path(__file__).resolve().parents[1] / "src"
WORKER: Final = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "from moonpool.bench.workers.conductor_index import main; main()"
)
ROUND_TIMEOUT_S: Final = 300
DECISION: Final = "schedule and book"
DECISIONS: Final = 600


class Floor(NamedTuple):
    """What a cell must meet: at most so many microseconds, and so many times cheaper than the peer."""

    most_us: float | None = None
    times: float | None = None


FLOORS: Final = {
    "find 32 x 16": Floor(3.0),
    "find 1024 x 64": Floor(25.0),
    "store a block": Floor(1 / 8.0),
    "remove a block": Floor(1.0),
    "replay an operation": Floor(None, 3.0),
    "hash 1000 tokens": Floor(None, 5.0),
    DECISION: Floor(60.0),
}


class Worker:
    """One contender's process."""

    def __init__(self, name: str, python: str, trace: Path | None) -> None:
        arguments = [name, *([str(trace)] if trace else [])]
        self.name = name
        words = [python, "-P", "-c", WORKER, str(SOURCE), *arguments]
        self._program = Program(f"the worker of {name}", words)
        try:
            self._program.wait_line(ROUND_TIMEOUT_S)
        except BaseException:
            self._program.kill()
            raise

    def round(self) -> dict[str, float]:
        """All cells once."""
        self._program.say("")
        found: dict[str, float] = json.loads(self._program.wait_line(ROUND_TIMEOUT_S))
        return found

    def close(self) -> None:
        """Ends the process."""
        self._program.kill()


def decision_us() -> float:
    """CPU microseconds of a decision with booking over 16 aggregated instances, prompts of 1,024 tokens."""
    from moonpool.conductor import (
        CacheContext,
        Holder,
        IndexView,
        InstanceSpec,
        PrefixIndex,
        Prompt,
        Role,
        Scheduler,
        SchedulerConfig,
    )
    from moonpool.conductor.cost import DecodeCost, PrefillCost

    context, index = CacheContext("m", 16), PrefixIndex()
    holders = [Holder(f"e{number}") for number in range(16)]
    fleet = [
        InstanceSpec(
            name=holder.instance,
            role=Role.BOTH,
            prefill=PrefillCost(quadratic_s=1e-10, linear_s=2e-5),
            decode=DecodeCost(step_s=0.01, request_s=1e-4, context_token_s=1e-8),
            kv_tokens_max=5_000_000,
            chunk_tokens=2_048,
        )
        for holder in holders
    ]
    scheduler = Scheduler(fleet, IndexView(index, context, holders), config=SchedulerConfig(block_tokens=16))
    start, spent, now = list(range(1_000, 1_032)), 0.0, 0.0
    for number in range(DECISIONS + 100):
        hashes = array("Q", start + [10_000_000 + number * 100 + block for block in range(32)])
        now += 0.01
        began = time.process_time()
        decision = scheduler.schedule(Prompt(number, 1_024, hashes, output_tokens=100), now)
        spent += time.process_time() - began if number >= 100 else 0.0
        index.store(context, holders[decision.prefill], hashes)
        if number >= 64:
            scheduler.first_token(number - 64, now)
            scheduler.finished(number - 64, now + 1)
    return spent / DECISIONS * 1e6


def measure(rounds: int, trace: Path | None) -> tuple[dict[str, dict[str, dict[int, float]]], str]:
    """Costs by contender, cell and round; and why the peer is missing, or nothing."""
    peer = load_peer(PEER)
    workers = [Worker("moonpool", sys.executable, trace)]
    if peer is not None:
        workers.append(Worker("dynamo", peer.python, trace))
    found: dict[str, dict[str, dict[int, float]]] = {worker.name: {} for worker in workers}
    try:
        for number in range(rounds):
            for worker in workers if number % 2 else workers[::-1]:
                for cell, cost in worker.round().items():
                    found[worker.name].setdefault(cell, {})[number] = cost
            found["moonpool"].setdefault(DECISION, {})[number] = decision_us()
    finally:
        for worker in workers:
            worker.close()
    missing = "" if peer is not None else f"make it with `python -m moonpool.bench.peers_setup {PEER}`"
    return found, missing


class Row(NamedTuple):
    """One cell's outcome."""

    cell: str
    ours_us: Interval
    peer_us: Interval | None
    times: Interval | None
    verdict: str


def rows_of(found: dict[str, dict[str, dict[int, float]]]) -> list[Row]:
    """Medians, how many times cheaper ours is, and whether each floor is met."""
    rows = []
    for cell, ours in found["moonpool"].items():
        other = found.get("dynamo", {}).get(cell)
        times = bootstrap_median(paired_ratios(other, ours)) if other else None
        ours_us = bootstrap_median(list(ours.values()))
        peer_us = bootstrap_median(list(other.values())) if other else None
        rows.append(Row(cell, ours_us, peer_us, times, verdict_of(FLOORS[cell], ours_us, times)))
    return rows


def verdict_of(floor: Floor, ours_us: Interval, times: Interval | None) -> str:
    """ "met", "not met", or "unknown" without the peer that the floor is about."""
    if floor.most_us is not None and ours_us.median > floor.most_us:
        return f"not met: {floor.most_us:.3g} us"
    if floor.times is not None:
        if times is None:
            return "unknown"
        if times.median < floor.times:
            return f"not met: {floor.times:.3g} times"
    return "met"


def print_rows(rows: Sequence[Row], missing: str) -> None:
    """The table for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="CPU microseconds, median (95 % interval)")
    for heading in ("", "moonpool", "dynamo", "times cheaper", "floor"):
        table.add_column(heading)
    for row in rows:
        table.add_row(row.cell, str(row.ours_us), str(row.peer_us or "-"), str(row.times or "-"), row.verdict)
    console = Console()
    console.print(table)
    if missing:
        console.print(f"dynamo was not measured: {missing}")


@click.command(help=__doc__)
@click.option("--rounds", type=click.IntRange(1, 1_000), default=15, show_default=True)
@click.option("--trace", type=click.Path(dir_okay=False, exists=True, path_type=Path), help="For the replay.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def main(rounds: int, trace: Path | None, as_json: bool) -> None:
    """The command; its help is this module's own docstring."""
    found, missing = measure(rounds, trace)
    rows = rows_of(found)
    if as_json:
        click.echo(json.dumps({"costs_us": found, "verdicts": {row.cell: row.verdict for row in rows}}))
    else:
        print_rows(rows, missing)
    sys.exit(1 if any(row.verdict.startswith("not met") for row in rows) else 0)


if __name__ == "__main__":
    main()
