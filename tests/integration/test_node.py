"""A node with a real engine and a real master: objects, pins, fences, grants, masters that go away."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.integration.pool_parts import SEGMENT_BYTES, WAIT_S, Caller, open_master, open_node, until

from moonpool import AccessDenied, Engine, UsageError
from moonpool.engine.lane_connect import connect_lane
from moonpool.http_status import HttpStatusConfig
from moonpool.ids import new_instance_id
from moonpool.native.io.grants import make_grant, read_grant
from moonpool.rpc.client import RpcClient
from moonpool.rpc.errors import RpcError
from moonpool.store.directory import DEAD, HEADER_BYTES, entry_offset, read_entry, read_header, word_offset
from moonpool.store.master import Master
from moonpool.store.node import Node
from moonpool.store.node_config import NodeConfig
from moonpool.wire.transfer import Entry, GroupHeader, LaneOp, encode_group

VISITOR = Path(__file__).with_name("node_visitor.py")
PAYLOAD = bytes(range(256)) * 16


class Pool:
    """One master, one node, one client, and an engine that reaches the node by tcp lanes only."""

    def __init__(self, rules: dict[str, Any], **node: Any) -> None:
        with contextlib.ExitStack() as undo:
            self.master: Master = open_master(**rules)
            undo.callback(self.master.close)
            self.node: Node = open_node(self.master.address, **node)
            undo.callback(self.node.close)
            self.caller = Caller(self.master.address)
            undo.callback(self.caller.close)
            self.engine = undo.enter_context(Engine(transports=("tcp",)))
            self.segment = self.engine.open(self.node.address)
            (self.about,) = self.caller.segments().values()
            self.data: int = self.about["data"]
            self._undo = undo.pop_all()

    def write(self, offset: int, payload: bytes, grant: bytes | None) -> None:
        self.engine.write(self.segment, self.data, offset, payload, grants=grant)

    def put(self, key: bytes, payload: bytes = PAYLOAD) -> tuple[list[Any], int]:
        """A whole put over tcp: its place and its object id."""
        put_id, place = self.caller.start(key, len(payload))
        self.write(place[1], payload, place[3])
        code, object_id = self.caller.end(put_id, payload)
        assert code == 0
        until(lambda: self.word(place[2]) == object_id)
        return place, object_id

    def read(self, handle: int, offset: int, size: int) -> bytes:
        into = bytearray(size)
        self.engine.read(self.segment, handle, offset, into)
        return bytes(into)

    def word(self, slot: int) -> int:
        return int.from_bytes(self.read(self.about["directory"], word_offset(slot), 8), "little")

    def counter(self, name: str) -> int:
        return int(self.node.metrics()["counters"][name])

    def close(self) -> None:
        self._undo.close()


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool({})
    yield made
    made.close()


@contextlib.contextmanager
def visitor(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and the line that it said."""
    command = [sys.executable, "-P", str(VISITOR), *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)


def test_an_object_comes_and_goes(pool: Pool) -> None:
    place, object_id = pool.put(b"key", PAYLOAD * 40)
    slots = pool.about["slots"]
    directory = pool.about["directory"]
    region = next(one for one in pool.segment.regions if one.handle == directory)
    header = read_header(pool.read(directory, 0, HEADER_BYTES), region.size_bytes)
    assert (header.segment, header.slots, header.capacity) == (pool.about["id"], slots, SEGMENT_BYTES)
    assert (header.epoch, header.instance) == (1, pool.node.engine.instance)
    entry = read_entry(pool.read(directory, entry_offset(slots, place[2]), 64), header)
    assert (entry.offset, entry.size, entry.object_id) == (place[1], len(PAYLOAD) * 40, object_id)
    assert pool.read(directory, entry.log_place, entry.key_bytes) == b"key"
    assert entry.chunk_count == 3
    assert pool.read(pool.data, place[1], entry.size) == PAYLOAD * 40
    with pytest.raises(AccessDenied):
        pool.engine.write(pool.segment, directory, 0, b"mine now")
    assert pool.caller.remove(b"key") == 0
    assert pool.word(place[2]) == DEAD | object_id
    until(pool.caller.at_rest, pool.caller.gauges)


