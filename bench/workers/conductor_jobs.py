"""What the index of the conductor and Dynamo's are asked to do, the same for both: plain values and a clock.

Runs in the peer's environment too, so it needs the standard library alone. Costs are CPU time of the process
(all threads), because both run inside their caller. Lower is better throughout.
"""

from __future__ import annotations

import json
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

SEED: Final = 7
QUERIES: Final = 400
#: Blocks that each of 16 holders can have in the replay, as in Mooncake's paper.
REPLAY_HOLDERS: Final = 16
REPLAY_BLOCKS: Final = 5_860
HASH_TOKENS: Final = 131_072
HASH_BLOCK_TOKENS: Final = 16
HASH_REPEATS: Final = 20


class Operation(NamedTuple):
    """One step of the replay: a query (holder -1), blocks stored behind `parent`, or blocks removed."""

    kind: str
    holder: int
    blocks: list[int]
    parent: int


class Side(Protocol):
    """One contender. What it needs in a form of its own is made by `prepare_*`, which is not timed."""

    def clear(self) -> None:
        """An empty index."""

    def prepare_store(self, holder: int, blocks: list[int], parent: int) -> Any:
        """Blocks of a holder behind `parent` (0: none) as this side takes them."""

    def prepare_remove(self, holder: int, blocks: list[int]) -> Any:
        """Blocks that a holder no longer has."""

    def prepare_find(self, blocks: list[int]) -> Any:
        """A chain to look for."""

    def prepare_tokens(self, tokens: list[int]) -> Any:
        """Tokens to hash."""

    def store(self, prepared: Any) -> None: ...
    def remove(self, prepared: Any) -> None: ...
    def find(self, prepared: Any) -> None: ...
    def settle(self) -> None:
        """Returns when everything stored is visible."""

    def hash_tokens(self, prepared: Any, block_tokens: int) -> None: ...


def cpu_us(work: Callable[[], object], count: int) -> float:
    """CPU microseconds of each of `count` operations of `work`."""
    began = time.process_time()
    work()
    return (time.process_time() - began) / count * 1e6


def chains(holders: int, each: int, depth: int, shared: int) -> list[tuple[int, list[int]]]:
    """`each` chains for each holder; the first `shared` blocks are common to all."""
    draw = random.Random(SEED)
    start = [draw.getrandbits(63) for _ in range(shared)]
    return [
        (holder, start + [draw.getrandbits(63) for _ in range(depth - shared)])
        for holder in range(holders)
        for _ in range(each)
    ]


def find_and_store(side: Side, holders: int, each: int, depth: int, shared: int) -> dict[str, float]:
    """Cost of a find that matches all of a chain, of one stored block, and of one removed block."""
    made = chains(holders, each, depth, shared)
    side.clear()
    stores = [side.prepare_store(holder, blocks, 0) for holder, blocks in made]
    total = sum(len(blocks) for _, blocks in made)

    def store_all() -> None:
        for prepared in stores:
            side.store(prepared)
        side.settle()

    store_us = cpu_us(store_all, total)
    draw = random.Random(SEED + 1)
    queries = [side.prepare_find(draw.choice(made)[1]) for _ in range(QUERIES)]
    for prepared in queries[:50]:
        side.find(prepared)

    def find_all() -> None:
        for prepared in queries:
            side.find(prepared)

    find_us = cpu_us(find_all, QUERIES)
    # A chain goes from its end, as caches evict.
    removes = [side.prepare_remove(holder, blocks[shared:][::-1]) for holder, blocks in made]
    removed = sum(len(blocks) - shared for _, blocks in made)

    def remove_all() -> None:
        for prepared in removes:
            side.remove(prepared)
        side.settle()

    return {"store": store_us, "find": find_us, "remove": cpu_us(remove_all, removed)}


def replay_operations(trace: Path) -> list[Operation]:
    """A trace on 16 holders at random, each with a least recently used cache each."""
    draw = random.Random(SEED)
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(REPLAY_HOLDERS)]
    operations: list[Operation] = []
    with trace.open(encoding="utf-8") as lines:
        for line in lines:
            # Block ids from 1 on: 0 means no parent.
            blocks = [each + 1 for each in json.loads(line)["hash_ids"]]
            holder = draw.randrange(REPLAY_HOLDERS)
            cache = caches[holder]
            held = 0
            while held < len(blocks) and blocks[held] in cache:
                held += 1
            operations.append(Operation("find", -1, blocks, 0))
            if held < len(blocks):
                parent = blocks[held - 1] if held else 0
                operations.append(Operation("store", holder, blocks[held:], parent))
            for block in reversed(blocks):
                cache[block] = None
                cache.move_to_end(block)
            gone = []
            while len(cache) > REPLAY_BLOCKS:
                gone.append(cache.popitem(last=False)[0])
            if gone:
                operations.append(Operation("remove", holder, gone, 0))
    return operations


def replay(side: Side, operations: Sequence[Operation]) -> float:
    """CPU microseconds of one operation of the replay."""
    side.clear()
    steps: list[tuple[Callable[[Any], None], Any]] = []
    for operation in operations:
        if operation.kind == "find":
            steps.append((side.find, side.prepare_find(operation.blocks)))
        elif operation.kind == "store":
            made = side.prepare_store(operation.holder, operation.blocks, operation.parent)
            steps.append((side.store, made))
        else:
            steps.append((side.remove, side.prepare_remove(operation.holder, operation.blocks)))

    def run() -> None:
        for step, prepared in steps:
            step(prepared)
        side.settle()

    return cpu_us(run, len(steps))


def hashing(side: Side) -> float:
    """CPU microseconds of a thousand tokens, hashed into a chain of blocks."""
    draw = random.Random(SEED)
    prepared = side.prepare_tokens([draw.randrange(150_000) for _ in range(HASH_TOKENS)])
    side.hash_tokens(prepared, HASH_BLOCK_TOKENS)

    def hash_all() -> None:
        for _ in range(HASH_REPEATS):
            side.hash_tokens(prepared, HASH_BLOCK_TOKENS)

    return cpu_us(hash_all, HASH_REPEATS * HASH_TOKENS // 1_000)


def run_round(side: Side, operations: Sequence[Operation]) -> dict[str, float]:
    """All cells once."""
    found: dict[str, float] = {}
    small = find_and_store(side, 16, 50, 32, 8)
    deep = find_and_store(side, 64, 4, 1_024, 64)
    found["find 32 x 16"], found["find 1024 x 64"] = small["find"], deep["find"]
    found["store a block"], found["remove a block"] = deep["store"], deep["remove"]
    found["hash 1000 tokens"] = hashing(side)
    if operations:
        found["replay an operation"] = replay(side, operations)
    return found
