"""Nodes: joining, silence, death, return, resets; takeovers and journals that were lost."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.store.core_world import ADD, FENCE, MIB, RESET, RETIRE, ModelNode, World, segment_map

from moonpool.store.leader import Leader
from moonpool.store.master_config import MasterConfig
from moonpool.store.records import NodeState
from moonpool.store.state import State
from moonpool.store.table_factory import TableConfig, twin_tables


def world(**changes: Any) -> tuple[World, ModelNode, int]:
    made = World(config=MasterConfig(**{"window_bytes": MIB, "rebuild_ms": 0, **changes}))
    return made, made.node(), made.client()


def state_of(w: World, node: ModelNode) -> tuple[NodeState, NodeState]:
    record = w.leader.state.nodes[node.node_id]
    return NodeState(record.state), NodeState(w.leader.state.segments[node.ids[0]].state)


def silence(w: World, ms: int) -> None:
    """Time passes while nodes say nothing."""
    w.auto = False
    w.advance(ms, beat=False)
    w.persist()
    w.auto = True


def test_a_new_node_becomes_active() -> None:
    w, node, c = world()
    assert state_of(w, node) == (NodeState.ACTIVE, NodeState.ACTIVE)
    row = w.call(c, "segments", [])[2][0]
    assert (row["id"], row["name"], row["node"], row["host"]) == (1, "n1-0", "n1", "h1")
    assert (row["endpoint"], row["view_endpoint"], row["instance"]) == ("n1:1", "/n1", node.instance)
    status = w.call(c, "status", [])
    assert status["nodes"][0]["state"] == "active"
    assert status["gauges"]["free"] == status["capacity"] == 4 * MIB


def test_silence_makes_suspect_then_dead_then_gone() -> None:
    w, node, c = world(gone_ms=10_000)
    w.put(c, b"a")
    silence(w, 1_100)
    assert state_of(w, node)[1] == NodeState.SUSPECT
    assert w.lookup(c, b"a") is not None
    w.auto = False
    assert w.put(c, b"b")[0] == 2, "a suspect node takes no puts"
    silence(w, 2_000)
    assert state_of(w, node)[1] == NodeState.DEAD
    assert node.connection in w.closed
    w.nodes.clear()
    assert w.lookup(c, b"a") is None
    assert w.call(c, "exists", [[b"a"], 0]) == b"\x00"
    assert w.call(c, "list", [b"", 10, None])[1] == []
    assert w.leader.gauges()[1] == (0, 0, 0, 0, 4 * MIB)
    silence(w, 10_100)
    assert w.leader.state.nodes == w.leader.state.segments == {}
    assert len(w.leader.state.objects) == 0
    w.leader.check()


def test_a_suspect_node_that_answers_is_active_again() -> None:
    w, node, _ = world()
    silence(w, 1_100)
    w.ack(node)
    assert state_of(w, node) == (NodeState.ACTIVE, NodeState.ACTIVE)


def test_suspect_places_come_last() -> None:
    w, first, c = world()
    second = w.node("n2", "h2")
    w.put(c, b"a", replicas=2)
    w.auto = False
    for _ in range(12):
        w.now_ms += 100
        w.ack(second)
        w.leader.tick(w.now_ms)
        w.take()
    order = [place[0] for place in w.lookup(c, b"a")[4]]
    assert order == [second.ids[0], first.ids[0]]


def test_a_dead_node_that_comes_back_keeps_what_is_still_true() -> None:
    w, node, c = world()
    kept = w.put(c, b"kept")[1]
    w.put(c, b"removed")
    w.put(c, b"replaced")
    other = w.node("n2", "h2")
    w.cut(node)
    silence(w, 3_200)
    w.join(other)
    assert w.put(c, b"replaced", 100)[0] == 0, "nobody sees the old one"
    assert list(w.call(c, "remove", [[b"removed"], "defer", False])[1]) == [0]
    w.advance(3_000)
    w.join(node)
    assert w.lookup(c, b"kept")[0] == kept
    assert w.lookup(c, b"removed") is None
    assert w.lookup(c, b"replaced")[1] == 100
    alive = [slot.key for slot in node.directory.values() if not slot.dead]
    assert alive == [b"kept"]
    assert w.leader.gauges()[1].quarantined == 0
    w.leader.check()


def test_a_new_process_of_the_same_name_has_nothing_of_the_old() -> None:
    w, node, c = world()
    w.put(c, b"a")
    w.put(c, b"both", replicas=1)
    old_id = node.ids[0]
    w.cut(node)
    node.instance = b"n" * 16
    node.directory.clear()
    w.join(node)
    assert node.ids[0] > old_id
    assert w.lookup(c, b"a") is None
    assert list(w.leader.state.segments) == node.ids
    w.leader.check()


def test_a_segment_of_another_generation_is_another_segment() -> None:
    w, node, c = world()
    w.put(c, b"a")
    w.cut(node)
    node.segments = [segment_map("n1-0", 4 * MIB, 64, generation=2), segment_map("n1-1", MIB, 64)]
    node.directory.clear()
    w.join(node)
    assert node.ids == [2, 3]
    assert w.lookup(c, b"a") is None
    w.leader.check()


def test_what_a_directory_lacks_is_sent_again() -> None:
    w, node, c = world()
    w.auto = False
    w.put(c, b"a")
    w.cut(node)
    assert not node.directory, "the ADD never arrived"
    w.persist()
    w.auto = True
    w.join(node)
    adds = [each for each in node.effects if each[0] == ADD]
    assert [(each[7], each[10], each[11]) for each in adds][-1] == (b"a", b"", 0)
    assert [slot.key for slot in node.directory.values()] == [b"a"]


def test_no_effect_is_sent_while_a_node_reports() -> None:
    w, node, c = world()
    w.put(c, b"a")
    w.cut(node)
    w.auto = False
    w.join(node, report=False)
    w.send(c, "remove", [[b"a"], "defer", False])
    w.persist()
    assert not node.inbox
    w.report(node)
    w.persist()
    assert node.inbox
    w.auto = True
    w.settle()
    assert all(slot.dead for slot in node.directory.values())
    w.leader.check()


def test_effects_without_an_answer_are_sent_again_once() -> None:
    w, node, c = world()
    w.auto = False
    w.put(c, b"a")
    w.persist()
    lost = node.inbox.pop()
    w.advance(900, beat=False)
    assert not node.inbox
    w.now_ms += w.config.resend_ms
    w.ack(node)
    w.leader.tick(w.now_ms)
    w.take()
    assert node.inbox == [lost]
    w.ack(node)
    assert [slot.key for slot in node.directory.values()] == [b"a"]


def test_a_node_with_too_many_effects_joins_again() -> None:
    w, node, c = world(effects_max=4)
    w.auto = False
    for at in range(4):
        w.put(c, b"k%d" % at, 64)
    w.send(c, "remove", [[b"k0", b"k1"], "defer", False])
    w.advance(100, beat=False)
    assert node.connection in w.closed
    assert w.refused(node.connection, "node_ack", [0, 0, [], []]) == "UNKNOWN_NODE"
    w.auto = True
    w.join(node)
    assert sorted(slot.key for slot in node.directory.values() if not slot.dead) == [b"k2", b"k3"]


def test_a_release_that_comes_too_early_is_not_believed() -> None:
    w, node, c = world()
    w.put(c, b"a")
    w.auto = False
    w.send(c, "remove", [[b"a"], "defer", False])
    w.persist()
    applied = node.applied
    w.call(node.connection, "node_ack", [applied, w.now_ms, [[1, 0]], []], settle=False)
    assert w.leader.gauges()[1].quarantined == 4096
    w.deliver()
    assert w.leader.gauges()[1].quarantined == 0


@pytest.mark.parametrize(
    "params",
    [
        [99, 0, [], []],
        [-1, 0, [], []],
        [0, "x", [], []],
        [0, 0, [[1]], []],
        [0, 0, [[1, -1]], []],
        [0, 0, [], [[1, 3]]],
        [0, 0, [], [[1]]],
        [0, 0, None, []],
    ],
)
def test_acknowledgements_that_cannot_be_are_refused(params: list[Any]) -> None:
    w, node, _ = world()
    assert w.refused(node.connection, "node_ack", params) == "BAD_PARAMS"


def test_reports_in_the_wrong_order_are_refused() -> None:
    w, node, _ = world()
    w.cut(node)
    w.auto = False
    w.join(node, report=False)
    for params in ([1, 1, True, b""], [2, 0, True, b""], [1, 0, True, b"x"], [1, 0, 1, b""]):
        assert w.refused(node.connection, "node_report", params) == "BAD_PARAMS"
    w.report(node)
    assert w.refused(node.connection, "node_report", [1, 0, True, b""]) == "BAD_PARAMS"


# Takeovers


def test_a_takeover_keeps_everything_and_frees_nothing_too_early() -> None:
    w, node, c = world()
    ids = {key: w.put(c, key)[1] for key in (b"a", b"b", b"c")}
    begun = w.call(c, "put_start", [[b"open"], [4096], None, 0])
    after = w.takeover()
    c2 = after.client()
    for key, object_id in ids.items():
        assert after.lookup(c2, key)[0] == object_id, "before any node is back"
    assert after.call(c2, "put_end", [begun[2], [[0, bytes(16), b""]]])[1] == [(3, 0)]
    opened = after.leader.state.segments[1].opened
    assert after.leader.gauges()[1].quarantined == opened - 3 * 4096
    after.join(node)
    fence = [each for each in node.effects if each[0] == FENCE][-1]
    assert fence[1:5] == [1, 0xFFFFFFFF, 0, 4 * MIB]
    assert after.put(c2, b"new")[0] == 0, "from a window that opened after the takeover"
    assert after.leader.gauges()[1].quarantined == opened - 3 * 4096
    after.advance(after.config.lease_ms_max + 100)
    assert after.leader.gauges()[1].quarantined == 0
    assert after.leader.state.settled
    after.leader.check()


def test_removals_are_silent_for_one_location_lease_after_a_takeover() -> None:
    w, node, c = world()
    w.put(c, b"a")
    after = w.takeover()
    after.join(node)
    c2 = after.client()
    messages = [after.send(c2, "remove", [[key], "defer", False]) for key in (b"a", b"absent")]
    after.settle()
    after.advance(after.config.location_lease_ms - 200)
    assert not any(each in after.replies for each in messages)
    after.advance(300)
    assert all(each in after.replies for each in messages)


def test_nodes_that_do_not_come_back_are_dead_in_the_end() -> None:
    w, _, c = world()
    w.put(c, b"a")
    after = w.takeover()
    after.auto = False
    after.advance(after.config.rejoin_ms + after.config.dead_ms + 200, beat=False)
    assert after.leader.state.segments[1].state == NodeState.DEAD


def test_an_object_whose_fact_was_lost_comes_back_from_the_directory() -> None:
    w, node, c = world()
    w.put(c, b"old")
    kept = len(w.journal)
    lost = w.put(c, b"lost")[1]
    after = w.takeover(durable=kept)
    after.join(node)
    assert after.lookup(after.client(), b"lost")[0] == lost
    after.advance(6_000)
    after.leader.check()
    assert after.leader.gauges()[1].live == 8192


def test_a_key_that_was_removed_meanwhile_does_not_come_back() -> None:
    w, node, c = world()
    kept = len(w.journal)
    w.put(c, b"lost")
    after = w.takeover(durable=kept)
    c2 = after.client()
    after.send(c2, "remove", [[b"lost"], "defer", False])
    after.join(node)
    assert after.lookup(c2, b"lost") is None
    after.advance(6_000)
    assert after.leader.gauges()[1] == (4 * MIB, 0, 0, 0, 0)


def test_an_object_that_the_journal_lost_the_end_of_stays_dead() -> None:
    w, node, c = world()
    w.put(c, b"a")
    kept = len(w.journal)
    w.call(c, "remove", [[b"a"], "defer", False])
    after = w.takeover(durable=kept)
    after.join(node)
    assert after.lookup(after.client(), b"a") is None
    after.advance(6_000)
    assert after.leader.gauges()[1] == (4 * MIB, 0, 0, 0, 0)


def test_another_run_of_the_journals_server_hides_places_until_nodes_reported() -> None:
    w, node, c = world()
    w.put(c, b"a")
    state = w.replayed()
    tables = twin_tables(TableConfig())
    restored = State.restore(state.snapshot_chunks(), tables.objects)
    leader = Leader.from_state(
        w.config,
        tables,
        w.random.randbytes,
        state=restored,
        epoch=2,
        now_ms=w.now_ms,
        journal_run="another",
    )
    assert leader.state.segments[1].state == NodeState.JOINING
    assert not leader.core.ranks
    assert node.node_id in leader.state.nodes


# A journal that was lost


def rebuilt(*nodes: ModelNode, **changes: Any) -> World:
    """A leader over an empty journal that these nodes join, and the end of the time for others."""
    config = MasterConfig(**{"window_bytes": MIB, "rebuild_ms": 5_000, **changes})
    after = World(config=config, seed=9, now_ms=50_000)
    after.auto = False
    first = nodes[0]
    params = [first.name, first.host, first.instance, "", "", first.highest, first.segments]
    after.connections += 1
    assert after.refused(after.connections, "node_join", params) == "NOT_READY"
    after.leader.raise_epoch(after.epoch_wanted, after.now_ms)
    after.take()
    after.auto = True
    for node in nodes:
        after.join(node)
    after.advance(config.rejoin_ms + 200)
    return after


def test_a_pool_is_rebuilt_from_its_directories() -> None:
    w, node, c = world()
    ids = {b"k%d" % at: w.put(c, b"k%d" % at, size)[1] for at, size in enumerate((0, 5000, 100_000))}
    w.put(c, b"gone")
    w.call(c, "remove", [[b"gone"], "defer", False])
    after = rebuilt(node)
    assert after.leader.epoch > w.leader.epoch
    c2 = after.client()
    for key, object_id in ids.items():
        assert after.lookup(c2, key)[0] == object_id
    assert after.lookup(c2, b"gone") is None
    after.advance(6_000)
    gauges = after.leader.gauges()[node.ids[0]]
    assert gauges.quarantined == gauges.writing == 0
    assert after.put(c2, b"k0", replace=True)[0] == 0
    after.leader.check()
    assert after.replayed().state_hash() == after.leader.state.state_hash()


def two_copies() -> tuple[World, ModelNode, ModelNode, int]:
    w, first, c = world()
    second = w.node("n2", "h2")
    w.put(c, b"a", replicas=2)
    return w, first, second, c


@pytest.mark.parametrize("swap", [False, True])
def test_the_highest_id_wins_in_any_order(swap: bool) -> None:
    w, first, second, c = two_copies()
    w.cut(second)
    newer = w.put(c, b"a", 100, replace=True)
    w.advance(2_500)
    order = (second, first) if swap else (first, second)
    after = rebuilt(*order)
    row = after.lookup(after.client(), b"a")
    assert row[0] > 1 << 40
    assert len(row[4]) == 1
    after.advance(6_000)
    after.leader.check()
    assert newer[0] in (0, 2)


@pytest.mark.parametrize("swap", [False, True])
def test_dead_stays_dead_in_any_order(swap: bool) -> None:
    w, first, second, c = two_copies()
    w.cut(second)
    w.send(c, "remove", [[b"a"], "defer", False])
    w.settle()
    assert not any(slot.dead for slot in second.directory.values())
    order = (second, first) if swap else (first, second)
    after = rebuilt(*order)
    assert after.lookup(after.client(), b"a") is None
    after.advance(6_000)
    assert all(sum(each) == each.free for each in after.leader.gauges().values())


def test_copies_of_one_object_come_together_again() -> None:
    _, first, second, _ = two_copies()
    after = rebuilt(first, second)
    assert len(after.lookup(after.client(), b"a")[4]) == 2


def test_tenants_of_a_lost_journal_are_not_mixed_up() -> None:
    w, node, c = world()
    w.call(c, "tenant_set", ["t", 0, b""])
    t = w.client("t")
    w.put(t, b"secret")
    after = rebuilt(node)
    c2 = after.client()
    after.call(c2, "tenant_set", ["another", 0, b""])
    assert after.lookup(after.client("another"), b"secret") is None
    after.advance(6_000)
    assert after.leader.gauges()[node.ids[0]].live == 0


def test_a_directory_that_contradicts_itself_is_reset() -> None:
    w, node, c = world()
    w.put(c, b"a")
    w.put(c, b"b")
    for slot in node.directory.values():
        slot.offset = 0
    after = rebuilt(node)
    after.advance(6_000)
    assert [each[0] for each in node.effects][-1] == RESET
    assert after.leader.state.segments == {}
    node.segments[0]["generation"] += 1
    node.directory.clear()
    after.join(node)
    assert after.put(after.client(), b"a")[0] == 0
    after.leader.check()


def test_effects_of_retired_entries_name_a_reason() -> None:
    w, node, c = world()
    w.put(c, b"a")
    w.call(c, "remove", [[b"a"], "defer", False])
    assert [each[4] for each in node.effects if each[0] == RETIRE] == [1]
    assert next(iter(node.directory.values())).reason == 1


def test_facts_of_a_leader_are_a_journal() -> None:
    w, node, c = world()
    w.put(c, b"a")
    w.put(c, b"a", replace=True)
    w.call(c, "pin", [[b"a"], 2, 0])
    w.cut(node)
    silence(w, 4_000)
    for count in range(len(w.journal) + 1):
        state = w.replayed(count)
        state.check()
        assert state.sequence == count
    assert w.replayed().state_hash() == w.leader.state.state_hash()
    assert all(isinstance(each, bytes) for each in w.journal)
