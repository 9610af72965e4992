"""The server's loop over socket pairs: what it serves, hands out, and does when a bound is reached."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from moonpool.errors import InternalError, LimitExceeded, ResourceError, UsageError
from moonpool.native.io.rpc_server import CLOSED, HOT_NAMES, REQUEST, RpcServer
from moonpool.rpc.limits import ServerLimits
from moonpool.wire.rpc import (
    FrameSplitter,
    RpcPush,
    RpcReply,
    RpcRequest,
    decode_body,
    encode_frame,
    pack_fault,
    pack_value,
    unpack_fault,
)

KIB = 1 << 10
POLLS_MAX = 2_000
NIL = pack_value(None)


class Peer:
    """The other end of a connection: blocking, with a bound on every wait."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._splitter = FrameSplitter()
        self._messages: list[Any] = []

    def send(self, *messages: Any) -> None:
        self.sock.sendall(b"".join(encode_frame(message) for message in messages))

    def ready(self) -> bool:
        return bool(select.select([self.sock], [], [], 0)[0])

    def messages(self) -> list[Any]:
        """All that has come so far."""
        while self.ready():
            data = self.sock.recv(1 << 20)
            if not data:
                break
            self._messages += [decode_body(body) for body in self._splitter.feed(data)]
        taken, self._messages = self._messages, []
        return taken


class Loop:
    """A server and its peers; polls in the test's own thread."""

    def __init__(self, hot: Any = None, **limits: int) -> None:
        self.server = RpcServer(ServerLimits(**{"spin_us": 0, **limits}), hot=hot, methods=("echo",))
        self.peers: dict[int, Peer] = {}

    def connect(self, client: int = 0) -> tuple[int, Peer]:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.settimeout(10)
        number = self.server.add(ours.detach(), "a pair")
        peer = self.peers[number] = Peer(theirs)
        if client:
            assert self.server.bind(number, client, 5)
        return number, peer

    def events(self, count: int) -> list[tuple[Any, ...]]:
        """Polls until so many events came."""
        found: list[tuple[Any, ...]] = []
        for _ in range(POLLS_MAX):
            found += self.server.poll(10)
            if len(found) >= count:
                return found
        raise AssertionError(f"{found} and no more")

    def answers(self, peer: Peer, count: int) -> list[Any]:
        """Polls until the peer has so many messages."""
        found: list[Any] = []
        for _ in range(POLLS_MAX):
            assert self.server.poll(1) == []
            found += peer.messages()
            if len(found) >= count:
                return found
        raise AssertionError(f"{found} and no more")

    def close(self) -> None:
        self.server.close()
        for peer in self.peers.values():
            peer.sock.close()


@pytest.fixture
def loops() -> Iterator[Any]:
    made: list[Loop] = []

    def make(hot: Any = None, **limits: int) -> Loop:
        made.append(Loop(hot, **limits))
        return made[-1]

    yield make
    for loop in made:
        loop.close()


def call(message_id: int, method: str = "echo", *params: Any) -> RpcRequest:
    return RpcRequest(message_id, method, list(params))


def test_cold_requests_come_out_in_order_and_answers_go_in(loops: Any) -> None:
    loop = loops()
    number, peer = loop.connect()
    peer.send(call(1, "first", b"a"), call(2, "second", {"x": 1}))
    events = loop.events(2)
    assert [event[:4] for event in events] == [
        (REQUEST, number, 1, "first"),
        (REQUEST, number, 2, "second"),
    ]
    assert [msgpack.unpackb(event[4]) for event in events] == [[b"a"], [{"x": 1}]]
    # In another order, each to its id; an error beside a result.
    assert loop.server.reply(number, 2, pack_value([1, 2]))
    fault = pack_fault(unpack_fault(msgpack.packb([113, "NOT_READY", "later"])))
    assert loop.server.reply(number, 1, NIL, fault)
    assert loop.answers(peer, 2) == [
        RpcReply(2, None, [1, 2]),
        RpcReply(1, unpack_fault(fault)),
    ]
    assert not loop.server.reply(number, 1, NIL), "answered already"
    assert loop.server.counters()["unanswered"] == 0


