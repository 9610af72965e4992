"""Deals a whole batch over paths of different speeds: one run of bytes for each path, all ending together.

Bytes are dealt in units of 4096, each to the path where it would end first; that is the least makespan that
whole units can have, and it is found without dealing them one by one: at the first picosecond by which all
units could have ended, each path has those that it ends by then. Paths whose share would be smaller than a
slice may be get nothing. The shares are then laid over the transfers in order, so that n transfers over p
paths make at most n + p - 1 slices. Integers only, so that every machine deals alike.

The slices of a transfer cover it exactly, in order, without gaps; none is empty; none is smaller than
`slice_min_bytes` unless its transfer is; cuts lie on multiples of 4096 bytes from the transfer's start. A
border between two paths moves for that by less than `slice_min_bytes`.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moonpool.kernels._jit import jit
from moonpool.kernels.striping import (
    BUSY_MAX_PS,
    COST_MAX,
    CUT_BYTES,
    I64,
    LENGTH_MAX,
    TOTAL_MAX,
    U16,
    U64,
    Paths,
    Slices,
    Transfers,
)

#: More would cost more to choose among than they bring.
SPRAY_PATHS_MAX: Final = 64

_KIB_PER_UNIT: Final = CUT_BYTES // 1024


class Sprayed(NamedTuple):
    """Slices, one row each by transfer and address, and when each path will be free (int64[p], ps)."""

    slices: Slices
    free_ps: I64


def spray(transfers: Transfers, paths: Paths, slice_min_bytes: int) -> Sprayed:
    """Slices over paths of any speeds; see the module. Paths come from `striping.expected_paths`.

    `slice_min_bytes` is a multiple of 4096. Raises `ValueError` for arrays or numbers that do not fit, and
    for batches that would take longer than 53 days. O(n + p^2 log).
    """
    count = len(paths.id)
    if not 1 <= count <= SPRAY_PATHS_MAX:
        raise ValueError(f"there must be 1 to {SPRAY_PATHS_MAX} paths, not {count}")
    if slice_min_bytes < CUT_BYTES or slice_min_bytes % CUT_BYTES or slice_min_bytes > LENGTH_MAX:
        raise ValueError(f"slice_min_bytes must be a multiple of {CUT_BYTES} up to {LENGTH_MAX}")
    transfers = _checked(transfers, paths)
    total = _total_bytes(transfers.length)
    if total < 0:
        raise ValueError(f"a transfer is longer than {LENGTH_MAX} bytes, or all of them than {TOTAL_MAX}")
    units = np.zeros(count, np.int64)
    busy, cost = paths.busy_ps.copy(), paths.cost_ps_per_kib * _KIB_PER_UNIT
    if not _share(-(-total // CUT_BYTES), slice_min_bytes // CUT_BYTES, (busy, cost), units):
        raise ValueError("the paths are too slow or too busy for so many bytes")
    free = paths.busy_ps + units * cost
    used = np.flatnonzero(units)
    room = len(transfers.length) + max(len(used), 1) - 1
    rows = Slices(
        np.empty(room, np.uint32),
        np.empty(room, np.uint64),
        np.empty(room, np.uint64),
        np.empty(room, np.uint64),
        np.empty(room, np.uint16),
    )
    made = _lay(transfers, (paths.id[used], np.cumsum(units[used]) * CUT_BYTES), slice_min_bytes, rows)
    cut = Slices(
        rows.transfer[:made], rows.local[:made], rows.offset[:made], rows.length[:made], rows.path[:made]
    )
    return Sprayed(cut, free)


def _checked(transfers: Transfers, paths: Paths) -> Transfers:
    """The transfers as views of the one type that the kernels are compiled for."""
    for name, column in transfers._asdict().items():
        _check_array(name, column, (len(transfers.length), np.uint64))
    for name, kind in (("id", np.uint16), ("cost_ps_per_kib", np.int64), ("busy_ps", np.int64)):
        _check_array(name, getattr(paths, name), (len(paths.id), kind))
    if paths.cost_ps_per_kib.min() < 1 or paths.cost_ps_per_kib.max() > COST_MAX:
        raise ValueError(f"a path's cost must be 1 to {COST_MAX} ps per KiB")
    if paths.busy_ps.min() < 0 or paths.busy_ps.max() > BUSY_MAX_PS:
        raise ValueError(f"a path's busy time must be 0 to {BUSY_MAX_PS} ps")
    views = [column.view() for column in transfers]
    for view in views:
        view.flags.writeable = False
    return Transfers(*views)


def _check_array(name: str, column: NDArray[Any], wanted: tuple[int, type[np.generic]]) -> None:
    # Another type or layout would not fail: numba would take a second to compile the kernel for it.
    count, kind = wanted
    if column.shape != (count,) or column.dtype != kind or not column.flags.c_contiguous:
        raise ValueError(f"{name} must be a contiguous {np.dtype(kind).name}[{count}]")


# Compiled below. Lengths and times are int64; addresses and offsets stay uint64.


@jit
def _total_bytes(lengths: U64) -> int:
    """Bytes of all transfers; -1 when one is too long or all of them are."""
    total = 0
    for index in range(len(lengths)):
        if lengths[index] > np.uint64(LENGTH_MAX) or total > TOTAL_MAX:
            return -1
        total += int(np.int64(lengths[index]))
    return total if total <= TOTAL_MAX else -1


@jit
def _ended_by(at_ps: int, path: int, speeds: tuple[I64, I64]) -> int:
    """Units that a path could have ended by a time; none for a path that is left out (its cost is 0)."""
    busy, cost = speeds
    return (at_ps - busy[path]) // cost[path] if cost[path] > 0 and at_ps > busy[path] else 0


@jit
def _moment(units: int, speeds: tuple[I64, I64]) -> int:
    """The first time by which all paths together could have ended the units; -1 when it is out of range."""
    low, high = 0, BUSY_MAX_PS
    while low < high:
        middle = low + (high - low) // 2
        ended = 0
        for path in range(len(speeds[0])):
            ended += _ended_by(middle, path, speeds)
            if ended >= units:
                break
        if ended >= units:
            high = middle
        else:
            low = middle + 1
    ended = 0
    for path in range(len(speeds[0])):
        ended += min(_ended_by(low, path, speeds), units)
        if ended >= units:
            return low
    return -1


@jit
def _share(units: int, units_min: int, speeds: tuple[I64, I64], out: I64) -> bool:
    """Fill `out` with each path's units; a path is left out by making its cost 0. False when out of range."""
    busy, cost = speeds
    left = len(busy)
    while True:
        at = _moment(units, (busy, cost))
        if at < 0:
            return False
        # What ends before that moment, and of what ends at it as much as there is.
        rest = units
        for path in range(len(busy)):
            out[path] = _ended_by(at - 1, path, (busy, cost))
            rest -= out[path]
        for path in range(len(busy)):
            if rest > 0 and _ended_by(at, path, (busy, cost)) > out[path]:
                out[path] += 1
                rest -= 1
        if left == 1:
            return True
        least = -1
        for path in range(len(busy)):
            if cost[path] > 0 and out[path] < units_min and (least < 0 or out[path] <= out[least]):
                least = path
        if least < 0:
            return True
        cost[least] = 0
        left -= 1


