"""Measures the store beside Mooncake's and redhare's, in turn, in one run.

``moonpool bench pool`` (or ``python -m moonpool.bench.pool``) takes about five minutes; ``--quick`` about
one. Peers that are not installed (``python -m moonpool.bench.peers_setup``) are left out with the reason.
Each store's servers are processes of their own: for Moonpool a Redis, a master and a node beside the
client. The exit code is 1 when a floor that was measured is not met and ``--strict`` is given.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import moonpool
from moonpool.bench import history
from moonpool.bench.interval import short
from moonpool.bench.locations import project_directory, results_directory
from moonpool.bench.peers_setup import PACKAGES
from moonpool.bench.pool_cells import FLOORS, SHM, SYNC, PoolLine, jobs_of
from moonpool.bench.pool_contenders import CONTENDERS, PoolContender, select
from moonpool.bench.pool_run import PoolMeasurements, PoolPlan, PoolRun, judge
from moonpool.bench.summary import MISSING, Table, print_table, to_markdown
from moonpool.errors import UsageError

SCHEMA: Final = 1
DEFAULT_ROUNDS: Final = 10
QUICK_ROUNDS: Final = 3
JOB_S: Final = 0.1
QUICK_JOB_S: Final = 0.03
PLAIN_WIDTH: Final = 240  # of tables that go to a file or a pipe
HISTORY_FILE: Final = "pool-history.jsonl"
BLOCK: Final = "bench-pool"
TITLES: Final = {contender.name: contender.title for contender in CONTENDERS}


def measure(plan: PoolPlan, contenders: tuple[PoolContender, ...], console: Console) -> PoolMeasurements:
    """Runs the plan with a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, refresh_per_second=1, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def progress(what: str, number: int, total: int) -> None:
            bar.update(task, description=what, completed=number, total=total)

        return PoolRun(plan, contenders).run(progress)


def floor_table(lines: Sequence[PoolLine]) -> Table:
    """Every floor with what was seen and the verdict."""
    rows = []
    for line in lines:
        floor = line.floor
        bound = f">= {floor.bound:g} x" if floor.other else f"<= {floor.bound:g} us"
        rows.append(
            (
                str(floor.cell),
                TITLES[floor.ours],
                TITLES.get(floor.other, ""),
                "/".join(MISSING if p50 is None else short(p50) for p50 in shown_latencies(line)),
                str(line.seen) if line.seen is not None else MISSING,
                bound,
                line.verdict,
            )
        )
    header = ("call", "ours", "against", "p50 us", "seen (95 %)", "floor", "verdict")
    return Table("store: keys/s as a ratio to the other's, or our own p50 in us", header, tuple(rows))


def shown_latencies(line: PoolLine) -> tuple[float | None, ...]:
    """Our p50 and, where there is another, its own."""
    return (line.ours_p50_us, line.other_p50_us) if line.floor.other else (line.ours_p50_us,)


