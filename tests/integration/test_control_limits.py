"""Peers that got in and then misbehave: what each may cost, that others do not notice, and forks."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import select
import socket
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from moonpool.config import EngineConfig
from moonpool.engine import control
from moonpool.engine.control import ControlService, Reply, ServiceHooks, SessionInfo
from moonpool.engine.control_channel import FRAME_FDS_MAX
from moonpool.errors import EngineClosed, ForkedEngine, MoonpoolError, PeerGone, ProtocolError, QueueFull
from moonpool.ids import new_instance_id
from moonpool.wire.control import (
    ControlParser,
    PushMessage,
    ReplyMessage,
    RequestMessage,
    encode_message,
)
from moonpool.wire.hello import ClientHello, ConnectionKind, ServerHello

WAIT_S = 20.0
ME = new_instance_id()
Make = Callable[..., ControlService]
Ended = list[tuple[SessionInfo, MoonpoolError]]

both_kinds = pytest.mark.parametrize("kind", ["tcp", "unix"])


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Waits for a condition that another thread or process brings about; fails after a generous bound."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"did not happen: {what}"
        time.sleep(0.002)


def fd_count() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """As many descriptors are open after a test as before it."""
    before = fd_count()
    yield
    eventually(lambda: fd_count() <= before, f"{before} descriptors are open, not {fd_count()}")


@pytest.fixture
def ended() -> Ended:
    """The sessions that ended, and why."""
    return []


@pytest.fixture
def make(ended: Ended) -> Iterator[Make]:
    """Makes started services, closed after the test."""
    with contextlib.ExitStack() as stack:

        def make_service(
            handlers: Mapping[str, Any] | None = None,
            session_handlers: Mapping[str, Any] | None = None,
            **fields: Any,
        ) -> ControlService:
            hooks = ServiceHooks(
                handlers={"probe": lambda info, params: {}, **(handlers or {})},
                session_handlers=session_handlers or {},
                on_lane=lambda fd, info: os.close(fd),
                on_session_closed=lambda info, reason: ended.append((info, reason)),
            )
            service = ControlService(EngineConfig(**fields), new_instance_id(), hooks)
            stack.callback(service.close)
            service.start()
            return service

        yield make_service


def admitted(service: ControlService, kind: str = "tcp") -> socket.socket:
    """A raw connection whose hello is done, so that anything can be sent on it."""
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect("\0" + service.unix_name[1:])
    else:
        sock = socket.create_connection(("127.0.0.1", service.port))
    sock.settimeout(WAIT_S)
    sock.sendall(ClientHello(ConnectionKind.CONTROL, ME, os.urandom(16)).encode())
    ServerHello.decode(sock.recv(64, socket.MSG_WAITALL))
    return sock


def answers(sock: socket.socket, count: int) -> list[ReplyMessage]:
    parser = ControlParser()
    found: list[ReplyMessage] = []
    while len(found) < count:
        while (one := parser.next_frame()) is not None:
            assert isinstance(one.message, ReplyMessage)
            found.append(one.message)
        if len(found) < count:
            piece = sock.recv(65_536)
            assert piece, f"the connection ended after {len(found)} replies"
            parser.feed(piece)
    return found


def is_closed_by_peer(sock: socket.socket) -> bool:
    try:
        return sock.recv(65_536) == b""
    except ConnectionResetError:
        return True


REQUEST = encode_message(RequestMessage(1, "probe", {}))


@both_kinds
@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 64,
        b"\0\0\0\0",
        struct.pack("<I", 64 * 1024 + 1),
        b"\x01\0\0\0\xc1",
        encode_message(ReplyMessage(1, None, {})),  # to a request never made
    ],
)
def test_garbage_closes_its_own_connection(make: Make, ended: Ended, kind: str, garbage: bytes) -> None:
    owner = make()
    with admitted(owner, kind) as good, admitted(owner, kind) as bad:
        bad.sendall(REQUEST + garbage)
        assert answers(bad, 1)[0].error is None
        assert is_closed_by_peer(bad)
        eventually(lambda: len(ended) == 1, "the owner is told")
        assert isinstance(ended[0][1], ProtocolError)
        assert owner.counters["sessions_broken"] == 1
        good.sendall(REQUEST)
        assert answers(good, 1)[0].error is None


def test_a_push_that_nobody_knows_is_ignored(make: Make) -> None:
    owner = make()
    with admitted(owner) as sock:
        sock.sendall(encode_message(PushMessage("news", {})) + REQUEST)
        assert answers(sock, 1)[0].error is None
    assert owner.counters["pushes_ignored"] == 1


@pytest.mark.parametrize("count", [1, FRAME_FDS_MAX, FRAME_FDS_MAX + 1, 60])
def test_descriptors_sent_to_an_owner_are_closed_with_the_connection(
    make: Make, ended: Ended, count: int
) -> None:
    owner = make()
    with admitted(owner, "unix") as sock:
        before = fd_count()
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * count))
        sock.sendmsg([REQUEST], [rights])
        assert is_closed_by_peer(sock)
        eventually(lambda: len(ended) == 1, "the owner is told")
        assert isinstance(ended[0][1], ProtocolError)
        assert fd_count() <= before
    # In the middle of a frame, they belong to none.
    with admitted(owner, "unix") as sock:
        sock.sendall(REQUEST[:5])
        eventually(lambda: unread_bytes_are_gone(sock), "the first half is read")
        sock.sendmsg([REQUEST[5:]], [rights])
        assert is_closed_by_peer(sock)


def unread_bytes_are_gone(sock: socket.socket) -> bool:
    """True when the peer has read all that was sent (SIOCOUTQ, unix(7))."""
    import fcntl
    import termios

    return struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0] == 0


@both_kinds
def test_an_unfinished_frame_has_a_deadline(make: Make, ended: Ended, kind: str) -> None:
    owner = make(stall_timeout_ms=100)
    stop = threading.Event()
    with admitted(owner, kind) as sock:

        def trickle() -> None:
            with contextlib.suppress(OSError):
                sock.sendall(struct.pack("<I", 10_000))
                while not stop.wait(0.02):
                    sock.send(b"x", socket.MSG_NOSIGNAL)

        thread = threading.Thread(target=trickle)
        thread.start()
        assert is_closed_by_peer(sock)
        stop.set()
        thread.join(WAIT_S)
    eventually(lambda: len(ended) == 1, "the owner is told")
    assert "not finished in time" in str(ended[0][1])


def test_a_steady_stream_of_split_frames_has_none(make: Make) -> None:
    owner = make(stall_timeout_ms=300)
    with admitted(owner) as sock:
        sock.sendall(REQUEST[:7])
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            # The rest of one frame and the beginning of the next, so that one is unfinished at any moment.
            sock.sendall(REQUEST[7:] + REQUEST[:7])
            assert answers(sock, 1)[0].error is None
    assert owner.counters["sessions_broken"] == 0


@both_kinds
def test_a_peer_that_does_not_read_stops_itself(make: Make, ended: Ended, kind: str) -> None:
    served = []

    def describe(_info: SessionInfo, _params: Mapping[str, Any]) -> bytes:
        served.append(1)
        return bytes(256 * 1024)

    owner = make({"describe": describe}, stall_timeout_ms=300)
    other = make().connect(owner.endpoint)
    with admitted(owner, kind) as sock:
        flood = encode_message(RequestMessage(1, "describe", {})) * 2_000
        sender = threading.Thread(target=send_quietly, args=(sock, flood))
        sender.start()
        other.request("probe", {}, WAIT_S)
        eventually(lambda: len(ended) == 1, "the owner gives up on the flooder")
        sender.join(WAIT_S)
    assert "does not read" in str(ended[0][1])
    assert owner.counters["sessions_stalled"] == 1
    # What the socket takes, a queue of 256 KiB, and one more: not the whole flood.
    assert len(served) < 200
    other.request("probe", {}, WAIT_S)
    other.close()


def send_quietly(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        sock.sendall(data)


@both_kinds
def test_a_peer_that_reads_late_gets_everything(make: Make, kind: str) -> None:
    owner = make({"describe": lambda info, params: {"data": bytes([params["fill"]]) * 300_000}})
    with admitted(owner, kind) as sock:
        requests = b"".join(
            encode_message(RequestMessage(number, "describe", {"fill": number % 256}))
            for number in range(100)
        )
        sender = threading.Thread(target=send_quietly, args=(sock, requests))
        sender.start()
        eventually(lambda: owner.counters["requests_served"] >= 2, "the owner is ahead of us")
        replies = answers(sock, 100)
        sender.join(WAIT_S)
    assert [reply.request_id for reply in replies] == list(range(100))
    assert all(reply.result == {"data": bytes([reply.request_id]) * 300_000} for reply in replies)


def test_all_queued_replies_have_one_budget(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "OUTBOUND_BYTES_MAX", 8 * 1024 * 1024)
    owner = make({"describe": lambda info, params: bytes(12 * 1024 * 1024)})
    session = make().connect(owner.endpoint)
    with admitted(owner) as hoarder:
        # Larger than the whole budget, it passes while nothing else is queued.
        hoarder.sendall(encode_message(RequestMessage(1, "describe", {})))
        eventually(lambda: owner.counters["requests_served"] == 1, "the reply is queued")
        with pytest.raises(QueueFull, match="try again"):
            session.request("describe", {}, WAIT_S)
    eventually(lambda: not owner_holds_bytes(owner), "the hoarder's bytes are given back")
    assert len(session.request("describe", {}, WAIT_S).value) == 12 * 1024 * 1024
    assert not owner_holds_bytes(owner)
    session.close()


def owner_holds_bytes(service: ControlService) -> bool:
    return service._serving.budget.held_bytes != 0


def test_descriptors_queued_for_a_peer_that_leaves_are_closed(make: Make) -> None:
    gates: list[asyncio.Event] = []

    async def map_after_the_fill() -> Reply:
        gates.append(asyncio.Event())
        await gates[0].wait()
        return Reply(None, [memory])

    def fill(_info: SessionInfo, _params: Mapping[str, Any]) -> bytes:
        gates[0].set()
        return bytes(4_000_000)

    owner = make({"map": lambda info, params: map_after_the_fill(), "fill": fill})
    with open_memory("region") as memory, admitted(owner, "unix") as sock:
        before = fd_count()
        sock.sendall(encode_message(RequestMessage(1, "map", {})))
        eventually(lambda: bool(gates), "the map is being served")
        sock.sendall(encode_message(RequestMessage(2, "fill", {})))
        eventually(lambda: fd_count() == before + 1, "a copy of the descriptor waits in the queue")
        sock.close()
        eventually(lambda: not owner.sessions(), "the session ends")
        assert fd_count() == before - 2  # without the client's socket, the owner's, and the copy


@contextlib.contextmanager
def open_memory(name: str) -> Iterator[int]:
    fd = os.memfd_create(name)
    try:
        yield fd
    finally:
        os.close(fd)


def test_many_requests_in_one_read_leave_room_for_others(make: Make) -> None:
    owner = make()
    other = make().connect(owner.endpoint)
    with admitted(owner) as sock:
        count = 20_000
        sender = threading.Thread(target=send_quietly, args=(sock, REQUEST * count))
        sender.start()
        other.request("probe", {}, WAIT_S)
        assert len(answers(sock, count)) == count
        sender.join(WAIT_S)
    other.close()


def fork_and(action: Callable[[], str]) -> str:
    """What `action` returns in a forked child."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of forks beside threads, which is what this is about.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(reader)
        outcome = "failed"
        try:
            outcome = action()
        except BaseException as exc:
            outcome = repr(exc)
        finally:
            os.write(writer, outcome.encode())
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        readable, _, _ = select.select([pipe], [], [], WAIT_S)
        outcome = pipe.read().decode() if readable else "the child hangs"
    if outcome == "the child hangs":
        os.kill(child, 9)
    os.waitpid(child, 0)
    return outcome