@jit
def _snap(at: int, length: int, slice_min: int) -> int:
    """Where a transfer is cut instead of at `at`, less than `slice_min` away; 0 and `length`: not at all."""
    if at <= 0 or at >= length:
        return min(max(at, 0), length)
    if length < 2 * slice_min:
        return 0 if 2 * at < length else length
    place = at // CUT_BYTES * CUT_BYTES
    if place < slice_min:
        return 0 if 2 * at < slice_min else slice_min
    if length - place < slice_min:
        return length if 2 * (length - at) < slice_min else (length - slice_min) // CUT_BYTES * CUT_BYTES
    return place


@jit
def _lay(
    transfers: Transfers,
    runs: tuple[U16, I64],
    slice_min: int,
    out: Slices,
) -> int:
    """Lay the paths' runs (ids, and where each ends) over the transfers; how many slices that made."""
    ids, ends = runs
    row, path, begin = 0, 0, 0
    for index in range(len(transfers.length)):
        length = int(np.int64(transfers.length[index]))
        done = 0
        while done < length:
            end = length
            if path + 1 < len(ids):
                end = _snap(ends[path] - begin, length, slice_min)
                if 0 < end - done < slice_min and end < length:
                    end = min(done + slice_min, length) if length - done >= 2 * slice_min else length
            if end <= done:
                path += 1
                continue
            out.transfer[row] = index
            out.local[row] = transfers.local[index] + np.uint64(done)
            out.offset[row] = transfers.offset[index] + np.uint64(done)
            out.length[row] = end - done
            out.path[row] = ids[path]
            done = end
            row += 1
        begin += length
    return row
