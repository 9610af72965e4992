"""Striping: the kernels against plain Python, and what no cutting or dealing may break."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moonpool.kernels.reference import Cutting, cut_lengths, deal_greedily, deal_in_turn, rows
from moonpool.kernels.striping import (
    BUSY_MAX_PS,
    COST_MAX,
    CUT_BYTES,
    Paths,
    SliceBounds,
    Slices,
    Transfers,
    cut,
    cut_equal,
)

SLICES_MAX = 5_000
ADDRESS = st.integers(0, (1 << 57) - (1 << 41))
# Sizes of all scales, most of them not multiples of anything.
LENGTH = st.one_of(st.integers(0, 70_000), st.integers(0, 1 << 24), st.just(0), st.just(1 << 40))
Rows = list[tuple[int, int, int]]


@st.composite
def bounds(draw: st.DrawFn) -> SliceBounds:
    slice_min = CUT_BYTES * draw(st.integers(1, 64))
    slice_max = max(2 * slice_min, CUT_BYTES * draw(st.integers(1, 4_096)))
    stripe_min = draw(st.integers(0, slice_max))
    return SliceBounds(stripe_min, slice_min, slice_max, draw(st.integers(1, 6)), SLICES_MAX)


@st.composite
def transfer_rows(draw: st.DrawFn, limits: SliceBounds, path_count: int) -> Rows:
    """Transfers as (local, offset, length), few enough slices to look at one by one."""
    found = draw(st.lists(st.tuples(ADDRESS, ADDRESS, LENGTH), max_size=8))
    kept, total = [], 0
    for local, offset, length in found:
        total += length // limits.slice_min_bytes + 2
        if total > SLICES_MAX:
            break
        kept.append((local, offset, length))
    return kept


def as_transfers(found: Rows) -> Transfers:
    columns = np.array(found, np.uint64).reshape(-1, 3).T.copy()
    return Transfers(columns[0], columns[1], columns[2])


def cutting(limits: SliceBounds) -> Cutting:
    return Cutting(*limits[:4])


def check_cover(found: Rows, slices: Slices, limits: SliceBounds) -> None:
    """Exact cover in order, and the bounds of every slice."""
    row = 0
    for index, (local, offset, length) in enumerate(found):
        done, pieces = 0, 0
        while done < length:
            size = int(slices.length[row])
            assert size > 0
            assert size <= limits.slice_max_bytes
            assert size >= limits.slice_min_bytes or size == length
            assert done % CUT_BYTES == 0
            assert (slices.transfer[row], slices.local[row], slices.offset[row]) == (
                index,
                local + done,
                offset + done,
            )
            done += size
            pieces += 1
            row += 1
        assert done == length
        assert pieces <= 1 or length >= limits.stripe_min_bytes
    assert row == len(slices.length)


@given(st.data(), bounds(), st.integers(1, 9))
def test_dealing_in_turn_is_what_the_reference_says(
    data: st.DataObject, limits: SliceBounds, path_count: int
) -> None:
    found = data.draw(transfer_rows(limits, path_count))
    first = data.draw(st.integers(0, path_count - 1))
    ids = np.arange(path_count, dtype=np.uint16) + np.uint16(100)
    slices, turn = cut_equal(as_transfers(found), ids, limits, first)
    check_cover(found, slices, limits)
    expected = list(rows(found, path_count, cutting(limits)))
    assert list(zip(*(column.tolist() for column in slices[:4]), strict=True)) == expected
    assert slices.path.tolist() == [100 + one for one in deal_in_turn(len(expected), path_count, first)]
    assert turn == (first + len(expected)) % path_count


@given(st.data(), bounds(), st.integers(1, 9))
def test_greedy_dealing_is_what_the_reference_says(
    data: st.DataObject, limits: SliceBounds, path_count: int
) -> None:
    found = data.draw(transfer_rows(limits, path_count))
    per_path = st.tuples(st.integers(1, COST_MAX), st.integers(0, 1 << 50))
    speeds = data.draw(st.lists(per_path, min_size=path_count, max_size=path_count))
    cost, busy = (list(column) for column in zip(*speeds, strict=True))
    ids = np.arange(path_count, dtype=np.uint16)[::-1].copy()
    paths = Paths(ids, np.array(cost, np.int64), np.array(busy, np.int64))
    slices, after = cut(as_transfers(found), paths, limits)
    check_cover(found, slices, limits)
    expected = list(rows(found, path_count, cutting(limits)))
    assert list(zip(*(column.tolist() for column in slices[:4]), strict=True)) == expected
    chosen, free = deal_greedily([size for *_, size in expected], cost, busy)
    if max(free) <= BUSY_MAX_PS:
        assert slices.path.tolist() == [path_count - 1 - one for one in chosen]
        assert after.tolist() == free
    else:
        assert after.max() == BUSY_MAX_PS
    assert paths.busy_ps.tolist() == busy


@given(st.data(), bounds(), st.integers(2, 6))
def test_no_path_idles_while_a_slower_end_waits_elsewhere(
    data: st.DataObject, limits: SliceBounds, path_count: int
) -> None:
    """When each slice was dealt, no other path would have ended it sooner; nor would a path that got none."""
    found = data.draw(transfer_rows(limits, path_count))
    cost = data.draw(st.lists(st.integers(1, 10**7), min_size=path_count, max_size=path_count))
    paths = Paths(
        np.arange(path_count, dtype=np.uint16), np.array(cost, np.int64), np.zeros(path_count, np.int64)
    )
    slices, after = cut(as_transfers(found), paths, limits)
    free = [0] * path_count
    for size, path in zip(slices.length.tolist(), slices.path.tolist(), strict=True):
        kib = -(-size // 1024)
        free[path] += kib * cost[path]
        assert all(free[path] <= free[other] + kib * cost[other] for other in range(path_count))
    assert after.tolist() == free


@given(bounds(), st.integers(1, 9), LENGTH)
def test_the_reference_itself_covers_and_stays_in_bounds(
    limits: SliceBounds, path_count: int, length: int
) -> None:
    if length // limits.slice_min_bytes > SLICES_MAX:
        return
    sizes = cut_lengths(length, path_count, cutting(limits))
    assert sum(sizes) == length
    assert all(0 < size <= limits.slice_max_bytes for size in sizes)
    assert all(size >= limits.slice_min_bytes for size in sizes) or len(sizes) == 1
