"""The leader against dictionaries, under any order of requests, journal marks, answers and takeovers."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.store.core_world import ModelNode, World, chunks_of, digest_of, segment_map

from moonpool.native.table.stored import extent_bytes
from moonpool.store import facts
from moonpool.store.facts import decode_fact
from moonpool.store.master_config import MasterConfig
from moonpool.store.records import NodeState
from moonpool.store.state import State
from moonpool.store.table_factory import TableConfig, native_tables, twin_tables

KIB = 1024
CONFIG = MasterConfig(
    window_bytes=64 * KIB,
    rebuild_ms=0,
    put_ms=2_000,
    gone_ms=20_000,
    lease_ms_max=1_500,
    evict_batch=4,
    beat_ms=100,
)
KEYS = [bytes([97 + at]) * (1 + at % 3) for at in range(8)]
SIZES = [0, 1, 64, 100, 4_096, 5_000, 20_000, 70_000]

keys = st.sampled_from(KEYS)
sizes = st.sampled_from(SIZES)


class Oracle:
    """What facts add up to, in dictionaries."""

    def __init__(self) -> None:
        self.objects: dict[tuple[int, bytes], tuple[int, dict[int, tuple[int, int]], int]] = {}
        self.states: dict[int, int] = {}

    def apply(self, fact: Any) -> None:
        if isinstance(fact, facts.Object):
            places = {place.segment: (place.offset, place.slot) for place in fact.places}
            self.objects[fact.tenant, fact.key] = (fact.object_id, places, fact.size)
        elif isinstance(fact, facts.ObjectsGone):
            for object_id, key in fact.objects:
                if self.objects.get((fact.tenant, key), (0,))[0] == object_id:
                    del self.objects[fact.tenant, key]
        elif isinstance(fact, facts.PlaceGone):
            del self.objects[fact.tenant, fact.key][1][fact.segment_id]
        elif isinstance(fact, facts.PlaceAdded):
            self.objects[fact.tenant, fact.key][1][fact.place.segment] = fact.place[1:]
        elif isinstance(fact, facts.Segment):
            self.states[fact.segment_id] = fact.state
        elif isinstance(fact, facts.SegmentState):
            self._segment_state(fact)

    def _segment_state(self, fact: facts.SegmentState) -> None:
        self.states[fact.segment_id] = fact.state
        if fact.state == NodeState.GONE:
            del self.states[fact.segment_id]
            for name, (_, places, _) in list(self.objects.items()):
                if places.pop(fact.segment_id, None) is not None and not places:
                    del self.objects[name]

    def seen(self, key: bytes) -> int:
        """The object id that a reader is told of, or 0."""
        object_id, places, _ = self.objects.get((0, key), (0, {}, 0))
        good = (NodeState.ACTIVE, NodeState.SUSPECT, NodeState.LEAVING)
        return object_id if any(self.states.get(each) in good for each in places) else 0


class StrictNode(ModelNode):
    """Refuses what no master may tell a node."""

    def _apply_one(self, effect: list[Any]) -> None:
        if effect[0] == 1:
            _, segment, slot, offset, size, _, object_id = effect[:7]
            name = self.name_of(segment)
            there = self.directory.get((name, slot))
            assert there is None or there.dead or there.object_id == object_id, "a live slot is given again"
            for (other_name, other_slot), other in self.directory.items():
                if other_name != name or other_slot == slot or other.dead:
                    continue
                apart = (
                    offset + extent_bytes(size) <= other.offset
                    or other.offset + extent_bytes(other.size) <= offset
                )
                assert apart, "two live objects share bytes"
        super()._apply_one(effect)


class LeaderMachine(RuleBasedStateMachine):
    """Everything that can happen to a leader, one thing at a time."""

    make_tables = staticmethod(twin_tables)

    def __init__(self) -> None:
        super().__init__()
        self.oracle = Oracle()
        self.counted = 0
        self.puts: list[tuple[int, int, list[bytes], list[int], list[int]]] = []
        self.removals: list[tuple[int, int, list[tuple[int, bytes]]]] = []
        self.away: list[ModelNode] = []
        self.durable = 0

    @initialize(seed=st.integers(0, 1000), hosts=st.integers(1, 3))
    def start(self, seed: int, hosts: int) -> None:
        self.world = World(config=CONFIG, seed=seed, make_tables=self.make_tables)
        self.world.auto = False
        self.standby = State(self.make_tables(TableConfig()).objects)
        self.shuffle = random.Random(seed)
        self.known: list[ModelNode] = []
        for at in range(3):
            self._new_node(f"n{at}", f"h{at % hosts}")
        self._durable_now()
        self.client = self.world.client()

    def _new_node(self, name: str, host: str) -> None:
        maps = [segment_map(f"{name}-0", 192 * KIB, 24)]
        node = StrictNode(name, host, self.world.random.randbytes(16), maps)
        self.known.append(node)
        self.world.join(node)

    def _online(self) -> list[ModelNode]:
        return [node for node in self.known if self.world.nodes.get(node.connection) is node]

    # Requests

    @rule(chosen=st.lists(st.tuples(keys, sizes), min_size=1, max_size=4), options=st.integers(0, 7))
    def put_start(self, chosen: list[tuple[bytes, int]], options: int) -> None:
        policy = [None, {"replicas": 2}, {"replace": True}, {"replicas": 3, "replace": True}][options % 4]
        names, lengths = [each[0] for each in chosen], [each[1] for each in chosen]
        message = self.world.send(
            self.client, "put_start", [names, lengths, policy, 300 if options > 3 else 0]
        )
        self.puts.append((message, 0, names, lengths, []))

    def _ready(self) -> list[int]:
        return [at for at, put in enumerate(self.puts) if put[0] in self.world.replies]

    @rule(turn=st.integers(0, 50), only=st.booleans(), failed=st.sampled_from([0, 0, 0, 1]))
    def put_end(self, turn: int, only: bool, failed: int) -> None:
        ready = self._ready()
        if not ready:
            return
        at = ready[turn % len(ready)]
        message, _, names, lengths, _ = self.puts[at]
        error, result = self.world.replies[message]
        assert error is None
        entries = []
        for index, (code, places) in enumerate(result[4]):
            assert (code == 0) == bool(places)
            if code == 0 and not (only and index):
                entry: list[Any] = [
                    index,
                    digest_of(names[index], lengths[index]),
                    chunks_of(lengths[index]),
                ]
                entries.append([*entry, 1] if failed else entry)
        if not only or turn % 2:
            self.puts.pop(at)
        if entries:
            self.world.send(self.client, "put_end", [result[2], entries])

    @rule(turn=st.integers(0, 50))
    def put_abort(self, turn: int) -> None:
        ready = self._ready()
        if ready:
            message = self.puts.pop(ready[turn % len(ready)])[0]
            self.world.call(self.client, "put_abort", [self.world.replies[message][1][2], None], settle=False)

    @rule(chosen=st.lists(keys, min_size=1, max_size=3), refuse=st.booleans(), force=st.booleans())
    def remove(self, chosen: list[bytes], refuse: bool, force: bool) -> None:
        self._catch_up()
        before = [(self.oracle.objects.get((0, key), (0,))[0], key) for key in chosen]
        message = self.world.send(self.client, "remove", [chosen, "refuse" if refuse else "defer", force])
        self.removals.append((message, self.world.now_ms, before))

    @rule(start=st.sampled_from([b"", b"a", b"bb"]), limit=st.integers(1, 5))
    def remove_prefix(self, start: bytes, limit: int) -> None:
        self.world.send(self.client, "remove_prefix", [start, "defer", True, limit, None])

    @rule(chosen=st.lists(keys, min_size=1, max_size=4), lease_ms=st.sampled_from([0, 0, 500, 9_000]))
    def lookup(self, chosen: list[bytes], lease_ms: int) -> None:
        self._catch_up()
        found = self.world.call(self.client, "lookup", [chosen, lease_ms], settle=False)[2]
        exist = self.world.call(self.client, "exists", [chosen, lease_ms], settle=False)
        for key, row, flag in zip(chosen, found, exist, strict=True):
            assert (row[0] if row else 0) == self.oracle.seen(key)
            assert flag == (row is not None)

    @rule(chosen=st.lists(keys, min_size=1, max_size=2), pin=st.integers(0, 2))
    def pin(self, chosen: list[bytes], pin: int) -> None:
        self.world.send(self.client, "pin", [chosen, pin, 700 if pin == 1 else 0])

    @rule(key=keys, verdict=st.integers(0, 2))
    def damaged(self, key: bytes, verdict: int) -> None:
        row = self.world.call(self.client, "lookup", [[key], 0], settle=False)[2][0]
        if row is not None:
            place = row[4][0]
            for node in self._online():
                node.verdicts[place[0], place[2]] = verdict
            self.world.send(self.client, "damaged", [key, row[0], place[0], place[2]])

    # The world around

    @rule()
    def persist(self) -> None:
        """All facts are durable: a standby that read them as bytes has the leader's state."""
        self.world.persist()
        self._durable_now()

    def _durable_now(self) -> None:
        self.durable = len(self.world.journal)
        while self.standby.sequence < self.durable:
            self.standby.apply(decode_fact(self.world.journal[self.standby.sequence]))
        if self.standby.sequence == self.world.leader.state.sequence:
            assert self.standby.state_hash() == self.world.leader.state.state_hash()

    @rule(turn=st.integers(0, 5))
    def answer(self, turn: int) -> None:
        online = self._online()
        if online:
            self.world.ack(online[turn % len(online)])

    @rule(ms=st.sampled_from([20, 100, 400, 1_200, 2_500]), beat=st.booleans())
    def time(self, ms: int, beat: bool) -> None:
        self.world.advance(ms, beat=beat)
        for node in self._online():
            if node.connection in self.world.closed:
                self.world.nodes.pop(node.connection)

    @rule(turn=st.integers(0, 5))
    def cut(self, turn: int) -> None:
        online = self._online()
        if online:
            self.world.cut(online[turn % len(online)])

    @rule(turn=st.integers(0, 5), restart=st.sampled_from([False, False, False, True]))
    def come_back(self, turn: int, restart: bool) -> None:
        away = [node for node in self.known if node not in self._online()]
        if not away:
            return
        node = away[turn % len(away)]
        if restart:
            node.instance = self.world.random.randbytes(16)
            node.directory.clear()
        self.world.join(node)
        self._durable_now()

    @rule()
    def new_client(self) -> None:
        self.world.leader.connection_closed(self.client, self.world.now_ms)
        self.world.take()
        self.client = self.world.client()
        self.puts.clear()

    @precondition(lambda self: self.world.leader.state.sequence > 8)
    @rule(share=st.integers(0, 100))
    def take_over(self, share: int) -> None:
        """Another leader, from any prefix of the journal that holds what was durable."""
        whole = len(self.world.journal)
        kept = self.durable + (whole - self.durable) * share // 100
        journal = self.world.journal[:kept]
        old = self.world
        self.world = old.takeover(durable=kept, epoch=old.leader.epoch + 1)
        self.world.auto = False
        # Facts go on where the journal ended.
        self.world.journal = [*journal, *self.world.journal]
        self.world.base = 0
        self.world.now_ms = old.now_ms
        self.oracle, self.counted = Oracle(), 0
        self.durable = kept
        self.standby = State(self.make_tables(TableConfig()).objects)
        self.puts.clear()
        self.removals.clear()
        self.client = self.world.client()

    # What must hold

    def _catch_up(self) -> None:
        for data in self.world.journal[self.counted :]:
            self.oracle.apply(decode_fact(data))
        self.counted = len(self.world.journal)

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "world"):
            return
        leader = self.world.leader
        leader.check()
        self._catch_up()
        table = {
            (stored.tenant, stored.key): (stored.object_id, {p[0]: tuple(p[1:]) for p in stored.places})
            for stored in leader.state._every_object()
        }
        assert table == {name: (each[0], each[1]) for name, each in self.oracle.objects.items()}
        self._no_extent_has_two_owners()
        self._removed_is_dead()

    def _no_extent_has_two_owners(self) -> None:
        leader = self.world.leader
        owned: dict[int, list[tuple[int, int, int]]] = {}
        for stored in leader.state._every_object():
            for place in stored.places:
                owned.setdefault(place.segment, []).append((place.offset, stored.size, place.slot))
        for client in leader.core.clients:
            for put_id in leader.core.puts.of_client(client):
                put = leader.core.puts.get(put_id)
                assert put is not None
                for entry in put.entries:
                    for place in entry.places if entry.state == 0 else ():
                        owned.setdefault(place.segment, []).append((place.offset, entry.size, place.slot))
        for segment, space in leader.core.spaces.items():
            rows = owned.get(segment, [])
            rows += [(each.offset, each.size, each.slot) for each in space.quarantine.values()]
            slots = [row[2] for row in rows]
            assert len(set(slots)) == len(slots)
            rows.sort()
            for (start, size, _), (following, _, _) in pairwise(rows):
                assert start + extent_bytes(size) <= following

    def _removed_is_dead(self) -> None:
        """When a removal has been answered, no node that is here says that the object is alive."""
        for message, asked_ms, before in list(self.removals):
            if message not in self.world.replies:
                continue
            self.removals.remove((message, asked_ms, before))
            error, result = self.world.replies[message]
            if error is not None or self.world.now_ms >= asked_ms + CONFIG.location_lease_ms:
                continue
            for (object_id, key), code in zip(before, result[1], strict=True):
                if code != 0 or not object_id:
                    continue
                alive = [
                    slot
                    for node in self.known
                    for slot in node.directory.values()
                    if slot.object_id == object_id and slot.key == key and not slot.dead
                ]
                assert not alive, "a removal was answered while a node still says that the object lives"

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self._at_rest()

    def _at_rest(self) -> None:
        """When everything answers, all space is free or live, and the journal gives the same state."""
        world = self.world
        for node in list(self._online()):
            world.cut(node)
        world.auto = True
        for node in self.known:
            world.join(node)
        world.advance(30_000)
        for gauges in world.leader.gauges().values():
            assert gauges.writing == gauges.quarantined == gauges.leaving == 0
        assert world.replayed().state_hash() == world.leader.state.state_hash()
        assert world.leader.state.settled
        assert not world.leader.core.holds.ending


class NativeLeaderMachine(LeaderMachine):
    """The same on native tables."""

    make_tables = staticmethod(native_tables)


TestLeader = LeaderMachine.TestCase
TestLeader.settings = settings(stateful_step_count=40)
TestNativeLeader = NativeLeaderMachine.TestCase
TestNativeLeader.settings = settings(stateful_step_count=40)
