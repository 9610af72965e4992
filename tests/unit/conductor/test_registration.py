"""Registrations: the fields of three programs, what is believed of their hashes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.conductor.recipes import Algorithm, HashRecipe
from moonpool.conductor.registration import EngineKind, plain, read_registration
from moonpool.errors import UsageError

BASE = {"instance_id": "i", "modelname": "m", "block_size": 16}
PROFILE = {
    "strategy": "vllm_v1",
    "algorithm": "sha256_cbor",
    "python_hash_seed": "0",
    "index_projection": "low64_be",
}


def test_without_a_profile_blocks_are_named_anew() -> None:
    found = read_registration({**BASE, "type": "vllm", "endpoint": "tcp://h:1", "dp_rank": 2}, seed=9)
    assert (found.kind, found.rank, found.rehash) == (EngineKind.VLLM, 2, True)
    assert found.recipe == HashRecipe(algorithm=Algorithm.XXH3, seed=9)


def test_a_profile_is_believed_and_its_seed_is_a_text() -> None:
    found = read_registration({**BASE, "hash_profile": PROFILE}, seed=9)
    assert found.recipe == HashRecipe(algorithm=Algorithm.VLLM_SHA256_CBOR, hash_seed="0")
    assert not found.rehash
    literal = read_registration({**BASE, "hash_profile": {**PROFILE, "python_hash_seed": "random"}}, seed=9)
    assert literal.recipe.hash_seed == "random"
    unknown = {name: value for name, value in PROFILE.items() if name != "python_hash_seed"}
    assert read_registration({**BASE, "hash_profile": unknown}, seed=9).rehash
    sglang = {"strategy": "sglang", "algorithm": "sha256_raw", "index_projection": "first64_be"}
    assert read_registration({**BASE, "hash_profile": sglang}, seed=9).recipe.algorithm is Algorithm.SGLANG


def test_contexts_differ_by_recipe_and_by_a_salt_that_is_not_in_the_hashes() -> None:
    def context(**more: Any) -> Any:
        return read_registration({**BASE, **more}, seed=9).context

    assert context() != context(additionalsalt="s")
    assert context(hash_profile=PROFILE) == context(hash_profile=PROFILE, additionalsalt="s")
    assert context() != context(hash_profile=PROFILE)


@pytest.mark.parametrize(
    "body",
    [
        BASE,
        {**BASE, "hash_profile": PROFILE, "lora_name": "l", "tenant_id": "t", "topic": "kv@"},
        {**BASE, "recipe": {"algorithm": "dynamo"}, "endpoint": "ipc:///a", "replay_endpoint": "tcp://h:2"},
        {**BASE, "recipe": {"algorithm": "vllm_sha256", "hash_seed": None, "tagged_extras": False}},
    ],
)
def test_a_registration_survives_its_plain_form(body: dict[str, Any]) -> None:
    found = read_registration(body, seed=9)
    assert read_registration(plain(found), seed=9) == found


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"modelname": None}, "model"),
        ({"instance_id": 5}, "instance"),
        ({"instance_id": ""}, "instance"),
        ({"block_size": "16"}, "block_tokens"),
        ({"block_size": True}, "block_tokens"),
        ({"block_size": 0}, "block_tokens"),
        ({"dp_rank": -1}, "rank"),
        ({"endpoint": "host:1"}, "endpoint"),
        ({"type": "llama.cpp"}, "type"),
        ({"cache_group": 1}, "cache_group"),
        ({"colour": "red"}, "colour"),
        ({5: "red"}, "5"),
        ({"hash_profile": "sha256"}, "hash_profile"),
        ({"hash_profile": {**PROFILE, "algorithm": "md5"}}, "hash_profile"),
        ({"hash_profile": {**PROFILE, "root_digest": "00"}}, "root_digest"),
        ({"hash_profile": {**PROFILE, "python_hash_seed": 0}}, "hash_profile"),
        ({"hash_profile": {**PROFILE, "index_projection": "first64_be"}}, "hash_profile"),
        ({"recipe": {"algorithm": "md5"}}, "recipe"),
        ({"recipe": {"algorithm": "xxh3", "seed": "a"}}, "recipe"),
        ({"recipe": 7}, "recipe"),
        ({"lora_name": "l" * 300}, "lora"),
    ],
)
def test_what_is_refused_names_its_field(more: dict[Any, Any], field: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_registration({**BASE, **more}, seed=9)
    assert caught.value.field == field
