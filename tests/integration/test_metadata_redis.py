"""Names in a real Redis: conflicts, dead holders, races, a Redis that hangs, dies or forgets."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from moonpool import Engine
from moonpool.config import EngineConfig
from moonpool.errors import (
    AccessDenied,
    EngineClosed,
    MetadataUnavailable,
    MoonpoolError,
    NameInUse,
    NoSuchSegment,
    ProtocolError,
)
from moonpool.ids import InstanceId, new_instance_id
from moonpool.metadata import open_metadata
from moonpool.metadata.base import Lease, LeaseState, Record
from moonpool.metadata.redis import RedisMetadata, RedisOptions

SERVER = shutil.which("redis-server")
pytestmark = pytest.mark.skipif(
    SERVER is None and os.environ.get("MOONPOOL_NATIVE") != "require",
    reason="redis-server is not installed (apt-get install redis-server)",
)
WAIT_S = 60.0


class PrivateRedis:
    """A redis-server of our own, on a unix socket, that keeps nothing on disk."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.socket = folder / "redis.sock"
        self.url = f"redis+unix://{self.socket}"
        self._folder = folder
        self._options = options
        self.start()

    def start(self) -> None:
        assert SERVER is not None, "redis-server is missing: apt-get install redis-server"
        command = [SERVER, "--port", "0", "--unixsocket", str(self.socket), "--dir", str(self._folder)]
        command += ["--save", "", "--appendonly", "no", *self._options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "ready to accept connections" in line.lower():
                return
        pytest.fail("redis-server ended before it was ready")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not tmp_path: a unix socket's path has at most 107 bytes.
    path = Path(tempfile.mkdtemp(prefix="moonpool-redis-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def server(folder: Path) -> Iterator[PrivateRedis]:
    private = PrivateRedis(folder)
    yield private
    private.kill()


Opener = Callable[..., RedisMetadata]


@pytest.fixture
def open_redis(server: PrivateRedis) -> Iterator[Opener]:
    opened: list[RedisMetadata] = []

    def open_one(
        alive: Callable[[Record], bool] = lambda record: True,
        changed: Callable[[Lease], None] = lambda lease: None,
        lease_ms: int = 60_000,
        timeout_ms: int = 20_000,
    ) -> RedisMetadata:
        opened.append(RedisMetadata(RedisOptions(server.url, timeout_ms, lease_ms), alive, changed))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "moonpool-lease"]


def record(name: str = "node-1", port: int = 7420, instance: InstanceId | None = None) -> Record:
    return Record(name, "127.0.0.1", port, "moonpool/x", instance or new_instance_id())


def never(asked: Record) -> bool:
    raise AssertionError(f"{asked} was probed and need not be")


def test_a_name_is_published_found_listed_and_withdrawn(open_redis: Opener) -> None:
    metadata = open_redis(never)
    first, second = record("b"), record("a", 7421)
    leases = [metadata.register(first), metadata.register(second)]
    assert metadata.resolve("b") == first.with_generation(1)
    assert metadata.list() == [second.with_generation(2), first.with_generation(1)]
    metadata.withdraw(leases[0])
    metadata.withdraw(leases[0])
    assert leases[0].report().state is LeaseState.WITHDRAWN
    with pytest.raises(NoSuchSegment) as caught:
        metadata.resolve("b")
    assert caught.value.name == "b"
    assert [found.name for found in metadata.list()] == ["a"]


def test_generations_grow_and_never_repeat(open_redis: Opener) -> None:
    metadata = open_redis(never)
    seen = []
    for _ in range(3):
        lease = metadata.register(record())
        seen.append(lease.record.generation)
        metadata.withdraw(lease)
    assert seen == [1, 2, 3]


def test_a_live_holder_keeps_its_name(open_redis: Opener) -> None:
    holder = open_redis(never).register(record())
    probed: list[Record] = []

    def alive(asked: Record) -> bool:
        probed.append(asked)
        return True

    other = open_redis(alive)
    with pytest.raises(NameInUse) as caught:
        other.register(record(port=9))
    assert (caught.value.name, caught.value.peer) == ("node-1", "127.0.0.1:7420")
    assert probed == [holder.record]
    assert other.resolve("node-1") == holder.record


def test_a_dead_holder_is_replaced_at_once_and_hears_of_it(open_redis: Opener) -> None:
    heard: queue.Queue[LeaseState] = queue.Queue()
    first = open_redis(never, lambda lease: heard.put(lease.report().state), lease_ms=600)
    lost = first.register(record())
    taker = record(port=9)
    taken = open_redis(lambda asked: asked.instance != lost.record.instance).register(taker)
    assert taken.record.generation == lost.record.generation + 1
    assert heard.get(timeout=WAIT_S) is LeaseState.LOST
    assert isinstance(lost.report().last_error, NameInUse)
    first.withdraw(lost)
    assert first.resolve("node-1") == taken.record


def test_a_killed_process_loses_its_name_at_once(open_redis: Opener, server: PrivateRedis) -> None:
    code = (
        "import sys; from moonpool.metadata.redis import *; from moonpool.metadata.base import Record;"
        "held = RedisMetadata(RedisOptions(sys.argv[1], 20000, 3600000), lambda record: True);"
        "held.register(Record('node-1', '127.0.0.1', 5, '', bytes(15) + b'1')); print('held', flush=True);"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code, server.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        metadata = open_redis(lambda asked: child.poll() is None)
        with pytest.raises(NameInUse):
            metadata.register(record())
        child.kill()
        child.wait()
        assert metadata.register(record()).record.generation == 2


def test_a_killed_engine_is_restarted_under_its_name_at_once(server: PrivateRedis) -> None:
    config = EngineConfig(name="node-1", metadata=server.url, lease_ms=3_600_000)
    code = (
        "import sys; from moonpool import Engine, EngineConfig;"
        "held = Engine(EngineConfig(name='node-1', metadata=sys.argv[1], lease_ms=3600000));"
        "print(held.endpoint, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code, server.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        endpoint = child.stdout.readline().strip()
        with pytest.raises(NameInUse) as caught:
            Engine(config)
        assert caught.value.peer == endpoint
        child.kill()
        child.wait()
    with Engine(config), Engine(EngineConfig(metadata=server.url)) as peer:
        assert peer.open("node-1").name == "node-1"


def test_an_expired_lease_frees_its_name_without_a_probe(open_redis: Opener, server: PrivateRedis) -> None:
    lease = open_redis(never).register(record())
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        assert client.pexpire("{moonpool}:segment:node-1", 1)
        while client.exists("{moonpool}:segment:node-1"):
            pass
    metadata = open_redis(never)
    with pytest.raises(NoSuchSegment):
        metadata.resolve("node-1")
    assert metadata.register(record(port=9)).record.generation == lease.record.generation + 1


def test_entries_carry_the_lease_as_time_to_live(open_redis: Opener, server: PrivateRedis) -> None:
    open_redis(never, lease_ms=3_600_000).register(record())
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        assert 0 < client.pttl("{moonpool}:segment:node-1") <= 3_600_000


def race(contenders: list[RedisMetadata]) -> list[Lease | MoonpoolError]:
    barrier = threading.Barrier(len(contenders))
    results: list[Lease | MoonpoolError] = []

    def contend(metadata: RedisMetadata, port: int) -> None:
        mine = record(port=port)
        barrier.wait()
        try:
            results.append(metadata.register(mine))
        except MoonpoolError as exc:
            results.append(exc)

    threads = [threading.Thread(target=contend, args=(one, 8_000 + n)) for n, one in enumerate(contenders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("dead_holder", [False, True])
def test_of_many_that_race_for_a_name_one_gets_it(open_redis: Opener, dead_holder: bool) -> None:
    gone = open_redis(never).register(record(port=5)) if dead_holder else None

    def alive(asked: Record) -> bool:
        return gone is None or asked.instance != gone.record.instance

    results = race([open_redis(alive) for _ in range(8)])
    winners = [one for one in results if isinstance(one, Lease)]
    assert len(results) == 8
    assert len(winners) == 1
    assert all(isinstance(one, Lease | NameInUse) for one in results)
    assert open_redis().resolve("node-1") == winners[0].record


def test_a_name_that_keeps_changing_hands_is_given_up(open_redis: Opener) -> None:
    metadata = open_redis()
    metadata.register(record(port=1))

    def another_takes_it(asked: Record) -> bool:
        rival = open_redis(lambda record: False)
        rival.register(record(port=asked.port + 1))
        return False

    with pytest.raises(NameInUse, match="changed hands"):
        open_redis(another_takes_it).register(record(port=60))


def test_the_same_instance_takes_its_own_entry_over(open_redis: Opener) -> None:
    mine = record()
    first = open_redis(never).register(mine)
    again = open_redis(never).register(mine)
    assert again.record.instance == first.record.instance
    assert again.record.generation == first.record.generation + 1


def test_a_redis_that_forgot_gets_the_same_entry_again(open_redis: Opener, server: PrivateRedis) -> None:
    heard: queue.Queue[LeaseState] = queue.Queue()
    metadata = open_redis(never, lambda lease: heard.put(lease.report().state), lease_ms=600)
    for _ in range(3):
        metadata.withdraw(metadata.register(record()))
    lease = metadata.register(record())
    server.kill()
    assert heard.get(timeout=WAIT_S) is LeaseState.FAILING
    assert heard.get(timeout=WAIT_S) is LeaseState.EXPIRED
    assert isinstance(lease.report().last_error, MetadataUnavailable)
    server.start()
    assert heard.get(timeout=WAIT_S) is LeaseState.HELD
    assert metadata.resolve("node-1") == lease.record
    assert metadata.register(record("node-2")).record.generation == lease.record.generation + 1


def test_a_redis_that_is_away_is_a_typed_error(open_redis: Opener, server: PrivateRedis) -> None:
    metadata = open_redis(never)
    lease = metadata.register(record())
    server.kill()
    for call in (
        lambda: metadata.register(record("node-2")),
        lambda: metadata.resolve("node-1"),
        metadata.list,
        lambda: metadata.withdraw(lease),
    ):
        with pytest.raises(MetadataUnavailable) as caught:
            call()
        assert caught.value.retryable
        assert caught.value.reason
    assert lease.report().state is LeaseState.WITHDRAWN
    server.start()
    with pytest.raises(NoSuchSegment):
        metadata.resolve("node-1")


def test_a_redis_that_hangs_is_a_typed_error_in_bounded_time(
    open_redis: Opener, server: PrivateRedis
) -> None:
    metadata = open_redis(never, timeout_ms=200)
    metadata.list()
    server.signal(signal.SIGSTOP)
    try:
        for call in (metadata.list, lambda: metadata.register(record())):
            with pytest.raises(MetadataUnavailable) as caught:
                call()
            assert caught.value.timeout_ms == 200
        open_redis(never, timeout_ms=200).close()
    finally:
        server.signal(signal.SIGCONT)
    assert metadata.resolve(open_redis().register(record("node-2")).record.name).name == "node-2"


def test_what_redis_did_but_could_not_answer_is_adopted(open_redis: Opener, server: PrivateRedis) -> None:
    metadata = open_redis(never, timeout_ms=200)
    metadata.list()
    mine = record()
    server.signal(signal.SIGSTOP)
    try:
        with pytest.raises(MetadataUnavailable):
            metadata.register(mine)
    finally:
        server.signal(signal.SIGCONT)
    # The stopped server may or may not have run the script when it woke: both must end well.
    lease = open_redis(never).register(mine)
    assert metadata.resolve("node-1") == lease.record


def test_a_withdrawn_name_never_comes_back(open_redis: Opener) -> None:
    metadata = open_redis(never, lease_ms=60)
    for _ in range(40):
        lease = metadata.register(record())
        if not lease.report().renewals:
            metadata.resolve("node-1")
        metadata.withdraw(lease)
        with pytest.raises(NoSuchSegment):
            metadata.resolve("node-1")


def test_entries_that_cannot_be_read_are_refused_and_left_out(
    open_redis: Opener, server: PrivateRedis
) -> None:
    metadata = open_redis(never)
    good = metadata.register(record("good"))
    bad = metadata.register(record("bad"))
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        client.hset("{moonpool}:segment:bad", mapping={"record": "{}", "generation": "77"})
    with pytest.raises(ProtocolError):
        metadata.resolve("bad")
    assert metadata.list() == [good.record]
    with pytest.raises(NameInUse, match="unreadable"):
        open_redis(never).register(record("bad"))
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        client.hset("{moonpool}:segment:good", "generation", "many")
        with pytest.raises(ProtocolError, match="many"):
            metadata.resolve("good")
        with pytest.raises(NameInUse, match="unreadable"):
            open_redis(never).register(record("good"))
        assert metadata.list() == []
        client.delete("{moonpool}:segment:bad")
        client.set("{moonpool}:segment:bad", "a string")
    for call in (lambda: metadata.resolve("bad"), metadata.list, lambda: metadata.withdraw(bad)):
        with pytest.raises(MetadataUnavailable, match="WRONGTYPE"):
            call()


def test_closing_withdraws_and_ends_every_call(open_redis: Opener) -> None:
    metadata = open_redis(never)
    lease = metadata.register(record())
    metadata.close()
    metadata.close()
    assert lease.report().state is LeaseState.WITHDRAWN
    with pytest.raises(NoSuchSegment):
        open_redis().resolve("node-1")
    for call in (metadata.list, lambda: metadata.register(record()), lambda: metadata.resolve("x")):
        with pytest.raises(EngineClosed):
            call()


def test_a_wrong_password_is_access_denied_and_not_shown(folder: Path) -> None:
    private = PrivateRedis(folder, "--requirepass", "correct-password")
    try:
        for password in ("", ":wrong-password@"):
            url = private.url.replace("redis+unix://", f"redis+unix://{password}")
            metadata = open_metadata(EngineConfig(metadata=url), never)
            with pytest.raises(AccessDenied) as caught:
                metadata.list()
            assert "wrong-password" not in str(caught.value)
            metadata.close()
        good = private.url.replace("redis+unix://", "redis+unix://:correct-password@")
        metadata = open_metadata(EngineConfig(metadata=good), never)
        assert metadata.list() == []
        metadata.close()
    finally:
        private.kill()
