"""Cuts transfers into slices and deals the slices over paths.

Both kernels promise: the slices of a transfer cover it exactly, in order, without gaps or empty slices; a
transfer of 0 bytes has none; no slice is smaller than the lower bound unless its whole transfer is; cuts lie
on multiples of 4096 bytes from the transfer's start, since the system copies to aligned pages more than twice
as fast.

`stripe_evenly` is for paths of one speed (the lanes of one peer): it gives each path one run of about equal
bytes, in the order of the transfers, which takes the fewest slices. `stripe_by_rate` is for all others: it
is greedy, each slice goes to the path where it is expected to end first, (busy + slice) x cost, in whole
picoseconds, so that every machine deals alike.
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
#: Below this a slice costs more than the balance it brings.
EVEN_SLICE_MIN_BYTES: Final = 65_536
#: Slowest path that is told apart from a slower one (about 0.5 MB/s).
COST_MAX: Final = 1 << 31
#: Times saturate here: with COST_MAX and LENGTH_MAX no sum leaves 63 bits.
BUSY_MAX_PS: Final = 1 << 62
#: Most bytes of one call, however many transfers they are.
TOTAL_MAX: Final = 1 << 62
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


class EvenShares(NamedTuple):
    """What `_split_evenly` divides: `total` bytes over `paths` paths."""

    total: int
    paths: int
    slice_min_bytes: int


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


def stripe_evenly(
    local: U64, offset: U64, length: U64, paths: int, slice_min_bytes: int = EVEN_SLICE_MIN_BYTES
) -> Slices:
    """Slices for `paths` equal paths: path 0 has the first bytes, the last path the last ones.

    The arrays are uint64[n], as in `Transfers`. A path's bytes differ from an even share by less than twice
    `slice_min_bytes`; paths get nothing when there is too little for all. At most n + paths - 1 slices.
    Raises `ValueError` for arrays or numbers that do not fit. O(n + paths).
    """
    transfers = _inputs(Transfers(local, offset, length))
    if not 1 <= paths <= PATHS_MAX:
        raise ValueError(f"there must be 1 to {PATHS_MAX} paths, not {paths}")
    if slice_min_bytes < CUT_BYTES or slice_min_bytes % CUT_BYTES or slice_min_bytes > LENGTH_MAX:
        raise ValueError(f"slice_min_bytes must be a multiple of {CUT_BYTES} up to {LENGTH_MAX}")
    total = _total_bytes(transfers.length)
    if total < 0:
        raise ValueError(f"a transfer is longer than {LENGTH_MAX} bytes, or all of them than {TOTAL_MAX}")
    # Fewer paths when their shares would be smaller than a slice may be.
    used = max(1, min(paths, total // slice_min_bytes))
    slices = _empty_slices(len(length) + used - 1)
    count = _split_evenly(transfers, EvenShares(total, used, slice_min_bytes), slices)
    return Slices(
        slices.transfer[:count],
        slices.local[:count],
        slices.offset[:count],
        slices.length[:count],
        slices.path[:count],
    )


def stripe_by_rate(transfers: Transfers, paths: Paths, bounds: SliceBounds) -> tuple[Slices, I64]:
    """Slices by least expected completion time, and when each path will then be free (int64[p], ps).

    Raises `ValueError` for arrays or bounds that do not fit together, and when `slices_max` is not enough.
    O(n + slices x paths); the arguments are left as they are.
    """
    transfers = _inputs(transfers)
    _check_arrays(len(paths.id), np.uint16, id=paths.id)
    _check_arrays(len(paths.id), np.int64, cost_ps_per_kib=paths.cost_ps_per_kib, busy_ps=paths.busy_ps)
    count = _checked_count(transfers, len(paths.id), bounds)
    if paths.cost_ps_per_kib.min() < 1 or paths.cost_ps_per_kib.max() > COST_MAX:
        raise ValueError(f"a path's cost must be 1 to {COST_MAX} ps per KiB")
    if paths.busy_ps.min() < 0 or paths.busy_ps.max() > BUSY_MAX_PS:
        raise ValueError(f"a path's busy time must be 0 to {BUSY_MAX_PS} ps")
    slices, busy_ps = _empty_slices(count), paths.busy_ps.copy()
    known = Paths(_read_only(paths.id), _read_only(paths.cost_ps_per_kib), _read_only(paths.busy_ps))
    _deal_greedily(transfers, known, bounds, slices, busy_ps)
    return slices, busy_ps


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    """A view that the kernels see as one type, whether or not the caller's array can be written."""
    view = array.view()
    view.flags.writeable = False
    return view


