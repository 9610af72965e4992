"""Medians, bootstrap intervals and pairing."""

from __future__ import annotations

import numpy as np
import pytest

from moonpool.bench.interval import Interval, bootstrap_median, paired_ratios, short

SEED = 11


def test_the_interval_of_equal_values_is_a_point() -> None:
    assert bootstrap_median([2.0] * 15) == Interval(2.0, 2.0, 2.0, 15)


def test_the_median_is_that_of_the_sample() -> None:
    assert bootstrap_median([3.0, 1.0, 2.0]).median == 2.0
    assert bootstrap_median([4.0, 1.0, 2.0, 3.0]).median == 2.5


def test_one_outlier_moves_neither_median_nor_bounds_far() -> None:
    seen = bootstrap_median([1.0] * 14 + [100.0])
    assert (seen.median, seen.low, seen.high) == (1.0, 1.0, 1.0)


def test_the_same_seed_gives_the_same_interval() -> None:
    values = np.random.default_rng(SEED).normal(5.0, 1.0, 15).tolist()
    assert bootstrap_median(values, seed=3) == bootstrap_median(values, seed=3)
    assert bootstrap_median(values, seed=3) != bootstrap_median(values, seed=4)


def test_the_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    """300 samples of 15 from a skewed distribution: a bootstrapped median covers 90-97 %."""
    generator = np.random.default_rng(SEED)
    covered = 0
    for _ in range(300):
        seen = bootstrap_median(generator.lognormal(0.0, 0.5, 15).tolist(), resamples=1000)
        covered += seen.low <= 1.0 <= seen.high
    assert 0.88 <= covered / 300 <= 0.995


def test_bounds_enclose_the_median_and_stay_inside_the_sample() -> None:
    values = np.random.default_rng(SEED).uniform(1.0, 9.0, 25).tolist()
    seen = bootstrap_median(values)
    assert min(values) <= seen.low <= seen.median <= seen.high <= max(values)
    assert seen.low < seen.high


def test_no_values_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        bootstrap_median([])


def test_only_rounds_of_both_are_paired() -> None:
    ours, other = {0: 2.0, 1: 9.0, 3: 8.0}, {0: 1.0, 2: 5.0, 3: 2.0}
    assert paired_ratios(ours, other) == [2.0, 4.0]
    assert paired_ratios(ours, {}) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1234.5, "1234"),
        (12.34, "12.3"),
        (1.234, "1.23"),
        (0.1234, "0.12"),
        (0.01234, "0.012"),
    ],
)
def test_figures_are_shown_short(value: float, text: str) -> None:
    assert short(value) == text


def test_an_interval_is_shown_with_its_bounds() -> None:
    assert str(Interval(5.0, 4.0, 6.0, 15)) == "5.00 (4.00-6.00)"