def test_lying_grants_are_refused_and_counted(pool: Pool) -> None:
    _, place = pool.caller.start(b"key", 4096)
    _, offset, _, grant = place
    start, length, deadline, tag, _ = read_grant(grant)
    assert (start, length) == (offset, 4096)
    key = bytes(16)
    cases = {
        "grants_absent": [(None, offset, 4096), (bytes(24), offset, 4096)],
        "grants_wrong": [
            (make_grant(key, pool.data, start, length, deadline, tag), offset, 4096),
            (grant[:16] + bytes(8), offset, 4096),
            (grant[:10] + (deadline + 1).to_bytes(4, "little") + grant[14:], offset, 4096),
            (grant[:5] + (1 << 20).to_bytes(5, "little") + grant[10:], offset, 8192),
        ],
        "grants_outside": [(grant, offset + 1, 4096), (grant, offset + 4096, 64), (grant, offset, 4097)],
    }
    before = pool.read(pool.data, 0, SEGMENT_BYTES)
    for counter, tries in cases.items():
        seen = pool.counter(counter)
        for shown, where, size in tries:
            with pytest.raises(AccessDenied):
                pool.write(where, b"!" * size, shown)
        assert pool.counter(counter) == seen + len(tries), counter
    assert pool.read(pool.data, 0, SEGMENT_BYTES) == before
    pool.write(offset, PAYLOAD, grant)
    pool.write(offset + 4000, b"x" * 96, grant)
    assert pool.counter("grants_accepted") == 2


def test_a_grant_is_over_with_its_deadline() -> None:
    pool = Pool({"put_ms": 200})
    try:
        put_id, place = pool.caller.start(b"key", 4096)
        pool.write(place[1], PAYLOAD, place[3])

        def refused() -> bool:
            try:
                pool.write(place[1], PAYLOAD, place[3])
            except AccessDenied:
                return True
            return False

        until(refused)
        assert pool.counter("grants_over") + pool.counter("grants_denied") >= 1
        until(pool.caller.at_rest, pool.caller.gauges)
        assert pool.caller.end(put_id, PAYLOAD)[0] in (3, 4)
        assert refused()
    finally:
        pool.close()


def test_the_grants_of_a_put_are_dead_with_its_object(pool: Pool) -> None:
    (_, offset, slot, grant), _ = pool.put(b"key")
    assert pool.caller.remove(b"key") == 0
    until(pool.caller.at_rest, pool.caller.gauges)
    with pytest.raises(AccessDenied):
        pool.write(offset, b"!" * 4096, grant)
    assert pool.counter("grants_denied") == 1
    place, _ = pool.put(b"another")
    assert (place[1], place[2]) == (offset, slot), (
        "the extent was not used again: the test proves less than it means"
    )
    with pytest.raises(AccessDenied):
        pool.write(offset, b"!" * 4096, grant)
    assert pool.read(pool.data, offset, 4096) == PAYLOAD


def test_a_killed_viewer_lets_go(pool: Pool) -> None:
    place, object_id = pool.put(b"key")
    segment, _, slot, _ = place
    with visitor("view", pool.node.view_address, segment, slot, object_id) as (process, said):
        assert said == "01"
        assert pool.caller.remove(b"key") == 0
        until(lambda: pool.node.metrics()["gauges"]["held_extents"] == 1)
        assert pool.caller.gauges()["quarantined"] == 4096
        process.send_signal(signal.SIGKILL)
        until(pool.caller.at_rest, pool.caller.gauges)
    assert pool.counter("views_dropped") == 1
    assert pool.node.metrics()["gauges"]["pins"] == 0


