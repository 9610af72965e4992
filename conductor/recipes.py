"""How an engine hashes its blocks: the recipes known here, with what each needs to be told.

| recipe | hash of a block and all before it | sources |
|---|---|---|
| `xxh3` | XXH3-64 chain of XXH3-64 blocks, one seed | Mooncake RFC 1527, "hash standard" |
| `dynamo` | the same with seed 1337; a LoRA name changes the blocks' seed | Dynamo lib/kv-hashing, 1.6.1 |
| `vllm_sha256`, `vllm_sha256_cbor` | SHA-256 of (parent, tokens, extras), pickled or CBOR | vLLM 0.33.0 |
| `vllm_xxhash`, `vllm_xxhash_cbor` | XXH3-128 of the same | vLLM 0.33.0 |
| `sglang`, `sglang_bigram` | SHA-256 of parent and tokens, or pairs of tokens | SGLang 0.5.23 |
| `mooncake_xxh64` | XXH64 of parent and tokens | Mooncake Conductor, Go generation |
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, final

from moonpool.errors import UsageError
from moonpool.units import U64_MAX

DYNAMO_SEED: Final = 1337
#: What vLLM derives the first parent from where PYTHONHASHSEED is not set and the hash is SHA-256 (0.33).
VLLM_HASH_SEED: Final = "vllm-none-hash"
HASH_SEED_BYTES_MAX: Final = 1_024
LOOKAHEAD_TOKENS_MAX: Final = 64


class Algorithm(StrEnum):
    """Names of recipes, as in configuration files."""

    XXH3 = "xxh3"
    DYNAMO = "dynamo"
    VLLM_SHA256 = "vllm_sha256"
    VLLM_SHA256_CBOR = "vllm_sha256_cbor"
    VLLM_XXHASH = "vllm_xxhash"
    VLLM_XXHASH_CBOR = "vllm_xxhash_cbor"
    SGLANG = "sglang"
    SGLANG_BIGRAM = "sglang_bigram"
    MOONCAKE_XXH64 = "mooncake_xxh64"

    @property
    def is_vllm(self) -> bool:
        return self in (self.VLLM_SHA256, self.VLLM_SHA256_CBOR, self.VLLM_XXHASH, self.VLLM_XXHASH_CBOR)

    @property
    def is_sglang(self) -> bool:
        return self in (self.SGLANG, self.SGLANG_BIGRAM)

    @property
    def is_xxh3(self) -> bool:
        return self in (self.XXH3, self.DYNAMO)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HashRecipe:
    """One engine's way to hash blocks. Raises `UsageError` for options that its algorithm does not have."""

    algorithm: Algorithm = Algorithm.DYNAMO
    #: `xxh3`: the seed of blocks and links.
    seed: int = 0
    #: vLLM: the text of PYTHONHASHSEED. Its xxhash forms have a random first parent unless that is set.
    hash_seed: str | None = None
    #: vLLM: since 0.33 extra keys are tagged with their kind, and a LoRA's path is one of them.
    tagged_extras: bool = True
    #: Tokens behind a block that enter its hash, for a draft model's cache: vLLM; Dynamo at most one.
    lookahead_tokens: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, Algorithm):
            known = ", ".join(Algorithm)
            raise UsageError(f"a recipe's algorithm is one of {known}", field="algorithm")
        if not 0 <= self.seed <= U64_MAX:
            raise UsageError("a seed has 64 bits", field="seed")
        if self.seed and self.algorithm is not Algorithm.XXH3:
            raise UsageError("only the recipe xxh3 takes a seed", field="seed")
        self._check_lookahead()
        self._check_hash_seed()

    def _check_lookahead(self) -> None:
        most = LOOKAHEAD_TOKENS_MAX if self.algorithm.is_vllm else int(self.algorithm is Algorithm.DYNAMO)
        if not 0 <= self.lookahead_tokens <= most:
            raise UsageError(
                f"the recipe {self.algorithm} takes 0 to {most} look-ahead tokens", field="lookahead_tokens"
            )

    def _check_hash_seed(self) -> None:
        if self.hash_seed is not None:
            if not self.algorithm.is_vllm:
                raise UsageError("only vLLM's recipes take a hash_seed", field="hash_seed")
            if len(self.hash_seed.encode()) > HASH_SEED_BYTES_MAX:
                raise UsageError(f"hash_seed has at most {HASH_SEED_BYTES_MAX} bytes", field="hash_seed")
        elif self.algorithm in (Algorithm.VLLM_XXHASH, Algorithm.VLLM_XXHASH_CBOR):
            raise UsageError(
                "vLLM's xxhash forms start from a random value unless PYTHONHASHSEED is set; set it on the "
                "engines and give it here as hash_seed",
                field="hash_seed",
            )
