"""Spraying: the kernel against plain Python, and what must hold over a hundred thousand seeded batches."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest

from moonpool.kernels.reference import share_at_least
from moonpool.kernels.spraying import Sprayed, _lay, _share, _total_bytes, spray
from moonpool.kernels.striping import COST_MAX, CUT_BYTES, LENGTH_MAX, Paths, Slices, Transfers

KIB, MIB = 1 << 10, 1 << 20
CASES = 100_000


def batch(lengths: Any, local: int = 1 << 40) -> Transfers:
    sizes = np.array(lengths, np.uint64)
    starts = np.cumsum(sizes, dtype=np.uint64) - sizes
    return Transfers(starts + np.uint64(local), starts, sizes)


def paths(cost: Any, busy: Any) -> Paths:
    return Paths(
        np.arange(len(cost), dtype=np.uint16) + np.uint16(7),
        np.array(cost, np.int64),
        np.array(busy, np.int64),
    )


@numba.njit(cache=False)
def broken(lengths: Any, rows: Any, slice_min: int, carried: Any) -> int:
    """0 when the slices are a sound cut of the transfers; else the number of the rule that one breaks.

    Fills `carried` with the bytes of each path.
    """
    row, count = 0, len(rows[3])
    for index in range(len(lengths)):
        done, length = 0, int(lengths[index])
        while done < length:
            if row >= count:
                return 1  # a hole at the end
            size = int(rows[3][row])
            if size == 0:
                return 2
            if int(rows[0][row]) != index or size > length - done:
                return 3
            if (
                int(rows[2][row]) != int(rows[5][index]) + done
                or int(rows[1][row]) != int(rows[6][index]) + done
            ):
                return 4
            if done % CUT_BYTES or (size < slice_min and size != length):
                return 5
            carried[rows[4][row] - 7] += size
            done += size
            row += 1
    return 0 if row == count else 6


def check(transfers: Transfers, sprayed: Sprayed, slice_min: int, path_count: int) -> Any:
    rows = sprayed.slices
    carried = np.zeros(path_count, np.int64)
    given = (
        rows.transfer,
        rows.local,
        rows.offset,
        rows.length,
        rows.path,
        transfers.offset,
        transfers.local,
    )
    assert broken(transfers.length, given, slice_min, carried) == 0
    assert len(rows.length) <= len(transfers.length) + max(path_count, 1) - 1
    return carried


@numba.njit(cache=False)
def first_broken(seed: int, cases: int) -> tuple[int, int]:
    """(case, rule) of the first of many seeded batches that breaks a rule; (-1, 0) when none does."""
    np.random.seed(seed)
    for case in range(cases):
        count, slice_min = np.random.randint(1, 9), CUT_BYTES * np.random.randint(1, 17)
        lengths = np.empty(np.random.randint(1, 7), np.uint64)
        for index in range(len(lengths)):
            lengths[index] = 0 if np.random.random() < 0.1 else int(2.0 ** np.random.uniform(0, 24))
        starts = np.cumsum(lengths) - lengths
        cost, busy = np.empty(count, np.int64), np.zeros(count, np.int64)
        for path in range(count):
            cost[path] = np.random.randint(40_000, 4_000_000)
            busy[path] = np.random.randint(0, 1 << 31) if np.random.random() < 0.5 else 0
        units, spent = np.zeros(count, np.int64), cost.copy()
        total = _total_bytes(lengths)
        if not _share((total + CUT_BYTES - 1) // CUT_BYTES, slice_min // CUT_BYTES, (busy, spent), units):
            return case, 7
        used = np.flatnonzero(units)
        room = len(lengths) + max(len(used), 1) - 1
        out = Slices(
            np.empty(room, np.uint32),
            np.empty(room, np.uint64),
            np.empty(room, np.uint64),
            np.empty(room, np.uint64),
            np.empty(room, np.uint16),
        )
        ids = (used + 7).astype(np.uint16)
        made = _lay(
            Transfers(starts, starts, lengths), (ids, np.cumsum(units[used]) * CUT_BYTES), slice_min, out
        )
        carried = np.zeros(count, np.int64)
        rows = (out.transfer[:made], out.local[:made], out.offset[:made], out.length[:made], out.path[:made])
        rule = broken(lengths, (*rows, starts, starts), slice_min, carried)
        if rule:
            return case, rule
        for path in range(count):
            # Borders move for alignment and for the least slice, and no further.
            if abs(carried[path] - units[path] * CUT_BYTES) >= 2 * slice_min + CUT_BYTES:
                return case, 8
            if carried[path] and not units[path]:
                return case, 9
    return -1, 0


def test_a_hundred_thousand_batches_have_no_empty_slice_no_hole_and_end_together() -> None:
    assert first_broken(2026, CASES) == (-1, 0)


def test_batches_by_the_front_door_are_as_sound() -> None:
    dice = np.random.default_rng(2027)
    for _ in range(2_000):
        count = int(dice.integers(1, 9))
        slice_min = CUT_BYTES * int(dice.integers(1, 17))
        transfers = batch((2 ** dice.uniform(0, 24, int(dice.integers(1, 7)))).astype(np.uint64))
        ways = paths(dice.integers(10_000, 1_000_000, count), dice.integers(0, 1 << 31, count))
        check(transfers, spray(transfers, ways, slice_min), slice_min, count)


@pytest.mark.parametrize("units_min", [1, 3, 16])
def test_shares_are_those_of_dealing_unit_by_unit(units_min: int) -> None:
    dice = np.random.default_rng(units_min)
    for case in range(400):
        count = int(dice.integers(1, 9))
        units = int(dice.integers(1, 120))
        cost = [int(c) for c in dice.integers(1, 50, count)]
        busy = [int(b) for b in dice.integers(0, 2_000, count)]
        ways = paths(cost, busy)
        sprayed = spray(batch([units * CUT_BYTES]), ways, units_min * CUT_BYTES)
        expected = share_at_least(units, units_min, [4 * c for c in cost], busy)
        got = (sprayed.free_ps - ways.busy_ps) // (4 * ways.cost_ps_per_kib)
        assert got.tolist() == expected, f"case {case}"
        assert sprayed.slices.length.sum() == units * CUT_BYTES


def test_no_dealing_of_whole_units_ends_sooner() -> None:
    """Against every other dealing of few units over few paths."""
    dice = np.random.default_rng(5)
    for _ in range(60):
        cost = [int(c) for c in dice.integers(1, 9, 3)]
        busy = [int(b) for b in dice.integers(0, 60, 3)]
        units = int(dice.integers(1, 12))
        ways = paths(cost, busy)
        sprayed = spray(batch([units * CUT_BYTES]), ways, CUT_BYTES)
        ours = max(int(end) for end, start in zip(sprayed.free_ps, busy, strict=True) if end > start)
        best = min(
            max(start + n * 4 * price for start, n, price in zip(busy, deal, cost, strict=True) if n)
            for a in range(units + 1)
            for b in range(units + 1 - a)
            for deal in [(a, b, units - a - b)]
        )
        assert ours == best


def test_a_path_at_half_the_rate_gets_half_as_much() -> None:
    sprayed = spray(batch([7 * MIB]), paths([100, 100, 100, 200], [0] * 4), 64 * KIB)
    assert sprayed.slices.length.tolist() == [2 * MIB, 2 * MIB, 2 * MIB, 1 * MIB]
    assert sprayed.slices.path.tolist() == [7, 8, 9, 10]


def test_a_busy_path_gets_what_it_ends_in_time() -> None:
    queued = MIB // 1024 * 100
    sprayed = spray(batch([3 * MIB]), paths([100, 100], [0, queued]), 64 * KIB)
    assert sprayed.slices.length.tolist() == [2 * MIB, 1 * MIB]


def test_little_goes_by_one_path() -> None:
    sprayed = spray(batch([100, 200, 0, 300]), paths([300, 100, 200], [0, 0, 0]), 64 * KIB)
    assert set(sprayed.slices.path.tolist()) == {8}
    assert sprayed.slices.length.tolist() == [100, 200, 300]


def test_nothing_makes_no_slices() -> None:
    assert len(spray(batch([]), paths([1], [0]), CUT_BYTES).slices.length) == 0
    assert len(spray(batch([0, 0]), paths([1, 2], [0, 0]), CUT_BYTES).slices.length) == 0


def test_the_largest_batch_fits() -> None:
    sprayed = spray(batch([LENGTH_MAX] * 4), paths([20, 30], [0, 0]), 64 * KIB)
    assert int(sprayed.slices.length.sum()) == 4 * LENGTH_MAX


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((batch([1]), paths([], []), CUT_BYTES), "1 to 64 paths"),
        ((batch([1]), paths([0], [0]), CUT_BYTES), "cost"),
        ((batch([1]), paths([1], [-1]), CUT_BYTES), "busy"),
        ((batch([1]), paths([1], [0]), 5_000), "multiple"),
        ((batch([LENGTH_MAX + 1]), paths([1], [0]), CUT_BYTES), "longer than"),
        ((batch([LENGTH_MAX] * 64), paths([COST_MAX], [0]), CUT_BYTES), "too slow"),
        (
            (Transfers(*(column.astype(np.int64) for column in batch([1]))), paths([1], [0]), CUT_BYTES),
            "uint64",
        ),
    ],
)
def test_what_does_not_fit_is_refused(given: tuple[Any, Any, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        spray(*given)
