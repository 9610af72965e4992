"""The file transport beside fio, in turn in one run, with the same engine, flags and file.

    python -m moonpool.bench.file_pair [--pairs 30] [--seconds 0.5] [--folder DIR] [--file-mib 1024]
        [--only randread,randwrite] [--json]

fio's job is `--ioengine=io_uring --direct=1 --fixedbufs=1 --registerfiles=1` at the cell's depth; ours is
`Engine.transfer` with arrays, on a region of the file, from and into engine memory (registered buffers and
files, O_DIRECT). Each pair is two runs one after the other, in an order that alternates; what counts is the
median of the ratios of a pair with its bootstrap interval. The file is laid out in full before, and removed
afterwards. fio's start is not counted: it says what it did in its own run time. We pause for as long.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import numpy.typing as npt

from moonpool.bench.interval import Interval, bootstrap_median
from moonpool.engine.engine import Engine
from moonpool.operations import Op
from moonpool.units import KIB, MIB

FLOOR: Final = 0.9
#: One call: enough that its end, where the queue runs dry, weighs little.
_CALL_BYTES: Final = {4 * KIB: 16 * MIB, 1 * MIB: 64 * MIB}
_ORDERS: Final = 16
_FIO_TIMEOUT_S: Final = 60.0
_SEED: Final = 20_261_130

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of I/O: fio's name of it, block size in bytes, and I/Os in flight."""

    rw: str
    block_bytes: int
    depth: int

    @property
    def op(self) -> Op:
        """The engine's operation."""
        return Op.READ if "read" in self.rw else Op.WRITE

    @property
    def is_random(self) -> bool:
        """True when blocks are chosen at random."""
        return self.rw.startswith("rand")


