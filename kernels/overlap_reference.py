"""What the kernels of `overlap` must compute, in plain Python: the oracles of their tests."""

from __future__ import annotations

from collections.abc import Sequence

TIERS = 3


def holder_depths(tiers_by_block: Sequence[frozenset[int]], mixed: bool) -> tuple[int, ...]:
    """Leading blocks of one holder, tier by tier; `tiers_by_block` says where it has each block."""
    depths = []
    at = 0
    for tier in range(TIERS):
        wanted = set(range(tier + 1)) if mixed else {tier}
        at = 0 if mixed else at
        while at < len(tiers_by_block) and tiers_by_block[at] & wanted:
            at += 1
        depths.append(at)
    return tuple(depths)


def shared_depth(depths: Sequence[int], share: float) -> int:
    """The deepest block that at least this share of the holders match."""
    for depth in sorted(set(depths), reverse=True):
        if sum(each >= depth for each in depths) >= share * len(depths):
            return depth
    return 0


def weigh_overlap(depths: Sequence[int], weights: Sequence[float], shared: int) -> float:
    """What one holder's match is worth beyond the shared blocks."""
    fastest = [next(tier for tier in range(TIERS) if block < depths[tier]) for block in range(depths[-1])]
    return sum(weights[tier] for tier in fastest[shared:])
