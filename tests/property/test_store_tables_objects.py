"""The native table of objects against its twin: same results, errors, victims in order, dumps."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moonpool.errors import LimitExceeded, MoonpoolError, UsageError
from moonpool.native.table.objects import ObjectTable
from moonpool.native.table.objects_reference import ReferenceObjectTable
from moonpool.native.table.stored import Place, StoredObject

SEGMENTS = (1, 2, 3)
CAPACITIES = [0, 10_000, 200_000]
KEYS = [b"k%d" % at * (1 + at % 7 * 5) for at in range(40)]

indices = st.integers(-1, 50)
segments = st.sampled_from([*SEGMENTS, *SEGMENTS, 9])
policies = st.sampled_from(["lru", "s3fifo"])


class Both:
    """A table and its twin; `do` runs one thing on both and compares what comes out."""

    def __init__(self, policy: str, objects_max: int, ghosts_max: int, seed: int) -> None:
        self.policy, self.bounds = policy, {"objects_max": objects_max, "ghosts_max": ghosts_max}
        self.native = ObjectTable(policy, seed=seed, **self.bounds)
        self.twin = ReferenceObjectTable(policy, **self.bounds)
        for segment in SEGMENTS:
            self.do(lambda table, at=segment: table.add_segment(at, CAPACITIES[at - 1]))

    def do(self, call: Callable[[Any], Any]) -> Any:
        results = []
        for table in (self.native, self.twin):
            try:
                results.append(call(table))
            except MoonpoolError as error:
                results.append((type(error), str(error)))
        assert results[0] == results[1]
        return results[0]

    def again(self, policy: str, seed: int) -> Both:
        """A new pair with what a dump of this one holds."""
        dump = self.do(lambda table: table.dump())
        other = Both(policy, self.bounds["objects_max"], self.bounds["ghosts_max"], seed)
        assert other.do(lambda table: table.load(dump)) is None
        if policy == self.policy:
            assert other.do(lambda table: table.dump()) == dump
        return other

    def check(self) -> None:
        self.native.check()
        self.twin.check()
        assert self.native.dump() == self.twin.dump()


class ObjectMachine(RuleBasedStateMachine):
    """Every method, in any order, with arguments that are often wrong."""

    @initialize(
        policy=policies,
        objects_max=st.sampled_from([20, 1_000]),
        ghosts_max=st.sampled_from([1, 3, 1_000]),
        seed=st.integers(0, 2**64 - 1),
    )
    def begin(self, policy: str, objects_max: int, ghosts_max: int, seed: int) -> None:
        self.both = Both(policy, objects_max, ghosts_max, seed)
        self.next_id = 1
        self.now = 100

    @rule(
        key=st.sampled_from(KEYS),
        tenant=st.integers(0, 1),
        size=st.sampled_from([0, 1, 64, 100, 4_096, 5_000, 30_000, 1 << 40, (1 << 40) + 1]),
        pin=st.sampled_from([0, 0, 0, 0, 1, 1, 2, 3]),
        soft=st.sampled_from([0, 0, 5, 20]),
        group=st.sampled_from([0, 0, 0, 1, 2, 2**64 - 1]),
        on=st.lists(segments, max_size=3),
    )
    def add(self, key: bytes, tenant: int, size: int, pin: int, soft: int, group: int, on: list[int]) -> None:
        places = tuple(Place(each, self.next_id * 64, self.next_id) for each in on)
        digest = self.next_id.to_bytes(16, "little")
        end = self.now + soft if soft else 0
        stored = StoredObject(
            self.next_id, tenant, key, size, digest, self.next_id % 9, pin, end, group, places
        )
        self.next_id += 1
        self.both.do(lambda table: table.add(stored))

    @rule(index=indices)
    def drop(self, index: int) -> None:
        self.both.do(lambda table: table.drop(index))

    @rule(index=indices, segment=segments)
    def add_place(self, index: int, segment: int) -> None:
        place = Place(segment, self.next_id * 64, self.next_id)
        self.both.do(lambda table: table.add_place(index, place))

    @rule(index=indices, segment=segments)
    def drop_place(self, index: int, segment: int) -> None:
        self.both.do(lambda table: table.drop_place(index, segment))

    @rule(index=indices, pin=st.integers(0, 3), end=st.integers(-1, 30))
    def set_pin(self, index: int, pin: int, end: int) -> None:
        end = self.now + end if end > 0 else end
        self.both.do(lambda table: table.set_pin(index, pin, end))

    @rule(index=indices, until=st.integers(-1, 20))
    def lease(self, index: int, until: int) -> None:
        until = self.now + until if until >= 0 else until
        self.both.do(lambda table: table.extend_lease(index, until))
        self.both.do(lambda table: table.lease_until(index))

    @rule(some=st.lists(indices, max_size=10))
    def touch(self, some: list[int]) -> None:
        for index in some:
            self.both.do(lambda table, at=index: table.touch(at))

    @rule(
        segment=segments,
        wanted=st.sampled_from([0, 1, 10_000, 100_000, 1 << 50]),
        count_max=st.sampled_from([0, 1, 3, 40]),
        soft=st.booleans(),
        evict=st.booleans(),
        passed=st.integers(0, 10),
    )
    def victims(
        self, segment: int, wanted: int, count_max: int, soft: bool, evict: bool, passed: int
    ) -> None:
        self.now += passed
        found = self.both.do(
            lambda table: table.victims(segment, wanted, self.now, count_max=count_max, soft=soft)
        )
        if not evict or not isinstance(found, list):
            return
        for index in found:
            stored = self.both.twin.at(index)
            if len(stored.places) > 1 and segment in [place.segment for place in stored.places]:
                self.both.do(lambda table, at=index: table.drop_place(at, segment))
            else:
                self.both.do(lambda table, at=index: table.drop(at))

    @rule(segment=segments, capacity=st.sampled_from(CAPACITIES))
    def segment_goes_and_comes(self, segment: int, capacity: int) -> None:
        self.both.do(lambda table: table.drop_segment(segment))
        self.both.do(lambda table: table.add_segment(segment, capacity))
        if segment == 9:
            self.both.do(lambda table: table.drop_places(segment))
            self.both.do(lambda table: table.drop_segment(segment))

    @rule(segment=segments)
    def drop_places(self, segment: int) -> None:
        self.both.do(lambda table: table.drop_places(segment))

    @rule(
        tenant=st.integers(0, 2),
        prefix=st.sampled_from([b"", b"k", b"k1", b"k33k33", b"x"]),
        after=indices,
        count_max=st.integers(1, 5),
        looks_max=st.integers(1, 30),
    )
    def find_prefix(self, tenant: int, prefix: bytes, after: int, count_max: int, looks_max: int) -> None:
        self.both.do(lambda table: table.find_prefix(tenant, prefix, after, count_max, looks_max))

    @rule(policy=policies, seed=st.integers(0, 9))
    def dump_and_load(self, policy: str, seed: int) -> None:
        self.both = self.both.again(policy, seed)

    @rule(segment=segments, after=indices, key=st.sampled_from(KEYS), tenant=st.integers(0, 1))
    def look(self, segment: int, after: int, key: bytes, tenant: int) -> None:
        do = self.both.do
        do(lambda table: table.bytes_on(segment))
        do(lambda table: table.packed_places(segment))
        do(lambda table: table.places_on(segment, after, 5))
        do(lambda table: table.scan(after, 7))
        do(lambda table: table.find(tenant, key))
        do(lambda table: table.object_id(after))
        do(lambda table: table.bytes_of(tenant))

    @invariant()
    def same(self) -> None:
        if hasattr(self, "both"):
            self.both.do(len)
            self.both.check()


ObjectMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
TestObjects = ObjectMachine.TestCase


def filled(policy: str, source: random.Random) -> Both:
    both = Both(policy, 1_000, 50, 3)
    for at in range(source.randrange(1, 12)):
        on = source.sample(SEGMENTS, source.randrange(3))
        stored = StoredObject(
            at + 1,
            source.randrange(2),
            b"%d" % at * source.randrange(1, 9),
            source.randrange(9_000),
            source.randbytes(16),
            0,
            source.randrange(3),
            source.choice([0, 7]),
            source.choice([0, 5]),
            tuple(Place(segment, at * 8_192, at) for segment in on),
        )
        both.do(lambda table, stored=stored: table.add(stored))
    return both


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_bent_dumps_are_refused_alike(policy: str) -> None:
    """Any bytes with a right checksum: the same verdict from both, and never a broken table."""
    seed = 5
    source = random.Random(seed)
    verdicts: dict[str, int] = {}
    for _ in range(400):
        bent = bytearray(filled(policy, source).native.dump()[:-4])
        for _ in range(source.randrange(1, 4)):
            at = source.randrange(len(bent) if source.random() < 0.7 else min(40, len(bent)))
            if source.random() < 0.3:
                del bent[at : at + source.randrange(1, 9)]
            else:
                bent[at] = source.choice([0, 1, 255, source.randrange(256), (bent[at] + 1) & 255])
        data = bytes(bent) + zlib.crc32(bent).to_bytes(4, "little")
        other = Both(policy, 1_000, 50, 3)
        results = []
        for table in (other.native, other.twin):
            try:
                table.load(data)
                results.append("taken")
            except UsageError:
                results.append("refused")
            except LimitExceeded:
                results.append("too many")
        assert results[0] == results[1]
        verdicts[results[0]] = verdicts.get(results[0], 0) + 1
        other.do(len)
        other.check()
    print(f"seed {seed}: {verdicts}")
    assert verdicts["refused"] > 100
    assert verdicts["taken"] > 10


@pytest.mark.parametrize("cut", ["nothing", "half", "a byte", "the checksum"])
def test_cut_dumps_are_refused(cut: str) -> None:
    whole = filled("lru", random.Random(8)).native.dump()
    data = {
        "nothing": b"",
        "half": whole[: len(whole) // 2],
        "a byte": whole[:-1],
        "the checksum": whole[:-4],
    }
    for table in (ObjectTable(), ReferenceObjectTable()):
        for segment in SEGMENTS:
            table.add_segment(segment, 1_000)
        with pytest.raises(UsageError, match="no dump of an object table"):
            table.load(data[cut])
        table.load(whole)
        with pytest.raises(UsageError, match="empty table"):
            table.load(whole)
        table.check()
