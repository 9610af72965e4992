"""The front door over real sockets: who gets in, who is turned away and how, and what a crowd cannot do."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool.clock import Deadline, SystemClock
from moonpool.config import EngineConfig
from moonpool.engine import dialing, peer_credentials
from moonpool.engine.control import ControlService, LaneInfo, ServiceHooks
from moonpool.engine.lane_connect import connect_lane
from moonpool.errors import (
    AccessDenied,
    HandshakeFailed,
    InternalError,
    MoonpoolError,
    PeerRefused,
    PeerStalled,
    ProtocolError,
    QueueFull,
    StaleHandle,
    Status,
    TransferTimeout,
)
from moonpool.ids import ANY_INSTANCE, InstanceId, new_instance_id
from moonpool.wire.hello import ClientHello, ConnectionKind, ServerHello

WAIT_S = 20.0
SECRET = b"the secret of this test's cluster"
OTHER_SECRET = b"the secret of some other cluster!"
NOBODY_UID = 65_534
ME = new_instance_id()
Make = Callable[..., ControlService]

both_kinds = pytest.mark.parametrize("kind", ["tcp", "unix"])
both_uses = pytest.mark.parametrize("use", ["control", "lane"])


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
    """As many descriptors are open after a test as before it, whatever it did to the door."""
    before = fd_count()
    yield
    eventually(lambda: fd_count() <= before, f"{before} descriptors are open, not {fd_count()}")


@pytest.fixture
def lanes() -> Iterator[list[tuple[int, LaneInfo]]]:
    """What the services' engines were handed."""
    taken: list[tuple[int, LaneInfo]] = []
    yield taken
    for fd, _ in taken:
        os.close(fd)


@pytest.fixture
def make(lanes: list[tuple[int, LaneInfo]]) -> Iterator[Make]:
    """Makes started services, closed after the test; lanes end up in `lanes`."""
    with contextlib.ExitStack() as stack:

        def make_service(
            on_lane: Callable[[int, LaneInfo], object] = lambda fd, info: lanes.append((fd, info)),
            instance: InstanceId | None = None,
            **fields: Any,
        ) -> ControlService:
            hooks = ServiceHooks(
                handlers={"probe": lambda info, params: {}}, on_lane=on_lane, lanes_open=lambda: len(lanes)
            )
            service = ControlService(EngineConfig(**fields), instance or new_instance_id(), hooks)
            stack.callback(service.close)
            service.start()
            return service

        yield make_service


def address_of(service: ControlService, kind: str) -> str:
    return service.unix_name if kind == "unix" else service.endpoint


def raw_client(service: ControlService, kind: str = "tcp") -> socket.socket:
    """A connected socket that has said nothing yet."""
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect("\0" + service.unix_name[1:])
    else:
        sock = socket.create_connection(("127.0.0.1", service.port))
    sock.settimeout(WAIT_S)
    return sock


