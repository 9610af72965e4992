"""Blocks whose every byte follows from the block's hash, so that whoever reads one can tell whether it is
right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from moonpool.cli.demonstration.pattern import MULTIPLIER, WORD_BYTES
from moonpool.errors import UsageError
from moonpool.native.table.chains import xxh3_64

if TYPE_CHECKING:
    from numpy.typing import NDArray

KEY_PREFIX: Final = b"demo/"


def hash_of(block: int, seed: int = 0) -> int:
    """64 bits for a block id of a trace; other ids and other seeds give other bits."""
    return xxh3_64(block.to_bytes(8, "little", signed=True), seed)


def key_of(block_hash: int) -> bytes:
    """The pool's key of a block: 21 bytes, readable in listings."""
    return KEY_PREFIX + b"%016x" % block_hash


class BlockBytes:
    """Makes and checks blocks of `block_bytes`, which must be whole words of 8 bytes.

    Word i of a block is `i * MULTIPLIER ^ hash`: a word at a wrong place and a word of another block
    differ. Cost: two passes over the block, no allocation. Not for use by several threads at once.
    """

    def __init__(self, block_bytes: int) -> None:
        if block_bytes <= 0 or block_bytes % WORD_BYTES:
            raise UsageError(
                f"a block has whole words of {WORD_BYTES} bytes, not {block_bytes} bytes", field="block_bytes"
            )
        places = np.arange(block_bytes // WORD_BYTES, dtype=np.uint64)
        self._base: NDArray[np.uint64] = places * np.uint64(MULTIPLIER)
        self._wanted = np.empty_like(self._base)

    def make(self, target: memoryview, block_hash: int) -> None:
        """Fills `target`, one block long."""
        np.bitwise_xor(self._base, np.uint64(block_hash), out=np.frombuffer(target, dtype=np.uint64))

    def wrong_bytes(self, found: memoryview, block_hash: int) -> int:
        """How many bytes of `found` are not those of the block; all of them when its length is another."""
        if found.nbytes != self._base.nbytes:
            return max(found.nbytes, self._base.nbytes)
        words = np.frombuffer(found, dtype=np.uint64)
        np.bitwise_xor(self._base, np.uint64(block_hash), out=self._wanted)
        if np.array_equal(words, self._wanted):
            return 0
        return int(np.count_nonzero(words.view(np.uint8) != self._wanted.view(np.uint8)))
