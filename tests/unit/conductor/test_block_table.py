"""The native table's bounds, refusals, forms of input, memory and threads."""

from __future__ import annotations

import random
import struct
import threading
import tracemalloc
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moonpool.errors import LimitExceeded, UsageError
from moonpool.native.table.block_table import EVERY_TIER, BlockTable

#: What docs/conductor/index.md promises for each block, without sets of holders.
BYTES_PER_BLOCK_MAX = 48


def new_table(**changes: int) -> BlockTable:
    options = {"blocks_max": 1 << 20, "holders_max": 4096, "set_bytes_max": 1 << 26, "seed": 3}
    return BlockTable(**{**options, **changes})


def random_keys(count: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.getrandbits(64) for _ in range(count)]


def test_a_full_table_keeps_the_start_of_a_chain_and_says_where_it_stopped() -> None:
    table = new_table(blocks_max=10)
    table.store(0, 1, 0, [1, 2, 3])
    with pytest.raises(LimitExceeded, match="blocks_max") as caught:
        table.store(0, 1, 0, [2, 3, *range(100, 120)])
    assert caught.value.index == 9
    assert len(table) == 10
    assert table.blocks_held(1) == (10, 0, 0)
    assert table.store(0, 2, 1, [1, 2, 100]) == 3  # known blocks take no room
    assert table.remove(0, 1, 0, [106]) == 1
    assert table.store(0, 1, 0, [999]) == 1
    table.check()


def test_too_many_distinct_sets_are_refused_and_removal_still_works() -> None:
    table = new_table(set_bytes_max=40 * 50)
    keys = random_keys(400, seed=1)
    for holder in range(6):
        table.store(0, holder, 0, keys)

    def give_each_block_its_own_set() -> None:
        for at, key in enumerate(keys):
            for holder in range(6):
                if at >> holder & 1:
                    table.store(0, holder, 1, [key])

    with pytest.raises(LimitExceeded, match="set_bytes_max") as caught:
        give_each_block_its_own_set()
    assert caught.value.field == "set_bytes_max"
    table.check()
    for at, key in enumerate(keys):
        for holder in range(6):
            if at >> holder & 1:
                table.remove(0, holder, 0, [key])
    table.check()
    # Where even a removal had no set to go to, the block was forgotten: never held by too many.
    assert table.forgotten > 0
    for at, key in enumerate(keys):
        for holder in range(6):
            assert not (at >> holder & 1 and table.tiers_of(0, key, holder) & 1)
    for holder in range(6):
        table.clear(holder)
    assert len(table) == 0


def test_idle_sets_are_swept() -> None:
    table = new_table()
    keys = random_keys(8, seed=2)
    source = random.Random(2)
    for _ in range(6000):
        table.store(0, source.randrange(4096), 0, [source.choice(keys)])
        assert table.idle_sets <= 1025 + table.holder_sets // 2
    table.check()


def test_a_block_that_everybody_has() -> None:
    table = new_table()
    for holder in range(4096):
        table.store(7, holder, holder % 3, [42, 43])
    match = table.query(7, [42, 43, 44])
    assert len(match) == 4096
    assert match.holders == list(range(4096))
    assert match.disk == [2] * 4096
    assert match.device == [2 if holder % 3 == 0 else 0 for holder in range(4096)]
    assert table.holder_sets == 1
    for holder in range(4096):
        assert table.remove(7, holder, EVERY_TIER, [43, 42]) == 2
    assert len(table) == 0
    assert table.holder_sets == 0
    table.check()


FORMS: list[tuple[str, Callable[[list[int]], Any]]] = [
    ("list", list),
    ("tuple", tuple),
    ("signed list", lambda keys: [key - 2**64 if key >> 63 else key for key in keys]),
    ("numpy uint64", lambda keys: np.array(keys, np.uint64)),
    ("numpy int64", lambda keys: np.array(keys, np.uint64).view(np.int64)),
    ("array Q", lambda keys: array("Q", keys)),
    ("bytes", lambda keys: struct.pack(f"<{len(keys)}Q", *keys)),
    ("unaligned bytes", lambda keys: memoryview(b"x" + struct.pack(f"<{len(keys)}Q", *keys))[1:]),
    ("numpy scalars", lambda keys: [np.uint64(key) for key in keys]),
    ("read-only", lambda keys: memoryview(array("Q", keys)).toreadonly()),
]


@pytest.mark.parametrize("count", [0, 1, 5, 127, 128, 129, 5000])
@pytest.mark.parametrize(("name", "form"), FORMS, ids=[name for name, _ in FORMS])
def test_every_form_of_hashes(name: str, form: Callable[[list[int]], Any], count: int) -> None:
    keys = [0, 1, 2**30, 2**60 - 1, 2**60, 2**63 - 1, 2**63, 2**64 - 1, *random_keys(count, seed=count)]
    keys = keys[:count] if count else []
    table = new_table()
    assert table.store(0, 9, 1, form(keys)) == count
    match = table.query(0, keys)
    assert match.disk == ([count] if count else [])
    assert match.device == ([0] if count else [])
    assert table.remove(0, 9, 1, form(keys)) == count
    assert len(table) == 0


class Index:
    def __index__(self) -> int:
        return 5


class Shrinking:
    """Empties the list that it is read from."""

    def __init__(self, place: list[Any]) -> None:
        self.place = place

    def __index__(self) -> int:
        self.place.clear()
        return 1


