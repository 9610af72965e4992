"""The tables of a paired run: plain rows of text, shown in a terminal or written as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table as RichTable

from moonpool.bench.contenders import CONTENDERS, COPY_LOOPS, Contender, Group
from moonpool.bench.floors import SHM, TCP, Line
from moonpool.bench.interval import Interval, short
from moonpool.bench.paired import Measure, Measurements
from moonpool.bench.plan import Cell, Plan, Shape

MISSING: Final = "-"
SHOWN: Final[tuple[Measure, ...]] = ("throughput", "p50", "cpu")
RATIO_COLUMNS: Final[dict[Group, tuple[tuple[str, tuple[str, ...]], ...]]] = {
    "tcp": (
        ("x Mooncake 0.3.13", ("mooncake13",)),
        ("x Mooncake tuned", ("mooncake13-tuned",)),
        ("x NIXL tcp", ("nixl-tcp",)),
        ("x C blocking", ("c-blocking",)),
    ),
    "shm": (
        ("x Mooncake 0.3.14 shm", ("mooncake14-shm",)),
        ("x NIXL CMA", ("nixl-cma",)),
        ("x best C copy", COPY_LOOPS),
    ),
}
OURS: Final[dict[Group, str]] = {"tcp": TCP, "shm": SHM}
TITLES: Final[dict[Group, str]] = {
    "tcp": "tcp, two processes on loopback",
    "shm": "shared memory, two processes",
}


@dataclass(frozen=True, slots=True)
class Table:
    """A title, column names, and rows as wide as those."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def _pair_of(show: Callable[[Cell], str], plan: Plan, shape: Shape) -> str:
    """The cells of a shape beside each other: write / read."""
    return " / ".join(show(Cell(shape, operation)) for operation in plan.operations)


def _median(measurements: Measurements, contender: str, measure: Measure) -> Callable[[Cell], str]:
    def show(cell: Cell) -> str:
        seen = measurements.median(cell, contender, measure)
        return short(seen.median) if seen else MISSING

    return show


def _ratio(measurements: Measurements, ours: str, others: Sequence[str]) -> Callable[[Cell], str]:
    def show(cell: Cell) -> str:
        seen = [ratio for other in others if (ratio := measurements.ratio(cell, ours, other)) is not None]
        return str(min(seen, key=lambda ratio: ratio.median)) if seen else MISSING

    return show


def ratio_table(group: Group, plan: Plan, measurements: Measurements) -> Table:
    """Ours in GB/s, p50 and CPU, and its paired ratios to each other contender; each cell is write / read."""
    ours, columns = OURS[group], RATIO_COLUMNS[group]
    header = ("block", "GB/s", "p50 us", "CPU s/GB", *(title for title, _ in columns))
    rows = []
    for shape in plan.shapes:
        shows = [_median(measurements, ours, measure) for measure in SHOWN]
        shows += [_ratio(measurements, ours, others) for _, others in columns]
        rows.append((str(shape), *(_pair_of(show, plan, shape) for show in shows)))
    return Table(f"{TITLES[group]} (write / read; ratios: median, 95 % interval)", header, tuple(rows))


def contender_table(group: Group, measure: Measure, plan: Plan, measurements: Measurements) -> Table:
    """One measure of every contender of the group; each cell is write / read."""
    members = [
        contender
        for contender in CONTENDERS
        if contender.group == group and took_part(contender, measurements)
    ]
    titles = {"throughput": "GB/s", "p50": "p50 us", "p99": "p99 us", "cpu": "CPU s/GB of both processes"}
    rows = []
    for shape in plan.shapes:
        shows = [_median(measurements, contender.name, measure) for contender in members]
        rows.append((str(shape), *(_pair_of(show, plan, shape) for show in shows)))
    header = ("block", *(contender.title for contender in members))
    return Table(f"{TITLES[group]}: {titles[measure]}", header, tuple(rows))


def took_part(contender: Contender, measurements: Measurements) -> bool:
    """Whether the run has figures of this contender."""
    return any(name == contender.name for _, name in measurements.reports)


def floor_table(lines: Sequence[Line]) -> Table:
    """Every floor with what was seen, the worse bound of its interval, and the verdict."""
    rows = []
    for line in lines:
        floor = line.floor
        what = f"{floor.ours} {line.cell}"
        unit = " us" if not floor.others else ""
        bound = f"{'<=' if floor.at_most else '>='} {floor.bound:g}{unit}"
        promise = f"{floor.measure} of {line.against}" if line.against else floor.measure
        seen, worse = MISSING, MISSING
        if line.seen is not None:
            seen, worse = _interval(line.seen), short(line.worse_bound)
        rows.append((what, promise, bound, seen, worse, line.verdict))
    header = ("cell", "against", "floor", "seen (95 %)", "worse bound", "verdict")
    return Table("floors", header, tuple(rows))


def _interval(seen: Interval) -> str:
    return f"{seen}, n={seen.samples}"


def failure_table(measurements: Measurements) -> Table:
    """Who or what was left out, and why."""
    rows = tuple((where, " ".join(reason.split())[:200]) for where, reason in measurements.failures.items())
    return Table("left out", ("contender", "reason"), rows)


def to_markdown(table: Table) -> str:
    """The table for a Markdown page."""
    lines = [
        f"**{table.title}**",
        "",
        "| " + " | ".join(table.header) + " |",
        "|" + "---|" * len(table.header),
        *("| " + " | ".join(row) + " |" for row in table.rows),
    ]
    return "\n".join(lines) + "\n"


def print_table(console: Console, table: Table) -> None:
    """The table for a terminal."""
    shown = RichTable()
    for number, name in enumerate(table.header):
        shown.add_column(name, justify="left" if number == 0 else "right", no_wrap=True)
    for row in table.rows:
        shown.add_row(*row)
    console.print(f"\n{table.title}", soft_wrap=True, highlight=False)
    console.print(shown)
