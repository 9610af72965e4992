"""The native core against the leader's Python methods: the same requests, answers, facts, effects and tables.

Two worlds run side by side from one seed. One serves everything in Python; in the other exists, lookup,
put_start and put_end go to the native core first, as the rpc loop would have it, and to Python where it
declines.
"""

from __future__ import annotations

import random
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.store.core_world import ModelNode, World, chunks_of, digest_of

from moonpool.store.leader_hot import HotPath
from moonpool.store.master_config import MasterConfig
from moonpool.store.table_factory import TableConfig, Tables, native_tables

KIB = 1024
METHODS = {"exists": 0, "lookup": 1, "put_start": 2, "put_end": 3}
KEYS = [bytes([97 + at]) * (1 + at % 40) for at in range(24)]
SIZES = [0, 1, 64, 100, 4_096, 5_000, 20_000, 70_000, 200_000, 1 << 41]


def tables_of(policy: str, puts_max: int) -> Any:
    def make(config: TableConfig) -> Tables:
        return native_tables(
            TableConfig(policy=policy, open_puts_max=puts_max, open_entries_max=10 * puts_max, hash_seed=5)
        )

    return make


def config_of(durability: str = "async", events: bool = True) -> MasterConfig:
    return MasterConfig(
        window_bytes=64 * KIB,
        rebuild_ms=0,
        put_ms=2_000,
        lease_ms_max=1_500,
        evict_batch=4,
        beat_ms=100,
        batch_keys_max=64,
        durability=durability,
        events=events,
    )


class ColdWorld(World):
    """Everything is served in Python. A node whose connection the leader has closed says nothing."""

    def ack(self, node: ModelNode) -> None:
        if node.connection not in self.closed:
            super().ack(node)
        node.inbox.clear()


class HotWorld(ColdWorld):
    """Its hot methods are served by the native core where that will."""

    answered = 0

    @property
    def hot(self) -> HotPath:
        assert self.leader.hot is not None
        return self.leader.hot

    def send(self, connection: int, method: str, params: list[Any]) -> int:
        session = self.leader.core.sessions.get(connection)
        if method not in METHODS or session is None or session.client is None:
            return super().send(connection, method, params)
        client = session.client
        packed = msgpack.packb(params, use_bin_type=True)
        result = self.hot.native.call(
            METHODS[method], client.client_id, client.tenant_id, self.now_ms, packed
        )
        if result is None:
            return super().send(connection, method, params)
        self.messages += 1
        self.answered += 1
        self.replies[self.messages] = (None, msgpack.unpackb(result, raw=False))
        self.take()
        return self.messages


def plain(value: Any) -> Any:
    """As it looks after the wire."""
    return msgpack.unpackb(msgpack.packb(value, use_bin_type=True), raw=False, strict_map_key=False)


class Pair:
    """Two worlds that must not differ."""

    def __init__(self, policy: str, config: MasterConfig, puts_max: int) -> None:
        make = tables_of(policy, puts_max)
        self.cold = ColdWorld(config=config, make_tables=make)
        self.hot = HotWorld(config=config, make_tables=make)
        self.worlds = (self.cold, self.hot)
        for world in self.worlds:
            world.auto = False

    def do(self, name: str, *arguments: Any) -> None:
        for world in self.worlds:
            getattr(world, name)(*arguments)

    def send(self, connection: int, method: str, params: list[Any]) -> Any:
        """The answer of both, or None while it is held."""
        message = [world.send(connection, method, params) for world in self.worlds]
        assert message[0] == message[1]
        return plain(self.cold.replies.get(message[0]))

    def check(self) -> None:
        cold, hot = self.cold, self.hot
        assert plain(cold.replies) == plain(hot.replies)
        assert cold.journal == hot.journal
        assert cold.leader.state.sequence == hot.leader.state.sequence
        assert cold.leader.state.meta() == hot.leader.state.meta()
        assert cold.tables.objects.dump() == hot.tables.objects.dump()
        for index in cold.tables.objects.scan(-1, 1_000):
            assert cold.tables.objects.lease_until(index) == hot.tables.objects.lease_until(index)
        assert [n.inbox for n in cold.nodes.values()] == [n.inbox for n in hot.nodes.values()]
        assert [n.effects for n in cold.nodes.values()] == [n.effects for n in hot.nodes.values()]
        for name in ("epoch", "last_fact", "last_object", "last_put", "place_cursor"):
            assert getattr(cold.leader.core.counters, name) == getattr(hot.leader.core.counters, name)
        for segment, space in cold.leader.core.spaces.items():
            other = hot.leader.core.spaces[segment]
            assert space.extents.free_bytes() == other.extents.free_bytes()
            assert space.slots.free_count() == other.slots.free_count()
        assert sorted(map(repr, cold.events)) == sorted(map(repr, hot.events))
        for world in self.worlds:
            world.leader.check()


