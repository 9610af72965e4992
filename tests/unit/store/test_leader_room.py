"""A put that waits for copies has nothing evicted that would not help it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.store.core_world import MIB, World

from moonpool.store.master_config import MasterConfig
from moonpool.store.table_factory import native_tables, twin_tables

OK, NO_SPACE = 0, 2
KEYS = [b"e%d" % at for at in range(200)]


def left(w: World, client: int) -> int:
    return bytes(w.call(client, "exists", [KEYS, 0])).count(1)


@pytest.mark.parametrize("make", [native_tables, twin_tables])
@pytest.mark.parametrize("nodes", [1, 2])
def test_copies_that_no_segment_can_take_evict_nothing(make: Any, nodes: int) -> None:
    w = World(config=MasterConfig(window_bytes=MIB, rebuild_ms=0), make_tables=make)
    for at in range(nodes):
        w.node(f"n{at}", f"h{at}", MIB, 512)
    client = w.client()
    for key in KEYS:
        assert w.put(client, key)[0] == OK
    policy = {"replicas": nodes + 1, "need_all": True}
    message = w.send(client, "put_start", [[b"new"], [4096], policy, 3_000])
    for _ in range(40):
        w.advance(100)
    assert w.replies[message][1][4][0][0] == NO_SPACE
    assert left(w, client) == len(KEYS)
    w.leader.check()


@pytest.mark.parametrize("make", [native_tables, twin_tables])
def test_copies_make_room_only_where_there_is_none(make: Any) -> None:
    w = World(
        config=MasterConfig(window_bytes=MIB, rebuild_ms=0, evict_high=1.0, evict_low=1.0), make_tables=make
    )
    w.node("full", "h0", MIB, 512)
    client = w.client()
    for at in range(256):
        assert w.put(client, b"f%d" % at)[0] == OK
    w.node("half", "h1", MIB, 512)
    for key in KEYS:
        assert w.put(client, key, preferred=["half-0"])[0] == OK
    for at in range(10):
        assert w.put(client, b"new%d" % at, replicas=2, need_all=True)[0] in (OK, NO_SPACE)
        message = w.send(
            client, "put_start", [[b"more%d" % at], [4096], {"replicas": 2, "need_all": True}, 900]
        )
        for _ in range(10):
            w.advance(100)
        assert w.replies[message][1][4][0][0] == OK
    assert left(w, client) == len(KEYS), "the segment that had room lost objects"
    w.leader.check()
