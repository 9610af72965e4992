"""The papers' studies on a published trace: policies, rejections, hit ratios, P/D sweep, collapse, burst.

`python -m moonpool.bench.paper_study TRACE [--part policies ...]`; settings are those of
`paper_settings.toml`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click

from moonpool.conductor.cache_study import hit_ratios
from moonpool.conductor.report import COLUMNS, summary_row, table
from moonpool.conductor.settings import ClusterSettings, load_settings
from moonpool.conductor.simulation_result import SimulationResult
from moonpool.conductor.simulator import SimulationOptions, Simulator
from moonpool.conductor.trace import Trace, load_trace

POLICIES: Final = ("random", "least_loaded", "local", "global", "affinity", "dynamo")
CAPACITIES: Final = (1 << 30, 100_000, 50_000, 30_000, 10_000, 5_860, 5_000, 1_000)
ADMISSIONS: Final = (
    ("baseline", "learned"),
    ("early", "learned"),
    ("predictive", "uniform"),
    ("predictive", "learned"),
    ("priced", "learned"),
)
COLLAPSE_INSTANCES: Final = 16
COLLAPSE_SPEED: Final = 2.0


def simulate(settings: ClusterSettings, trace: Trace, **options: Any) -> SimulationResult:
    """One run."""
    return Simulator(settings, trace, SimulationOptions(**options)).run()


def policies(settings: ClusterSettings, trace: Trace, seeds: list[int]) -> str:
    """FAST'25 Fig. 5: mean TTFT of each policy, averaged over the seeds, and the CPU time of a run."""
    rows = []
    for policy in POLICIES:
        began = time.process_time()
        runs = [simulate(settings, trace, policy=policy, seed=seed) for seed in seeds]
        cpu = (time.process_time() - began) / len(seeds)
        means = [run.ttft.mean for run in runs]
        spread = f"{min(means):.3f}-{max(means):.3f}"
        rows.append((*summary_row(policy, runs[0]), f"{statistics.fmean(means):.3f}", spread, f"{cpu:.2f}"))
    return table((*COLUMNS, "mean of seeds", "range", "CPU s"), rows)


def rejections(settings: ClusterSettings, trace: Trace, seeds: list[int]) -> str:
    """arXiv 2407.00079 Table 3: rejections at twice the speed under each admission rule."""
    fast = trace.at_speed(settings.extra["rejection"]["speed"])
    rows: list[tuple[str, ...]] = []
    base = 0.0
    for admission, forecast in ADMISSIONS:
        options = {"policy": "global", "admission": admission, "forecast": forecast}
        runs = [simulate(settings, fast, seed=seed, **options) for seed in seeds]
        rejected = statistics.fmean(run.rejections for run in runs)
        base = base or rejected
        rows.append(
            (
                f"{admission} ({forecast})",
                f"{rejected:.0f}",
                f"{100 * (rejected / base - 1):+.1f}" if base else "-",
                f"{statistics.fmean(run.refused for run in runs):.0f}",
                f"{statistics.fmean(run.wasted_prefill_s for run in runs):.0f}",
                f"{statistics.fmean(run.in_slo for run in runs):.0f}",
            )
        )
    return table(("admission", "rejected", "%", "after prefill", "wasted prefill s", "in SLO"), rows)


def capacities(settings: ClusterSettings, trace: Trace, seeds: list[int]) -> str:
    """Hit ratio of one LRU cache against its capacity, without time."""
    found = hit_ratios(trace, CAPACITIES)
    names = ["unlimited" if blocks == CAPACITIES[0] else str(blocks) for blocks in found]
    return table(("blocks", *names), [("hit ratio", *(f"{ratio:.4f}" for ratio in found.values()))])


def sweep(settings: ClusterSettings, trace: Trace, seeds: list[int]) -> str:
    """FAST'25 Fig. 15: share of requests within both promises as prefill instances become decode ones."""
    limits = settings.extra["sweep"]
    rows = []
    for prefill in limits["prefill"]:
        changed = replace(
            settings,
            prefill=prefill,
            decode=settings.prefill + settings.decode - prefill,
            ttft_limit_s=limits["ttft_s"],
            tbt_limit_s=limits["tbt_s"],
        )
        run = simulate(changed, trace, policy="global", seed=seeds[0])
        rows.append(
            (
                f"{prefill}:{changed.decode}",
                f"{100 * run.goodput:.1f}",
                f"{run.ttft.mean:.2f}",
                f"{run.tbt.mean * 1e3:.1f}",
            )
        )
    return table(("P:D", "effective %", "TTFT mean s", "TBT mean ms"), rows)


def collapse(settings: ClusterSettings, trace: Trace, seeds: list[int]) -> str:
    """Largest over mean prefill work of 16 instances at twice the speed; a naive router reaches 16."""
    wide = replace(settings, prefill=COLLAPSE_INSTANCES, decode=COLLAPSE_INSTANCES)
    fast = trace.at_speed(COLLAPSE_SPEED)
    rows = []
    for seed in seeds:
        run = simulate(wide, fast, policy="affinity", seed=seed)
        rows.append((f"seed {seed}", f"{run.work_imbalance:.3f}", f"{run.hit_ratio:.4f}"))
    return table(("run", "max/mean", "hit"), rows)


def replication(settings: ClusterSettings, trace: Trace, seeds: list[int]) -> str:
    """FAST'25 Fig. 11: copies of the 10th, 100th, ... block over time, on 8 prefill instances."""
    run = simulate(settings, trace, policy="global", seed=seeds[0], sample_s=30.0)
    rows = [
        (f"rank {rank}", *(str(copies) for copies in held[:: max(1, len(held) // 12)]))
        for rank, held in run.replication.items()
    ]
    width = max((len(row) for row in rows), default=1) - 1
    return table(("block", *(str(at) for at in range(width))), rows)


PARTS: Final[dict[str, Callable[[ClusterSettings, Trace, list[int]], str]]] = {
    "policies": policies,
    "rejections": rejections,
    "capacities": capacities,
    "sweep": sweep,
    "collapse": collapse,
    "replication": replication,
}


@click.command()
@click.argument("trace_path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--part", "parts", multiple=True, type=click.Choice(sorted(PARTS)), help="Default: all.")
@click.option("--seeds", type=click.IntRange(1), help="How many of the settings' seeds; default: all.")
@click.option("--requests", type=click.IntRange(1), help="Only the first so many requests.")
def main(trace_path: Path, parts: tuple[str, ...], seeds: int | None, requests: int | None) -> None:
    """Run the papers' studies on a published trace."""
    settings, trace = load_settings(), load_trace(trace_path)
    if requests is not None:
        trace = trace.first(requests)
    chosen = list(settings.extra["policy"]["seeds"])[:seeds]
    # Compiling the kernels must not be charged to the first policy.
    simulate(settings, trace.first(20), policy="affinity")
    for name in parts or PARTS:
        click.echo(f"{name}\n{PARTS[name](settings, trace, chosen)}\n")


if __name__ == "__main__":
    main()
