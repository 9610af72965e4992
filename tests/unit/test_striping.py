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
from moonpool.kernels import Paths, SliceBounds, Transfers, cut, cut_equal, expected_paths, warmup
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


def test_a_large_transfer_is_cut_evenly() -> None:
    slices, turn = cut_equal(transfers(32 * MIB), ids(4), BOUNDS)
    assert slices.length.tolist() == [8 * MIB] * 4
    assert slices.local.tolist() == [(1 << 40) + n * 8 * MIB for n in range(4)]
    assert slices.offset.tolist() == [n * 8 * MIB for n in range(4)]
    assert slices.path.tolist() == [0, 1, 2, 3]
    assert turn == 0


def test_small_transfers_stay_whole_and_take_turns() -> None:
    slices, turn = cut_equal(transfers(4 * KIB, 0, 8 * MIB - 1, 1), ids(2), BOUNDS, first=1)
    assert slices.transfer.tolist() == [0, 2, 3]
    assert slices.length.tolist() == [4 * KIB, 8 * MIB - 1, 1]
    assert slices.path.tolist() == [1, 0, 1]
    assert turn == 0


def test_a_small_rest_joins_the_last_slice_or_halves_it() -> None:
    joined, _ = cut_equal(transfers(12 * MIB + 5), ids(3), SliceBounds(0, 4 * MIB, 12 * MIB, 1, 10))
    assert joined.length.tolist() == [4 * MIB + 4096, 8 * MIB - 4091]
    alone, _ = cut_equal(transfers(8 * MIB + 4097), ids(2), SliceBounds(0, 4 * MIB, 12 * MIB, 1, 10))
    assert alone.length.tolist() == [4 * MIB + 4096, 4 * MIB + 1]
    halved, _ = cut_equal(transfers(16 * MIB + 5), ids(1), SliceBounds(0, 4 * MIB, 8 * MIB, 1, 10))
    assert halved.length.tolist() == [8 * MIB, 4 * MIB, 4 * MIB + 5]


def test_a_fast_path_gets_its_larger_share() -> None:
    finer = BOUNDS._replace(slices_per_path=8)
    slices, _ = cut(transfers(64 * MIB), paths([3e9, 1e9]), finer)
    share = int(slices.length[slices.path == 0].sum()) / (64 * MIB)
    assert 0.7 <= share <= 0.8


def test_a_queue_or_a_latency_sends_slices_elsewhere() -> None:
    queued, _ = cut(transfers(4 * KIB), paths([1e9, 1e9], queued=[MIB, 0]), BOUNDS)
    assert queued.path.tolist() == [1]
    late, _ = cut(transfers(4 * KIB), paths([1e9, 1e9], latency_ns=[100_000, 5_000]), BOUNDS)
    assert late.path.tolist() == [1]
    small_then_large, _ = cut(
        transfers(4 * KIB, 8 * MIB - 1), paths([1e8, 1e10], latency_ns=[0, 50_000]), BOUNDS
    )
    assert small_then_large.path.tolist() == [0, 1]


def test_ties_go_to_the_first_path() -> None:
    slices, busy_ps = cut(transfers(*[4 * KIB] * 4), paths([1e9, 1e9]), BOUNDS)
    assert slices.path.tolist() == [0, 1, 0, 1]
    assert busy_ps[0] == busy_ps[1] == 8 * 1_024_000


def test_expected_paths_are_in_picoseconds() -> None:
    made = paths([1e9, 0], queued=[10 * KIB, 0], latency_ns=[7, 0])
    assert made.cost_ps_per_kib.tolist() == [1_024_000, COST_MAX]
    assert made.busy_ps.tolist() == [10_240_000 + 7_000, 0]


def test_times_saturate_instead_of_overflowing() -> None:
    slow = paths([0], queued=[(1 << 64) - 1])
    assert slow.busy_ps.tolist() == [BUSY_MAX_PS]
    _, busy_ps = cut(transfers(LENGTH_MAX), slow, SliceBounds(0, 1 << 30, 1 << 31, 1, 2_000))
    assert busy_ps.tolist() == [BUSY_MAX_PS]


