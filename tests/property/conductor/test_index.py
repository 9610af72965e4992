"""The prefix index against a naive model: a dictionary from names to sets of tiers, walked block by block."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moonpool.conductor.index import PrefixIndex
from moonpool.conductor.index_config import IndexConfig
from moonpool.conductor.index_view import IndexView
from moonpool.conductor.overlap import ResidencyTable
from moonpool.conductor.prefix_match import ZeroReason
from moonpool.errors import LimitExceeded
from moonpool.events import BlocksCleared, BlocksRemoved, BlocksStored, CacheContext, Holder, Tier

CONTEXTS = [
    CacheContext("llama", 16),
    CacheContext("llama", 32),
    CacheContext("llama", 16, tenant="other"),
    CacheContext("llama", 16, lora="adapter"),
    CacheContext("llama", 16, salt="s"),
    CacheContext("qwen", 16),
]
HOLDERS = [Holder(f"engine-{number}", rank) for number in range(4) for rank in range(3)]
#: Three chains that part after some blocks, as chains do.
CHAINS = [
    [1, 2, 3, 4, 5, 6, 7, 8],
    [1, 2, 3, 40, 50, 60],
    [1, 2**63 + 2, 2**63 + 3],
    [100, 200],
]

contexts = st.sampled_from(CONTEXTS)
holders = st.sampled_from(HOLDERS)
tiers = st.sampled_from(list(Tier))
chains = st.sampled_from(CHAINS).flatmap(
    lambda chain: st.tuples(st.integers(0, len(chain)), st.integers(0, len(chain))).map(
        lambda ends: chain[min(ends) : max(ends)]
    )
)
queries = (
    st.sampled_from(CHAINS)
    | chains
    | st.lists(st.sampled_from(sorted({*CHAINS[0], *CHAINS[1], *CHAINS[2]})), max_size=6)
)

#: context -> block -> holder -> tiers
Model = dict[CacheContext, dict[int, dict[Holder, set[Tier]]]]


class NaiveIndex:
    """What the index means, without any cleverness."""

    def __init__(self) -> None:
        self.blocks: Model = {}
        self.members: dict[CacheContext, set[Holder]] = {}

    def register(self, context: CacheContext, holder: Holder) -> None:
        self.members.setdefault(context, set()).add(holder)

    def store(self, context: CacheContext, holder: Holder, hashes: list[int], tier: Tier) -> int:
        self.register(context, holder)
        added = 0
        for block in hashes:
            held = self.blocks.setdefault(context, {}).setdefault(block, {}).setdefault(holder, set())
            added += tier not in held
            held.add(tier)
        return added

    def remove(self, context: CacheContext, holder: Holder, hashes: list[int], tier: Tier | None) -> int:
        removed = 0
        for block in hashes:
            held = self.blocks.get(context, {}).get(block, {}).get(holder, set())
            gone = held & (set(Tier) if tier is None else {tier})
            held -= gone
            removed += bool(gone)
        return removed

    def clear(self, holder: Holder, context: CacheContext | None, tier: Tier | None) -> int:
        return sum(
            self.remove(each, holder, list(blocks), tier)
            for each, blocks in self.blocks.items()
            if context in (None, each)
        )

    def unregister(self, holder: Holder, context: CacheContext | None) -> int:
        removed = 0
        for each in list(self.members):
            if context in (None, each) and holder in self.members[each]:
                removed += self.clear(holder, each, None)
                self.members[each].remove(holder)
                if not self.members[each]:
                    del self.members[each]
        return removed

    def held(self, context: CacheContext, holder: Holder, block: int) -> set[Tier]:
        return self.blocks.get(context, {}).get(block, {}).get(holder, set())

    def depths(self, context: CacheContext, hashes: list[int], mixed: bool) -> dict[Holder, tuple[int, ...]]:
        found = {}
        for holder in self.members.get(context, ()):
            at, ends = 0, []
            for tier in Tier:
                wanted = {each for each in Tier if each <= tier} if mixed else {tier}
                at = 0 if mixed else at
                while at < len(hashes) and self.held(context, holder, hashes[at]) & wanted:
                    at += 1
                ends.append(at)
            if hashes and self.held(context, holder, hashes[0]):
                found[holder] = tuple(ends)
        return found

    def count(self) -> int:
        return sum(any(held.values()) for blocks in self.blocks.values() for held in blocks.values())

    def blocks_held(self, holder: Holder) -> dict[Tier, int]:
        everywhere = [held.get(holder, set()) for each in self.blocks.values() for held in each.values()]
        return {tier: sum(tier in held for held in everywhere) for tier in Tier}


class IndexMachine(RuleBasedStateMachine):
    """Every public method, in any order."""

    @initialize(by_events=st.booleans())
    def start(self, by_events: bool) -> None:
        self.by_events = by_events
        config = IndexConfig(blocks_max=10_000, holders_max=len(HOLDERS), contexts_max=4, table_seed=1)
        self.index = PrefixIndex(config)
        self.model = NaiveIndex()

    def may_enter(self, context: CacheContext, act: Any) -> bool:
        """Runs `act` where a fifth context is refused; whether it went through."""
        if context in self.model.members or len(self.model.members) < 4:
            act()
            return True
        with pytest.raises(LimitExceeded, match="contexts_max"):
            act()
        return False

    @rule(context=contexts, holder=holders)
    def register(self, context: CacheContext, holder: Holder) -> None:
        if self.may_enter(context, lambda: self.index.register(context, holder)):
            self.model.register(context, holder)

    @rule(context=contexts, holder=holders, hashes=chains, tier=tiers)
    def store(self, context: CacheContext, holder: Holder, hashes: list[int], tier: Tier) -> None:
        results: list[int] = []

        def act() -> None:
            if self.by_events:
                results.append(self.index.apply(BlocksStored(context, holder, hashes, tier)))
            else:
                results.append(self.index.store(context, holder, hashes, tier))

        if self.may_enter(context, act):
            assert results == [self.model.store(context, holder, hashes, tier)]

    @rule(context=contexts, holder=holders, hashes=chains, tier=tiers | st.none())
    def remove(self, context: CacheContext, holder: Holder, hashes: list[int], tier: Tier | None) -> None:
        if self.by_events:
            removed = self.index.apply(BlocksRemoved(context, holder, hashes, tier))
        else:
            removed = self.index.remove(context, holder, hashes, tier)
        assert removed == self.model.remove(context, holder, hashes, tier)

    @rule(holder=holders, context=contexts | st.none(), tier=tiers | st.none())
    def clear(self, holder: Holder, context: CacheContext | None, tier: Tier | None) -> None:
        if self.by_events:
            removed = self.index.apply(BlocksCleared(holder, context, tier))
        else:
            removed = self.index.clear(holder, context, tier)
        assert removed == self.model.clear(holder, context, tier)

    @rule(holder=holders, context=contexts | st.none())
    def unregister(self, holder: Holder, context: CacheContext | None) -> None:
        assert self.index.unregister(holder, context) == self.model.unregister(holder, context)

    @rule(context=contexts, hashes=queries, mixed=st.booleans())
    def query(self, context: CacheContext, hashes: list[int], mixed: bool) -> None:
        expected = self.model.depths(context, hashes, mixed)
        match = self.index.query(context, hashes, mixed)
        assert match.by_holder() == expected
        assert match.depths() == {holder: row[2] for holder, row in expected.items()}
        assert match.depth == max((row[2] for row in expected.values()), default=0)
        members = self.model.members.get(context, set())
        assert match.members == len(members)
        every = [expected.get(holder, (0, 0, 0))[2] for holder in members]
        assert match.universal() == min(every, default=0)
        if not expected:
            reason = (
                ZeroReason.UNKNOWN_CONTEXT
                if not members
                else ZeroReason.FIRST_BLOCK_UNKNOWN
                if hashes
                else ZeroReason.SHORT_PROMPT
            )
            assert match.why_nothing() is reason
        planes = self.index.query_depths(context, hashes, mixed)
        for holder in members:
            assert tuple(planes[:, self.index.number(holder)].tolist()) == expected.get(holder, (0, 0, 0))
        assert planes.sum() == sum(map(sum, expected.values()))

    @precondition(lambda self: len(self.model.members) > 0)
    @rule(data=st.data(), hashes=st.lists(queries, max_size=4))
    def query_many(self, data: st.DataObject, hashes: list[list[int]]) -> None:
        context = data.draw(st.sampled_from(sorted(self.model.members)))
        offsets = np.cumsum([0, *map(len, hashes)]).tolist()
        found = self.index.query_many(context, [block for chain in hashes for block in chain], offsets)
        for chain, planes in zip(hashes, found, strict=True):
            assert (planes == self.index.query_depths(context, chain)).all()

    @rule(context=contexts, holder=holders, block=st.sampled_from(CHAINS[0]))
    def look_at_one(self, context: CacheContext, holder: Holder, block: int) -> None:
        assert self.index.holds(context, holder, block) == self.model.held(context, holder, block)
        assert self.index.blocks_held(holder) == self.model.blocks_held(holder)

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check()
        assert len(self.index) == self.model.count()
        assert {context: set(self.index.members(context)) for context in self.index.contexts()} == (
            self.model.members
        )


TestIndex = IndexMachine.TestCase


class ViewMachine(RuleBasedStateMachine):
    """The view that the scheduler asks, against the scheduler's own plain table."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.context = CONTEXTS[0]
        self.holders = HOLDERS[:5]
        self.view = IndexView(self.index, self.context, self.holders)
        self.table = ResidencyTable(len(self.holders), tiers=3)

    @rule(at=st.integers(0, 4), hashes=chains, tier=tiers)
    def store(self, at: int, hashes: list[int], tier: Tier) -> None:
        self.index.store(self.context, self.holders[at], hashes, tier)
        self.table.store(at, hashes, tier)

    @rule(at=st.integers(0, 4), hashes=chains, tier=tiers)
    def remove(self, at: int, hashes: list[int], tier: Tier) -> None:
        self.index.remove(self.context, self.holders[at], hashes, tier)
        self.table.remove(at, hashes, tier)

    @rule(at=st.integers(0, 4))
    def come_back(self, at: int) -> None:
        """One leaves, and another takes its number."""
        self.index.unregister(self.holders[at])
        self.index.register(self.context, Holder("newcomer"))
        self.table.clear(at)

    @rule(hashes=queries)
    def overlap(self, hashes: list[int]) -> None:
        assert (self.view.overlap(hashes) == self.table.overlap(hashes)).all()


TestView = ViewMachine.TestCase
