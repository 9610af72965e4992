"""Prefix look-ups and cache replay for simulation: which instances hold the start of a chain of blocks."""

from __future__ import annotations

from moonpool.kernels._jit import jit
from moonpool.kernels.cluster_state import ABSENT, I32, I64


@jit
def leading_blocks(newer: I32, ids: I32, out: I32) -> None:
    """How many leading blocks of `ids` each instance holds, into `out`: int32[n]. O(sum of the answers)."""
    for i in range(newer.shape[0]):
        depth = 0
        while depth < ids.shape[0] and newer[i, ids[depth]] != ABSENT:
            depth += 1
        out[i] = depth


@jit
def leading_here(newer: I32, at: int, ids: I32) -> int:
    """How many leading blocks of `ids` instance `at` holds."""
    depth = 0
    while depth < ids.shape[0] and newer[at, ids[depth]] != ABSENT:
        depth += 1
    return depth


@jit
def replay_cache(block_ids: I32, starts: I64, newer: I32, older: I32, capacity: int) -> int:
    """Hits of a trace on one LRU cache of `capacity` blocks, without time; starts: int64[r + 1] into the ids.

    `newer` and `older` are int32[u + 1]: an empty cache is ABSENT everywhere but at u, the list's end, which
    neighbours itself. A block counts when all before it hit too. A prompt's blocks are touched from its end
    to its start, and the cache shrinks to its capacity after each prompt.
    """
    end = newer.shape[0] - 1
    hits = 0
    cached = 0
    for r in range(starts.shape[0] - 1):
        low, high = starts[r], starts[r + 1]
        at = low
        while at < high and newer[block_ids[at]] != ABSENT:
            at += 1
        hits += at - low
        for k in range(high - 1, low - 1, -1):
            block = block_ids[k]
            if newer[block] != ABSENT:
                older[newer[block]] = older[block]
                newer[older[block]] = newer[block]
            else:
                cached += 1
            newest = older[end]
            newer[block] = end
            older[block] = newest
            newer[newest] = block
            older[end] = block
        while cached > capacity:
            oldest = newer[end]
            newer[end] = newer[oldest]
            older[newer[oldest]] = end
            newer[oldest] = ABSENT
            cached -= 1
    return int(hits)
