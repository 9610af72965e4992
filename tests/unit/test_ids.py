"""Handles, the table behind them, and instance ids."""

from __future__ import annotations

import pytest

import moonpool
from moonpool.errors import InternalError, LimitExceeded, StaleHandle, UsageError
from moonpool.ids import (
    ANY_INSTANCE,
    AUTO_PATH,
    GENERATION_MAX,
    HandleTable,
    check_instance_id,
    new_instance_id,
    pack_handle,
    unpack_handle,
)
from moonpool.operations import Access, Op


def test_a_handle_is_generation_and_index() -> None:
    assert pack_handle(3, 5) == 3 << 32 | 5
    assert unpack_handle(3 << 32 | 5) == (3, 5)
    assert unpack_handle(pack_handle(GENERATION_MAX, 0xFFFF_FFFF)) == (GENERATION_MAX, 0xFFFF_FFFF)


@pytest.mark.parametrize(("generation", "index"), [(0, 1), (1, -1), (1 << 32, 0), (1, 1 << 32)])
def test_parts_that_do_not_fit_are_refused(generation: int, index: int) -> None:
    with pytest.raises(UsageError, match="no handle"):
        pack_handle(generation, index)


@pytest.mark.parametrize("handle", [0, 5, -1, 1 << 64, 0xFFFF_FFFF])
def test_impossible_handles_are_stale(handle: int) -> None:
    with pytest.raises(StaleHandle):
        unpack_handle(handle)


def test_entries_are_found_by_handle() -> None:
    table: HandleTable[str | None] = HandleTable(3, "regions_max")
    first, second = table.insert("a"), table.insert(None)
    assert (table.get(first), table.get(second), len(table)) == ("a", None, 2)
    assert list(table.items()) == [(first, "a"), (second, None)]
    table.check()


def test_a_removed_handle_is_stale_even_when_its_slot_is_reused() -> None:
    table: HandleTable[str] = HandleTable(1, "regions_max")
    old = table.insert("a")
    assert table.remove(old) == "a"
    new = table.insert("b")
    assert unpack_handle(new)[1] == unpack_handle(old)[1]
    assert unpack_handle(new)[0] == unpack_handle(old)[0] + 1
    for use in (table.get, table.remove):
        with pytest.raises(StaleHandle) as caught:
            use(old)
        assert caught.value.handle == old
    assert table.get(new) == "b"
    table.check()


def test_a_full_table_says_which_bound() -> None:
    table: HandleTable[int] = HandleTable(2, "peers_max")
    handles = [table.insert(n) for n in range(2)]
    with pytest.raises(LimitExceeded, match="peers_max") as caught:
        table.insert(2)
    assert (caught.value.field, caught.value.limit) == ("peers_max", 2)
    table.remove(handles[0])
    table.insert(3)
    assert len(table) == 2
    table.check()


def test_slots_are_reused_oldest_first() -> None:
    table: HandleTable[int] = HandleTable(3, "regions_max")
    handles = [table.insert(n) for n in range(3)]
    for handle in (handles[1], handles[0], handles[2]):
        table.remove(handle)
    assert [unpack_handle(table.insert(n))[1] for n in range(3)] == [1, 0, 2]


def test_a_used_up_slot_is_retired() -> None:
    table: HandleTable[int] = HandleTable(1, "regions_max")
    table.insert(0)
    table._generations[0] = GENERATION_MAX
    table.remove(pack_handle(GENERATION_MAX, 0))
    table.check()
    assert len(table) == 0
    with pytest.raises(LimitExceeded):
        table.insert(1)


def test_check_finds_a_broken_table() -> None:
    table: HandleTable[int] = HandleTable(2, "regions_max")
    table.insert(0)
    table._free.append(0)
    with pytest.raises(InternalError, match="live or free"):
        table.check()


@pytest.mark.parametrize("capacity", [0, -1, 1 << 32])
def test_senseless_capacities_are_refused(capacity: int) -> None:
    with pytest.raises(UsageError):
        HandleTable(capacity, "regions_max")


def test_instance_ids_are_random_and_never_zero() -> None:
    assert len({new_instance_id() for _ in range(50)}) == 50
    sources = iter([bytes(16), b"\x01" * 16])
    assert new_instance_id(lambda _: next(sources)) == b"\x01" * 16
    with pytest.raises(InternalError, match="random"):
        new_instance_id(bytes)


def test_instance_ids_from_outside_are_checked() -> None:
    assert check_instance_id(b"\x02" * 16) == b"\x02" * 16
    for raw in (ANY_INSTANCE, b"", b"\x01" * 15):
        with pytest.raises(UsageError):
            check_instance_id(raw)


def test_auto_path_is_the_largest_path_id() -> None:
    assert AUTO_PATH == 0xFFFF


@pytest.mark.parametrize(
    ("access", "read", "write"),
    [
        (Access.NONE, False, False),
        (Access.READ, True, False),
        (Access.WRITE, False, True),
        (Access(3), True, True),
    ],
)
def test_access_allows_what_it_says(access: Access, read: bool, write: bool) -> None:
    assert (access.allows(Op.READ), access.allows(Op.WRITE)) == (read, write)


def test_public_names_that_need_no_engine_are_there() -> None:
    assert moonpool.Op is Op
    assert moonpool.StaleHandle is StaleHandle
    assert set(dir(moonpool)) == set(moonpool.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        moonpool.nothing  # noqa: B018
