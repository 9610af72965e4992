"""What the harness of the pool benchmark asks of a worker, in the lines of protocol.py: jobs and checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

PoolOperation = Literal["put", "get", "exists"]
POOL_OPERATIONS: Final[tuple[PoolOperation, ...]] = ("put", "get", "exists")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolJob:
    """One timed run of calls with ``count`` keys each, until both minima are reached or the maximum is.

    Puts are of new keys; gets and exists are of keys that were put before the clock started.
    """

    operation: PoolOperation
    block_bytes: int
    count: int
    minimum_s: float
    minimum_operations: int
    maximum_operations: int
    variant: str = ""  # which of a worker's clients does it

    @property
    def operation_bytes(self) -> int:
        return self.block_bytes * self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReport:
    """What one job cost. CPU seconds are of all processes of the contender; of Redis alone in
    ``redis_cpu_s``.
    """

    operations: int
    keys: int
    transferred_bytes: int
    elapsed_s: float  # sum of the calls' times
    p50_us: float
    p99_us: float
    cpu_s: float
    redis_cpu_s: float

    @property
    def operations_per_s(self) -> float:
        return self.operations / self.elapsed_s

    @property
    def redis_us_per_key(self) -> float:
        return self.redis_cpu_s * 1e6 / self.keys
