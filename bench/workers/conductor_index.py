"""A worker that measures one contender's index: ``main NAME [TRACE]``, then a line on stdin for each round.

Answers each line with one JSON object of costs. Runs in the peer's environment for the peer.
"""

from __future__ import annotations

import importlib
import json
import sys
from array import array
from pathlib import Path
from typing import Any, Final, final

from moonpool.bench.workers.conductor_jobs import Side, replay_operations, run_round

BLOCK_TOKENS: Final = 16


@final
class Moonpool:
    """Ours, through its Python face."""

    def __init__(self) -> None:
        from moonpool.conductor import Algorithm, BlockHasher, CacheContext, HashRecipe, Holder

        self._context = CacheContext("m", BLOCK_TOKENS)
        self._holder_of = Holder
        self._hasher = BlockHasher(HashRecipe(algorithm=Algorithm.DYNAMO), self._context)
        self.clear()

    def clear(self) -> None:
        from moonpool.conductor import PrefixIndex

        self._index = PrefixIndex()

    def prepare_store(self, holder: int, blocks: list[int], parent: int) -> Any:
        return self._holder_of(str(holder)), array("Q", blocks)

    def prepare_remove(self, holder: int, blocks: list[int]) -> Any:
        return self._holder_of(str(holder)), array("Q", blocks)

    def prepare_find(self, blocks: list[int]) -> Any:
        return array("Q", blocks)

    def prepare_tokens(self, tokens: list[int]) -> Any:
        return tokens

    def store(self, prepared: Any) -> None:
        self._index.store(self._context, prepared[0], prepared[1])

    def remove(self, prepared: Any) -> None:
        self._index.remove(self._context, prepared[0], prepared[1])

    def find(self, prepared: Any) -> None:
        self._index.query(self._context, prepared).depths()

    def settle(self) -> None:
        """A store is visible when it returns."""

    def hash_tokens(self, prepared: Any, block_tokens: int) -> None:
        self._hasher.hashes(prepared)


@final
class Dynamo:
    """The radix tree that Dynamo's wheel offers to Python; events as JSON, which is the form it takes."""

    def __init__(self) -> None:
        self._core = importlib.import_module("dynamo._core")
        self._events = 0
        self.clear()

    def clear(self) -> None:
        self._tree = self._core.RadixTree()

    def prepare_store(self, holder: int, blocks: list[int], parent: int) -> Any:
        pairs = [{"block_hash": block, "tokens_hash": block} for block in blocks]
        return holder, self._event({"stored": {"parent_hash": parent or None, "blocks": pairs}})

    def prepare_remove(self, holder: int, blocks: list[int]) -> Any:
        return holder, self._event({"removed": {"block_hashes": blocks}})

    def _event(self, data: dict[str, Any]) -> bytes:
        self._events += 1
        return json.dumps({"event_id": self._events, "data": data, "dp_rank": 0}).encode()

    def prepare_find(self, blocks: list[int]) -> Any:
        return blocks

    def prepare_tokens(self, tokens: list[int]) -> Any:
        return tokens

    def store(self, prepared: Any) -> None:
        self._tree.apply_event(prepared[0], prepared[1])

    remove = store

    def find(self, prepared: Any) -> None:
        _ = self._tree.find_matches(prepared).scores

    def settle(self) -> None:
        self._tree.find_matches([1])

    def hash_tokens(self, prepared: Any, block_tokens: int) -> None:
        self._core.compute_block_hash_for_seq(prepared, block_tokens)


def main() -> None:
    """Serves rounds until standard input ends."""
    side: Side = Moonpool() if sys.argv[1] == "moonpool" else Dynamo()
    operations = replay_operations(Path(sys.argv[2])) if len(sys.argv) > 2 else []
    print(json.dumps({"ready": sys.argv[1], "operations": len(operations)}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(run_round(side, operations)), flush=True)