def _inputs(transfers: Transfers) -> Transfers:
    _check_arrays(len(transfers.length), np.uint64, **transfers._asdict())
    return Transfers(*map(_read_only, transfers))


def _check_arrays(count: int, dtype: type[np.generic], **arrays: NDArray[Any]) -> None:
    # Another type or layout would not fail: numba would take a second to compile the kernel for it.
    for name, array in arrays.items():
        if array.shape != (count,) or array.dtype != dtype or not array.flags.c_contiguous:
            raise ValueError(f"{name} must be a contiguous {np.dtype(dtype).name}[{count}]")


def _checked_count(transfers: Transfers, path_count: int, bounds: SliceBounds) -> int:
    if not 1 <= path_count <= PATHS_MAX:
        raise ValueError(f"there must be 1 to {PATHS_MAX} paths, not {path_count}")
    stripe_min, slice_min, slice_max, per_path, slices_max = bounds
    if slice_min < CUT_BYTES or slice_min % CUT_BYTES or slice_max % CUT_BYTES or slice_max < 2 * slice_min:
        raise ValueError(f"slice bounds must be multiples of {CUT_BYTES}, the upper at least twice the lower")
    if not 0 <= stripe_min <= slice_max <= LENGTH_MAX or not 1 <= per_path <= SLICES_PER_PATH_MAX:
        raise ValueError(
            f"stripe_min must not be above slice_max, and slices_per_path be 1 to {SLICES_PER_PATH_MAX}"
        )
    count = _count_slices(transfers.length, path_count, bounds)
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
def _total_bytes(lengths: U64) -> int:
    """Bytes of all transfers; -1 when one is too long or all of them are."""
    total = 0
    for index in range(len(lengths)):
        if lengths[index] > np.uint64(LENGTH_MAX) or total > TOTAL_MAX:
            return -1
        total += int(np.int64(lengths[index]))
    return total if total <= TOTAL_MAX else -1


@jit
def _border(path: int, shares: EvenShares) -> int:
    """Where the share of a path ends, counted over all transfers."""
    # In two parts, since paths x total may not fit 63 bits.
    even = shares.total // shares.paths
    return (path + 1) * even + (path + 1) * (shares.total % shares.paths) // shares.paths


@jit
def _snap(at: int, length: int, slice_min: int) -> int:
    """Where a transfer is cut instead of at `at`, less than `slice_min` away; 0 and `length`: not at all."""
    if at <= 0 or at >= length:
        return min(max(at, 0), length)
    if length < 2 * slice_min:
        return 0 if 2 * at < length else length
    place = at // CUT_BYTES * CUT_BYTES
    if place < slice_min:
        return 0
    return place if length - place >= slice_min else length


@jit
def _split_evenly(transfers: Transfers, shares: EvenShares, out: Slices) -> int:
    """Fills `out` and returns how many slices there are."""
    row = 0
    path = 0
    begin = 0  # of the transfer, counted over all of them
    for index in range(len(transfers.length)):
        length = int(np.int64(transfers.length[index]))
        done = 0
        while done < length:
            end = length
            if path + 1 < shares.paths:
                end = _snap(_border(path, shares) - begin, length, shares.slice_min_bytes)
            if end <= done:
                path += 1
                continue
            out.transfer[row] = index
            out.local[row] = transfers.local[index] + np.uint64(done)
            out.offset[row] = transfers.offset[index] + np.uint64(done)
            out.length[row] = end - done
            out.path[row] = path
            done = end
            row += 1
        begin += length
    return row
