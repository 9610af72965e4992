"""The native core by itself: what it answers, what it leaves to Python, and that leaving changes nothing."""

from __future__ import annotations

import random
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest

from moonpool.errors import InternalError, UsageError
from moonpool.native.io.grants import make_grant
from moonpool.native.table.directory_slots import DirectorySlots
from moonpool.native.table.directory_slots_reference import ReferenceSlots
from moonpool.native.table.extents import Extents
from moonpool.native.table.hot import HotCore
from moonpool.native.table.hot_state import HotCounters
from moonpool.native.table.objects import ObjectTable
from moonpool.native.table.open_puts import OpenPuts
from moonpool.native.table.stored import Place, StoredObject

EXISTS, LOOKUP, PUT_START, PUT_END = range(4)
EPOCH, VERSION, NOW, CLIENT, TENANT = 3, 17, 50_000, 5, 0
SEGMENT, NODE, HANDLE = 4, 2, 0x1_0000_0007
CAPACITY = 1 << 20
GRANT_KEY = bytes(range(16))


def pack(value: Any) -> bytes:
    data: bytes = msgpack.packb(value, use_bin_type=True)
    return data


class Core:
    """A native core with one segment of a mebibyte, and its tables."""

    def __init__(
        self, *, slots: int = 300, puts_max: int = 50, objects_max: int = 1_000, **limits: int
    ) -> None:
        self.objects = ObjectTable(objects_max=objects_max, seed=1)
        self.puts = OpenPuts(puts_max=puts_max, entries_max=500)
        self.counters = HotCounters(EPOCH, 100, bytes(range(16)))
        given = {
            "batch_keys_max": 100,
            "lease_ms_max": 5_000,
            "put_ms": 1_000,
            "put_bytes_per_ms": 1_000,
            "facts_waiting_max": 1_000,
            **limits,
        }
        self.hot = HotCore(self.objects, self.puts, self.counters, **given)
        self.extents, self.slots = Extents(CAPACITY), DirectorySlots(slots)
        self.extents.add_range(0, CAPACITY)
        self.slots.add_range(0, slots)
        self.objects.add_segment(SEGMENT, CAPACITY)
        self.turn()
        self.segment(rank=0)
        self.hot.set_floor(SEGMENT, resolved=True, floor=0, slot_floor=0)
        self.hot.set_join(SEGMENT, GRANT_KEY, 2_000, NOW - 10)
        self.hot.set_schedule([SEGMENT], CAPACITY)

    def turn(self, *, may_change: bool = True, may_end: bool = True, durable: int = 100) -> None:
        self.hot.set_turn(NOW, durable, VERSION, may_change=may_change, may_end=may_end)

    def segment(self, *, rank: int | None) -> None:
        self.hot.set_segment(SEGMENT, self.extents, self.slots, data_handle=HANDLE, rank=rank, node_id=NODE)

    def raw(self, method: int, params: bytes, *, client: int = CLIENT, now: int = NOW) -> Any:
        data = self.hot.call(method, client, TENANT, now, params)
        return None if data is None else msgpack.unpackb(data, raw=False)

    def call(self, method: int, params: Any, **who: int) -> Any:
        return self.raw(method, pack(params), **who)

    def start(self, keys: list[bytes], size: int = 100, **who: int) -> Any:
        return self.call(PUT_START, [keys, [size] * len(keys), None, 0], **who)

    def put(self, *keys: bytes, size: int = 100) -> Any:
        put_id = self.start(list(keys), size)[2]
        return self.call(PUT_END, [put_id, [[at, bytes(16), b""] for at in range(len(keys))]])

    def fingerprint(self) -> tuple[Any, ...]:
        """All that a request which goes to Python must leave alone."""
        numbers = self.counters
        self.objects.check()
        self.puts.check()
        self.extents.check()
        return (
            self.objects.dump(),
            [self.objects.lease_until(index) for index in self.objects.scan(-1, 1_000)],
            len(self.puts),
            self.extents.free_bytes(),
            self.slots.free_count(),
            (numbers.last_fact, numbers.last_object, numbers.last_put, numbers.place_cursor),
            self.hot.has_changes,
        )


