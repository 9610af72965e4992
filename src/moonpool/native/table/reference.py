"""The plain twin of `block_table`: a dictionary of sets, slow and obviously right. The oracle of its tests.

Same methods, numbers and errors as `BlockTable`, but no bound and no GIL to release.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, final

from moonpool.errors import InternalError
from moonpool.units import U64_MAX

TIERS: Final = 3
EVERY_TIER: Final = 3
EVERY_CONTEXT: Final = 0xFFFFFFFF

#: (device, host, disk): leading blocks in tier 0, then also those in tier 1, then also those in tier 2.
Depths = tuple[int, int, int]


def cascade_depths(tiers_by_block: Sequence[frozenset[int]]) -> Depths:
    """How far one holder matches, never going back to a faster tier."""
    at = 0
    ends = []
    for tier in range(TIERS):
        while at < len(tiers_by_block) and tier in tiers_by_block[at]:
            at += 1
        ends.append(at)
    return ends[0], ends[1], ends[2]


def mixed_depths(tiers_by_block: Sequence[frozenset[int]]) -> Depths:
    """How far one holder matches when a block may be in the tier asked for or in any faster one."""
    ends = []
    for tier in range(TIERS):
        at = 0
        while at < len(tiers_by_block) and any(faster in tiers_by_block[at] for faster in range(tier + 1)):
            at += 1
        ends.append(at)
    return ends[0], ends[1], ends[2]


@final
class ReferenceTable:
    """(context, key) -> holder -> tiers."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], dict[int, set[int]]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def holder_sets(self) -> int:
        """Distinct sets of (holder, tier) in use."""
        return len(
            {
                frozenset((holder, tier) for holder, tiers in holders.items() for tier in tiers)
                for holders in self._blocks.values()
            }
        )

    def blocks_held(self, holder: int) -> Depths:
        """How many blocks the holder has in each tier."""
        held = [0] * TIERS
        for holders in self._blocks.values():
            for tier in holders.get(holder, ()):
                held[tier] += 1
        return held[0], held[1], held[2]

    def store(self, context: int, holder: int, tier: int, hashes: Iterable[int]) -> int:
        """The holder has these blocks; returns how many it had not."""
        added = 0
        for value in hashes:
            tiers = self._blocks.setdefault((context, value & U64_MAX), {}).setdefault(holder, set())
            added += tier not in tiers
            tiers.add(tier)
        return added

    def remove(self, context: int, holder: int, tier: int, hashes: Iterable[int]) -> int:
        """The holder has these blocks no more; returns how many it had."""
        return sum(self._release((context, value & U64_MAX), holder, tier) for value in hashes)

    def clear(self, holder: int, tier: int = EVERY_TIER, context: int = EVERY_CONTEXT) -> int:
        """The holder has nothing there any more; returns how many blocks it had."""
        places = [place for place in self._blocks if context in (EVERY_CONTEXT, place[0])]
        return sum(self._release(place, holder, tier) for place in places)

    def drop_context(self, context: int) -> int:
        """Forgets a context; returns how many blocks it had."""
        places = [place for place in self._blocks if place[0] == context]
        for place in places:
            del self._blocks[place]
        return len(places)

    def query(self, context: int, hashes: Iterable[int], mixed: bool = False) -> dict[int, Depths]:
        """What `Match.rows_by_holder` returns: the holders of the first block and how far each matches."""
        blocks = [self._blocks.get((context, value & U64_MAX), {}) for value in hashes]
        count = mixed_depths if mixed else cascade_depths
        return {
            holder: count([frozenset(block.get(holder, ())) for block in blocks])
            for holder in sorted(blocks[0] if blocks else ())
        }

    def tiers_of(self, context: int, key: int, holder: int) -> int:
        """The tiers, as bits, in which the holder has the block."""
        return sum(1 << tier for tier in self._blocks.get((context, key), {}).get(holder, ()))

    def contexts_in_use(self) -> set[int]:
        """The contexts that have blocks."""
        return {context for context, _ in self._blocks}

    def check(self) -> None:
        """Asserts that no block is kept without a holder, and no holder without a tier."""
        for place, holders in self._blocks.items():
            if not holders or not all(holders.values()):
                raise InternalError(f"block {place} is kept for nobody")

    def _release(self, place: tuple[int, int], holder: int, tier: int) -> int:
        holders = self._blocks.get(place, {})
        tiers = holders.get(holder, set())
        gone = tiers & ({0, 1, 2} if tier == EVERY_TIER else {tier})
        tiers -= gone
        if holder in holders and not tiers:
            del holders[holder]
        if place in self._blocks and not holders:
            del self._blocks[place]
        return bool(gone)
