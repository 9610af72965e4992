"""The scheduler study: every policy on every trace, speed and fleet, with seeds; and the verdicts.

`python -m moonpool.bench.scheduler_study run` adds one JSON line for each simulation to a file and leaves
out what the file already holds, so it can be stopped, run in parts, and go on. `... verdict` compares our
policy with the best of the others, cell by cell: a difference counts when its bootstrap interval over the
seeds is clear of 0.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import click

from moonpool.bench.interval import Interval, bootstrap_median
from moonpool.conductor.policy import policy_names
from moonpool.conductor.report import table
from moonpool.conductor.request_bounds import bounds_of
from moonpool.conductor.settings import load_settings
from moonpool.conductor.simulator import SimulationOptions, Simulator
from moonpool.conductor.trace import Trace, load_trace
from moonpool.errors import UsageError

OURS: Final = "affinity"
SETTINGS: Final = "study_settings.toml"
#: Metric to +1 where more is better, -1 where less is.
METRICS: Final[Mapping[str, int]] = {"reuse": 1, "ttft_p99_s": -1, "in_slo": 1}
#: From this speed on the p99 of TTFT must be lower, not only no worse.
STRICT_SPEED_MIN: Final = 4.0


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """Where policies meet: one trace and pace on one fleet."""

    trace: str
    arrivals: str
    speed: float
    instances: int

    def __str__(self) -> str:
        return f"{self.trace} {self.arrivals} x{self.speed:g} {self.instances} instances"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Ours against the best of the others in one cell and metric; `difference` is good when above 0."""

    cell: Cell
    metric: str
    ours: float
    best: float
    best_policy: str
    difference: Interval

    @property
    def strict(self) -> bool:
        return self.metric == "ttft_p99_s" and self.cell.speed >= STRICT_SPEED_MIN

    @property
    def met(self) -> bool:
        """Whether ours is no worse, or lower where it has to be."""
        return self.difference.low > 0 if self.strict else self.difference.high >= 0


def cells_of(
    traces: Sequence[str], arrivals: Sequence[str], speeds: Sequence[float], instances: Sequence[int]
) -> Iterator[Cell]:
    """The cross product."""
    for trace in traces:
        for arrival in arrivals:
            for speed in speeds:
                for count in instances:
                    yield Cell(trace, arrival, speed, count)


def paced(trace: Trace, cell: Cell, seed: int) -> Trace:
    """The trace as a cell replays it; de-quantised arrivals differ from seed to seed."""
    spread = trace.dequantised(seed) if cell.arrivals == "spread" else trace
    return spread.at_speed(cell.speed)


def run_one(trace: Trace, cell: Cell, policy: str, seed: int) -> dict[str, Any]:
    """One simulation as a line of the results file."""
    settings = replace(load_settings(name=SETTINGS), aggregated=cell.instances)
    began = time.process_time()
    result = Simulator(settings, paced(trace, cell, seed), SimulationOptions(policy=policy, seed=seed)).run()
    return {
        **asdict(cell),
        "policy": policy,
        "seed": seed,
        "reuse": result.token_hit_ratio,
        "ttft_mean_s": result.ttft.mean,
        "ttft_p50_s": result.ttft.p50,
        "ttft_p99_s": result.ttft.p99,
        "tbt_p99_s": result.tbt.p99,
        "in_slo": result.in_slo,
        "imbalance": result.work_imbalance,
        "requests": result.requests,
        "cpu_s": round(time.process_time() - began, 3),
    }


