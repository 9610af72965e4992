"""The rpc's port as a process: its listeners, who is let in, floods, and the death of either side."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool.clock import Deadline, SystemClock
from moonpool.config import EngineConfig
from moonpool.engine.dialing import DialRequest, dial
from moonpool.engine.engine import Engine
from moonpool.errors import (
    AccessDenied,
    HandshakeFailed,
    MoonpoolError,
    PeerGone,
    PeerRefused,
    ProtocolError,
    QueueFull,
    TransferTimeout,
    UsageError,
)
from moonpool.ids import new_instance_id
from moonpool.rpc.client import RpcClient
from moonpool.rpc.errors import RpcError
from moonpool.rpc.limits import ClientLimits, ServerLimits
from moonpool.wire.hello import CLIENT_HELLO_BYTES, ClientHello, ConnectionKind

PEER = Path(__file__).parent / "rpc_peer.py"
WAIT_S = 20.0
SECRET = b"a secret of the cluster"


class Server:
    """The process, and the addresses it gave."""

    def __init__(self, process: subprocess.Popen[str], said: Any) -> None:
        self.process = process
        self.said = said

    @property
    def address(self) -> str:
        address: str = self.said[0]
        return address

    def connect(self, address: str = "", **options: Any) -> RpcClient:
        return RpcClient(address or self.address, **options)

    def counters(self, client: RpcClient) -> dict[str, int]:
        found: dict[str, int] = client.call("counters", timeout_s=WAIT_S)
        return found

    def wait_for(self, client: RpcClient, what: Callable[[dict[str, int]], bool]) -> dict[str, int]:
        """Asks for the counters until they are so."""
        limit = time.monotonic() + WAIT_S
        while not what(found := self.counters(client)):
            assert time.monotonic() < limit, found
        return found


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    with contextlib.ExitStack() as stack:

        def make(*endpoints: str, secret: bytes | None = None, **told: Any) -> Server:
            told["endpoints"] = list(endpoints) or ["127.0.0.1:0"]
            told["secret"] = secret.hex() if secret else None
            process = subprocess.Popen(
                [sys.executable, PEER, json.dumps(told)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(end, process)
            assert process.stdout is not None
            return Server(process, json.loads(process.stdout.readline()))

        yield make


def end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGCONT)
    try:
        process.communicate(timeout=WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate(timeout=WAIT_S)
        raise


def abstract() -> str:
    return f"@moonpool-test-{os.getpid()}-{os.urandom(6).hex()}"


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
        sock.bind(("::1", 0))
        return True
    return False


def test_every_kind_of_endpoint_is_served(start: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "rpc.sock")
    endpoints = ["127.0.0.1:0", abstract(), path, *(["[::1]:0"] if has_ipv6() else [])]
    server = start(*endpoints, secret=SECRET)
    assert server.said[1:3] == endpoints[1:3]
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    for address in server.said:
        with server.connect(address, secret=SECRET) as client:
            assert client.call("echo", [address, b"x", 1]) == [address, b"x", 1]
            with pytest.raises(RpcError, match="UNKNOWN_METHOD"):
                client.call("no such method")
    end(server.process)
    assert not os.path.exists(path)


def test_a_socket_file_is_replaced_only_when_nobody_listens(start: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "rpc.sock")
    first = start(path)
    refused = start(path)
    assert "cannot listen on" in refused.said["error"]
    first.process.kill()
    first.process.wait(WAIT_S)
    assert os.path.exists(path), "the dead process left its file"
    with start(path).connect() as client:
        assert client.call("echo") == []


@pytest.mark.parametrize("endpoint", ["", "nonsense", "127.0.0.1", "@", "/" + "x" * 120, "host.invalid:0"])
def test_what_is_no_endpoint_is_refused(start: Any, endpoint: str) -> None:
    assert "error" in start(endpoint).said


@pytest.mark.parametrize("endpoint", ["tcp", "unix"])
def test_the_secret_is_asked_for_both_ways(start: Any, endpoint: str) -> None:
    where = "127.0.0.1:0" if endpoint == "tcp" else abstract()
    guarded, second = start(where, secret=SECRET), start("127.0.0.1:0")
    for wrong in (None, b"another secret, of 16 or more"):
        with pytest.raises(AccessDenied):
            guarded.connect(secret=wrong)
    # A client with a secret does not trust a server that asks for none.
    with pytest.raises(AccessDenied):
        second.connect(secret=SECRET)
    with guarded.connect(secret=SECRET) as client:
        found = guarded.counters(client)
        assert found["secrets_refused"] == 1
        assert found["handshakes_completed"] == 1


def test_connections_for_another_service_are_refused_both_ways(start: Any) -> None:
    server = start()
    deadline = Deadline.after_s(SystemClock().now_ns(), WAIT_S)
    for kind in (ConnectionKind.CONTROL, ConnectionKind.LANE):
        with pytest.raises(ProtocolError):
            dial(server.address, DialRequest(kind, new_instance_id()), EngineConfig(), deadline)
    with server.connect() as client:
        assert server.counters(client)["kinds_refused"] == 2
    with Engine(EngineConfig()) as engine, pytest.raises(ProtocolError):
        RpcClient(engine.endpoint)


def connect_raw(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    sock = socket.create_connection((host, int(port)), timeout=WAIT_S)
    sock.settimeout(WAIT_S)
    return sock


def hello() -> bytes:
    return ClientHello(ConnectionKind.RPC, new_instance_id(), os.urandom(16)).encode()


def test_silent_connections_do_not_keep_honest_clients_out(start: Any) -> None:
    server = start(limits={"handshakes_max": 4, "handshake_ms": 60_000})
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect_raw(server.address)) for _ in range(20)]
        client = stack.enter_context(server.connect())
        found = server.wait_for(client, lambda now: now["connections_accepted"] == 21)
        assert found["handshakes_evicted"] >= 16
        assert found["handshakes_open"] <= 4
        assert silent[0].recv(1) == b""


def test_a_hello_has_one_deadline_however_slowly_it_trickles(start: Any) -> None:
    server = start(limits={"handshake_ms": 150})
    with connect_raw(server.address) as slow:
        slow.sendall(hello()[: CLIENT_HELLO_BYTES - 1])
        assert slow.recv(1) == b""
    with server.connect() as client:
        assert server.counters(client)["handshakes_timed_out"] == 1


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\n" + b"x" * 64, bytes(64)], ids=["nothing", "http", "zeros"]
)
def test_what_is_no_hello_is_closed_and_counted(start: Any, sent: bytes) -> None:
    server = start()
    with connect_raw(server.address) as stranger:
        stranger.sendall(sent)
        if not sent:
            stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    with server.connect() as client:
        found = server.counters(client)
        assert found["hellos_malformed"] + found["handshakes_cut_off"] == 1
        assert found["connections"] == 1


def test_more_connections_than_the_bound_are_told_so(start: Any) -> None:
    server = start(limits={"connections_max": 2})
    with server.connect() as first, server.connect() as second:
        with pytest.raises(QueueFull):
            server.connect()
        second.close()
        server.wait_for(first, lambda now: now["connections"] == 1)
        with server.connect() as third:
            assert third.call("echo", [3]) == [3]


def test_a_server_without_free_descriptors_recovers(start: Any) -> None:
    server = start(descriptors=40, limits={"handshake_ms": 60_000})
    with server.connect() as client:
        with contextlib.ExitStack() as stack:
            for _ in range(60):
                stack.enter_context(connect_raw(server.address))
            server.wait_for(client, lambda now: now["accept_failures"] > 0)
            assert client.call("echo", ["served"]) == ["served"]
        with server.connect(limits=ClientLimits(handshake_ms=15_000)) as other:
            assert other.call("echo", [1]) == [1]


def test_a_killed_client_is_let_go(start: Any) -> None:
    server = start()
    code = (
        "import sys\nfrom moonpool.rpc.client import RpcClient\n"
        "client = RpcClient(sys.argv[1])\nprint(client.call('echo', [1]), flush=True)\n"
        "client.call('keep', [], 60.0)"
    )
    with server.connect() as watcher:
        process = subprocess.Popen(
            [sys.executable, "-c", code, server.address], stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "[1]\n"
            server.wait_for(watcher, lambda now: now["unanswered"] == 2)
        finally:
            process.kill()
            process.communicate(timeout=WAIT_S)
        found = server.wait_for(watcher, lambda now: now["closed_peer_closed"] == 1)
        assert found["unanswered"] == 1, "the question about it"


def test_a_killed_server_ends_all_waits(start: Any) -> None:
    server = start()
    client = server.connect()
    problems: list[MoonpoolError] = []

    def wait() -> None:
        try:
            client.call("keep", timeout_s=WAIT_S)
        except MoonpoolError as problem:
            problems.append(problem)

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    with server.connect() as watcher:
        server.wait_for(watcher, lambda now: now["unanswered"] == 5)
    server.process.kill()
    for thread in threads:
        thread.join(WAIT_S)
    assert [type(problem) for problem in problems] == [PeerGone] * 4
    assert client.closed_reason is not None
    client.close()
    server.process.wait(WAIT_S)
    with pytest.raises(PeerRefused):
        server.connect()


def test_a_stopped_server_costs_the_timeout_and_no_more(start: Any) -> None:
    server = start()
    with server.connect() as client:
        assert client.call("echo", [1]) == [1]
        server.process.send_signal(signal.SIGSTOP)
        with pytest.raises(TransferTimeout):
            client.call("echo", [2], timeout_s=0.1)
        with pytest.raises(HandshakeFailed):
            server.connect(limits=ClientLimits(handshake_ms=100))
        server.process.send_signal(signal.SIGCONT)
        assert client.call("echo", [3]) == [3]
        assert client.native.unclaimed == 1


def test_a_connection_that_the_server_closes_first_gets_its_answer(start: Any) -> None:
    server = start()
    with server.connect() as client:
        assert client.call("leave") == "bye"
        with pytest.raises(PeerGone):
            client.call("echo")


def test_a_result_above_a_frame_becomes_an_error(start: Any) -> None:
    server = start(limits={"frame_bytes_max": 4_096})
    with server.connect() as client:
        with pytest.raises(RpcError, match="TOO_LARGE_FRAME"):
            client.call("large", [5_000])
        assert client.call("large", [3_000]) == bytes(3_000)


def test_params_that_are_no_values_are_refused_without_harm(start: Any) -> None:
    """MessagePack that is sound in structure, but holds a text that is no UTF-8 or a list as a map's key."""
    server = start()
    with server.connect() as client:
        for params in (b"\x91\xa1\xff", b"\x91\x81\x90\x01"):
            with pytest.raises(RpcError, match="BAD_PARAMS"):
                client.native.call("echo", params, WAIT_S)
        assert client.call("echo", [1]) == [1]


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (ServerLimits, "connections_max", 0),
        (ServerLimits, "frame_bytes_max", 1 << 30),
        (ServerLimits, "spin_us", -1),
        (ClientLimits, "pushes_max", True),
        (ClientLimits, "connect_ms", "1 s"),
    ],
)
def test_a_wrong_limit_is_named(kind: Any, field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=field):
        kind(**{field: value})
