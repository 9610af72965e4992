"""Overlap over flat arrays: how deep holders match a chain, how deep all of them do, and what that is worth.

Depths are uint32[3, holders]: leading blocks that a holder has in tier 0 (device), with those behind them in
tier 1 (host), and with those behind these in tier 2 (disk); they never fall from one tier to the next.
"""

from __future__ import annotations

import math
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from moonpool.kernels._jit import jit

U32: TypeAlias = NDArray[np.uint32]
U64: TypeAlias = NDArray[np.uint64]
F64: TypeAlias = NDArray[np.float64]

TIERS: Final = 3
HOLDERS_PER_WORD: Final = 64


@jit
def _match(planes: U64, mixed: bool, out: U32) -> None:
    blocks, words = planes.shape[1], planes.shape[2]
    stages = np.empty(TIERS, np.uint64)
    for word in range(words):
        for tier in range(TIERS):
            stages[tier] = np.uint64(0xFFFFFFFFFFFFFFFF) if mixed or tier == 0 else np.uint64(0)
        alive = True
        for block in range(blocks + 1):
            if not alive:
                break
            alive = False
            inside = np.uint64(0)
            leaving = np.uint64(0)
            for tier in range(TIERS):
                here = planes[tier, block, word] if block < blocks else np.uint64(0)
                inside = inside | here if mixed else here
                leaving = stages[tier] if mixed else stages[tier] | leaving
                stages[tier] = leaving & inside
                leaving &= ~inside
                alive |= stages[tier] != 0
                for bit in range(HOLDERS_PER_WORD):
                    if (leaving >> np.uint64(bit)) & np.uint64(1):
                        out[tier, word * HOLDERS_PER_WORD + bit] = block


@jit
def _weigh(depths: U32, weights: F64, shared: U32, out: F64) -> None:
    for request in range(depths.shape[0]):
        for holder in range(depths.shape[2]):
            worth = 0.0
            counted = np.int64(shared[request])
            for tier in range(TIERS):
                depth = np.int64(depths[request, tier, holder])
                if depth > counted:
                    worth += weights[tier] * (depth - counted)
                    counted = depth
            out[request, holder] = worth


def bitset_depths(planes: U64, mixed: bool = False) -> U32:
    """Depths of one chain from bitsets: uint64[3, blocks, words], bit h of word w is holder 64 w + h.

    `mixed`: a block counts for a tier when it is in that tier or a faster one, and tiers may alternate.
    Returns uint32[3, 64 words]. O(words x blocks until nobody matches).
    """
    if planes.dtype != np.uint64 or planes.ndim != 3 or planes.shape[0] != TIERS:
        raise ValueError(f"planes must be uint64[3, blocks, words], not {planes.dtype}{list(planes.shape)}")
    out = np.zeros((TIERS, planes.shape[2] * HOLDERS_PER_WORD), np.uint32)
    _match(planes, mixed, out)
    return out


def shared_depth(depths: U32, share: float = 1.0) -> int:
    """How many leading blocks at least this share of the holders match: uint32[holders], all that were asked.

    Blocks that everybody has say nothing about where to go. O(holders).
    """
    if not 0.0 < share <= 1.0:
        raise ValueError(f"a share is above 0 and at most 1, not {share}")
    if depths.size == 0:
        return 0
    rank = math.ceil(share * depths.size)
    return int(np.partition(depths, depths.size - rank)[depths.size - rank])


def weigh_overlap(depths: U32, weights: F64, shared: U32) -> F64:
    """What each match is worth: weighted blocks beyond the shared ones, each counted in its fastest tier.

    depths: uint32[n, 3, holders]; weights: float64[3], of a block in each tier; shared: uint32[n], leading
    blocks that are left out. Returns float64[n, holders].
    """
    if depths.dtype != np.uint32 or depths.ndim != 3 or depths.shape[1] != TIERS:
        raise ValueError(f"depths must be uint32[n, 3, holders], not {depths.dtype}{list(depths.shape)}")
    if weights.shape != (TIERS,) or weights.dtype != np.float64:
        raise ValueError("weights must be float64[3]")
    if shared.shape != depths.shape[:1] or shared.dtype != np.uint32:
        raise ValueError("shared must be uint32[n], one number a request")
    out = np.empty((depths.shape[0], depths.shape[2]), np.float64)
    _weigh(depths, weights, shared, out)
    return out