def test_a_push_goes_to_one_connection(loops: Any) -> None:
    loop = loops()
    number, peer = loop.connect()
    _, other = loop.connect()
    assert loop.server.push(number, pack_value([2, "effects", [1, [b"x"]]]))
    assert loop.answers(peer, 1) == [RpcPush("effects", [1, [b"x"]])]
    assert other.messages() == []


def test_hot_methods_are_answered_without_python(loops: Any, hot: Any) -> None:
    loop = loops(hot)
    _, peer = loop.connect(client=3)
    loop.server.set_clock(1_000_000)
    before_ms = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000 + 1_000_000
    peer.send(call(1, "exists", ["a", b"-b", "c"], 0), call(2, "lookup", ["key", "-"], 0))
    replies = loop.answers(peer, 2)
    assert replies[0] == RpcReply(1, None, b"\x01\x00\x01")
    assert replies[1].result == [7, 9, [[7 << 40 | 1, 3, b"k" * 16, 1, [[3, 0, 0]]], None]]
    now_ms, client, tenant = hot.last()
    assert before_ms <= now_ms <= before_ms + 60_000
    assert (client, tenant) == (3, 5)
    assert loop.server.counters()["hot_answered"] == 2
    assert set(loop.server.latencies()) == {"exists", "lookup"}


def test_what_a_core_leaves_goes_to_python_or_is_refused(loops: Any, hot: Any) -> None:
    loop = loops(hot)
    number, peer = loop.connect(client=3)
    peer.send(call(1, "exists", ["cold"], 0))
    assert loop.events(1)[0][:4] == (REQUEST, number, 1, "exists")
    peer.send(call(2, "exists", "no list", 0), call(3, "lookup", ["full"], 0))
    replies = loop.answers(peer, 2)
    assert [(reply.message_id, reply.error.code, reply.error.name) for reply in replies] == [
        (2, 65, "BAD_PARAMS"),
        (3, 67, "OVERLOADED"),
    ]
    assert loop.server.counters()["bad_params"] == 1


@pytest.mark.parametrize("method", HOT_NAMES)
def test_unbound_connections_and_leaders_without_a_lease_have_no_hot_methods(
    loops: Any, hot: Any, method: str
) -> None:
    loop = loops(hot)
    number, peer = loop.connect()
    peer.send(call(1, method, ["a"], 0))
    assert loop.events(1)[0][:4] == (REQUEST, number, 1, method)
    loop.server.bind(number, 3, 0)
    loop.server.set_hot_until(0)
    peer.send(call(2, method, ["a"], 0))
    assert loop.events(1)[0][:4] == (REQUEST, number, 2, method)
    loop.server.set_hot_until(1 << 62)
    loop.server.set_clock(0)
    peer.send(call(3, method, ["a"], 0))
    assert loop.answers(peer, 1)[0].message_id == 3


def test_hot_answers_that_are_unsent_when_the_lease_ends_never_leave(loops: Any, hot: Any) -> None:
    loop = loops(hot)
    number, peer = loop.connect(client=1)
    asked = 0
    while loop.server.counters()["buffer_bytes"] < 1 << 20:
        asked += 1
        peer.send(call(asked, "exists", ["k"] * 4_000, 0))
        loop.server.poll(0)
        assert asked < 2_000
    loop.server.set_hot_until(0)
    came = len(peer.messages())
    assert loop.events(1) == [(CLOSED, number, "lease_over")]
    assert came + len(peer.messages()) < asked


def test_a_change_by_a_hot_method_ends_the_poll(loops: Any, hot: Any) -> None:
    loop = loops(hot, linger_us=0)
    _, peer = loop.connect(client=1)
    peer.send(call(1, "put_end", 1, []))
    began = time.monotonic()
    assert loop.server.poll(60_000) == []
    assert time.monotonic() - began < 30, "it came back for the change, not at the timeout"
    assert peer.messages() == [RpcReply(1, None, [7])]


def test_many_requests_in_one_read_and_one_byte_at_a_time(loops: Any, hot: Any) -> None:
    loop = loops(hot)
    _, peer = loop.connect(client=1)
    frames = b"".join(encode_frame(call(n, "exists", ["k" * 26], 0)) for n in range(1, 301))
    peer.sock.sendall(frames)
    assert [reply.message_id for reply in loop.answers(peer, 300)] == list(range(1, 301))
    for byte in encode_frame(call(301, "exists", ["a"], 0)):
        peer.sock.sendall(bytes([byte]))
        loop.server.poll(0)
    assert loop.answers(peer, 1) == [RpcReply(301, None, b"\x01")]


