"""What an engine's records become: contexts, tiers, groups, and names of our own recipe."""

from __future__ import annotations

from moonpool.conductor.blocks import BlockHasher
from moonpool.conductor.engine_payload import RawBatch, RawCleared, RawRemoved, RawStored
from moonpool.conductor.engine_source import EngineSource, SourceSpec
from moonpool.conductor.index import PrefixIndex
from moonpool.conductor.recipes import Algorithm, HashRecipe
from moonpool.events import BlocksCleared, BlocksRemoved, BlocksStored, CacheContext, Holder, Tier

CONTEXT = CacheContext("m", 2)
ME = Holder("i", 0)


def source(**more: object) -> EngineSource:
    return EngineSource(SourceSpec(instance="i", context=CONTEXT, **more))  # type: ignore[arg-type]


def batch(*events: object, rank: int | None = None) -> RawBatch:
    return RawBatch(0.0, events, rank)  # type: ignore[arg-type]


def test_records_are_the_instances_events_in_order() -> None:
    events = source().events(
        batch(
            RawStored((1, 2), None, (5, 6, 7, 8), 2, "GPU"),
            RawRemoved((1,), "GPU"),
            RawStored((2**64 - 1,), 2, (), 2, "CPU_TIER1"),
            RawCleared(),
        )
    )
    assert events == [
        BlocksStored(CONTEXT, ME, [1, 2], Tier.DEVICE, None, (5, 6, 7, 8)),
        BlocksRemoved(CONTEXT, ME, [1], Tier.DEVICE),
        BlocksStored(CONTEXT, ME, [2**64 - 1], Tier.HOST, 2, ()),  # type: ignore[arg-type]
        BlocksCleared(ME),
    ]


def test_a_batch_names_its_rank_and_an_event_its_lora_and_block_size() -> None:
    events = source(rank=1).events(batch(RawStored((1,), None, (), 16, None, "sql"), rank=3))
    assert events == [BlocksStored(CacheContext("m", 16, lora="sql"), Holder("i", 3), [1])]  # type: ignore[list-item]
    quiet = source(rank=1).events(batch(RawStored((1,), None, (), 0)))
    assert quiet[0].holder == Holder("i", 1)


def test_a_removal_reaches_every_context_that_the_stream_stored_in() -> None:
    index, reader = PrefixIndex(), source()
    for event in reader.events(batch(RawStored((1,), None, (), 2), RawStored((2,), None, (), 2, None, "l"))):
        index.apply(event)
    assert len(index) == 2
    for event in reader.events(batch(RawRemoved((1, 2)))):
        index.apply(event)
    assert len(index) == 0


def test_groups_that_are_no_prefix_are_passed_over_and_their_removals_too() -> None:
    reader = source()
    window = RawStored((1, 2), None, (), 2, "GPU", None, None, 1, "sliding_window")
    full = RawStored((3,), None, (), 2, "GPU", None, None, 0, "full_attention")
    events = reader.events(batch(window, full, RawRemoved((1, 2), "GPU", 1), RawRemoved((3,), "GPU", 0)))
    assert [type(event) for event in events] == [BlocksStored, BlocksRemoved]
    assert reader.counters.groups_passed_over == 4


def test_an_unknown_medium_is_counted_and_passed_over() -> None:
    reader = source()
    assert reader.events(batch(RawStored((1,), None, (), 2, "TAPE"), RawRemoved((1,), "TAPE"))) == []
    assert reader.counters.media_unknown == 2


RECIPE = HashRecipe(algorithm=Algorithm.XXH3, seed=7)
TOKENS = (5, 6, 7, 8, 9, 10)
OURS = BlockHasher(RECIPE, CONTEXT).hashes(TOKENS)


def test_blocks_get_names_of_our_own_recipe() -> None:
    reader = source(rehash=RECIPE)
    first = reader.events(batch(RawStored((b"a" * 32, b"b" * 32), None, TOKENS[:4], 2)))
    assert list(first[0].hashes) == list(OURS[:2])  # type: ignore[union-attr]
    second = reader.events(batch(RawStored((b"c" * 32,), b"b" * 32, TOKENS[4:], 2)))
    assert list(second[0].hashes) == [OURS[2]]  # type: ignore[union-attr]
    assert second[0].parent == OURS[1]  # type: ignore[union-attr]
    # Offloaded without tokens: known by the engine's own hash.
    moved = reader.events(batch(RawStored((b"b" * 32,), None, (), 2, "CPU"), RawRemoved((b"b" * 32,), "GPU")))
    assert [list(event.hashes) for event in moved] == [[OURS[1]], [OURS[1]]]  # type: ignore[union-attr]
    assert reader.names_kept == 3
    left = reader.events(batch(RawRemoved((b"b" * 32,), "CPU"), RawRemoved((b"zz" * 16,), "GPU")))
    assert [list(event.hashes) for event in left] == [[OURS[1]], []]  # type: ignore[union-attr]
    assert reader.names_kept == 2


def test_a_block_that_cannot_be_named_is_left_out_with_what_follows_it() -> None:
    reader = source(rehash=RECIPE)
    assert reader.events(batch(RawStored((1, 2), 99, TOKENS[:4], 2))) == []  # parent never heard of
    assert reader.events(batch(RawStored((1, 2), None, TOKENS[:3], 2))) == []  # tokens missing
    assert reader.counters.unnamed == 4


def test_names_are_bounded_and_go_with_their_rank_or_all() -> None:
    reader = source(rehash=RECIPE, names_max=2)
    events = reader.events(batch(RawStored((1, 2, 3), None, TOKENS, 2)))
    assert list(events[0].hashes) == list(OURS[:2])  # type: ignore[union-attr]
    assert reader.counters.unnamed == 1
    reader.events(batch(RawStored((1,), None, TOKENS[:2], 2), rank=1))
    reader.events(batch(RawCleared(), rank=0))
    assert reader.names_kept == 1
    reader.forget()
    assert reader.names_kept == 0
