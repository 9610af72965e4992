"""A node's core: effects once and in order, what is held and when it is released, joins, reports, views."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.errors import LimitExceeded, ProtocolError, UsageError
from moonpool.store.directory import DEAD, Directory, Header, directory_bytes, entry_offset
from moonpool.store.directory_report import RecordState, ReportRecord, read_records
from moonpool.store.errors import StaleEpoch
from moonpool.store.node_core import CoreLimits, NodeCore, Phase
from moonpool.store.node_effects import ANY_SLOT
from moonpool.store.node_segment import CoreSegment

SLOTS = 16
CAPACITY = 1 << 20
LOG_BYTES = 4096
KEY = b"k" * 16
SETTINGS = {"beat_ms": 200, "put_ms": 1_000, "put_bytes_per_ms": 1_000}
CLIENT = b"c" * 16
OTHERS = bytes(16)


class Watch:
    """A `Fencing` that is told who writes: `writers` are (segment, offset, instance or b"" for a lane)."""

    def __init__(self) -> None:
        self.writers: set[tuple[int, int, bytes]] = set()
        self.denied: list[tuple[int, int, int, int]] = []
        self.tickets: dict[int, tuple[set[tuple[int, int, bytes]], int]] = {}
        self.given = 0

    def deny(self, segment: int, start: int, tag: int, until_ms: int) -> None:
        self.denied.append((segment, start, tag, until_ms))

    def begin(self, segment: int, offset: int, length: int, instance: bytes, until_ms: int) -> int:
        found = {
            writer
            for writer in self.writers
            if writer[0] == segment
            and offset <= writer[1] < offset + max(1, length)
            and (writer[2] in (b"", instance) or instance == OTHERS)
        }
        if not found:
            return 0
        self.given += 1
        self.tickets[self.given] = (found, until_ms)
        return self.given

    def over(self, ticket: int, now_ms: int) -> bool:
        found, _ = self.tickets[ticket]
        if found & self.writers:
            return False
        del self.tickets[ticket]
        return True

    def drop(self, ticket: int) -> None:
        del self.tickets[ticket]


class World:
    """One node with one segment, joined; ids are those of the master's."""

    def __init__(self, segments: int = 1, **limits: Any) -> None:
        self.watch = Watch()
        self.segments = [self.segment(f"s{n}") for n in range(segments)]
        identity = {
            "name": "node",
            "host": "h",
            "instance": b"i" * 16,
            "engine_endpoint": "127.0.0.1:1",
            "view_endpoint": "v",
        }
        self.core = NodeCore(identity, self.segments, self.watch, CoreLimits(**limits))
        self.now = 5_000
        self.number = 1

    @staticmethod
    def segment(name: str) -> CoreSegment:
        memory = bytearray(directory_bytes(SLOTS, LOG_BYTES))
        header = Header(0, SLOTS, 1, CAPACITY, 0, entry_offset(SLOTS, SLOTS), LOG_BYTES, b"i" * 16)
        return CoreSegment(about={"name": name}, directory=Directory(memory, header))

    def join(self, epoch: int = 3, ids: tuple[int, ...] = (70,)) -> list[ReportRecord]:
        self.core.join_params(self.now)
        self.core.joined([epoch, 9, list(ids), KEY, SETTINGS])
        self.number = 1
        records: list[ReportRecord] = []
        while (page := self.core.next_page()) is not None:
            records += read_records(page[3], SLOTS, CAPACITY)
            self.core.page_answered([epoch])
        return records

    def tell(self, *effects: list[Any], epoch: int = 3) -> None:
        self.core.effects(epoch, self.number, list(effects), self.now)
        self.number += len(effects)

    def ack(self, epoch: int = 3) -> tuple[int, list[list[int]], list[list[int]]]:
        self.core.tick(self.now)
        params = self.core.ack_params(self.now)
        assert params is not None
        self.core.ack_answered([epoch])
        return params[0], params[2], params[3]

    @property
    def directory(self) -> Directory:
        return self.segments[0].directory


def add(slot: int, object_id: int, *, tag: int = 0, size: int = 4096, chunks: bytes = b"") -> list[Any]:
    return [1, 70, slot, slot * 8192, size, 5, object_id, b"key%d" % object_id, b"d" * 16, 1, chunks, tag]


def retire(slot: int, object_id: int, reason: int = 1) -> list[Any]:
    return [2, 70, slot, object_id, reason]


def fence(slot: int, *, put_id: int = 77, until: int = 500, instance: bytes = CLIENT) -> list[Any]:
    return [3, 70, slot, slot * 8192, 4096, instance, put_id, until]


