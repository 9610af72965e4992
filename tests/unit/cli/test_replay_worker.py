"""The demo's worker and the order of its requests, against a pool in a dictionary."""

from __future__ import annotations

import json
import random
from typing import Any, cast

import pytest

from moonpool.cli.demonstration.block_bytes import BlockBytes, hash_of, key_of
from moonpool.cli.demonstration.cache_model import lru_hits
from moonpool.cli.demonstration.replay import Turns
from moonpool.cli.demonstration.replay_tally import ReplayTally, RequestOutcome
from moonpool.cli.demonstration.replay_worker import WINDOW_BLOCKS, ReplayWorker, WorkerSettings, windows
from moonpool.errors import PeerGone
from moonpool.store.client_results import GetResult, GetStatus, PutResult, PutStatus

BLOCK_BYTES = 1024
SETTINGS = WorkerSettings("nowhere", ("shm",), BLOCK_BYTES, 5)


class DictPool:
    """Holds everything; notes the keys of each call."""

    def __init__(self) -> None:
        self.held: dict[bytes, bytes] = {}
        self.calls: list[tuple[str, list[bytes]]] = []
        self.full = False
        self.error: PeerGone | None = None

    def get_into_many(self, keys: list[bytes], outs: list[memoryview]) -> list[GetResult]:
        self.calls.append(("get", list(keys)))
        if self.error is not None:
            return [GetResult(GetStatus.FAILED, error=self.error) for _ in keys]
        results = []
        for key, out in zip(keys, outs, strict=True):
            value = self.held.get(key)
            if value is not None:
                out[:] = value
            results.append(GetResult(GetStatus.MISS if value is None else GetStatus.HIT, len(value or b"")))
        return results

    def put_many(self, keys: list[bytes], values: list[memoryview]) -> list[PutResult]:
        self.calls.append(("put", list(keys)))
        if self.full:
            return [PutResult(PutStatus.NO_SPACE) for _ in keys]
        results = []
        for key, value in zip(keys, values, strict=True):
            results.append(PutResult(PutStatus.EXISTS if key in self.held else PutStatus.STORED))
            self.held.setdefault(key, bytes(value))
        return results

    def metrics(self) -> dict[str, Any]:
        row = {"transport": "shm", "op": "READ", "bytes": 7}
        return {"paths": [row, {**row, "op": "WRITE", "bytes": 3}, {**row, "transport": "tcp"}]}


@pytest.fixture
def pool() -> DictPool:
    return DictPool()


@pytest.fixture
def worker(pool: DictPool) -> Any:
    made = ReplayWorker(cast("Any", pool), SETTINGS)
    yield made
    made.close()


def keys_of(blocks: list[int]) -> list[bytes]:
    return [key_of(hash_of(block, SETTINGS.seed)) for block in blocks]


def test_a_request_reads_what_is_there_and_puts_the_rest(worker: ReplayWorker, pool: DictPool) -> None:
    first = worker.request(0, [1, 2, 3])
    assert (first.found, first.puts) == (b"\0\0\0", [3, 0, 0])
    blocks = BlockBytes(BLOCK_BYTES)
    for block in (1, 2, 3):
        held = pool.held[keys_of([block])[0]]
        assert blocks.wrong_bytes(memoryview(held), hash_of(block, SETTINGS.seed)) == 0
    second = worker.request(1, [1, 2, 4, 3])
    assert (second.found, second.puts, second.wrong_blocks) == (b"\1\1\0\1", [1, 0, 0], 0)
    assert len(second.get_us) == len(second.put_us) == 1
    assert RequestOutcome.from_list(json.loads(json.dumps(second.to_list()))).number == 1


