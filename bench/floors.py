"""What the transfer engine promises against its peers and the machine's limits, and whether a run shows it.

Each floor is one sentence of the promise, applied to the READ and WRITE of each of its shapes. A line is met
when the median of the paired ratios reaches the floor; it is clear when the interval's worse bound does too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from moonpool.bench.contenders import COPY_LOOPS
from moonpool.bench.interval import Interval
from moonpool.bench.paired import Measure, Measurements
from moonpool.bench.plan import Cell, Shape
from moonpool.bench.workers.protocol import OPERATIONS
from moonpool.units import KIB, MIB

Verdict = Literal["met, clear", "met", "not met", "not measured"]
TCP: Final = "moonpool-tcp"
SHM: Final = "moonpool-shm"
FROM_64K: Final = (
    Shape(64 * KIB, 1),
    Shape(64 * KIB, 16),
    Shape(64 * KIB, 128),
    Shape(1 * MIB, 1),
    Shape(1 * MIB, 16),
    Shape(1 * MIB, 128),
    Shape(16 * MIB, 1),
    Shape(64 * MIB, 1),
)
FROM_1M: Final = FROM_64K[3:]
FROM_4K: Final = (Shape(4 * KIB, 1), Shape(4 * KIB, 16), Shape(4 * KIB, 128), *FROM_64K)


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """``ours`` against the best of ``others``; with no others, ``ours`` alone, in microseconds."""

    ours: str
    others: tuple[str, ...]
    shapes: tuple[Shape, ...]
    bound: float
    measure: Measure = "throughput"

    @property
    def at_most(self) -> bool:
        return self.measure != "throughput"

    def holds(self, value: float) -> bool:
        """Whether a value keeps the promise."""
        return value <= self.bound if self.at_most else value >= self.bound


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the table of floors."""

    floor: Floor
    cell: Cell
    against: str
    seen: Interval | None

    @property
    def verdict(self) -> Verdict:
        """What the run says about the promise."""
        if self.seen is None:
            return "not measured"
        if not self.floor.holds(self.seen.median):
            return "not met"
        return "met, clear" if self.floor.holds(self.worse_bound) else "met"

    @property
    def worse_bound(self) -> float:
        """The end of the interval that is nearer to failure."""
        assert self.seen is not None
        return self.seen.high if self.floor.at_most else self.seen.low


def _faster(ours: str, other: str, bound: float, *shapes: Shape) -> Floor:
    return Floor(ours=ours, others=(other,), shapes=shapes, bound=bound)


def _same_host(peer: str) -> tuple[Floor, ...]:
    return (
        _faster(SHM, peer, 1.5, Shape(4 * KIB, 1)),
        _faster(SHM, peer, 5.0, Shape(4 * KIB, 16)),
        _faster(SHM, peer, 6.0, Shape(4 * KIB, 128)),
        _faster(SHM, peer, 2.0, Shape(64 * KIB, 1)),
        _faster(SHM, peer, 1.3, Shape(64 * KIB, 16)),
        _faster(SHM, peer, 1.4, *FROM_1M),
    )


FLOORS: Final = (
    _faster(TCP, "mooncake13", 3.5, Shape(4 * KIB, 1)),
    Floor(ours=TCP, others=(), shapes=(Shape(4 * KIB, 1),), bound=30.0, measure="p50"),
    _faster(TCP, "mooncake13", 12.0, Shape(4 * KIB, 16)),
    _faster(TCP, "mooncake13", 25.0, Shape(4 * KIB, 128)),
    _faster(TCP, "mooncake13", 2.5, Shape(64 * KIB, 1)),
    _faster(TCP, "mooncake13", 4.0, Shape(64 * KIB, 128)),
    _faster(TCP, "mooncake13", 3.0, Shape(1 * MIB, 1), Shape(1 * MIB, 16), Shape(1 * MIB, 128)),
    _faster(TCP, "mooncake13", 2.5, Shape(16 * MIB, 1), Shape(64 * MIB, 1)),
    _faster(TCP, "mooncake13-tuned", 2.0, Shape(1 * MIB, 1), Shape(1 * MIB, 16), Shape(1 * MIB, 128)),
    _faster(TCP, "mooncake13-tuned", 1.5, Shape(16 * MIB, 1), Shape(64 * MIB, 1)),
    _faster(TCP, "c-blocking", 0.9, *FROM_4K),
    Floor(ours=TCP, others=("c-blocking",), shapes=FROM_64K, bound=1.1, measure="cpu"),
    _faster("moonpool-tcp-digest", TCP, 0.85, *FROM_1M),
    Floor(ours=SHM, others=(), shapes=(Shape(4 * KIB, 1),), bound=4.0, measure="p50"),
    *_same_host("mooncake14-shm"),
    *_same_host("nixl-cma"),
    Floor(ours=SHM, others=COPY_LOOPS, shapes=FROM_1M, bound=0.85),
)


def _see(floor: Floor, cell: Cell, measurements: Measurements) -> tuple[str, Interval | None]:
    """Against whom, and what was seen; of several others the one that does best in this cell."""
    if not floor.others:
        return "", measurements.median(cell, floor.ours, floor.measure)
    seen = {
        other: ratio
        for other in floor.others
        if (ratio := measurements.ratio(cell, floor.ours, other, floor.measure)) is not None
    }
    if not seen:
        return floor.others[0], None
    best = min(seen, key=lambda other: seen[other].median)
    return best, seen[best]


def judge(measurements: Measurements, floors: Iterable[Floor] = FLOORS) -> list[Line]:
    """Every floor in every cell that the run measured for its own side, in the order of the promise."""
    measured = {cell for cell, _ in measurements.reports}
    lines = []
    for floor in floors:
        for shape in floor.shapes:
            for operation in OPERATIONS:
                cell = Cell(shape, operation)
                if cell in measured:
                    against, seen = _see(floor, cell, measurements)
                    lines.append(Line(floor, cell, against, seen))
    return lines
