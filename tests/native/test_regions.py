"""The table of own regions: overlaps, generations, capacity, and draining while somebody is inside."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moonpool.errors import LimitExceeded, StaleHandle, Status, UsageError
from moonpool.native.io.regions import LocalRegions

KEYS = (bytes(16), b"\xff" * 16)
BASE = 0x10000
U64_MAX = (1 << 64) - 1


def add(table: LocalRegions, address: int, length: int, access: int = 3) -> int:
    return table.add(address, length, access, *KEYS)


def test_handles_are_generation_and_slot() -> None:
    table = LocalRegions(4)
    assert [add(table, BASE + 100 * i, 100) for i in range(3)] == [1 << 32, 1 << 32 | 1, 1 << 32 | 2]
    assert len(table) == 3
    assert table.users == 0


def test_a_reused_slot_has_a_higher_generation() -> None:
    table = LocalRegions(1)
    first = add(table, BASE, 100)
    for generation in range(2, 6):
        assert table.remove((generation - 1) << 32, 1.0)
        assert add(table, BASE, 100) == generation << 32
    with pytest.raises(StaleHandle) as caught:
        table.remove(first, 1.0)
    assert caught.value.region == first


@pytest.mark.parametrize("handle", [0, 1, 2 << 32, 1 << 32 | 1, 1 << 32 | 0xFFFFFFFF, U64_MAX])
def test_a_made_up_handle_is_stale(handle: int) -> None:
    table = LocalRegions(4)
    add(table, BASE, 100)
    with pytest.raises(StaleHandle):
        table.remove(handle, 1.0)
    assert len(table) == 1


@pytest.mark.parametrize(
    ("address", "length"),
    [(BASE, 100), (BASE + 99, 1), (BASE - 1, 2), (BASE - 50, 200), (BASE + 10, 10), (BASE + 99, 1000)],
)
def test_overlaps_are_refused(address: int, length: int) -> None:
    table = LocalRegions(4)
    handle = add(table, BASE, 100)
    with pytest.raises(UsageError, match="overlaps") as caught:
        add(table, address, length)
    assert (caught.value.address, caught.value.length_bytes) == (address, length)
    assert len(table) == 1
    assert table.find(BASE, 100) == handle


def test_neighbours_may_touch() -> None:
    table = LocalRegions(4)
    middle = add(table, BASE, 100)
    before, behind = add(table, BASE - 100, 100), add(table, BASE + 100, 100)
    assert [table.find(BASE + at, 1) for at in (-1, 0, 99, 100)] == [before, middle, middle, behind]
    assert table.find(BASE + 99, 2) == 0, "a range over two regions is in neither"


@pytest.mark.parametrize(
    ("address", "length"), [(BASE, 0), (0, 100), (U64_MAX, 2), (U64_MAX - 10, 100), (BASE, U64_MAX)]
)
def test_impossible_ranges_are_refused(address: int, length: int) -> None:
    table = LocalRegions(4)
    with pytest.raises(UsageError, match="cannot register"):
        add(table, address, length)
    assert len(table) == 0


@pytest.mark.parametrize("numbers", [(-1, 10), (10, -1), (1 << 64, 10), (10, 1 << 64)])
def test_numbers_beyond_64_bits_are_refused(numbers: tuple[int, int]) -> None:
    with pytest.raises(OverflowError):
        add(LocalRegions(4), *numbers)


@pytest.mark.parametrize(
    "keys", [(b"", bytes(16)), (bytes(16), b""), (bytes(15), bytes(16)), (bytes(17),) * 2]
)
def test_keys_have_16_bytes(keys: tuple[bytes, bytes]) -> None:
    with pytest.raises(UsageError, match="16 bytes"):
        LocalRegions(4).add(BASE, 10, 3, *keys)


def test_capacity_is_a_typed_limit() -> None:
    table = LocalRegions(3)
    handles = [add(table, BASE + 100 * i, 100) for i in range(3)]
    with pytest.raises(LimitExceeded, match="regions_max") as caught:
        add(table, BASE + 1000, 100)
    assert (caught.value.field, caught.value.limit) == ("regions_max", 3)
    assert table.remove(handles[1], 1.0)
    assert add(table, BASE + 1000, 100) == 2 << 32 | 1


def test_the_highest_addresses_can_be_registered() -> None:
    table = LocalRegions(2)
    handle = add(table, U64_MAX - 100, 100)
    assert table.find(U64_MAX - 100, 100) == handle
    assert table.find(U64_MAX - 1, 1) == handle
    assert table.find(U64_MAX - 1, 3) == 0


@pytest.mark.parametrize("length", [101, U64_MAX, U64_MAX - BASE, U64_MAX - BASE + 2])
def test_a_range_that_is_too_long_is_not_found(length: int) -> None:
    table = LocalRegions(2)
    add(table, BASE, 100)
    assert table.find(BASE, length) == 0


def test_an_empty_table_drains_at_once() -> None:
    table = LocalRegions(2)
    assert table.drain(0.0)
    assert table.drain(float("nan"))
    assert table.drain(-1.0)


def test_removal_waits_for_those_inside(make_stalled: Any, tools: Any) -> None:
    stalled = make_stalled()
    rig = stalled.rig
    mine, other, remote = rig.buffer(4096), rig.buffer(4096), stalled.memory()
    batch = rig.make(tools.READ, mine.address, remote.handle, 0, 4096)
    with tools.background(batch.drive_here):
        stalled.request()
        assert rig.own.users == 1
        assert not rig.own.remove(mine.handle, 0.02), "the batch may still write into it"
        assert rig.own.find(mine.address, 1) == 0
        with pytest.raises(StaleHandle):
            rig.own.remove(mine.handle, 0.02)
        assert not rig.own.drain(0.02)
        # Whoever comes now meets the table as it is, and is not waited for twice.
        late = rig.run(tools.READ, mine.address, remote.handle, 0, 4096)
        assert late.worst == Status.NOT_REGISTERED
        assert rig.own.find(other.address, 4096) == other.handle
        stalled.peers[0].close()
    assert batch.worst == Status.PEER_GONE
    assert rig.own.drain(tools.WAIT_S)
    assert rig.own.users == 0


def test_a_slot_whose_users_outstayed_is_not_used_again(make_stalled: Any, tools: Any) -> None:
    stalled = make_stalled()
    rig = stalled.rig
    mine, remote = rig.buffer(4096), stalled.memory()
    with tools.background(rig.make(tools.READ, mine.address, remote.handle, 0, 4096).drive_here):
        stalled.request()
        assert not rig.own.remove(mine.handle, 0.0)
        fresh = rig.own.add(mine.address, 4096, 7, *KEYS)
        assert fresh & 0xFFFFFFFF != mine.handle & 0xFFFFFFFF
        stalled.peers[0].close()


class TableAgainstModel(RuleBasedStateMachine):
    """Any sequence of additions and removals, against a dict of ranges."""

    @initialize(capacity=st.integers(1, 6))
    def start(self, capacity: int) -> None:
        self.capacity = capacity
        self.table = LocalRegions(capacity)
        self.live: dict[int, tuple[int, int]] = {}
        self.dead: list[int] = []

    @rule(address=st.integers(1, 40), length=st.integers(1, 12))
    def register(self, address: int, length: int) -> None:
        taken = any(address < a + n and a < address + length for a, n in self.live.values())
        if taken or len(self.live) == self.capacity:
            with pytest.raises(UsageError if taken else LimitExceeded):
                add(self.table, address, length)
            return
        handle = add(self.table, address, length)
        assert handle not in self.live
        assert handle not in self.dead
        self.live[handle] = (address, length)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.live)))
        assert self.table.remove(handle, 1.0)
        del self.live[handle]
        self.dead.append(handle)

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def remove_again(self, data: st.DataObject) -> None:
        with pytest.raises(StaleHandle):
            self.table.remove(data.draw(st.sampled_from(self.dead)), 1.0)

    @rule(address=st.integers(0, 60), length=st.integers(0, 14))
    def find(self, address: int, length: int) -> None:
        holders = [h for h, (a, n) in self.live.items() if a <= address and address + length <= a + n]
        found = self.table.find(address, length)
        assert found in holders if holders else found == 0

    @invariant()
    def counts(self) -> None:
        if hasattr(self, "table"):
            assert len(self.table) == len(self.live)
            assert self.table.users == 0


TestTableAgainstModel = TableAgainstModel.TestCase
