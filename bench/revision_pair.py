"""The engine of this checkout beside that of another: did a change cost what was not meant to change?

`python -m moonpool.bench.revision_pair --other OTHER/.venv/bin/python`: the other environment has the
other revision installed. Each pair of processes does the same jobs in turn in every round, new ones are
started now and then; a ratio is of bytes a second, this revision's over the other's, round by round. A cell
holds when its interval contains 1 or lies above 0.97.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import click

from moonpool.bench.interval import Interval, bootstrap_median, paired_ratios
from moonpool.bench.pair import ProcessPair
from moonpool.bench.plan import Cell, Plan, parse_shapes

TRANSPORTS: Final = ("shm", "tcp")
CELLS: Final = "4K,4K:128,64K,64K:16,1M,16M"
MARGIN: Final = 0.97
BUFFER_BYTES: Final = 256 << 20
WORKER: Final = "from moonpool.bench.workers.main import main; main()"


def holds(seen: Interval) -> bool:
    """Whether nothing was lost, as far as can be told."""
    return seen.low <= 1.0 <= seen.high or seen.low > MARGIN


@contextmanager
def started(pythons: dict[str, str], transport: str, plan: Plan) -> Iterator[dict[str, ProcessPair]]:
    """One pair of processes for each revision."""
    with ExitStack() as stack:
        pairs = {}
        for name, python in pythons.items():
            words = [
                python,
                "-P",
                "-c",
                WORKER,
                "--driver",
                "moonpool",
                "--size-bytes",
                str(plan.buffer_bytes),
            ]
            words += ["--option", f"transport={transport}"]
            pairs[name] = stack.enter_context(
                ProcessPair(words, spins_when_idle=False, start_timeout_s=plan.start_timeout_s)
            )
        yield pairs


def measure(pythons: dict[str, str], transport: str, plan: Plan) -> dict[Cell, Interval]:
    """The ratio of each cell."""
    found: dict[str, dict[Cell, dict[int, float]]] = {name: {} for name in pythons}
    for first in range(0, plan.rounds, plan.rounds_per_start):
        with started(pythons, transport, plan) as pairs:
            for number in range(first, min(plan.rounds, first + plan.rounds_per_start)):
                for cell in plan.cells:
                    names = list(pairs) if number % 2 else list(pairs)[::-1]
                    for name in names:
                        report = pairs[name].run(plan.job(cell, ""), plan.job_timeout_s)
                        found[name].setdefault(cell, {})[number] = report.gigabytes_per_s
    ours, other = (found[name] for name in pythons)
    return {cell: bootstrap_median(paired_ratios(ours[cell], other[cell])) for cell in plan.cells}


@click.command()
@click.option("--other", required=True, help="Python of an environment with the other revision.")
@click.option("--rounds", type=click.IntRange(1, 1_000), default=30, show_default=True)
@click.option("--cells", default=CELLS, show_default=True, help="Sizes and batches, as 64K:16.")
@click.option("--transport", "transports", type=click.Choice(TRANSPORTS), multiple=True, default=TRANSPORTS)
@click.option("--job-ms", type=click.FloatRange(1, 60_000), default=60.0, show_default=True)
@click.option("--buffer-bytes", type=int, default=BUFFER_BYTES, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
def main(other: str, rounds: int, cells: str, transports: tuple[str, ...], as_json: bool, **how: Any) -> None:
    """Compare this revision's engine with another's. Exits with 1 when a cell lost speed."""
    shapes = parse_shapes(cells.split(","))
    plan = Plan(shapes=shapes, rounds=rounds, job_s=how["job_ms"] / 1e3, buffer_bytes=how["buffer_bytes"])
    rows: list[dict[str, Any]] = []
    for transport in transports:
        for cell, seen in measure({"this": sys.executable, "other": other}, transport, plan).items():
            rows.append(
                {
                    "transport": transport,
                    "cell": str(cell),
                    "ratio": seen.median,
                    "low": seen.low,
                    "high": seen.high,
                    "holds": holds(seen),
                }
            )
            if not as_json:
                verdict = "holds" if holds(seen) else "LOST"
                click.echo(f"{transport} {cell!s:14} {seen!s:20} {verdict}")
    if as_json:
        click.echo(json.dumps(rows))
    sys.exit(0 if all(row["holds"] for row in rows) else 1)


if __name__ == "__main__":
    main()