def test_no_transfers_make_no_slices() -> None:
    slices, turn = cut_equal(transfers(), ids(3), BOUNDS, first=2)
    assert len(slices.length) == 0
    assert turn == 2


GOOD = transfers(64 * MIB)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: cut_equal(transfers(LENGTH_MAX + 1), ids(1), BOUNDS), "longer than"),
        (lambda: cut_equal(transfers((1 << 64) - 1), ids(1), BOUNDS), "longer than"),
        (lambda: cut_equal(GOOD, ids(0), BOUNDS), "1 to 65535 paths"),
        (lambda: cut_equal(GOOD, ids(2), BOUNDS, first=2), "first path"),
        (lambda: cut_equal(GOOD, ids(2), BOUNDS, first=-1), "first path"),
        (lambda: cut_equal(GOOD, ids(8), BOUNDS._replace(slices_max=7)), "8 slices are more than 7"),
        (lambda: cut_equal(GOOD, ids(2), BOUNDS._replace(slice_min_bytes=0)), "multiples of 4096"),
        (lambda: cut_equal(GOOD, ids(2), BOUNDS._replace(slice_min_bytes=5000)), "multiples of 4096"),
        (lambda: cut_equal(GOOD, ids(2), BOUNDS._replace(slice_max_bytes=MIB)), "at least twice"),
        (lambda: cut_equal(GOOD, ids(2), BOUNDS._replace(stripe_min_bytes=17 * MIB)), "stripe_min"),
        (lambda: cut_equal(GOOD, ids(2), BOUNDS._replace(slices_per_path=0)), "slices_per_path"),
        (
            lambda: cut_equal(GOOD._replace(local=GOOD.local[:0]), ids(2), BOUNDS),
            r"local must be .*uint64\[1\]",
        ),
        (lambda: cut_equal(GOOD._replace(length=np.ones(1)), ids(2), BOUNDS), "length must be"),
        (lambda: cut_equal(GOOD, np.arange(2), BOUNDS), r"id must be .*uint16\[2\]"),
        (lambda: cut_equal(GOOD, ids(4)[::2], BOUNDS), "contiguous"),
        (lambda: cut(GOOD, Paths(ids(1), np.zeros(1, np.int64), np.zeros(1, np.int64)), BOUNDS), "cost"),
        (lambda: cut(GOOD, Paths(ids(1), np.ones(1, np.int64), np.full(1, -1)), BOUNDS), "busy time"),
        (lambda: cut(GOOD, Paths(ids(1), np.ones(2, np.int64), np.ones(1, np.int64)), BOUNDS), "cost_ps"),
        (lambda: paths([1e9], queued=[0, 0]), "queued_bytes must be"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        call()


def test_hostile_lengths_are_refused_without_cutting_them() -> None:
    many = transfers(*[LENGTH_MAX] * 1_000)
    with pytest.raises(ValueError, match="slices are more than"):
        cut_equal(many, ids(4), SliceBounds(0, 4096, 8192, 1, 1_000))


def test_warmup_compiles_both_kernels() -> None:
    from moonpool.kernels import striping

    warmup()
    for kernel in (striping._deal_greedily, striping._deal_in_turn, striping._count_slices):
        assert kernel.signatures  # type: ignore[attr-defined]
    before = [len(striping._deal_in_turn.signatures), len(striping._deal_greedily.signatures)]  # type: ignore[attr-defined]
    cut_equal(GOOD, ids(2), BOUNDS)
    cut(GOOD, paths([1e9]), BOUNDS)
    after = [len(striping._deal_in_turn.signatures), len(striping._deal_greedily.signatures)]  # type: ignore[attr-defined]
    assert after == before


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
        "kernels.cut; assert 'numba' in sys.modules"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False, timeout=100).returncode == 0
    assert set(dir(kernels)) == set(kernels.__all__)
    with pytest.raises(AttributeError, match="no attribute 'paste'"):
        kernels.paste  # noqa: B018
