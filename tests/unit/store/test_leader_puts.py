"""Puts, reads and room: what clients see of a leader with model nodes."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.store.core_world import ADD, FENCE, MIB, RETIRE, World, chunks_of, digest_of

from moonpool.events import ObjectsRemoved, ObjectsStored
from moonpool.native.io.grants import make_grant, read_grant
from moonpool.store.master_config import MasterConfig
from moonpool.store.table_factory import TableConfig, twin_tables

OK, EXISTS, NO_SPACE, UNKNOWN_PUT, DEADLINE, TOO_LARGE, REFUSED = range(7)


def world(capacity: int = 4 * MIB, slots: int = 64, **changes: Any) -> tuple[World, int]:
    made = World(config=MasterConfig(**{"window_bytes": MIB, "rebuild_ms": 0, **changes}))
    made.node("n1", "h1", capacity, slots)
    return made, made.client()


def start(w: World, c: int, *sizes: int, wait_ms: int = 0, **policy: Any) -> list[Any]:
    keys = [b"k%d" % at for at in range(len(sizes))]
    return list(w.call(c, "put_start", [keys, list(sizes), policy or None, wait_ms]))


def end(w: World, c: int, put_id: int, index: int = 0, size: int = 4096) -> list[Any]:
    entry = [index, digest_of(b"k%d" % index, size), chunks_of(size)]
    return list(w.call(c, "put_end", [put_id, [entry]])[1][0])


def test_a_put_becomes_an_object_and_an_effect() -> None:
    w, c = world()
    code, object_id = w.put(c, b"a", 5000, type=1)
    assert (code, object_id) == (OK, 1 << 40 | 1)
    row = w.lookup(c, b"a")
    assert row[:4] == (object_id, 5000, digest_of(b"a", 5000), 1)
    node = next(iter(w.nodes.values()))
    add = next(each for each in node.effects if each[0] == ADD)
    place = list(row[4][0])
    assert add[1:4] == [place[0], place[2], place[1]]
    assert add[4:11] == [5000, 0, object_id, b"a", digest_of(b"a", 5000), 1, b""]
    assert w.call(c, "exists", [[b"a", "a", b"b"], 0]) == b"\x01\x01\x00"


def test_grants_are_of_the_node_and_of_the_put() -> None:
    w, c = world()
    epoch, _, put_id, remaining, rows = start(w, c, 4096, 100)
    assert epoch == 1
    assert remaining == w.config.put_ms
    join = next(iter(w.leader.core.joins.values()))
    starts = []
    for (code, places), size in zip(rows, (4096, 128), strict=True):
        segment, offset, slot, grant = places[0]
        assert (code, segment) == (OK, 1)
        until = join.node_clock(w.now_ms) + remaining
        assert grant == make_grant(join.grant_key, 0x1_0000_0001, offset, size, until, put_id & 0xFFFF)
        assert read_grant(grant)[0] == offset
        starts.append((offset, slot))
    assert len(set(starts)) == 2


def test_the_first_put_of_a_key_to_end_wins() -> None:
    w, c = world()
    first, second = start(w, c, 4096), start(w, c, 4096)
    assert end(w, c, second[2])[0] == OK
    kept = w.lookup(c, b"k0")
    assert end(w, c, first[2]) == [EXISTS, kept[0]]
    assert w.lookup(c, b"k0") == kept
    w.leader.check()
    assert w.leader.gauges()[1].quarantined == 0, "who ended its put writes no more"
    assert start(w, c, 4096)[4] == [[EXISTS, []]]
    assert start(w, c, 4096)[2] == 0


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"digest": b"short"}, REFUSED),
        ({"chunks": b"x" * 7}, REFUSED),
        ({"index": 5}, UNKNOWN_PUT),
        ({"index": -1}, UNKNOWN_PUT),
        ({"put_id": 12345}, UNKNOWN_PUT),
        ({"other": True}, UNKNOWN_PUT),
        ({"late": True}, DEADLINE),
    ],
)
def test_a_put_end_that_is_not_right_changes_nothing(change: dict[str, Any], code: int) -> None:
    w, c = world()
    put_id = start(w, c, 4096)[2]
    entry = [
        change.get("index", 0),
        change.get("digest", digest_of(b"k0", 4096)),
        change.get("chunks", b""),
    ]
    who = w.client() if change.get("other") else c
    if change.get("late"):
        w.now_ms += w.config.put_ms + 1
    result = w.call(who, "put_end", [change.get("put_id", put_id), [entry]])
    assert result[1] == [(code, 0)]
    assert w.call(c, "exists", [[b"k0"], 0]) == b"\x00"
    if not change.get("late"):
        assert end(w, c, put_id)[0] == OK, "the put is still open"


def test_an_entry_ends_once() -> None:
    w, c = world()
    put_id = start(w, c, 4096, 10)[2]
    assert end(w, c, put_id)[0] == OK
    assert end(w, c, put_id)[0] == UNKNOWN_PUT
    assert end(w, c, put_id, 1, 10)[0] == OK
    assert end(w, c, put_id, 1, 10)[0] == UNKNOWN_PUT


def test_large_objects_need_their_chunk_digests() -> None:
    w, c = world()
    put_id = start(w, c, 200_000)[2]
    short = [0, digest_of(b"k0", 200_000), bytes(8)]
    assert w.call(c, "put_end", [put_id, [short]])[1] == [(REFUSED, 0)]
    assert end(w, c, put_id, 0, 200_000)[0] == OK


def test_an_abort_frees_at_once() -> None:
    w, c = world()
    put_id = start(w, c, 4096, 4096, 4096)[2]
    assert w.call(c, "put_abort", [put_id, [1, 1, 9]]) == [1, 1]
    assert w.leader.gauges()[1].writing == 8192
    assert w.call(w.client(), "put_abort", [put_id, None]) == [1, 0]
    assert w.call(c, "put_abort", [put_id, None]) == [1, 2]
    assert w.leader.gauges()[1].writing == w.leader.gauges()[1].quarantined == 0


def test_a_put_that_nobody_ends_is_fenced() -> None:
    w, c = world()
    w.auto = False
    put_id = start(w, c, 4096)[2]
    deadline = w.now_ms + w.config.put_ms
    w.advance(w.config.put_ms + 100, beat=True)
    gauges = w.leader.gauges()[1]
    assert (gauges.writing, gauges.quarantined) == (0, 4096)
    w.persist()
    node = next(iter(w.nodes.values()))
    w.ack(node)
    fence = next(each for each in node.effects if each[0] == FENCE)
    assert fence[1:5] == [1, 0, 0, 4096]
    assert len(fence[5]) == 16
    assert fence[6] == put_id
    assert fence[7] >= deadline - 1_000, "not before the grant is over (the node's clock began at the join)"
    w.advance(200)
    assert w.leader.gauges()[1].quarantined == 0


def test_a_client_that_ends_loses_its_puts_after_its_grace() -> None:
    w, c = world()
    instance = b"i" * 16
    first, second = w.client(instance=instance), w.client(instance=instance)
    start(w, first, 4096)
    w.leader.connection_closed(first, w.now_ms)
    w.advance(5_000)
    assert w.leader.gauges()[1].writing == 4096, "it has another connection"
    w.leader.connection_closed(second, w.now_ms)
    w.advance(w.config.client_grace_ms - 100)
    again = w.client(instance=instance)
    w.advance(3_000)
    assert w.leader.gauges()[1].writing == 4096, "it came back in time"
    w.leader.connection_closed(again, w.now_ms)
    w.advance(w.config.client_grace_ms + 300)
    assert w.leader.gauges()[1].writing == 0
    assert w.call(c, "put_end", [1, []])[1] == []


def test_replacing_makes_a_new_object_and_waits_for_the_old_word() -> None:
    w, c = world()
    old = w.put(c, b"k0")[1]
    w.auto = False
    begun = start(w, c, 100, replace=True)
    message = w.send(c, "put_end", [begun[2], [[0, digest_of(b"k0", 100), b""]]])
    assert w.lookup(c, b"k0")[0] == old + 1, "decided at once"
    assert message not in w.replies
    w.persist()
    assert message not in w.replies, "durable, but not stamped"
    w.deliver()
    assert w.replies[message] == (None, [1, [(OK, old + 1)]])
    node = next(iter(w.nodes.values()))
    retire = [each for each in node.effects if each[0] == RETIRE]
    assert retire == [[RETIRE, 1, 0, old, 2]]
    w.auto = True
    w.settle()
    assert w.leader.gauges()[1].quarantined == 0


def test_a_reply_to_a_replacement_waits_no_longer_than_locations_are_trusted() -> None:
    w, c = world()
    w.put(c, b"k0")
    w.auto = False
    begun = start(w, c, 100, replace=True)
    message = w.send(c, "put_end", [begun[2], [[0, digest_of(b"k0", 100), b""]]])
    w.persist()
    w.nodes.clear()
    w.advance(w.config.location_lease_ms - 100)
    assert message not in w.replies
    w.advance(200)
    assert w.replies[message][0] is None


def test_durability_sync_waits_for_the_journal() -> None:
    w, c = world(durability="sync")
    begun = start(w, c, 4096)
    w.auto = False
    message = w.send(c, "put_end", [begun[2], [[0, digest_of(b"k0", 4096), b""]]])
    assert message not in w.replies
    w.persist()
    assert w.replies[message][0] is None


def test_async_replies_at_once_but_not_while_the_journal_is_away() -> None:
    w, c = world()
    begun = start(w, c, 4096, 4096)
    w.auto = False
    assert end(w, c, begun[2])[0] == OK
    w.leader.journal_unavailable(w.now_ms)
    message = w.send(c, "put_end", [begun[2], [[1, digest_of(b"k1", 4096), b""]]])
    assert message not in w.replies
    w.advance(w.config.journal_wait_ms + 100)
    assert w.replies[message][0][1] == "JOURNAL_UNAVAILABLE"
    w.persist()
    assert w.lookup(c, b"k1") is not None
    w.auto = True
    assert w.put(c, b"later")[0] == OK


def test_async_puts_wait_for_a_journal_that_is_slow() -> None:
    w, c = world()
    begun = start(w, c, *[64] * 4)
    w.auto = False

    def end_one(index: int) -> int:
        entry = [index, digest_of(b"k%d" % index, 64), b""]
        return w.send(c, "put_end", [begun[2], [entry]])

    assert end_one(0) in w.replies
    w.now_ms += w.config.async_ms_max
    assert end_one(1) in w.replies
    w.now_ms += 1
    late = end_one(2)
    assert late not in w.replies
    w.persist()
    assert w.replies[late][0] is None
    assert end_one(3) in w.replies


def test_effects_leave_only_when_their_facts_are_durable() -> None:
    w, c = world()
    begun = start(w, c, 4096)
    w.auto = False
    end(w, c, begun[2])
    node = next(iter(w.nodes.values()))
    assert not node.inbox
    w.persist()
    assert len(node.inbox) == 1


# Replicas and placement


def hosts_of(w: World, c: int, key: bytes) -> list[str]:
    stat = w.call(c, "stat", [[key]])[1][0]
    return [each["host"] for each in stat["places"]]


def test_copies_go_to_hosts_then_nodes_then_segments() -> None:
    w = World()
    for name, host, segments in (("a", "h1", 2), ("b", "h1", 1), ("c", "h2", 1)):
        w.node(name, host, segments=segments)
    c = w.client()
    w.put(c, b"two", replicas=2)
    assert sorted(hosts_of(w, c, b"two")) == ["h1", "h2"]
    w.put(c, b"three", replicas=3)
    stat = w.call(c, "stat", [[b"three"]])[1][0]
    assert sorted(each["node"] for each in stat["places"]) == ["a", "b", "c"]
    w.put(c, b"four", replicas=4)
    assert len(w.lookup(c, b"four")[4]) == 4
    w.put(c, b"five", replicas=5)
    assert len(w.lookup(c, b"five")[4]) == 4, "best effort"
    assert w.put(c, b"all", replicas=5, need_all=True)[0] == NO_SPACE
    w.leader.check()


def test_policies_choose_segments() -> None:
    w = World()
    for name in ("a", "b", "c"):
        w.node(name, name)
    c = w.client()
    for at in range(6):
        w.put(c, b"p%d" % at, preferred=["c-0"])
    assert w.leader.gauges()[3].live == 6 * 4096
    assert w.put(c, b"disk", kind=2)[0] == NO_SPACE
    assert w.put(c, b"tier", tier=2)[0] == NO_SPACE
    assert w.put(c, b"host", tier=1, kind=1)[0] == OK


def test_objects_spread_by_room() -> None:
    w = World()
    w.node("small", "h1", MIB, 512)
    w.node("large", "h2", 4 * MIB, 2048)
    c = w.client()
    for at in range(200):
        assert w.put(c, b"o%d" % at, 1000)[0] == OK
    small, large = w.leader.gauges()[1].live, w.leader.gauges()[2].live
    assert 2 < large / small < 8


def test_a_place_that_was_not_written_is_left_out_and_fenced() -> None:
    w = World()
    w.node("a", "h1")
    w.node("b", "h2")
    c = w.client()
    begun = start(w, c, 4096, replicas=2)
    places = begun[4][0][1]
    entry = [0, digest_of(b"k0", 4096), b"", 0b01]
    w.auto = False
    assert w.call(c, "put_end", [begun[2], [entry]])[1][0][0] == OK
    assert [list(each) for each in w.lookup(c, b"k0")[4]] == [list(places[1][:3])]
    assert w.leader.gauges()[places[0][0]].quarantined == 4096
    w.leader.check()


def test_nothing_is_stored_when_every_place_failed() -> None:
    w, c = world()
    begun = start(w, c, 4096)
    entry = [0, digest_of(b"k0", 4096), b"", 1]
    assert w.call(c, "put_end", [begun[2], [entry]])[1] == [(NO_SPACE, 0)]
    assert w.lookup(c, b"k0") is None


# Room


def test_what_is_larger_than_any_segment_is_too_large() -> None:
    w, c = world()
    rows = start(w, c, 4 * MIB + 1, 4 * MIB, 1 << 41)[4]
    assert [row[0] for row in rows] == [TOO_LARGE, OK, TOO_LARGE]


def test_windows_open_ahead_of_need() -> None:
    w, c = world(16 * MIB)
    opened = [w.leader.state.segments[1].opened]
    for at in range(12):
        assert w.put(c, b"w%d" % at, MIB // 2)[0] == OK
        w.advance(100)
        opened.append(w.leader.state.segments[1].opened)
    assert opened[0] == MIB
    assert opened == sorted(opened)
    assert opened[-1] < 16 * MIB
    assert w.leader.gauges()[1].free == 10 * MIB


def test_the_first_put_waits_for_its_window_only() -> None:
    w = World()
    w.auto = False
    node = w.node("n", "h")
    c = w.client()
    message = w.send(c, "put_start", [[b"a"], [4096], None, 0])
    assert message not in w.replies
    w.persist()
    assert w.replies[message][1][4][0][0] == OK
    assert node.node_id == 1


def test_pressure_evicts_the_oldest_and_a_put_waits_for_it() -> None:
    w, c = world(MIB, 512, evict_high=1.0, evict_low=1.0)
    for at in range(256):
        assert w.put(c, b"e%d" % at)[0] == OK
    assert w.leader.gauges()[1].free == 0
    w.lookup(c, b"e0")
    w.auto = False
    message = w.send(c, "put_start", [[b"new"], [8000], None, 1_000])
    assert message not in w.replies
    assert w.call(c, "exists", [[b"e0", b"e1", b"e2", b"e3"], 0]) == b"\x01\x00\x00\x01"
    w.auto = True
    w.settle()
    assert w.replies[message][1][4][0][0] == OK
    w.leader.check()


def test_a_wait_ends_with_no_space_when_nothing_can_go() -> None:
    w, c = world(MIB, 512, evict_high=1.0, evict_low=1.0)
    for at in range(256):
        w.put(c, b"e%d" % at, pin=2)
    message = w.send(c, "put_start", [[b"a", b"b"], [4096, 4096], None, 500])
    w.advance(400)
    assert message not in w.replies
    w.advance(200)
    assert [row[0] for row in w.replies[message][1][4]] == [NO_SPACE, NO_SPACE]
    w.leader.check()


def test_a_waiting_client_that_goes_gives_everything_back() -> None:
    w, c = world(MIB, 512, evict_high=1.0, evict_low=1.0)
    for at in range(250):
        w.put(c, b"e%d" % at, pin=2)
    other = w.client()
    w.send(other, "put_start", [[b"x%d" % at for at in range(8)], [4096] * 8, None, 5_000])
    assert w.leader.gauges()[1].writing == 6 * 4096
    w.leader.connection_closed(other, w.now_ms)
    assert w.leader.gauges()[1].writing == 0
    assert w.leader.gauges()[1].free == 6 * 4096
    w.leader.check()


def test_background_eviction_keeps_between_its_marks() -> None:
    w, c = world(4 * MIB, 4096, evict_high=0.9, evict_low=0.8)
    for at in range(1000):
        w.put(c, b"b%d" % at)
        if at % 50 == 0:
            w.advance(100)
    w.advance(500)
    used = w.leader.gauges()[1].live / (4 * MIB)
    assert 0.75 <= used <= 0.9
    assert w.call(c, "exists", [[b"b999", b"b0"], 0]) == b"\x01\x00"


def test_slots_that_run_out_evict_too() -> None:
    w, c = world(4 * MIB, 64)
    for at in range(300):
        w.put(c, b"s%d" % at, 64)
        w.advance(100)
    assert w.put(c, b"last", 64)[0] == OK
    w.leader.check()


def test_leases_and_pins_keep_from_eviction() -> None:
    w, c = world(MIB, 512, evict_high=1.0, evict_low=1.0)
    w.put(c, b"hard", pin=2)
    w.put(c, b"soft", pin=1, soft_pin_ms=60_000)
    w.put(c, b"leased")
    w.lookup(c, b"leased", lease_ms=5_000)
    for at in range(253):
        w.put(c, b"e%d" % at)
    for at in range(300):
        assert w.put(c, b"f%d" % at, 4096)[0] in (OK, NO_SPACE)
    assert w.call(c, "exists", [[b"hard", b"soft", b"leased", b"e0"], 0]) == b"\x01\x01\x01\x00"


def test_soft_pins_go_last() -> None:
    w, c = world(MIB, 512, evict_high=1.0, evict_low=1.0)
    for at in range(256):
        w.put(c, b"s%d" % at, pin=1, soft_pin_ms=60_000)
    message = w.send(c, "put_start", [[b"new"], [4096], None, 1_000])
    w.settle()
    assert w.replies[message][1][4][0][0] == OK


def test_groups_go_together() -> None:
    w, c = world(MIB, 512, evict_high=1.0, evict_low=1.0)
    for at in range(4):
        w.put(c, b"g%d" % at, group="layer")
    for at in range(252):
        w.put(c, b"e%d" % at)
    w.put(c, b"more")
    assert w.call(c, "exists", [[b"g0", b"g1", b"g2", b"g3", b"e0"], 0]) == b"\x00\x00\x00\x00\x01"


def test_a_full_table_is_no_space_and_no_harm() -> None:
    config = MasterConfig(window_bytes=MIB, rebuild_ms=0)
    w = World(config=config, tables=twin_tables(TableConfig(objects_max=2)))
    w.node()
    c = w.client()
    assert [w.put(c, key)[0] for key in (b"a", b"b", b"c")] == [OK, OK, NO_SPACE]
    assert w.put(c, b"a", replace=True)[0] == OK
    w.leader.check()


def test_too_many_open_puts_are_refused_with_nothing_taken() -> None:
    config = MasterConfig(window_bytes=MIB, rebuild_ms=0)
    w = World(config=config, tables=twin_tables(TableConfig(open_puts_max=1)))
    w.node()
    c = w.client()
    start(w, c, 4096)
    assert w.refused(c, "put_start", [[b"x"], [4096], None, 0]) == "OVERLOADED"
    assert w.leader.gauges()[1].writing == 4096
    w.leader.check()


# Tenants


def tenant(w: World, admin: int, name: str, quota: int = 0, digest: bytes = b"") -> int:
    return int(w.call(admin, "tenant_set", [name, quota, digest])[1])


def test_tenants_do_not_see_each_other() -> None:
    w, c = world()
    tenant(w, c, "other")
    o = w.client("other")
    w.put(c, b"k", 10)
    assert w.call(o, "exists", [[b"k"], 0]) == b"\x00"
    assert w.put(o, b"k", 20)[0] == OK
    assert w.lookup(o, b"k")[1] == 20
    assert w.call(o, "remove_all", ["defer", True, 100, None])[1] == 1
    assert w.lookup(c, b"k")[1] == 10
    assert w.refused(o, "tenant_set", ["x", 0, b""]) == "TENANT_REFUSED"


def test_tokens_are_checked() -> None:
    import hashlib

    w, c = world()
    tenant(w, c, "t", 0, hashlib.sha256(b"open sesame").digest())
    assert w.client("t", "open sesame")
    for name, token in (("t", "wrong"), ("t", ""), ("nobody", "")):
        w.connections += 1
        params = [b"i" * 16, "c", "h", name, token]
        assert w.refused(w.connections, "client_join", params) == "TENANT_REFUSED"


def test_quotas_count_what_is_stored_and_what_is_written() -> None:
    w, c = world()
    tenant(w, c, "t", 3 * 4096)
    t = w.client("t")
    assert w.put(t, b"a", 100)[0] == OK
    rows = start(w, t, 4096, 4096, 4096)[4]
    assert [row[0] for row in rows] == [OK, OK, REFUSED]
    assert w.put(t, b"z")[0] == REFUSED
    tenant(w, c, "t", 0)
    assert w.put(t, b"z")[0] == OK
    assert w.put(t, b"two", replicas=1)[0] == OK


# Events


def test_events_tell_what_came_and_went() -> None:
    w, c = world(events=True)
    w.put(c, b"a")
    w.put(c, b"a", replace=True)
    w.call(c, "remove", [[b"a"], "defer", False])
    kinds = [(type(each), each.tenant, each.keys, each.node) for each in w.events]
    came, went = (ObjectsStored, "default", (b"a",), "n1"), (ObjectsRemoved, "default", (b"a",), "n1")
    assert sorted(map(str, kinds)) == sorted(map(str, [came, came, went, went]))


def test_a_stuck_quarantine_does_not_keep_from_evicting() -> None:
    """A stopped writer's extents stay fenced; puts evict others instead of waiting for it for ever."""
    w, c = world(MIB, 512, evict_high=1.0, evict_low=1.0)
    begun = w.call(c, "put_start", [[b"stuck%d" % at for at in range(16)], [4096] * 16, None, 0])
    for at in range(240):
        assert w.put(c, b"e%d" % at)[0] == OK
    node = next(iter(w.nodes.values()))
    keep = node._apply_one
    node._apply_one = lambda effect: None if effect[0] == FENCE else keep(effect)  # type: ignore[method-assign]
    w.advance(w.config.put_ms + 200)
    assert w.leader.gauges()[1].quarantined == 16 * 4096
    message = w.send(c, "put_start", [[b"new"], [4096], None, 1_000])
    w.advance(500)
    assert w.replies[message][1][4][0][0] == OK
    assert begun[2]
    w.leader.check()
