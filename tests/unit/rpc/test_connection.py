"""A client's connection against a scripted server at the other end of a socket pair."""

from __future__ import annotations

import contextlib
import pickle
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest

from moonpool.errors import (
    LimitExceeded,
    PeerGone,
    PeerStalled,
    ProtocolError,
    QueueFull,
    Status,
    TransferTimeout,
    UsageError,
)
from moonpool.native.io.rpc_client import RpcConnection
from moonpool.rpc.errors import RpcError, fault_of
from moonpool.rpc.limits import ClientLimits
from moonpool.wire.rpc import (
    FrameSplitter,
    RpcFault,
    RpcPush,
    RpcReply,
    RpcRequest,
    decode_body,
    encode_frame,
    pack_value,
    unpack_fault,
    unpack_value,
)

NONE = pack_value([])
WAIT_S = 10.0


class Script:
    """The server's end: reads requests, sends what the test says."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(WAIT_S)
        self._splitter = FrameSplitter()
        self._ready: list[Any] = []

    def request(self) -> RpcRequest:
        while not self._ready:
            data = self.sock.recv(1 << 20)
            assert data, "the client closed the connection"
            self._ready += [decode_body(body) for body in self._splitter.feed(data)]
        message = self._ready.pop(0)
        assert isinstance(message, RpcRequest)
        return message

    def send(self, *messages: Any) -> None:
        self.sock.sendall(b"".join(encode_frame(message) for message in messages))


class Pair:
    """A connection, its script, and threads that end with the test."""

    def __init__(self, **limits: int) -> None:
        ours, theirs = socket.socketpair()
        self.script = Script(theirs)
        self.connection = RpcConnection(
            ours.detach(),
            ClientLimits(**limits),
            peer="a pair",
            make_error=lambda told: RpcError(unpack_fault(told), "a pair"),
        )
        self._threads: list[threading.Thread] = []
        self.problems: list[BaseException] = []

    def start(self, work: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as problem:
                self.problems.append(problem)

        thread = threading.Thread(target=run)
        thread.start()
        self._threads.append(thread)
        return thread

    def join(self) -> None:
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()

    def close(self) -> None:
        self.connection.close()
        self.script.sock.close()
        self.join()


@pytest.fixture
def pairs() -> Iterator[Callable[..., Pair]]:
    with contextlib.ExitStack() as stack:

        def make(**limits: int) -> Pair:
            pair = Pair(**limits)
            stack.callback(pair.close)
            return pair

        yield make


@pytest.mark.parametrize("spin_us", [0, 200])
def test_a_call_is_answered(pairs: Callable[..., Pair], spin_us: int) -> None:
    pair = pairs(spin_us=spin_us)

    def serve() -> None:
        request = pair.script.request()
        assert (request.method, request.params) == ("echo", [1, b"x"])
        pair.script.send(RpcReply(request.message_id, None, {"a": [1]}))

    pair.start(serve)
    packed = pair.connection.call("echo", pack_value([1, b"x"]), WAIT_S)
    assert unpack_value(packed) == {"a": [1]}
    pair.join()
    assert pair.problems == []


def test_threads_get_their_own_answers_in_any_order(pairs: Callable[..., Pair]) -> None:
    pair = pairs()
    count, rounds = 6, 40
    together = threading.Barrier(count)

    def serve() -> None:
        held: list[RpcRequest] = []
        for _ in range(count * rounds):
            held.append(pair.script.request())
            # Answered in pairs, the later one first, so that readers hold others' answers.
            if len(held) == 2:
                pair.script.send(*[RpcReply(one.message_id, None, one.params) for one in reversed(held)])
                held.clear()

    def ask(number: int) -> None:
        for turn in range(rounds):
            together.wait(WAIT_S)
            answer = unpack_value(pair.connection.call("echo", pack_value([number, turn]), WAIT_S))
            assert answer == [number, turn]

    pair.start(serve)
    for number in range(count):
        pair.start(lambda number=number: ask(number))
    pair.join()
    assert pair.problems == []
    assert pair.connection.unclaimed == 0


def test_an_error_is_raised_as_the_caller_wants_it(pairs: Callable[..., Pair]) -> None:
    pair = pairs()
    pair.start(
        lambda: pair.script.send(
            RpcReply(pair.script.request().message_id, RpcFault(113, "NOT_READY", "in a moment"))
        )
    )
    with pytest.raises(RpcError, match="NOT_READY: in a moment") as caught:
        pair.connection.call("m", NONE, WAIT_S)
    assert caught.value.code == 113
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.code, again.wire_name, str(again)) == (113, "NOT_READY", str(caught.value))
    assert fault_of(again).code == 113
    assert pair.connection.closed_reason == 0


def test_a_call_that_gave_up_does_not_harm_the_next(pairs: Callable[..., Pair]) -> None:
    pair = pairs()
    with pytest.raises(TransferTimeout):
        pair.connection.call("late", NONE, 0.02)
    late = pair.script.request()

    def serve() -> None:
        request = pair.script.request()
        pair.script.send(RpcReply(late.message_id, None, "late"), RpcReply(request.message_id, None, "good"))

    pair.start(serve)
    assert unpack_value(pair.connection.call("next", NONE, WAIT_S)) == "good"
    assert pair.connection.unclaimed == 1


def test_pushes_are_kept_in_order_while_a_call_waits(pairs: Callable[..., Pair]) -> None:
    pair = pairs()

    def serve() -> None:
        request = pair.script.request()
        pushes = [RpcPush("effects", [n]) for n in range(5)]
        pair.script.send(*pushes[:3], RpcReply(request.message_id, None, None), *pushes[3:])

    pair.start(serve)
    pair.connection.call("m", NONE, WAIT_S)
    found = [pair.connection.next_push(WAIT_S) for _ in range(5)]
    assert found == [("effects", pack_value([n])) for n in range(5)]
    assert pair.connection.next_push(0.01) is None


def test_a_thread_waits_for_pushes_while_others_call(pairs: Callable[..., Pair]) -> None:
    pair = pairs()
    calls, pushes = 60, 60
    got: list[bytes] = []

    def serve() -> None:
        for n in range(calls):
            request = pair.script.request()
            pair.script.send(RpcPush("p", [n]), RpcReply(request.message_id, None, n))

    def listen() -> None:
        while len(got) < pushes:
            push = pair.connection.next_push(WAIT_S)
            assert push is not None
            got.append(push[1])

    pair.start(serve)
    pair.start(listen)
    for n in range(calls):
        assert unpack_value(pair.connection.call("m", NONE, WAIT_S)) == n
    pair.join()
    assert pair.problems == []
    assert got == [pack_value([n]) for n in range(pushes)]


def test_pushes_that_nobody_takes_end_the_connection_at_the_bound(pairs: Callable[..., Pair]) -> None:
    pair = pairs(pushes_max=4)
    pair.start(lambda: (pair.script.request(), pair.script.send(*[RpcPush("p", [n]) for n in range(5)])))
    with pytest.raises(QueueFull):
        pair.connection.call("m", NONE, WAIT_S)
    assert pair.connection.closed_reason == Status.QUEUE_FULL
    # What had come before is still there to take.
    assert pair.connection.next_push(0) == ("p", pack_value([0]))


@pytest.mark.parametrize("wait", ["call", "push"])
def test_a_server_that_leaves_ends_every_wait(pairs: Callable[..., Pair], wait: str) -> None:
    pair = pairs()
    threads = 3

    def ask() -> object:
        return (
            pair.connection.call("m", NONE, WAIT_S) if wait == "call" else pair.connection.next_push(WAIT_S)
        )

    for _ in range(threads):
        pair.start(ask)
    if wait == "call":
        for _ in range(threads):
            pair.script.request()
    pair.script.sock.close()
    pair.join()
    assert [type(problem) for problem in pair.problems] == [PeerGone] * threads
    assert pair.connection.closed_reason == Status.PEER_GONE
    with pytest.raises(PeerGone):
        pair.connection.call("m", NONE, WAIT_S)


def test_closing_ends_every_wait(pairs: Callable[..., Pair]) -> None:
    pair = pairs()

    def ask() -> None:
        with pytest.raises(PeerGone, match="closed on this end"):
            pair.connection.call("m", NONE, WAIT_S)

    for _ in range(3):
        pair.start(ask)
    for _ in range(3):
        pair.script.request()
    pair.connection.close()
    pair.connection.close()
    pair.join()
    assert pair.problems == []
    assert pair.connection.fileno() == -1
    assert pair.script.sock.recv(1) == b""
    with pytest.raises(PeerGone):
        pair.connection.next_push(0)


WRONG_ANSWERS = {
    "no MessagePack": struct.pack("<I", 2) + b"\xc1\xc1",
    "an empty frame": bytes(4),
    "a frame too large": struct.pack("<I", (1 << 24) + 1),
    "a request": encode_frame(RpcRequest(1, "m", [])),
    "an answer to nothing": encode_frame(RpcReply(77, None, None)),
    "the id 0": encode_frame(RpcReply(0, None, None)),
}


@pytest.mark.parametrize("name", WRONG_ANSWERS)
def test_bytes_that_are_no_answer_end_the_connection(pairs: Callable[..., Pair], name: str) -> None:
    pair = pairs()
    pair.start(lambda: (pair.script.request(), pair.script.sock.sendall(WRONG_ANSWERS[name])))
    with pytest.raises(ProtocolError):
        pair.connection.call("m", NONE, WAIT_S)
    assert pair.connection.closed_reason == Status.PROTOCOL


@pytest.mark.parametrize("method", ["exists", "lookup", "put_start", "put_end"])
def test_an_answer_that_does_not_fit_its_call_is_refused_and_the_connection_lives(
    pairs: Callable[..., Pair], method: str
) -> None:
    pair = pairs()

    def serve() -> None:
        for _ in range(2):
            pair.script.send(RpcReply(pair.script.request().message_id, None, [1, 2, "wrong"]))

    pair.start(serve)
    params: dict[str, tuple[Any, ...]] = {
        "put_start": (["k"], [1], None, 0, WAIT_S),
        "put_end": (1, [0], bytes(16), None, WAIT_S),
    }
    with pytest.raises(ProtocolError):
        getattr(pair.connection, method)(*params.get(method, (["k"], 0, WAIT_S)))
    assert unpack_value(pair.connection.call("m", NONE, WAIT_S)) == [1, 2, "wrong"]


def test_the_hot_calls_over_a_connection(pairs: Callable[..., Pair]) -> None:
    pair = pairs()
    grant = bytes(range(24))
    answers: list[Any] = [
        b"\x01\x00",
        [1, 2, [None, [9, 10, b"d" * 16, 1, [[3, 4096, 7]]]]],
        [1, 2, 55, 30_000, [[0, [[3, 4096, 7, grant]]], [2, []]]],
        [1, [[0, 9], [1, 0]]],
    ]
    asked: list[RpcRequest] = []

    def serve() -> None:
        for answer in answers:
            asked.append(pair.script.request())
            pair.script.send(RpcReply(asked[-1].message_id, None, answer))

    pair.start(serve)
    connection = pair.connection
    assert connection.exists(["a", b"b"], 0, WAIT_S) == b"\x01\x00"
    found = connection.lookup(("a", b"b"), 2_000, WAIT_S)
    assert [found.entry(0), found.entry(1)] == [None, (9, 10, b"d" * 16, 1, ((3, 4096, 7),))]
    started = connection.put_start(["a", "b"], [10, 20], pack_value({"replicas": 2}), 5, WAIT_S)
    assert (started.put_id, started.remaining_ms, started.codes) == (55, 30_000, b"\x00\x02")
    assert started.entry(0) == (0, ((3, 4096, 7, grant),))
    ended = connection.put_end(55, [0, 1], bytes(32), [b"", bytes(8)], WAIT_S)
    assert [ended.entry(0), ended.entry(1)] == [(0, 9), (1, 0)]
    with pytest.raises(IndexError):
        ended.entry(2)
    pair.join()
    assert [one.params for one in asked] == [
        [["a", b"b"], 0],
        [["a", b"b"], 2_000],
        [["a", "b"], [10, 20], {"replicas": 2}, 5],
        [55, [[0, bytes(16), b""], [1, bytes(16), bytes(8)]]],
    ]


def test_a_server_that_stops_in_the_middle_of_a_request_ends_the_connection(
    pairs: Callable[..., Pair],
) -> None:
    pair = pairs()
    with pytest.raises(PeerStalled):
        pair.connection.call("m", pack_value([bytes(8 << 20)]), 0.1)
    with pytest.raises(PeerStalled):
        pair.connection.call("m", NONE, WAIT_S)


def test_a_client_that_sends_also_reads(pairs: Callable[..., Pair]) -> None:
    """A server that first wants its pushes read, then reads a large request: neither waits for the other."""
    pair = pairs()
    push = RpcPush("p", [bytes(1 << 20)])

    def serve() -> None:
        pair.script.send(*[push] * 16)
        request = pair.script.request()
        pair.script.send(RpcReply(request.message_id, None, len(request.params[0])))

    pair.start(serve)
    assert unpack_value(pair.connection.call("m", pack_value([bytes(8 << 20)]), WAIT_S)) == 8 << 20
    assert all(pair.connection.next_push(WAIT_S) is not None for _ in range(16))


def test_a_request_above_the_bound_is_refused_before_it_is_sent(pairs: Callable[..., Pair]) -> None:
    pair = pairs(frame_bytes_max=1_024)
    with pytest.raises(LimitExceeded):
        pair.connection.call("m", pack_value([bytes(2_000)]), WAIT_S)
    with pytest.raises(UsageError):
        pair.connection.call("", NONE, WAIT_S)
    with pytest.raises(UsageError):
        pair.connection.call("m" * 65, NONE, WAIT_S)
    pair.start(lambda: pair.script.send(RpcReply(pair.script.request().message_id, None, 1)))
    assert unpack_value(pair.connection.call("m", NONE, WAIT_S)) == 1


def test_a_signal_ends_a_wait_at_once(pairs: Callable[..., Pair]) -> None:
    pair = pairs()

    class Enough(Exception):
        pass

    def stop(*_: object) -> None:
        raise Enough

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        began = time.monotonic()
        with pytest.raises(Enough):
            pair.connection.call("m", NONE, WAIT_S)
        assert time.monotonic() - began < WAIT_S / 2
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    late = pair.script.request()

    def serve() -> None:
        request = pair.script.request()
        pair.script.send(RpcReply(late.message_id, None, 0), RpcReply(request.message_id, None, 1))

    pair.start(serve)
    assert unpack_value(pair.connection.call("m", NONE, WAIT_S)) == 1


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 9])
def test_an_answer_in_pieces(pairs: Callable[..., Pair], cut: int) -> None:
    pair = pairs(spin_us=0)

    def serve() -> None:
        frame = encode_frame(RpcReply(pair.script.request().message_id, None, [bytes(200_000)]))
        for start in (0, cut, 100_000):
            end = {0: cut, cut: 100_000, 100_000: len(frame)}[start]
            pair.script.sock.sendall(frame[start:end])

    pair.start(serve)
    assert msgpack.unpackb(pair.connection.call("m", NONE, WAIT_S)) == [bytes(200_000)]
