"""A serving engine and the pool: find how much of a prompt is cached, fetch it, compute and store the rest.

Run it: python examples/store_kv_blocks.py [master address ...]     (without an address: an embedded pool)
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence

import numpy as np

import moonpool

BLOCK_TOKENS = 16
BLOCK_BYTES = 64 * 1024


def chain_keys(tokens: Sequence[int]) -> list[bytes]:
    """A key for each whole block: it names the block and everything before it."""
    keys, so_far = [], hashlib.sha256()
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        so_far.update(np.array(tokens[start : start + BLOCK_TOKENS], dtype=np.int64).tobytes())
        keys.append(b"kv/" + so_far.digest())
    return keys


def compute_block(key: bytes) -> np.ndarray:
    """Stands for the prefill of one block: its bytes follow from its key, so that they can be checked."""
    seed = int.from_bytes(key[-8:], "little")
    return np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)


def serve(pool: moonpool.Pool, tokens: Sequence[int], cache: np.ndarray) -> int:
    """Fills `cache` (uint8[blocks, BLOCK_BYTES]) for a prompt; how many of its blocks the pool had."""
    keys = chain_keys(tokens)
    results = pool.get_into_many(keys, [cache[number] for number in range(len(keys))])
    # Blocks after the first miss are of no use: what they depend on is computed anew anyway.
    found = next((number for number, result in enumerate(results) if not result.hit), len(keys))
    for number in range(found, len(keys)):
        cache[number] = compute_block(keys[number])
    if found < len(keys):
        pool.put_many(keys[found:], [cache[number] for number in range(found, len(keys))])
    return found


def main() -> None:
    """Serves three prompts, of which two begin as others did."""
    rng = np.random.default_rng(7)
    first = rng.integers(0, 50_000, 40 * BLOCK_TOKENS).tolist()
    longer = first + rng.integers(0, 50_000, 8 * BLOCK_TOKENS).tolist()
    cache = np.empty((64, BLOCK_BYTES), dtype=np.uint8)
    with moonpool.connect(*sys.argv[1:]) as pool:
        for name, prompt in (("first", first), ("longer", longer), ("first again", first)):
            found = serve(pool, prompt, cache)
            blocks = len(chain_keys(prompt))
            wrong = sum(
                not np.array_equal(cache[number], compute_block(key))
                for number, key in enumerate(chain_keys(prompt))
            )
            print(f"{name}: {found} of {blocks} blocks came from the pool, {wrong} of them wrong")


if __name__ == "__main__":
    main()
