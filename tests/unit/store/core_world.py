"""A leader with a journal and nodes of dictionaries, for tests: everything happens when a test says so."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgpack  # type: ignore[import-untyped]

from moonpool.store.directory_report import RecordState, ReportRecord, pack_records
from moonpool.store.facts import decode_fact
from moonpool.store.leader import Leader
from moonpool.store.master_config import MasterConfig
from moonpool.store.outputs import Outputs
from moonpool.store.state import State
from moonpool.store.table_factory import TableConfig, Tables, twin_tables

MIB = 1 << 20
ANY_SLOT = 0xFFFFFFFF
ADD, RETIRE, FENCE, REHASH, RESET = 1, 2, 3, 4, 5


def segment_map(name: str, capacity: int, slots: int, generation: int = 1) -> dict[str, Any]:
    """What a node offers in `node_join`."""
    return {
        "name": name,
        "generation": generation,
        "capacity": capacity,
        "slots": slots,
        "tier": 1,
        "kind": 1,
        "location": "cpu:0",
        "data": 0x1_0000_0001,
        "directory": 0x1_0000_0002,
    }


@dataclass
class Slot:
    """What a model node's directory says of a slot."""

    object_id: int
    dead: bool
    reason: int
    offset: int
    size: int
    tenant: int
    key: bytes
    digest: bytes
    object_type: int


@dataclass
class ModelNode:
    """A node of dictionaries. It acknowledges and releases when `World.deliver` lets it."""

    name: str
    host: str
    instance: bytes
    segments: list[dict[str, Any]]
    highest: int = 0
    connection: int = 0
    node_id: int = 0
    ids: list[int] = field(default_factory=list)
    directory: dict[tuple[str, int], Slot] = field(default_factory=dict)
    applied: int = 0
    inbox: list[bytes] = field(default_factory=list)
    released: list[list[int]] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    verdicts: dict[tuple[int, int], int] = field(default_factory=dict)
    effects: list[Any] = field(default_factory=list)

    def name_of(self, segment_id: int) -> str:
        return str(self.segments[self.ids.index(segment_id)]["name"])

    def apply(self, params: bytes) -> None:
        epoch, first, effects = msgpack.unpackb(params, raw=False)
        self.highest = max(self.highest, epoch)
        for number, effect in enumerate(effects, first):
            if number == self.applied + 1:
                self.applied = number
                self.effects.append(effect)
                self._apply_one(effect)

    def _apply_one(self, effect: list[Any]) -> None:
        kind = effect[0]
        if kind == ADD:
            _, segment, slot, offset, size, tenant, object_id, key, digest, object_type, _, _ = effect
            self.directory[self.name_of(segment), slot] = Slot(
                object_id, False, 0, offset, size, tenant, key, digest, object_type
            )
        elif kind == RETIRE:
            _, segment, slot, object_id, reason = effect
            there = self.directory.get((self.name_of(segment), slot))
            if there is not None and there.object_id == object_id:
                there.dead, there.reason = True, reason
            self.released.append([segment, slot])
        elif kind == FENCE:
            self.released.append([effect[1], effect[2]])
        elif kind == REHASH:
            self.answers.append([effect[1], self.verdicts.get((effect[2], effect[3]), 0)])

    def report_pages(self, name: str) -> list[bytes]:
        records = [
            ReportRecord(
                slot,
                RecordState.DEAD if there.dead else RecordState.COMPLETE,
                there.object_type,
                there.tenant,
                there.offset,
                there.size,
                there.object_id,
                there.digest,
                there.key,
                there.reason,
            )
            for (segment, slot), there in sorted(self.directory.items())
            if segment == name
        ]
        return [pack_records(records[at : at + 2]) for at in range(0, len(records), 2)] or [b""]