def test_a_child_that_has_the_socket_too_keeps_nothing(pool: Pool) -> None:
    place, object_id = pool.put(b"key")
    segment, _, slot, _ = place
    with visitor("view_and_fork", pool.node.view_address, segment, slot, object_id) as (process, said):
        answer, child = said.split()
        try:
            assert answer == "01"
            process.kill()
            process.wait(WAIT_S)
            until(lambda: pool.node.metrics()["gauges"]["pins"] == 0)
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_views_are_counted_and_refused(pool: Pool) -> None:
    place, object_id = pool.put(b"key")
    segment, _, slot, _ = place
    with RpcClient(pool.node.view_address) as client:
        ask = [[segment, slot, object_id], [segment, slot, object_id + 1], [segment + 9, slot, object_id]]
        assert client.call("view_open", [ask]) == b"\1\0\0"
        assert client.call("view_close", [[[segment, slot, object_id]] * 2]) == 1
        wrongs: list[list[Any]] = [[], [1], [[[segment, slot]]], [[[segment, slot, -1]]], [[{}]], [ask, ask]]
        for wrong in wrongs:
            with pytest.raises(RpcError, match="BAD_PARAMS"):
                client.call("view_open", wrong)
        with pytest.raises(RpcError, match="UNKNOWN_METHOD"):
            client.call("remove", [])
        assert client.call("view_open", [[[segment, slot, object_id]]]) == b"\1"


def test_garbage_at_the_view_endpoint_hurts_nobody_else(pool: Pool) -> None:
    place, object_id = pool.put(b"key")
    name = "\0" + pool.node.view_address[1:]
    with RpcClient(pool.node.view_address) as healthy:
        for garbage in (
            b"",
            b"GET / HTTP/1.0\r\n\r\n" * 8,
            bytes(64),
            b"MOONPOOL" + bytes(56),
            b"\xff" * 5000,
        ):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as rude:
                rude.settimeout(WAIT_S)
                rude.connect(name)
                with contextlib.suppress(OSError):
                    rude.sendall(garbage)
                    rude.shutdown(socket.SHUT_WR)
                    while rude.recv(4096):
                        pass
        assert healthy.call("view_open", [[[place[0], place[2], object_id]]]) == b"\1"


def wait_for_rounds(pool: Pool, count: int) -> None:
    """Until so many more times somebody was asked to settle."""
    wanted = pool.counter("settle_rounds") + count
    until(lambda: pool.counter("settle_rounds") >= wanted, pool.caller.gauges)


def test_a_stopped_writer_keeps_its_extent_until_it_settles_or_dies() -> None:
    pool = Pool({"put_ms": 100, "suspect_ms": 300, "dead_ms": 60_000}, settle_timeout_ms=50)
    try:
        for ending in (signal.SIGCONT, signal.SIGKILL):
            with visitor("write", pool.master.address, pool.node.address, "key", 4096) as (process, said):
                assert said == "0 shm"
                process.send_signal(signal.SIGSTOP)
                # The put ran out, it was asked to settle more than once, and says nothing.
                wait_for_rounds(pool, 3)
                assert pool.caller.gauges()["quarantined"] == 4096
                process.send_signal(ending)
                until(pool.caller.at_rest, pool.caller.gauges)
    finally:
        pool.close()


def test_a_write_that_trickles_is_ended() -> None:
    pool = Pool({"put_ms": 100, "suspect_ms": 300, "dead_ms": 60_000}, settle_timeout_ms=50)
    try:
        put_id, (_, offset, _, grant) = pool.caller.start(b"key", 4096)
        region = next(one for one in pool.segment.regions if one.handle == pool.data)
        entry = Entry(pool.data, offset, 4096, region.write_key, grant)
        frame = encode_group(GroupHeader(LaneOp.WRITE, 1, 1, 4096), [entry])
        config, instance = pool.engine.config, pool.node.engine.instance
        with contextlib.closing(_lane(pool.node.address, config, instance)) as lane:
            lane.sendall(frame + b"x" * 100)
            until(lambda: pool.counter("grants_accepted") == 1)
            until(lambda: pool.counter("lanes_kicked") == 1, pool.caller.gauges)
            assert lane.recv(1) == b""
        until(pool.caller.at_rest, pool.caller.gauges)
        assert pool.caller.end(put_id, PAYLOAD)[0] in (3, 4)
    finally:
        pool.close()


