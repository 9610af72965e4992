"""A node before a master that misbehaves: wrong pushes, lower epochs, resets, silence. The node goes on."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.integration.pool_parts import SEGMENT_BYTES, WAIT_S, until

from moonpool.ids import new_instance_id
from moonpool.rpc.server import Closed, Request, RpcPort
from moonpool.store.node import Node
from moonpool.store.node_config import NodeConfig

KEY = b"the grant key 16"
SETTINGS = {"beat_ms": 20, "put_ms": 1_000, "put_bytes_per_ms": 1_000}


class ScriptedMaster:
    """Answers as it is told: joins with `epoch`, reports and acknowledgements always, while it `answers`."""

    def __init__(self) -> None:
        self.epoch = 5
        self.answers = True
        self.joins: list[list[Any]] = []
        self.acks: list[list[Any]] = []
        self.pushes: queue.SimpleQueue[tuple[str, list[Any]]] = queue.SimpleQueue()
        self._node = 0
        self._closing = False
        self._port = RpcPort(["127.0.0.1:0"], instance=new_instance_id())
        self.address = self._port.addresses[0]
        self._thread = threading.Thread(target=self._run)
        self._port.start()
        self._thread.start()

    def push(self, *effects: list[Any], first: int = 1, epoch: int | None = None) -> None:
        self.tell("effects", [self.epoch if epoch is None else epoch, first, list(effects)])

    def tell(self, method: str, params: list[Any]) -> None:
        self.pushes.put((method, params))
        self._port.wake()

    def close(self) -> None:
        self._closing = True
        self._port.wake()
        self._thread.join(WAIT_S)
        self._port.close()

    def _run(self) -> None:
        while not self._closing:
            for event in self._port.poll(100):
                if isinstance(event, Closed):
                    self._node = 0 if event.connection == self._node else self._node
                elif self.answers:
                    self._answer(event)
            while self._node and not self.pushes.empty():
                self._port.push(self._node, *self.pushes.get())

    def _answer(self, request: Request) -> None:
        result: list[Any] = [self.epoch]
        if request.method == "node_join":
            self.joins.append(request.params)
            ids = [70 + len(self.joins)] * len(request.params[6])
            result = [self.epoch, 1, ids, KEY, SETTINGS]
            if self._node not in (0, request.connection):
                self._port.close_connection(self._node)
            self._node = request.connection
        elif request.method == "node_ack":
            self.acks.append(request.params)
        self._port.reply(request.connection, request.message_id, result)


@pytest.fixture
def master() -> Iterator[ScriptedMaster]:
    made = ScriptedMaster()
    yield made
    made.close()


@contextlib.contextmanager
def joined(*addresses: str) -> Iterator[Node]:
    config = NodeConfig(
        addresses=addresses,
        name="node",
        segment_bytes=SEGMENT_BYTES,
        retry_max_ms=50,
        ack_timeout_ms=100,
        connect_timeout_ms=500,
    )
    with Node(config) as node:
        assert node.wait_active(WAIT_S), node.problem()
        yield node


def add(segment: int, slot: int, object_id: int) -> list[Any]:
    return [1, segment, slot, slot * 4096, 4096, 0, object_id, b"key", bytes(16), 0, b"", 0]


def objects(node: Node) -> int:
    return int(node.metrics()["gauges"]["objects"])


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("effects", []),
        ("effects", [5, 0, []]),
        ("effects", [5, 2, [[9]]]),
        ("effects", [5, 2, [[1, 71, 0, 0, 1 << 40, 0, 1, b"k", bytes(16), 0, b"", 0]]]),
        ("effects", [5, 2, [[2, 99, 0, 1, 1]]]),
        ("surprise", [1]),
    ],
)
def test_a_wrong_push_leads_to_a_new_join(master: ScriptedMaster, method: str, params: list[Any]) -> None:
    with joined(master.address) as node:
        master.push(add(71, 3, 1))
        until(lambda: objects(node) == 1)
        master.tell(method, params)
        until(lambda: len(master.joins) >= 2, node.problem)
        assert node.wait_active(WAIT_S), node.problem()
        assert objects(node) == 1
        segment = master.joins[1][6][0]
        assert (segment["generation"], segment["name"]) == (1, "node/0")


def test_effects_are_acknowledged_at_once_and_at_each_beat(master: ScriptedMaster) -> None:
    with joined(master.address) as node:
        master.push(add(71, 3, 1), [2, 71, 3, 1, 1])
        until(lambda: any(ack[0] == 2 and ack[2] == [[71, 3]] for ack in master.acks))
        seen = len(master.acks)
        until(lambda: len(master.acks) > seen + 2)
        assert master.acks[-1][2:] == [[], []]
        assert master.acks[-1][1] >= master.acks[0][1]
        assert node.is_active


def test_a_lower_epoch_is_left_for_another_master(master: ScriptedMaster) -> None:
    later = ScriptedMaster()
    later.epoch = 6
    try:
        with joined(later.address, master.address) as node:
            later.answers = False
            until(lambda: len(master.joins) >= 2, node.problem)  # asked, refused, and asked again
            assert not node.is_active
            later.answers = True
            until(lambda: node.is_active, node.problem)
            assert master.joins[0][5] == 6  # it was told of the later epoch
            later.push(add(71, 1, 1), epoch=5)
            until(lambda: node.metrics()["counters"]["effects_stale"] >= 2, node.problem)
            until(lambda: node.is_active, node.problem)
            assert objects(node) == 0
    finally:
        later.close()


def test_reset_brings_a_new_generation_and_nothing_else_of_the_push(master: ScriptedMaster) -> None:
    with joined(master.address) as node:
        master.push(add(71, 3, 1), [5, 71], add(71, 4, 2))
        until(lambda: len(master.joins) == 2, node.problem)
        assert master.joins[1][6][0]["generation"] == 2
        assert node.wait_active(WAIT_S)
        assert objects(node) == 0
        master.push(add(72, 3, 9))
        until(lambda: objects(node) == 1)


def test_a_silent_master_is_left(master: ScriptedMaster) -> None:
    other = ScriptedMaster()
    try:
        with joined(master.address, other.address) as node:
            master.answers = False
            until(lambda: len(other.joins) == 1 and node.is_active, node.problem)
            assert node.problem() == ""
            assert len(master.joins) == 1, "the silent one was not asked again"
    finally:
        other.close()


def test_two_nodes_of_one_name_do_not_keep_the_master_busy(master: ScriptedMaster) -> None:
    config = NodeConfig(
        addresses=(master.address,),
        name="node",
        segment_bytes=SEGMENT_BYTES,
        retry_first_ms=5,
        retry_max_ms=400,
    )
    with Node(config), Node(config):
        until(lambda: len(master.joins) >= 10)
        before = len(master.joins)
        time.sleep(2.0)
        assert 1 <= len(master.joins) - before <= 15
