"""What each kernel must compute, in plain Python: the oracles of the property tests, never used in service.

They take lists of Python integers (which cannot overflow) and return lists of tuples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

CUT_BYTES = 4_096


class Cutting(NamedTuple):
    """Bounds of `moonpool.kernels.striping.SliceBounds` that decide where a transfer is cut."""

    stripe_min_bytes: int
    slice_min_bytes: int
    slice_max_bytes: int
    slices_per_path: int


def cut_lengths(length: int, path_count: int, bounds: Cutting) -> list[int]:
    """The sizes of a transfer's slices, in order."""
    if length < bounds.stripe_min_bytes:
        return [length] if length else []
    even = -(-length // (path_count * bounds.slices_per_path))
    usual = -(-even // CUT_BYTES) * CUT_BYTES
    usual = max(bounds.slice_min_bytes, min(usual, bounds.slice_max_bytes))
    # As many usual slices as leave a rest that may stand alone; then the rest, and what it must join.
    number = next(n for n in count() if length - n * usual < usual + bounds.slice_min_bytes)
    rest = length - number * usual
    if rest <= max(usual, bounds.slice_max_bytes):
        return [usual] * number + ([rest] if rest else [])
    half = rest // 2 // CUT_BYTES * CUT_BYTES
    return [usual] * number + [half, rest - half]


def deal_greedily(
    sizes: Sequence[int], cost: Sequence[int], busy: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Which path each slice goes to, and when each path is free in the end (ps, before saturation)."""
    free = list(busy)
    chosen = []
    for size in sizes:
        ends = [at + -(-size // 1024) * price for at, price in zip(free, cost, strict=True)]
        best = ends.index(min(ends))
        free[best] = ends[best]
        chosen.append(best)
    return chosen, free


def rows(
    transfers: Sequence[tuple[int, int, int]], path_count: int, bounds: Cutting
) -> Iterator[tuple[int, int, int, int]]:
    """(transfer, local, offset, length) of every slice of transfers given as (local, offset, length)."""
    for index, (local, offset, length) in enumerate(transfers):
        done = 0
        for size in cut_lengths(length, path_count, bounds):
            yield index, local + done, offset + done, size
            done += size


def split_evenly(lengths: Sequence[int], paths: int, slice_min: int) -> list[tuple[int, int, int, int]]:
    """(transfer, begin, end, path) of every slice when bytes are shared evenly over equal paths."""
    total = sum(lengths)
    used = max(1, min(paths, total // slice_min))
    found, start = [], 0
    for index, length in enumerate(lengths):
        # Where the shares of paths 0, 1, ... end in this transfer, each moved to where a cut is allowed.
        ends = [
            allowed_cut((path + 1) * total // used - start, length, slice_min) for path in range(used - 1)
        ]
        begins = [0, *ends]
        found += [
            (index, begin, end, path)
            for path, (begin, end) in enumerate(zip(begins, [*ends, length], strict=True))
            if begin < end
        ]
        start += length
    return found


def allowed_cut(at: int, length: int, slice_min: int) -> int:
    """Where a transfer is cut instead of at `at`; 0 and `length` mean not at all."""
    if length < 2 * slice_min:
        return 0 if 2 * at < length else length
    place = max(0, at) // CUT_BYTES * CUT_BYTES
    if place < slice_min:
        return 0
    return place if place <= length - slice_min else length


def share_units(units: int, cost: Sequence[int], busy: Sequence[int]) -> list[int]:
    """How many equal units each path gets when each unit goes where it ends first (ties: the first path)."""
    shares = [0] * len(cost)
    for _ in range(units):
        ends = [start + (held + 1) * price for start, held, price in zip(busy, shares, cost, strict=True)]
        shares[ends.index(min(ends))] += 1
    return shares


def share_at_least(units: int, units_min: int, cost: Sequence[int], busy: Sequence[int]) -> list[int]:
    """The same, where a path gets `units_min` or nothing.

    The smallest share is left out (of equal ones the last path's), until none is too small, or one is left.
    """
    used = list(range(len(cost)))
    while True:
        shares = share_units(units, [cost[path] for path in used], [busy[path] for path in used])
        small = [place for place, share in enumerate(shares) if share < units_min]
        if not small or len(used) == 1:
            held = dict(zip(used, shares, strict=True))
            return [held.get(path, 0) for path in range(len(cost))]
        del used[max(small, key=lambda place: (-shares[place], place))]
