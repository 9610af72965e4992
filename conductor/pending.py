"""Blocks that instances are about to hold, because requests were sent there: before any event says so."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from moonpool.conductor.overlap import Chain
from moonpool.native.table.block_table import BlockTable

#: The table is keyed so that results do not depend on it; pending chains come from the scheduler's own users.
_TABLE_SEED: Final = 0x6D6F6F6E
_SET_BYTES_MAX: Final = 64 << 20


class _Chain(NamedTuple):
    """What one request adds: where, in which space, and its blocks."""

    instance: int
    space: int
    blocks: Chain


@final
class PendingBlocks:
    """Chains of requests between their decision and their first token, at most `blocks_max` blocks.

    Beyond the bound the oldest requests' blocks are forgotten: matches get worse, nothing else does. Chains
    of different spaces never match. Some tens of ns a block.
    """

    def __init__(self, blocks_max: int, instances: int) -> None:
        self._blocks_max: Final = blocks_max
        self._chains: OrderedDict[Hashable, _Chain] = OrderedDict()
        self._table: Final = BlockTable(
            blocks_max=blocks_max + 1,
            holders_max=instances,
            set_bytes_max=_SET_BYTES_MAX,
            seed=_TABLE_SEED,
        )
        #: Number of each space in the table, and how many chains it has.
        self._spaces: dict[int, list[int]] = {}
        self._spaces_given = 0
        self._depths: Final = np.zeros((3, instances), np.uint32)
        self._blocks = 0

    def __len__(self) -> int:
        return self._blocks

    def add(self, key: Hashable, instance: int, hashes: Chain, space: int = 0) -> None:
        """Instance `instance` is expected to hold these blocks of a space; it keeps `hashes`."""
        hashes = _of_64_bits(hashes)
        length = len(hashes)
        while self._chains and self._blocks + length > self._blocks_max:
            self.drop(next(iter(self._chains)))
        if length > self._blocks_max:
            return
        known = self._spaces.get(space)
        if known is None:
            self._spaces_given += 1
            known = self._spaces[space] = [self._spaces_given & 0x7FFFFFFF, 0]
        known[1] += 1
        self._chains[key] = _Chain(instance, space, hashes)
        self._blocks += length
        self._table.store(known[0], instance, 0, hashes)

    def drop(self, key: Hashable) -> None:
        """The request's blocks are there, or never will be; unknown keys are no error.

        Blocks that another pending request of the same instance shares go too: its prefill has just put
        them there, so the index knows them.
        """
        found = self._chains.pop(key, None)
        if found is None:
            return
        self._blocks -= len(found.blocks)
        known = self._spaces[found.space]
        self._table.remove(known[0], found.instance, 0, found.blocks)
        known[1] -= 1
        if not known[1]:
            del self._spaces[found.space]

    def raise_overlap(self, hashes: Chain, held: NDArray[np.int32], space: int = 0) -> None:
        """Raises each row of `held` (int32[tiers, n]) to what pending chains give.

        A chain is pending from its first block.
        """
        known = self._spaces.get(space)
        if known is None:
            return
        depths = self._depths
        self._table.query_into(known[0], _of_64_bits(hashes), depths)
        np.maximum(held, depths[2], out=held, casting="unsafe")


def _of_64_bits(hashes: Chain) -> Chain:
    """The chain in a form that the table takes: narrower arrays, as simulations have, are widened."""
    if isinstance(hashes, np.ndarray):
        return hashes if hashes.dtype.itemsize == 8 else hashes.astype(np.int64)
    return list(hashes) if isinstance(hashes, range) else hashes
