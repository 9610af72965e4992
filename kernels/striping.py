"""Cuts transfers into slices and deals the slices over paths.

Both kernels promise: the slices of a transfer cover it exactly, in order, without gaps or empty slices; a
transfer of 0 bytes has none; no slice is larger than `slice_max_bytes`, nor smaller than `slice_min_bytes`
unless its whole transfer is; cuts lie on multiples of 4096 bytes from the transfer's start, since the kernel
copies to aligned pages more than twice as fast. Transfers below `stripe_min_bytes` stay whole.

`cut` is greedy: each slice goes to the path where it is expected to end first, (busy + slice) x cost, all in
whole picoseconds, so that every machine deals alike. `cut_equal` deals in turn, for paths of one speed.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from moonpool.kernels._jit import jit

U64: TypeAlias = NDArray[np.uint64]
U32: TypeAlias = NDArray[np.uint32]
U16: TypeAlias = NDArray[np.uint16]
I64: TypeAlias = NDArray[np.int64]

#: Cuts lie on multiples of this.
CUT_BYTES: Final = 4_096
#: Longest transfer, as on the wire.
LENGTH_MAX: Final = 1 << 40
#: Slowest path that is told apart from a slower one (about 0.5 MB/s).
COST_MAX: Final = 1 << 31
#: Times saturate here: with COST_MAX and LENGTH_MAX no sum leaves 63 bits.
BUSY_MAX_PS: Final = 1 << 62
PATHS_MAX: Final = 0xFFFF
SLICES_PER_PATH_MAX: Final = 1_024

_PS_PER_NS: Final = 1_000
_PS_KIB_PER_S: Final = 1_024 * 10**12


class Transfers(NamedTuple):
    """uint64[n] each: local address, offset in the remote region, length in bytes (at most 2^40)."""

    local: U64
    offset: U64
    length: U64


class Paths(NamedTuple):
    """What each path should take: ids uint16[p]; picoseconds per KiB, and until it is free, int64[p]."""

    id: U16
    cost_ps_per_kib: I64
    busy_ps: I64


class SliceBounds(NamedTuple):
    """How transfers are cut, in bytes; multiples of 4096, and `slice_max` at least twice `slice_min`.

    A transfer is cut for about `slices_per_path` slices on each path: 1 where paths are equal, more where the
    fast ones should take a larger share. `slices_max` bounds the slices of one call.
    """

    stripe_min_bytes: int
    slice_min_bytes: int
    slice_max_bytes: int
    slices_per_path: int
    slices_max: int


class Slices(NamedTuple):
    """One row a slice, by transfer and then by address: transfer uint32, path uint16, the others uint64."""

    transfer: U32
    local: U64
    offset: U64
    length: U64
    path: U16


def expected_paths(ids: U16, rate: U64, queued_bytes: U64, latency_ns: U64) -> Paths:
    """Paths from service rates (bytes per second), bytes already queued and latencies, each [p].

    A penalty (numa, PCI) is expressed by a lower rate. A rate of 0 counts as the slowest.
    """
    _check_arrays(len(ids), np.uint16, id=ids)
    _check_arrays(len(ids), np.uint64, rate=rate, queued_bytes=queued_bytes, latency_ns=latency_ns)
    cost = np.clip(_PS_KIB_PER_S / np.maximum(rate, 1).astype(np.float64), 1, COST_MAX).astype(np.int64)
    # In floating point, since the product may not fit 64 bits; then it saturates.
    busy = queued_bytes.astype(np.float64) / 1024 * cost + latency_ns.astype(np.float64) * _PS_PER_NS
    return Paths(ids, cost, np.minimum(busy, float(BUSY_MAX_PS)).astype(np.int64))


def cut(transfers: Transfers, paths: Paths, bounds: SliceBounds) -> tuple[Slices, I64]:
    """Slices by least expected completion time, and when each path will then be free (int64[p], ps).

    Raises `ValueError` for arrays or bounds that do not fit together, and when `slices_max` is not enough.
    O(n + slices x paths); the arguments are left as they are.
    """
    count = _checked_count(transfers, paths.id, bounds)
    _check_arrays(len(paths.id), np.int64, cost_ps_per_kib=paths.cost_ps_per_kib, busy_ps=paths.busy_ps)
    if paths.cost_ps_per_kib.min() < 1 or paths.cost_ps_per_kib.max() > COST_MAX:
        raise ValueError(f"a path's cost must be 1 to {COST_MAX} ps per KiB")
    if paths.busy_ps.min() < 0 or paths.busy_ps.max() > BUSY_MAX_PS:
        raise ValueError(f"a path's busy time must be 0 to {BUSY_MAX_PS} ps")
    slices, busy_ps = _empty_slices(count), paths.busy_ps.copy()
    _deal_greedily(transfers, paths, bounds, slices, busy_ps)
    return slices, busy_ps


def cut_equal(transfers: Transfers, ids: U16, bounds: SliceBounds, first: int = 0) -> tuple[Slices, int]:
    """Slices dealt over equal paths in turn, beginning with `ids[first]`, and where the next call begins.

    Raises `ValueError` as `cut` does. O(n + slices).
    """
    count = _checked_count(transfers, ids, bounds)
    if not 0 <= first < len(ids):
        raise ValueError(f"the first path must be one of {len(ids)}, not {first}")
    slices = _empty_slices(count)
    return slices, _deal_in_turn(transfers, ids, bounds, slices, first)


def _check_arrays(count: int, dtype: type[np.generic], **arrays: NDArray[Any]) -> None:
    # Another type or layout would not fail: numba would compile the kernel again for it, for a second.
    for name, array in arrays.items():
        if array.shape != (count,) or array.dtype != dtype or not array.flags.c_contiguous:
            raise ValueError(f"{name} must be a contiguous {np.dtype(dtype).name}[{count}]")


def _checked_count(transfers: Transfers, ids: U16, bounds: SliceBounds) -> int:
    _check_arrays(len(transfers.length), np.uint64, **transfers._asdict())
    _check_arrays(len(ids), np.uint16, id=ids)
    if not 1 <= len(ids) <= PATHS_MAX:
        raise ValueError(f"there must be 1 to {PATHS_MAX} paths, not {len(ids)}")
    stripe_min, slice_min, slice_max, per_path, slices_max = bounds
    if slice_min < CUT_BYTES or slice_min % CUT_BYTES or slice_max % CUT_BYTES or slice_max < 2 * slice_min:
        raise ValueError(f"slice bounds must be multiples of {CUT_BYTES}, the upper at least twice the lower")
    if not 0 <= stripe_min <= slice_max <= LENGTH_MAX or not 1 <= per_path <= SLICES_PER_PATH_MAX:
        raise ValueError(
            f"stripe_min must not be above slice_max, and slices_per_path be 1 to {SLICES_PER_PATH_MAX}"
        )
    count = _count_slices(transfers.length, len(ids), bounds)
    if count < 0:
        raise ValueError(f"a transfer is longer than {LENGTH_MAX} bytes")
    if count > slices_max:
        raise ValueError(f"{count} slices are more than {slices_max}; send less at once or larger slices")
    return count


def _empty_slices(count: int) -> Slices:
    return Slices(
        np.empty(count, np.uint32),
        np.empty(count, np.uint64),
        np.empty(count, np.uint64),
        np.empty(count, np.uint64),
        np.empty(count, np.uint16),
    )


# Compiled below. Lengths and times are int64 (numba would turn uint64 with int64 into float64); addresses and
# offsets stay uint64.


@jit
def _usual_bytes(length: int, path_count: int, bounds: SliceBounds) -> int:
    """Size of all slices of a transfer but its last ones."""
    if length < bounds.stripe_min_bytes:
        return length
    shares = path_count * bounds.slices_per_path
    even = (length + shares - 1) // shares
    aligned = (even + CUT_BYTES - 1) // CUT_BYTES * CUT_BYTES
    return min(max(aligned, bounds.slice_min_bytes), bounds.slice_max_bytes)


@jit
def _next_bytes(left: int, usual: int, bounds: SliceBounds) -> int:
    """Size of the next slice when `left` bytes are: a rest that is too small joins or halves the last one."""
    if left <= usual or left - usual >= bounds.slice_min_bytes:
        return min(left, usual)
    if left <= bounds.slice_max_bytes:
        return left
    return left // 2 // CUT_BYTES * CUT_BYTES


@jit
def _count_slices(lengths: U64, path_count: int, bounds: SliceBounds) -> int:
    """How many slices the transfers make; -1 when one is too long."""
    total = 0
    for index in range(len(lengths)):
        if lengths[index] > np.uint64(LENGTH_MAX):
            return -1
        left = int(np.int64(lengths[index]))
        if left == 0:
            continue
        usual = _usual_bytes(left, path_count, bounds)
        if left >= usual + bounds.slice_min_bytes:
            whole = (left - bounds.slice_min_bytes) // usual
            total += whole
            left -= whole * usual
        total += 1 if left <= usual or left <= bounds.slice_max_bytes else 2
    return total


@jit
def _deal_greedily(
    transfers: Transfers, paths: Paths, bounds: SliceBounds, out: Slices, busy_ps: I64
) -> None:
    """Fills `out` and moves `busy_ps` on; both are large enough."""
    row = 0
    for index in range(len(transfers.length)):
        left = int(np.int64(transfers.length[index]))
        usual = _usual_bytes(left, len(paths.id), bounds)
        done = 0
        while left > 0:
            size = _next_bytes(left, usual, bounds)
            kib = (size + 1023) // 1024
            best = 0
            best_ps = min(busy_ps[0] + kib * paths.cost_ps_per_kib[0], BUSY_MAX_PS)
            for path in range(1, len(paths.id)):
                end_ps = min(busy_ps[path] + kib * paths.cost_ps_per_kib[path], BUSY_MAX_PS)
                if end_ps < best_ps:
                    best, best_ps = path, end_ps
            busy_ps[best] = best_ps
            out.transfer[row] = index
            out.local[row] = transfers.local[index] + np.uint64(done)
            out.offset[row] = transfers.offset[index] + np.uint64(done)
            out.length[row] = size
            out.path[row] = paths.id[best]
            done += size
            left -= size
            row += 1


@jit
def _deal_in_turn(transfers: Transfers, ids: U16, bounds: SliceBounds, out: Slices, first: int) -> int:
    """Fills `out`, which is large enough, and returns whose turn is next."""
    row = 0
    turn = first
    for index in range(len(transfers.length)):
        left = int(np.int64(transfers.length[index]))
        usual = _usual_bytes(left, len(ids), bounds)
        done = 0
        while left > 0:
            size = _next_bytes(left, usual, bounds)
            out.transfer[row] = index
            out.local[row] = transfers.local[index] + np.uint64(done)
            out.offset[row] = transfers.offset[index] + np.uint64(done)
            out.length[row] = size
            out.path[row] = ids[turn]
            turn = turn + 1 if turn + 1 < len(ids) else 0
            done += size
            left -= size
            row += 1
    return turn
