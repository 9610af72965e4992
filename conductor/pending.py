"""Blocks that instances are about to hold, because requests were sent there: before any event says so."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from moonpool.conductor.overlap import Chain, mark


@final
class PendingBlocks:
    """Chains of requests between their decision and their first token, at most `blocks_max` blocks.

    Beyond the bound the oldest requests' blocks are forgotten: matches get worse, nothing else does.
    """

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max: Final = blocks_max
        self._chains: OrderedDict[Hashable, tuple[int, list[int]]] = OrderedDict()
        self._holders: dict[int, int] = {}
        self._blocks = 0

    def __len__(self) -> int:
        return self._blocks

    def add(self, key: Hashable, instance: int, hashes: Chain, space: int = 0) -> None:
        """Instance `instance` is expected to hold these blocks of a space."""
        chain = hashes.tolist() if isinstance(hashes, np.ndarray) else [int(block) for block in hashes]
        if space:
            chain = [block ^ space for block in chain]
        bit = 1 << instance
        self._chains[key] = (bit, chain)
        self._blocks += len(chain)
        holders = self._holders
        for block in chain:
            holders[block] = holders.get(block, 0) | bit
        while self._blocks > self._blocks_max and self._chains:
            self.drop(next(iter(self._chains)))

    def drop(self, key: Hashable) -> None:
        """The request's blocks are there, or never will be; unknown keys are no error.

        Blocks that another pending request of the same instance shares go too: its prefill has just put
        them there, so the index knows them.
        """
        found = self._chains.pop(key, None)
        if found is None:
            return
        bit, chain = found
        self._blocks -= len(chain)
        holders = self._holders
        for block in chain:
            left = holders.get(block, 0) & ~bit
            if left:
                holders[block] = left
            else:
                holders.pop(block, None)

    def raise_overlap(self, hashes: Chain, row: NDArray[np.int32], space: int = 0) -> None:
        """Raises `row` (int32[n]) to what pending chains give; a chain is pending from its first block."""
        holders = (1 << len(row)) - 1
        pending = np.zeros(len(row), np.int32)
        depth = 0
        for block in hashes.tolist() if isinstance(hashes, np.ndarray) else hashes:
            mask = self._holders.get(block ^ space, 0)
            lost = holders & ~mask
            if lost:
                mark(pending, lost, depth)
                holders &= mask
                if not holders:
                    break
            depth += 1
        if depth:
            mark(pending, holders, depth)
            np.maximum(row, pending, out=row)
