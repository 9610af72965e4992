"""Striping: the kernels against plain Python, and what no cutting or dealing may break."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moonpool.kernels.reference import Cutting, cut_lengths, deal_greedily, rows, split_evenly
from moonpool.kernels.striping import (
    BUSY_MAX_PS,
    COST_MAX,
    CUT_BYTES,
    Paths,
    SliceBounds,
    Slices,
    Transfers,
    stripe_by_rate,
    stripe_evenly,
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
def transfer_rows(draw: st.DrawFn, limits: SliceBounds) -> Rows:
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


def check_cover(found: Rows, slices: Slices, slice_min_bytes: int) -> None:
    """Exact cover in order; no slice too small, and every cut where it may be."""
    row = 0
    for index, (local, offset, length) in enumerate(found):
        done = 0
        while done < length:
            size = int(slices.length[row])
            assert size > 0
            assert size >= slice_min_bytes or size == length
            assert done % CUT_BYTES == 0
            place = (slices.transfer[row], slices.local[row], slices.offset[row])
            assert place == (index, local + done, offset + done)
            done += size
            row += 1
        assert done == length
    assert row == len(slices.length)


def check_sizes(slices: Slices, limits: SliceBounds) -> None:
    """No slice too large, and whole transfers below `stripe_min_bytes`."""
    assert all(size <= limits.slice_max_bytes for size in slices.length.tolist())
    cut = slices.transfer[1:][slices.transfer[1:] == slices.transfer[:-1]]
    for index in set(cut.tolist()):
        assert int(slices.length[slices.transfer == index].sum()) >= limits.stripe_min_bytes


SMALL_LENGTH = st.one_of(st.integers(0, 300_000), st.integers(0, 1 << 24), st.just(0))
EVEN_ROWS = st.lists(st.tuples(ADDRESS, ADDRESS, st.one_of(SMALL_LENGTH, st.just(1 << 40))), max_size=12)


@given(EVEN_ROWS, st.integers(1, 9), st.integers(1, 40))
def test_even_shares_are_what_the_reference_says(found: Rows, path_count: int, pages: int) -> None:
    slice_min = pages * CUT_BYTES
    slices = stripe_evenly(*as_transfers(found), path_count, slice_min)
    check_cover(found, slices, slice_min)
    expected = split_evenly([length for *_, length in found], path_count, slice_min)
    assert list(zip(slices.transfer.tolist(), slices.path.tolist(), slices.length.tolist(), strict=True)) == [
        (index, path, end - begin) for index, begin, end, path in expected
    ]


@given(EVEN_ROWS, st.integers(1, 9), st.integers(1, 40))
def test_even_shares_are_even_and_few(found: Rows, path_count: int, pages: int) -> None:
    slice_min = pages * CUT_BYTES
    slices = stripe_evenly(*as_transfers(found), path_count, slice_min)
    total = sum(length for *_, length in found)
    used = max(1, min(path_count, total // slice_min))
    loads = [0] * path_count
    for path, size in zip(slices.path.tolist(), slices.length.tolist(), strict=True):
        loads[path] += size
    assert all(abs(load - total / used) < 2 * slice_min for load in loads[:used])
    assert not any(loads[used:])
    assert slices.path.tolist() == sorted(slices.path.tolist())
    assert len(slices.length) <= sum(length > 0 for *_, length in found) + used - 1


@given(st.data(), bounds(), st.integers(1, 9))
def test_greedy_dealing_is_what_the_reference_says(
    data: st.DataObject, limits: SliceBounds, path_count: int
) -> None:
    found = data.draw(transfer_rows(limits))
    per_path = st.tuples(st.integers(1, COST_MAX), st.integers(0, 1 << 50))
    speeds = data.draw(st.lists(per_path, min_size=path_count, max_size=path_count))
    cost, busy = (list(column) for column in zip(*speeds, strict=True))
    ids = np.arange(path_count, dtype=np.uint16)[::-1].copy()
    paths = Paths(ids, np.array(cost, np.int64), np.array(busy, np.int64))
    slices, after = stripe_by_rate(as_transfers(found), paths, limits)
    check_cover(found, slices, limits.slice_min_bytes)
    check_sizes(slices, limits)
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
    found = data.draw(transfer_rows(limits))
    cost = data.draw(st.lists(st.integers(1, 10**7), min_size=path_count, max_size=path_count))
    paths = Paths(
        np.arange(path_count, dtype=np.uint16), np.array(cost, np.int64), np.zeros(path_count, np.int64)
    )
    slices, after = stripe_by_rate(as_transfers(found), paths, limits)
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
