"""One config, two kinds of tables, the same protocol."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.errors import LimitExceeded, UsageError
from moonpool.native.table.stored import OpenPut, Place, PutEntry, StoredObject
from moonpool.store.leader_hot import is_native
from moonpool.store.table_factory import TableConfig, native_tables, twin_tables


@pytest.mark.parametrize("make", [native_tables, twin_tables])
def test_the_bounds_are_those_of_the_config(make: Any) -> None:
    tables = make(
        TableConfig(policy="s3fifo", objects_max=1, open_puts_max=1, open_entries_max=2, hash_seed=9)
    )
    tables.objects.add_segment(1, 1 << 20)
    place = Place(1, 0, 0)
    tables.objects.add(StoredObject(1, 0, b"a", 1, bytes(16), 0, 0, 0, 0, (place,)))
    with pytest.raises(LimitExceeded, match="objects_max"):
        tables.objects.add(StoredObject(2, 0, b"b", 1, bytes(16), 0, 0, 0, 0, (place,)))
    entry = PutEntry(b"k", 1, (place,), 0)
    with pytest.raises(LimitExceeded, match="entries_max"):
        tables.open_puts.add(OpenPut(1, 1, 0, 1, 0, 0, 0, 0, False, (entry,) * 3))
    tables.open_puts.add(OpenPut(1, 1, 0, 1, 0, 0, 0, 0, False, (entry,)))
    with pytest.raises(LimitExceeded, match="puts_max"):
        tables.open_puts.add(OpenPut(2, 1, 0, 1, 0, 0, 0, 0, False, (entry,)))
    space, slots = tables.extents(1 << 20), tables.slots(64)
    assert (space.capacity_bytes, space.allocate(1), slots.allocate()) == (1 << 20, -1, -1)


def test_only_compiled_tables_have_a_native_core() -> None:
    assert is_native(native_tables(TableConfig()))
    assert not is_native(twin_tables(TableConfig()))


@pytest.mark.parametrize(
    "wrong",
    [
        {"policy": "clock"},
        {"objects_max": 0},
        {"objects_max": (1 << 30) + 1},
        {"ghosts_max": 0},
        {"open_puts_max": (1 << 24) + 1},
        {"open_entries_max": 0},
        {"hash_seed": -1},
        {"hash_seed": 1 << 64},
    ],
    ids=str,
)
def test_configs_that_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        TableConfig(**wrong)