def test_a_put_and_its_reads() -> None:
    core = Core()
    epoch, version, put_id, remaining, rows = core.start([b"a", b"b"], 5_000)
    assert (epoch, version, remaining) == (EPOCH, VERSION, 1_000 + 10)
    assert put_id == HotCounters(EPOCH, 0, bytes(range(16))).next_put_id()
    deadline = 2_000 + 10 + remaining
    for number, (code, places) in enumerate(rows):
        grant = make_grant(GRANT_KEY, HANDLE, number * 8_192, 8_192, deadline, put_id & 0xFFFF)
        assert (code, places) == (0, [[SEGMENT, number * 8_192, number, grant]])
    assert core.call(EXISTS, [[b"a", b"b"], 0]) == b"\0\0"
    first = EPOCH << 40 | 1
    ended = core.call(PUT_END, [put_id, [[1, b"B" * 16, b""], [0, b"A" * 16, b"chunk-ok"]]])
    assert ended == [EPOCH, [[0, first], [0, first + 1]]]
    assert core.call(EXISTS, [[b"a", b"c", "b"], 0]) == b"\1\0\1"
    found = core.call(LOOKUP, [[b"b", b"c"], 200])
    assert found == [EPOCH, VERSION, [[first, 5_000, b"B" * 16, 0, [[SEGMENT, 8_192, 1]]], None]]
    assert core.objects.lease_until(0) == NOW + 200
    facts, number, effects, freed = core.hot.take()
    assert (number, freed) == (101, False)
    assert [msgpack.unpackb(fact)[2:5] for fact in facts] == [[first, 0, b"b"], [first + 1, 0, b"a"]]
    assert [effect[:2] for effect in effects] == [(NODE, 101), (NODE, 102)]
    assert msgpack.unpackb(effects[1][2]) == [
        *[1, SEGMENT, 0, 0, 5_000, TENANT, first + 1, b"a", b"A" * 16, 0, b"chunk-ok", put_id & 0xFFFF]
    ]
    assert core.hot.take() == ([], 0, [], False)
    assert len(core.puts) == 0


def test_nothing_is_answered_before_the_first_turn() -> None:
    hot = HotCore(
        ObjectTable(),
        OpenPuts(),
        HotCounters(1, 0, bytes(16)),
        batch_keys_max=10,
        lease_ms_max=1,
        put_ms=1,
        put_bytes_per_ms=1,
        facts_waiting_max=1,
    )
    assert hot.call(EXISTS, CLIENT, TENANT, NOW, pack([[b"a"], 0])) is None
    hot.set_turn(NOW, 0, 1, may_change=True, may_end=True)
    assert hot.call(EXISTS, CLIENT, TENANT, NOW, pack([[b"a"], 0])) == b"\xc4\x01\x00"
    with pytest.raises(UsageError, match="no such hot method"):
        hot.call(4, CLIENT, TENANT, NOW, b"")


def test_leases_are_cut_and_never_shortened() -> None:
    core = Core()
    core.put(b"a")
    core.call(EXISTS, [[b"a"], 60_000])
    assert core.objects.lease_until(0) == NOW + 5_000
    core.call(LOOKUP, [[b"a"], 10])
    assert core.objects.lease_until(0) == NOW + 5_000


def test_a_later_put_of_a_key_gives_its_extent_back() -> None:
    core = Core()
    free = core.extents.free_bytes()
    late = core.start([b"a", b"b", b"b"])[2]
    object_id = core.put(b"a")[1][0][1]
    assert core.start([b"a"]) == [EPOCH, VERSION, 0, 1_000, [[1, []]]]
    core.hot.take()
    ended = core.call(PUT_END, [late, [[at, bytes(16), b""] for at in range(3)]])[1]
    assert [code for code, _ in ended] == [1, 0, 1]
    assert (ended[0][1], ended[2][1]) == (object_id, ended[1][1])
    assert core.hot.take()[3]
    assert core.extents.free_bytes() == free - 2 * 128
    assert len(core.puts) == 0
    core.fingerprint()


def test_unresolved_space_is_not_freed_here() -> None:
    core = Core()
    core.hot.set_floor(SEGMENT, resolved=False, floor=128, slot_floor=1)
    late = core.start([b"a", b"b"])[2]
    core.put(b"a", b"b")
    free, slots = core.extents.free_bytes(), core.slots.free_count()
    core.call(PUT_END, [late, [[0, bytes(16), b""], [1, bytes(16), b""]]])
    assert core.extents.free_bytes() == free + 128
    assert core.slots.free_count() == slots + 1


