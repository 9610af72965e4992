"""Two processes under one node's name: the one that lives keeps it, and what it holds."""

from __future__ import annotations

from tests.unit.store.core_world import MIB, ModelNode, World, segment_map

from moonpool.store.master_config import MasterConfig


def namesake(node: ModelNode) -> ModelNode:
    return ModelNode(node.name, node.host, b"another process.", [segment_map("n1-0", 4 * MIB, 64)])


def refused_join(w: World, node: ModelNode) -> str:
    params = [node.name, node.host, node.instance, "e", "v", 0, node.segments]
    return w.refused(900, "node_join", params)


def test_a_second_process_under_the_name_of_a_node_that_lives_is_refused() -> None:
    w = World(config=MasterConfig(window_bytes=MIB, rebuild_ms=0))
    node, client = w.node(), w.client()
    w.put(client, b"a")
    w.advance(5_000)
    assert refused_join(w, namesake(node)) == "NOT_READY"
    assert w.lookup(client, b"a") is not None
    assert w.closed == []
    w.leader.check()


def test_a_process_that_ended_or_is_silent_leaves_its_name_to_the_next() -> None:
    for is_cut in (True, False):
        w = World(config=MasterConfig(window_bytes=MIB, rebuild_ms=0))
        node, client = w.node(), w.client()
        w.put(client, b"a")
        if is_cut:
            w.cut(node)
        else:
            w.nodes.pop(node.connection)
            w.advance(900)
            assert refused_join(w, namesake(node)) == "NOT_READY"
            w.advance(200)
        after = namesake(node)
        w.join(after)
        assert after.node_id != node.node_id
        assert w.lookup(client, b"a") is None
        if not is_cut:
            # The one before wakes up and finds its name taken.
            assert refused_join(w, node) == "NOT_READY"
        w.leader.check()
