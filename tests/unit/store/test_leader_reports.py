"""Reports that no honest node makes: nothing that a leader cannot do follows from them."""

from __future__ import annotations

import tracemalloc

import pytest
from tests.unit.store.core_world import ADD, MIB, RESET, ModelNode, World, segment_map

from moonpool.store.directory_report import RecordState, ReportRecord, pack_records
from moonpool.store.master_config import MasterConfig
from moonpool.store.sessions import CONFIRMED, TAKEN, TOLD, SlotMarks


@pytest.mark.parametrize("pages", [1, 2])
@pytest.mark.parametrize("first", list(RecordState))
@pytest.mark.parametrize("second", list(RecordState))
def test_a_report_that_tells_a_slot_twice_is_reset(
    first: RecordState, second: RecordState, pages: int
) -> None:
    w = World(epoch=5)
    node = ModelNode("n1", "h1", b"i" * 16, [segment_map("s", 4 * MIB, 64)], highest=2)
    w.join(node, report=False)
    told = [
        pack_records([ReportRecord(0, state, 0, 0, 4096 * at, 4096, 1 << 40 | at + 1, b"d" * 16, key)])
        for at, (state, key) in enumerate(((first, b"a"), (second, b"b")))
    ]
    rows = [(0, True, told[0] + told[1])] if pages == 1 else [(0, False, told[0]), (1, True, told[1])]
    for page, last, entries in rows:
        w.call(node.connection, "node_report", [node.ids[0], page, last, entries], settle=False)
    w.settle()
    client = w.client()
    for key in (b"a", b"b"):
        w.call(client, "remove", [[key], "defer", True])
    w.leader.check()
    assert node.effects[-1][0] == RESET
    assert w.leader.state.segments == {}


def test_an_object_in_a_slot_that_still_tells_of_an_older_one_is_sent_again() -> None:
    w = World(config=MasterConfig(window_bytes=MIB, rebuild_ms=0))
    node, client = w.node(), w.client()
    w.put(client, b"old")
    w.call(client, "remove", [[b"old"], "defer", False])
    w.advance(6_000)
    before = dict(node.directory)
    slot = next(iter(before))[1]
    at = 0
    while not (there := w.lookup(client, b"new %d" % at)) or there[4][0][2] != slot:
        at += 1
        w.put(client, b"new %d" % at)
        assert at < 200
    node.directory.update(before)  # the ADD of the last one never came
    w.cut(node)
    node.effects.clear()
    w.join(node)
    assert [(each[0], each[2], each[7]) for each in node.effects if each[0] == ADD] == [
        (ADD, slot, b"new %d" % at)
    ]


def test_a_report_of_few_records_takes_little_memory_whatever_was_offered() -> None:
    w = World(epoch=5)
    node = ModelNode("n1", "h1", b"i" * 16, [segment_map("s", 1 << 41, 1 << 30)], highest=2)
    w.join(node, report=False)
    last = ReportRecord((1 << 24) - 1, RecordState.HELD, 0, 0, 0, 4096, 0, bytes(16), b"")
    tracemalloc.start()
    try:
        for page, entries in enumerate((b"", pack_records([last]))):
            w.call(node.connection, "node_report", [node.ids[0], page, False, entries], settle=False)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_marks_of_slots() -> None:
    marks = SlotMarks()
    assert marks[5] == 0
    assert marks.tell(5)
    assert not marks.tell(5)
    marks[5] = CONFIRMED
    marks[1 << 29] = TAKEN
    assert not marks.tell(1 << 29)
    assert (marks[5], marks[6], marks[1 << 29]) == (CONFIRMED, 0, TAKEN)
    assert (marks.count(TOLD), marks.count(CONFIRMED), marks.count(TAKEN)) == (0, 1, 1)
