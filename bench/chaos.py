"""Two minutes of chaos: kill -9, SIGSTOP and network cuts on a real pool under load; every get is judged.

    python -m moonpool.bench.chaos --seconds 120 --seed 1

A master and its standby, three nodes, Redis and four clients run as processes, with suspect and dead at their
defaults of 1 s and 3 s; see docs/store/simulator.md. Exit codes: 0 everything held, 1 something did not,
2 wrong usage, 3 there is no redis-server here.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final

import click

from moonpool.bench.chaos_pool import NoRedis
from moonpool.bench.chaos_run import ChaosFindings, ChaosSettings, run_chaos

EXIT_VIOLATED: Final = 1
EXIT_ABSENT: Final = 3
EVENTS_MIN: Final = 40


def as_plain(found: ChaosFindings, settings: ChaosSettings) -> dict[str, Any]:
    """Everything that a run found, for --json."""
    return {
        "seed": settings.seed,
        "seconds": round(found.seconds, 1),
        "good": found.is_good,
        "events": sum(found.strikes.values()),
        "strikes": dict(sorted(found.strikes.items())),
        "calls": dict(sorted(found.verdict.counts.items())),
        "killed_in_mid_put": found.verdict.in_mid_put,
        "killed_in_mid_view": found.verdict.in_mid_view,
        "longest_call": list(found.verdict.longest),
        "rest_s": round(found.rest_s, 2),
        "gauges": found.gauges,
        "final_hits": found.final_hits,
        "errors": found.verdict.errors,
        "trails": found.verdict.trails,
        "broken": found.verdict.broken,
        "violations": found.violations,
    }


def show(plain: dict[str, Any]) -> None:
    """A table for people."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"chaos, seed {plain['seed']}, {plain['seconds']} s", show_header=False)
    for name in ("events", "killed_in_mid_put", "killed_in_mid_view", "longest_call", "rest_s", "final_hits"):
        table.add_row(name.replace("_", " "), str(plain[name]))
    for title in ("strikes", "calls", "gauges"):
        table.add_section()
        for name, count in plain[title].items():
            table.add_row(f"{title}: {name}", f"{count:,}")
    console.print(table)
    for what in ("broken", "violations"):
        for text in plain[what]:
            console.print(f"[red]{what}:[/red] {text}", highlight=False)
    for name, text in plain["errors"].items():
        console.print(f"[dim]{name}:[/dim] {text}", highlight=False)
    console.print("everything held" if plain["good"] else "[red]something did not hold[/red]")


@click.command(help=__doc__)
@click.option("--seconds", default=120.0, show_default=True, type=click.FloatRange(5, 86_400))
@click.option("--seed", default=1, show_default=True, type=click.IntRange(0, 2**31))
@click.option("--nodes", default=3, show_default=True, type=click.IntRange(1, 8))
@click.option("--clients", default=4, show_default=True, type=click.IntRange(1, 32))
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and no events.")
def main(seconds: float, seed: int, nodes: int, clients: int, as_json: bool) -> None:
    """The command."""
    settings = ChaosSettings(seconds=seconds, seed=seed, nodes=nodes, clients=clients)

    def tell(line: str) -> None:
        if not as_json:
            click.echo(line)

    try:
        found = run_chaos(settings, tell)
    except NoRedis as absent:
        click.echo(f"error: {absent}", err=True)
        sys.exit(EXIT_ABSENT)
    plain = as_plain(found, settings)
    if as_json:
        click.echo(json.dumps(plain))
    else:
        show(plain)
    sys.exit(0 if found.is_good else EXIT_VIOLATED)


if __name__ == "__main__":
    main()
