"""The leader's small parts: numbers, effect queues, holds, placement, windows of a segment."""

from __future__ import annotations

from collections import Counter

import msgpack  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.errors import InternalError, UsageError
from moonpool.store.counters import Counters, put_id_keys, put_id_of
from moonpool.store.effects import EffectQueue, encode_effect, encode_push
from moonpool.store.holds import Holds, Needs
from moonpool.store.master_config import MasterConfig
from moonpool.store.outputs import Reply
from moonpool.store.params import group_hash
from moonpool.store.placement import SCHEDULE_MAX, allocate_copies, allocate_one, preferred_first, weigh
from moonpool.store.quarantine import Quarantined, Releases
from moonpool.store.records import NodeState, SegmentRecord, object_id_of
from moonpool.store.segment_space import SegmentSpace
from moonpool.store.table_factory import TableConfig, twin_tables

MIB = 1 << 20

# Numbers


def test_put_ids_are_speck_64_128() -> None:
    """The test vector of the paper, appendix C."""
    key = b"".join(word.to_bytes(4, "little") for word in (0x03020100, 0x0B0A0908, 0x13121110, 0x1B1A1918))
    assert put_id_of(0x3B726574_7475432D, put_id_keys(key)) == 0x8C6FA548_454E028B


def test_put_ids_do_not_repeat_and_are_never_0() -> None:
    counters = Counters(1, 0, bytes(16))
    ids = [counters.next_put_id() for _ in range(5_000)]
    assert len(set(ids)) == len(ids)
    assert 0 not in ids


def test_object_ids_grow_over_epochs() -> None:
    counters = Counters(2, 0, bytes(16))
    first = counters.next_object_id()
    counters.raise_epoch(5)
    second = counters.next_object_id()
    assert (first, second) == (object_id_of(2, 1), object_id_of(5, 1))
    with pytest.raises(InternalError):
        counters.raise_epoch(5)
    counters.last_object = (1 << 40) - 1
    with pytest.raises(InternalError):
        counters.next_object_id()


def test_groups_are_of_their_tenant() -> None:
    assert group_hash(0, "") == 0
    assert group_hash(0, "g") != group_hash(1, "g")


# Effects


def queue_of(*sequences: int) -> EffectQueue:
    queue = EffectQueue()
    for sequence in sequences:
        queue.add(sequence, b"%d" % sequence)
    queue.open = True
    return queue


def test_effects_leave_in_order_when_durable_and_in_bounds() -> None:
    queue = queue_of(1, 1, 5, 6)
    assert queue.take(1, 0, 10, 100) == (1, [b"1", b"1"])
    assert queue.take(4, 0, 10, 100) == (3, [])
    assert queue.take(9, 0, 1, 100) == (3, [b"5"])
    assert queue.take(9, 0, 10, 100) == (4, [b"6"])
    assert queue_of(1, 1, 1).take(9, 0, 10, 2) == (1, [b"1", b"1"])
    assert queue_of(1).take(9, 0, 10, 0) == (1, [b"1"]), "one always fits"


def test_nothing_leaves_a_closed_queue() -> None:
    queue = queue_of(0)
    queue.open = False
    assert queue.take(9, 0, 10, 100)[1] == []


def test_acknowledgements_are_cumulative_and_cannot_lead() -> None:
    queue = queue_of(0, 0, 0)
    queue.take(0, 0, 2, 100)
    assert not queue.ack(4, 0)
    assert queue.ack(2, 0)
    assert queue.ack(1, 0), "an older one changes nothing"
    assert (queue.acked, len(queue), queue.last) == (2, 1, 3)


def test_what_is_not_acknowledged_is_sent_again_in_order() -> None:
    queue = queue_of(0, 0, 0)
    queue.take(0, 100, 2, 100)
    assert not queue.resend_after(1_099, 1_000)
    assert queue.resend_after(1_100, 1_000)
    assert queue.ack(1, 1_100), "it had arrived"
    assert queue.take(0, 1_100, 10, 100) == (2, [b"0", b"0"])
    assert queue.ack(3, 1_200)
    assert not queue.resend_after(99_999, 1_000)


@given(st.lists(st.sampled_from(["add", "take", "ack", "resend"]), max_size=60))
def test_a_node_that_counts_sees_every_effect_once_and_in_order(steps: list[str]) -> None:
    queue, applied, added, now = queue_of(), [], 0, 0
    for step in [*steps, "resend", "take", "ack"]:
        now += 1_000
        if step == "add":
            added += 1
            assert queue.add(0, b"%d" % added) == added
        elif step == "take":
            first, effects = queue.take(0, now, 3, 100)
            applied += [each for at, each in enumerate(effects, first) if at == len(applied) + 1]
        elif step == "ack":
            assert queue.ack(len(applied), now)
        else:
            queue.resend_after(now, 1_000)
    assert applied == [b"%d" % at for at in range(1, len(applied) + 1)]


def test_a_push_is_epoch_number_and_effects() -> None:
    data = encode_push(7, 3, [encode_effect((2, 1, 0, 5, 1)), encode_effect((5, 1))])
    assert msgpack.unpackb(data) == [7, 3, [[2, 1, 0, 5, 1], [5, 1]]]


