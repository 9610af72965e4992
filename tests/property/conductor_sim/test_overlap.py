"""Overlap look-ups equal a plain model of sets, whatever is stored, removed, pending or dropped."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moonpool.conductor.overlap import ResidencyTable
from moonpool.conductor.pending import PendingBlocks
from moonpool.kernels.cluster_state import ABSENT
from moonpool.kernels.prefix_sim import leading_blocks, leading_here

INSTANCES, TIERS = 5, 3
BLOCKS = st.lists(st.integers(0, 12), max_size=8, unique=True)
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["store", "remove", "clear"]),
        st.integers(0, INSTANCES - 1),
        st.integers(0, TIERS - 1),
        BLOCKS,
    ),
    max_size=25,
)


def leading(held: set[int], chain: list[int]) -> int:
    depth = 0
    while depth < len(chain) and chain[depth] in held:
        depth += 1
    return depth


@given(CHANGES, BLOCKS)
def test_the_table_equals_sets(changes: list[tuple[str, int, int, list[int]]], chain: list[int]) -> None:
    table = ResidencyTable(INSTANCES, TIERS)
    model: list[list[set[int]]] = [[set() for _ in range(INSTANCES)] for _ in range(TIERS)]
    for kind, instance, tier, blocks in changes:
        if kind == "store":
            table.store(instance, blocks, tier)
            model[tier][instance] |= set(blocks)
        elif kind == "remove":
            table.remove(instance, blocks, tier)
            model[tier][instance] -= set(blocks)
        else:
            table.clear(instance)
            for held in model:
                held[instance].clear()
    expected = [
        [
            leading(set().union(*(model[at][instance] for at in range(tier + 1))), chain)
            for instance in range(INSTANCES)
        ]
        for tier in range(TIERS)
    ]
    assert table.overlap(chain).tolist() == expected
    assert len(table) == len(set().union(*(held for tier in model for held in tier)))


@given(st.lists(st.tuples(st.integers(0, INSTANCES - 1), BLOCKS), max_size=12), st.data())
def test_pending_chains_are_found_until_they_are_dropped(
    chains: list[tuple[int, list[int]]], data: st.DataObject
) -> None:
    pending = PendingBlocks(10_000, INSTANCES)
    for key, (instance, chain) in enumerate(chains):
        pending.add(key, instance, chain)
    asked = data.draw(BLOCKS)
    row = np.zeros((1, INSTANCES), np.int32)
    pending.raise_overlap(asked, row)
    for instance in range(INSTANCES):
        held = {block for at, chain in chains if at == instance for block in chain}
        assert row[0, instance] == leading(held, asked)
    for key in data.draw(st.permutations(range(len(chains)))):
        pending.drop(key)
    row[:] = 0
    pending.raise_overlap(asked, row)
    assert not row.any()
    assert len(pending) == 0


@given(st.lists(st.sets(st.integers(0, 12)), min_size=1, max_size=6), BLOCKS)
def test_the_kernels_equal_sets(caches: list[set[int]], chain: list[int]) -> None:
    newer = np.full((len(caches), 14), ABSENT, np.int32)
    for at, held in enumerate(caches):
        for block in held:
            newer[at, block] = 0
    ids = np.array(chain, np.int32)
    out = np.zeros(len(caches), np.int32)
    leading_blocks(newer, ids, out)
    assert out.tolist() == [leading(held, chain) for held in caches]
    assert [leading_here(newer, at, ids) for at in range(len(caches))] == out.tolist()