def load_rows(results: Path) -> list[dict[str, Any]]:
    """The lines of a results file; none when it does not exist. Raises `UsageError` for a broken line."""
    if not results.exists():
        return []
    rows = []
    for number, line in enumerate(results.read_text().splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except ValueError as exc:
            raise UsageError(f"{results}, line {number}: not JSON; remove the line") from exc
    return rows


def cell_of(row: Mapping[str, Any]) -> Cell:
    """The cell of a line."""
    return Cell(row["trace"], row["arrivals"], float(row["speed"]), int(row["instances"]))


def verdicts_of(rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """One verdict for each cell and metric where ours and another policy ran with the same seeds."""
    seen: dict[Cell, dict[str, dict[int, Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        seen[cell_of(row)][row["policy"]][int(row["seed"])] = row
    found = []
    for cell, policies in sorted(seen.items()):
        ours = policies.pop(OURS, {})
        for metric, sign in METRICS.items():
            means = {
                name: sum(float(row[metric]) for row in runs.values()) / len(runs)
                for name, runs in policies.items()
                if runs.keys() & ours.keys()
            }
            if not means:
                continue
            best = max(means, key=lambda name: sign * means[name])
            seeds = sorted(policies[best].keys() & ours.keys())
            gains = [sign * (float(ours[s][metric]) - float(policies[best][s][metric])) for s in seeds]
            mean = sum(float(ours[seed][metric]) for seed in seeds) / len(seeds)
            found.append(Verdict(cell, metric, mean, means[best], best, bootstrap_median(gains)))
    return found


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Run the scheduler study in parts, and judge it."""


def numbers(kind: type) -> Any:
    """Reads "1,2,4" as a list of numbers."""

    def read(_: click.Context, __: click.Parameter, text: str) -> list[Any]:
        try:
            return [kind(part) for part in text.split(",") if part.strip()]
        except ValueError as exc:
            raise click.BadParameter(f"{text!r} is not a list of numbers like 1,2,4") from exc

    return read


_FILE: Final = click.Path(dir_okay=False, path_type=Path)


@main.command("run")
@click.option("--trace", "traces", multiple=True, required=True, type=_FILE, help="May be repeated.")
@click.option("--arrivals", multiple=True, type=click.Choice(["raw", "spread"]), default=["raw", "spread"])
@click.option("--speeds", default="1,2,4,8,16", callback=numbers(float), show_default=True)
@click.option("--instances", default="8,16,32", callback=numbers(int), show_default=True)
@click.option("--seeds", default="1,2,3", callback=numbers(int), show_default=True)
@click.option("--policy", "policies", multiple=True, help="Default: all.")
@click.option("--limit", type=click.IntRange(1), help="Stop after so many simulations.")
@click.option("--results", type=_FILE, default=Path("scheduler-study.jsonl"), show_default=True)
def run_command(results: Path, limit: int | None, **part: Any) -> None:
    """Simulate a part of the matrix and add it to the results."""
    held = {(cell_of(row), row["policy"], int(row["seed"])) for row in load_rows(results)}
    done = 0
    with results.open("a") as stream:
        for path in part["traces"]:
            trace = load_trace(path)
            wanted = cells_of([path.stem], part["arrivals"], part["speeds"], part["instances"])
            for cell in wanted:
                for policy in part["policies"] or policy_names():
                    for seed in part["seeds"]:
                        if (cell, policy, seed) in held:
                            continue
                        if limit is not None and done >= limit:
                            return
                        row = run_one(trace, cell, policy, seed)
                        stream.write(json.dumps(row) + "\n")
                        stream.flush()
                        done += 1
                        click.echo(
                            f"{cell} {policy} seed {seed}: p99 {row['ttft_p99_s']:.3f} s, "
                            f"reuse {row['reuse']:.4f}, in SLO {row['in_slo']}"
                        )


@main.command("verdict")
@click.option("--results", type=_FILE, default=Path("scheduler-study.jsonl"), show_default=True)
@click.option("--trace", "traces", multiple=True, type=_FILE, help="Also print the bounds of these traces.")
def verdict_command(results: Path, traces: tuple[Path, ...]) -> None:
    """Ours against the best of the others, cell by cell; exit code 1 when a cell is not met."""
    found = verdicts_of(load_rows(results))
    if not found:
        raise click.ClickException(f"{results} holds no cell where {OURS} met another policy")
    columns = ("cell", "metric", "ours", "best other", "policy", "gain (95 %)", "verdict")
    lines = [
        (
            str(each.cell),
            each.metric + (" strict" if each.strict else ""),
            f"{each.ours:.4g}",
            f"{each.best:.4g}",
            each.best_policy,
            f"{each.difference.median:.3g} ({each.difference.low:.3g} to {each.difference.high:.3g})",
            "met" if each.met else "NOT MET",
        )
        for each in found
    ]
    click.echo(table(columns, lines))
    settings = load_settings(name=SETTINGS)
    for path in traces:
        bound = bounds_of(load_trace(path), settings)
        click.echo(
            f"{path.stem}: no schedule has reuse above {bound.reuse:.4f}, "
            f"mean TTFT below {bound.ttft_mean_s:.3f} s or p99 below {bound.ttft_p99_s:.3f} s"
        )
    missed = sum(not each.met for each in found)
    click.echo(f"{len(found) - missed} met, {missed} not met")
    raise SystemExit(1 if missed else 0)


if __name__ == "__main__":
    main()