@pytest.mark.parametrize(
    ("method", "params"),
    [
        (EXISTS, []),
        (EXISTS, [[b"a"]]),
        (EXISTS, [[b"a"], 0, 0]),
        (EXISTS, [[b"a"], -1]),
        (EXISTS, [[b"a"], 1 << 63]),
        (EXISTS, [[b"a"], 1.0]),
        (EXISTS, [b"a", 0]),
        (EXISTS, [[b""], 0]),
        (EXISTS, [[b"k" * 1_025], 0]),
        (EXISTS, [["é"], 0]),
        (EXISTS, [[7], 0]),
        (EXISTS, [[b"a"] * 101, 0]),
        (LOOKUP, {"keys": []}),
        (LOOKUP, [[b"a"], None]),
        (PUT_START, [[], [], None, 0]),
        (PUT_START, [[b"x"], [1, 2], None, 0]),
        (PUT_START, [[b"x"], [-1], None, 0]),
        (PUT_START, [[b"x"], [(1 << 40) + 1], None, 0]),
        (PUT_START, [[b"x"], [1], {"replicas": 2}, 0]),
        (PUT_START, [[b"x"], [1], None, -1]),
        (PUT_START, [[b"x"], [1], None]),
        (PUT_START, [[b"x", b"y"], [100, CAPACITY], None, 0]),
        (PUT_END, [1, [[0, bytes(16), b""]]]),
        (PUT_END, [None, []]),
    ],
    ids=repr,
)
def test_what_is_not_plain_goes_to_python(method: int, params: Any) -> None:
    core = Core()
    core.put(b"a")
    before = core.fingerprint()
    assert core.call(method, params) is None
    assert core.fingerprint() == before


@pytest.mark.parametrize(
    "rows",
    [
        [[0, bytes(16), b""], [2, bytes(16), b""]],
        [[0, bytes(16), b""], [0, bytes(16), b""]],
        [[0, bytes(15), b""]],
        [[0, bytes(16), b"1234567"]],
        [[0, bytes(16), b"", 1]],
        [[0, bytes(16), b"", 0, 0]],
        [[0, bytes(16)]],
        [[0, "x" * 16, b""]],
        [[-1, bytes(16), b""]],
        [[1 << 32, bytes(16), b""]],
        [7],
    ],
    ids=repr,
)
def test_ends_that_are_not_plain_go_to_python(rows: Any) -> None:
    core = Core()
    put_id = core.start([b"a", b"b"])[2]
    before = core.fingerprint()
    assert core.call(PUT_END, [put_id, rows]) is None
    assert core.fingerprint() == before
    assert core.call(PUT_END, [put_id, [[0, bytes(16), b"", 0]]], client=CLIENT + 1) is None
    assert core.call(PUT_END, [put_id, [[0, bytes(16), b"", 0]]], now=NOW + 1_001) is None


def test_bounds_go_to_python() -> None:
    core = Core(puts_max=2, objects_max=3, facts_waiting_max=4)
    put_id = core.start([b"a", b"b", b"c", b"d"])[2]
    rows = [[at, bytes(16), b""] for at in range(4)]
    assert core.call(PUT_END, [put_id, rows]) is None  # a fourth object does not fit
    assert core.call(PUT_END, [put_id, rows[:3]])[1][2][0] == 0
    core.start([b"e"])
    assert core.start([b"f"]) is None  # a third open put does not fit
    assert core.start([b"a"]) is None
    core.turn(durable=103, may_end=False)
    assert core.call(PUT_END, [put_id, rows[3:]]) is None
    core.turn(durable=103, may_change=False)
    assert core.start([b"a"]) is None
    assert core.call(EXISTS, [[b"a"], 0]) == b"\1"


