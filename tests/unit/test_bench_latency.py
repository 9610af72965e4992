"""The latency histogram against exact percentiles."""

from __future__ import annotations

import numpy as np
import pytest

from moonpool.bench.latency import BUCKETS, CHUNK, LatencyRecorder, bucket_of, middle_of

SEED = 5
RELATIVE_ERROR = 1 / 128


def recorder_of(values: list[int]) -> LatencyRecorder:
    recorder = LatencyRecorder()
    recorder.extend(values)
    return recorder


def test_buckets_keep_the_order_and_their_middle_is_near() -> None:
    edges = [1 << power for power in range(1, 50)]
    values = np.unique(np.array([*range(1, 5000), *edges, *(edge - 1 for edge in edges[1:])], dtype=np.int64))
    buckets = bucket_of(values)
    assert (np.diff(buckets) >= 0).all()
    assert buckets.max() < BUCKETS
    for value, bucket in zip(values.tolist(), buckets.tolist(), strict=True):
        assert abs(middle_of(bucket) - value) <= value * RELATIVE_ERROR


def test_small_values_are_exact() -> None:
    assert [middle_of(int(bucket)) for bucket in bucket_of(np.arange(256, dtype=np.int64))] == list(
        range(256)
    )


@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.9, 0.99, 0.999, 1.0])
def test_percentiles_are_those_of_the_sorted_sample(fraction: float) -> None:
    values = np.random.default_rng(SEED).lognormal(10.0, 1.5, 20_000).astype(np.int64).tolist()
    exact = sorted(values)[min(len(values) - 1, int(fraction * len(values)))]
    assert recorder_of(values).percentile_ns(fraction) == pytest.approx(exact, rel=2 * RELATIVE_ERROR)


def test_sums_are_exact() -> None:
    recorder = recorder_of([1000, 2000, 4000])
    assert recorder.mean_ns() == pytest.approx(7000 / 3)
    assert recorder.longest_ns == 4000
    assert recorder.operations == 3
    assert recorder.inverse_sum_s == pytest.approx(1e6 + 5e5 + 2.5e5)


def test_memory_stays_bounded_over_many_chunks() -> None:
    recorder = LatencyRecorder()
    for _ in range(3):
        recorder.extend([500] * CHUNK)
        assert not recorder._pending
    assert recorder.percentile_ns(0.5) == pytest.approx(500, rel=RELATIVE_ERROR)
    assert recorder.operations == 3 * CHUNK


def test_merging_equals_recording_in_one_place() -> None:
    left, right = [10, 20, 30_000], [5, 700]
    merged = recorder_of(left)
    merged.merge(recorder_of(right))
    together = recorder_of(left + right)
    for fraction in (0.1, 0.5, 0.9, 1.0):
        assert merged.percentile_ns(fraction) == together.percentile_ns(fraction)
    assert (merged.operations, merged.total_ns, merged.longest_ns) == (5, 30_735, 30_000)


def test_an_empty_recorder_answers_zero() -> None:
    recorder = LatencyRecorder()
    assert recorder.percentile_ns(0.99) == 0.0
    assert recorder.mean_ns() == 0.0