def test_a_forked_child_keeps_nothing_and_disturbs_nothing(make: Make) -> None:
    before = fd_count()
    owner = make({"describe": lambda info, params: {"echo": params["text"]}})
    initiator = make()
    sessions = [initiator.connect(owner.endpoint), initiator.connect(owner.unix_name)]
    unfinished = socket.create_connection(("127.0.0.1", owner.port))
    eventually(lambda: owner.counters["connections_accepted"] == 3, "the hello is being waited for")

    def in_the_child() -> str:
        unfinished.close()
        for service in (owner, initiator):
            service.abandon_after_fork()
            service.close()
        left = fd_count() - before - 1  # the pipe
        for call in (
            lambda: sessions[0].request("describe", {}, 1.0),
            lambda: owner.call_peers("revoke", {}, 1.0),
        ):
            with contextlib.suppress(ForkedEngine, PeerGone):
                call()
                return "a call went through"
        with contextlib.suppress(EngineClosed):
            initiator.connect(owner.endpoint)
            return "a connection went through"
        return f"{left} descriptors left, alive: {[session.alive for session in sessions]}"

    assert fork_and(in_the_child) == "0 descriptors left, alive: [False, False]"
    for session in sessions:
        assert session.request("describe", {"text": "still here"}, WAIT_S).value == {"echo": "still here"}
    another = initiator.connect(owner.endpoint)
    another.request("probe", {}, WAIT_S)
    for session in (*sessions, another):
        session.close()
    unfinished.close()


def test_a_child_that_closes_its_engine_leaves_the_parents_alone(make: Make) -> None:
    owner = make()
    session = make().connect(owner.endpoint)

    def in_the_child() -> str:
        owner.close()
        owner.close()
        return "closed"

    assert fork_and(in_the_child) == "closed"
    session.request("probe", {}, WAIT_S)
    session.close()
