"""Hostile bytes at the rpc: the loop, the client's connection, the codecs; others are served meanwhile."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moonpool.errors import MoonpoolError, ProtocolError
from moonpool.native.io import rpc_frames
from moonpool.native.io.rpc_client import RpcConnection
from moonpool.native.io.rpc_server import CLOSED, REQUEST, RpcServer
from moonpool.rpc.errors import RpcError
from moonpool.rpc.limits import ClientLimits, ServerLimits
from moonpool.wire.rpc import (
    RpcPush,
    RpcReply,
    RpcRequest,
    decode_body,
    encode_frame,
    pack_value,
    unpack_fault,
    unpack_value,
)

SEED = 20_261_129
ROUNDS = 400
BUFFERS_MAX = 4 << 20
NIL = pack_value(None)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.binary(max_size=30)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=20,
)


def mutated(frame: bytes, source: random.Random) -> bytes:
    """A frame with some bytes changed, dropped, doubled, or its length word made to fit."""
    data = bytearray(frame)
    for _ in range(source.randint(1, 4)):
        at = source.randrange(len(data))
        what = source.randrange(5)
        if what == 0:
            data[at] = source.randrange(256)
        elif what == 1:
            del data[at : at + source.randint(1, 6)]
        elif what == 2:
            data[at:at] = data[at : at + source.randint(1, 6)]
        elif what == 3:
            data[at] ^= 1 << source.randrange(8)
        else:
            data[at:at] = source.randbytes(source.randint(1, 9))
        data = data or bytearray(b"\0")
    if source.random() < 0.7 and len(data) >= 4:
        data[:4] = struct.pack("<I", len(data) - 4)
    return bytes(data)


def some_frame(source: random.Random) -> bytes:
    method = source.choice(["exists", "lookup", "put_start", "put_end", "node_ack", "status", "m" * 64])
    params: list[Any] = [
        ["key", b"k" * source.randint(1, 40)],
        source.choice([0, -1, 2**40]),
        {"a": [1.5, None]},
    ]
    return encode_frame(RpcRequest(source.randrange(1, 1 << 33), method, params[: source.randint(0, 3)]))


class Honest:
    """A client that must be served whatever else happens."""

    def __init__(self, server: RpcServer) -> None:
        self.server = server
        ours, self.sock = socket.socketpair()
        ours.setblocking(False)
        self.sock.settimeout(10)
        self.number = server.add(ours.detach())
        self.turns = 0

    def ask(self) -> None:
        self.turns += 1
        self.sock.sendall(encode_frame(RpcRequest(self.turns, "echo", [self.turns])))
        for _ in range(1_000):
            for event in self.server.poll(10):
                if event[0] != REQUEST:
                    continue
                assert self.server.reply(event[1], event[2], event[4]) or event[1] != self.number
                if event[1] == self.number:
                    self.server.poll(0)
                    body = self.sock.recv(1 << 16)
                    assert decode_body(body[4:]) == RpcReply(self.turns, None, [self.turns])
                    return
        raise AssertionError("the honest client was not served")


@pytest.fixture
def server() -> Iterator[RpcServer]:
    limits = ServerLimits(spin_us=0, connections_max=600, buffer_bytes_max=BUFFERS_MAX)
    made = RpcServer(limits)
    yield made
    made.close()


@pytest.fixture
def honest(server: RpcServer) -> Iterator[Honest]:
    made = Honest(server)
    with made.sock:
        yield made


def hand_over(server: RpcServer) -> socket.socket:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    server.add(ours.detach())
    return theirs


def test_mutated_frames_end_their_connection_or_come_out_whole(server: RpcServer, honest: Honest) -> None:
    source = random.Random(SEED)
    print(f"seed {SEED}")
    for turn in range(ROUNDS):
        with hand_over(server) as hostile:
            with contextlib.suppress(OSError):
                hostile.send(
                    b"".join(mutated(some_frame(source), source) for _ in range(source.randint(1, 4)))
                )
            for event in server.poll(0):
                if event[0] == REQUEST:
                    with contextlib.suppress(ProtocolError):
                        assert isinstance(unpack_value(event[4]), list)
                    server.reply(event[1], event[2], NIL)
        if turn % 20 == 0:
            honest.ask()
    honest.ask()
    counters = server.counters()
    assert counters["closed_malformed"] > ROUNDS // 10, "the mutations hit"
    assert counters["connections"] == 1
    assert counters["buffer_bytes"] <= BUFFERS_MAX


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=300), seed=st.integers(0, 2**32))
def test_random_bytes_are_survived(server: RpcServer, data: bytes, seed: int) -> None:
    cut = random.Random(seed).randint(0, len(data))
    with hand_over(server) as hostile:
        hostile.send(data[:cut] or b"\0")
        server.poll(0)
        with contextlib.suppress(OSError):
            hostile.send(data[cut:] or b"\0")
        server.poll(0)
    for _ in range(100):
        if server.connections == 0:
            return
        server.poll(10)
    raise AssertionError("the connection was not let go")


def test_a_flood_of_half_open_frames_keeps_memory_flat(server: RpcServer, honest: Honest) -> None:
    with contextlib.ExitStack() as stack:
        floods = [stack.enter_context(hand_over(server)) for _ in range(500)]
        begun = struct.pack("<I", 1 << 24) + b"\x94\x00\x01\xa4echo\x91\xc6\x00\xff\xff\x00" + bytes(100_000)
        for turn, flood in enumerate(floods):
            with contextlib.suppress(OSError):
                flood.send(begun)
            if turn % 100 == 0:
                honest.ask()
            # Small buffers are each connection's own: 64 KiB at most, whatever the sum.
            assert server.counters()["buffer_bytes"] <= BUFFERS_MAX + 500 * (64 << 10)
        honest.ask()


def test_a_flood_of_requests_that_nobody_answers_stops_at_its_sender(
    server: RpcServer, honest: Honest
) -> None:
    with hand_over(server) as flood:
        sent = taken = 0
        for _ in range(400):
            with contextlib.suppress(BlockingIOError):
                frames = b"".join(encode_frame(RpcRequest(sent + n + 1, "keep", [])) for n in range(50))
                if flood.send(frames) < len(frames):
                    break
                sent += 50
            taken += sum(event[0] == REQUEST for event in server.poll(0))
        assert taken == 1_024, "unanswered_max"
        assert sent > taken
        honest.ask()


@settings(max_examples=200, deadline=None)
@given(body=VALUES, count=st.integers(0, 4))
def test_any_value_is_a_reply_or_a_protocol_error(body: Any, count: int) -> None:
    with contextlib.suppress(MoonpoolError):
        packed = pack_value(body)
        for read in (
            rpc_frames.exists_result,
            rpc_frames.lookup_result,
            rpc_frames.put_start_result,
            rpc_frames.put_end_result,
        ):
            with contextlib.suppress(ProtocolError):
                # What is taken for a reply has as many entries as were asked for.
                assert len(read(packed, count)) == count


def test_mutated_replies_are_read_or_refused() -> None:
    source = random.Random(SEED)
    print(f"seed {SEED}")
    places = [[3, 4096, 2, bytes(24)], [4, 8192, 7, bytes(24)]]
    right = {
        rpc_frames.lookup_result: [1, 2, [None, [5, 10, bytes(16), 1, [[3, 4096, 2]]]]],
        rpc_frames.put_start_result: [1, 2, 3, 4, [[0, places], [2, []]]],
        rpc_frames.put_end_result: [1, [[0, 5], [1, 0]]],
    }
    refused = 0
    for read, value in right.items():
        packed = pack_value(value)
        assert len(read(packed, 2)) == 2
        for _ in range(ROUNDS):
            try:
                reply = read(mutated(bytes(4) + packed, source)[4:], 2)
                reply.entry(0)
                reply.entry(1)
            except ProtocolError:
                refused += 1
    assert refused > ROUNDS


def test_a_hostile_server_cannot_hang_or_break_its_client() -> None:
    source = random.Random(SEED + 1)
    print(f"seed {SEED + 1}")
    ended = 0
    for _ in range(ROUNDS // 4):
        ours, theirs = socket.socketpair()
        connection = RpcConnection(
            ours.detach(),
            ClientLimits(pushes_max=8, spin_us=0),
            peer="hostile",
            make_error=lambda told: RpcError(unpack_fault(told)),
        )
        frames = [
            encode_frame(RpcReply(1, None, {"a": [1, 2]})),
            encode_frame(RpcPush("told", [1, b"x"])),
            encode_frame(RpcReply(2, None, b"\x01")),
        ]
        hostile = b"".join(mutated(source.choice(frames), source) for _ in range(source.randint(1, 5)))
        answer = threading.Thread(target=answer_with, args=(theirs, hostile))
        answer.start()
        try:
            connection.call("m", NIL.replace(NIL, b"\x90"), 5.0)
        except MoonpoolError:
            ended += 1
        connection.close()
        answer.join(10)
        assert not answer.is_alive()
    assert ended > 0


def answer_with(sock: socket.socket, data: bytes) -> None:
    """Waits for a request, answers with these bytes, and leaves."""
    with sock, contextlib.suppress(OSError):
        sock.settimeout(5)
        sock.recv(1 << 16)
        sock.sendall(data)


def test_closed_events_and_connections_balance(server: RpcServer) -> None:
    source = random.Random(SEED + 2)
    print(f"seed {SEED + 2}")
    open_now: dict[int, socket.socket] = {}
    closed: list[int] = []
    for _ in range(ROUNDS):
        what = source.randrange(4)
        if what == 0 or not open_now:
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            theirs.setblocking(False)
            open_now[server.add(ours.detach())] = theirs
        number = source.choice(list(open_now))
        with contextlib.suppress(OSError):
            if what == 1:
                open_now[number].send(mutated(some_frame(source), source))
            elif what == 2:
                open_now[number].send(some_frame(source))
            elif what == 3:
                server.push(number, pack_value([2, "told", [bytes(source.randint(0, 60_000))]]))
        if source.random() < 0.2:
            open_now[number].close()
        if source.random() < 0.1:
            server.close_connection(number)
        for event in server.poll(0):
            if event[0] == CLOSED:
                closed.append(event[1])
                open_now.pop(event[1]).close()
    for sock in open_now.values():
        sock.close()
    for _ in range(1_000):
        closed += [event[1] for event in server.poll(10) if event[0] == CLOSED]
        if server.connections == 0:
            break
    assert server.connections == 0
    assert len(closed) == len(set(closed)) == server.counters()["accepted"]
    assert server.counters()["buffer_bytes"] == 0
