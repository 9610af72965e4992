"""The numba kernels of hashing and overlap against their plain references."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from moonpool.kernels import hashing, hashing_reference, overlap, overlap_reference

hashes = st.integers(0, 2**64 - 1)


@given(data=st.binary(max_size=200), seed=hashes)
def test_xxh64(data: bytes, seed: int) -> None:
    expected = xxhash.xxh64_intdigest(data, seed)
    assert hashing_reference.xxh64(data, seed) == expected
    assert int(hashing.xxh64(np.frombuffer(data, np.uint8), np.uint64(seed))) == expected
    assert hashing.root_of_salt(data) == xxhash.xxh64_intdigest(data)


@given(
    prompts=st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=60), max_size=5),
    block=st.integers(1, 33),
    parent=hashes,
)
def test_xxh64_chains(prompts: list[list[int]], block: int, parent: int) -> None:
    flat = np.array([token for prompt in prompts for token in prompt], np.uint32)
    offsets = np.cumsum([0, *map(len, prompts)]).astype(np.int64)
    found, starts = hashing.chain_xxh64_prompts(flat, offsets, block, parent)
    for i, prompt in enumerate(prompts):
        expected = hashing_reference.chain_xxh64(prompt, block, parent)
        assert hashing.chain_xxh64(np.array(prompt, np.uint32), block, parent).tolist() == expected
        assert found[starts[i] : starts[i + 1]].tolist() == expected


@st.composite
def residencies(draw: st.DrawFn) -> list[list[set[int]]]:
    """For each of some blocks, the tiers in which each of 130 holders has it; most have a run of blocks."""
    blocks = draw(st.integers(0, 7))
    holders = draw(st.dictionaries(st.integers(0, 129), st.integers(0, 8), max_size=12))
    table: list[list[set[int]]] = [[set() for _ in range(130)] for _ in range(blocks)]
    for holder, depth in holders.items():
        for block in range(min(depth, blocks)):
            table[block][holder] = draw(st.sets(st.integers(0, 2), max_size=3))
    return table


@given(table=residencies(), mixed=st.booleans())
def test_bitset_depths(table: list[list[set[int]]], mixed: bool) -> None:
    planes = np.zeros((3, len(table), 3), np.uint64)
    for block, row in enumerate(table):
        for holder, tiers in enumerate(row):
            for tier in tiers:
                planes[tier, block, holder // 64] |= np.uint64(1 << holder % 64)
    found = overlap.bitset_depths(planes, mixed)
    assert found.shape == (3, 192)
    for holder in range(130):
        held = [frozenset(row[holder]) for row in table]
        assert tuple(found[:, holder].tolist()) == overlap_reference.holder_depths(held, mixed)
    assert not found[:, 130:].any()


@given(depths=st.lists(st.integers(0, 9), max_size=30), share=st.floats(0.01, 1.0))
def test_shared_depth(depths: list[int], share: float) -> None:
    found = overlap.shared_depth(np.array(depths, np.uint32), share)
    assert found == overlap_reference.shared_depth(depths, share)


@given(
    rows=st.lists(st.tuples(*[st.integers(0, 6)] * 3).map(sorted), min_size=1, max_size=20),
    weights=st.tuples(*[st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0])] * 3),
    shared=st.integers(0, 7),
)
def test_weighed_overlap(rows: list[list[int]], weights: tuple[float, ...], shared: int) -> None:
    depths = np.array(rows, np.uint32).T[None].copy()
    found = overlap.weigh_overlap(depths, np.array(weights), np.array([shared], np.uint32))
    expected = [overlap_reference.weigh_overlap(row, weights, shared) for row in rows]
    assert found[0].tolist() == expected


def test_wrong_arrays_are_refused() -> None:
    planes, depths = np.zeros((2, 1, 1), np.uint64), np.zeros((1, 3, 2), np.uint32)
    shared = np.zeros(1, np.uint32)
    with pytest.raises(ValueError, match="planes"):
        overlap.bitset_depths(planes)
    with pytest.raises(ValueError, match="share"):
        overlap.shared_depth(shared, 0.0)
    with pytest.raises(ValueError, match="depths"):
        overlap.weigh_overlap(depths[:, :2], np.zeros(3), shared)
    with pytest.raises(ValueError, match="weights"):
        overlap.weigh_overlap(depths, np.zeros(2), shared)
    with pytest.raises(ValueError, match="shared"):
        overlap.weigh_overlap(depths, np.zeros(3), np.zeros(2, np.uint32))
    with pytest.raises(ValueError, match="tokens"):
        hashing.chain_xxh64(np.zeros(3, np.int32), 1, 0)
    with pytest.raises(ValueError, match="block"):
        hashing.chain_xxh64(np.zeros(3, np.uint32), 0, 0)
    with pytest.raises(ValueError, match="offsets"):
        hashing.chain_xxh64_prompts(np.zeros(3, np.uint32), np.array([0, 4]), 1, 0)