# Holds


def reply(number: int) -> Reply:
    return Reply(1, number, None, number)


def numbers(replies: list[Reply]) -> list[int]:
    return [each.message_id for each in replies]


def test_a_reply_waits_for_its_fact() -> None:
    holds = Holds()
    for number, sequence in ((1, 5), (2, 5), (3, 6)):
        holds.add(reply(number), Needs(sequence), 99)
    assert numbers(holds.due(4, {}, 0)) == []
    assert numbers(holds.due(5, {}, 0)) == [1, 2]
    assert numbers(holds.due(6, {}, 0)) == [3]
    assert len(holds) == 0


def test_a_reply_waits_for_every_acknowledgement_or_its_time() -> None:
    holds = Holds()
    holds.add(reply(1), Needs(1, {10: 2, 11: 7}, 500), 99)
    holds.add(reply(2), Needs(1, {10: 9}, 400), 99)
    assert numbers(holds.due(1, {10: 2}, 0)) == []
    assert numbers(holds.due(1, {10: 3, 11: 6}, 300)) == []
    assert numbers(holds.due(1, {10: 3, 11: 7}, 300)) == [1]
    assert numbers(holds.due(1, {10: 3}, 399)) == []
    assert numbers(holds.due(1, {10: 3}, 400)) == [2]


def test_a_join_that_is_over_leaves_only_the_time() -> None:
    holds = Holds()
    holds.add(reply(1), Needs(1, {10: 2}, 500), 99)
    holds.due(1, {}, 0)
    holds.drop_join(10)
    assert numbers(holds.due(1, {12: 99}, 499)) == []
    assert numbers(holds.due(1, {}, 500)) == [1]


def test_nothing_is_said_before_its_time() -> None:
    holds = Holds()
    holds.add(reply(1), Needs(1, not_before_ms=50), 99)
    assert numbers(holds.due(9, {}, 49)) == []
    assert numbers(holds.due(9, {}, 50)) == [1]


def test_a_reply_that_waited_too_long_is_given_up_once() -> None:
    holds = Holds()
    holds.add(reply(1), Needs(5), 100, ((0, b"k"),))
    holds.add(reply(2), Needs(6), 110)
    assert numbers(holds.given_up(99)) == []
    assert numbers(holds.given_up(100)) == [1]
    assert holds.ending, "what a later removal must wait for is still known"
    assert numbers(holds.due(9, {}, 100)) == [2]
    assert numbers(holds.given_up(500)) == []
    assert not holds.ending
    assert len(holds) == 0


def test_a_durable_reply_is_not_given_up() -> None:
    holds = Holds()
    holds.add(reply(1), Needs(1, {10: 1}, 500), 100)
    holds.due(1, {}, 0)
    assert numbers(holds.given_up(300)) == []
    assert numbers(holds.take_all()) == [1]


def test_a_key_is_ending_as_long_as_its_last_needs_wait() -> None:
    holds = Holds()
    first, second = Needs(1), Needs(2)
    holds.add(None, first, 99, ((0, b"k"),))
    holds.add(reply(2), second, 99, ((0, b"k"),))
    assert holds.ending[0, b"k"] is second
    assert holds.due(1, {}, 0) == []
    assert holds.ending[0, b"k"] is second
    assert numbers(holds.due(2, {}, 0)) == [2]
    assert not holds.ending


def test_needs_join_to_the_later_of_each() -> None:
    needs = Needs(3, {1: 5}, 10, 7)
    needs.join(Needs(2, {1: 6, 2: 1}, 20, 5))
    assert needs == Needs(3, {1: 6, 2: 1}, 20, 7)


# Placement


def test_a_schedule_gives_each_its_share_and_spreads_it() -> None:
    schedule = weigh([(1, 100), (2, 300), (3, 0)])
    count = Counter(schedule)
    assert count[2] == pytest.approx(3 * count[1], abs=2)
    assert count[3] == 1
    assert schedule == weigh([(1, 100), (2, 300), (3, 0)])
    assert all(schedule[at : at + 6] != [2] * 6 for at in range(len(schedule)))


@given(st.lists(st.integers(0, 1 << 46), max_size=SCHEDULE_MAX + 20))
def test_every_segment_is_in_its_schedule(rooms: list[int]) -> None:
    rows = list(enumerate(rooms))
    schedule = weigh(rows)
    assert set(schedule) == {segment for segment, _ in rows}
    assert len(schedule) <= 2 * SCHEDULE_MAX


def space_of(segment: int, node: int, host: str, capacity: int = MIB) -> SegmentSpace:
    record = SegmentRecord(segment, node, "s", 1, capacity, 64, 1, 1, "", 1, 2, NodeState.ACTIVE)
    tables = twin_tables(TableConfig())
    space = SegmentSpace(record, host, tables.extents(capacity), tables.slots(64))
    space.window_decided(1, capacity)
    assert space.open_windows(1)
    return space


