"""Micro-benchmarks of the prefix index and of block hashing: what a router pays for each request and event.

They assert that the result is right and print what it costs; no time is asserted.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moonpool.conductor import Algorithm, BlockHasher, CacheContext, HashRecipe, Holder, PrefixIndex

CONTEXT = CacheContext("model", 16)
ROUNDS = 20
#: (holders, chains of each, blocks of a chain, leading blocks that all share)
SMALL, LARGE = (16, 50, 32, 8), (64, 4, 1024, 64)
Chains = list[tuple[Holder, list[int]]]


def measure(benchmark: Any, call: Callable[[], Any], iterations: int = 100) -> Any:
    """A bounded number of rounds, so that the suite stays short."""
    return benchmark.pedantic(call, rounds=ROUNDS, iterations=iterations, warmup_rounds=1)


def chains_of(shape: tuple[int, int, int, int]) -> Chains:
    holders, count, depth, shared = shape
    source = random.Random(7)
    start = [source.getrandbits(64) for _ in range(shared)]
    return [
        (Holder(f"engine-{number}"), start + [source.getrandbits(64) for _ in range(depth - shared)])
        for number in range(holders)
        for _ in range(count)
    ]


def filled(chains: Chains) -> PrefixIndex:
    index = PrefixIndex()
    for holder, hashes in chains:
        index.store(CONTEXT, holder, hashes)
    return index


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["16x32", "64x1024"])
def test_store(benchmark: Any, shape: tuple[int, int, int, int]) -> None:
    chains = chains_of(shape)
    index = benchmark.pedantic(lambda: filled(chains), rounds=5, warmup_rounds=1)
    distinct = {block for _, hashes in chains for block in hashes}
    benchmark.extra_info["blocks"] = sum(len(hashes) for _, hashes in chains)
    assert len(index) == len(distinct)


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["16x32", "64x1024"])
def test_query(benchmark: Any, shape: tuple[int, int, int, int]) -> None:
    chains = chains_of(shape)
    index = filled(chains)
    holder, hashes = chains[len(chains) // 2]
    match = measure(benchmark, lambda: index.query(CONTEXT, hashes))
    assert len(match) == shape[0]
    assert match.depths()[holder] == shape[2]


def test_query_with_names(benchmark: Any) -> None:
    chains = chains_of(SMALL)
    index = filled(chains)
    depths = measure(benchmark, lambda: index.query(CONTEXT, chains[0][1]).depths())
    assert sorted(depths.values()) == [8] * 15 + [32]


def test_query_that_misses(benchmark: Any) -> None:
    index = filled(chains_of(SMALL))
    match = measure(benchmark, lambda: index.query(CONTEXT, list(range(32))))
    assert len(match) == 0


def test_remove_in_batches(benchmark: Any) -> None:
    chains = chains_of(LARGE)

    def remove(index: PrefixIndex) -> PrefixIndex:
        for holder, hashes in chains:
            index.remove(CONTEXT, holder, hashes)
        return index

    index = benchmark.pedantic(remove, setup=lambda: ((filled(chains),), {}), rounds=3)
    assert len(index) == 0


@pytest.mark.parametrize("form", ["list", "array"])
@pytest.mark.parametrize("algorithm", [Algorithm.DYNAMO, Algorithm.VLLM_SHA256, Algorithm.VLLM_SHA256_CBOR])
def test_hash_8k_tokens(benchmark: Any, algorithm: Algorithm, form: str) -> None:
    source = random.Random(8)
    tokens: Any = [source.randrange(150_000) for _ in range(8192)]
    hasher = BlockHasher(HashRecipe(algorithm=algorithm), CONTEXT)
    expected = hasher.hashes(tokens)
    if form == "array":
        tokens = np.array(tokens, np.uint32)
    assert measure(benchmark, lambda: hasher.hashes(tokens), iterations=10) == expected