def cell_table(measurements: PoolMeasurements) -> Table:
    """Everything that was measured: median latency and payload per second."""
    rows = []
    for (measured, name), rounds in measurements.reports.items():
        p50 = measurements.p50(measured, name)
        speeds = sorted(report.transferred_bytes / report.elapsed_s / 1e9 for report in rounds.values())
        keys = sorted(report.keys / report.elapsed_s for report in rounds.values())
        rows.append(
            (
                str(measured),
                TITLES[name],
                str(p50),
                short(keys[len(keys) // 2]),
                short(speeds[len(speeds) // 2]) if speeds[-1] else MISSING,
            )
        )
    return Table("all cells", ("call", "store", "p50 us (95 %)", "keys/s", "GB/s"), tuple(sorted(rows)))


def failure_table(measurements: PoolMeasurements) -> Table:
    """Who or what was left out, and why."""
    rows = tuple((where, " ".join(reason.split())[:200]) for where, reason in measurements.failures.items())
    return Table("left out", ("contender", "reason"), rows)


def redis_text(measurements: PoolMeasurements) -> str:
    """What Redis costs a put."""
    told = [
        f"{spent} us ({kind})"
        for name, kind in ((SHM, "async"), (SYNC, "sync"))
        if (spent := measurements.redis_us_per_put(name)) is not None
    ]
    return f"CPU of Redis for each key put: {', '.join(told) or 'not measured'}."


def record_of(plan: PoolPlan, measurements: PoolMeasurements, lines: Sequence[PoolLine]) -> dict[str, Any]:
    """The whole run as JSON values."""
    cells = []
    for (measured, name), rounds in measurements.reports.items():
        p50 = measurements.p50(measured, name)
        cells.append(
            {
                "contender": name,
                "call": str(measured),
                "rounds": len(rounds),
                "p50_us": p50 and asdict(p50),
                "reports": [asdict(report) for report in rounds.values()],
            }
        )
    floors = [
        {
            "call": str(line.floor.cell),
            "ours": line.floor.ours,
            "against": line.floor.other,
            "bound": line.floor.bound,
            "seen": line.seen and asdict(line.seen),
            "verdict": line.verdict,
        }
        for line in lines
    ]
    redis = {
        name: spent and asdict(spent)
        for name in (SHM, SYNC)
        for spent in [measurements.redis_us_per_put(name)]
    }
    return {
        "schema": SCHEMA,
        "kind": "pool",
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": moonpool.__version__,
        "commit": history.commit_of(project_directory()),
        "machine": history.machine(),
        "peers": {package.name: package.requirements[0] for package in PACKAGES},
        "rounds": plan.rounds,
        "job_s": plan.job_s,
        "load_before": round(measurements.load_before, 2),
        "elapsed_s": round(measurements.elapsed_s, 1),
        "failures": measurements.failures,
        "restarts": measurements.restarts,
        "redis_us_per_put": redis,
        "cells": cells,
        "floors": floors,
    }


def readme_text(measurements: PoolMeasurements, lines: Sequence[PoolLine], record: dict[str, Any]) -> str:
    """What stands in README."""
    caption = history.caption(record, CONTENDERS)
    return "\n".join([caption, "", to_markdown(floor_table(lines)), redis_text(measurements)])


@click.command("pool", help=__doc__)
@click.option(
    "--rounds", type=click.IntRange(1, 1000), help=f"Default {DEFAULT_ROUNDS}, quick {QUICK_ROUNDS}."
)
@click.option("--contenders", default="", help=f"Comma list of: {', '.join(TITLES)}.")
@click.option("--job-ms", type=click.FloatRange(1, 60_000), help="Least time of one job.")
@click.option("--quick", is_flag=True, help="Few rounds, to see that everything works.")
@click.option("--json", "as_json", is_flag=True, help="Print the run as one JSON object instead of tables.")
@click.option("--update-readme", is_flag=True, help="Write the table of floors into README.md.")
@click.option("--strict", is_flag=True, help="Exit with 1 when a measured floor is not met.")
def main(**given: Any) -> None:
    """The command; its help is this module's own docstring."""
    try:
        lines, measured = run(**given)
    except UsageError as wrong:
        raise click.UsageError(str(wrong)) from wrong
    if not measured:
        click.echo("no contender could be measured", err=True)
        sys.exit(1)
    sys.exit(1 if given["strict"] and any(line.verdict == "not met" for line in lines) else 0)


def run(**given: Any) -> tuple[list[PoolLine], bool]:
    """Measures, records, shows; returns the verdicts, and whether there is anything measured."""
    console = Console(stderr=given["as_json"], width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    quick = given["quick"]
    plan = PoolPlan(
        jobs=jobs_of(FLOORS),
        rounds=given["rounds"] or (QUICK_ROUNDS if quick else DEFAULT_ROUNDS),
        job_s=given["job_ms"] / 1e3 if given["job_ms"] else (QUICK_JOB_S if quick else JOB_S),
    )
    chosen = select(tuple(name for name in given["contenders"].split(",") if name))
    measurements = measure(plan, chosen, console)
    lines = judge(measurements, FLOORS)
    record = record_of(plan, measurements, lines)
    history.append(results_directory() / HISTORY_FILE, record)
    if given["as_json"]:
        click.echo(json.dumps(record))
    else:
        print_table(console, cell_table(measurements))
        if measurements.failures:
            print_table(console, failure_table(measurements))
        print_table(console, floor_table(lines))
        console.print(redis_text(measurements), highlight=False)
    if given["update_readme"]:
        text = readme_text(measurements, lines, record)
        history.update_readme(project_directory() / "README.md", text, BLOCK)
    return lines, bool(measurements.reports)


if __name__ == "__main__":
    main()
