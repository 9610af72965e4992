"""Recipes, extra keys, chains and events: what they refuse, and small facts that vectors do not pin."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from moonpool.conductor.blocks import BlockHasher
from moonpool.conductor.extra_keys import MediaItem, PromptExtras, encode_cbor, encode_pickle
from moonpool.conductor.recipes import Algorithm, HashRecipe
from moonpool.errors import UsageError
from moonpool.events import MEDIA, CacheContext, Tier, block_hash, tier_of_medium
from moonpool.native.table.chains import DigestChain, Xxh3Chain

CONTEXT = CacheContext("m", 4)
TOKENS = list(range(20))
ALL = [
    HashRecipe(algorithm=algorithm, hash_seed="0" if "xxhash" in algorithm else None)
    for algorithm in Algorithm
]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"algorithm": "xxh3"}, "algorithm"),
        ({"algorithm": Algorithm.DYNAMO, "seed": 5}, "seed"),
        ({"algorithm": Algorithm.XXH3, "seed": 2**64}, "seed"),
        ({"algorithm": Algorithm.SGLANG, "hash_seed": "0"}, "hash_seed"),
        ({"algorithm": Algorithm.VLLM_XXHASH}, "hash_seed"),
        ({"algorithm": Algorithm.VLLM_SHA256, "hash_seed": "x" * 2000}, "hash_seed"),
        ({"algorithm": Algorithm.SGLANG, "lookahead_tokens": 1}, "lookahead_tokens"),
        ({"algorithm": Algorithm.DYNAMO, "lookahead_tokens": 2}, "lookahead_tokens"),
        ({"algorithm": Algorithm.VLLM_SHA256, "lookahead_tokens": -1}, "lookahead_tokens"),
    ],
)
def test_options_that_a_recipe_has_not_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError) as caught:
        HashRecipe(**options)
    assert caught.value.field == field


@pytest.mark.parametrize("recipe", ALL, ids=lambda recipe: recipe.algorithm)
def test_only_whole_blocks_are_hashed(recipe: HashRecipe) -> None:
    hasher = BlockHasher(recipe, CONTEXT)
    whole = hasher.hashes(TOKENS[:17])
    for count in range(17):
        assert hasher.hashes(TOKENS[:count]) == whole[: max(0, count - ("bigram" in recipe.algorithm)) // 4]
    assert len(hasher.hashes([])) == 0


@pytest.mark.parametrize("recipe", ALL, ids=lambda recipe: recipe.algorithm)
def test_a_hash_stands_for_the_whole_prefix(recipe: HashRecipe) -> None:
    hasher = BlockHasher(recipe, CONTEXT)
    chain = hasher.hashes(TOKENS)
    for at in range(len(TOKENS)):
        changed = hasher.hashes([*TOKENS[:at], 999, *TOKENS[at + 1 :]])
        same = [a == b for a, b in zip(chain, changed, strict=True)]
        # A bigram page also covers the token after it.
        assert same == [4 * (block + 1) + ("bigram" in recipe.algorithm) <= at for block in range(len(chain))]


@pytest.mark.parametrize("recipe", ALL, ids=lambda recipe: recipe.algorithm)
def test_prompts_at_once_equal_one_by_one(recipe: HashRecipe) -> None:
    hasher = BlockHasher(recipe, CONTEXT)
    prompts = [TOKENS, [], TOKENS[5:9], TOKENS[:3], TOKENS[2:]]
    flat = [token for prompt in prompts for token in prompt]
    offsets = np.cumsum([0, *map(len, prompts)]).tolist()
    for form in (flat, np.array(flat, np.uint32)):
        hashes, starts = hasher.hashes_of_prompts(form, offsets)
        assert [hashes[low:high] for low, high in pairwise(starts)] == [
            hasher.hashes(prompt) for prompt in prompts
        ]
    for wrong in ([0, 5, 3], [0, len(flat) + 1]):
        with pytest.raises(UsageError, match="offsets"):
            hasher.hashes_of_prompts(flat, wrong)


@pytest.mark.parametrize("recipe", ALL, ids=lambda recipe: recipe.algorithm)
@pytest.mark.parametrize(
    "wrong",
    [[1, -1, 2, 3, 4], [1, 2, 3, 2**32, 4], [1, 2.5, 3, 4, 5], "text", None, 7, np.zeros(4, "f4")],
    ids=str,
)
def test_wrong_tokens_are_refused(recipe: HashRecipe, wrong: Any) -> None:
    with pytest.raises(UsageError, match="tokens") as caught:
        BlockHasher(recipe, CONTEXT).hashes(wrong)
    assert caught.value.field == "tokens"


@pytest.mark.parametrize(
    "wrong",
    [
        np.array([1, -1], np.int32),
        np.array([1, -1], np.int64),
        np.array([1, 2**32], np.int64),
        np.zeros(4, np.uint16),
        np.zeros(8, np.uint32)[::2],
        np.zeros((2, 4), np.uint32),
        b"12345",
    ],
    ids=str,
)
def test_wrong_buffers_of_tokens_are_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="tokens"):
        Xxh3Chain(block_tokens=1).chain(wrong)


def test_a_token_that_pickle_would_write_differently_is_refused() -> None:
    hasher = BlockHasher(HashRecipe(algorithm=Algorithm.VLLM_SHA256), CONTEXT)
    with pytest.raises(UsageError, match="CBOR"):
        hasher.hashes([1, 2, 3, 2**31])
    cbor = BlockHasher(HashRecipe(algorithm=Algorithm.VLLM_SHA256_CBOR), CONTEXT)
    assert len(cbor.hashes([1, 2, 3, 2**31])) == 1


@pytest.mark.parametrize("recipe", ALL, ids=lambda recipe: recipe.algorithm)
def test_parents_of_the_wrong_kind_are_refused(recipe: HashRecipe) -> None:
    hasher = BlockHasher(recipe, CONTEXT)
    takes_digests = recipe.algorithm.is_vllm or recipe.algorithm.is_sglang
    wrong: Any = 5 if takes_digests else b"x" * 32
    with pytest.raises(UsageError, match="parent"):
        hasher.chain(TOKENS, parent=wrong, first_block=1)
    for options in ({"parent": b"x" * 32 if takes_digests else 5}, {"first_block": 1}, {"first_block": -1}):
        with pytest.raises(UsageError) as caught:
            hasher.chain(TOKENS, **options)
        assert caught.value.field == "first_block"


@pytest.mark.parametrize("recipe", ALL, ids=lambda recipe: recipe.algorithm)
def test_extra_keys_are_vllms_alone(recipe: HashRecipe) -> None:
    extras = PromptExtras(media=[MediaItem("hash", 2, 3)])
    hasher = BlockHasher(recipe, CONTEXT)
    if recipe.algorithm.is_vllm:
        plain, rich = hasher.hashes(TOKENS), hasher.chain(TOKENS, extras=extras).hashes
        assert plain[0] != rich[0]
        return
    with pytest.raises(UsageError, match="extra keys"):
        hasher.chain(TOKENS, extras=extras)


def test_hashes_of_blocks_alone_are_xxh3s() -> None:
    with pytest.raises(UsageError, match="alone"):
        BlockHasher(HashRecipe(algorithm=Algorithm.SGLANG), CONTEXT).local_hashes(TOKENS)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"media": [MediaItem("a", 5, 1), MediaItem("b", 4, 1)]}, "media"),
        ({"media": [MediaItem("a", 5, 0)]}, "media"),
        ({"embeddings": {0: b"short"}}, "embeddings"),
    ],
)
def test_impossible_extras_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError) as caught:
        PromptExtras(**options)
    assert caught.value.field == field


CBOR = [
    (None, "f6"),
    (0, "00"),
    (23, "17"),
    (24, "1818"),
    (255, "18ff"),
    (256, "190100"),
    (65536, "1a00010000"),
    (2**32, "1b0000000100000000"),
    (-1, "20"),
    (-257, "390100"),
    ("", "60"),
    ("ü", "62c3bc"),
    (b"\x01\x02", "420102"),
    (("a", (1, None)), "82616182" + "01f6"),
]


@pytest.mark.parametrize(("value", "expected"), CBOR, ids=[repr(value) for value, _ in CBOR])
def test_canonical_cbor(value: Any, expected: str) -> None:
    """Source: RFC 8949, appendix A."""
    assert encode_cbor(value).hex() == expected


def test_cbor_refuses_what_has_no_head() -> None:
    with pytest.raises(UsageError, match="64 bits"):
        encode_cbor(2**64)


@pytest.mark.parametrize("extra", [None, ("lora",), (("mm", "x" * 300, -3), ("mm", "y", 4)), (b"\0" * 32,)])
def test_pickled_extras_fit_every_block(extra: Any) -> None:
    """Cut out of one pickle and put into another, they give what pickle itself gives."""
    inside = encode_pickle(extra)
    for tokens in ((), (1,), (1, 2, 3), (70_000,) * 100):
        whole = pickle.dumps((bytes(range(32)), tokens, extra), protocol=5)
        if tokens:
            assert whole.endswith(inside + b"\x87\x94.")


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Xxh3Chain(block_tokens=0), "block_tokens"),
        (lambda: Xxh3Chain(block_tokens=9000), "block_tokens"),
        (lambda: Xxh3Chain(block_tokens=4, window_tokens=3), "window_tokens"),
        (lambda: Xxh3Chain(block_tokens=4, window_tokens=9), "window_tokens"),
        (lambda: DigestChain(block_tokens=4, encoding="json", digest="sha256", root=b""), "encoding"),
        (lambda: DigestChain(block_tokens=4, encoding="page", digest="md5", root=b""), "digest"),
        (lambda: DigestChain(block_tokens=4, encoding="page", digest="sha256", root=b"x" * 256), "parent"),
        (lambda: Xxh3Chain(block_tokens=1).chain([1], None, [b"x" * 20_000]), "extras"),
        (lambda: Xxh3Chain(block_tokens=1).chain([1], None, ["text"]), "extras"),
        (lambda: Xxh3Chain(block_tokens=1).chain_prompts([1, 2], [0, 2]), "tokens"),
        (lambda: Xxh3Chain(block_tokens=1).chain_prompts(np.zeros(2, np.uint32), [0, 3]), "offsets"),
        (lambda: Xxh3Chain(block_tokens=1).chain_prompts(np.zeros(2, np.uint32), [2, 0]), "offsets"),
        (
            lambda: DigestChain(block_tokens=1, encoding="page", digest="sha256", root=b"").chain(
                [1], None, [b"x"]
            ),
            "extras",
        ),
    ],
)
def test_native_chains_refuse_wrong_arguments(make: Any, field: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert caught.value.field == field


def test_a_list_that_shrinks_while_it_is_read_is_harmless() -> None:
    tokens: list[Any] = []

    class Shrinking:
        def __index__(self) -> int:
            tokens.clear()
            return 1

    tokens += [0, Shrinking(), 2, 3]
    with pytest.raises(UsageError, match="shortened"):
        Xxh3Chain(block_tokens=4).chain(tokens)
    tokens += [0, Shrinking(), 2, 3] * 2
    with pytest.raises(UsageError, match="shortened"):
        Xxh3Chain(block_tokens=2).chain(tokens)


def test_media_have_tiers() -> None:
    assert tier_of_medium(None) is Tier.DEVICE
    assert tier_of_medium("gpu") is Tier.DEVICE
    assert tier_of_medium("CPU_TIER2") is Tier.HOST
    assert tier_of_medium("Disk") is Tier.DISK
    assert set(MEDIA.values()) == set(Tier)
    assert [tier.label for tier in Tier] == ["G1", "G2", "G3"]
    with pytest.raises(UsageError, match="punch cards"):
        tier_of_medium("punch cards")


def test_hashes_in_every_form_that_engines_send() -> None:
    assert block_hash(5) == 5
    assert block_hash(-1) == 2**64 - 1
    assert block_hash(2**64 - 1) == 2**64 - 1
    assert block_hash(bytes(24) + b"\x01\x02\x03\x04\x05\x06\x07\x08") == 0x0102030405060708
    for wrong in (2**64, -(2**63) - 1, b"short", "text", None):
        with pytest.raises(UsageError):
            block_hash(wrong)  # type: ignore[arg-type]