def test_segments_and_schedules_change() -> None:
    core = Core()
    core.put(b"a")
    core.segment(rank=None)
    assert core.call(EXISTS, [[b"a"], 9]) == b"\0"
    assert core.call(LOOKUP, [[b"a"], 9])[2] == [None]
    assert core.objects.lease_until(0) == 0
    put_id = core.start([b"a"])[2]
    assert put_id > 0
    assert core.call(PUT_END, [put_id, [[0, bytes(16), b""]]]) is None  # it would replace the unseen object
    core.hot.set_join(SEGMENT, None, 0, 0)
    places = core.start([b"b"])[4][0][1]
    assert places[0][3][10:14] == bytes(4)
    core.hot.set_quotas([TENANT])
    assert core.start([b"c"]) is None
    core.hot.set_quotas([])
    core.hot.set_schedule([], 0)
    assert core.start([b"c"]) is None
    core.hot.drop_segment(SEGMENT)
    assert core.call(EXISTS, [[b"a"], 0]) == b"\0"
    assert core.call(PUT_END, [put_id, [[0, bytes(16), b""]]]) is None
    for wrong in (
        lambda: core.hot.drop_segment(SEGMENT),
        lambda: core.hot.set_schedule([SEGMENT], 1),
        lambda: core.hot.set_join(SEGMENT, GRANT_KEY, 0, 0),
        lambda: core.hot.set_segment(9, core.extents, core.slots, data_handle=0, rank=0, node_id=1),
    ):
        with pytest.raises(InternalError):
            wrong()
    with pytest.raises(UsageError, match="native"):
        core.hot.set_segment(SEGMENT, core.extents, ReferenceSlots(1), data_handle=0, rank=0, node_id=1)  # type: ignore[arg-type]


def test_replies_have_the_size_of_a_frame_at_most() -> None:
    """An object with 255 places and many keys: the reply's room is asked for before anything changes."""
    core = Core(batch_keys_max=1 << 14)
    segments = range(100, 355)
    for segment in segments:
        core.objects.add_segment(segment, 1 << 20)
        extents, slots = Extents(1 << 20), DirectorySlots(1)
        core.hot.set_segment(segment, extents, slots, data_handle=1, rank=1, node_id=1)
    places = tuple(Place(segment, 1 << 40, 1 << 30) for segment in segments)
    core.objects.add(StoredObject(1, TENANT, b"wide", 1, bytes(16), 0, 0, 0, 0, places))
    before = core.fingerprint()
    assert core.call(LOOKUP, [[b"wide"] * (1 << 14), 100]) is None
    assert core.fingerprint() == before
    assert len(core.call(LOOKUP, [[b"wide"], 100])[2][0][4]) == 255


@pytest.mark.parametrize("method", [EXISTS, LOOKUP, PUT_START, PUT_END])
def test_garbage_changes_nothing(method: int) -> None:
    """Bent and cut requests: answered or left to Python, never more than their bytes are read."""
    seed = 7
    source = random.Random(seed)
    core = Core()
    core.put(b"a", b"b")
    put_id = core.start([b"c", b"d"])[2]
    whole = {
        EXISTS: [[b"a", "b", b"x" * 300], 200],
        LOOKUP: [[b"a", "b", b"x" * 300], 200],
        PUT_START: [[b"a", "e"], [70_000, 3], None, 5],
        PUT_END: [put_id, [[0, bytes(16), b""], [1, bytes(16), b"12345678"]]],
    }[method]
    data = pack(whole)
    outcomes = set()
    for _ in range(3_000):
        bent = bytearray(data)
        for _ in range(source.randrange(3)):
            bent[source.randrange(len(bent))] = source.randrange(256)
        before = core.fingerprint()
        answered = core.raw(method, bytes(bent[: source.randrange(len(bent) + 1)])) is not None
        outcomes.add(answered)
        if not answered:
            assert core.fingerprint() == before, "what is not answered has changed nothing"
        core.hot.take()
    core.fingerprint()
    print(f"seed {seed}")
    assert outcomes == {True, False}, "requests of both kinds were met"


def test_numbers_are_those_of_the_ciphers_papers() -> None:
    """Speck64/128's published test vector, through a put id."""
    key = bytes(
        [0x00, 0x01, 0x02, 0x03, 0x08, 0x09, 0x0A, 0x0B, 0x10, 0x11, 0x12, 0x13, 0x18, 0x19, 0x1A, 0x1B]
    )
    numbers = HotCounters(1, 0, key)
    numbers.last_put = (0x3B726574 << 32 | 0x7475432D) - 1
    assert numbers.next_put_id() == 0x8C6FA548 << 32 | 0x454E028B
    assert [numbers.next_object_id() for _ in range(2)] == [1 << 40 | 1, 1 << 40 | 2]
    numbers.raise_epoch(4)
    assert numbers.next_object_id() == 4 << 40 | 1
    for epoch in (4, 1 << 23):
        with pytest.raises(InternalError):
            numbers.raise_epoch(epoch)
    with pytest.raises(UsageError):
        HotCounters(1, 0, b"short")
