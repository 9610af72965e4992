"""The replay demo's pure parts: streams, block bytes, ideal caches, and the arithmetic of its result."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from moonpool.cli.demonstration.block_bytes import BlockBytes, hash_of, key_of
from moonpool.cli.demonstration.cache_model import Hits, lru_hits
from moonpool.cli.demonstration.replay_tally import (
    ReplayFacts,
    ReplayTally,
    RequestOutcome,
    merge_transports,
    replay_result,
)
from moonpool.cli.demonstration.request_stream import find_trace, generate_stream, read_stream
from moonpool.errors import UsageError

BLOCK_BYTES = 4096


def write_trace(path: Path, chains: list[list[int]]) -> Path:
    rows = [
        {"timestamp": 10 * at, "input_length": 512 * len(chain) or 1, "output_length": 1, "hash_ids": chain}
        for at, chain in enumerate(chains)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_trace_becomes_chains(tmp_path: Path) -> None:
    file = write_trace(tmp_path / "small.jsonl", [[7, 9], [], [7, 9, 11], [7, 12]])
    stream = read_stream(file, None)
    assert [len(chain) for chain in stream.chains] == [2, 3, 2]
    assert stream.chains[0] == stream.chains[1][:2]
    assert (stream.source, stream.distinct, stream.references, stream.longest) == ("small.jsonl", 4, 7, 3)
    assert read_stream(file, 1).chains == stream.chains[:1]


def test_the_distinct_blocks_are_those_of_the_part_replayed(tmp_path: Path) -> None:
    file = write_trace(tmp_path / "small.jsonl", [[1, 2], [3, 4, 5]])
    assert read_stream(file, 1).distinct == 2


def test_a_folder_means_the_conversation_trace_else_the_first(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no trace"):
        find_trace(tmp_path)
    other = write_trace(tmp_path / "a.jsonl", [[1]])
    write_trace(tmp_path / "b.jsonl", [[1]])
    assert find_trace(tmp_path) == other
    preferred = write_trace(tmp_path / "conversation_trace.jsonl", [[1]])
    assert find_trace(tmp_path) == preferred
    assert find_trace(other) == other


def test_a_trace_without_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no request with a block"):
        read_stream(write_trace(tmp_path / "empty.jsonl", [[]]), None)


def test_the_generator_is_seeded_and_has_the_published_statistics() -> None:
    stream = generate_stream(6_000, seed=1)
    assert stream.chains == generate_stream(6_000, seed=1).chains
    assert stream.chains != generate_stream(6_000, seed=2).chains
    # Published for the conversation trace: 24 blocks a request, one first block for all, of all blocks 0.37
    # can be found again (over 12,000 requests; a shorter part finds a little less).
    assert 22 < stream.references / len(stream.chains) < 27
    assert len({chain[0] for chain in stream.chains}) <= len(stream.chains) // 20
    assert 0.31 < lru_hits(stream.chains, None).leading_ratio < 0.40


def test_blocks_are_theirs_alone() -> None:
    blocks = BlockBytes(BLOCK_BYTES)
    first, second = hash_of(1), hash_of(2)
    assert len({hash_of(block, seed) for block in range(50) for seed in (0, 1)}) == 100
    data = memoryview(bytearray(BLOCK_BYTES))
    blocks.make(data, first)
    assert blocks.wrong_bytes(data, first) == 0
    assert blocks.wrong_bytes(data, second) >= BLOCK_BYTES // 8
    assert blocks.wrong_bytes(data[:-8], first) == BLOCK_BYTES
    data[100] ^= 1
    data[BLOCK_BYTES - 1] ^= 128
    assert blocks.wrong_bytes(data, first) == 2
    assert key_of(255) == b"demo/00000000000000ff"
    with pytest.raises(UsageError):
        BlockBytes(12)


def test_a_shifted_block_is_wrong_in_every_word() -> None:
    blocks = BlockBytes(BLOCK_BYTES)
    data = bytearray(BLOCK_BYTES)
    blocks.make(memoryview(data), hash_of(5))
    shifted = memoryview(bytes(data[64:] + data[:64]))
    assert blocks.wrong_bytes(shifted, hash_of(5)) >= BLOCK_BYTES // 8


def test_hits_count_leading_and_all() -> None:
    hits = Hits()
    hits.count([True, True, False, True])
    hits.count([])
    hits.count([False, True])
    assert (hits.references, hits.leading, hits.found) == (6, 2, 4)
    assert (hits.leading_ratio, hits.found_ratio) == (2 / 6, 4 / 6)
    assert Hits().leading_ratio == Hits().found_ratio == 0.0


def test_the_lru_by_hand() -> None:
    # Three places. [1 2 3] fills them, 1 the youngest; [4] drops 3, the oldest; then 1 and 2 are still there.
    hits = lru_hits([(1, 2, 3), (4,), (1, 2, 3)], 3)
    assert (hits.leading, hits.found, hits.references) == (2, 2, 7)
    assert lru_hits([(1, 2, 3), (4,), (1, 2, 3)], None).found == 3
    assert lru_hits([(1, 2)] * 4, 1).leading == 3  # only the start of the prompt stays


def slow_lru(chains: list[tuple[int, ...]], capacity: int) -> int:
    order: list[int] = []
    found = 0
    for chain in chains:
        found += sum(block in order for block in chain)
        for block in reversed(chain):
            if block in order:
                order.remove(block)
            order.append(block)
            del order[:-capacity]
    return found


@pytest.mark.parametrize("seed", range(8))
def test_the_lru_equals_a_slow_one_and_keeps_prefixes(seed: int) -> None:
    rng = random.Random(seed)
    shared = [rng.randrange(1000) for _ in range(30)]
    chains = []
    for _ in range(80):
        cut = rng.randrange(len(shared))
        chains.append(tuple(dict.fromkeys([*shared[:cut], *(rng.randrange(1000, 1100) for _ in range(3))])))
    capacity = rng.randint(1, 40)
    hits = lru_hits(chains, capacity)
    assert hits.found == slow_lru(chains, capacity), f"seed {seed}"
    assert hits.leading <= hits.found <= lru_hits(chains, None).found


def test_outcomes_travel_and_add_up() -> None:
    first = RequestOutcome(3, bytes([1, 0, 1]), 1, 17, [1, 1, 0], [10.04, 20.0], [30.0])
    assert RequestOutcome.from_list(json.loads(json.dumps(first.to_list()))).found == first.found
    tally = ReplayTally(BLOCK_BYTES)
    tally.add(first)
    tally.add(RequestOutcome(4, bytes([1, 1])))
    facts = ReplayFacts(
        source="x",
        block_bytes=BLOCK_BYTES,
        distinct_blocks=9,
        pool_bytes=BLOCK_BYTES * 4 + 1,
        nodes=2,
        workers=3,
        unlimited=Hits(5, 4, 4),
        lru=Hits(5, 2, 3),
    )
    moved = merge_transports(
        [{"shm": {"get": 1, "put": 2}}, {"shm": {"get": 3, "put": 0}, "tcp": {"get": 7}}]
    )
    result = replay_result(facts, tally, 1.5, moved)
    assert not result["ok"], "a wrong block was read"
    assert (result["requests"], result["blocks"], result["verify_errors"], result["wrong_bytes"]) == (
        2,
        5,
        1,
        17,
    )
    assert (result["hit_ratio"], result["block_hit_ratio"]) == (3 / 5, 4 / 5)
    assert (result["max_hit_ratio"], result["lru_hit_ratio"], result["capacity_blocks"]) == (0.8, 0.4, 4)
    assert result["puts"] == {"stored": 1, "exists": 1, "no_space": 0}
    assert result["verified_bytes"] == 4 * BLOCK_BYTES
    assert result["stored_bytes"] == BLOCK_BYTES
    assert result["bytes_by_transport"] == {"shm": {"get": 4, "put": 2}, "tcp": {"get": 7, "put": 0}}
    assert result["get_p50_us"] == pytest.approx(10.0, rel=0.2)
    assert result["put_p99_us"] == pytest.approx(30.0, rel=0.2)
    assert json.loads(json.dumps(result)) == result


def test_a_replay_of_nothing_is_not_well() -> None:
    facts = ReplayFacts("x", 8, 0, 8, 1, 1, Hits(), Hits())
    assert replay_result(facts, ReplayTally(8), 0.0, {})["ok"] is False
