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
from moonpool.bench.contenders import CONTENDERS, Contender, select, with_small_pages
from moonpool.bench.floors import Line, judge
from moonpool.bench.locations import project_directory, results_directory
from moonpool.bench.paired import GROUPS, Measurements, PairedRun
from moonpool.bench.plan import BUFFER_BYTES, JOB_S, Plan, default_shapes, parse_shapes
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
from moonpool.units import MIB

DEFAULT_ROUNDS: Final = 15
QUICK_ROUNDS: Final = 3
QUICK_SHAPES: Final = ("4K", "4K:128", "64K", "1M", "16M")
QUICK_JOB_S: Final = 0.03
PLAIN_WIDTH: Final = 240  # of tables that go to a file or a pipe


def make_plan(given: dict[str, Any]) -> Plan:
    """The plan these flags ask for; what is not given is the default or, with --quick, small."""
    shapes = default_shapes()
    if given["cells"] or given["quick"]:
        shapes = parse_shapes(given["cells"].split(",") if given["cells"] else QUICK_SHAPES)
    job_s = QUICK_JOB_S if given["quick"] else JOB_S
    return Plan(
        shapes=shapes,
        rounds=given["rounds"] or (QUICK_ROUNDS if given["quick"] else DEFAULT_ROUNDS),
        job_s=job_s if given["job_ms"] is None else given["job_ms"] / 1e3,
        buffer_bytes=given["buffer_mib"] * MIB,
    )


def measure(plan: Plan, contenders: tuple[Contender, ...], results: Path, console: Console) -> Measurements:
    """Does the run under a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, refresh_per_second=1, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def progress(what: str, number: int, total: int) -> None:
            bar.update(task, description=what, completed=number, total=total)

        return PairedRun(plan, contenders, results / "ceiling").run(progress)


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
    "--rounds", type=click.IntRange(1, 1000), help=f"Default {DEFAULT_ROUNDS}, quick {QUICK_ROUNDS}."
)
@click.option("--cells", default="", help="Comma list of sizes and batches: 4K,64K:16,1M:128.")
@click.option("--contenders", default="", help=f"Comma list of: {', '.join(c.name for c in CONTENDERS)}.")
@click.option("--job-ms", type=click.FloatRange(1, 60_000), help="Least time of one job.")
@click.option(
    "--buffer-mib", type=click.IntRange(1, 65_536), default=BUFFER_BYTES // MIB, help="Of a process."
)
@click.option("--quick", is_flag=True, help="Few rounds and cells, to see that everything works.")
@click.option("--json", "as_json", is_flag=True, help="Print the run as one JSON object instead of tables.")
@click.option(
    "--results", type=click.Path(path_type=Path), help="Folder of the history; default bench-results."
)
@click.option("--update-readme", is_flag=True, help="Write the ratio tables into README.md.")
@click.option("--small-pages", is_flag=True, help="Peers' buffers as mmap gives them, of 4 KiB pages.")
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


def run(**given: Any) -> tuple[list[Line], bool]:
    """Measures, records, shows; returns the verdicts, and whether there is anything measured."""
    console = Console(stderr=given["as_json"], width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    results = given["results"] or results_directory()
    plan = make_plan(given)
    chosen = select(tuple(name for name in given["contenders"].split(",") if name))
    if given["small_pages"]:
        chosen = with_small_pages(chosen)
    measurements = measure(plan, chosen, results, console)
    lines = judge(measurements)
    record = history.record(plan, measurements, lines)
    history.append(results / history.HISTORY_FILE, record)
    if given["as_json"]:
        click.echo(json.dumps(record))
    else:
        for table in tables_of(plan, measurements, lines):
            print_table(console, table)
    if given["update_readme"]:
        history.update_readme(project_directory() / "README.md", readme_text(plan, measurements, record))
    return lines, bool(measurements.reports)


if __name__ == "__main__":
    main()