def read_to_end(sock: socket.socket) -> bytes:
    """All that the server sends before it closes."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(4_096):
            received += piece
    return received


@contextlib.contextmanager
def fake_server(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A tcp server that takes one connection and treats it as `answer` says; gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(WAIT_S)
                answer(sock)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            thread.join(WAIT_S)


def knock(make: Make, address: str, use: str, expected: InstanceId | None = None, **fields: Any) -> None:
    """Opens and closes a session or a lane."""
    if use == "control":
        session = make(**fields).connect(address, expected)
        session.request("probe", {}, WAIT_S)
        session.close()
    else:
        os.close(connect_lane(address, EngineConfig(**fields), ME, expected, WAIT_S))


@both_kinds
@both_uses
def test_the_right_secret_opens(make: Make, kind: str, use: str) -> None:
    owner = make(cluster_secret=SECRET)
    knock(make, address_of(owner, kind), use, owner.instance, cluster_secret=SECRET)
    assert owner.counters["handshakes_completed"] == 1


@both_kinds
@both_uses
@pytest.mark.parametrize(
    ("ours", "theirs", "says"),
    [
        (OTHER_SECRET, SECRET, "refused this engine's cluster secret"),
        (None, SECRET, "set the config field cluster_secret"),
        (SECRET, None, "does not ask for the cluster secret"),
    ],
)
def test_any_other_secret_does_not(
    make: Make, kind: str, use: str, ours: bytes | None, theirs: bytes | None, says: str
) -> None:
    owner = make(cluster_secret=theirs)
    with pytest.raises(AccessDenied, match=says):
        knock(make, address_of(owner, kind), use, cluster_secret=ours)
    assert owner.counters["secrets_refused"] == (1 if ours == OTHER_SECRET else 0)
    if theirs is not None:
        assert owner.counters["lanes_accepted"] == 0


@both_kinds
@both_uses
def test_another_instance_is_stale(make: Make, kind: str, use: str) -> None:
    owner = make()
    with pytest.raises(StaleHandle, match="restarted"):
        knock(make, address_of(owner, kind), use, new_instance_id())
    assert owner.counters["instances_refused"] == 1


@both_kinds
@both_uses
def test_nothing_listens(make: Make, kind: str, use: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    address = f"127.0.0.1:{port}" if kind == "tcp" else "@moonpool/nobody"
    with pytest.raises(PeerRefused) as caught:
        knock(make, address, use)
    assert caught.value.peer == address


def full_listener(family: socket.AddressFamily, name: str) -> tuple[socket.socket, list[socket.socket]]:
    """A listener whose queue is full, so that one more client waits, and the clients that fill it."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0) if family == socket.AF_INET else "\0" + name[1:])
    listener.listen(0)
    clients = []
    while True:
        client = socket.socket(family, socket.SOCK_STREAM)
        client.settimeout(0.2)
        clients.append(client)
        try:
            client.connect(listener.getsockname())
        except (TimeoutError, BlockingIOError):
            return listener, clients


@both_kinds
def test_a_host_that_does_not_answer_is_stalled_or_late(kind: str) -> None:
    name = f"@moonpool/{new_instance_id().hex()}"
    listener, clients = full_listener(socket.AF_INET if kind == "tcp" else socket.AF_UNIX, name)
    try:
        address = name if kind == "unix" else f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(PeerStalled, match="connect_timeout_ms"):
            connect_lane(address, EngineConfig(connect_timeout_ms=50), ME, None, WAIT_S)
        with pytest.raises(TransferTimeout):
            connect_lane(address, EngineConfig(), ME, None, 0.05)
        with pytest.raises(TransferTimeout):
            connect_lane(address, EngineConfig(), ME, None, 0.0)
    finally:
        for sock in (listener, *clients):
            sock.close()


def test_a_server_that_says_nothing_fails_the_handshake() -> None:
    with (
        fake_server(lambda sock: read_to_end(sock) and None) as address,
        pytest.raises(HandshakeFailed, match="in time"),
    ):
        connect_lane(address, EngineConfig(handshake_timeout_ms=50), ME, None, WAIT_S)


def test_a_server_that_trickles_fails_the_handshake() -> None:
    hello = ServerHello(Status.COMPLETE, False, new_instance_id(), bytes(16)).encode()
    gone = threading.Event()

    def trickle(sock: socket.socket) -> None:
        sock.recv(64)
        for position in range(len(hello) - 1):
            with contextlib.suppress(OSError):
                sock.send(hello[position : position + 1])
            if gone.wait(0.01):
                return

    with fake_server(trickle) as address:
        with pytest.raises(HandshakeFailed, match="in time"):
            connect_lane(address, EngineConfig(handshake_timeout_ms=100), ME, None, WAIT_S)
        gone.set()


def test_a_server_that_closes_fails_the_handshake() -> None:
    with (
        fake_server(lambda sock: sock.recv(64) and None) as address,
        pytest.raises(HandshakeFailed, match="ended during"),
    ):
        connect_lane(address, EngineConfig(), ME, None, WAIT_S)


