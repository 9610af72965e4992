"""Hit ratio against cache capacity, without time: how much memory a trace's prefixes need."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moonpool.conductor.trace import Trace
from moonpool.errors import UsageError
from moonpool.kernels.cluster_state import ABSENT
from moonpool.kernels.prefix_sim import replay_cache


def hit_ratio(trace: Trace, capacity_blocks: int) -> float:
    """Share of all blocks that one LRU cache of that many blocks has when the requests come in order.

    A block counts as a hit when all blocks before it in its prompt hit too. O(blocks of the trace).
    """
    if capacity_blocks < 1:
        raise UsageError("a cache has a block or more", field="capacity_blocks", value=str(capacity_blocks))
    newer = np.full(trace.distinct + 1, ABSENT, np.int32)
    older = newer.copy()
    newer[trace.distinct] = older[trace.distinct] = trace.distinct
    hits = replay_cache(trace.block_ids, trace.starts, newer, older, capacity_blocks)
    references = int(trace.starts[-1])
    return hits / references if references else 0.0


def hit_ratios(trace: Trace, capacities: Sequence[int]) -> dict[int, float]:
    """`hit_ratio` for several capacities."""
    return {capacity: hit_ratio(trace, capacity) for capacity in capacities}