def test_frames_of_every_size_up_to_the_bound(loops: Any) -> None:
    loop = loops(frame_bytes_max=1 << 20)
    number, peer = loop.connect()
    for message_id, size in enumerate((1, 8_100, 8_192, 16_300, 65_536, 300_000, (1 << 20) - 64), start=1):
        payload = os.urandom(size)
        frame = encode_frame(call(message_id, "echo", payload))
        thread = threading.Thread(target=peer.sock.sendall, args=(frame,))
        thread.start()
        event = loop.events(1)[0]
        thread.join(10)
        assert event[2:4] == (message_id, "echo")
        assert event[4] == pack_value([payload])
        assert loop.server.reply(number, message_id, pack_value(payload))
        assert loop.answers(peer, 1) == [RpcReply(message_id, None, payload)]
    assert loop.server.counters()["buffer_bytes"] <= 4 * 256 * KIB, "buffers shrink again"


def body_of(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value)
    return struct.pack("<I", len(packed)) + packed


WRONG_FRAMES = {
    "no MessagePack": (struct.pack("<I", 3) + b"\xc1\xc1\xc1", "malformed"),
    "a reply": (body_of([1, 1, None, None]), "malformed"),
    "a push": (body_of([2, "push", []]), "malformed"),
    "params are no list": (body_of([0, 1, "m", {}]), "malformed"),
    "bytes behind the message": (struct.pack("<I", 7) + b"\x94\x00\x01\xa1m\x90\x00", "malformed"),
    "too deep": (struct.pack("<I", 44) + b"\x94\x00\x01\xa1m" + b"\x91" * 38 + b"\x00", "malformed"),
    "an extension": (body_of([0, 1, "m", [msgpack.ExtType(1, b"x")]]), "malformed"),
    "a text beyond the frame": (struct.pack("<I", 8) + b"\x94\x00\x01\xa1m\x91\xd9\xff", "malformed"),
    "an array beyond the frame": (
        struct.pack("<I", 10) + b"\x94\x00\x01\xa1m\xdd\xff\xff\xff\xff",
        "malformed",
    ),
    "an empty frame": (bytes(4), "malformed"),
    "too large": (struct.pack("<I", (1 << 24) + 1), "frame_too_large"),
}


@pytest.mark.parametrize("name", WRONG_FRAMES)
def test_a_wrong_frame_ends_its_connection_alone(loops: Any, name: str) -> None:
    loop = loops()
    number, peer = loop.connect()
    _, other = loop.connect()
    frame, reason = WRONG_FRAMES[name]
    peer.sock.sendall(frame)
    assert loop.events(1) == [(CLOSED, number, reason)]
    assert loop.server.counters()[f"closed_{reason}"] == 1
    assert peer.sock.recv(1) == b""
    other.send(call(1))
    assert loop.events(1)[0][0] == REQUEST


def test_one_id_twice_is_an_end(loops: Any) -> None:
    loop = loops()
    number, peer = loop.connect()
    peer.send(call(1), call(1))
    events = loop.events(2)
    assert events[0][:3] == (REQUEST, number, 1)
    assert events[1] == (CLOSED, number, "malformed")


def test_a_peer_that_leaves_is_told_of_once_and_its_answers_go_nowhere(loops: Any) -> None:
    loop = loops()
    number, peer = loop.connect()
    peer.send(call(1))
    peer.sock.close()
    events = loop.events(2)
    assert events[0][:3] == (REQUEST, number, 1)
    assert events[1:] == [(CLOSED, number, "peer_closed")]
    assert not loop.server.reply(number, 1, NIL)
    assert not loop.server.push(number, NIL)
    assert not loop.server.bind(number, 1, 0)
    assert not loop.server.close_connection(number)
    assert loop.server.label(number) == ""
    # Its place is given again, its number never.
    following, _ = loop.connect()
    assert following != number
    assert not loop.server.reply(number, 1, NIL)


