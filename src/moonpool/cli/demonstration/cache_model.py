"""What an ideal cache would have found: the yardsticks beside the pool's hit ratio. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final


@final
@dataclass(slots=True)
class Hits:
    """Blocks asked for and found. `leading` counts only found blocks before the first missing one of a
    request.

    Leading blocks are what a serving engine can use: the attention of a block needs all blocks before it.
    """

    references: int = 0
    leading: int = 0
    found: int = 0

    def count(self, found: Sequence[bool]) -> None:
        """One request: for each block of its chain whether it was found, the prompt's start first."""
        self.references += len(found)
        self.found += sum(found)
        self.leading += next((place for place, hit in enumerate(found) if not hit), len(found))

    @property
    def leading_ratio(self) -> float:
        """Prefix hits per block asked for; 0 before the first."""
        return self.leading / self.references if self.references else 0.0

    @property
    def found_ratio(self) -> float:
        """Found blocks per block asked for, whatever stood before them; 0 before the first."""
        return self.found / self.references if self.references else 0.0


class ExactLru:
    """A cache of `capacity` blocks that drops the least recently used one; None never drops.

    A request uses its blocks from the last to the first, so that the start of a prompt stays longer than
    its end. No cost per block but one dictionary entry.
    """

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.hits = Hits()

    def request(self, chain: Sequence[int]) -> None:
        """Looks a chain up, then puts what was missing."""
        blocks = self._blocks
        self.hits.count([block in blocks for block in chain])
        for block in reversed(chain):
            blocks[block] = None
            blocks.move_to_end(block)
            if self._capacity is not None and len(blocks) > self._capacity:
                blocks.popitem(last=False)


def lru_hits(chains: Iterable[Sequence[int]], capacity: int | None) -> Hits:
    """Hits of an exact LRU of that many blocks over the requests in order; None: of an unbounded cache."""
    model = ExactLru(capacity)
    for chain in chains:
        model.request(chain)
    return model.hits
