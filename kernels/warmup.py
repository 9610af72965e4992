"""Compiles every kernel for the types it is used with, so that no request pays for it."""

from __future__ import annotations

import numpy as np

from moonpool.kernels.striping import (
    CUT_BYTES,
    SliceBounds,
    Transfers,
    expected_paths,
    stripe_by_rate,
    stripe_evenly,
)


def warmup() -> None:
    """Calls each kernel once on two tiny transfers; about a second uncached, a tenth of it with a cache.

    A server calls it before it says that it is ready.
    """
    lengths = np.array([CUT_BYTES, 3 * CUT_BYTES], np.uint64)
    transfers = Transfers(np.zeros(2, np.uint64), np.zeros(2, np.uint64), lengths)
    bounds = SliceBounds(CUT_BYTES, CUT_BYTES, 2 * CUT_BYTES, 1, 16)
    ids = np.arange(2, dtype=np.uint16)
    ones = np.ones(2, np.uint64)
    stripe_by_rate(transfers, expected_paths(ids, ones, ones, ones), bounds)
    stripe_evenly(*transfers, paths=2, slice_min_bytes=CUT_BYTES)
