"""Peers that die, stop and come back, a thousand times: every step within its bound, and nothing left over.

    python -m moonpool.bench.endurance --cycles 1000 --seed 1

Each cycle kills or stops one side of a transfer under way, or connects, transfers and closes; see
docs/endurance.md. Exit codes: 0 all bounds held and nothing grew, 1 something did not, 2 wrong usage.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final

import click

from moonpool.bench.endurance_children import ChildFailed
from moonpool.bench.endurance_plan import BOUNDS_MS
from moonpool.bench.endurance_run import Findings, Run, Settings

EXIT_VIOLATED: Final = 1
CYCLES_MAX: Final = 1_000_000
#: The healthy pair may be slower by so much during cycles, per CPU second that it got.
HEALTHY_LOSS_MAX: Final = 0.05


def quantile(values: list[float], share: float) -> float:
    """The value below which that share of the values lies (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def healthy_ratios(found: Findings) -> dict[str, Any]:
    """Per way of the healthy pair: rate with cycles over rate without, by the clock and by CPU second."""
    from moonpool.bench.interval import bootstrap_median

    ratios = {}
    for way, windows in found.windows.items():
        pairs = {
            "by_clock": [busy / quiet for quiet, busy, _, _ in windows],
            "by_cpu_second": [busy / quiet for _, _, quiet, busy in windows],
        }
        for kind, values in pairs.items():
            one = bootstrap_median(values)
            ratios[f"{way} {kind}"] = {
                "median": round(one.median, 4),
                "low": round(one.low, 4),
                "high": round(one.high, 4),
                "windows": one.samples,
            }
    return ratios


def judge_healthy(told: dict[str, Any], found: Findings) -> None:
    """A violation for each way whose interval by CPU second lies below what is allowed."""
    for name, one in told["healthy"].items():
        if name.endswith("by_cpu_second") and one["high"] < 1 - HEALTHY_LOSS_MAX:
            found.violate(f"the healthy pair, {name}: {one['high']} times as fast at the most")
    told["violations"], told["first_violations"] = found.violation_count, found.violations


def summary(found: Findings, settings: Settings) -> dict[str, Any]:
    """The run as one JSON object."""
    steps = {
        name: {
            "bound_ms": BOUNDS_MS[name],
            "count": len(values),
            "p50_ms": round(quantile(values, 0.5), 1),
            "p99_ms": round(quantile(values, 0.99), 1),
            "max_ms": round(max(values), 1),
        }
        for name, values in found.steps_ms.items()
    }
    return {
        "program": "endurance",
        "seed": settings.seed,
        "names": found.metadata,
        "elapsed_s": round(found.elapsed_s, 1),
        "cycles": found.cycles.total(),
        "by_kind": dict(sorted(found.cycles.items())),
        "ended": dict(sorted(found.ended.items())),
        "signals_during_a_transfer": found.hits,
        "transfers_tried_again": found.retried,
        "steps": steps,
        "held": found.held,
        "healthy": healthy_ratios(found),
        "violations": found.violation_count,
        "first_violations": found.violations,
    }


def print_summary(told: dict[str, Any]) -> None:
    """The run as tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(
        f"{told['cycles']} cycles, seed {told['seed']}, names by {told['names']}, {told['elapsed_s']} s; "
        f"{told['signals_during_a_transfer']} signals came during a transfer"
    )
    kinds = Table("cycle", "how many")
    for name, count in told["by_kind"].items():
        kinds.add_row(name, str(count))
    for name, count in told["ended"].items():
        kinds.add_row(f"  {name}", str(count))
    steps = Table("step", "times", "p50 ms", "p99 ms", "max ms", "bound ms")
    for name, one in told["steps"].items():
        numbers = (one["count"], one["p50_ms"], one["p99_ms"], one["max_ms"], one["bound_ms"])
        steps.add_row(name, *(str(number) for number in numbers))
    held = Table("process", "what", "after warm-up", "half", "end")
    for name, looks in told["held"].items():
        for what in looks[0]:
            held.add_row(name, what, *(str(look[what]) for look in looks))
    healthy = Table("healthy pair, with cycles / without", "median", "interval", "windows")
    for name, one in told["healthy"].items():
        row = (f"{one['median']:.3f}", f"{one['low']:.3f}-{one['high']:.3f}", str(one["windows"]))
        healthy.add_row(name, *row)
    for table in (kinds, steps, held, healthy):
        console.print(table)
    console.print(f"violations: {told['violations']}", style="bold")
    for sentence in told["first_violations"]:
        console.print(sentence, style="red", markup=False)


@click.command(help=__doc__)
@click.option("--cycles", type=click.IntRange(1, CYCLES_MAX), default=1_000, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True, help="Same seed, same cycles.")
@click.option("--quiet", type=click.FloatRange(0.05, 60), default=0.7, show_default=True, metavar="S")
@click.option("--busy", type=click.FloatRange(0.05, 60), default=1.5, show_default=True, metavar="S")
@click.option("--cycle-nice", type=click.IntRange(0, 19), default=19, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def main(cycles: int, seed: int, quiet: float, busy: float, cycle_nice: int, as_json: bool) -> None:
    """Run, print, exit; see the module."""
    settings = Settings(cycles=cycles, seed=seed, quiet_s=quiet, busy_s=busy, cycle_nice=cycle_nice)
    run = Run(settings, lambda line: click.echo(line, err=True) if sys.stderr.isatty() else None)
    try:
        found = run.run()
    except ChildFailed as problem:
        found = run.findings
        found.violate(f"a process failed, so the run ended early: {problem}")
    told = summary(found, settings)
    judge_healthy(told, found)
    if as_json:
        click.echo(json.dumps(told))
    else:
        print_summary(told)
    sys.exit(EXIT_VIOLATED if found.violation_count else 0)


if __name__ == "__main__":
    main()