def test_an_object_comes_and_goes() -> None:
    world = World()
    assert world.join() == []
    assert world.core.phase is Phase.ACTIVE
    world.tell(add(2, 100), retire(2, 100, 3))
    assert world.directory.word(2) == DEAD | 100
    assert world.directory.entry(2).reason == 3
    assert world.ack() == (2, [[70, 2]], [])
    assert world.ack() == (2, [], [])


def test_effects_are_applied_once_and_in_order() -> None:
    world = World()
    world.join()
    world.core.effects(3, 1, [add(0, 1), add(1, 2)], world.now)
    world.core.effects(3, 1, [add(5, 9), add(1, 2), add(2, 3)], world.now)
    assert [world.directory.word(slot) for slot in (0, 1, 2, 5)] == [1, 2, 3, 0]
    world.core.effects(3, 5, [add(3, 4)], world.now)
    assert (world.core.applied, world.directory.word(3)) == (3, 0)
    totals = world.core.totals()
    assert (totals["effects_applied"], totals["effects_repeated"], totals["effects_ahead"]) == (3, 2, 1)


def test_a_lower_epoch_commands_nothing() -> None:
    world = World()
    world.join(epoch=4)
    for attempt in (
        lambda: world.core.effects(3, 1, [add(0, 1)], world.now),
        lambda: world.core.ack_answered([3]),
        lambda: world.core.joined([3, 9, [70], KEY, SETTINGS]),
    ):
        with pytest.raises(StaleEpoch):
            attempt()
    assert world.directory.word(0) == 0
    assert world.directory.header.epoch == 4
    world.core.effects(5, 1, [add(0, 1)], world.now)
    assert (world.core.epoch, world.directory.header.epoch) == (5, 5)


def test_a_pinned_extent_is_released_by_the_last_pin() -> None:
    world = World()
    world.join()
    world.tell(add(2, 100))
    assert world.core.views.open(1, [[70, 2, 100], [70, 3, 100], [70, 2, 101], [99, 2, 100]]) == b"\1\0\0\0"
    assert world.core.views.open(2, [[70, 2, 100]]) == b"\1"
    world.tell(retire(2, 100))
    assert world.core.views.open(3, [[70, 2, 100]]) == b"\0"
    assert world.ack() == (2, [], [])
    assert world.core.views.close(1, [[70, 2, 100], [70, 2, 100]]) == 1
    assert world.ack() == (2, [], [])
    assert world.core.views.holder_gone(2) == 1
    assert world.ack() == (2, [[70, 2]], [])
    assert world.core.views.holder_gone(2) == 0


def test_pins_are_bounded() -> None:
    world = World(pins_max=3, pins_per_client_max=2)
    world.join()
    world.tell(add(0, 1), add(1, 2))
    with pytest.raises(LimitExceeded, match="pins_per_client_max"):
        world.core.views.open(1, [[70, 0, 1]] * 3)
    assert world.core.views.open(1, [[70, 0, 1]] * 2) == b"\1\1"
    with pytest.raises(LimitExceeded, match="pins_max"):
        world.core.views.open(2, [[70, 0, 1]] * 2)
    assert world.core.gauges()["pins"] == 2


@pytest.mark.parametrize("wrong", [None, {}, [[70, 2]], [[70, 2, "x"]], [[70, -1, 1]], [[70, 2, 0]], [7]])
def test_a_wrong_view_request_changes_nothing(wrong: Any) -> None:
    world = World()
    world.join()
    with pytest.raises(UsageError):
        world.core.views.open(1, wrong)
    with pytest.raises(UsageError):
        world.core.views.close(1, wrong)
    assert world.core.gauges()["pins"] == 0


def test_a_fence_waits_for_those_who_may_still_write() -> None:
    world = World()
    world.join()
    lane, process = (0, 8192, b""), (0, 8192, CLIENT)
    world.watch.writers = {lane, process, (0, 8192, b"x" * 16)}
    world.tell(fence(1))
    assert world.watch.denied == [(0, 8192, 77, 5_500)]
    assert world.ack()[1] == []
    world.watch.writers.discard(lane)
    assert world.ack()[1] == []
    world.watch.writers.discard(process)
    assert world.ack()[1] == [[70, 1]]


def test_a_fence_of_the_whole_segment_waits_for_everybody() -> None:
    world = World()
    world.join()
    world.watch.writers = {(0, 16384, CLIENT)}
    world.tell([3, 70, ANY_SLOT, 0, CAPACITY, OTHERS, 0, 0])
    assert world.ack()[1] == []
    assert world.watch.denied == []
    world.watch.writers.clear()
    assert world.ack()[1] == [[70, ANY_SLOT]]