def test_another_protocol_is_named() -> None:
    banner = b"SSH-2.0-OpenSSH_9.2".ljust(64, b"\n")
    with (
        fake_server(lambda sock: sock.sendall(banner)) as address,
        pytest.raises(ProtocolError, match="Moonpool hello"),
    ):
        connect_lane(address, EngineConfig(), ME, None, WAIT_S)


def test_another_version_is_named_on_both_ends(make: Make) -> None:
    newer = ServerHello(Status.COMPLETE, False, new_instance_id(), bytes(16)).encode()
    newer = newer[:8] + struct.pack("<H", 9) + newer[10:]
    both = r"version 9 .* version 1"
    with fake_server(lambda sock: sock.sendall(newer)) as address, pytest.raises(ProtocolError, match=both):
        connect_lane(address, EngineConfig(), ME, None, WAIT_S)

    owner = make(cluster_secret=SECRET)
    hello = ClientHello(ConnectionKind.CONTROL, ME, bytes(16)).encode()
    with raw_client(owner) as client:
        client.sendall(hello[:8] + struct.pack("<H", 9) + hello[10:])
        answer = read_to_end(client)
    assert answer[:11] == b"MOONPOOL\x01\x00" + bytes([Status.PROTOCOL])
    assert owner.counters["versions_refused"] == 1


@both_kinds
def test_what_is_no_hello_is_closed_and_counted(make: Make, kind: str) -> None:
    owner = make()
    with raw_client(owner, kind) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: moonpool\r\n\r\n".ljust(64, b"\n"))
        assert read_to_end(client) == b""
    with raw_client(owner, kind) as client:
        client.sendall(b"MOON")
        client.shutdown(socket.SHUT_WR)
        assert read_to_end(client) == b""
    eventually(lambda: owner.counters["hellos_malformed"] == 1, "the malformed hello is counted")
    eventually(lambda: owner.counters["handshakes_cut_off"] == 1, "the short hello is counted")