def test_one_copy_goes_round_the_schedule() -> None:
    spaces = {each: space_of(each, each, "h") for each in (1, 2, 3)}
    got = [allocate_one(spaces, [1, 2, 3], at, 4096) for at in range(6)]
    assert [place.segment for place in got if place] == [1, 2, 3, 1, 2, 3]
    assert allocate_one(spaces, [1, 2, 3], 0, 2 * MIB) is None


def test_a_full_segment_is_passed_over() -> None:
    spaces = {1: space_of(1, 1, "h", 4096), 2: space_of(2, 2, "h")}
    got = [allocate_one(spaces, [1, 2, 1], 0, 4096) for _ in range(3)]
    assert [place.segment for place in got if place] == [1, 2, 2]


def test_copies_never_share_a_segment() -> None:
    spaces = {1: space_of(1, 1, "a"), 2: space_of(2, 1, "a"), 3: space_of(3, 2, "b"), 4: space_of(4, 3, "b")}
    for copies, hosts in ((1, 1), (2, 2), (3, 2), (4, 2), (9, 2)):
        places = allocate_copies(spaces, [1, 2, 3, 4], 0, 64, copies)
        segments = [place.segment for place in places]
        assert len(segments) == len(set(segments)) == min(copies, 4)
        assert len({spaces[each].host for each in segments}) == hosts
    assert preferred_first([1, 2, 3, 1], [3, 2]) == [3, 2, 1, 1]


# Space


def test_windows_open_when_their_facts_are_durable() -> None:
    record = SegmentRecord(1, 1, "s", 1, MIB, 64, 1, 1, "", 1, 2, NodeState.ACTIVE)
    tables = twin_tables(TableConfig())
    space = SegmentSpace(record, "h", tables.extents(MIB), tables.slots(64))
    assert space.allocate(64) is None
    space.window_decided(5, MIB // 4)
    space.window_decided(9, MIB)
    assert not space.open_windows(4)
    assert space.open_windows(5)
    assert space.slots.free_count() == 16, "slots open in proportion"
    assert space.gauges(0, 0, leaving=False).free == MIB
    assert space.open_windows(9)
    assert space.slots.free_count() == 64
    assert space.allocate(MIB) == (0, space.slots.used() - 1)
    space.check(0, MIB)


def test_nothing_below_the_floor_is_given_until_it_is_resolved() -> None:
    record = SegmentRecord(1, 1, "s", 1, MIB, 64, 1, 1, "", 1, 2, NodeState.ACTIVE, opened=MIB // 2)
    tables = twin_tables(TableConfig())
    space = SegmentSpace(record, "h", tables.extents(MIB), tables.slots(64))
    assert not space.resolved
    space.window_decided(1, MIB)
    space.open_windows(1)
    offset, slot = space.allocate(4096) or (0, 0)
    assert offset >= MIB // 2
    assert slot >= 32
    space.free(4096, 4096, 1)  # an object from before goes: it is free with the rest
    space.quarantine[3] = Quarantined(1, 3, 8192, 4096, 0)
    space.quarantined_bytes = 4096
    live = (0).to_bytes(8, "little") + (4096).to_bytes(8, "little") + (0).to_bytes(8, "little")
    space.resolve(live)
    assert space.gauges(4096, 4096, leaving=False) == (MIB - 3 * 4096, 4096, 4096, 4096, 0)
    space.check(4096, 4096)
    with pytest.raises(InternalError):
        space.resolve(b"")


def test_overlapping_places_cannot_be_resolved() -> None:
    record = SegmentRecord(1, 1, "s", 1, MIB, 64, 1, 1, "", 1, 2, NodeState.ACTIVE, opened=MIB)
    tables = twin_tables(TableConfig())
    space = SegmentSpace(record, "h", tables.extents(MIB), tables.slots(64))
    rows = b"".join(each.to_bytes(8, "little") for each in (0, 8192, 0, 4096, 4096, 1))
    with pytest.raises(InternalError):
        space.resolve(rows)


def test_a_released_extent_waits_for_its_leases() -> None:
    releases = Releases()
    first, second = Quarantined(1, 0, 0, 64, 100), Quarantined(2, 1, 64, 64, 50)
    releases.add(first)
    releases.add(second)
    assert list(releases.due(49)) == []
    assert list(releases.due(60)) == [second]
    releases.drop_segment(1)
    assert len(releases) == 0


# Config


@pytest.mark.parametrize(
    "change",
    [
        {"durability": "maybe"},
        {"events": 1},
        {"tick_ms": 0},
        {"tick_ms": True},
        {"tick_ms": "20"},
        {"evict_high": 1.5},
        {"evict_low": 0.99, "evict_high": 0.5},
        {"suspect_ms": 100},
        {"dead_ms": 500},
        {"window_bytes": 100_000},
        {"replicas_max": 17},
    ],
)
def test_a_wrong_config_names_its_field(change: dict[str, object]) -> None:
    with pytest.raises(UsageError) as error:
        MasterConfig(**change)  # type: ignore[arg-type]
    assert error.value.field in {*change, "suspect_ms"}