class HotMachine(RuleBasedStateMachine):
    """Requests in any order, with time, deaths, eviction and slow journals between them."""

    @initialize(
        policy=st.sampled_from(["lru", "s3fifo"]),
        durability=st.sampled_from(["async", "async", "sync"]),
        quota=st.booleans(),
    )
    def begin(self, policy: str, durability: str, quota: bool) -> None:
        self.pair = Pair(policy, config_of(durability), 6)
        for world in self.pair.worlds:
            world.auto = True
            for at in range(3):
                world.node(f"n{at}", f"h{at % 2}", capacity=256 * KIB, slots=40)
            self.clients = [world.client(), world.client()]
            if quota:
                world.call(self.clients[0], "tenant_set", ["default", 300 * KIB, b""])
            world.auto = False
        self.puts: list[tuple[int, int, list[bytes], list[int], list[int]]] = []
        self.nodes = list(range(3))
        self.away: dict[int, tuple[ModelNode, ModelNode]] = {}

    def node(self, at: int) -> tuple[ModelNode, ModelNode]:
        cold, hot = (list(world.nodes.values())[at] for world in self.pair.worlds)
        return cold, hot

    @rule(
        client=st.integers(0, 1),
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=8),
        data=st.data(),
        policy=st.sampled_from([None, None, None, {}, {"replicas": 2}, {"replace": True}, {"pin": 2}]),
        wait_ms=st.sampled_from([0, 0, 50]),
    )
    def put_start(self, client: int, keys: list[bytes], data: Any, policy: Any, wait_ms: int) -> None:
        sizes = data.draw(st.lists(st.sampled_from(SIZES), min_size=len(keys), max_size=len(keys)))
        answer = self.pair.send(self.clients[client], "put_start", [keys, sizes, policy, wait_ms])
        if answer is not None and answer[0] is None and answer[1][2]:
            open_keys = [at for at, row in enumerate(answer[1][4]) if row[0] == 0]
            self.puts.append((client, answer[1][2], keys, sizes, open_keys))

    @precondition(lambda self: self.puts)
    @rule(
        data=st.data(), wrong=st.sampled_from(["", "", "", "", "digest", "index", "mask", "client", "twice"])
    )
    def put_end(self, data: Any, wrong: str) -> None:
        client, put_id, keys, sizes, open_keys = data.draw(st.sampled_from(self.puts))
        chosen = data.draw(st.lists(st.sampled_from(open_keys), unique=True, max_size=8))
        rows: list[list[Any]] = [[at, digest_of(keys[at], sizes[at]), chunks_of(sizes[at])] for at in chosen]
        if wrong == "digest" and rows:
            rows[0][1] = b"short"
        elif wrong == "index":
            rows.append([99, bytes(16), b""])
        elif wrong == "mask" and rows:
            rows[0].append(data.draw(st.integers(0, 1)))
        elif wrong == "twice" and rows:
            rows.append(rows[0])
        sender = 1 - client if wrong == "client" else client
        self.pair.send(self.clients[sender], "put_end", [put_id, rows])

    @rule(
        client=st.integers(0, 1),
        keys=st.lists(st.sampled_from([*KEYS, "a", "text", "é"]), max_size=8),
        lease_ms=st.sampled_from([0, 100, 10_000]),
        method=st.sampled_from(["exists", "lookup"]),
    )
    def read(self, client: int, keys: list[Any], lease_ms: int, method: str) -> None:
        self.pair.send(self.clients[client], method, [keys, lease_ms])

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4), force=st.booleans())
    def remove(self, keys: list[bytes], force: bool) -> None:
        self.pair.send(self.clients[0], "remove", [keys, "defer", force])

    @rule(
        params=st.sampled_from([[], [[b"k"]], [[b""], 0], [[b"k"], -1], [[1], 0], [None, 0], [[b"k"], 1.5]])
    )
    def read_wrongly(self, params: list[Any]) -> None:
        for method in METHODS:
            self.pair.send(self.clients[0], method, params)

    @rule()
    def journal_and_nodes(self) -> None:
        self.pair.do("settle")

    @rule()
    def journal_only(self) -> None:
        self.pair.do("persist")

    @rule(away=st.booleans())
    def journal_state(self, away: bool) -> None:
        for world in self.pair.worlds:
            if away:
                world.leader.journal_unavailable(world.now_ms)
                world.take()

    @rule(ms=st.sampled_from([100, 300, 1_000]), beat=st.booleans())
    def time_passes(self, ms: int, beat: bool) -> None:
        for world in self.pair.worlds:
            world.advance(ms, beat=beat)

    @precondition(lambda self: len(self.pair.cold.nodes) > 1)
    @rule(at=st.integers(0, 1))
    def node_leaves(self, at: int) -> None:
        pair = self.node(at)
        self.away[len(self.away)] = pair
        for world, node in zip(self.pair.worlds, pair, strict=True):
            world.cut(node)

    def silenced(self) -> list[int]:
        """Which nodes had their connection closed by the leader."""
        cold = self.pair.cold
        return [at for at, each in enumerate(cold.nodes.values()) if each.connection in cold.closed]

    @precondition(lambda self: self.away or self.silenced())
    @rule()
    def node_returns(self) -> None:
        pair = self.away.popitem()[1] if self.away else self.node(self.silenced()[0])
        for world, node in zip(self.pair.worlds, pair, strict=True):
            world.join(node)

    @invariant()
    def no_difference(self) -> None:
        if hasattr(self, "pair"):
            self.pair.check()


HotMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestHot = HotMachine.TestCase


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_long_random_runs_do_not_differ(policy: str) -> None:
    seed = 11
    source = random.Random(seed)
    pair = Pair(policy, config_of(events=False), 400)
    for world in pair.worlds:
        world.auto = True
        for at in range(3):
            world.node(f"n{at}", f"h{at}", capacity=2048 * KIB, slots=400)
        connection = world.client()
        world.auto = False
    for step in range(300):
        keys = [
            b"%d" % source.randrange(400) * source.randrange(1, 5) for _ in range(source.randrange(1, 40))
        ]
        sizes = [source.choice([100, 4_096, 9_000, 66_000]) for _ in keys]
        answer = pair.send(connection, "put_start", [keys, sizes, None, 0])
        if answer is None:  # it waits for a window
            pair.do("settle")
            continue
        if answer[0] is not None:  # too many puts are open: let their deadlines pass
            pair.do("advance", 3_000)
            continue
        rows = [
            [at, digest_of(keys[at], sizes[at]), chunks_of(sizes[at])]
            for at, row in enumerate(answer[1][4])
            if row[0] == 0 and source.random() < 0.95
        ]
        if answer[1][2]:
            pair.send(connection, "put_end", [answer[1][2], rows])
        pair.send(connection, "lookup", [keys, source.choice([0, 200])])
        pair.send(connection, "exists", [keys, source.choice([0, 200])])
        if step % 3 == 0:
            pair.do("settle")
            pair.do("advance", 100)
        if step % 20 == 0:
            pair.check()
    pair.check()
    replayed = pair.hot.replayed()
    assert replayed.state_hash() == pair.hot.leader.state.state_hash()
    print(f"seed {seed}: {pair.hot.answered} of 1200 requests were answered natively")
    assert pair.hot.answered > 700
