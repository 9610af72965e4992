"""Reports that no honest node makes: nothing that a leader cannot do follows from them."""

from __future__ import annotations

import pytest
from tests.unit.store.core_world import MIB, RESET, ModelNode, World, segment_map

from moonpool.store.directory_report import RecordState, ReportRecord, pack_records


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
