"""The demo's traffic: each cell writes a round of the pattern into its region, reads it back, and checks
every byte.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moonpool.cli.demonstration.pattern import Pattern
from moonpool.metrics import LatencyHistogram, quantile_us
from moonpool.operations import Op
from moonpool.units import KIB, MIB, NS_PER_US

if TYPE_CHECKING:
    from moonpool.cli.demonstration.target_process import TargetProcess
    from moonpool.engine.engine import Engine
    from moonpool.engine.segment import Segment

REGION_BYTES: Final = 8 * MIB
SHAPES: Final = ((4 * KIB, 64), (MIB, 1), (8 * MIB, 1))
"""Bytes of a transfer and transfers in a batch; a batch fits into a region."""


@dataclass(slots=True)
class Tally:
    """What one direction of a cell has done; latencies are of whole batches."""

    bytes: int = 0
    nanoseconds: int = 0
    latencies: LatencyHistogram = field(default_factory=LatencyHistogram)

    def add(self, size_bytes: int, elapsed_ns: int) -> None:
        """Counts one batch."""
        self.bytes += size_bytes
        self.nanoseconds += elapsed_ns
        self.latencies.add(elapsed_ns / NS_PER_US)

    @property
    def gb_per_s(self) -> float:
        """Decimal gigabytes per second of transfer time; checking does not count."""
        return self.bytes / self.nanoseconds if self.nanoseconds else 0.0


class Cell:
    """One row of the demo: one transport, one shape of batch, one region of the target."""

    def __init__(self, engine: Engine, segment: Segment, handle: int, shape: tuple[int, int]) -> None:
        self.engine = engine
        self.segment = segment
        self.handle = handle
        self.block_bytes, self.count = shape
        self.batch_bytes = self.block_bytes * self.count
        self.transport = segment.paths[0].transport
        # Engine memory: the first half is written from, the second read into.
        self.memory = engine.allocate(2 * REGION_BYTES)
        self.source = self.memory.view[:REGION_BYTES]
        self.found = self.memory.view[REGION_BYTES : 2 * REGION_BYTES]
        self.pattern = Pattern(REGION_BYTES)
        self.blocks = np.arange(self.count, dtype=np.uint64) * np.uint64(self.block_bytes)
        self.writes, self.reads = Tally(), Tally()
        self.transfers = self.verified_bytes = self.wrong_bytes = self.round = 0

    def check_first(self) -> None:
        """Reads the whole region, which the target filled before anyone connected."""
        self.engine.transfer(
            Op.READ, self.segment, self.memory.address + REGION_BYTES, self.handle, 0, REGION_BYTES
        )
        self.transfers += 1
        self._verify(self.found, 0, 0)

    def step(self) -> None:
        """One write and one read of a batch, at the next place of the region, with every byte checked."""
        place = self.round * self.batch_bytes % REGION_BYTES
        self.round += 1
        self.pattern.write(self.source[: self.batch_bytes], place, self.round)
        self.writes.add(self.batch_bytes, self._move(Op.WRITE, self.memory.address, place))
        self.reads.add(self.batch_bytes, self._move(Op.READ, self.memory.address + REGION_BYTES, place))
        self._verify(self.found[: self.batch_bytes], place, self.round)

    def check_last(self, target: TargetProcess, index: int) -> None:
        """Writes a last round over the whole region and lets the target process check its own memory."""
        self.round += 1
        self.pattern.write(self.source, 0, self.round)
        self.engine.transfer(Op.WRITE, self.segment, self.memory.address, self.handle, 0, REGION_BYTES)
        self.transfers += 1
        self.wrong_bytes += target.wrong_bytes(index, self.round)
        self.verified_bytes += REGION_BYTES

    def close(self) -> None:
        """Lets go of the views, without which the engine could not unmap its memory."""
        self.source.release()
        self.found.release()

    def _move(self, op: Op, address: int, place: int) -> int:
        """Nanoseconds of one batch between ``address`` here and ``place`` in the region."""
        local = self.blocks + np.uint64(address)
        remote = self.blocks + np.uint64(place)
        started = time.perf_counter_ns()
        self.engine.transfer(op, self.segment, local, self.handle, remote, self.block_bytes)
        elapsed = time.perf_counter_ns() - started
        self.transfers += self.count
        return elapsed

    def _verify(self, found: memoryview, place: int, round_number: int) -> None:
        self.wrong_bytes += self.pattern.wrong_bytes(found, place, round_number)
        self.verified_bytes += len(found)

    def to_dict(self) -> dict[str, Any]:
        """The row as plain values; rates in GB/s, latencies in microseconds of a whole batch."""
        return {
            "transport": self.transport,
            "block_bytes": self.block_bytes,
            "batch": self.count,
            "transfers": self.transfers,
            "write_gb_per_s": self.writes.gb_per_s,
            "read_gb_per_s": self.reads.gb_per_s,
            "write_p50_us": quantile_us(self.writes.latencies.buckets, 0.5),
            "read_p50_us": quantile_us(self.reads.latencies.buckets, 0.5),
            "verified_bytes": self.verified_bytes,
            "wrong_bytes": self.wrong_bytes,
        }


def make_cells(engines: Sequence[Engine], target: TargetProcess) -> list[Cell]:
    """A cell for each engine (which has one transport) and shape, in the order of the target's regions."""
    handles = iter(target.regions)
    cells: list[Cell] = []
    for engine in engines:
        segment = engine.open(target.endpoint)
        cells += [Cell(engine, segment, next(handles), shape) for shape in SHAPES]
    return cells
