"""Masters and a Redis that are killed or stopped at random: what was durable stays, in its order."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.store import facts
from moonpool.store.facts import encode_fact
from moonpool.store.journal import Deposed, Elected, Identity, SnapshotWanted
from moonpool.store.journal_config import JournalConfig
from moonpool.store.journal_thread import RedisJournal
from moonpool.store.private_redis import PrivateRedis
from moonpool.store.redis_link import RedisLink
from moonpool.store.state import State
from moonpool.store.table_factory import TableConfig, twin_tables
from moonpool.store.tables import ObjectTable

pytestmark = pytest.mark.skipif(
    shutil.which("redis-server") is None and shutil.which("valkey-server") is None,
    reason="redis-server is not installed (apt-get install redis-server)",
)

EVENTS = 14
LEASE_MS = 300
WAIT_S = 30.0


def make_objects() -> ObjectTable:
    return twin_tables(TableConfig()).objects


class Master:
    """A master that appends one numbered fact after another while it leads, and notes which are durable."""

    def __init__(self, name: str, url: str, acknowledged: dict[int, str]) -> None:
        self.name = name
        self.woken = threading.Event()
        self.state: State | None = None
        self.epoch = 0
        self.acknowledged = acknowledged
        self.sent: dict[int, str] = {}
        config = JournalConfig(
            address=url, lease_ms=LEASE_MS, timeout_ms=150, snapshot_every_ms=400, snapshot_timeout_ms=5_000
        )
        self.journal = RedisJournal(
            config, Identity(name=name, endpoints=(f"{name}:1",)), make_objects, self.woken.set
        )
        self.journal.start()

    def turn(self, rng: random.Random) -> None:
        for notice in self.journal.take():
            if isinstance(notice, Elected):
                self.state, self.epoch, self.sent = notice.state, notice.epoch, {}
                self.check()
            elif isinstance(notice, Deposed):
                self.state = None
            elif isinstance(notice, SnapshotWanted) and self.state is not None:
                self.journal.write_snapshot(self.state)
        if self.state is None:
            return
        durable = self.journal.durable
        if self.journal.may_answer(time.clock_gettime_ns(time.CLOCK_BOOTTIME)):
            for number in [each for each in self.sent if each <= durable]:
                self.acknowledged[number] = self.sent.pop(number)
        if self.state.sequence - durable < 50:
            self.append(rng)

    def append(self, rng: random.Random) -> None:
        assert self.state is not None
        first, made = self.state.sequence + 1, []
        for number in range(first, first + rng.randrange(1, 5)):
            fact = facts.Tenant(number, f"{self.name}-{self.epoch}-{number}", 0, b"")
            self.state.apply(fact)
            self.sent[number] = fact.name
            made.append(encode_fact(fact))
        self.journal.append(first, made, first, urgent=rng.random() < 0.5)

    def check(self) -> None:
        """What any leader told its clients is what this one starts from."""
        assert self.state is not None
        for number, name in self.acknowledged.items():
            kept = self.state.tenants.get(number)
            assert kept is not None, f"fact {number} is lost"
            assert kept.name == name, f"fact {number} is another"


@pytest.fixture
def server() -> Iterator[PrivateRedis]:
    """Not tmp_path: the path of a unix socket must be short."""
    folder = Path(tempfile.mkdtemp(prefix="moonpool-c-"))
    one = PrivateRedis(str(folder / "own"), 2_000, 20_000)
    one.ensure()
    yield one
    one.stop()
    one.forsake()
    shutil.rmtree(folder, ignore_errors=True)


def process_of(server: PrivateRedis) -> int:
    link = RedisLink(server.ensure(), 5_000)
    link.close()
    return link.process_id


def run(masters: list[Master], rng: random.Random, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for one in masters:
            one.turn(rng)
        masters[0].woken.wait(0.002)
        masters[0].woken.clear()


@pytest.mark.parametrize("seed", [1, 2])
def test_what_was_durable_survives_everything(server: PrivateRedis, seed: int) -> None:
    rng = random.Random(seed)
    acknowledged: dict[int, str] = {}
    names = iter(range(1_000))
    masters = [Master(f"m{next(names)}", server.url, acknowledged) for _ in range(2)]
    try:
        for _ in range(EVENTS):
            run(masters, rng, rng.uniform(0.1, 0.5))
            event = rng.choice(("kill redis", "stop redis", "kill master", "end master"))
            if event == "kill redis":
                os.kill(process_of(server), signal.SIGKILL)
                run(masters, rng, rng.uniform(0.0, 0.2))
                server.ensure()
            elif event == "stop redis":
                process = process_of(server)
                os.kill(process, signal.SIGSTOP)
                run(masters, rng, rng.uniform(0.05, 3 * LEASE_MS / 1e3))
                os.kill(process, signal.SIGCONT)
            else:
                gone = masters.pop(rng.randrange(2))
                gone.journal.close(release=event == "end master")
                masters.append(Master(f"m{next(names)}", server.url, acknowledged))
        before, end = len(acknowledged), time.monotonic() + WAIT_S
        while len(acknowledged) <= before:
            assert time.monotonic() < end, f"seed={seed}: nobody leads; {masters[0].journal.trouble}"
            run(masters, rng, 0.1)
        assert len(acknowledged) > EVENTS
    finally:
        for one in masters:
            one.journal.close(release=False)
