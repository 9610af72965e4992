"""A pool against a dictionary: whatever the order of calls, a get gives the bytes of the last completed put.

Two clients of one pool take turns: one asks the master, the other remembers locations, so that every change
by one must be seen by the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import moonpool
from moonpool import PutStatus, RemoveCode

SIZES = st.sampled_from([0, 1, 7, 64, 4095, 4096, 65_535, 65_536, 65_537, 140_000])
KEYS = st.integers(0, 7)
RUNS = itertools.count()


def content(size: int, seed: int) -> bytes:
    step = bytes((seed * 31 + i * 7) & 0xFF for i in range(251))
    return (step * (size // 251 + 1))[:size]


class PoolMachine(RuleBasedStateMachine):
    """`clients` are of one pool; keys begin with the number of the run, so that runs do not meet."""

    clients: tuple[moonpool.Pool, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.run = next(RUNS)
        self.model: dict[str, bytes] = {}

    def key(self, number: int) -> str:
        return f"{self.run}/{number}"

    @rule(who=st.integers(0, 1), number=KEYS, size=SIZES, seed=st.integers(0, 255))
    def put(self, who: int, number: int, size: int, seed: int) -> None:
        key, data = self.key(number), content(size, seed)
        result = self.clients[who].put(key, data)
        if key in self.model:
            assert result.status is PutStatus.EXISTS
        else:
            assert result.status is PutStatus.STORED
            self.model[key] = data

    @rule(who=st.integers(0, 1), number=KEYS, size=SIZES, seed=st.integers(0, 255))
    def upsert(self, who: int, number: int, size: int, seed: int) -> None:
        data = content(size, seed)
        assert self.clients[who].upsert(self.key(number), data).stored
        self.model[self.key(number)] = data

    @rule(
        who=st.integers(0, 1),
        numbers=st.lists(KEYS, min_size=1, max_size=12),
        size=SIZES,
        replace=st.booleans(),
    )
    def put_many(self, who: int, numbers: list[int], size: int, replace: bool) -> None:
        keys = [self.key(number) for number in numbers]
        datas = [content(size + place, place) for place in range(len(keys))]
        results = self.clients[who].put_many(keys, datas, replace=replace)
        for key, data, result in zip(keys, datas, results, strict=True):
            assert result.status is (
                PutStatus.STORED if replace or key not in self.model else PutStatus.EXISTS
            )
            if result.stored:
                self.model[key] = data

    @rule(who=st.integers(0, 1), number=KEYS)
    def get(self, who: int, number: int) -> None:
        self.agrees(self.clients[who].get(self.key(number)), self.key(number))

    @rule(who=st.integers(0, 1), numbers=st.lists(KEYS, max_size=12))
    def get_many(self, who: int, numbers: list[int]) -> None:
        keys = [self.key(number) for number in numbers]
        for key, value in zip(keys, self.clients[who].get_many(keys), strict=True):
            self.agrees(value, key)

    @rule(who=st.integers(0, 1), numbers=st.lists(KEYS, max_size=12), scattered=st.booleans())
    def get_into_many(self, who: int, numbers: list[int], scattered: bool) -> None:
        keys = [self.key(number) for number in numbers]
        rooms: list[Any] = [bytearray(140_013) for _ in keys]
        views = [[memoryview(room)[:100], memoryview(room)[100:]] for room in rooms]
        results = self.clients[who].get_into_many(keys, views if scattered else rooms)
        for key, room, result in zip(keys, rooms, results, strict=True):
            known = self.model.get(key)
            assert result.error is None
            assert result.hit == (known is not None)
            assert bytes(room[: result.length]) == (known or b"")

    @rule(who=st.integers(0, 1), number=KEYS, offset=st.integers(0, 150_000), length=st.integers(0, 70_000))
    def get_range(self, who: int, number: int, offset: int, length: int) -> None:
        key = self.key(number)
        known = self.model.get(key)
        if known is not None and offset > len(known):
            with pytest.raises(moonpool.OutOfRange):
                self.clients[who].get(key, offset=offset, length=length)
            return
        value = self.clients[who].get(key, offset=offset, length=length)
        expected = None if known is None else known[offset : offset + length]
        assert (value is None) == (expected is None)
        assert value is None or value == expected

    @rule(who=st.integers(0, 1), number=KEYS)
    def remove(self, who: int, number: int) -> None:
        code = self.clients[who].remove(self.key(number))
        known = self.model.pop(self.key(number), None)
        assert code is (RemoveCode.ABSENT if known is None else RemoveCode.REMOVED)

    @precondition(lambda self: len(self.model) > 5)
    @rule(who=st.integers(0, 1))
    def remove_everything(self, who: int) -> None:
        assert self.clients[who].remove_prefix(f"{self.run}/") == len(self.model)
        self.model.clear()

    @invariant()
    def names_agree(self) -> None:
        keys = [self.key(number) for number in range(8)]
        for client in self.clients:
            assert client.exists_many(keys) == [key in self.model for key in keys]
            assert [client.exists(key) for key in keys[:2]] == [key in self.model for key in keys[:2]]

    def teardown(self) -> None:
        listed = {one.key.decode(): one.size for one in self.clients[0].list(f"{self.run}/")}
        assert listed == {key: len(data) for key, data in self.model.items()}
        self.clients[0].remove_prefix(f"{self.run}/")

    def agrees(self, value: moonpool.Value | None, key: str) -> None:
        known = self.model.get(key)
        assert (value is None) == (known is None)
        assert value is None or value == known


@pytest.fixture(params=["local", "tcp"])
def clients(request: pytest.FixtureRequest) -> Iterator[tuple[moonpool.Pool, ...]]:
    """Both on the pool's own engine memory, or both by tcp."""
    with moonpool.connect(embedded_bytes=64 << 20) as owner:
        address = owner.config.addresses[0]
        way = ("shm",) if request.param == "local" else ("tcp",)
        with moonpool.connect(address, transports=way, location_cache_keys=1_000) as other:
            yield (owner, other)


def test_any_order_of_calls(clients: tuple[moonpool.Pool, ...]) -> None:
    machine = type("OfThisPool", (PoolMachine,), {"clients": clients})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=15, stateful_step_count=25, deadline=None)
    )
