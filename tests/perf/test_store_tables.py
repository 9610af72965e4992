"""Micro-benchmarks of the store's tables: what one object, extent, slot or victim costs, called from Python.

They assert that the result is right and print what it costs; no time is asserted.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from moonpool.native.table.directory_slots import DirectorySlots
from moonpool.native.table.extents import Extents
from moonpool.native.table.objects import ObjectTable
from moonpool.native.table.stored import Place, StoredObject

ROUNDS = 10
OBJECTS = 20_000
SEGMENT = 1
POLICIES = ["lru", "s3fifo"]


def measure(benchmark: Any, call: Callable[[], Any], iterations: int = 1) -> Any:
    """A bounded number of rounds, so that the suite stays short."""
    return benchmark.pedantic(call, rounds=ROUNDS, iterations=iterations, warmup_rounds=1)


def objects_of(count: int) -> list[StoredObject]:
    return [
        StoredObject(
            at + 1,
            0,
            b"model-7b/block-%011d" % at,
            4_096,
            bytes(16),
            0,
            0,
            0,
            0,
            (Place(SEGMENT, at << 12, at),),
        )
        for at in range(count)
    ]


def filled(policy: str = "lru") -> ObjectTable:
    table = ObjectTable(policy)
    table.add_segment(SEGMENT, OBJECTS << 12)
    for stored in objects_of(OBJECTS):
        table.add(stored)
    return table


def test_add_and_drop(benchmark: Any) -> None:
    table, some = filled(), objects_of(OBJECTS + 1_000)[OBJECTS:]

    def turn() -> None:
        for index in [table.add(stored) for stored in some]:
            table.drop(index)

    measure(benchmark, turn)
    benchmark.extra_info["objects"] = len(some)
    assert len(table) == OBJECTS


def test_find_and_touch(benchmark: Any) -> None:
    table = filled()
    keys = [stored.key for stored in objects_of(OBJECTS)]
    random.Random(1).shuffle(keys)

    def turn() -> int:
        found = [table.find(0, key) for key in keys[:1_000]]
        for index in found:
            table.touch(index)
        return len(found)

    assert measure(benchmark, turn) == 1_000


@pytest.mark.parametrize("policy", POLICIES)
def test_victims(benchmark: Any, policy: str) -> None:
    table = filled(policy)
    found = measure(benchmark, lambda: table.victims(SEGMENT, 1_000 << 12, 5, count_max=1_000, soft=False))
    assert len(found) == 1_000


@pytest.mark.parametrize("what", ["dump", "load"])
def test_snapshot(benchmark: Any, what: str) -> None:
    table = filled()
    dump = table.dump()

    def load() -> int:
        other = ObjectTable()
        other.add_segment(SEGMENT, OBJECTS << 12)
        other.load(dump)
        return len(other)

    result = measure(benchmark, table.dump if what == "dump" else load)
    benchmark.extra_info["bytes_an_object"] = len(dump) / OBJECTS
    assert result in (dump, OBJECTS)


@pytest.mark.parametrize("sizes", [(4_096,), (100, 700, 3_000), (658_432, 3_271_557)], ids=str)
def test_extents(benchmark: Any, sizes: tuple[int, ...]) -> None:
    """A segment half full and fragmented; as many allocations as frees."""
    source = random.Random(2)
    space = Extents(1 << 33)
    space.add_range(0, 1 << 33)
    live = [(space.allocate(size), size) for size in sizes * 800]
    source.shuffle(live)
    for gone in live[: len(live) // 2]:
        space.free(*gone)
    wanted = [source.choice(sizes) for _ in range(1_000)]

    def turn() -> None:
        given = [space.allocate(size) for size in wanted]
        for offset, size in zip(given, wanted, strict=True):
            space.free(offset, size)

    measure(benchmark, turn)
    benchmark.extra_info["allocations"] = len(wanted)
    space.check()


def test_slots(benchmark: Any) -> None:
    slots = DirectorySlots(1 << 20)
    slots.add_range(0, 1 << 20)

    def turn() -> None:
        for slot in [slots.allocate() for _ in range(1_000)]:
            slots.free(slot)

    measure(benchmark, turn)
    assert slots.used() == 0