CELLS: Final = (
    Cell("read", 1 * MIB, 8),
    Cell("write", 1 * MIB, 8),
    Cell("randread", 4 * KIB, 32),
    Cell("randwrite", 4 * KIB, 32),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One cell's medians in bytes a second, and the ratio of ours to fio's."""

    cell: Cell
    ours: float
    fio: float
    ratio: Interval


class FileLoad:
    """Our side: an engine that moves blocks between one file and its own memory, for a given time."""

    def __init__(self, path: Path, cell: Cell) -> None:
        self._cell = cell
        self._engine = Engine(transports=("file",), disk_queue_depth=cell.depth)
        try:
            self._region = self._engine.offer(f"file:{path}", create=False)
            count = _CALL_BYTES[cell.block_bytes] // cell.block_bytes
            self._memory = self._engine.allocate(count * cell.block_bytes)
            self._segment = self._engine.open(self._engine.endpoint)
        except BaseException:
            self._engine.close()
            raise
        block = np.uint64(cell.block_bytes)
        self._local: Words = np.uint64(self._memory.address) + np.arange(count, dtype=np.uint64) * block
        self._offsets = self._orders(count, self._region.size_bytes // cell.block_bytes)
        self._turn = 0

    def _orders(self, count: int, blocks: int) -> list[Words]:
        """Offsets of calls, used in turn: one pass over the file, or blocks at random."""
        size = np.uint64(self._cell.block_bytes)
        if self._cell.is_random:
            chosen = np.random.default_rng(_SEED).integers(0, blocks, (_ORDERS, count), dtype=np.uint64)
        else:
            chosen = np.arange(blocks // count * count, dtype=np.uint64).reshape(-1, count)
        return [row * size for row in chosen]

    def run(self, seconds: float) -> tuple[float, float]:
        """Bytes a second, and for how many seconds: whole calls, so a little longer than asked for."""
        moved, started = 0, time.perf_counter()
        while True:
            offsets = self._offsets[self._turn % len(self._offsets)]
            self._turn += 1
            batch = self._engine.transfer(
                self._cell.op,
                self._segment,
                self._local,
                self._region.handle,
                offsets,
                self._cell.block_bytes,
            )
            moved += batch.bytes_done
            spent = time.perf_counter() - started
            if spent >= seconds:
                return moved / spent, spent

    def counters(self) -> dict[str, int]:
        """What the rings counted: proof that I/O was direct and from registered buffers."""
        counters = self._engine.metrics()["counters"].items()
        return {name: count for name, count in counters if name.startswith("file_")}

    def close(self) -> None:
        """Closes the engine."""
        self._engine.close()


def run_fio(path: Path, cell: Cell, seconds: float) -> tuple[float, float]:
    """fio's bytes a second in a run of its own, and how long it was busy with other things than I/O."""
    words = [
        "fio",
        "--name=pair",
        "--ioengine=io_uring",
        "--direct=1",
        "--fixedbufs=1",
        "--registerfiles=1",
        f"--iodepth={cell.depth}",
        f"--bs={cell.block_bytes}",
        f"--rw={cell.rw}",
        f"--filename={path}",
        f"--size={path.stat().st_size}",
        "--fallocate=none",
        "--norandommap=1",
        "--randrepeat=0",
        "--time_based=1",
        f"--runtime={round(seconds * 1000)}ms",
        "--output-format=json",
    ]
    started = time.perf_counter()
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=_FIO_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as problem:
        raise click.ClickException(f"fio failed: {problem}") from problem
    (job,) = json.loads(done.stdout)["jobs"]
    rest = time.perf_counter() - started - seconds
    return float(job[cell.op.name.lower()]["bw_bytes"]), max(0.0, rest)


def measure(path: Path, cell: Cell, pairs: int, seconds: float) -> tuple[Outcome, dict[str, int]]:
    """One cell: pairs of runs, ours first in every other one.

    fio lets the device rest while it starts and ends, and so do we for as long; it runs for as long as our
    latest run took: a virtual disk saves up what it may do while it is idle, and uses it up.
    """
    load = FileLoad(path, cell)
    ours: list[float] = []
    theirs: list[float] = []
    try:
        _, spent = load.run(seconds)  # pins the memory's pages, which fio does before its run time begins
        _, rest = run_fio(path, cell, spent)
        for number in range(pairs):
            for side in ("fio", "ours") if number % 2 else ("ours", "fio"):
                if side == "fio":
                    speed, rest = run_fio(path, cell, spent)
                    theirs.append(speed)
                else:
                    time.sleep(rest)
                    speed, spent = load.run(seconds)
                    ours.append(speed)
        counters = load.counters()
    finally:
        load.close()
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    outcome = Outcome(cell, float(np.median(ours)), float(np.median(theirs)), bootstrap_median(ratios))
    return outcome, counters


@contextmanager
def laid_out_file(folder: str | None, size_bytes: int) -> Iterator[Path]:
    """A file that is written in full, so that no I/O allocates; removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="moonpool-bench-", dir=folder) as place:
        path = Path(place) / "data"
        block = secrets.token_bytes(MIB)
        with path.open("wb") as file:
            for _ in range(size_bytes // MIB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        yield path


def fio_version() -> str:
    """fio's own word; ClickException when it is not installed."""
    if shutil.which("fio") is None:
        raise click.ClickException("fio is not installed: apt-get install fio")
    done = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def as_row(outcome: Outcome, counters: dict[str, int]) -> dict[str, Any]:
    """A cell for --json."""
    return {
        "rw": outcome.cell.rw,
        "block_bytes": outcome.cell.block_bytes,
        "depth": outcome.cell.depth,
        "ours_bytes_per_s": outcome.ours,
        "fio_bytes_per_s": outcome.fio,
        "ratio": outcome.ratio.median,
        "ratio_low": outcome.ratio.low,
        "ratio_high": outcome.ratio.high,
        "pairs": outcome.ratio.samples,
        "counters": {name: count for name, count in counters.items() if count},
    }


@click.command()
@click.option("--pairs", default=30, show_default=True, type=click.IntRange(2, 1_000))
@click.option("--seconds", default=0.5, show_default=True, type=click.FloatRange(0.1, 60))
@click.option("--folder", default=None, help="Where the file is made; the file system is what is measured.")
@click.option("--file-mib", default=1_024, show_default=True, type=click.IntRange(128, 1 << 20))
@click.option("--only", default="", help="Some of read,write,randread,randwrite; all by default.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def main(pairs: int, seconds: float, folder: str | None, file_mib: int, only: str, as_json: bool) -> None:
    """Measure the file transport beside fio; exit 1 when a median ratio is below 0.9."""
    chosen = [cell for cell in CELLS if not only or cell.rw in only.split(",")]
    if not chosen:
        raise click.UsageError(f"--only={only!r} names none of {', '.join(cell.rw for cell in CELLS)}")
    version = fio_version()
    about = f"{version}, Linux {platform.release()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"
    rows: list[dict[str, Any]] = []
    if not as_json:
        print(f"{about}; {pairs} pairs of {seconds:g} s a cell")
        print("| I/O | ours MB/s | fio MB/s | ratio (95 % interval) |\n|---|---|---|---|")
    with laid_out_file(folder, file_mib * MIB) as path:
        for cell in chosen:
            outcome, counters = measure(path, cell, pairs, seconds)
            rows.append(as_row(outcome, counters))
            if not as_json:
                size = f"{cell.block_bytes // KIB} KiB"
                print(
                    f"| {cell.rw} {size} at depth {cell.depth} | {outcome.ours / 1e6:.0f} "
                    f"| {outcome.fio / 1e6:.0f} | {outcome.ratio} |",
                    flush=True,
                )
    if as_json:
        json.dump({"about": about, "cells": rows}, sys.stdout)
        print()
    if any(row["ratio"] < FLOOR for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
