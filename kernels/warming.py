"""Compiles every kernel for the types it is used with, so that no request pays for it."""

from __future__ import annotations

import numpy as np

from moonpool.kernels.placement import (
    COST_ROWS,
    LINK_ROWS,
    LOAD_ROWS,
    SPEED_ROWS,
    Rules,
    Standing,
    affinity_costs,
)
from moonpool.kernels.spraying import spray
from moonpool.kernels.striping import (
    CUT_BYTES,
    SliceBounds,
    Transfers,
    expected_paths,
    stripe_by_rate,
    stripe_evenly,
)


def warmup() -> None:
    """Calls each kernel once on tiny arrays; some seconds uncached, a tenth of it with a cache.

    A server calls it before it says that it is ready.
    """
    warm_striping()
    warm_placement()


def warm_striping() -> None:
    """The kernels of transfers over several lanes."""
    lengths = np.array([CUT_BYTES, 3 * CUT_BYTES], np.uint64)
    transfers = Transfers(np.zeros(2, np.uint64), np.zeros(2, np.uint64), lengths)
    bounds = SliceBounds(CUT_BYTES, CUT_BYTES, 2 * CUT_BYTES, 1, 16)
    ids = np.arange(2, dtype=np.uint16)
    ones = np.ones(2, np.uint64)
    stripe_by_rate(transfers, expected_paths(ids, ones, ones, ones), bounds)
    stripe_evenly(*transfers, paths=2, slice_min_bytes=CUT_BYTES)
    spray(transfers, expected_paths(ids, ones, ones, ones), CUT_BYTES)


def warm_placement() -> None:
    """The kernel of the affinity policy."""
    rows = [np.ones((count, 2)) for count in (LOAD_ROWS, SPEED_ROWS, LINK_ROWS)]
    standing = Standing(rows[0], rows[1], rows[2], np.zeros(2), np.arange(2), np.zeros(2))
    rules = Rules(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, fetch=True, mixed=True)
    room = (np.zeros((COST_ROWS, 2)), np.zeros(2, np.int64))
    affinity_costs(np.zeros(2, np.int32), standing, rules, (1.0, 0.0), room)
