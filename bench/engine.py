"""Measures the transfer engine beside its peers and the machine's limits, in turn, in one run.

``python -m moonpool.bench.engine`` takes about 20 minutes; ``--quick`` about two. Peers that are not
installed (``python -m moonpool.bench.peers_setup``) are left out with the reason. The exit code is 1 when a
floor that was measured is not met and ``--strict`` is given.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moonpool.bench import history
from moonpool.bench.contenders import CONTENDERS, Contender, select
from moonpool.bench.floors import Line, judge
from moonpool.bench.locations import project_directory, results_directory
from moonpool.bench.paired import GROUPS, Measurements, PairedRun
from moonpool.bench.plan import JOB_S, Plan, default_shapes, parse_shapes
from moonpool.bench.summary import (
    SHOWN,
    Table,
    contender_table,
    failure_table,
    floor_table,
    print_table,
    ratio_table,
    to_markdown,
)
from moonpool.errors import UsageError

DEFAULT_ROUNDS: Final = 15
QUICK_ROUNDS: Final = 3
QUICK_SHAPES: Final = ("4K", "4K:128", "64K", "1M", "16M")
QUICK_JOB_S: Final = 0.03


def make_plan(rounds: int | None, cells: str | None, job_ms: float | None, quick: bool) -> Plan:
    """The plan these flags ask for; what is not given is the default or, with --quick, small."""
    shapes = default_shapes()
    if cells or quick:
        shapes = parse_shapes(cells.split(",") if cells else QUICK_SHAPES)
    job_s = QUICK_JOB_S if quick else JOB_S
    return Plan(
        shapes=shapes,
        rounds=rounds or (QUICK_ROUNDS if quick else DEFAULT_ROUNDS),
        job_s=job_s if job_ms is None else job_ms / 1e3,
    )


def measure(plan: Plan, contenders: tuple[Contender, ...], console: Console) -> Measurements:
    """Does the run under a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, refresh_per_second=1, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def progress(what: str, number: int, total: int) -> None:
            bar.update(task, description=what, completed=number, total=total)

        return PairedRun(plan, contenders, results_directory() / "ceiling").run(progress)


def tables_of(plan: Plan, measurements: Measurements, lines: Sequence[Line]) -> list[Table]:
    """Everything a reader may want, the verdicts last."""
    tables: list[Table] = []
    for group in GROUPS:
        tables += [contender_table(group, kind, plan, measurements) for kind in SHOWN]
        tables.append(ratio_table(group, plan, measurements))
    if measurements.failures:
        tables.append(failure_table(measurements))
    return [*tables, floor_table(lines)]


def readme_text(plan: Plan, measurements: Measurements, run: dict[str, Any]) -> str:
    """What stands in README: the caption and the two tables of ratios."""
    parts = [to_markdown(ratio_table(group, plan, measurements)) for group in GROUPS]
    return "\n".join([history.caption(run, CONTENDERS), "", *parts])


@click.command(help=__doc__)
@click.option(
    "--rounds",
    type=click.IntRange(1, 1000),
    default=None,
    help=f"Default {DEFAULT_ROUNDS}, quick {QUICK_ROUNDS}.",
)
@click.option("--cells", default=None, help="Comma list of sizes and batches: 4K,64K:16,1M:128.")
@click.option("--contenders", default="", help=f"Comma list of: {', '.join(c.name for c in CONTENDERS)}.")
@click.option("--job-ms", type=click.FloatRange(1, 60_000), default=None, help="Least time of one job.")
@click.option("--quick", is_flag=True, help="Few rounds and cells, to see that everything works.")
@click.option("--json", "as_json", is_flag=True, help="Print the run as one JSON object instead of tables.")
@click.option(
    "--history", "history_file", type=click.Path(path_type=Path), default=None, help="File of past runs."
)
@click.option("--update-readme", is_flag=True, help="Write the ratio tables into README.md.")
@click.option("--strict", is_flag=True, help="Exit with 1 when a measured floor is not met.")
def main(
    rounds: int | None,
    cells: str | None,
    contenders: str,
    job_ms: float | None,
    quick: bool,
    as_json: bool,
    history_file: Path | None,
    update_readme: bool,
    strict: bool,
) -> None:
    """The command; its help is this module's own docstring."""
    console = Console(stderr=as_json, width=None if sys.stdout.isatty() else 240)
    try:
        plan = make_plan(rounds, cells, job_ms, quick)
        chosen = select(tuple(name for name in contenders.split(",") if name))
        measurements = measure(plan, chosen, console)
        lines = judge(measurements)
        run = history.record(plan, measurements, lines)
        history.append(history_file or results_directory() / history.HISTORY_FILE, run)
        if as_json:
            click.echo(json.dumps(run))
        else:
            for table in tables_of(plan, measurements, lines):
                print_table(console, table)
        if update_readme:
            history.update_readme(project_directory() / "README.md", readme_text(plan, measurements, run))
    except UsageError as wrong:
        raise click.UsageError(str(wrong)) from wrong
    if not measurements.reports:
        sys.exit(1)
    sys.exit(1 if strict and any(line.verdict == "not met" for line in lines) else 0)


if __name__ == "__main__":
    main()
