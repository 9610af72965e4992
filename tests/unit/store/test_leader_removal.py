"""Removing, pinning, listing, leases, damaged places: what waits for what."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.store.core_world import MIB, REHASH, RETIRE, ModelNode, World

from moonpool.store.master_config import MasterConfig

REMOVED, ABSENT, LEASED, PINNED = range(4)


def world(**changes: Any) -> tuple[World, int]:
    made = World(config=MasterConfig(**{"window_bytes": MIB, "rebuild_ms": 0, **changes}))
    made.node()
    return made, made.client()


def remove(w: World, c: int, *keys: bytes, if_leased: str = "defer", force: bool = False) -> list[int]:
    return list(w.call(c, "remove", [list(keys), if_leased, force])[1])


def test_a_reply_waits_for_the_journal_and_the_word() -> None:
    w, c = world()
    w.put(c, b"a")
    w.auto = False
    message = w.send(c, "remove", [[b"a"], "defer", False])
    assert w.call(c, "exists", [[b"a"], 0]) == b"\x00"
    w.deliver()
    assert message not in w.replies
    w.persist()
    assert message not in w.replies
    w.deliver()
    assert w.replies[message] == (None, [1, bytes([REMOVED])])


def test_who_removes_what_is_just_going_waits_as_long() -> None:
    w, c = world()
    w.put(c, b"a")
    w.auto = False
    first = w.send(c, "remove", [[b"a"], "defer", False])
    second = w.send(w.client(), "remove", [[b"a", b"never"], "defer", False])
    w.persist()
    assert first not in w.replies
    assert second not in w.replies
    w.deliver()
    assert w.replies[first][1][1] == bytes([REMOVED])
    assert w.replies[second][1][1] == bytes([ABSENT, ABSENT])
    third = w.send(c, "remove", [[b"a"], "defer", False])
    assert w.replies[third][1][1] == bytes([ABSENT])


def test_an_absent_key_waits_for_facts_on_their_way_only() -> None:
    w, c = world()
    w.auto = False
    w.put(c, b"other")
    message = w.send(c, "remove", [[b"a"], "defer", False])
    assert message not in w.replies
    w.persist()
    assert w.replies[message][1][1] == bytes([ABSENT])


def test_replacing_what_was_just_evicted_waits_for_its_word() -> None:
    w, c = world(evict_high=1.0, evict_low=1.0)
    node = next(iter(w.nodes.values()))
    for at in range(64):
        w.put(c, b"e%d" % at, 64)
    w.auto = False
    # All 64 slots are taken: the next put evicts the oldest.
    w.send(c, "put_start", [[b"new"], [64], None, 5_000])
    assert w.call(c, "exists", [[b"e0"], 0]) == b"\x00"
    message = w.send(c, "remove", [[b"e0"], "defer", False])
    w.persist()
    assert message not in w.replies, "a reader may still trust the place of what was evicted"
    w.deliver()
    assert w.replies[message][1][1] == bytes([ABSENT])
    assert [each[4] for each in node.effects if each[0] == RETIRE] == [3]


def test_leases_defer_or_refuse() -> None:
    w, c = world()
    w.put(c, b"a")
    w.lookup(c, b"a", lease_ms=2_000)
    assert remove(w, c, b"a", if_leased="refuse") == [LEASED]
    assert remove(w, c, b"a") == [REMOVED]
    assert w.leader.gauges()[1].quarantined == 4096, "until the lease ends"
    w.advance(1_900)
    assert w.leader.gauges()[1].quarantined == 4096
    w.advance(200)
    assert w.leader.gauges()[1].quarantined == 0


def test_a_lease_is_no_longer_than_the_longest() -> None:
    w, c = world(lease_ms_max=1_000)
    w.put(c, b"a")
    w.call(c, "exists", [[b"a"], 99_000])
    assert w.call(c, "stat", [[b"a"]])[1][0]["lease_left_ms"] == 1_000
    w.advance(1_100)
    assert remove(w, c, b"a", if_leased="refuse") == [REMOVED]


def test_force_removes_pinned_and_leased() -> None:
    w, c = world()
    w.put(c, b"a", pin=2)
    w.lookup(c, b"a", lease_ms=2_000)
    assert remove(w, c, b"a", if_leased="refuse") == [PINNED]
    assert remove(w, c, b"a", if_leased="refuse", force=True) == [REMOVED]


def test_a_key_twice_in_one_request_is_removed_once() -> None:
    w, c = world()
    w.put(c, b"a")
    assert remove(w, c, b"a", b"b", b"a") == [REMOVED, ABSENT, ABSENT]
    w.leader.check()


def test_prefixes_go_in_steps() -> None:
    w, c = world()
    for name in (b"x/1", b"x/2", b"x/3", b"y/1"):
        w.put(c, name, 10)
    w.put(c, b"x/pinned", 10, pin=2)
    removed, cursor, steps = 0, None, 0
    while True:
        _, count, cursor = w.call(c, "remove_prefix", ["x/", "defer", False, 2, cursor])
        removed, steps = removed + count, steps + 1
        if cursor is None:
            break
    assert removed == 3
    assert steps >= 2
    assert sorted(row[0] for row in w.call(c, "list", [b"", 100, None])[1]) == [b"x/pinned", b"y/1"]
    assert w.call(c, "remove_all", ["defer", True, 100, None])[1:] == [2, None]
    w.leader.check()


def test_many_long_keys_go_in_facts_of_bounded_size() -> None:
    w, c = world(batch_keys_max=1_024)
    keys = [b"%04d" % at + b"x" * 1_000 for at in range(600)]
    assert list(w.call(c, "remove", [keys, "defer", False])[1]) == [ABSENT] * 600
    w = w.takeover()
    before = len(w.journal)
    w.send(w.client(), "remove", [keys, "defer", False])
    made = w.journal[before:]
    assert len(made) == 3
    assert all(len(each) < 300_000 for each in made)
    assert len(w.leader.state.graves) == 600
    w.leader.check()


def test_listing_goes_in_steps_too() -> None:
    w, c = world(list_looks_max=2)
    names = [b"n%d" % at for at in range(7)]
    for name in names:
        w.put(c, name, 10, type=2)
    found, cursor = [], None
    for _ in range(20):
        _, rows, cursor = w.call(c, "list", ["n", 100, cursor])
        assert len(rows) <= 2
        found += rows
        if cursor is None:
            break
    assert sorted(found) == [(name, 10, 2, 0, 1) for name in names]


def test_pins_change_and_wait_for_the_journal() -> None:
    w, c = world()
    w.put(c, b"a")
    assert w.call(c, "pin", [[b"a", b"none"], 2, 0])[1] == b"\x00\x01"
    assert remove(w, c, b"a") == [PINNED]
    w.auto = False
    message = w.send(c, "pin", [[b"a"], 1, 500])
    assert message not in w.replies
    w.persist()
    assert w.replies[message][1][1] == b"\x00"
    stat = w.call(c, "stat", [[b"a"]])[1][0]
    assert (stat["pin"], stat["soft_pin_left_ms"]) == (1, 500)


# Damaged places


def place_of(w: World, c: int, key: bytes) -> tuple[int, int, int]:
    row = w.lookup(c, key)
    return row[0], row[4][0][0], row[4][0][2]


@pytest.mark.parametrize(("said", "verdict", "left"), [(0, 0, 1), (1, 1, 0), (2, 1, 0)])
def test_a_place_goes_only_on_the_nodes_word(said: int, verdict: int, left: int) -> None:
    w, c = world()
    w.put(c, b"a")
    object_id, segment, slot = place_of(w, c, b"a")
    node = next(iter(w.nodes.values()))
    node.verdicts[segment, slot] = said
    assert w.call(c, "damaged", [b"a", object_id, segment, slot]) == [1, verdict]
    assert w.call(c, "exists", [[b"a"], 0]) == bytes([left])
    w.settle()
    assert w.leader.gauges()[1].quarantined == 0
    w.leader.check()


def test_two_readers_cost_one_hash() -> None:
    w, c = world()
    w.put(c, b"a")
    object_id, segment, slot = place_of(w, c, b"a")
    w.auto = False
    messages = [w.send(c, "damaged", [b"a", object_id, segment, slot]) for _ in range(3)]
    w.persist()
    w.deliver()
    assert [w.replies[each][1] for each in messages] == [[1, 0]] * 3
    node = next(iter(w.nodes.values()))
    assert len([each for each in node.effects if each[0] == REHASH]) == 1


def test_a_node_that_does_not_answer_leaves_the_place() -> None:
    w, c = world()
    w.put(c, b"a")
    object_id, segment, slot = place_of(w, c, b"a")
    w.auto = False
    message = w.send(c, "damaged", [b"a", object_id, segment, slot])
    for node in w.nodes.values():
        node.apply = lambda params: None  # type: ignore[method-assign]
    w.advance(w.config.rehash_ms + 200)
    assert w.replies[message][1] == [1, 2]
    assert w.call(c, "exists", [[b"a"], 0]) == b"\x01"


def test_what_is_not_there_is_not_hashed() -> None:
    w, c = world()
    w.put(c, b"a")
    object_id, segment, slot = place_of(w, c, b"a")
    for params in (
        [b"b", object_id, segment, slot],
        [b"a", object_id + 1, segment, slot],
        [b"a", object_id, segment + 1, slot],
        [b"a", object_id, segment, slot + 1],
    ):
        assert w.call(c, "damaged", params) == [1, 3]


def test_one_of_two_copies_goes_alone() -> None:
    w, c = world()
    other: ModelNode = w.node("n2", "h2")
    w.put(c, b"a", replicas=2)
    row = w.lookup(c, b"a")
    slot = next(place[2] for place in row[4] if place[0] == other.ids[0])
    other.verdicts[other.ids[0], slot] = 1
    assert w.call(c, "damaged", [b"a", row[0], other.ids[0], slot]) == [1, 1]
    assert [place[0] for place in w.lookup(c, b"a")[4]] == [1]
    w.leader.check()
