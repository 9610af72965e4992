"""Striping by example: how transfers are cut and dealt, what is refused, and what stays lazy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest

import moonpool.kernels as kernels
from moonpool.kernels import (
    Paths,
    SliceBounds,
    Slices,
    Transfers,
    expected_paths,
    stripe_by_rate,
    stripe_evenly,
    striping,
    warmup,
)
from moonpool.kernels._jit import jit
from moonpool.kernels.striping import BUSY_MAX_PS, COST_MAX, LENGTH_MAX

KIB, MIB = 1 << 10, 1 << 20
BOUNDS = SliceBounds(8 * MIB, 1 * MIB, 16 * MIB, 1, 1_000)


def transfers(*lengths: int, local: int = 1 << 40, offset: int = 0) -> Transfers:
    count = len(lengths)
    return Transfers(
        np.full(count, local, np.uint64), np.full(count, offset, np.uint64), np.array(lengths, np.uint64)
    )


def ids(count: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    return np.arange(count, dtype=np.uint16)


def paths(rates: list[float], queued: list[int] | None = None, latency_ns: list[int] | None = None) -> Paths:
    zeros = [0] * len(rates)
    return expected_paths(
        ids(len(rates)),
        np.array(rates, np.uint64),
        np.array(queued or zeros, np.uint64),
        np.array(latency_ns or zeros, np.uint64),
    )


def evenly(made: Transfers, path_count: int, slice_min_bytes: int = 64 * KIB) -> Slices:
    return stripe_evenly(*made, path_count, slice_min_bytes)


def test_a_large_transfer_is_shared_evenly() -> None:
    slices = evenly(transfers(32 * MIB), 4)
    assert slices.length.tolist() == [8 * MIB] * 4
    assert slices.local.tolist() == [(1 << 40) + n * 8 * MIB for n in range(4)]
    assert slices.offset.tolist() == [n * 8 * MIB for n in range(4)]
    assert slices.path.tolist() == [0, 1, 2, 3]


def test_a_batch_is_shared_in_runs_and_cut_only_at_their_ends() -> None:
    slices = evenly(transfers(MIB, MIB, 0, MIB), 2)
    assert slices.transfer.tolist() == [0, 1, 1, 3]
    assert slices.length.tolist() == [MIB, MIB // 2, MIB // 2, MIB]
    assert slices.path.tolist() == [0, 0, 1, 1]


def test_a_run_ends_between_transfers_rather_than_near_their_ends() -> None:
    slices = evenly(transfers(MIB - 5, MIB + 5), 2)
    assert slices.length.tolist() == [MIB - 5, MIB + 5]
    assert slices.path.tolist() == [0, 1]
    short = evenly(transfers(*[100 * KIB] * 5), 2)
    assert short.path.tolist() in ([0, 0, 0, 1, 1], [0, 0, 1, 1, 1])


def test_too_little_for_all_paths_goes_to_the_first_ones() -> None:
    assert evenly(transfers(4 * KIB), 8).path.tolist() == [0]
    assert evenly(transfers(130 * KIB), 8).length.tolist() == [64 * KIB, 66 * KIB]


def test_sizes_of_any_scale_do_not_overflow() -> None:
    slices = evenly(transfers(*[LENGTH_MAX] * 1_000), 7)
    assert sum(slices.length.tolist()) == 1_000 * LENGTH_MAX
    assert set(slices.path.tolist()) == set(range(7))


def test_arrays_that_cannot_be_written_are_the_same_type() -> None:
    frozen = np.frombuffer(np.array([MIB], np.uint64).tobytes(), np.uint64)
    before = len(striping._split_evenly.signatures)  # type: ignore[attr-defined]
    assert stripe_evenly(frozen, frozen, frozen, 2).length.tolist() == [MIB // 2] * 2
    assert len(striping._split_evenly.signatures) == max(1, before)  # type: ignore[attr-defined]


def test_large_transfers_are_cut_within_their_bounds() -> None:
    slices, _ = stripe_by_rate(transfers(40 * MIB, 4 * KIB, 0, 8 * MIB - 1), paths([1e9] * 2), BOUNDS)
    assert slices.transfer.tolist() == [0, 0, 0, 1, 3]
    assert slices.length.tolist() == [16 * MIB, 16 * MIB, 8 * MIB, 4 * KIB, 8 * MIB - 1]
    assert slices.path.tolist() == [0, 1, 0, 1, 1]


def test_a_small_rest_joins_the_last_slice_or_halves_it() -> None:
    def sizes(length: int, path_count: int, slice_max_bytes: int) -> list[int]:
        bounds = SliceBounds(0, 4 * MIB, slice_max_bytes, 1, 10)
        return stripe_by_rate(transfers(length), paths([1e9] * path_count), bounds)[0].length.tolist()

    assert sizes(12 * MIB + 5, 3, 12 * MIB) == [4 * MIB + 4096, 8 * MIB - 4091]
    assert sizes(8 * MIB + 4097, 2, 12 * MIB) == [4 * MIB + 4096, 4 * MIB + 1]
    assert sizes(16 * MIB + 5, 1, 8 * MIB) == [8 * MIB, 4 * MIB, 4 * MIB + 5]


def test_a_fast_path_gets_its_larger_share() -> None:
    finer = BOUNDS._replace(slices_per_path=8)
    slices, _ = stripe_by_rate(transfers(64 * MIB), paths([3e9, 1e9]), finer)
    share = int(slices.length[slices.path == 0].sum()) / (64 * MIB)
    assert 0.7 <= share <= 0.8


def test_a_queue_or_a_latency_sends_slices_elsewhere() -> None:
    queued, _ = stripe_by_rate(transfers(4 * KIB), paths([1e9, 1e9], queued=[MIB, 0]), BOUNDS)
    assert queued.path.tolist() == [1]
    late, _ = stripe_by_rate(transfers(4 * KIB), paths([1e9, 1e9], latency_ns=[100_000, 5_000]), BOUNDS)
    assert late.path.tolist() == [1]
    small_then_large, _ = stripe_by_rate(
        transfers(4 * KIB, 8 * MIB - 1), paths([1e8, 1e10], latency_ns=[0, 50_000]), BOUNDS
    )
    assert small_then_large.path.tolist() == [0, 1]


def test_ties_go_to_the_first_path() -> None:
    slices, busy_ps = stripe_by_rate(transfers(*[4 * KIB] * 4), paths([1e9, 1e9]), BOUNDS)
    assert slices.path.tolist() == [0, 1, 0, 1]
    assert busy_ps[0] == busy_ps[1] == 8 * 1_024_000


def test_expected_paths_are_in_picoseconds() -> None:
    made = paths([1e9, 0], queued=[10 * KIB, 0], latency_ns=[7, 0])
    assert made.cost_ps_per_kib.tolist() == [1_024_000, COST_MAX]
    assert made.busy_ps.tolist() == [10_240_000 + 7_000, 0]


def test_times_saturate_instead_of_overflowing() -> None:
    slow = paths([0], queued=[(1 << 64) - 1])
    assert slow.busy_ps.tolist() == [BUSY_MAX_PS]
    _, busy_ps = stripe_by_rate(transfers(LENGTH_MAX), slow, SliceBounds(0, 1 << 30, 1 << 31, 1, 2_000))
    assert busy_ps.tolist() == [BUSY_MAX_PS]


def test_no_transfers_make_no_slices() -> None:
    assert len(evenly(transfers(), 3).length) == 0
    slices, busy_ps = stripe_by_rate(transfers(), paths([1e9], queued=[KIB]), BOUNDS)
    assert len(slices.length) == 0
    assert busy_ps.tolist() == [1_024_000]


GOOD = transfers(64 * MIB)
ONE, ZERO = np.ones(1, np.int64), np.zeros(1, np.int64)


def by_rate(path_count: int = 2, **changes: int) -> Callable[[], object]:
    return lambda: stripe_by_rate(GOOD, paths([1e9] * path_count), BOUNDS._replace(**changes))


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: evenly(transfers(LENGTH_MAX + 1), 1), "longer than"),
        (lambda: evenly(transfers((1 << 64) - 1), 1), "longer than"),
        (lambda: evenly(GOOD, 0), "1 to 65535 paths"),
        (lambda: evenly(GOOD, 65_536), "1 to 65535 paths"),
        (lambda: evenly(GOOD, 1, 0), "multiple of 4096"),
        (lambda: evenly(GOOD, 1, 5_000), "multiple of 4096"),
        (lambda: evenly(GOOD._replace(local=GOOD.local[:0]), 2), r"local must be .*uint64\[1\]"),
        (lambda: evenly(GOOD._replace(length=np.ones(1)), 2), "length must be"),
        (lambda: evenly(Transfers(*[np.zeros(4, np.uint64)[::2]] * 3), 2), "contiguous"),
        (lambda: stripe_by_rate(transfers(LENGTH_MAX + 1), paths([1e9]), BOUNDS), "longer than"),
        (by_rate(path_count=0), "1 to 65535 paths"),
        (by_rate(slices_max=3), "4 slices are more than 3"),
        (by_rate(slice_min_bytes=0), "multiples of 4096"),
        (by_rate(slice_min_bytes=5_000), "multiples of 4096"),
        (by_rate(slice_max_bytes=MIB), "at least twice"),
        (by_rate(stripe_min_bytes=17 * MIB), "stripe_min"),
        (by_rate(slices_per_path=0), "slices_per_path"),
        (lambda: stripe_by_rate(GOOD, Paths(np.arange(1), ONE, ONE), BOUNDS), r"id must be .*uint16\[1\]"),
        (lambda: stripe_by_rate(GOOD, Paths(ids(1), ZERO, ZERO), BOUNDS), "cost"),
        (lambda: stripe_by_rate(GOOD, Paths(ids(1), ONE, -ONE), BOUNDS), "busy time"),
        (lambda: stripe_by_rate(GOOD, Paths(ids(1), np.ones(2, np.int64), ONE), BOUNDS), "cost_ps"),
        (lambda: paths([1e9], queued=[0, 0]), "queued_bytes must be"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        call()


def test_hostile_lengths_are_refused_without_cutting_them() -> None:
    many = transfers(*[LENGTH_MAX] * 1_000)
    with pytest.raises(ValueError, match="slices are more than"):
        stripe_by_rate(many, paths([1e9]), SliceBounds(0, 4096, 8192, 1, 1_000))


def test_after_warmup_nothing_is_compiled() -> None:
    kernels_used = (striping._split_evenly, striping._deal_greedily, striping._count_slices)
    warmup()
    before = [len(one.signatures) for one in kernels_used]  # type: ignore[attr-defined]
    assert all(before)
    evenly(GOOD, 2)
    stripe_by_rate(GOOD, paths([1e9]), BOUNDS)
    assert [len(one.signatures) for one in kernels_used] == before  # type: ignore[attr-defined]


def test_kernels_compile_where_nothing_can_be_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_kernel = numba.njit
    asked: list[dict[str, Any]] = []

    def without_cache(**options: Any) -> Any:
        asked.append(options)
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return compile_kernel(**options)

    monkeypatch.setattr(numba, "njit", without_cache)

    @jit
    def double(number: int) -> int:
        return 2 * number

    assert double(21) == 42
    assert asked == [{"cache": True, "nogil": True}, {"nogil": True}]


def test_names_are_loaded_only_when_used() -> None:
    code = (
        "import sys, moonpool.kernels as kernels; assert not {'numba', 'numpy'} & set(sys.modules);"
        "kernels.stripe_evenly; assert 'numba' in sys.modules"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False, timeout=100).returncode == 0
    assert set(dir(kernels)) == set(kernels.__all__)
    with pytest.raises(AttributeError, match="no attribute 'paste'"):
        kernels.paste  # noqa: B018
