"""The prefix index by example: tiers, ranks, tenants, bounds, the universal block, and what goes wrong."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonpool.conductor import BlockHasher, CacheContext, HashRecipe, Holder, IndexConfig, PrefixIndex, Tier
from moonpool.conductor.index_view import IndexView
from moonpool.conductor.prefix_match import Depths, ZeroReason
from moonpool.errors import LimitExceeded, UsageError
from moonpool.events import BlocksCleared, BlocksRemoved, BlocksStored, EventBatch, ObjectsStored

CONTEXT = CacheContext("llama", 16)
A, B, C = Holder("a"), Holder("b"), Holder("c")


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(IndexConfig(table_seed=7))


def test_ten_lines_in_a_strangers_router() -> None:
    """The face of the library: hash a prompt, note who computed it, ask who has the next one."""
    index = PrefixIndex()
    context = CacheContext(model="llama-3-8b", block_tokens=16)
    hasher = BlockHasher(HashRecipe(), context)
    first = list(range(100))
    index.store(context, Holder("engine-0"), hasher.hashes(first))
    match = index.query(context, hasher.hashes([*first[:64], 7, 7, 7]))
    assert match.depths() == {Holder("engine-0"): 4}


def test_the_example_of_the_page_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "conductor" / "index.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    exec(code, {})
    assert f"# {capsys.readouterr().out.strip()}" in code


def test_tiers_count_on_from_each_other(index: PrefixIndex) -> None:
    index.store(CONTEXT, A, [1, 2, 3], Tier.DEVICE)
    index.store(CONTEXT, A, [3, 4, 5], Tier.HOST)
    index.store(CONTEXT, A, [6, 2], Tier.DISK)
    match = index.query(CONTEXT, [1, 2, 3, 4, 5, 6, 7])
    assert match.by_holder() == {A: Depths(3, 5, 6)}
    assert match.depth == 6
    assert match.blocks == 7


def test_a_holder_never_goes_back_to_a_faster_tier_unless_mixed(index: PrefixIndex) -> None:
    index.store(CONTEXT, A, [1, 3], Tier.DEVICE)
    index.store(CONTEXT, A, [2], Tier.HOST)
    assert index.query(CONTEXT, [1, 2, 3]).by_holder() == {A: Depths(1, 2, 2)}
    assert index.query(CONTEXT, [1, 2, 3], mixed=True).by_holder() == {A: Depths(1, 3, 3)}


def test_a_block_may_start_on_disk(index: PrefixIndex) -> None:
    index.store(CONTEXT, A, [1, 2], Tier.DISK)
    assert index.query(CONTEXT, [1, 2]).by_holder() == {A: Depths(0, 0, 2)}


def test_ranks_are_holders_of_their_own(index: PrefixIndex) -> None:
    index.store(CONTEXT, Holder("a", 0), [1, 2])
    index.store(CONTEXT, Holder("a", 1), [1, 2, 3])
    index.store(CONTEXT, Holder("a", 1), [1], Tier.HOST)
    index.store(CONTEXT, Holder("b", 0), [1])
    match = index.query(CONTEXT, [1, 2, 3, 4])
    assert match.depths() == {Holder("a", 0): 2, Holder("a", 1): 3, Holder("b", 0): 1}
    assert match.by_instance() == {"a": Depths(3, 3, 3), "b": Depths(1, 1, 1)}
    assert match.holders == [Holder("a", 0), Holder("a", 1), Holder("b", 0)]


def test_removal_in_the_middle_cuts_the_match(index: PrefixIndex) -> None:
    index.store(CONTEXT, A, [1, 2, 3, 4])
    assert index.remove(CONTEXT, A, [3, 99]) == 1
    assert index.query(CONTEXT, [1, 2, 3, 4]).depths() == {A: 2}
    assert index.blocks_held(A) == {Tier.DEVICE: 3, Tier.HOST: 0, Tier.DISK: 0}
    index.store(CONTEXT, A, [3])
    assert index.query(CONTEXT, [1, 2, 3, 4]).depths() == {A: 4}


def test_storing_and_removing_twice_changes_nothing_more(index: PrefixIndex) -> None:
    assert index.store(CONTEXT, A, [1, 2]) == 2
    assert index.store(CONTEXT, A, [1, 2]) == 0
    assert index.remove(CONTEXT, A, [2]) == 1
    assert index.remove(CONTEXT, A, [2]) == 0
    assert index.remove(CONTEXT, B, [1]) == 0
    assert len(index) == 1


@pytest.mark.parametrize(
    "other",
    [
        CONTEXT._replace(model="other"),
        CONTEXT._replace(block_tokens=32),
        CONTEXT._replace(tenant="other"),
        CONTEXT._replace(lora="other"),
        CONTEXT._replace(salt="other"),
    ],
)
def test_contexts_are_apart(index: PrefixIndex, other: CacheContext) -> None:
    index.store(CONTEXT, A, [1, 2])
    assert index.query(other, [1, 2]).why_nothing() is ZeroReason.UNKNOWN_CONTEXT
    index.store(other, B, [1])
    assert index.query(other, [1, 2]).depths() == {B: 1}
    assert index.query(CONTEXT, [1, 2]).depths() == {A: 2}
    assert index.clear(B) == 1
    assert index.query(CONTEXT, [1, 2]).depths() == {A: 2}


def test_why_nobody_matches(index: PrefixIndex) -> None:
    index.register(CONTEXT, A)
    assert index.query(CONTEXT, [1]).why_nothing() is ZeroReason.FIRST_BLOCK_UNKNOWN
    assert index.query(CONTEXT, []).why_nothing() is ZeroReason.SHORT_PROMPT
    assert index.query(CONTEXT._replace(salt="x"), [1]).why_nothing() is ZeroReason.UNKNOWN_CONTEXT
    index.store(CONTEXT, A, [1])
    assert index.query(CONTEXT, [1]).why_nothing() is None


def test_universal_blocks_are_discounted(index: PrefixIndex) -> None:
    """The block that every prompt starts with: it must not draw every prompt to one instance."""
    for holder in (A, B, C):
        index.store(CONTEXT, holder, [1, 2])
    index.store(CONTEXT, A, [3, 4])
    index.store(CONTEXT, B, [3])
    index.store(CONTEXT, B, [4], Tier.HOST)
    match = index.query(CONTEXT, [1, 2, 3, 4])
    assert match.universal() == 2
    assert match.universal(0.6) == 4
    assert match.universal(1 / 3) == 4
    assert match.marginal() == {A: Depths(2, 2, 2), B: Depths(1, 2, 2), C: Depths(0, 0, 0)}
    assert match.worth() == {A: 2.0, B: 1.75, C: 0.0}
    assert match.worth((1.0, 0.5, 0.0), share=None) == {A: 4.0, B: 3.5, C: 2.0}
    index.register(CONTEXT, Holder("empty"))
    late = index.query(CONTEXT, [1, 2, 3, 4])
    assert late.universal() == 0
    assert late.universal(0.75) == 2
    assert match.universal() == 2  # what it was then


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_a_share_of_holders_is_above_nothing_and_at_most_all(index: PrefixIndex, share: float) -> None:
    with pytest.raises(UsageError, match="share"):
        index.query(CONTEXT, [1]).universal(share)


def test_a_share_of_seven_tenths_of_ten_is_seven(index: PrefixIndex) -> None:
    for number in range(10):
        index.store(CONTEXT, Holder(f"h{number}"), [1] if number < 7 else [2])
    assert index.query(CONTEXT, [1]).universal(0.7) == 1
    assert index.query(CONTEXT, [1]).universal(0.71) == 0


def test_a_match_keeps_the_names_of_its_time(index: PrefixIndex) -> None:
    index.store(CONTEXT, A, [1])
    match = index.query(CONTEXT, [1])
    index.unregister(A)
    index.store(CONTEXT, B, [1])
    assert index.number(B) == 0
    assert match.depths() == {A: 1}
    assert index.query(CONTEXT, [1]).depths() == {B: 1}


def test_clear_is_by_context_and_tier_and_keeps_the_member(index: PrefixIndex) -> None:
    other = CONTEXT._replace(lora="l")
    for context in (CONTEXT, other):
        for tier in Tier:
            index.store(context, A, [1, 2], tier)
    assert index.clear(A, other, Tier.HOST) == 2
    assert index.holds(other, A, 1) == {Tier.DEVICE, Tier.DISK}
    assert index.clear(A, None, Tier.DEVICE) == 4
    assert index.blocks_held(A) == {Tier.DEVICE: 0, Tier.HOST: 2, Tier.DISK: 4}
    assert index.clear(A) == 4
    assert len(index) == 0
    assert index.members(CONTEXT) == {A}
    assert index.clear(Holder("nobody")) == 0
    assert index.clear(A, CONTEXT._replace(model="unknown")) == 0


def test_unregistering_frees_numbers_for_others(index: PrefixIndex) -> None:
    for holder in (A, B, C):
        index.store(CONTEXT, holder, [1, 2])
    assert index.unregister(B) == 2
    assert index.unregister(B) == 0
    assert index.members(CONTEXT) == {A, C}
    newcomer = Holder("newcomer")
    index.store(CONTEXT, newcomer, [1])
    assert index.number(newcomer) == 1
    assert index.query(CONTEXT, [1, 2]).depths() == {A: 2, newcomer: 1, C: 2}
    for holder in (A, C, newcomer):
        index.unregister(holder, CONTEXT)
    assert index.contexts() == ()
    assert len(index) == 0
    index.check()


def test_events_do_what_the_methods_do(index: PrefixIndex) -> None:
    assert index.apply(BlocksStored(CONTEXT, A, [1, 2], Tier.HOST)) == 2
    assert index.apply(BlocksRemoved(CONTEXT, A, [2])) == 1
    assert index.apply(BlocksCleared(A)) == 1
    for wrong in (ObjectsStored("t", (b"k",), "node", Tier.HOST), EventBatch("s", 0, ()), None):
        with pytest.raises(UsageError, match="takes no"):
            index.apply(wrong)  # type: ignore[arg-type]


BOUNDS: list[tuple[str, IndexConfig, Callable[[PrefixIndex], Any]]] = [
    ("blocks_max", IndexConfig(blocks_max=2), lambda index: index.store(CONTEXT, A, [1, 2, 3])),
    ("holders_max", IndexConfig(holders_max=1), lambda index: index.register(CONTEXT, B)),
    (
        "contexts_max",
        IndexConfig(contexts_max=1),
        lambda index: index.register(CONTEXT._replace(salt="2"), A),
    ),
    (
        "set_bytes_max",
        IndexConfig(set_bytes_max=128),
        lambda index: [index.store(CONTEXT, A, [1], tier) for tier in Tier],
    ),
]


@pytest.mark.parametrize(("field", "config", "act"), BOUNDS, ids=[bound[0] for bound in BOUNDS])
def test_every_bound_is_a_typed_error(
    field: str, config: IndexConfig, act: Callable[[PrefixIndex], Any]
) -> None:
    index = PrefixIndex(config)
    index.store(CONTEXT, A, [1, 2])
    with pytest.raises(LimitExceeded, match=field) as caught:
        act(index)
    assert caught.value.field == field
    assert caught.value.limit == getattr(config, field)
    index.check()
    assert index.query(CONTEXT, [1, 2]).depth == 2


def test_a_call_is_bounded() -> None:
    index = PrefixIndex(IndexConfig(call_blocks_max=3))
    index.store(CONTEXT, A, [1, 2, 3])
    for call in (
        lambda: index.store(CONTEXT, A, [1, 2, 3, 4]),
        lambda: index.remove(CONTEXT, A, [1, 2, 3, 4]),
        lambda: index.query(CONTEXT, [1, 2, 3, 4]),
        lambda: index.query_depths(CONTEXT, [1, 2, 3, 4]),
        lambda: index.query_many(CONTEXT, [1, 2, 3, 4], [0, 4]),
    ):
        with pytest.raises(UsageError, match="call_blocks_max"):
            call()


@pytest.mark.parametrize(
    "changes",
    [
        {"blocks_max": 0},
        {"blocks_max": 2**31},
        {"holders_max": 0},
        {"contexts_max": 0},
        {"set_bytes_max": 1},
        {"call_blocks_max": 0},
        {"table_seed": -1},
        {"table_seed": 2**64},
        {"blocks_max": "many"},
    ],
)
def test_wrong_bounds_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        IndexConfig(**changes)
    assert caught.value.field == next(iter(changes))


@pytest.mark.parametrize(
    ("context", "holder"),
    [
        (CacheContext("", 16), A),
        (CacheContext("m", 0), A),
        (CacheContext("m", 8193), A),
        (CacheContext("m", 16, tenant=None), A),  # type: ignore[arg-type]
        (CONTEXT, Holder("")),
        (CONTEXT, Holder("a", -1)),
        (CONTEXT, Holder("a", 65536)),
    ],
)
def test_impossible_names_are_refused(index: PrefixIndex, context: CacheContext, holder: Holder) -> None:
    with pytest.raises(UsageError):
        index.store(context, holder, [1])
    with pytest.raises(UsageError):
        index.register(context, holder)
    assert index.contexts() == ()
    index.check()


def test_thousands_of_instances(index: PrefixIndex) -> None:
    """4,000 holders share a system prompt and have one chain each."""
    source = random.Random(8)
    shared = [source.getrandbits(64) for _ in range(3)]
    own = [[source.getrandbits(64) for _ in range(5)] for _ in range(4000)]
    for number in range(4000):
        index.store(CONTEXT, Holder(f"h{number}"), [*shared, *own[number]])
    match = index.query(CONTEXT, [*shared, *own[77]])
    assert match.universal() == 3
    assert len(match) == 4000
    assert {holder: row.disk for holder, row in match.marginal().items() if row.disk} == {Holder("h77"): 5}
    statistics = index.statistics()
    assert (statistics.blocks, statistics.holders, statistics.holder_sets) == (20_003, 4000, 4001)
    index.check()


def test_the_same_events_give_the_same_index() -> None:
    """Same seed, same run: neither the table's own seed nor the order of names in sets may show."""
    runs = []
    for table_seed in (1, 2):
        source = random.Random(9)
        index = PrefixIndex(IndexConfig(table_seed=table_seed))
        keys = [source.getrandbits(64) for _ in range(200)]
        for _ in range(400):
            holder = Holder(f"h{source.randrange(9)}", source.randrange(2))
            chain = keys[source.randrange(150) :][: source.randrange(50)]
            if source.random() < 0.7:
                index.store(CONTEXT, holder, chain, Tier(source.randrange(3)))
            elif source.random() < 0.9:
                index.remove(CONTEXT, holder, chain, None)
            else:
                index.unregister(holder)
        asked = [keys[start : start + 20] for start in range(0, 180, 7)]
        answers = [index.query(CONTEXT, chain).by_holder() for chain in asked]
        runs.append((answers, [list(answer) for answer in answers], index.statistics()))
    assert runs[0] == runs[1]
    assert any(answer for answer in runs[0][0])


def test_a_view_answers_in_the_order_of_its_holders(index: PrefixIndex) -> None:
    index.store(CONTEXT, B, [1, 2])
    view = IndexView(index, CONTEXT, [C, A, B])
    index.store(CONTEXT, C, [1])
    index.store(CONTEXT, C, [2], Tier.HOST)
    found = view.overlap([1, 2, 3])
    assert found.dtype == np.int32
    assert found.tolist() == [[1, 0, 2], [2, 0, 2], [2, 0, 2]]
    for wrong in ([], [A, A]):
        with pytest.raises(UsageError, match="view"):
            IndexView(index, CONTEXT, wrong)


def test_importing_the_conductor_loads_nothing_heavy() -> None:
    code = (
        "import sys, moonpool.conductor; print([n for n in ('numpy', 'numba') if n in sys.modules]); "
        "from moonpool.conductor import PrefixIndex; PrefixIndex(); print('numba' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split("\n")[:2] == ["[]", "False"]
