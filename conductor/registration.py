"""What an engine's registration says, checked: Mooncake's fields, those of its C++ generation, and ours.

Both of Mooncake's generations are taken. A registration with a `hash_profile` is believed to hash that way.
One without is not: its blocks are named anew from the tokens of its events (`rehash`), by XXH3 with the
service's seed, which is the hash standard of Mooncake's RFC 1527.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, final

from moonpool.conductor.engine_source import SourceSpec
from moonpool.conductor.recipes import Algorithm, HashRecipe
from moonpool.errors import UsageError
from moonpool.events import DEFAULT_TENANT, CacheContext, Holder, check_context, check_holder

ENDPOINT_BYTES_MAX: Final = 512
NAME_BYTES_MAX: Final = 256


class EngineKind(StrEnum):
    """Who speaks on a stream."""

    VLLM = "vLLM"
    SGLANG = "SGLang"
    TENSORRT_LLM = "TensorRT-LLM"
    MOONCAKE = "Mooncake"
    MOONPOOL = "Moonpool"


#: Field of a body -> our name. Casing and spelling are the peers' own.
_FIELDS: Final[Mapping[str, str]] = {
    "endpoint": "endpoint",
    "replay_endpoint": "replay_endpoint",
    "type": "kind",
    "modelname": "model",
    "model_name": "model",
    "model": "model",
    "lora_name": "lora",
    "tenant_id": "tenant",
    "instance_id": "instance",
    "block_size": "block_tokens",
    "dp_rank": "rank",
    "additionalsalt": "salt",
    "additional_salt": "salt",
    "topic": "topic",
    "hash_profile": "profile",
    "recipe": "recipe",
    "cache_group": "cache_group",
}
_PROFILE_FIELDS: Final = frozenset({"strategy", "algorithm", "python_hash_seed", "index_projection"})
_PROFILES: Final[Mapping[tuple[str, str], Algorithm]] = {
    ("vllm_v1", "sha256_cbor"): Algorithm.VLLM_SHA256_CBOR,
    ("vllm_v1", "sha256"): Algorithm.VLLM_SHA256,
    ("vllm_v1", "xxhash_cbor"): Algorithm.VLLM_XXHASH_CBOR,
    ("vllm_v1", "xxhash"): Algorithm.VLLM_XXHASH,
    ("sglang", "sha256_raw"): Algorithm.SGLANG,
    ("sglang_bigram", "sha256_raw"): Algorithm.SGLANG_BIGRAM,
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """One stream of one rank of one instance. `key` tells registrations apart."""

    instance: str
    model: str
    block_tokens: int
    kind: EngineKind = EngineKind.VLLM
    rank: int = 0
    tenant: str = DEFAULT_TENANT
    lora: str = ""
    salt: str = ""
    endpoint: str = ""
    replay_endpoint: str = ""
    topic: str = ""
    recipe: HashRecipe = field(default_factory=lambda: HashRecipe(algorithm=Algorithm.XXH3))
    #: Blocks are named by `recipe` from their tokens, instead of by the engine's own hashes.
    rehash: bool = True

    def __post_init__(self) -> None:
        check_holder(self.holder)
        check_context(self.context)
        for name in ("endpoint", "replay_endpoint"):
            _check_endpoint(name, getattr(self, name))
        for name in ("instance", "model", "tenant", "lora", "salt", "topic"):
            if len(getattr(self, name).encode()) > NAME_BYTES_MAX:
                raise UsageError(f"{name} has at most {NAME_BYTES_MAX} bytes", field=name)

    @property
    def key(self) -> tuple[str, str, int]:
        """Instance, tenant, rank: a second registration under it must be equal."""
        return (self.instance, self.tenant, self.rank)

    @property
    def holder(self) -> Holder:
        """Who owns the blocks."""
        return Holder(self.instance, self.rank)

    @property
    def context(self) -> CacheContext:
        """Where the index keeps its blocks."""
        return index_context(self, self.recipe, self.salt)

    def source(self, names_max: int) -> SourceSpec:
        """What a feed needs."""
        return SourceSpec(
            instance=self.instance,
            context=self.context,
            rank=self.rank,
            rehash=self.recipe if self.rehash else None,
            names_max=names_max,
        )


def index_context(where: Registration, recipe: HashRecipe, salt: str) -> CacheContext:
    """Blocks that were hashed differently must not meet, so the recipe is part of where they are kept.

    So is the salt, unless the recipe mixes it into its hashes.
    """
    mixes_salt = recipe.algorithm.is_vllm or recipe.algorithm.is_sglang
    tag = f"{recipe.algorithm}/{recipe.seed}/{recipe.hash_seed or ''}/{int(recipe.tagged_extras)}"
    kept = "" if mixes_salt else salt
    return CacheContext(where.model, where.block_tokens, where.tenant, where.lora, f"{tag}|{kept}")


def read_registration(body: Mapping[Any, Any], seed: int) -> Registration:
    """A body of /register as a registration; `seed` is of the service's own hashes.

    Raises `UsageError` that names the field: unknown ones, wrong types, and profiles that are not known.
    """
    found: dict[str, Any] = {}
    for name, value in body.items():
        ours = _FIELDS.get(name) if isinstance(name, str) else None
        if ours is None:
            raise UsageError(f"a registration has no field {name!r}", field=str(name), value="unknown_field")
        if value is not None:
            found[ours] = value
    if found.pop("cache_group", 0) != 0:
        raise UsageError("cache_group is 0: groups are told apart by their events", field="cache_group")
    profile, recipe = found.pop("profile", None), found.pop("recipe", None)
    for name in ("instance", "model", "block_tokens"):
        if name not in found:
            raise UsageError(f"a registration needs {name}", field=name)
    for name, value in found.items():
        _check_type(name, value)
    if "kind" in found:
        found["kind"] = _kind(found["kind"])
    believed = None
    if profile is not None:
        believed = _of_profile(profile)
    elif recipe is not None:
        believed = _of_recipe(recipe)
    own = HashRecipe(algorithm=Algorithm.XXH3, seed=seed)
    return Registration(**found, recipe=believed or own, rehash=believed is None)


def plain(registration: Registration) -> dict[str, Any]:
    """A registration as a body that `read_registration` takes again; for listings and warm restarts."""
    body: dict[str, Any] = {
        "endpoint": registration.endpoint,
        "replay_endpoint": registration.replay_endpoint,
        "topic": registration.topic,
        "type": str(registration.kind),
        "modelname": registration.model,
        "lora_name": registration.lora,
        "tenant_id": registration.tenant,
        "instance_id": registration.instance,
        "block_size": registration.block_tokens,
        "dp_rank": registration.rank,
        "additionalsalt": registration.salt,
    }
    if not registration.rehash:
        recipe = registration.recipe
        body["recipe"] = {"algorithm": str(recipe.algorithm), "seed": recipe.seed}
        body["recipe"] |= {"hash_seed": recipe.hash_seed, "tagged_extras": recipe.tagged_extras}
    return body


def _check_type(name: str, value: Any) -> None:
    wanted = int if name in ("block_tokens", "rank") else str
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise UsageError(f"{name} is {'a number' if wanted is int else 'a text'}", field=name)


def _kind(text: str) -> EngineKind:
    for kind in EngineKind:
        if kind.lower() == text.lower():
            return kind
    known = ", ".join(EngineKind)
    raise UsageError(f"the type {text!r} is not known; known are {known}", field="type", value=text)


def _check_endpoint(name: str, endpoint: str) -> None:
    if endpoint and not endpoint.startswith(("tcp://", "ipc://", "inproc://")):
        raise UsageError(f"{name} is a ZMQ endpoint such as tcp://host:5557", field=name, value=endpoint)
    if len(endpoint.encode()) > ENDPOINT_BYTES_MAX:
        raise UsageError(f"{name} has at most {ENDPOINT_BYTES_MAX} bytes", field=name)


def _of_profile(profile: Any) -> HashRecipe | None:
    """The recipe of a profile; None where the first parent is random, so that nobody can hash like that."""
    if not isinstance(profile, Mapping):
        raise UsageError("hash_profile is a map", field="hash_profile")
    for name in profile:
        if name not in _PROFILE_FIELDS:
            raise UsageError(f"a hash_profile has no field {name!r}", field=str(name), value="unknown_field")
    algorithm = _PROFILES.get((str(profile.get("strategy")), str(profile.get("algorithm"))))
    if algorithm is None:
        known = ", ".join(f"{strategy}/{name}" for strategy, name in _PROFILES)
        raise UsageError(f"hash_profile's strategy and algorithm are one of {known}", field="hash_profile")
    projection = profile.get("index_projection", "low64_be")
    if projection != ("low64_be" if algorithm.is_vllm else "first64_be"):
        raise UsageError(f"the index_projection {projection!r} is not this strategy's", field="hash_profile")
    seed = profile.get("python_hash_seed")
    if seed is not None and not isinstance(seed, str):
        raise UsageError("python_hash_seed is a text, as in the engine's environment", field="hash_profile")
    if not algorithm.is_vllm:
        return HashRecipe(algorithm=algorithm)
    return None if seed is None else HashRecipe(algorithm=algorithm, hash_seed=seed)


def _of_recipe(recipe: Any) -> HashRecipe:
    if not isinstance(recipe, Mapping) or not set(recipe) <= {
        "algorithm",
        "seed",
        "hash_seed",
        "tagged_extras",
        "lookahead_tokens",
    }:
        raise UsageError("recipe is a map of algorithm, seed, hash_seed and tagged_extras", field="recipe")
    options = {name: value for name, value in recipe.items() if value is not None}
    try:
        options["algorithm"] = Algorithm(options.get("algorithm", Algorithm.XXH3))
        return HashRecipe(**options)
    except (ValueError, TypeError) as exc:
        if isinstance(exc, UsageError):
            raise
        raise UsageError(f"the recipe is not known: {exc}", field="recipe") from exc