def test_grants_that_outlive_their_object_are_denied() -> None:
    world = World()
    world.join()
    world.tell(add(1, 5, tag=0x4D, size=2_000), add(2, 6))
    world.now += 300
    world.tell(retire(1, 5), retire(2, 6))
    assert world.watch.denied == [(0, 8192, 0x4D, 5_000 + 1_000 + 2)]
    world.tell(add(3, 7, tag=9))
    world.now += 1_005
    world.tell(retire(3, 7))
    assert len(world.watch.denied) == 1


def test_a_later_effect_on_the_slot_takes_the_word_back() -> None:
    world = World()
    world.join()
    world.tell(add(1, 5), retire(1, 5))
    world.core.tick(world.now)
    params = world.core.ack_params(world.now)
    assert params is not None
    assert params[2] == [[70, 1]]
    world.tell(add(1, 6), retire(1, 6))  # before the answer comes
    world.core.ack_answered([3])
    assert world.ack() == (4, [[70, 1]], [])
    world.watch.writers = {(0, 8192, CLIENT)}
    world.tell(fence(1))
    assert len(world.watch.tickets) == 1
    world.tell(add(1, 8))
    assert world.watch.tickets == {}
    assert world.ack() == (6, [], [])


def test_an_unanswered_acknowledgement_is_not_followed_by_another() -> None:
    world = World()
    world.join()
    world.tell(add(1, 5), retire(1, 5))
    assert world.core.ack_params(world.now) == [2, 0, [[70, 1]], []]
    assert world.core.ack_params(world.now) is None
    world.core.lost()
    assert world.core.ack_params(world.now) is None
    assert world.core.wants_join(world.now)


def test_a_report_tells_what_is_there_dead_and_held() -> None:
    world = World()
    world.join()
    world.tell(add(1, 5), add(2, 6), add(3, 7), add(4, 8))
    world.core.views.open(1, [[70, 3, 7]])
    world.watch.writers = {(0, 6 * 8192, CLIENT), (0, 4 * 8192, CLIENT)}
    world.tell(retire(2, 6, 3), retire(3, 7), fence(6), retire(4, 8), fence(4, put_id=5))
    records = {record.slot: record for record in world.join(epoch=4, ids=(71,))}
    states = {slot: (record.state, record.object_id) for slot, record in records.items()}
    assert states == {
        1: (RecordState.COMPLETE, 5),
        2: (RecordState.DEAD, 6),
        3: (RecordState.HELD, 7),
        4: (RecordState.HELD, 8),
        6: (RecordState.HELD, 0),
    }
    assert (records[1].key, records[2].reason, records[1].tenant) == (b"key5", 3, 5)
    assert (records[6].offset, records[6].size) == (6 * 8192, 4096)
    world.core.views.holder_gone(1)
    world.watch.writers.clear()
    assert sorted(world.ack(4)[1]) == [[71, 3], [71, 4], [71, 6]]
    assert world.core.views.open(1, [[70, 1, 5]]) == b"\1"  # an id of the join before still says where


def test_a_long_report_has_pages() -> None:
    world = World(segments=2, report_page_bytes=150)
    world.join(ids=(70, 71))
    world.tell(*[add(slot, slot + 1) for slot in range(7)])
    world.core.join_params(world.now)
    world.core.joined([3, 9, [70, 71], KEY, SETTINGS])
    pages = []
    while (page := world.core.next_page()) is not None:
        assert world.core.phase is Phase.REPORTING
        pages.append((page[0], page[1], page[2], len(read_records(page[3], SLOTS, CAPACITY))))
        world.core.page_answered([3])
    assert pages == [(70, 0, False, 3), (70, 1, False, 3), (70, 2, True, 1), (71, 0, True, 0)]
    assert world.core.phase is Phase.ACTIVE


def test_many_fenced_extents_have_pages_too() -> None:
    world = World(report_page_bytes=200)
    world.join()
    world.watch.writers = {(0, slot * 8192, CLIENT) for slot in range(SLOTS)}
    world.tell(add(3, 9), *[fence(slot) for slot in range(SLOTS) if slot != 3])
    world.core.join_params(world.now)
    world.core.joined([3, 9, [70], KEY, SETTINGS])
    seen: list[int] = []
    pages = 0
    while (page := world.core.next_page()) is not None:
        assert len(page[3]) < 300
        seen += [record.slot for record in read_records(page[3], SLOTS, CAPACITY)]
        pages += 1
        world.core.page_answered([3])
    assert pages >= 4
    assert seen == [slot for slot in range(SLOTS) if slot != 3] + [3]


