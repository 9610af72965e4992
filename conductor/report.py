"""Simulation results as tables of text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from moonpool.conductor.simulation_result import SimulationResult

COLUMNS: Final = (
    "run",
    "TTFT mean s",
    "p50",
    "p90",
    "p99",
    "TBT mean ms",
    "p99",
    "in SLO",
    "rejected",
    "hit",
    "fetched",
    "max/mean",
)


def summary_row(name: str, result: SimulationResult) -> tuple[str, ...]:
    """One run as the cells of `COLUMNS`."""
    return (
        name,
        f"{result.ttft.mean:.3f}",
        f"{result.ttft.p50:.3f}",
        f"{result.ttft.p90:.3f}",
        f"{result.ttft.p99:.3f}",
        f"{result.tbt.mean * 1e3:.1f}",
        f"{result.tbt.p99 * 1e3:.1f}",
        f"{result.in_slo}",
        f"{result.rejections}",
        f"{result.hit_ratio:.4f}",
        f"{result.fetched_share:.4f}",
        f"{result.work_imbalance:.3f}",
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned to the right, but the first to the left; one line a row."""
    widths = [max(len(row[at]) for row in (columns, *rows)) for at in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (columns, *rows)
    )


def summary(results: Mapping[str, SimulationResult]) -> str:
    """All runs, one line each."""
    return table(COLUMNS, [summary_row(name, result) for name, result in results.items()])


def instance_table(result: SimulationResult) -> str:
    """What each instance did, and the share of the run that it was busy."""
    span = result.elapsed_s or 1.0
    rows = [
        (
            load.name,
            str(load.prefills),
            f"{load.prefill_s:.1f}",
            f"{100 * load.prefill_s / span:.1f}",
            f"{load.decode_s:.1f}",
            str(load.decode_tokens),
        )
        for load in result.instances
    ]
    return table(("instance", "prefills", "prefill s", "busy %", "decode s", "tokens"), rows)


def to_json(results: Mapping[str, SimulationResult], about: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values of all runs, with what they are about."""
    return {
        "schema": 1,
        "about": dict(about),
        "runs": {name: result.to_dict() for name, result in results.items()},
    }
