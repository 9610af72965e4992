"""The record of a paired run (machine, versions, every cell and floor) as one JSON object; README's block."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol

import moonpool
from moonpool.bench.floors import Line
from moonpool.bench.locations import project_directory
from moonpool.bench.paired import Measurements
from moonpool.bench.peers_setup import PACKAGES
from moonpool.bench.plan import Cell, Plan
from moonpool.errors import UsageError

SCHEMA: Final = 1
HISTORY_FILE: Final = "engine-history.jsonl"
BLOCK: Final = "bench-engine"
GIT_TIMEOUT_S: Final = 10


class Named(Protocol):
    """A contender of either benchmark."""

    @property
    def name(self) -> str:
        """What it is called in the record."""


def commit_of(directory: Path) -> str:
    """Short commit of the checkout, with ``+`` when it has changes; empty when there is no git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), "describe", "--always", "--dirty=+", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=False,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def processor_name() -> str:
    """The processor's model as the kernel names it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def machine() -> dict[str, Any]:
    """What a reader must know to place the figures."""
    congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    return {
        "processor": processor_name(),
        "processors": len(Path("/proc/cpuinfo").read_text().split("processor\t")) - 1,
        "kernel": platform.release(),
        "python": sys.version.split()[0],
        "congestion_control": congestion.read_text().strip() if congestion.exists() else "",
    }


def cell_record(cell: Cell) -> dict[str, Any]:
    """A cell as JSON values."""
    return {"operation": cell.operation, "block_bytes": cell.shape.block_bytes, "count": cell.shape.count}


def record(plan: Plan, measurements: Measurements, lines: Sequence[Line]) -> dict[str, Any]:
    """The whole run as JSON values."""
    cells = []
    for (cell, contender), rounds in sorted(
        measurements.reports.items(), key=lambda item: (item[0][1], item[0][0])
    ):
        values: dict[str, Any] = {"contender": contender, **cell_record(cell), "rounds": len(rounds)}
        for measure in ("throughput", "p50", "p99", "cpu"):
            seen = measurements.median(cell, contender, measure)
            values[measure] = seen and round(seen.median, 6)
        cells.append(values)
    floors = [
        {
            "ours": line.floor.ours,
            "against": line.against,
            "measure": line.floor.measure,
            **cell_record(line.cell),
            "bound": line.floor.bound,
            "seen": line.seen and {name: round(value, 6) for name, value in asdict(line.seen).items()},
            "verdict": line.verdict,
        }
        for line in lines
    ]
    return {
        "schema": SCHEMA,
        "kind": "engine",
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": moonpool.__version__,
        "commit": commit_of(project_directory()),
        "machine": machine(),
        "peers": {package.name: package.requirements[0] for package in PACKAGES},
        "rounds": plan.rounds,
        "job_s": plan.job_s,
        "load_before": round(measurements.load_before, 2),
        "elapsed_s": round(measurements.elapsed_s, 1),
        "failures": measurements.failures,
        "cells": cells,
        "floors": floors,
    }


def append(history: Path, run: dict[str, Any]) -> None:
    """Adds the run as one line; the file and its folder are made when missing."""
    history.parent.mkdir(parents=True, exist_ok=True)
    with history.open("a") as stream:
        stream.write(json.dumps(run, separators=(",", ":")) + "\n")


def caption(run: dict[str, Any], contenders: Sequence[Named]) -> str:
    """Where README's figures come from, in one line."""
    where = run["machine"]
    left_out = sorted({name.split(",")[0] for name in run["failures"]} & {c.name for c in contenders})
    missing = f" Left out: {', '.join(left_out)}." if left_out else ""
    return (
        f"Measured {run['time'][:10]}, commit {run['commit'] or 'unknown'}, {run['rounds']} rounds, "
        f"{where['processors']} CPUs ({where['processor']}), Linux {where['kernel']}, "
        f"system default {where['congestion_control']}, load {run['load_before']:.1f} before.{missing}"
    )


def update_readme(readme: Path, text: str, block: str = BLOCK) -> None:
    """Replaces what stands between the markers of a block; raises ``UsageError`` when they are not there."""
    first, last = f"<!-- {block} -->", f"<!-- /{block} -->"
    content = readme.read_text() if readme.is_file() else ""
    before, start, rest = content.partition(first)
    _, end, after = rest.partition(last)
    if not start or not end:
        raise UsageError(
            f"{readme} has no block between {first} and {last}; add the two lines where it belongs"
        )
    readme.write_text(f"{before}{first}\n{text.strip()}\n{last}{after}")
