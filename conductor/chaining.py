"""The three families of recipes, each as one class that turns tokens into a chain of hashes."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias, final

from moonpool.conductor.extra_keys import (
    Key,
    PromptExtras,
    VllmExtraKeys,
    encode_cbor,
    encode_pickle,
    hash_seed_message,
)
from moonpool.conductor.recipes import DYNAMO_SEED, VLLM_HASH_SEED, Algorithm, HashRecipe
from moonpool.errors import UsageError
from moonpool.events import CacheContext
from moonpool.native.table.chains import DigestChain, Xxh3Chain, pack_tokens, xxh3_64, xxh3_128
from moonpool.units import U64_MAX

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Token ids from 0 to 2**32 - 1: integers, a buffer of 32-bit or 64-bit ones, or bytes of little-endian u32.
Tokens: TypeAlias = "Sequence[int] | array[int] | NDArray[Any] | bytes | memoryview"

SGLANG_SALT_PREFIX: Final = b"sglang-cache-salt-v1\0"
XXH3_128_BYTES: Final = 16
SHA256_BYTES: Final = 32


class BlockChain(NamedTuple):
    """Hashes of a prompt's whole blocks in order, `array('Q')`; `digests` is empty for 64-bit recipes."""

    hashes: array[int]
    digests: bytes
    digest_bytes: int

    def digest(self, block: int) -> bytes:
        """The full digest of a block, from which vLLM and SGLang chain on."""
        return self.digests[block * self.digest_bytes : (block + 1) * self.digest_bytes]


class Start(NamedTuple):
    """Where a chain starts: at a prompt's first block, or at number `block`, behind `parent`."""

    parent: int | bytes | None = None
    block: int = 0


class Chaining(Protocol):
    """A family of recipes."""

    def hashes(self, tokens: Tokens) -> array[int]:
        """`array('Q')`: the hash of each whole block and all before it, from the start of a prompt."""

    def chain(self, tokens: Tokens, start: Start, extras: PromptExtras | None) -> BlockChain:
        """The same with digests, from anywhere, and with what else the prompt has."""


def make_chaining(recipe: HashRecipe, context: CacheContext, lora_path: str) -> Chaining:
    """The family of a recipe, told what the context has."""
    if recipe.algorithm.is_vllm:
        return VllmChaining(recipe, context, lora_path)
    if recipe.algorithm.is_sglang:
        return SglangChaining(recipe, context)
    if recipe.algorithm.is_xxh3:
        return Xxh3Chaining(recipe, context)
    return Xxh64Chaining(context)


@final
class Xxh3Chaining:
    """`xxh3` and `dynamo`: 64-bit hashes of blocks alone, linked."""

    def __init__(self, recipe: HashRecipe, context: CacheContext) -> None:
        seed = link_seed = recipe.seed
        if recipe.algorithm is Algorithm.DYNAMO:
            seed = link_seed = DYNAMO_SEED
            if context.lora:
                seed = (seed + xxh3_64(context.lora.encode())) & U64_MAX
        self.native: Final = Xxh3Chain(
            block_tokens=context.block_tokens,
            window_tokens=context.block_tokens + recipe.lookahead_tokens,
            seed=seed,
            link_seed=link_seed,
        )

    def hashes(self, tokens: Tokens) -> array[int]:
        return self.native.chain(tokens)

    def chain(self, tokens: Tokens, start: Start, extras: PromptExtras | None) -> BlockChain:
        refuse_extras(extras)
        return BlockChain(self.native.chain(tokens, _hash_parent(start)), b"", 0)


@final
class Xxh64Chaining:
    """`mooncake_xxh64`: 64-bit hashes of parent and tokens; the salt is hashed to the first parent."""

    def __init__(self, context: CacheContext) -> None:
        from moonpool.kernels.hashing import root_of_salt  # numba: only where this recipe is used

        self._block_tokens: Final = context.block_tokens
        self._root: Final = root_of_salt(context.salt.encode())

    def hashes(self, tokens: Tokens) -> array[int]:
        return self.chain(tokens, Start(), None).hashes

    def chain(self, tokens: Tokens, start: Start, extras: PromptExtras | None) -> BlockChain:
        import numpy as np

        from moonpool.kernels.hashing import chain_xxh64

        refuse_extras(extras)
        parent = _hash_parent(start)
        packed = np.frombuffer(pack_tokens(tokens), np.uint32)
        hashes = chain_xxh64(packed, self._block_tokens, self._root if parent is None else parent)
        return BlockChain(array("Q", hashes.tobytes()), b"", 0)


