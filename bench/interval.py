"""Medians with bootstrap intervals, and the pairing of two contenders' rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

RESAMPLES: Final = 10_000
CONFIDENCE: Final = 0.95
SEED: Final = 20_240_601


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and the bounds between which the median of such samples lies with the chosen confidence."""

    median: float
    low: float
    high: float
    samples: int

    def __str__(self) -> str:
        return f"{short(self.median)} ({short(self.low)}-{short(self.high)})"


def short(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def bootstrap_median(values: Sequence[float], *, seed: int = SEED, resamples: int = RESAMPLES) -> Interval:
    """Median of ``values`` with its percentile-bootstrap interval (Efron 1979); same seed, same interval.

    The rounds are resampled with replacement. Raises ``ValueError`` for no values.
    """
    if not values:
        raise ValueError("a median needs at least one value")
    sample = np.asarray(values, dtype=np.float64)
    draws = np.random.default_rng(seed).integers(0, sample.size, size=(resamples, sample.size))
    medians = np.median(sample[draws], axis=1)
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = np.quantile(medians, (tail, 1.0 - tail))
    return Interval(float(np.median(sample)), float(low), float(high), sample.size)


def paired_ratios(ours: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    """``ours / other`` of every round in which both were measured, in round order."""
    return [ours[number] / other[number] for number in sorted(ours.keys() & other.keys())]
