"""After a timed-out or cancelled READ has returned, its buffer never changes again: seeded cases that try.

    python -m moonpool.bench.late_bytes --cases 10000 --seed 1

Each case is a READ of a random size and shape that a random fault delays, ended at a random moment; its
destination is checksummed at once, again when the network has delivered everything late, and again with the
whole group of cases. Exit codes: 0 none changed, 1 something did or ended wrongly, 2 wrong usage.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, final

import click

from moonpool.bench.late_bytes_cases import SHARES, WAYS, Tally, WayPlan
from moonpool.bench.late_bytes_station import Station

EXIT_VIOLATED: Final = 1
CASES_MAX: Final = 10_000_000


@final
@dataclass(frozen=True, slots=True)
class Job:
    """What one station does: so many cases of a way, under a seed of its own."""

    way: WayPlan
    seed: str
    count: int


def plan_jobs(cases: int, seed: int, stations: int) -> list[Job]:
    """`cases` cases dealt to stations of each way by its share; each way with a share has a station."""
    counts = [cases * share // sum(SHARES) for share in SHARES]
    counts[0] += cases - sum(counts)
    jobs = []
    for way, count in zip(WAYS, counts, strict=True):
        # Few stations of shared memory: their cases are short, and large copies would starve the others.
        wanted = min(stations if way.transport == "tcp" else 1, count)
        for station in range(wanted):
            own = count * (station + 1) // wanted - count * station // wanted
            jobs.append(Job(way, f"{seed}:{way.name}:{station}", own))
    return jobs


def run_jobs(jobs: list[Job]) -> Tally:
    """All jobs at once, a thread each; their tallies together. A station's own failure is a violation."""
    tally, lock = Tally(), threading.Lock()

    def run(job: Job) -> None:
        own = Tally()
        try:
            with Station(job.way, job.seed) as station:
                own = station.tally
                station.run(0, job.count)
        except Exception as problem:
            own.violate(f"{job.seed}: the station failed: {type(problem).__name__}: {problem}")
        with lock:
            tally.add(own)

    threads = [threading.Thread(target=run, args=(job,), name=f"station {job.seed}") for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tally


def run_all(jobs: list[Job], processes: int) -> Tally:
    """The jobs over that many processes."""
    if processes == 1:
        return run_jobs(jobs)
    tally = Tally()
    # Started afresh: a fork of a process with engines or threads has neither.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        for part in pool.map(run_jobs, [jobs[start::processes] for start in range(processes)]):
            tally.add(part)
    return tally


def summary(tally: Tally, elapsed_s: float, seed: int) -> dict[str, Any]:
    """The run as one JSON object."""
    return {
        "program": "late_bytes",
        "seed": seed,
        "cases": tally.cases.total(),
        "elapsed_s": round(elapsed_s, 1),
        "by_way": dict(sorted(tally.cases.items())),
        "ended": dict(tally.ended.most_common()),
        "torn": tally.torn,
        "held_when_ended": tally.held,
        "companions": dict(tally.companions.most_common()),
        "checks": tally.checks,
        "reopened": tally.reopened,
        "end_late_ms_max": round(tally.end_late_ms_max, 1),
        "violations": tally.violation_count,
        "first_violations": tally.violations,
    }


def print_summary(found: dict[str, Any]) -> None:
    """The run as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "how many", title=f"late bytes, seed {found['seed']}", title_justify="left")
    table.add_row("cases", f"{found['cases']} in {found['elapsed_s']} s")
    for name, count in found["by_way"].items():
        table.add_row(f"  {name}", str(count))
    for name, count in found["ended"].items():
        table.add_row(f"ended as {name}", str(count))
    table.add_row("bytes had begun to land", str(found["torn"]))
    table.add_row("bytes came late (held by the proxy)", str(found["held_when_ended"]))
    for name, count in found["companions"].items():
        table.add_row(f"companion ended as {name}", str(count))
    table.add_row("looks at destinations", str(found["checks"]))
    table.add_row("longest from the wanted to the real end", f"{found['end_late_ms_max']} ms")
    table.add_row("[bold]violations[/bold]", f"[bold]{found['violations']}[/bold]")
    console = Console()
    console.print(table)
    for sentence in found["first_violations"]:
        console.print(sentence, style="red", markup=False)


@click.command(help=__doc__)
@click.option("--cases", type=click.IntRange(1, CASES_MAX), default=10_000, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True, help="Same seed, same cases.")
@click.option("--stations", type=click.IntRange(1, 64), default=4, show_default=True, help="Of each tcp way.")
@click.option("--processes", type=click.IntRange(1, 64), default=2, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def main(cases: int, seed: int, stations: int, processes: int, as_json: bool) -> None:
    """Run, print, exit; see the module."""
    started = time.monotonic()
    jobs = plan_jobs(cases, seed, stations)
    tally = run_all(jobs, min(processes, len(jobs)))
    if tally.cases.total() != cases and not tally.violation_count:
        tally.violate(f"only {tally.cases.total()} of {cases} cases ran")
    found = summary(tally, time.monotonic() - started, seed)
    if as_json:
        click.echo(json.dumps(found))
    else:
        print_summary(found)
    sys.exit(EXIT_VIOLATED if tally.violation_count else 0)


if __name__ == "__main__":
    main()