@both_kinds
def test_slow_loris_clients_are_dropped_and_nobody_waits_for_them(make: Make, kind: str) -> None:
    owner = make(handshake_timeout_ms=150, cluster_secret=SECRET)
    hello = ClientHello(ConnectionKind.CONTROL, ME, bytes(16)).encode()
    stop = threading.Event()

    def trickle(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for position in range(len(hello)):
                sock.send(hello[position : position + 1], socket.MSG_NOSIGNAL)
                if stop.wait(0.05):
                    return

    clients = [raw_client(owner, kind) for _ in range(8)]
    threads = [threading.Thread(target=trickle, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    knock(make, address_of(owner, kind), "control", cluster_secret=SECRET)
    for client in clients:
        assert read_to_end(client) == b""
    stop.set()
    for thread in threads:
        thread.join(WAIT_S)
    for client in clients:
        client.close()
    assert owner.counters["handshakes_timed_out"] == 8


def test_a_client_that_stops_before_its_proof_is_dropped(make: Make) -> None:
    owner = make(handshake_timeout_ms=100, cluster_secret=SECRET)
    with raw_client(owner) as client:
        client.sendall(ClientHello(ConnectionKind.LANE, ME, bytes(16)).encode())
        assert len(read_to_end(client)) == 64
    assert owner.counters["handshakes_timed_out"] == 1
    assert owner.counters["lanes_accepted"] == 0


@both_kinds
def test_a_flood_displaces_its_own_oldest(make: Make, kind: str) -> None:
    owner = make(handshakes_max=4, handshake_timeout_ms=60_000)
    clients = [raw_client(owner, kind) for _ in range(20)]
    eventually(lambda: owner.counters["handshakes_evicted"] == 16, "the oldest hellos are closed")
    for client in clients[:16]:
        assert read_to_end(client) == b""
    for client in clients[16:]:
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.recv(1)
    knock(make, address_of(owner, kind), "control")
    assert owner.counters["handshakes_evicted"] == 17
    for client in clients:
        client.close()


def test_connections_are_bounded_together(make: Make, lanes: list[tuple[int, LaneInfo]]) -> None:
    owner = make(connections_max=3, handshakes_max=3)
    initiator = make()
    session = initiator.connect(owner.endpoint)
    kept = [connect_lane(owner.endpoint, EngineConfig(), ME, None, WAIT_S) for _ in range(2)]
    assert len(lanes) == 2
    for use in ("control", "lane"):
        with pytest.raises(QueueFull, match="connections_max"):
            knock(make, owner.endpoint, use)
    assert owner.counters["connections_refused"] == 2
    session.request("probe", {}, WAIT_S)
    session.close()
    eventually(lambda: not owner.sessions(), "the session ends")
    knock(make, owner.endpoint, "control")
    for fd in kept:
        os.close(fd)


@both_kinds
def test_a_lane_is_blocking_tuned_and_connected(
    make: Make, lanes: list[tuple[int, LaneInfo]], kind: str
) -> None:
    owner = make(cluster_secret=SECRET, stall_timeout_ms=7_000)
    config = EngineConfig(cluster_secret=SECRET, stall_timeout_ms=7_000)
    ours = connect_lane(address_of(owner, kind), config, ME, owner.instance, WAIT_S)
    theirs, info = lanes[0]
    assert info.peer_instance == ME
    assert info.is_unix == (kind == "unix")
    assert info.stays_on_host
    assert info.peer_pid == (os.getpid() if kind == "unix" else None)
    assert info.peer_uid == (os.geteuid() if kind == "unix" else None)
    os.write(ours, b"to the target")
    assert os.read(theirs, 64) == b"to the target"
    os.write(theirs, b"to the initiator")
    assert os.read(ours, 64) == b"to the initiator"
    for fd in (ours, theirs):
        assert os.get_blocking(fd)
        assert not os.get_inheritable(fd)
        if kind == "tcp":
            check_options(fd)
    os.close(ours)
    assert os.read(theirs, 1) == b""


def check_options(fd: int) -> None:
    with socket.socket(fileno=os.dup(fd)) as sock:
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (socket.TCP_KEEPIDLE, 5),
            (socket.TCP_KEEPINTVL, 2),
            (socket.TCP_KEEPCNT, 3),
            (socket.TCP_USER_TIMEOUT, 7_000),
        ):
            assert sock.getsockopt(socket.IPPROTO_TCP, option) == value
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        congestion = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
    available = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
    if "cubic" in available:
        assert congestion == "cubic"


def test_an_unknown_congestion_control_is_no_error(make: Make) -> None:
    owner = make(congestion_local="no_such_control")
    config = EngineConfig(congestion_local="no_such_control")
    os.close(connect_lane(owner.endpoint, config, ME, None, WAIT_S))


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (QueueFull("no more lanes"), QueueFull),
        (ZeroDivisionError(), InternalError),
        (MemoryError(), MoonpoolError),
    ],
)
@pytest.mark.parametrize("secret", [None, SECRET])
def test_the_engine_may_refuse_a_lane(
    make: Make, raised: Exception, seen: type[MoonpoolError], secret: bytes | None
) -> None:
    def refuse(_fd: int, _info: LaneInfo) -> None:
        raise raised

    owner = make(on_lane=refuse, cluster_secret=secret)
    with pytest.raises(seen):
        connect_lane(owner.endpoint, EngineConfig(cluster_secret=secret), ME, None, WAIT_S)
    assert owner.counters["lanes_refused"] == 1
    assert owner.counters["lanes_accepted"] == 0


