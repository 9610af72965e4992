"""Micro-benchmarks of the native core: 500 keys a request, on one thread, without sockets.

What a request costs inside the core, and what the leader's next turn adds to a put (facts and effects).
They assert that everything was answered natively and print what it costs; no time is asserted.
"""

from __future__ import annotations

import random
from itertools import count
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest

from moonpool.native.table.directory_slots import DirectorySlots
from moonpool.native.table.extents import Extents
from moonpool.native.table.hot import HotCore
from moonpool.native.table.hot_state import HotCounters
from moonpool.native.table.objects import ObjectTable
from moonpool.native.table.open_puts import OpenPuts

EXISTS, LOOKUP, PUT_START, PUT_END = range(4)
KEYS = 500
REQUESTS = 40
ROUNDS = 10
CAPACITY = 1 << 36
CLIENT, TENANT, NOW = 1, 0, 1_000


def pack(value: Any) -> bytes:
    data: bytes = msgpack.packb(value, use_bin_type=True)
    return data


def core_of() -> HotCore:
    objects, puts = ObjectTable(seed=1), OpenPuts()
    hot = HotCore(
        objects,
        puts,
        HotCounters(1, 0, bytes(16)),
        batch_keys_max=16_384,
        lease_ms_max=5_000,
        put_ms=10_000,
        put_bytes_per_ms=100_000,
        facts_waiting_max=1 << 30,
    )
    hot.set_turn(NOW, 0, 1, may_change=True, may_end=True)
    for segment in (1, 2):
        extents, slots = Extents(CAPACITY), DirectorySlots(1 << 22)
        extents.add_range(0, CAPACITY)
        slots.add_range(0, 1 << 22)
        objects.add_segment(segment, CAPACITY)
        hot.set_segment(segment, extents, slots, data_handle=segment, rank=0, node_id=segment)
        hot.set_floor(segment, resolved=True, floor=0, slot_floor=0)
        hot.set_join(segment, bytes(16), 0, 0)
    hot.set_schedule([1, 2], CAPACITY)
    return hot


def keys_of(number: int) -> list[bytes]:
    return [b"model-7b/block-%011d" % (number * KEYS + at) for at in range(KEYS)]


def start_of(number: int) -> bytes:
    return pack([keys_of(number), [512] * KEYS, None, 0])


def call(hot: HotCore, method: int, params: bytes) -> bytes:
    answer = hot.call(method, CLIENT, TENANT, NOW, params)
    assert answer is not None, "left to Python"
    return answer


def end_of(answer: bytes) -> bytes:
    put_id = msgpack.unpackb(answer)[2]
    return pack([put_id, [[at, bytes(16), b""] for at in range(KEYS)]])


def filled() -> HotCore:
    hot = core_of()
    for number in range(REQUESTS):
        call(hot, PUT_END, end_of(call(hot, PUT_START, start_of(number))))
    hot.take()
    return hot


@pytest.mark.parametrize("lease_ms", [0, 1_000])
@pytest.mark.parametrize("method", [EXISTS, LOOKUP], ids=["exists", "lookup"])
def test_reads(benchmark: Any, method: int, lease_ms: int) -> None:
    hot = filled()
    keys = [key for number in range(REQUESTS) for key in keys_of(number)]
    random.Random(1).shuffle(keys)
    requests = [pack([keys[at : at + KEYS], lease_ms]) for at in range(0, len(keys), KEYS)]

    def turn() -> int:
        return sum(len(call(hot, method, params)) for params in requests)

    size = benchmark.pedantic(turn, rounds=ROUNDS, warmup_rounds=1)
    benchmark.extra_info["keys"] = len(keys)
    assert size > len(keys)


def test_put_start(benchmark: Any) -> None:
    hot, numbers = core_of(), count()
    requests = [start_of(number) for number in range(ROUNDS + 1)]
    benchmark.pedantic(lambda: call(hot, PUT_START, requests[next(numbers)]), rounds=ROUNDS, warmup_rounds=1)
    benchmark.extra_info["keys"] = KEYS
    assert hot.counters.last_put == next(numbers) > 0


def test_put_end(benchmark: Any) -> None:
    hot, numbers = core_of(), count()
    requests = [end_of(call(hot, PUT_START, start_of(number))) for number in range(ROUNDS + 1)]
    benchmark.pedantic(lambda: call(hot, PUT_END, requests[next(numbers)]), rounds=ROUNDS, warmup_rounds=1)
    benchmark.extra_info["keys"] = KEYS
    assert hot.counters.last_fact == KEYS * next(numbers) > 0


def test_take(benchmark: Any) -> None:
    hot, numbers = core_of(), count()

    def setup() -> None:
        call(hot, PUT_END, end_of(call(hot, PUT_START, start_of(next(numbers)))))

    facts, _, effects, _ = benchmark.pedantic(hot.take, setup=setup, rounds=ROUNDS)
    benchmark.extra_info["keys"] = KEYS
    assert len(facts) == len(effects) == KEYS