@final
class SglangChaining:
    """`sglang` and `sglang_bigram`: SHA-256 of pages; the salt is hashed to the first parent."""

    def __init__(self, recipe: HashRecipe, context: CacheContext) -> None:
        salted = hashlib.sha256(SGLANG_SALT_PREFIX + context.salt.encode()).digest()
        self._native: Final = DigestChain(
            block_tokens=context.block_tokens,
            encoding="bigram" if recipe.algorithm is Algorithm.SGLANG_BIGRAM else "page",
            digest="sha256",
            root=salted if context.salt else b"",
        )

    def hashes(self, tokens: Tokens) -> array[int]:
        return self._native.chain(tokens)[1]

    def chain(self, tokens: Tokens, start: Start, extras: PromptExtras | None) -> BlockChain:
        refuse_extras(extras)
        digests, hashes = self._native.chain(tokens, _digest_parent(start))
        return BlockChain(hashes, digests, SHA256_BYTES)


@final
class VllmChaining:
    """vLLM's four: SHA-256 or XXH3-128 of (parent, tokens, extra keys), pickled or in canonical CBOR."""

    def __init__(self, recipe: HashRecipe, context: CacheContext, lora_path: str) -> None:
        xxh3 = recipe.algorithm in (Algorithm.VLLM_XXHASH, Algorithm.VLLM_XXHASH_CBOR)
        cbor = recipe.algorithm in (Algorithm.VLLM_SHA256_CBOR, Algorithm.VLLM_XXHASH_CBOR)
        seed = hash_seed_message(VLLM_HASH_SEED if recipe.hash_seed is None else recipe.hash_seed, cbor)
        self._digest_bytes: Final = XXH3_128_BYTES if xxh3 else SHA256_BYTES
        self._block_tokens: Final = context.block_tokens
        self._lookahead: Final = recipe.lookahead_tokens
        self._encode: Final = encode_cbor if cbor else encode_pickle
        self._keys: Final = VllmExtraKeys(
            tagged=recipe.tagged_extras, lora=context.lora, lora_path=lora_path, salt=context.salt
        )
        self._native: Final = DigestChain(
            block_tokens=context.block_tokens,
            encoding="cbor" if cbor else "pickle",
            digest="xxh3_128" if xxh3 else "sha256",
            root=xxh3_128(seed) if xxh3 else hashlib.sha256(seed).digest(),
        )
        # Of a prompt with nothing but tokens: of its first block, and of every other one.
        self._first = self._encode(self._keys.of_block(0, (0, 1), None))
        self._other = self._encode(self._keys.of_block(1, (0, 1), None))

    def hashes(self, tokens: Tokens) -> array[int]:
        return self.chain(tokens, Start(), None).hashes

    def chain(self, tokens: Tokens, start: Start, extras: PromptExtras | None) -> BlockChain:
        if extras is None and not self._lookahead:
            encoded = [self._other] if start.block else [self._first, self._other]
            digests, hashes = self._native.chain(tokens, _digest_parent(start), encoded)
        else:
            packed = pack_tokens(tokens)
            blocks = max(0, len(packed) - self._lookahead) // self._block_tokens
            encoded = [self._encode(self._key_of(packed, start, block, extras)) for block in range(blocks)]
            used = memoryview(packed)[: blocks * self._block_tokens]
            digests, hashes = self._native.chain(used, _digest_parent(start), encoded)
        return BlockChain(hashes, digests, self._digest_bytes)

    def _key_of(self, tokens: array[int], start: Start, block: int, extras: PromptExtras | None) -> Key:
        """Extra keys of the block at `block` of these tokens, number `start.block + block` of its prompt."""
        end = (block + 1) * self._block_tokens
        prompt_at = (start.block + block) * self._block_tokens
        window = (prompt_at, prompt_at + self._block_tokens + self._lookahead)
        keys = self._keys.of_block(start.block + block, window, extras)
        return (keys, *tokens[end : end + self._lookahead]) if self._lookahead else keys


def refuse_extras(extras: PromptExtras | None) -> None:
    """Raises `UsageError` when there are any: only vLLM's recipes hash more than tokens."""
    if extras is not None:
        raise UsageError("this recipe has no extra keys", field="extras")


def _hash_parent(start: Start) -> int | None:
    if isinstance(start.parent, bytes):
        raise UsageError("with this recipe, parent is a 64-bit hash", field="parent")
    return start.parent


def _digest_parent(start: Start) -> bytes | None:
    if isinstance(start.parent, int):
        raise UsageError("with this recipe, parent is a digest: 64 bits of it do not suffice", field="parent")
    return start.parent
