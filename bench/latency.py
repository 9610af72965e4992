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

    __slots__ = ("_counts", "_pending", "inverse_sum_s", "longest_ns", "operations", "total_ns")

    def __init__(self) -> None:
        self._counts = np.zeros(BUCKETS, dtype=np.int64)
        self._pending: list[int] = []
        self.operations = 0
        self.total_ns = 0
        self.longest_ns = 0
        self.inverse_sum_s = 0.0  # sum of 1 / latency, in 1/s: the mean rate of single operations needs it

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
        self.operations += other.operations
        self.total_ns += other.total_ns
        self.longest_ns = max(self.longest_ns, other.longest_ns)
        self.inverse_sum_s += other.inverse_sum_s

    def percentile_ns(self, fraction: float) -> float:
        """The value that ``fraction`` of the operations did not exceed; 0 when there are none."""
        self._fold()
        if not self.operations:
            return 0.0
        rank = min(self.operations, int(fraction * self.operations) + 1)
        bucket = int(np.searchsorted(np.cumsum(self._counts), rank))
        return min(middle_of(bucket), float(self.longest_ns))

    def mean_ns(self) -> float:
        """Mean latency; 0 when there are none."""
        self._fold()
        return self.total_ns / self.operations if self.operations else 0.0

    def _fold(self) -> None:
        if not self._pending:
            return
        values = np.maximum(np.array(self._pending, dtype=np.int64), 1)
        self._pending.clear()
        self._counts += np.bincount(bucket_of(values), minlength=BUCKETS)
        self.operations += values.size
        self.total_ns += int(values.sum())
        self.longest_ns = max(self.longest_ns, int(values.max()))
        self.inverse_sum_s += float((1e9 / values).sum())
