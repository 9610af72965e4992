"""Tokens to chains of block hashes, by the recipe of the engine whose cache is asked about."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, final

from moonpool.conductor.chaining import BlockChain, Start, Tokens, Xxh3Chaining, make_chaining
from moonpool.conductor.extra_keys import PromptExtras
from moonpool.conductor.recipes import HashRecipe
from moonpool.errors import UsageError
from moonpool.events import BlockHash, CacheContext, check_context
from moonpool.native.table.chains import pack_tokens


@final
class BlockHasher:
    """Hashes prompts of one context by one recipe. Immutable, so threads may share one.

    What the recipe itself mixes in is mixed in: vLLM hashes LoRA and salt, SGLang and Mooncake's Go
    generation the salt, Dynamo the LoRA. The context keeps the rest apart: hashes are only ever compared
    within one.
    `lora_path` is where vLLM loaded the LoRA from, which is part of its tagged extra keys.
    """

    def __init__(self, recipe: HashRecipe, context: CacheContext, *, lora_path: str = "") -> None:
        self.recipe: Final = recipe
        self.context: Final = check_context(context)
        self._chaining: Final = make_chaining(recipe, context, lora_path)

    def hashes(self, tokens: Tokens) -> array[int]:
        """`array('Q')`: the hash of each whole block and all before it; what `PrefixIndex.query` takes."""
        return self._chaining.hashes(tokens)

    def chain(
        self,
        tokens: Tokens,
        *,
        parent: BlockHash | bytes | None = None,
        first_block: int = 0,
        extras: PromptExtras | None = None,
    ) -> BlockChain:
        """Hashes with their digests; or of blocks that follow `parent`, the first being number `first_block`.

        `parent` is a digest for vLLM and SGLang, else a hash. `extras` are of the whole prompt. Raises
        `UsageError` for tokens, parents and extras that the recipe cannot have.
        """
        if first_block < 0 or (parent is None) != (first_block == 0):
            raise UsageError("a chain starts at block 0, or later behind a parent", field="first_block")
        return self._chaining.chain(tokens, Start(parent, first_block), extras)

    def local_hashes(self, tokens: Tokens) -> array[int]:
        """`array('Q')`: each whole block's hash without what is before it (Dynamo's tokens hash)."""
        if not isinstance(self._chaining, Xxh3Chaining):
            raise UsageError(f"the recipe {self.recipe.algorithm} has no hashes of blocks alone")
        return self._chaining.native.blocks(tokens)

    def hashes_of_prompts(self, tokens: Tokens, offsets: Sequence[int]) -> tuple[array[int], array[int]]:
        """Prompts one behind another in `tokens`, prompt i from `offsets[i]` to `offsets[i + 1]`.

        Returns (hashes, starts), both `array('Q')`: prompt i has `hashes[starts[i]:starts[i + 1]]`.
        """
        packed = pack_tokens(tokens)
        if isinstance(self._chaining, Xxh3Chaining):
            return self._chaining.native.chain_prompts(packed, offsets)
        if any(low > high for low, high in pairwise([0, *offsets, len(packed)])):
            raise UsageError("offsets ascend and end inside the tokens", field="offsets")
        hashes, starts = array("Q"), array("Q", [0])
        for low, high in pairwise(offsets):
            hashes.extend(self.hashes(memoryview(packed)[low:high]))
            starts.append(len(hashes))
        return hashes, starts
