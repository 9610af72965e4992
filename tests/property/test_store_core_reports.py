"""Reports of any content: they are refused or taken in, and the leader stays whole."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.store.core_world import MIB, ModelNode, World

from moonpool.store.directory_report import RecordState, ReportRecord, pack_records
from moonpool.store.master_config import MasterConfig
from moonpool.store.records import object_id_of

KEYS = [b"a", b"b", b"c", b""]
CAPACITY = MIB
SLOTS = 32

records = st.builds(
    ReportRecord,
    slot=st.integers(0, SLOTS - 1),
    state=st.sampled_from(list(RecordState)),
    object_type=st.integers(0, 12),
    tenant=st.sampled_from([0, 0, 0, 1, 7]),
    offset=st.sampled_from([0, 64, 4_096, 8_192, 100, 500_032, 1_000_000, MIB - 64]),
    size=st.sampled_from([0, 1, 64, 4_096, 10_000]),
    object_id=st.builds(object_id_of, st.integers(0, 4), st.integers(1, 6)),
    digest=st.sampled_from([bytes(16), b"d" * 16]),
    key=st.sampled_from(KEYS),
    reason=st.integers(0, 7),
)


def world(kind: str) -> tuple[World, ModelNode]:
    """A leader and a node that has joined and not reported, after a history of one kind."""
    config = MasterConfig(window_bytes=64 * 1024, rebuild_ms=0, put_ms=500)
    w = World(config=config)
    node = w.node("n1", "h1", CAPACITY, SLOTS)
    other = w.node("n2", "h2", CAPACITY, SLOTS)
    c = w.client()
    w.put(c, b"a", 4_096, replicas=2)
    w.put(c, b"b", 100, preferred=["n1-0"])
    w.put(c, b"c", 10_000, preferred=["n2-0"])
    w.call(c, "remove", [[b"b"], "defer", False])
    w.call(c, "put_start", [[b"open"], [4_096], {"preferred": ["n1-0"]}, 0])
    if kind == "lost":
        w = World(config=config, epoch=9, now_ms=w.now_ms)
        other.highest = node.highest = 0
    elif kind == "takeover":
        w = w.takeover()
    elif kind == "older":
        w = w.takeover(durable=len(w.journal) // 2)
    w.join(other)
    w.join(node, report=False)
    return w, node


@pytest.mark.parametrize("kind", ["same", "takeover", "older", "lost"])
@given(pages=st.lists(st.lists(records, max_size=6), min_size=1, max_size=3), twice=st.booleans())
def test_any_report_leaves_the_leader_whole(kind: str, pages: list[list[ReportRecord]], twice: bool) -> None:
    w, node = world(kind)
    for _ in range(1 + twice):
        _report(w, node, pages)
        w.leader.check()
        w.settle()
        c = w.client()
        w.call(c, "lookup", [KEYS[:3], 0])
        w.send(c, "put_start", [[b"n%d" % at for at in range(8)], [4_096] * 8, {"replace": True}, 0])
        w.advance(8_000)
        w.leader.check()
        if w.base == 0:
            assert w.replayed().state_hash() == w.leader.state.state_hash()
        if node.connection in w.nodes and node.ids[0] in w.leader.state.segments:
            w.join(node, report=False)
        else:
            return


def _report(w: World, node: ModelNode, pages: list[list[ReportRecord]]) -> None:
    """Sends the pages; a node of dictionaries that holds nothing of them answers every effect."""
    for at, page in enumerate(pages):
        params: list[Any] = [node.ids[0], at, at == len(pages) - 1, pack_records(page)]
        message = w.send(node.connection, "node_report", params)
        error, _ = w.replies[message]
        if error is not None:
            assert error[1] == "BAD_PARAMS"
            w.cut(node)
            return
    w.settle()