class World:
    """One leader, its journal and its nodes. `auto`: the journal confirms and nodes answer by themselves."""

    def __init__(
        self,
        *,
        config: MasterConfig | None = None,
        seed: int = 1,
        epoch: int = 1,
        now_ms: int = 1_000,
        state: State | None = None,
        tables: Tables | None = None,
        make_tables: Callable[[TableConfig], Tables] = twin_tables,
    ) -> None:
        self.config = config or MasterConfig(window_bytes=MIB, rebuild_ms=0)
        self.make_tables = make_tables
        self.tables = tables or make_tables(TableConfig())
        self.seed = seed
        self.random = random.Random(seed)
        self.now_ms = now_ms
        self.leader = Leader(
            self.config, self.tables, self.random.randbytes, epoch=epoch, now_ms=now_ms, state=state
        )
        self.auto = True
        self.journal: list[bytes] = []
        self.base = self.leader.state.sequence - 1
        self.replies: dict[int, tuple[Any, Any]] = {}
        self.nodes: dict[int, ModelNode] = {}
        self.events: list[Any] = []
        self.closed: list[int] = []
        self.binds: list[Any] = []
        self.epoch_wanted = 0
        self.messages = 0
        self.connections = 100
        self.take()

    # Moving things

    def take(self) -> Outputs:
        out = self.leader.take_outputs()
        assert out.first_sequence == self.base + len(self.journal) + 1
        self.journal += out.facts
        for reply in out.replies:
            assert reply.message_id not in self.replies, "answered twice"
            self.replies[reply.message_id] = (reply.error, reply.result)
        for push in out.pushes:
            if push.connection in self.nodes:
                self.nodes[push.connection].inbox.append(push.params)
        self.events += out.events
        self.closed += out.closes
        self.binds += out.binds
        self.epoch_wanted = out.epoch_wanted or self.epoch_wanted
        return out

    def persist(self) -> None:
        self.leader.journal_durable(self.base + len(self.journal), self.now_ms)
        self.take()

    def deliver(self) -> None:
        """Every node does what it was told and acknowledges."""
        for node in list(self.nodes.values()):
            if node.inbox:
                self.ack(node)

    def ack(self, node: ModelNode) -> None:
        for params in node.inbox:
            node.apply(params)
        node.inbox.clear()
        released, node.released = node.released, []
        answers, node.answers = node.answers, []
        self.call(node.connection, "node_ack", [node.applied, self.now_ms, released, answers], settle=False)

    def settle(self) -> None:
        for _ in range(100):
            before = len(self.journal)
            self.persist()
            self.deliver()
            if before == len(self.journal) and not any(node.inbox for node in self.nodes.values()):
                return
        raise AssertionError("the leader and its nodes do not come to rest")

    def advance(self, ms: int, *, beat: bool = True) -> None:
        """Time passes in steps of a tick; nodes beat."""
        end = self.now_ms + ms
        while self.now_ms < end:
            self.now_ms = min(end, self.now_ms + 100)
            if beat:
                for node in list(self.nodes.values()):
                    self.ack(node)
            self.leader.tick(self.now_ms)
            self.take()
            if self.auto:
                self.settle()

    def send(self, connection: int, method: str, params: list[Any]) -> int:
        self.messages += 1
        self.leader.request(connection, self.messages, method, params, self.now_ms)
        self.take()
        return self.messages

    def call(self, connection: int, method: str, params: list[Any], *, settle: bool = True) -> Any:
        """The result; raises AssertionError with the error when there is one, or no answer."""
        message = self.send(connection, method, params)
        if settle and self.auto and message not in self.replies:
            self.settle()
            if message not in self.replies:
                # It waits for the word of a node that is away.
                self.advance(self.config.location_lease_ms + 100)
        assert message in self.replies, f"{method} is not answered"
        error, result = self.replies[message]
        assert error is None, error
        if settle and self.auto:
            self.settle()
        return result

    def refused(self, connection: int, method: str, params: list[Any]) -> str:
        """The name of the error."""
        message = self.send(connection, method, params)
        error, _ = self.replies[message]
        assert error is not None
        return str(error[1])

    # Who is there

    def client(self, tenant: str = "", token: str = "", instance: bytes | None = None) -> int:
        self.connections += 1
        instance = instance or self.random.randbytes(16)
        self.call(self.connections, "client_join", [instance, "c", "host-c", tenant, token])
        return self.connections

    def node(
        self, name: str = "n1", host: str = "h1", capacity: int = 4 * MIB, slots: int = 64, segments: int = 1
    ) -> ModelNode:
        maps = [segment_map(f"{name}-{at}", capacity, slots) for at in range(segments)]
        node = ModelNode(name, host, self.random.randbytes(16), maps)
        self.join(node)
        return node

    def join(self, node: ModelNode, *, report: bool = True) -> None:
        self.nodes.pop(node.connection, None)
        self.connections += 1
        node.connection = self.connections
        node.applied = 0
        node.inbox.clear()
        node.released.clear()
        self.nodes[node.connection] = node
        params = [
            node.name,
            node.host,
            node.instance,
            f"{node.name}:1",
            f"/{node.name}",
            node.highest,
            node.segments,
        ]
        message = self.send(node.connection, "node_join", params)
        self.persist()
        error, result = self.replies[message]
        assert error is None, error
        epoch, node.node_id, node.ids = result[:3]
        node.highest = max(node.highest, epoch)
        if report:
            self.report(node)

    def report(self, node: ModelNode) -> None:
        for name, segment_id in zip([each["name"] for each in node.segments], node.ids, strict=True):
            pages = node.report_pages(name)
            for at, page in enumerate(pages):
                last = at == len(pages) - 1
                self.call(node.connection, "node_report", [segment_id, at, last, page], settle=False)
        if self.auto:
            self.settle()
            self.leader.tick(self.now_ms)
            self.take()
            self.settle()

    def cut(self, node: ModelNode) -> None:
        self.nodes.pop(node.connection)
        self.leader.connection_closed(node.connection, self.now_ms)
        self.take()

    # What is done most

    def put(self, connection: int, key: bytes, size: int = 4096, **policy: Any) -> list[Any]:
        """Starts and ends a put; the reply of `put_end` for it: [code, object id]."""
        start = self.call(connection, "put_start", [[key], [size], policy or None, 0])
        code = start[4][0][0]
        if code:
            return [code, 0]
        end = self.call(connection, "put_end", [start[2], [[0, digest_of(key, size), chunks_of(size)]]])
        return list(end[1][0])

    def lookup(self, connection: int, key: bytes, lease_ms: int = 0) -> Any:
        return self.call(connection, "lookup", [[key], lease_ms])[2][0]

    def replayed(self, count: int | None = None) -> State:
        """The state that the journal's first `count` facts add up to, from their bytes."""
        assert self.base == 0, "the journal does not begin with this leader"
        state = State(self.make_tables(TableConfig()).objects)
        for data in self.journal[:count]:
            state.apply(decode_fact(data))
        return state

    def takeover(self, *, durable: int | None = None, epoch: int | None = None) -> World:
        """A new leader on the facts that were durable; nodes have not joined it yet."""
        state = self.replayed(durable)
        assert state.sequence == (len(self.journal) if durable is None else durable)
        tables = self.make_tables(TableConfig())
        restored = State.restore(state.snapshot_chunks(), tables.objects)
        assert restored.state_hash() == state.state_hash()
        after = World(
            config=self.config,
            seed=self.seed + 1,
            epoch=epoch or state.epoch + 1,
            now_ms=self.now_ms,
            state=restored,
            tables=tables,
            make_tables=self.make_tables,
        )
        after.connections = self.connections + 1000
        after.messages = self.messages + 1000
        return after


def digest_of(key: bytes, size: int) -> bytes:
    return (key * 16)[:8] + size.to_bytes(8, "little")


def chunks_of(size: int) -> bytes:
    return bytes(8 * -(-size // 65_536)) if size > 65_536 else b""
