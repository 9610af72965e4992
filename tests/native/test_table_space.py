"""Free space, slots and open puts, natively: utilisation, rounding, bounds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import pytest

from moonpool.errors import InternalError, LimitExceeded, UsageError
from moonpool.native.table.directory_slots import DirectorySlots
from moonpool.native.table.directory_slots_reference import ReferenceSlots
from moonpool.native.table.extents import Extents
from moonpool.native.table.extents_reference import ReferenceExtents
from moonpool.native.table.open_puts import OpenPuts
from moonpool.native.table.open_puts_reference import ReferenceOpenPuts
from moonpool.native.table.stored import OpenPut, Place, PutEntry, extent_bytes

GIB = 1 << 30
PAGE = 4_096
PAIR = (3_271_557, 658_432)  # 3.12 MiB and 643 KiB: the two extents of one block in a published workload

SPACES = [Extents, ReferenceExtents]
SLOTS = [DirectorySlots, ReferenceSlots]
PUTS: list[Callable[..., Any]] = [OpenPuts, ReferenceOpenPuts]


def fill(space: Extents, sizes: Iterator[int]) -> float:
    """The share of the space that payloads fill when the first one does not fit any more."""
    used = 0
    for size in sizes:
        if space.allocate(size) < 0:
            break
        used += size
    space.check()
    return used / space.capacity_bytes


def space_of(capacity: int, kind: Any = Extents) -> Any:
    space = kind(capacity)
    space.add_range(0, capacity)
    return space


def random_sizes(source: random.Random, low: int, high: int) -> Iterator[int]:
    while True:
        yield source.randrange(low, high)


def test_pairs_fill_a_segment() -> None:
    assert fill(space_of(4 * GIB), cycle(PAIR)) >= 0.99


@pytest.mark.parametrize(("low", "high"), [(1, 100_000), (PAGE, 1 << 20), (1 << 16, 1 << 23)])
def test_random_sizes_fill_a_segment(low: int, high: int) -> None:
    seed = 3
    share = fill(space_of(GIB), random_sizes(random.Random(seed), low, high))
    print(f"seed {seed}: {share:.4f}")
    assert share >= 0.94


@pytest.mark.parametrize(("sizes", "floor"), [(PAIR, 0.95), (None, 0.84)], ids=["pairs", "random"])
def test_a_segment_stays_usable_under_churn(sizes: tuple[int, int] | None, floor: float) -> None:
    """A fifth is freed at random whenever the first request fails, fifty times."""
    seed = 9
    source = random.Random(seed)
    wanted = cycle(sizes) if sizes else random_sizes(source, PAGE, 1 << 20)
    space = space_of(GIB)
    live: list[tuple[int, int]] = []
    shares = []
    while len(shares) < 50:
        size = next(wanted)
        offset = space.allocate(size)
        if offset >= 0:
            live.append((offset, size))
            continue
        shares.append(sum(size for _, size in live) / GIB)
        source.shuffle(live)
        for gone in live[: len(live) // 5]:
            space.free(*gone)
        live = live[len(live) // 5 :]
    space.check()
    print(f"seed {seed}: at first failure {min(shares):.4f} to {max(shares):.4f}")
    assert min(shares) >= floor
    for gone in live:
        space.free(*gone)
    assert space.free_bytes() == space.largest_free() == GIB


@pytest.mark.parametrize("kind", SPACES)
def test_rounding_and_alignment(kind: Any) -> None:
    space = space_of(64 * PAGE, kind)
    for size, length, unit in [
        (0, 64, 64),
        (1, 64, 64),
        (65, 128, 64),
        (4_095, PAGE, PAGE),
        (4_033, PAGE, PAGE),
        (PAGE, PAGE, PAGE),
        (PAGE + 1, 2 * PAGE, PAGE),
    ]:
        free = space.free_bytes()
        offset = space.allocate(size)
        assert offset % (unit if size >= PAGE else 64) == 0
        assert free - space.free_bytes() == length == extent_bytes(size)
    space.check()


@pytest.mark.parametrize("kind", SPACES)
def test_windows_open_and_merge(kind: Any) -> None:
    space = kind(100 * PAGE + 640)
    assert space.allocate(1) == -1
    assert space.largest_free() == 0
    space.add_range(0, 10 * PAGE)
    space.add_range(10 * PAGE, 90 * PAGE)
    assert space.largest_free() == 100 * PAGE
    space.add_range(100 * PAGE, 640)
    assert space.free_bytes() == 100 * PAGE + 640
    whole = space.allocate(100 * PAGE)
    assert whole == 0
    assert space.largest_free() == 640
    assert space.allocate(640) == 100 * PAGE
    assert space.allocate(0) == -1
    for offset, length in [(0, PAGE), (-64, 64), (1, 64), (0, 0), (99 * PAGE, 2 * PAGE), (1 << 60, 64)]:
        with pytest.raises(InternalError):
            space.add_range(offset, length)
    space.check()


@pytest.mark.parametrize("kind", SPACES)
def test_what_is_no_extent_is_not_freed(kind: Any) -> None:
    space = space_of(100 * PAGE, kind)
    large, small = space.allocate(3 * PAGE), space.allocate(200)
    for offset, size in [
        (large, 2 * PAGE),
        (large + PAGE, 2 * PAGE),
        (large, 4 * PAGE),
        (small, 100),
        (small + 64, 192),
        (small, 300),
        (-1, 64),
        (1 << 60, 64),
        (50 * PAGE, PAGE),
    ]:
        with pytest.raises(InternalError, match="starts at"):
            space.free(offset, size)
    space.free(large, 3 * PAGE)
    with pytest.raises(InternalError):
        space.free(large, 3 * PAGE)
    space.free(small, 193)
    space.check()
    assert space.largest_free() == 100 * PAGE


def test_taking_all_places_rebuilds_a_segment() -> None:
    source = random.Random(2)
    space = space_of(1 << 28)
    live = [(space.allocate(size), size) for size in [source.randrange(20_000) for _ in range(5_000)]]
    rows = sorted((offset, extent_bytes(size), 0) for offset, size in live)
    packed = b"".join(value.to_bytes(8, "little") for row in rows for value in row)
    other = space_of(1 << 28)
    other.take_all(packed)
    other.check()
    assert other.free_bytes() == space.free_bytes()
    assert other.extents() == 5_000
    with pytest.raises(InternalError, match="not all free"):
        other.take_all(packed[:24])
    with pytest.raises(InternalError, match="no packed places"):
        other.take_all(packed[:23])
    with pytest.raises(InternalError, match="no extent"):
        other.take_all((0).to_bytes(8, "little") + (65).to_bytes(8, "little") + bytes(8))


@pytest.mark.parametrize("capacity", [0, 63, 65, -64, (1 << 41) + 64])
def test_capacities_that_cannot_be(capacity: int) -> None:
    for kind in SPACES:
        with pytest.raises(UsageError, match="capacity_bytes"):
            kind(capacity)


def test_a_segment_of_two_tebibytes() -> None:
    space = space_of(1 << 41)
    assert space.allocate(1 << 40) == 0
    assert space.allocate(1 << 40) == 1 << 40
    assert space.allocate(1) == -1
    space.free(0, 1 << 40)
    assert space.largest_free() == 1 << 40


@pytest.mark.parametrize("kind", SLOTS)
def test_slots_open_and_are_given_lowest_first(kind: Any) -> None:
    slots = kind(1 << 24)
    assert slots.allocate() == -1
    slots.add_range(100, 50)
    slots.add_range(0, 3)
    assert [slots.allocate() for _ in range(4)] == [0, 1, 2, 100]
    slots.free(1)
    slots.take(149)
    assert slots.allocate() == 1
    assert (slots.used(), slots.free_count()) == (5, 48)
    for wrong in (1, 3, 200, -1, 1 << 24):
        with pytest.raises(InternalError):
            slots.take(wrong)
    for wrong in (3, 101, -1, 1 << 24):
        with pytest.raises(InternalError):
            slots.free(wrong)
    for first, count in [(2, 1), (90, 11), (-1, 2), (0, 0), ((1 << 24) - 1, 2)]:
        with pytest.raises(InternalError):
            slots.add_range(first, count)
    for wrong in (0, (1 << 30) + 1):
        with pytest.raises(UsageError):
            kind(wrong)


def put(put_id: int, client: int = 1, deadline: int = 10, keys: int = 1) -> OpenPut:
    entries = tuple(PutEntry(b"k%d" % at, 100, (Place(1, at * 64, at),), 0) for at in range(keys))
    return OpenPut(put_id, client, 0, deadline, 0, 0, 0, 0, False, entries)


@pytest.mark.parametrize("kind", PUTS)
def test_open_puts_end_expire_and_are_bounded(kind: Callable[..., Any]) -> None:
    puts = kind(puts_max=3, entries_max=5)
    puts.add(put(30, deadline=7, keys=2))
    puts.add(put(10, deadline=9))
    puts.add(put(20, client=2, deadline=7))
    with pytest.raises(LimitExceeded, match="puts_max"):
        puts.add(put(40))
    assert puts.expired(6, 9) == []
    assert puts.expired(8, 9) == [30, 20]
    assert puts.expired(9, 2) == [30, 20]
    assert list(puts.of_client(1)) == [30, 10]
    assert puts.writing_bytes(1) == 4 * 128
    entry = puts.end_entry(30, 1, 1)
    assert entry == PutEntry(b"k1", 100, (Place(1, 64, 1),), 0)
    assert puts.get(30).entries[1].state == 1
    with pytest.raises(InternalError, match="no open entry"):
        puts.end_entry(30, 1, 2)
    puts.end_entry(30, 0, 2)
    assert puts.get(30) is None
    assert len(puts) == 2
    with pytest.raises(LimitExceeded, match="entries_max"):
        puts.add(put(40, keys=4))
    with pytest.raises(InternalError, match="open already"):
        puts.add(put(10))
    with pytest.raises(InternalError, match="no table can hold"):
        puts.add(put(50, keys=0))
    puts.check()
