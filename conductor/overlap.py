"""How much of a prompt each instance holds: the question, and a plain table that answers it.

The scheduler asks any `OverlapIndex`. `ResidencyTable` is a dictionary of bit masks: exact, of unbounded
depth, and quick enough for a few hundred instances; the production index answers the same question from
flat arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from moonpool.errors import UsageError

Chain: TypeAlias = Sequence[int] | NDArray[np.integer]
TIERS: Final = ("G1", "G2", "G3")


class OverlapIndex(Protocol):
    """Where blocks are, as far as anybody knows."""

    def overlap(self, hashes: Chain) -> NDArray[np.int32]:
        """int32[tiers, n]: leading blocks that each instance holds in that tier or a faster one.

        Rows never fall from one tier to the next slower one. The caller may keep the array.
        """


@final
class ResidencyTable:
    """Which instances hold which blocks, tier by tier; O(1) a block to store and to remove."""

    def __init__(self, instances: int, tiers: int = 1) -> None:
        if instances < 1 or not 1 <= tiers <= len(TIERS):
            raise UsageError(f"a table needs an instance or more and 1 to {len(TIERS)} tiers")
        self.instances: Final = instances
        self.tiers: Final = tiers
        self._masks: list[dict[int, int]] = [{} for _ in range(tiers)]

    def store(self, instance: int, hashes: Iterable[int], tier: int = 0) -> None:
        """Notes that an instance holds these blocks."""
        bit = 1 << self._checked(instance)
        masks = self._masks[tier]
        for block in hashes:
            masks[block] = masks.get(block, 0) | bit

    def remove(self, instance: int, hashes: Iterable[int], tier: int = 0) -> None:
        """Notes that an instance no longer holds these blocks; unknown ones are no error."""
        bit = 1 << self._checked(instance)
        masks = self._masks[tier]
        for block in hashes:
            left = masks.get(block, 0) & ~bit
            if left:
                masks[block] = left
            else:
                masks.pop(block, None)

    def clear(self, instance: int) -> None:
        """Forgets everything that an instance held. O(blocks of all instances)."""
        bit = 1 << self._checked(instance)
        for tier, masks in enumerate(self._masks):
            kept = {block: mask & ~bit for block, mask in masks.items()}
            self._masks[tier] = {block: mask for block, mask in kept.items() if mask}

    def overlap(self, hashes: Chain) -> NDArray[np.int32]:
        """int32[tiers, n], as `OverlapIndex.overlap`. O(blocks until nobody matches)."""
        out = np.zeros((self.tiers, self.instances), np.int32)
        for tier in range(self.tiers):
            visible = self._masks[: tier + 1]
            holders = (1 << self.instances) - 1
            depth = 0
            for block in hashes:
                mask = 0
                for masks in visible:
                    mask |= masks.get(int(block), 0)
                lost = holders & ~mask
                if lost:
                    mark(out[tier], lost, depth)
                    holders &= mask
                    if not holders:
                        break
                depth += 1
            mark(out[tier], holders, depth)
        return out

    def __len__(self) -> int:
        return len(set().union(*self._masks))

    def _checked(self, instance: int) -> int:
        if not 0 <= instance < self.instances:
            raise UsageError(f"there is no instance {instance}; the table has {self.instances}")
        return instance


def mark(row: NDArray[np.int32], mask: int, depth: int) -> None:
    """Writes `depth` at the position of every set bit of `mask`."""
    while mask:
        low = mask & -mask
        row[low.bit_length() - 1] = depth
        mask ^= low