@pytest.mark.parametrize(
    "wrong",
    [
        [1, 2**64],
        [-(2**63) - 1],
        [1.5],
        ["1"],
        [None],
        5,
        None,
        "text",
        b"1234567",
        np.zeros(3, np.float64),
        np.zeros(3, np.int32),
        np.zeros((2, 2), np.uint64),
        np.arange(10, dtype=np.uint64)[::2],
        np.zeros(3, ">u8"),
        np.zeros(3, "u4,u4"),
    ],
    ids=str,
)
def test_wrong_hashes_are_refused(wrong: Any) -> None:
    table = new_table()
    for call in (table.query, lambda context, hashes: table.store(context, 0, 0, hashes)):
        with pytest.raises(UsageError, match="hashes") as caught:
            call(0, wrong)
        assert caught.value.field == "hashes"
    assert len(table) == 0


def test_an_item_that_changes_its_list_is_harmless() -> None:
    table = new_table()
    keys: list[Any] = []
    keys += [Index(), Shrinking(keys), 3, 4]
    with pytest.raises(UsageError, match=r"hashes\[1\].*shortened"):
        table.store(0, 0, 0, keys)
    assert table.store(0, 0, 0, [Index()]) == 1
    assert table.tiers_of(0, 5, 0) == 1


def test_an_error_raised_by_an_item_comes_through() -> None:
    class Broken:
        def __index__(self) -> int:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        new_table().query(0, [1, Broken()])


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda table: table.store(0, 4096, 0, [1]), "holder"),
        (lambda table: table.store(0, 0, 3, [1]), "tier"),
        (lambda table: table.remove(0, 0, 4, [1]), "tier"),
        (lambda table: table.clear(0, 4), "tier"),
        (lambda table: table.blocks_held(5000), "holder"),
        (lambda table: table.query_into(0, [1], np.zeros((2, 5), np.uint32)), "out"),
        (lambda table: table.query_into(0, [7], np.zeros((3, 64), np.uint32)), "out"),
        (lambda table: table.query_many(0, [1], [0], np.zeros((1, 3, 5), np.uint32)), "offsets"),
        (lambda table: table.query_many(0, [1], [0, 2], np.zeros((1, 3, 5), np.uint32)), "offsets"),
        (lambda table: table.query_many(0, [1], [1, 0], np.zeros((1, 3, 5), np.uint32)), "offsets"),
        (lambda _: new_table(holders_max=0), "holders_max"),
        (lambda _: new_table(blocks_max=0), "blocks_max"),
    ],
)
def test_wrong_arguments_are_refused(call: Callable[[BlockTable], Any], field: str) -> None:
    table = new_table()
    table.store(0, 64, 0, [7])
    with pytest.raises(UsageError) as caught:
        call(table)
    assert caught.value.field == field
    table.check()


def test_the_planes_of_a_match_outlive_it() -> None:
    table = new_table()
    table.store(0, 3, 0, [1, 2])
    table.store(0, 70, 2, [1])
    planes = np.asarray(table.query(0, [1, 2]).planes())
    assert planes.dtype == np.uint32
    assert planes.tolist() == [[3, 70], [2, 0], [2, 0], [2, 1]]
    with pytest.raises(ValueError, match="read-only"):
        planes[0, 0] = 1
    empty = np.asarray(table.query(0, []).planes())
    assert empty.shape == (4, 0)


def test_depth_of_rank() -> None:
    table = new_table()
    for holder, depth in enumerate([4, 1, 3, 3, 2]):
        table.store(0, holder, 0, [1, 2, 3, 4][:depth])
    match = table.query(0, [1, 2, 3, 4])
    assert [match.depth_of_rank(rank) for rank in range(7)] == [0, 4, 3, 3, 2, 1, 0]


@pytest.mark.parametrize("blocks", [1_000, 60_000, 200_000])
def test_bytes_for_each_block_are_bounded_and_reported_truly(blocks: int) -> None:
    """Measured at the allocator, not only by our own account."""
    keys = np.array(random_keys(blocks, seed=blocks), np.uint64)
    tracemalloc.start()
    try:
        empty = new_table()
        fixed, _ = tracemalloc.get_traced_memory()
        assert abs(fixed - empty.memory_bytes) < 16_384
        for holder in range(20):
            empty.store(0, holder, 0, keys[holder * blocks // 20 : (holder + 2) * blocks // 20])
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(empty) == blocks
    assert abs(used - empty.memory_bytes) < 16_384
    per_block = (used - fixed) / blocks
    print(f"{per_block:.1f} bytes a block of {blocks}")
    assert per_block <= BYTES_PER_BLOCK_MAX


def test_threads_may_share_a_table() -> None:
    """Calls large enough to release the GIL, and small ones between them, from three threads."""
    table = new_table()
    keys = np.array(random_keys(40_000, seed=6), np.uint64)
    failures: list[BaseException] = []

    def work(holder: int) -> None:
        try:
            for round_number in range(6):
                assert table.store(0, holder, 0, keys) == len(keys)
                assert table.query(0, keys[:8192]).rows_by_holder()[holder] == (8192, 8192, 8192)
                for at in range(0, 2000, 20):
                    table.query(0, keys[at : at + 20])
                if round_number % 2:
                    assert table.remove(0, holder, 0, keys) == len(keys)
                else:
                    assert table.clear(holder) == len(keys)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(holder,)) for holder in (1, 64, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert failures == []
    assert len(table) == 0
    table.check()
