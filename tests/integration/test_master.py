"""Masters as wholes: serving, standing by, taking over, Redis away, kill -9, what they show."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from moonpool.errors import MoonpoolError, PeerError
from moonpool.http_status import HttpStatusConfig
from moonpool.rpc.client import RpcClient
from moonpool.rpc.errors import RpcError
from moonpool.store.journal_config import JournalConfig
from moonpool.store.leader import Leader
from moonpool.store.master import Master
from moonpool.store.master_config import MasterConfig
from moonpool.store.master_service_config import MasterServiceConfig
from moonpool.store.private_redis import PrivateRedis
from moonpool.store.redis_link import RedisAddress, RedisLink

pytestmark = pytest.mark.skipif(
    shutil.which("redis-server") is None and shutil.which("valkey-server") is None,
    reason="redis-server is not installed (apt-get install redis-server)",
)

WAIT_S = 20.0
CALL_S = 5.0
Found = TypeVar("Found")


def until(found: Callable[[], Found], what: str) -> Found:
    """Asks again until there is an answer, within a bound."""
    end = time.monotonic() + WAIT_S
    while True:
        got = found()
        if got:
            return got
        assert time.monotonic() < end, f"{what}: not within {WAIT_S} s"
        time.sleep(0.01)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not tmp_path: the path of a unix socket must be short."""
    made = Path(tempfile.mkdtemp(prefix="moonpool-m-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def server(folder: Path) -> Iterator[PrivateRedis]:
    one = PrivateRedis(str(folder / "redis"), 1_000, 20_000)
    one.ensure()
    yield one
    one.stop()
    one.forsake()


@pytest.fixture
def open_master() -> Iterator[Callable[..., Master]]:
    made: list[Master] = []

    def make(rules: MasterConfig | None = None, http: bool = False, **journal: Any) -> Master:
        config = MasterServiceConfig(
            journal=JournalConfig(**{"lease_ms": 600, "timeout_ms": 1_000, **journal}),
            endpoints=("127.0.0.1:0",),
            rules=rules or MasterConfig(),
            http=HttpStatusConfig() if http else None,
        )
        made.append(Master(config))
        made[-1].start()
        return made[-1]

    yield make
    for one in made:
        one.close(release=False)


def join(*addresses: str) -> RpcClient:
    """A client of whichever of these leads."""

    def attempt() -> RpcClient | None:
        for address in addresses:
            client = None
            try:
                client = RpcClient(address)
                client.call("client_join", [os.urandom(16), "test", "host", "", b""], CALL_S)
            except (RpcError, PeerError):
                if client is not None:
                    client.close()
            else:
                return client
        return None

    return until(attempt, f"a leader among {addresses}")


def tenants(client: RpcClient) -> set[str]:
    return {row["name"] for row in client.call("status", [], CALL_S)["tenants"]}


def refusal_of(call: Callable[[], object]) -> str:
    try:
        call()
    except RpcError as exc:
        return exc.wire_name
    return ""


def test_a_master_in_memory_serves_and_ends(open_master: Callable[..., Master]) -> None:
    one = open_master(address="memory://", http=True)
    with join(one.address) as client:
        assert client.exists([b"a", b"b"]) == b"\x00\x00"
        client.call("tenant_set", ["t", 0, b""], CALL_S)
        assert tenants(client) == {"default", "t"}
        until(lambda: one.role == "leader", "shown")
    until(lambda: get(one, "/healthz")[0] == 200, "healthy")
    one.close()
    with pytest.raises(PeerError):
        RpcClient(one.address)
    one.close()


def test_a_standby_names_the_leader_and_takes_over(
    server: PrivateRedis, open_master: Callable[..., Master]
) -> None:
    first = open_master(address=server.url)
    with join(first.address) as client:
        client.call("tenant_set", ["kept", 7, b""], CALL_S)
    standby = open_master(address=server.url, http=True)
    with RpcClient(standby.address) as client:
        until(
            lambda: first.address in str(caught(lambda: client.call("status", [], CALL_S))),
            "the standby names the leader",
        )
        assert refusal_of(lambda: client.exists([b"a"])) in ("NOT_LEADER", "UNKNOWN_CLIENT")
    code, health = get(standby, "/healthz")
    assert code == 503
    assert first.address in health["reason"]
    first.close(release=True)
    with join(first.address, standby.address) as client:
        assert tenants(client) == {"default", "kept"}
    until(lambda: get(standby, "/healthz")[0] == 200, "healthy")


def test_a_leader_that_stops_being_heard_is_deposed_and_lets_its_clients_go(
    server: PrivateRedis, open_master: Callable[..., Master]
) -> None:
    first, second = open_master(address=server.url), None
    with join(first.address) as client:
        before = client.call("status", [], CALL_S)["epoch"]
        second = open_master(address=server.url)
        link = RedisLink(RedisAddress.parse(server.url), 5_000)
        # As if the second had been elected while the first one slept.
        link.call(b"HINCRBY", b"{moonpool}:head", b"epoch", 5)
        link.close()
        until(lambda: client.closed_reason is not None or gone(client), "its connection ends")
    with join(first.address, second.address) as client:
        assert client.call("status", [], CALL_S)["epoch"] >= before + 6


def gone(client: RpcClient) -> bool:
    try:
        client.call("status", [], CALL_S)
    except RpcError:
        return False
    except PeerError:
        return True
    return False


def test_redis_stopped_reads_go_on_and_then_say_so(
    server: PrivateRedis, open_master: Callable[..., Master]
) -> None:
    rules = MasterConfig(journal_wait_ms=300)
    one = open_master(rules, http=True, address=server.url, lease_ms=3_000, timeout_ms=300)
    link = RedisLink(RedisAddress.parse(server.url), 5_000)
    link.close()
    with join(one.address) as client:
        client.call("tenant_set", ["before", 0, b""], CALL_S)
        os.kill(link.process_id, signal.SIGSTOP)
        try:
            assert refusal_of(lambda: client.call("tenant_set", ["during", 0, b""], CALL_S)) in (
                "JOURNAL_UNAVAILABLE",
                "NOT_READY",
            )
            until(lambda: refusal_of(lambda: client.exists([b"a"])) == "NOT_READY", "the lease ends")
            until(lambda: get(one, "/healthz")[0] == 503, "it says so")
        finally:
            os.kill(link.process_id, signal.SIGCONT)
        until(lambda: refusal_of(lambda: client.exists([b"a"])) == "", "it goes on")
        client.call("tenant_set", ["after", 0, b""], CALL_S)
        assert {"before", "after"} <= tenants(client)
    until(lambda: get(one, "/healthz")[0] == 200, "healthy again")


def test_a_killed_private_redis_comes_back_with_everything(
    folder: Path, open_master: Callable[..., Master]
) -> None:
    one = open_master(data_dir=str(folder / "own"))
    with join(one.address) as client:
        client.call("tenant_set", ["kept", 0, b""], CALL_S)
    link = RedisLink(RedisAddress.parse(f"redis+unix://{folder}/own/redis.sock"), 5_000)
    link.close()
    before = one._loop.shown["epoch"]
    os.kill(link.process_id, signal.SIGKILL)
    until(lambda: one._loop.shown["epoch"] > before, "another epoch")
    with join(one.address) as client:
        assert tenants(client) == {"default", "kept"}
    one.close(release=True)
    assert not PrivateRedis(str(folder / "own"), 1_000, 1_000).alive()


@pytest.mark.parametrize("method", ["request", "tick", "take_outputs"])
def test_a_bug_in_the_leader_costs_the_term_and_not_the_facts(
    server: PrivateRedis, open_master: Callable[..., Master], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    one = open_master(address=server.url)
    with join(one.address) as client:
        client.call("tenant_set", ["kept", 0, b""], CALL_S)
        before = client.call("status", [], CALL_S)["epoch"]
        original = getattr(Leader, method)

        def fail(self: Leader, *args: Any) -> None:
            monkeypatch.setattr(Leader, method, original)
            raise KeyError("a bug")

        monkeypatch.setattr(Leader, method, fail)
        until(lambda: gone(client), "its connection ends")
    with join(one.address) as client:
        assert tenants(client) == {"default", "kept"}
        assert client.call("status", [], CALL_S)["epoch"] == before + 1


def test_snapshots_are_taken_under_load_and_a_restart_reads_them(
    server: PrivateRedis, open_master: Callable[..., Master]
) -> None:
    one = open_master(address=server.url, snapshot_every_ms=100, snapshot_timeout_ms=10_000)
    names = {"default"}
    with join(one.address) as client:

        def snapshots() -> bool:
            name = f"t{len(names)}"
            client.call("tenant_set", [name, 0, b""], CALL_S)
            names.add(name)
            return one._journal.counters()["journal_snapshots"] >= 2

        until(snapshots, "two snapshots")
        assert one._journal.counters()["journal_snapshots_failed"] == 0
        assert tenants(client) == names
    one.close(release=True)
    two = open_master(address=server.url)
    with join(two.address) as client:
        assert tenants(client) == names


def test_the_pages_tell_what_is_there(server: PrivateRedis, open_master: Callable[..., Master]) -> None:
    one = open_master(address=server.url, http=True)
    with join(one.address) as client:
        client.call("tenant_set", ["t", 0, b""], CALL_S)
        client.exists([b"x"])
        until(lambda: 'op="exists"' in text(one), "shown")
        shown = text(one)
    for name in (
        "objects",
        "leading",
        "epoch",
        "journal_durable_sequence",
        "journal_terms_total",
        "transfer_latency_seconds_bucket",
        "connections_accepted_total",
    ):
        assert f"moonpool_master_{name}{{" in shown, name
    assert get(one, "/nothing")[0] == 404


def text(master: Master) -> str:
    with urllib.request.urlopen(f"http://{master.http_address}/metrics", timeout=CALL_S) as page:
        return str(page.read().decode())


def get(master: Master, path: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(f"http://{master.http_address}{path}", timeout=CALL_S) as page:
            return page.status, json.loads(page.read())
    except urllib.error.HTTPError as exc:
        body = exc.read()
        return exc.code, json.loads(body) if exc.headers["Content-Type"] == "application/json" else body


def caught(call: Callable[[], object]) -> MoonpoolError | None:
    try:
        call()
    except MoonpoolError as exc:
        return exc
    return None


class Process:
    """`moonpool master` as a process of its own."""

    def __init__(self, *options: str) -> None:
        command = [
            sys.executable,
            "-m",
            "moonpool.cli",
            "master",
            "--json",
            "--listen",
            "127.0.0.1:0",
            *options,
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self.process.stdout is not None
        self.address: str = json.loads(self.process.stdout.readline())["address"]

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        code = self.process.wait(WAIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def test_kill_9_and_a_restart_keep_everything_and_sigterm_ends_cleanly(folder: Path) -> None:
    data = ["--data-dir", str(folder / "own")]
    private = PrivateRedis(str(folder / "own"), 1_000, 20_000)
    names = {"default"}
    try:
        for number in range(3):
            one = Process(*data)
            try:
                with join(one.address) as client:
                    assert tenants(client) == names
                    client.call("tenant_set", [f"t{number}", 0, b""], CALL_S)
                    names.add(f"t{number}")
            finally:
                one.end(signal.SIGKILL)
            assert private.alive(), "it outlives its master"
        one = Process(*data)
        with join(one.address) as client:
            assert tenants(client) == names
        assert one.end(signal.SIGTERM) == 0
        assert not private.alive()
    finally:
        private.stop()


def test_a_standby_process_takes_over_from_a_killed_and_from_a_stopped_one(
    server: PrivateRedis,
) -> None:
    options = ["--redis", server.url]
    first, second = Process(*options), Process(*options)
    try:
        leading, other = leader_of(first, second)
        with join(leading.address) as client:
            client.call("tenant_set", ["kept", 0, b""], CALL_S)
        leading.process.send_signal(signal.SIGSTOP)
        try:
            with join(other.address) as client:
                assert tenants(client) == {"default", "kept"}
                client.call("tenant_set", ["later", 0, b""], CALL_S)
        finally:
            leading.process.send_signal(signal.SIGCONT)
        # What slept through its lease stands by now; whoever asked while it noticed was let go.
        until(lambda: stands_by(leading.address), "it stands by")
        other.process.kill()
        with join(leading.address) as client:
            assert tenants(client) == {"default", "kept", "later"}
    finally:
        first.end(signal.SIGKILL)
        second.end(signal.SIGKILL)


def stands_by(address: str) -> bool:
    try:
        with RpcClient(address) as client:
            return refusal_of(lambda: client.call("status", [], CALL_S)) == "NOT_LEADER"
    except PeerError:
        return False


def leader_of(first: Process, second: Process) -> tuple[Process, Process]:
    def look() -> tuple[Process, Process] | None:
        for one, other in ((first, second), (second, first)):
            with RpcClient(one.address) as client:
                if refusal_of(lambda client=client: client.call("status", [], CALL_S)) == "":  # type: ignore[misc]
                    return one, other
        return None

    return until(look, "one of them leads")