def test_the_start_of_a_prompt_is_used_last(worker: ReplayWorker, pool: DictPool) -> None:
    chain = list(range(2 * WINDOW_BLOCKS + 3))
    worker.request(0, chain)
    gets = [keys for kind, keys in pool.calls if kind == "get"]
    puts = [keys for kind, keys in pool.calls if kind == "put"]
    # The pool counts the keys of one call from the last to the first by itself.
    assert [key for keys in gets for key in reversed(keys)] == keys_of(chain[::-1])
    assert [key for keys in puts for key in reversed(keys)] == keys_of(chain[::-1])
    assert max(map(len, gets + puts)) == WINDOW_BLOCKS


def test_a_wrong_byte_is_a_wrong_block(worker: ReplayWorker, pool: DictPool) -> None:
    worker.request(0, [1, 2])
    key = keys_of([2])[0]
    pool.held[key] = pool.held[key][:-1] + bytes([pool.held[key][-1] ^ 1])
    seen = worker.request(1, [1, 2])
    assert (seen.wrong_blocks, seen.wrong_bytes) == (1, 1)
    tally = ReplayTally(BLOCK_BYTES)
    tally.add(seen)
    assert tally.wrong_blocks == 1


def test_a_full_pool_is_counted_and_a_failed_key_ends_the_worker(
    worker: ReplayWorker, pool: DictPool
) -> None:
    pool.full = True
    assert worker.request(0, [1, 2]).puts == [0, 0, 2]
    pool.error = PeerGone("the node went")
    with pytest.raises(PeerGone):
        worker.request(1, [1])


def test_bytes_by_transport_and_direction(worker: ReplayWorker) -> None:
    assert worker.transports() == {"shm": {"get": 7, "put": 3}, "tcp": {"get": 7, "put": 0}}


def test_settings_travel() -> None:
    assert WorkerSettings.from_dict(json.loads(json.dumps(SETTINGS.to_dict()))) == SETTINGS


@pytest.mark.parametrize("count", [0, 1, WINDOW_BLOCKS, WINDOW_BLOCKS + 1, 3 * WINDOW_BLOCKS - 1])
def test_windows_cover_every_place_once(count: int) -> None:
    parts = list(windows(count))
    assert sorted(place for part in parts for place in part) == list(range(count))
    assert all(1 <= len(part) <= WINDOW_BLOCKS for part in parts)
    assert [part.start for part in parts] == sorted((part.start for part in parts), reverse=True)


def test_a_turn_waits_for_the_one_it_follows() -> None:
    turns = Turns([(1, 2), (1, 3), (9,), (1, 2, 4)])
    assert turns.take() == (0, (1, 2))
    assert turns.take() is None, "block 1 is being made"
    turns.end(0)
    assert turns.take() == (1, (1, 3))
    assert turns.take() == (2, (9,))
    assert turns.take() == (3, (1, 2, 4)), "what it follows was answered long ago"
    assert turns.take() is None
    assert not turns.over
    for number in (1, 2, 3):
        turns.end(number)
    assert turns.over


@pytest.mark.parametrize("seed", range(6))
def test_in_any_order_of_answers_all_requests_begin_once_and_hits_are_the_models(seed: int) -> None:
    """With an unlimited pool the order of answers cannot matter, since nobody asks for what is being made."""
    rng = random.Random(seed)
    chains: list[tuple[int, ...]] = [tuple(dict.fromkeys(rng.choices(range(60), k=6))) for _ in range(80)]
    turns, held, tally = Turns(chains), set[int](), ReplayTally(BLOCK_BYTES)
    open_requests: list[tuple[int, tuple[int, ...], bytes]] = []
    begun = []
    while not turns.over:
        while len(open_requests) < 4 and (turn := turns.take()) is not None:
            number, chain = turn[0], tuple(turn[1])
            begun.append(number)
            open_requests.append((number, chain, bytes(block in held for block in chain)))
        number, chain, found = open_requests.pop(rng.randrange(len(open_requests)))
        held.update(chain)
        tally.add(RequestOutcome(number, found))
        turns.end(number)
    assert begun == list(range(len(chains))), f"seed {seed}"
    assert tally.hits == lru_hits(chains, None), f"seed {seed}"
