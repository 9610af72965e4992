"""Latencies of a long run in bounded memory, with percentiles good to one part in 128.

Recording is a list append; every ``CHUNK`` values are folded into a histogram whose buckets are 128 to the
octave (the layout of HdrHistogram, Tene 2012), so that a run of any length costs the same memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, final

import numpy as np
import numpy.typing as npt

CHUNK: Final = 65_536
STEPS_BITS: Final = 7
STEPS: Final = 1 << STEPS_BITS  # buckets in each doubling
BUCKETS: Final = (64 - STEPS_BITS) * STEPS


def bucket_of(values_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Bucket index of each value (int64[n], at least 0): exact below 128, then 128 buckets an octave."""
    exponent = np.frexp(values_ns.astype(np.float64))[1].astype(np.int64) - STEPS_BITS - 1
    shift = np.maximum(exponent, 0)
    buckets: npt.NDArray[np.int64] = np.minimum(shift * STEPS + (values_ns >> shift), BUCKETS - 1)
    return buckets


def middle_of(bucket: int) -> float:
    """The middle of a bucket's values, in ns."""
    if bucket < STEPS:
        return float(bucket)
    shift, step = divmod(bucket, STEPS)
    if shift:
        shift, step = shift - 1, step + STEPS
    return (step + 0.5) * (1 << shift) if shift else float(step)


@final
class LatencyRecorder:
    """Latencies of one thread's equal-sized operations; merge recorders when the threads have ended."""

    __slots__ = ("_counts", "_inverse_sum_s", "_longest_ns", "_operations", "_pending", "_total_ns")

    def __init__(self) -> None:
        self._counts = np.zeros(BUCKETS, dtype=np.int64)
        self._pending: list[int] = []
        self._operations = 0
        self._total_ns = 0
        self._longest_ns = 0
        self._inverse_sum_s = 0.0

    def record(self, latency_ns: int) -> None:
        """Adds one latency; about 50 ns."""
        self._pending.append(latency_ns)
        if len(self._pending) >= CHUNK:
            self._fold()

    def extend(self, latencies_ns: Iterable[int]) -> None:
        """Adds many."""
        for latency_ns in latencies_ns:
            self.record(latency_ns)

    def merge(self, other: LatencyRecorder) -> None:
        """Adds what ``other`` recorded."""
        self._fold()
        other._fold()
        self._counts += other._counts
        self._operations += other._operations
        self._total_ns += other._total_ns
        self._longest_ns = max(self._longest_ns, other._longest_ns)
        self._inverse_sum_s += other._inverse_sum_s

    @property
    def operations(self) -> int:
        """How many were recorded."""
        self._fold()
        return self._operations

    @property
    def total_ns(self) -> int:
        """Their sum."""
        self._fold()
        return self._total_ns

    @property
    def longest_ns(self) -> int:
        """The longest; 0 when there are none."""
        self._fold()
        return self._longest_ns

    @property
    def inverse_sum_s(self) -> float:
        """Sum of 1 / latency, in 1/s: the mean rate of single operations needs it."""
        self._fold()
        return self._inverse_sum_s

    def percentile_ns(self, fraction: float) -> float:
        """The value that ``fraction`` of the operations did not exceed; 0 when there are none."""
        self._fold()
        if not self._operations:
            return 0.0
        rank = min(self._operations, int(fraction * self._operations) + 1)
        bucket = int(np.searchsorted(np.cumsum(self._counts), rank))
        return min(middle_of(bucket), float(self._longest_ns))

    def mean_ns(self) -> float:
        """Mean latency; 0 when there are none."""
        return self.total_ns / self.operations if self.operations else 0.0

    def _fold(self) -> None:
        if not self._pending:
            return
        values = np.maximum(np.array(self._pending, dtype=np.int64), 1)
        self._pending.clear()
        self._counts += np.bincount(bucket_of(values), minlength=BUCKETS)
        self._operations += values.size
        self._total_ns += int(values.sum())
        self._longest_ns = max(self._longest_ns, int(values.max()))
        self._inverse_sum_s += float((1e9 / values).sum())