def test_reset_leads_to_a_new_join_of_a_new_generation() -> None:
    world = World()
    world.join()
    world.tell(add(1, 5), [5, 70], add(2, 6))
    assert world.core.phase is Phase.AWAY
    params = world.core.join_params(world.now)
    assert params[6][0]["generation"] == 2
    assert (world.directory.word(1), world.directory.word(2)) == (DEAD | 5, 0)


def test_bytes_are_hashed_again_on_request() -> None:
    world = World()
    world.join()
    world.tell(
        add(1, 5), add(2, 6), [4, 900, 70, 1, 5], [4, 901, 70, 1, 4], [4, 902, 70, 2, 6], [4, 903, 70, 1, 5]
    )
    jobs = []
    while (job := world.core.hashing.take()) is not None:
        jobs.append(job)
    assert [(job.task, job.offset, job.size) for job in jobs] == [
        (900, 8192, 4096),
        (902, 16384, 4096),
        (903, 8192, 4096),
    ]
    world.core.hashing.hashed(jobs[0], b"d" * 16, b"")
    world.core.hashing.hashed(jobs[1], b"e" * 16, b"")
    world.tell(retire(1, 5))
    world.core.hashing.hashed(jobs[2], b"d" * 16, b"")
    assert world.ack()[2] == [[901, 2], [900, 0], [902, 1], [903, 2]]


def test_an_object_without_chunk_digests_is_shown_when_its_bytes_are_right() -> None:
    world = World()
    world.join()
    world.tell(add(1, 5, size=100_000), add(2, 6, size=100_000), add(3, 7, size=100_000))
    assert [world.directory.word(slot) for slot in (1, 2, 3)] == [0, 0, 0]
    world.tell(retire(3, 7))
    for root in (b"d" * 16, b"wrong" + bytes(11), b"d" * 16):
        job = world.core.hashing.take()
        assert job is not None
        world.core.hashing.hashed(job, root, b"c" * 16)
    assert [world.directory.word(slot) for slot in (1, 2, 3)] == [5, 0, 0]
    assert world.directory.chunks(world.directory.entry(1)) == b"c" * 16
    assert world.core.totals()["adds_damaged"] == 1
    world.tell(retire(2, 6))
    assert world.ack()[1] == [[70, 3], [70, 2]]


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        [9, 1],
        [True, 70],
        [1, 70],
        [2, 70, 1, 5],
        [2, 70, SLOTS, 5, 1],
        [2, 71, 1, 5, 1],
        [2, 70, -1, 5, 1],
        [2, 70, ANY_SLOT, 5, 1],
        [3, 70, 1, 0, CAPACITY + 1, CLIENT, 1, 1],
        [3, 70, 1, 0, 64, b"short", 1, 1],
        [1, 70, 1, CAPACITY, 64, 5, 9, b"k", b"d" * 16, 1, b"", 0],
        [1, 70, 1, 0, 64, 5, 9, b"", b"d" * 16, 1, b"", 0],
        [1, 70, 1, 0, CAPACITY + 4096, 5, 9, b"k", b"d" * 16, 1, b"", 0],
        [1, 70, 1, 0, 64, 5, 9, "text", b"d" * 16, 1, b"", 0],
        [4, 1, 70, 1],
        [5, "70"],
    ],
)
def test_a_wrong_effect_is_an_error_and_is_not_counted(wrong: Any) -> None:
    world = World()
    world.join()
    with pytest.raises(ProtocolError):
        world.core.effects(3, 1, [add(0, 1), wrong, add(1, 2)], world.now)
    assert world.core.applied == 1
    assert (world.directory.word(0), world.directory.word(1)) == (1, 0)


@pytest.mark.parametrize(
    "reply",
    [
        None,
        [],
        [3, 9, [70], KEY],
        [3, 9, [70, 71], KEY, {}],
        [3, 9, [0], KEY, {}],
        [3, 9, [70], b"", {}],
        ["3", 9, [70], KEY, {}],
    ],
)
def test_a_wrong_answer_is_an_error(reply: Any) -> None:
    world = World()
    world.core.join_params(world.now)
    with pytest.raises(ProtocolError):
        world.core.joined(reply)
    assert world.core.phase is Phase.JOINING
    with pytest.raises(ProtocolError):
        world.core.ack_answered(reply[:0] if reply else None)