def test_a_connection_closed_here_first_gets_what_it_was_sent(loops: Any) -> None:
    loop = loops()
    number, peer = loop.connect()
    peer.send(call(1))
    loop.events(1)
    loop.server.reply(number, 1, pack_value("bye"))
    assert loop.server.close_connection(number)
    assert not loop.server.reply(number, 2, NIL)
    assert loop.events(1) == [(CLOSED, number, "closed_here")]
    assert peer.messages() == [RpcReply(1, None, "bye")]
    assert peer.sock.recv(1) == b""


def test_too_many_unanswered_requests_hold_the_sender_back(loops: Any) -> None:
    loop = loops(unanswered_max=4)
    number, peer = loop.connect()
    peer.send(*[call(n) for n in range(1, 11)])
    assert [event[2] for event in loop.events(4)] == [1, 2, 3, 4]
    assert loop.server.poll(0) == []
    for n in range(1, 5):
        loop.server.reply(number, n, NIL)
    assert [event[2] for event in loop.events(4)] == [5, 6, 7, 8]
    # One answer lets one more in.
    loop.server.reply(number, 5, NIL)
    assert [event[2] for event in loop.events(1)] == [9]


def test_one_poll_hands_out_a_bounded_number_of_requests(loops: Any) -> None:
    loop = loops(events_max=3)
    _, peer = loop.connect()
    peer.send(*[call(n) for n in range(1, 9)])
    assert [len(loop.server.poll(1_000)) for _ in range(3)] == [3, 3, 2]


def test_connections_take_turns(loops: Any, hot: Any) -> None:
    """One that brought thousands of requests does not keep another waiting for them all."""
    loop = loops(hot)
    _, busy = loop.connect(client=1)
    _, quiet = loop.connect(client=2)
    busy.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    busy.send(*[call(n, "exists", ["k"], 0) for n in range(1, 3_001)])
    quiet.send(call(1, "exists", ["k"], 0))
    loop.server.poll(0)
    assert quiet.messages() == [RpcReply(1, None, b"\x01")]
    assert len(busy.messages()) < 3_000


def test_a_peer_that_does_not_read_is_not_read_and_then_closed(loops: Any, hot: Any) -> None:
    loop = loops(hot, outbound_bytes_max=64 * KIB, stall_ms=150)
    number, peer = loop.connect(client=1)
    peer.sock.setblocking(False)
    frame = encode_frame(call(1, "exists", ["k"] * 20_000, 0))
    sent = 0
    events: list[Any] = []
    for _ in range(POLLS_MAX):
        try:
            sent += peer.sock.send(frame)
        except (BlockingIOError, BrokenPipeError):
            events = loop.server.poll(5)
        else:
            events = loop.server.poll(0)
        if events:
            break
        assert loop.server.counters()["buffer_bytes"] < 2 << 20, "memory stays flat"
    assert events == [(CLOSED, number, "stalled")]
    assert loop.server.counters()["closed_stalled"] == 1


def test_pushes_to_a_peer_that_does_not_read_end_it_at_the_bound(loops: Any) -> None:
    loop = loops(outbound_bytes_max=64 * KIB, frame_bytes_max=64 * KIB)
    number, _ = loop.connect()
    push = pack_value([2, "effects", [bytes(60 * KIB)]])
    sent = 0
    while loop.server.push(number, push):
        loop.server.poll(0)
        sent += 1
        assert sent < 1_000
    assert loop.events(1) == [(CLOSED, number, "overflow")]


def test_a_frame_that_comes_too_slowly_ends_its_connection(loops: Any) -> None:
    loop = loops(frame_ms=150)
    number, peer = loop.connect()
    _, patient = loop.connect()
    peer.sock.sendall(encode_frame(call(1))[:-1])
    assert loop.events(1) == [(CLOSED, number, "slow_frame")]
    # Silence between frames is no fault.
    patient.send(call(1))
    assert loop.events(1)[0][0] == REQUEST