def in_another_user(action: Callable[[], bytes]) -> bytes:
    """What `action` returns in a forked child that gave up root."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of forks beside threads; this child only makes a few system calls.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        outcome = b"failed"
        try:
            os.setgid(NOBODY_UID)
            os.setuid(NOBODY_UID)
            outcome = action()
        finally:
            os.write(writer, outcome)
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        outcome = pipe.read()
    os.waitpid(child, 0)
    return outcome


def test_another_user_is_refused_on_the_unix_socket(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = make()
    hello = ClientHello(ConnectionKind.CONTROL, ME, bytes(16)).encode()

    def ask() -> bytes:
        with raw_client(owner, "unix") as client:
            client.sendall(hello)
            return read_to_end(client)

    if os.geteuid() == 0:
        answer = in_another_user(ask)
    else:
        monkeypatch.setattr(peer_credentials.os, "geteuid", lambda: NOBODY_UID)
        answer = ask()
    assert ServerHello.decode(answer).status is Status.ACCESS_DENIED
    assert owner.counters["users_refused"] == 1
    assert not owner.sessions()


def test_an_abstract_name_taken_by_another_user_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"@moonpool/{new_instance_id().hex()}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with listener:

        def take_the_name() -> bytes:
            listener.bind("\0" + name[1:])
            listener.listen()
            return b"listening"

        if os.geteuid() == 0:
            assert in_another_user(take_the_name) == b"listening"
        else:
            take_the_name()
            monkeypatch.setattr(peer_credentials.os, "geteuid", lambda: NOBODY_UID)
        with pytest.raises(AccessDenied, match="which is not ours"):
            connect_lane(name, EngineConfig(), ME, None, WAIT_S)


@pytest.mark.parametrize("told_pid", [None, 1])
def test_a_pid_counts_only_when_kernel_and_peer_agree(told_pid: int | None) -> None:
    # They differ after a fork of the listener, and across pid namespaces.
    name = f"@moonpool/{new_instance_id().hex()}"
    pid = os.getpid() if told_pid is None else told_pid
    hello = ServerHello(Status.COMPLETE, False, new_instance_id(), bytes(16), pid)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + name[1:])
        listener.listen()

        def answer() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(64, socket.MSG_WAITALL)
                sock.sendall(hello.encode())

        thread = threading.Thread(target=answer)
        thread.start()
        request = dialing.DialRequest(ConnectionKind.CONTROL, ME)
        deadline = Deadline.after_s(SystemClock().now_ns(), WAIT_S)
        greeted = dialing.dial(name, request, EngineConfig(), deadline)
        thread.join(WAIT_S)
        assert greeted.peer_uid == os.geteuid()
        assert greeted.peer_pid == (os.getpid() if told_pid is None else None)
        assert (greeted.pidfd is not None) == (told_pid is None)
        greeted.close()
        greeted.close()


def test_a_hook_that_fails_costs_only_its_connection(caplog: pytest.LogCaptureFixture) -> None:
    rooms = iter([ZeroDivisionError(), 0])

    def lanes_open() -> int:
        outcome = next(rooms, 0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    hooks = ServiceHooks(handlers={}, on_lane=lambda fd, info: os.close(fd), lanes_open=lanes_open)
    with ControlService(EngineConfig(), new_instance_id(), hooks) as owner:
        owner.start()
        with pytest.raises(HandshakeFailed):
            connect_lane(owner.endpoint, EngineConfig(), ME, None, WAIT_S)
        os.close(connect_lane(owner.endpoint, EngineConfig(), ME, None, WAIT_S))
        assert owner.counters["handler_bugs"] == 1
    assert "ZeroDivisionError" in caplog.text


def test_a_socket_connected_to_itself_is_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unlucky(socket.socket):
        """The kernel chose the very port we connect to as our own."""

        def connect(self, address: Any) -> None:
            self.bind(address)
            super().connect(address)

    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    monkeypatch.setattr(dialing.socket, "socket", Unlucky)
    with pytest.raises(PeerRefused):
        connect_lane(f"127.0.0.1:{port}", EngineConfig(), ME, ANY_INSTANCE, WAIT_S)


def test_a_listener_without_descriptors_recovers(make: Make) -> None:
    owner = make()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as client:
        lowest_free = os.dup(client.fileno())
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            client.connect(("127.0.0.1", owner.port))
            eventually(lambda: owner.counters["accept_failures"] > 0, "accepting fails")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        eventually(lambda: owner.counters["connections_accepted"] == 1, "the waiting client is taken")
    knock(make, owner.endpoint, "control")
