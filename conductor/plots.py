"""Simulation results as a picture; needs matplotlib, which is the extra `moonpool[plots]`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from moonpool.conductor.simulation_result import SimulationResult
from moonpool.errors import UsageError

_POINTS: Final = 400
_INCHES: Final = (11.0, 8.0)


def load_matplotlib() -> Any:
    """matplotlib without a screen; raises `UsageError` that says how to get it where it is missing."""
    try:
        figure = importlib.import_module("matplotlib.figure")
        importlib.import_module("matplotlib.backends.backend_agg")
    except ImportError as exc:
        raise UsageError(
            "plots need matplotlib; install it with: pip install 'moonpool[plots]'", field="png"
        ) from exc
    return figure


def draw(results: Mapping[str, SimulationResult], path: Path) -> None:
    """Writes a PNG: TTFT and TBT distributions, load of each instance, and copies of hot blocks over time.

    Raises `UsageError` when matplotlib is missing or the file cannot be written.
    """
    figure = load_matplotlib().Figure(figsize=_INCHES, layout="constrained")
    first_token, intervals, load, copies = figure.subplots(2, 2).flat
    shares = np.linspace(0.0, 1.0, _POINTS)
    for name, result in results.items():
        for axes, values in ((first_token, result.ttft_s), (intervals, result.tbt_s * 1e3)):
            seen = values[result.completed]
            if len(seen):
                axes.plot(np.quantile(seen, shares), shares, label=name)
        busy = [each.prefill_s for each in result.instances]
        load.plot(range(len(busy)), busy, marker=".", label=name)
        for rank, held in result.replication.items():
            times = (np.arange(len(held)) + 1) * result.sample_s
            copies.plot(times, held, label=f"{name}, rank {rank}")
    label_axes(first_token, "time to first token, s", "share of requests")
    first_token.set_xscale("log")
    label_axes(intervals, "time between tokens, ms", "share of requests")
    label_axes(load, "instance", "prefill, s")
    label_axes(copies, "time, s", "instances that hold the block")
    try:
        figure.savefig(path, format="png")
    except OSError as exc:
        raise UsageError(f"cannot write {path}: {exc.strerror}", field="png") from exc


def label_axes(axes: Any, across: str, up: str) -> None:
    """Names both axes, and shows a legend where something was drawn."""
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    if axes.lines:
        axes.legend(fontsize="small")