def test_buffers_together_are_bounded(loops: Any) -> None:
    loop = loops(buffer_bytes_max=1 << 20)
    peers = [loop.connect() for _ in range(6)]
    begun = encode_frame(call(1, "echo", bytes(600 * KIB)))[:-1]
    threads = [threading.Thread(target=send_until_closed, args=(peer.sock, begun)) for _, peer in peers]
    for thread in threads:
        thread.start()
    events = loop.events(5)
    for thread in threads:
        thread.join(10)
    assert {event[2] for event in events} == {"overloaded"}
    assert loop.server.counters()["buffer_bytes"] <= (1 << 20) + 6 * 512 * KIB


def send_until_closed(sock: socket.socket, data: bytes) -> None:
    try:
        sock.sendall(data)
    except OSError:
        return


def test_connections_are_bounded_and_places_come_back(loops: Any) -> None:
    loop = loops(connections_max=2)
    (number, peer), _ = loop.connect(), loop.connect()
    assert not loop.server.has_room
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(LimitExceeded):
        loop.server.add(ours.fileno())
    peer.sock.close()
    assert loop.events(1) == [(CLOSED, number, "peer_closed")]
    assert loop.server.has_room
    loop.connect()
    assert loop.server.connections == 2


def test_a_descriptor_that_cannot_be_watched_stays_the_callers(loops: Any, tmp_path: Any) -> None:
    loop = loops()
    with (tmp_path / "file").open("w") as file:
        with pytest.raises(ResourceError):
            loop.server.add(file.fileno())
        file.write("still open")
    assert loop.server.connections == 0


def test_only_add_and_wake_may_be_called_while_the_loop_runs(loops: Any) -> None:
    loop = loops()
    number, _ = loop.connect()
    running = threading.Thread(target=loop.server.poll, args=(60_000,))
    running.start()
    wrong = 0
    for _ in range(10_000):
        try:
            loop.server.set_clock(0)
        except InternalError:
            wrong += 1
            break
        time.sleep(0)
    for blocked in (
        lambda: loop.server.reply(number, 1, NIL),
        lambda: loop.server.push(number, NIL),
        lambda: loop.server.bind(number, 1, 1),
        lambda: loop.server.poll(0),
        loop.server.close,
    ):
        with pytest.raises(InternalError):
            blocked()
    loop.connect()
    loop.server.wake()
    running.join(10)
    assert not running.is_alive()
    assert wrong == 1
    assert loop.server.connections == 2


def test_a_closed_server_says_so(loops: Any) -> None:
    loop = loops()
    number, peer = loop.connect()
    loop.server.close()
    loop.server.close()
    assert peer.sock.recv(1) == b""
    for refused in (lambda: loop.server.poll(0), lambda: loop.server.reply(number, 1, NIL)):
        with pytest.raises(UsageError):
            refused()
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(UsageError):
        loop.server.add(ours.fileno())
    loop.server.wake()


def test_replies_and_pushes_above_a_frame_are_refused_and_the_request_stays_open(loops: Any) -> None:
    loop = loops(frame_bytes_max=1 * KIB)
    number, peer = loop.connect()
    peer.send(call(1))
    loop.events(1)
    with pytest.raises(LimitExceeded):
        loop.server.reply(number, 1, pack_value(bytes(2 * KIB)))
    with pytest.raises(LimitExceeded):
        loop.server.push(number, bytes(2 * KIB))
    assert loop.server.reply(number, 1, pack_value(bytes(1_000)))
    assert loop.answers(peer, 1) == [RpcReply(1, None, bytes(1_000))]


def test_a_wake_up_ends_a_poll_that_runs_or_follows(loops: Any) -> None:
    loop = loops()
    loop.server.wake()
    began = time.monotonic()
    assert loop.server.poll(60_000) == []
    timer = threading.Timer(0.05, loop.server.wake)
    timer.start()
    assert loop.server.poll(60_000) == []
    timer.join()
    assert time.monotonic() - began < 30


def test_latencies_are_kept_by_method(loops: Any) -> None:
    loop = loops()
    number, peer = loop.connect()
    peer.send(call(1, "echo"), call(2, "unheard of"), call(3, "echo"))
    for event in loop.events(3):
        loop.server.reply(number, event[2], NIL)
    found = loop.server.latencies()
    assert {name: sum(count for _, count in buckets) for name, buckets in found.items()} == {
        "echo": 2,
        "other": 1,
    }
    for buckets in found.values():
        assert [bound for bound, _ in buckets] == sorted(bound for bound, _ in buckets)
