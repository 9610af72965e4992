"""What the pool benchmark measures, and what the store promises there against whom.

Each floor is one sentence of the promise. A ratio is of keys per second, ours over the other's, round by
round; without another the bound is on our own median latency. A line is met when the median reaches the
bound, and clear when the worse end of its interval does too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from moonpool.bench.interval import Interval
from moonpool.bench.plan import Shape
from moonpool.bench.workers.pool_protocol import PoolOperation
from moonpool.units import KIB, MIB

Verdict = Literal["met, clear", "met", "not met", "not measured"]

SHM: Final = "moonpool-shm"
CACHED: Final = "moonpool-cached"
TCP: Final = "moonpool-tcp"
LOCAL: Final = "moonpool-local"
SYNC: Final = "moonpool-sync"
DUMMY: Final = "mooncake-dummy"
EMBEDDED: Final = "mooncake-local"
REMOTE: Final = "mooncake-remote"
REDHARE: Final = "redhare"
REDHARE_REMOTE: Final = "redhare-remote"


@dataclass(frozen=True, slots=True, order=True)
class PoolCell:
    """One call: what it does, bytes of an object, objects in the call."""

    operation: PoolOperation
    shape: Shape

    def __str__(self) -> str:
        if self.operation == "exists":
            return "exists" if self.shape.count == 1 else f"exists x{self.shape.count}"
        return f"{self.operation} {self.shape}"


def cell(operation: PoolOperation, size: int, count: int = 1) -> PoolCell:
    """A cell; the size of `exists` is that of the objects it asks for."""
    return PoolCell(operation, Shape(size, count))


@dataclass(frozen=True, slots=True)
class PoolFloor:
    """`ours` in a cell, against `other` (ratio of at least `bound`) or alone (p50 of at most `bound` us)."""

    cell: PoolCell
    ours: str
    bound: float
    other: str = ""

    def holds(self, value: float) -> bool:
        """Whether a value keeps the promise."""
        return value >= self.bound if self.other else value <= self.bound


def _both(ours: str, other: str, bound: float, size: int, count: int = 1) -> tuple[PoolFloor, PoolFloor]:
    return (
        PoolFloor(cell("put", size, count), ours, bound, other),
        PoolFloor(cell("get", size, count), ours, bound, other),
    )


EXISTS: Final = cell("exists", 64)
EXISTS_500: Final = cell("exists", 64, 500)
METADATA: Final = cell("put", 512, 500)

FLOORS: Final = (
    PoolFloor(cell("get", 4 * KIB), SHM, 40.0),
    PoolFloor(cell("put", 4 * KIB), SHM, 40.0),
    *_both(SHM, DUMMY, 10.0, 4 * KIB),
    PoolFloor(cell("get", 4 * KIB), CACHED, 10.0),
    PoolFloor(cell("put", 4 * KIB), LOCAL, 28.0),
    PoolFloor(cell("get", 4 * KIB), LOCAL, 30.0),
    *_both(LOCAL, EMBEDDED, 4.0, 4 * KIB, 128),
    *_both(TCP, REMOTE, 20.0, 4 * KIB, 128),
    *_both(SHM, DUMMY, 6.0, 1 * MIB),
    *_both(SHM, DUMMY, 1.8, 16 * MIB),
    PoolFloor(cell("get", 1 * MIB), TCP, 2.0, REDHARE_REMOTE),
    PoolFloor(cell("get", 1 * MIB, 128), TCP, 1.2, REDHARE_REMOTE),
    PoolFloor(cell("get", 16 * MIB), TCP, 1.4, REDHARE_REMOTE),
    PoolFloor(cell("get", 4 * KIB), TCP, 6.0, REMOTE),
    PoolFloor(EXISTS, SHM, 30.0),
    PoolFloor(EXISTS, CACHED, 4.0),
    PoolFloor(EXISTS_500, SHM, 3.0, EMBEDDED),
    PoolFloor(METADATA, SHM, 5.0, EMBEDDED),
    PoolFloor(cell("put", 4 * KIB), SYNC, 200.0),
)

#: Measured for the reader beside what floors need.
SHOWN: Final = (
    (cell("get", 4 * KIB), REDHARE),
    (cell("put", 4 * KIB), REDHARE),
    (cell("get", 4 * KIB), EMBEDDED),
    (cell("put", 4 * KIB), EMBEDDED),
    (EXISTS, EMBEDDED),
    (EXISTS, REDHARE),
)


@dataclass(frozen=True, slots=True)
class PoolLine:
    """One row of the table of floors: `seen` is the ratio, or our own latency in us."""

    floor: PoolFloor
    seen: Interval | None
    ours_p50_us: float | None
    other_p50_us: float | None

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
        return self.seen.low if self.floor.other else self.seen.high


def jobs_of(floors: Iterable[PoolFloor]) -> dict[PoolCell, tuple[str, ...]]:
    """Who is measured in which cell, in the order of the floors."""
    jobs: dict[PoolCell, dict[str, None]] = {}
    pairs = [(floor.cell, name) for floor in floors for name in (floor.ours, floor.other) if name]
    for measured, name in (*pairs, *SHOWN):
        jobs.setdefault(measured, {})[name] = None
    return {measured: tuple(names) for measured, names in jobs.items()}
