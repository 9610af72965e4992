"""The path study: our choice of rails against three others, over scenarios and seeds.

`python -m moonpool.bench.path_study [--seeds N] [--first SEED] [--plots FOLDER]` prints the tables of
docs/transports/paths.md; with --plots it draws them too (matplotlib: `pip install 'moonpool[plots]'`).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from moonpool.bench.path_policies import POLICIES
from moonpool.bench.path_run import Outcome, Run
from moonpool.bench.path_scenarios import SCENARIOS, Scenario, alone_ns
from moonpool.conductor.plots import load_matplotlib
from moonpool.errors import UsageError

#: Scenarios in which transfers come over time, so that their latencies are what counts.
OVER_TIME: Final = ("repeated", "arrivals")
#: Those in which everything is there at the start, so that the makespan has an optimum.
AT_ONCE: Final = tuple(name for name in SCENARIOS if name not in OVER_TIME)
_TICKS: Final = (1, 1.1, 1.2, 1.5, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy in one scenario, over all seeds."""

    scenario: str
    policy: str
    outcomes: tuple[Outcome, ...]
    fairness: tuple[float, ...]
    stretches: tuple[float, ...]

    @property
    def over_optimum(self) -> list[float]:
        """Makespan over the optimum, of each seed, sorted."""
        return sorted(each.over_optimum for each in self.outcomes)


def play(scenario: str, policy: str, seeds: Iterable[int]) -> Cell:
    """All seeds of a cell; the same seeds give the same worlds to every policy."""
    outcomes, fairness, stretches = [], [], []
    for seed in seeds:
        world: Scenario = SCENARIOS[scenario](random.Random(seed))
        outcome = Run(world.plans, world.sender, seed).play(POLICIES[policy], world.load, seed)
        alone = alone_ns(world)
        outcomes.append(outcome)
        fairness.append(outcome.fairness(alone))
        stretches += [took / best for took, best in zip(outcome.latencies_ns, alone, strict=True)]
    return Cell(scenario, policy, tuple(outcomes), tuple(fairness), tuple(sorted(stretches)))


def makespans(cells: list[Cell]) -> str:
    """Makespan over the fluid optimum: median and worst seed."""
    rows = ["| scenario | " + " | ".join(POLICIES) + " |", "|---" * (len(POLICIES) + 1) + "|"]
    for name in AT_ONCE:
        found = [cell for cell in cells if cell.scenario == name]
        texts = [f"{statistics.median(c.over_optimum):.3f} ({c.over_optimum[-1]:.3f})" for c in found]
        rows.append(f"| {name} | " + " | ".join(texts) + " |")
    return "\n".join(rows)


def latencies(cells: list[Cell]) -> str:
    """How much longer than alone transfers took (median, p99), and how evenly (Jain's index)."""
    rows = ["| scenario | " + " | ".join(POLICIES) + " |", "|---" * (len(POLICIES) + 1) + "|"]
    for name in OVER_TIME:
        texts = []
        for cell in (cell for cell in cells if cell.scenario == name):
            p99 = cell.stretches[int(0.99 * len(cell.stretches))]
            even = statistics.fmean(cell.fairness)
            texts.append(f"{statistics.median(cell.stretches):.2f}, {p99:.2f}, {even:.2f}")
        rows.append(f"| {name} | " + " | ".join(texts) + " |")
    return "\n".join(rows)


def slices(cells: list[Cell]) -> str:
    """Mean slices of a run, and how many had to be sent again."""
    rows = ["| scenario | " + " | ".join(POLICIES) + " |", "|---" * (len(POLICIES) + 1) + "|"]
    for name in SCENARIOS:
        texts = []
        for cell in (cell for cell in cells if cell.scenario == name):
            sent = statistics.fmean(each.slices for each in cell.outcomes)
            lost = statistics.fmean(each.lost_slices for each in cell.outcomes)
            texts.append(f"{sent:.0f}" + (f" ({lost:.0f} lost)" if lost else ""))
        rows.append(f"| {name} | " + " | ".join(texts) + " |")
    return "\n".join(rows)


def draw(cells: list[Cell], folder: Path) -> None:
    """Two pictures: makespans by scenario, and the distribution of what transfers took."""
    figures = load_matplotlib()
    bars = figures.Figure(figsize=(10.0, 4.5), layout="constrained")
    _draw_makespans(bars.subplots(), cells)
    tails = figures.Figure(figsize=(10.0, 4.0), layout="constrained")
    for axes, name in zip(tails.subplots(1, 2), ("repeated", "arrivals"), strict=True):
        for cell in (cell for cell in cells if cell.scenario == name):
            count = len(cell.stretches)
            axes.plot(cell.stretches, [1 - k / count for k in range(count)], label=cell.policy)
        axes.set(xscale="log", yscale="log", title=name, xlabel="time over time alone")
        axes.set_ylabel("share of transfers that took longer")
        axes.grid(alpha=0.3)
    axes.legend()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        bars.savefig(folder / "makespan.png", dpi=110)
        tails.savefig(folder / "latency.png", dpi=110)
    except OSError as exc:
        raise UsageError(f"cannot write into {folder}: {exc.strerror}", field="plots") from exc


def _draw_makespans(axes: Any, cells: list[Cell]) -> None:
    width = 0.8 / len(POLICIES)
    for place, policy in enumerate(POLICIES):
        mine = [next(c for c in cells if (c.scenario, c.policy) == (name, policy)) for name in AT_ONCE]
        middle = [statistics.median(cell.over_optimum) for cell in mine]
        low = [m - cell.over_optimum[0] for m, cell in zip(middle, mine, strict=True)]
        high = [cell.over_optimum[-1] - m for m, cell in zip(middle, mine, strict=True)]
        at = [k + (place - (len(POLICIES) - 1) / 2) * width for k in range(len(AT_ONCE))]
        axes.bar(at, middle, width, label=policy, yerr=[low, high], error_kw={"lw": 0.8})
    axes.axhline(1.0, color="black", lw=0.8)
    axes.set_xticks(range(len(AT_ONCE)), AT_ONCE)
    axes.set(ylim=(0.95, 4.2), yscale="log", ylabel="makespan / fluid optimum (median, range)")
    axes.set_yticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
    axes.minorticks_off()
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(loc="upper right")


@click.command()
@click.option("--seeds", default=40, show_default=True, type=click.IntRange(1, 10_000), help="How many.")
@click.option("--first", default=90_000, show_default=True, type=int, help="The first seed.")
@click.option("--plots", type=click.Path(path_type=Path, file_okay=False), help="Folder for the pictures.")
def main(seeds: int, first: int, plots: Path | None) -> None:
    """Compare the choice of rails with three others, on the same worlds."""
    rows = range(first, first + seeds)
    cells = [play(scenario, policy, rows) for scenario in SCENARIOS for policy in POLICIES]
    click.echo(f"Seeds {first} to {first + seeds - 1}.\n\nMakespan / optimum, median (worst):\n")
    click.echo(makespans(cells))
    click.echo("\nTime / time alone of a transfer: median, p99; evenness:\n")
    click.echo(latencies(cells))
    click.echo("\nSlices of a run:\n")
    click.echo(slices(cells))
    if plots is not None:
        draw(cells, plots)


if __name__ == "__main__":
    main()