def _lane(endpoint: str, config: Any, target: Any) -> socket.socket:
    """A data lane by hand."""
    fd = connect_lane(endpoint, config, new_instance_id(), target, WAIT_S, lambda _fd: None)
    lane = socket.socket(fileno=fd)
    lane.settimeout(WAIT_S)
    return lane


def test_reads_go_on_while_the_master_is_away_and_it_is_told_everything_when_it_is_back(
    tmp_path: Path,
) -> None:
    address = str(tmp_path / "master")
    with contextlib.ExitStack() as undo:
        first = open_master(address)
        undo.callback(first.close)
        node = open_node(address)
        undo.callback(node.close)
        caller = Caller(address)
        undo.callback(caller.close)
        engine = undo.enter_context(Engine())
        segment = engine.open(node.address)
        (about,) = caller.segments().values()
        objects = {}
        for number in range(5):
            key = b"key %d" % number
            put_id, place = caller.start(key, 4096)
            engine.write(segment, about["data"], place[1], PAYLOAD, grants=place[3])
            objects[key] = (place, caller.end(put_id, PAYLOAD)[1])
        assert caller.remove(b"key 3") == 0
        caller.close()
        first.close()
        until(lambda: not node.is_active)
        assert node.problem() != ""
        into = bytearray(4096)
        engine.read(segment, about["data"], objects[b"key 1"][0][1], into)
        assert into == PAYLOAD
        # A new master with an empty journal: all that is known is in the node's directory.
        second = open_master(address)
        undo.callback(second.close)
        assert node.wait_active(WAIT_S), node.problem()
        later = Caller(address)
        undo.callback(later.close)
        until(lambda: later.rpc.call("exists", [sorted(objects), 0]) == b"\1\1\1\0\1")
        assert later.joined[0] > 1
        put_id, place = later.start(b"key 3", 4096)
        engine.refresh(segment)
        engine.write(segment, about["data"], place[1], PAYLOAD, grants=place[3])
        assert later.end(put_id, PAYLOAD)[0] == 0
        until(later.at_rest, later.gauges)


def test_a_node_follows_the_leader_from_address_to_address(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nobody")
    master = open_master()
    try:
        node = open_node(nowhere, master.address, http=HttpStatusConfig())
        try:
            with urllib.request.urlopen(f"http://{node.http_address}/healthz", timeout=WAIT_S) as page:
                assert page.status == 200
            with urllib.request.urlopen(f"http://{node.http_address}/metrics", timeout=WAIT_S) as page:
                text = page.read().decode()
            assert 'moonpool_node_active{node="node"} 1' in text
            assert "moonpool_node_grants_accepted_total" in text
        finally:
            node.close()
            node.close()
    finally:
        master.close()


def test_a_node_shares_its_owners_engine(pool: Pool) -> None:
    config = replace(pool.node.config, name="another")
    with Engine() as engine:
        node = Node(config, engine)
        with node:
            assert node.wait_active(WAIT_S), node.problem()
            assert node.engine is engine
            assert len(engine.regions) == 2
            with pytest.raises(UsageError, match="serves a node already"):
                Node(config, engine)
        assert engine.regions == []
        Node(config, engine).close()
        engine.allocate(4096)


def test_a_master_that_is_none_is_told_of_and_left() -> None:
    with Engine() as stranger:
        config = NodeConfig(addresses=(stranger.endpoint,), segment_bytes=SEGMENT_BYTES, retry_max_ms=50)
        unjoined = Node(config)
        with unjoined:
            until(lambda: "connected yet" not in unjoined.problem())
            assert not unjoined.wait_active(0.0)
            assert unjoined.problem() != ""


def test_another_clients_instance_is_not_asked(pool: Pool) -> None:
    """A fence asks the writer's process alone; one that never mapped anything holds nothing up."""
    stranger = Caller(pool.master.address, new_instance_id())
    try:
        stranger.start(b"gone", 4096)
    finally:
        stranger.close()
    until(pool.caller.at_rest, pool.caller.gauges)
