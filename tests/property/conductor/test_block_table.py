"""The native table against its plain twin: any sequence of changes and queries gives the same answers."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moonpool.native.table.block_table import EVERY_CONTEXT, EVERY_TIER, BlockTable
from moonpool.native.table.reference import ReferenceTable

HOLDERS_MAX = 200
#: Few enough that chains meet, and over two words of holders, so that sets have several chunks.
KEYS = [key * 0x9E3779B97F4A7C15 % 2**64 for key in range(24)]
HOLDERS = [0, 1, 2, 63, 64, 65, 130, 199]

contexts = st.integers(0, 2)
holders = st.sampled_from(HOLDERS)
tiers = st.integers(0, 2)
chains = st.lists(st.sampled_from(KEYS), max_size=24)


def new_table(**changes: int) -> BlockTable:
    options = {"blocks_max": 1 << 20, "holders_max": HOLDERS_MAX, "set_bytes_max": 1 << 24, "seed": 3}
    return BlockTable(**{**options, **changes})


class TwinMachine(RuleBasedStateMachine):
    """Does everything to both tables and compares every result."""

    def __init__(self) -> None:
        super().__init__()
        self.table = new_table()
        self.twin = ReferenceTable()

    @rule(context=contexts, holder=holders, tier=tiers, hashes=chains)
    def store(self, context: int, holder: int, tier: int, hashes: list[int]) -> None:
        assert self.table.store(context, holder, tier, hashes) == self.twin.store(
            context, holder, tier, hashes
        )

    @rule(context=contexts, holder=holders, tier=st.integers(0, 3), hashes=chains)
    def remove(self, context: int, holder: int, tier: int, hashes: list[int]) -> None:
        assert self.table.remove(context, holder, tier, hashes) == self.twin.remove(
            context, holder, tier, hashes
        )

    @rule(
        holder=holders, tier=st.sampled_from([0, 1, 2, EVERY_TIER]), context=contexts | st.just(EVERY_CONTEXT)
    )
    def clear(self, holder: int, tier: int, context: int) -> None:
        assert self.table.clear(holder, tier, context) == self.twin.clear(holder, tier, context)

    @rule(context=contexts)
    def drop_context(self, context: int) -> None:
        assert self.table.drop_context(context) == self.twin.drop_context(context)

    @rule(context=contexts, hashes=chains, mixed=st.booleans())
    def query(self, context: int, hashes: list[int], mixed: bool) -> None:
        expected = self.twin.query(context, hashes, mixed)
        match = self.table.query(context, hashes, mixed)
        assert match.rows_by_holder() == expected
        assert match.blocks == len(hashes)
        planes = np.full((3, HOLDERS_MAX), 77, np.uint32)
        self.table.query_into(context, hashes, planes, mixed)
        assert {
            holder: tuple(row) for holder, row in enumerate(planes.T.tolist()) if holder in expected
        } == expected
        assert planes.sum() == sum(map(sum, expected.values()))

    @rule(holder=holders, context=contexts, key=st.sampled_from(KEYS))
    def look_at_one(self, holder: int, context: int, key: int) -> None:
        assert self.table.tiers_of(context, key, holder) == self.twin.tiers_of(context, key, holder)
        assert self.table.blocks_held(holder) == self.twin.blocks_held(holder)

    @invariant()
    def both_are_sound(self) -> None:
        self.table.check()
        self.twin.check()
        assert len(self.table) == len(self.twin)
        assert self.table.holder_sets == self.twin.holder_sets


TestTwins = TwinMachine.TestCase


@pytest.mark.parametrize("seed", [11, 12])
def test_long_runs_with_churn_agree(seed: int) -> None:
    """Thousands of changes: growth of slots and buckets, reuse of both, and sweeps of idle sets."""
    print(f"seed={seed}")
    source = random.Random(seed)
    table, twin = new_table(), ReferenceTable()
    keys = [source.getrandbits(64) for _ in range(600)]
    for step in range(1500):
        start = source.randrange(len(keys))
        chain = keys[start : start + source.randrange(40)]
        if source.random() < 0.3:
            source.shuffle(chain)
        context, holder = source.randrange(2), source.randrange(HOLDERS_MAX)
        tier = source.randrange(3)
        what = source.random()
        if what < 0.55:
            assert table.store(context, holder, tier, chain) == twin.store(context, holder, tier, chain)
        elif what < 0.9:
            assert table.remove(context, holder, tier, chain) == twin.remove(context, holder, tier, chain)
        elif what < 0.91:
            assert table.clear(holder) == twin.clear(holder)
        else:
            mixed = source.random() < 0.5
            expected = twin.query(context, chain, mixed)
            assert table.query(context, chain, mixed).rows_by_holder() == expected
        if step % 100 == 0:
            table.check()
            assert table.holder_sets == twin.holder_sets
    table.check()
    assert len(table) == len(twin)


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_results_do_not_depend_on_the_seed(seed: int) -> None:
    table, other = new_table(seed=seed), new_table(seed=5)
    for each in (table, other):
        for holder in range(70):
            each.store(1, holder, holder % 3, KEYS[: 24 - holder % 20])
    assert table.query(1, KEYS).rows_by_holder() == other.query(1, KEYS).rows_by_holder()


def test_many_chains_at_once_equal_one_by_one() -> None:
    table = new_table()
    source = random.Random(4)
    for holder in range(0, HOLDERS_MAX, 7):
        table.store(0, holder, holder % 3, KEYS[: source.randrange(1, 24)])
    asked = [KEYS[:12], [], KEYS[:3] + KEYS[9:], KEYS[5:6]]
    flat = [key for chain in asked for key in chain]
    offsets = np.cumsum([0, *map(len, asked)]).astype(np.int64)
    out = np.full((len(asked), 3, HOLDERS_MAX), 9, np.uint32)
    table.query_many(0, np.array(flat, np.uint64), offsets, out)
    for chain, planes in zip(asked, out, strict=True):
        alone = np.zeros((3, HOLDERS_MAX), np.uint32)
        table.query_into(0, chain, alone)
        assert (planes == alone).all()
    assert out[0].any()
