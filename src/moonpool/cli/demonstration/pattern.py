"""Bytes that tell where they belong and when they were written.

Word i of round r is ``i * MULTIPLIER ^ key(r)``: a word at a wrong place differs, since an odd multiplier
maps no two places to one value, and a word of the round before differs in each of its eight bytes, since the
keys do. So a misplaced, missing or stale byte is a wrong byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from moonpool.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MULTIPLIER: Final = 0x9E37_79B9_7F4A_7C15
"""2**64 divided by the golden ratio, made odd."""

WORD_BYTES: Final = 8
ROUNDS: Final = 255


def round_key(round_number: int) -> int:
    """A key whose eight bytes are equal, and none of which is that of the round before or after."""
    return int.from_bytes(bytes([round_number % ROUNDS + 1]) * WORD_BYTES, "little")


class Pattern:
    """The pattern of one region of ``size_bytes``, which must be whole words. Cost: one more copy of that
    size.
    """

    def __init__(self, size_bytes: int) -> None:
        if size_bytes <= 0 or size_bytes % WORD_BYTES:
            raise UsageError(f"a pattern has whole words of {WORD_BYTES} bytes, not {size_bytes} bytes")
        places = np.arange(size_bytes // WORD_BYTES, dtype=np.uint64)
        self._base: NDArray[np.uint64] = places * np.uint64(MULTIPLIER)
        self._scratch = np.empty_like(self._base)

    def write(self, target: memoryview, offset_bytes: int, round_number: int) -> None:
        """Fills ``target`` (whole words) with what belongs at ``offset_bytes`` in that round."""
        words = np.frombuffer(target, dtype=np.uint64)
        np.bitwise_xor(self._slice(offset_bytes, words.size), np.uint64(round_key(round_number)), out=words)

    def wrong_bytes(self, found: memoryview, offset_bytes: int, round_number: int) -> int:
        """How many bytes of ``found`` are not what belongs at ``offset_bytes`` in that round."""
        words = np.frombuffer(found, dtype=np.uint64)
        wanted = self._scratch[: words.size]
        np.bitwise_xor(self._slice(offset_bytes, words.size), np.uint64(round_key(round_number)), out=wanted)
        if np.array_equal(words, wanted):
            return 0
        return int(np.count_nonzero(words.view(np.uint8) != wanted.view(np.uint8)))

    def _slice(self, offset_bytes: int, words: int) -> NDArray[np.uint64]:
        first = offset_bytes // WORD_BYTES
        if offset_bytes % WORD_BYTES or first < 0 or first + words > self._base.size:
            raise UsageError(
                f"{words} words at {offset_bytes} are not inside the pattern", offset=offset_bytes
            )
        return self._base[first : first + words]
