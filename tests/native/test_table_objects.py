"""The native table of objects: what it evicts and in which order, what it costs, what it refuses."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from moonpool.errors import InternalError, LimitExceeded, UsageError
from moonpool.native.table.objects import ObjectTable
from moonpool.native.table.objects_reference import ReferenceObjectTable
from moonpool.native.table.stored import Place, StoredObject

PAGE = 4_096
TABLES = [ObjectTable, ReferenceObjectTable]


def stored(
    number: int, *, segment: int = 1, size: int = PAGE, key: bytes = b"", **fields: Any
) -> StoredObject:
    values = {"object_type": 0, "pin": 0, "soft_pin_end_ms": 0, "group": 0, **fields}
    places = values.pop("places", (Place(segment, number * size, number),))
    return StoredObject(number, 0, key or b"key-%d" % number, size, bytes(16), places=places, **values)


def filled(kind: Any, policy: str = "lru", count: int = 10, capacity: int = 1 << 20, **bounds: int) -> Any:
    """Objects 1 to `count` at indices 0 to count - 1, one page each."""
    table = kind(policy, **bounds)
    table.add_segment(1, capacity)
    for number in range(1, count + 1):
        table.add(stored(number))
    return table


def victims(table: Any, pages: int, *, now: int = 0, count_max: int = 100, soft: bool = False) -> list[int]:
    found: list[int] = table.victims(1, pages * PAGE, now, count_max=count_max, soft=soft)
    table.check()
    return found


@pytest.mark.parametrize("kind", TABLES)
def test_lru_evicts_the_least_recent_first(kind: Any) -> None:
    table = filled(kind)
    table.touch(0)
    table.touch(3)
    assert victims(table, 3) == [1, 2, 4]
    assert victims(table, 3) == [1, 2, 4]  # they stay until dropped
    for index in (1, 2, 4):
        table.drop(index)
    assert victims(table, 100) == [5, 6, 7, 8, 9, 0, 3]
    assert victims(table, 100, count_max=2) == [5, 6]
    assert victims(table, 0) == []


@pytest.mark.parametrize("kind", TABLES)
def test_leased_objects_are_passed_over_once(kind: Any) -> None:
    table = filled(kind, count=1_000)
    for index in range(500):
        table.extend_lease(index, 50)
    table.extend_lease(0, 10)
    assert table.lease_until(0) == 50
    # A call looks at 4 * 10 + 64 entries; what it may not evict goes behind the others.
    assert [len(victims(table, 1_000, now=49, count_max=10)) for _ in range(6)] == [0, 0, 0, 0, 10, 10]
    # The last looks went to places that may go: those stand first now.
    assert victims(table, 3, now=49) == [500, 501, 502]
    assert len(victims(table, 1_000, now=50, count_max=1_000)) == 1_000


@pytest.mark.parametrize("kind", TABLES)
def test_pins(kind: Any) -> None:
    table = filled(kind, count=6)
    table.set_pin(0, 2, 0)
    table.set_pin(1, 1, 100)
    table.set_pin(2, 1, 200)
    assert victims(table, 100, now=99) == [3, 4, 5]
    assert victims(table, 100, now=99, soft=True) == [3, 4, 5, 1, 2]
    assert victims(table, 100, now=100) == [3, 4, 5, 1]  # the pin of 1 is over: as if just used
    table.set_pin(0, 0, 0)
    assert victims(table, 100, now=100, soft=True) == [3, 4, 5, 1, 0, 2]
    assert table.at(1).pin == 1


@pytest.mark.parametrize("kind", TABLES)
def test_groups_go_whole_or_not_at_all(kind: Any) -> None:
    table = kind()
    for segment in (1, 2):
        table.add_segment(segment, 1 << 20)
    table.add(stored(1, group=7))
    table.add(stored(2))
    table.add(stored(3, group=7, segment=2))
    table.add(stored(4, group=7, places=(Place(1, 4 * PAGE, 4), Place(2, 4 * PAGE, 4))))
    # 1 would lose its last place, so the group ends: also the member that is elsewhere.
    assert victims(table, 1) == [0, 2, 3]
    assert victims(table, 1, count_max=1) == [0, 2, 3]
    assert victims(table, 100) == [0, 2, 3, 1]
    table.extend_lease(2, 10)
    assert victims(table, 100, now=9) == [1]
    assert victims(table, 100, now=10) == [1, 0, 2, 3]
    table.add_place(0, Place(2, PAGE, 1))
    # Now both members here have another place: they lose this one, and the third keeps its own.
    assert victims(table, 100, now=10) == [1, 0, 3]


@pytest.mark.parametrize("kind", TABLES)
def test_s3fifo_keeps_what_is_used_in_its_first_queue(kind: Any) -> None:
    table = filled(kind, "s3fifo", count=200, capacity=200 * PAGE)
    for index in range(0, 200, 20):
        table.touch(index)
    gone = victims(table, 100)
    assert not {index for index in gone if index % 20 == 0}
    for index in gone:
        table.drop(index)
    scan = [table.add(stored(1_000 + number)) for number in range(100)]
    for index in victims(table, 60):
        assert index % 20 or index in scan
        table.drop(index)
    assert all(table.find(0, b"key-%d" % (index + 1)) == index for index in range(0, 200, 20))


@pytest.mark.parametrize("kind", TABLES)
def test_s3fifo_remembers_what_it_evicted(kind: Any) -> None:
    """An object whose ghost is kept begins in the main queue, where a scan does not push it out."""
    table = filled(kind, "s3fifo", count=20, capacity=20 * PAGE)
    first = victims(table, 1)
    for index in first:
        table.drop(index)
    back = table.add(stored(99, key=b"key-1"))
    assert table.at(back).key == b"key-1"
    order = victims(table, 100)
    assert order.index(back) > order.index(first[0] + 1)


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_a_search_costs_what_it_finds(policy: str) -> None:
    """Looks are bounded however many entries may not go: no call sees more than 4 * count_max + 64."""
    table = filled(ObjectTable, policy, count=5_000)
    for index in range(5_000):
        table.extend_lease(index, 10)
    for index in range(4_000, 4_010):
        table.touch(index)
    assert victims(table, 100, now=5, count_max=5) == []
    assert victims(table, 2, now=11) != []


@pytest.mark.parametrize("kind", TABLES)
def test_what_is_refused(kind: Any) -> None:
    table = filled(kind, objects_max=10)
    with pytest.raises(LimitExceeded, match="objects_max"):
        table.add(stored(11))
    table.drop(0)
    with pytest.raises(InternalError, match="taken"):
        table.add(stored(12, key=b"key-2"))
    with pytest.raises(InternalError, match="no segment 5"):
        table.add(stored(12, segment=5))
    for wrong in (
        stored(0),
        stored(12, key=b"x" * 1_025),
        stored(12, size=(1 << 40) + 1),
        stored(12, places=(Place(1, 0, 0), Place(1, 64, 1))),
        stored(12, pin=3),
        stored(12)._replace(digest=b"short"),
    ):
        with pytest.raises(InternalError, match="no table can hold"):
            table.add(wrong)
    for index in (-1, 0, 10, 1 << 40):
        with pytest.raises(InternalError, match="no object at index"):
            table.at(index)
    with pytest.raises(InternalError, match="still has places"):
        table.drop_segment(1)
    with pytest.raises(InternalError, match="cannot be added"):
        table.add_segment(1, 0)
    with pytest.raises(UsageError, match="lru, s3fifo"):
        kind("clock")
    table.check()
    assert len(table) == 9


@pytest.mark.parametrize("kind", TABLES)
def test_places_of_many_segments(kind: Any) -> None:
    table = kind()
    for segment in range(1, 300):
        table.add_segment(segment * 1_000_003 % 4_294_967_291, 1 << 20)
    for segment in range(1, 300):
        number = segment * 1_000_003 % 4_294_967_291
        table.add(stored(segment, segment=number, size=100))
        assert table.bytes_on(number) == 128
    assert table.bytes_of(0) == 128 * 299
    for segment in range(1, 300, 2):
        number = segment * 1_000_003 % 4_294_967_291
        assert table.drop_places(number) == 1
        table.drop_segment(number)
    table.check()
    assert len(table) == 149


@pytest.mark.parametrize("kind", TABLES)
def test_packed_places_rebuild_free_space(kind: Any) -> None:
    source = random.Random(4)
    table = filled(kind, count=0)
    order = list(range(50))
    source.shuffle(order)
    for at, number in enumerate(order):
        table.add(stored(at + 1, places=(Place(1, number * 2 * PAGE, number),)))
    packed = memoryview(table.packed_places(1)).cast("Q").tolist()
    assert packed[::3] == [number * 2 * PAGE for number in range(50)]
    assert packed[1::3] == [PAGE] * 50
    assert packed[2::3] == list(range(50))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4_096


def test_a_key_of_26_bytes_takes_160_bytes_at_most() -> None:
    count = 200_000
    table = ObjectTable()
    table.add_segment(1, 1 << 40)
    before = resident_bytes()
    for number in range(1, count + 1):
        key = b"model-7b/block-%011d" % number
        assert len(key) == 26
        table.add(stored(number, key=key))
    grown = (resident_bytes() - before) / count
    print(f"{grown:.1f} bytes a key resident, {table.memory_bytes() / count:.1f} by its own count")
    assert table.memory_bytes() / count < 160
    assert grown < 200


def test_memory_is_used_again() -> None:
    """Rounds of other objects with other keys, and of keys of other lengths: nothing is lost."""
    source = random.Random(6)
    table = filled(ObjectTable, count=0)
    sizes = []
    for turn in range(20):
        indices = [
            table.add(
                stored(
                    turn * 1_000 + number + 1, key=b"%d-" % (turn * 1_000 + number) * source.randrange(1, 9)
                )
            )
            for number in range(500)
        ]
        sizes.append(table.memory_bytes())
        for index in indices:
            table.drop(index)
        table.check()
    assert sizes[-1] <= sizes[3] * 1.3
