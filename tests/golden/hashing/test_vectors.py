"""Block hashes equal those of the engines' own code, bit for bit (README.md says where each comes from)."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonpool.conductor.blocks import BlockHasher
from moonpool.conductor.extra_keys import MediaItem, PromptExtras
from moonpool.conductor.recipes import Algorithm, HashRecipe
from moonpool.events import CacheContext
from moonpool.kernels.hashing import root_of_salt

CASES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("vectors.json").read_text())


def name_of(case: dict[str, Any]) -> str:
    recipe, context = case["recipe"], case["context"]
    marks = [mark for mark in ("lora", "salt") if context.get(mark)] + sorted(case.get("extras", {}))
    if not recipe.get("tagged_extras", True):
        marks.append("untagged")
    if recipe.get("lookahead_tokens"):
        marks.append(f"ahead{recipe['lookahead_tokens']}")
    return "-".join([recipe["algorithm"], str(context["block_tokens"]), *marks])


def hasher_of(case: dict[str, Any]) -> BlockHasher:
    options = dict(case["recipe"])
    recipe = HashRecipe(algorithm=Algorithm(options.pop("algorithm")), **options)
    context = CacheContext(model="m", **case["context"])
    return BlockHasher(recipe, context, lora_path=case.get("lora_path", ""))


def extras_of(case: dict[str, Any]) -> PromptExtras | None:
    if "extras" not in case:
        return None
    media = [MediaItem(*item) for item in case["extras"].get("media", [])]
    embeddings = {int(at): bytes.fromhex(raw) for at, raw in case["extras"].get("embeddings", {}).items()}
    return PromptExtras(media=media, embeddings=embeddings)


def key_of(digest: bytes, algorithm: str) -> int:
    """vLLM: the low 64 bits of the digest as a big-endian number. SGLang: the first 8 bytes."""
    return int.from_bytes(digest[:8] if algorithm.startswith("sglang") else digest[-8:], "big")


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_chain_equals_the_engine(case: dict[str, Any]) -> None:
    hasher = hasher_of(case)
    chain = hasher.chain(case["tokens"], extras=extras_of(case))
    if "digests" in case:
        digests = [bytes.fromhex(raw) for raw in case["digests"]]
        assert [chain.digest(block) for block in range(len(digests))] == digests
        assert chain.digests == b"".join(digests)
        assert chain.hashes.tolist() == [key_of(digest, case["recipe"]["algorithm"]) for digest in digests]
    else:
        assert chain.hashes.tolist() == case["hashes"]
        assert chain.digests == b""
    if case.get("local"):
        assert hasher.local_hashes(case["tokens"]).tolist() == case["local"]
    if "extras" not in case:
        assert hasher.hashes(case["tokens"]) == chain.hashes


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_chain_can_go_on_from_any_block(case: dict[str, Any]) -> None:
    hasher, extras = hasher_of(case), extras_of(case)
    whole = hasher.chain(case["tokens"], extras=extras)
    block_tokens = case["context"]["block_tokens"]
    for first in {1, len(whole.hashes) - 1, len(whole.hashes)} - {0}:
        parent = whole.digest(first - 1) if whole.digests else whole.hashes[first - 1]
        rest = hasher.chain(
            case["tokens"][first * block_tokens :], parent=parent, first_block=first, extras=extras
        )
        assert rest.hashes == whole.hashes[first:]
        assert rest.digests == whole.digests[first * whole.digest_bytes :]


@pytest.mark.parametrize("case", CASES[::3], ids=name_of)
def test_every_form_of_tokens_gives_the_same(case: dict[str, Any]) -> None:
    hasher, extras = hasher_of(case), extras_of(case)
    expected = hasher.chain(case["tokens"], extras=extras)
    tokens = case["tokens"]
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    forms = [
        tuple(tokens),
        np.array(tokens, np.uint32),
        np.array(tokens, np.int32),
        np.array(tokens, np.int64),
        array("I", tokens),
        packed,
        memoryview(b"?" + packed)[1:],
        [np.int64(token) for token in tokens],
    ]
    for form in forms:
        assert hasher.chain(form, extras=extras) == expected


# Mooncake Conductor's own test values for vLLM's recipes: seed text "0", blocks of 4 tokens, tokens 1 to 8.
PUBLISHED = [
    (Algorithm.VLLM_SHA256, [10362225831949560093, 12472515041799373675]),
    (Algorithm.VLLM_SHA256_CBOR, [2164874634404590027, 17270480062156288726]),
]


@pytest.mark.parametrize(("algorithm", "expected"), PUBLISHED)
def test_values_published_by_mooncake(algorithm: Algorithm, expected: list[int]) -> None:
    hasher = BlockHasher(HashRecipe(algorithm=algorithm, hash_seed="0"), CacheContext("m", 4))
    assert hasher.hashes(list(range(1, 9))).tolist() == expected


def test_the_root_published_by_mooncake() -> None:
    assert root_of_salt(b"") == 17241709254077376921
