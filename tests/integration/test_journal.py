"""The journal against a real redis-server: appends, fencing, loss, snapshots, standbys, restarts."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import pytest

from moonpool.store import facts
from moonpool.store.errors import JournalUnavailable
from moonpool.store.facts import encode_fact
from moonpool.store.journal import Deposed, Elected, EpochRaised, Identity, SnapshotWanted
from moonpool.store.journal_config import JournalConfig
from moonpool.store.journal_term import connect_link
from moonpool.store.journal_thread import RedisJournal
from moonpool.store.private_redis import PrivateRedis
from moonpool.store.redis_link import RedisAddress, RedisLink
from moonpool.store.redis_resp import RedisRefusal
from moonpool.store.redis_scripts import APPEND, Keys
from moonpool.store.state import State
from moonpool.store.table_factory import TableConfig, twin_tables
from moonpool.store.tables import ObjectTable

pytestmark = pytest.mark.skipif(
    shutil.which("redis-server") is None and shutil.which("valkey-server") is None,
    reason="redis-server is not installed (apt-get install redis-server)",
)

WAIT_S = 20.0
KEYS = Keys("moonpool")
Found = TypeVar("Found")


def make_objects() -> ObjectTable:
    return twin_tables(TableConfig()).objects


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not tmp_path: the path of a unix socket must be short."""
    made = Path(tempfile.mkdtemp(prefix="moonpool-j-"))
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
def link(server: PrivateRedis) -> Iterator[RedisLink]:
    made = RedisLink(RedisAddress.parse(server.url), 5_000)
    yield made
    made.close()


class Master:
    """What a master does with its journal, without the rest of one."""

    def __init__(self, name: str, **options: Any) -> None:
        self.woken = threading.Event()
        self.state = State(make_objects())
        self.sequence = 0
        self.epoch = 0
        self.seen: list[Any] = []
        options = {"lease_ms": 600, "timeout_ms": 1_000, **options}
        self.journal = RedisJournal(
            JournalConfig(**options),
            Identity(name=name, endpoints=(f"{name}:1",)),
            make_objects,
            self.woken.set,
        )
        self.journal.start()

    def until(self, found: Callable[[], Found], what: str) -> Found:
        """Waits, bounded, until something is true; looks whenever the journal says so, and now and then."""
        end = time.monotonic() + WAIT_S
        while True:
            for notice in self.journal.take():
                self.seen.append(notice)
                if isinstance(notice, Elected):
                    self.state, self.epoch = notice.state, notice.epoch
                    self.sequence = notice.state.sequence
                elif isinstance(notice, SnapshotWanted):
                    self.journal.write_snapshot(self.state)
            got = found()
            if got:
                return got
            assert time.monotonic() < end, f"{what}: not within {WAIT_S} s; {self.journal.trouble}"
            self.woken.wait(0.05)
            self.woken.clear()

    def lead(self) -> Master:
        self.until(lambda: self.of(Elected), "elected")
        return self

    def of(self, kind: type[Found]) -> list[Found]:
        return [each for each in self.seen if isinstance(each, kind)]

    def append(self, count: int = 1, urgent: bool = True) -> None:
        for _ in range(count):
            number = self.sequence + 1
            fact = facts.Tenant(number, f"tenant-{number}", number, b"")
            self.state.apply(fact)
            self.sequence = number
            self.journal.append(number, [encode_fact(fact)], number, urgent=urgent)

    def settle(self) -> None:
        self.until(lambda: self.journal.durable == self.sequence, "durable")

    def close(self, *, release: bool = True) -> None:
        self.journal.close(release=release)


@pytest.fixture
def master(server: PrivateRedis) -> Iterator[Callable[..., Master]]:
    made: list[Master] = []

    def make(name: str = "first", **options: Any) -> Master:
        made.append(Master(name, address=server.url, **options))
        return made[-1]

    yield make
    for one in made:
        one.close(release=False)


def test_what_was_appended_is_there_after_a_restart(master: Callable[..., Master]) -> None:
    first = master().lead()
    first.append(300, urgent=False)
    first.append(3)
    first.settle()
    assert 1 <= first.journal.counters()["journal_appends"] < 303, "facts share groups"
    wanted = first.state.state_hash()
    first.close(release=True)
    second = master("second").lead()
    assert second.epoch == first.epoch + 1
    assert second.state.state_hash() == wanted
    assert second.state.now_ms == 303
    second.append()
    second.settle()


def test_the_format_is_as_documented(master: Callable[..., Master], link: RedisLink) -> None:
    one = master(linger_us=1_000_000).lead()
    one.append(2, urgent=False)
    one.append()
    one.settle()
    head: Any = link.call(b"HGETALL", b"{moonpool}:head")
    fields = dict(zip(head[::2], head[1::2], strict=True))
    assert len(fields.pop(b"journal")) == 32
    assert fields == {b"version": b"1", b"epoch": b"%d" % one.epoch, b"sequence": b"3", b"snapshot": b"0"}
    lease: Any = link.call(b"GET", b"{moonpool}:leader")
    assert lease.split(b"\n")[1:] == [b"%d" % one.epoch, b"first", b"first:1"]
    stream: Any = link.call(b"XRANGE", b"{moonpool}:journal", b"-", b"+")
    tenants = b"".join(b"\x96\x0b\x01%c\xa8tenant-%d%c\xc4\x00" % (n, n, n) for n in (1, 2, 3))
    epoch = msgpack.packb(one.epoch)
    assert stream == [[b"3-0", [b"g", b"\x95\x01" + epoch + b"\x01\x03\x93" + tenants]]]


def test_settings_that_lose_facts_are_told(
    master: Callable[..., Master], link: RedisLink, caplog: pytest.LogCaptureFixture
) -> None:
    link.call(b"CONFIG", b"SET", b"maxmemory", 100 << 20)
    link.call(b"CONFIG", b"SET", b"maxmemory-policy", b"allkeys-lru")
    link.call(b"CONFIG", b"SET", b"appendonly", b"no")
    master().lead()
    assert "noeviction" in caplog.text
    assert "append-only" in caplog.text


def test_a_killed_leader_is_followed_when_its_lease_ends_and_its_facts_are_refused(
    master: Callable[..., Master], link: RedisLink
) -> None:
    first = master().lead()
    first.append(5)
    first.settle()
    standby = master("second")
    standby.until(lambda: standby.journal.leader_endpoints == ("first:1",), "the standby knows the leader")
    assert not standby.of(Elected)
    first.close(release=False)  # as a kill would: the lease stays
    standby.lead()
    assert standby.state.sequence == 5
    # What the first one would still send is fenced, and changes nothing.
    journal: Any = link.call(b"HGET", KEYS.head, b"journal")
    answer = link.run(APPEND, [KEYS.head, KEYS.journal], journal, first.epoch, 6, 6, b"late")
    assert answer == [-1, standby.epoch]
    standby.append()
    standby.settle()


def test_a_leader_that_slept_through_its_lease_answers_nothing_and_steps_down(
    master: Callable[..., Master], link: RedisLink
) -> None:
    first = master().lead()
    first.append(2)
    first.settle()
    assert first.journal.may_answer(time.clock_gettime_ns(time.CLOCK_BOOTTIME))
    # Another epoch, as after an election that this leader did not see.
    link.call(b"HINCRBY", KEYS.head, b"epoch", 1)
    first.append()
    first.until(lambda: first.of(Deposed), "deposed")
    first.until(lambda: len(first.of(Elected)) == 2, "elected again")
    assert first.epoch == first.of(Elected)[0].epoch + 2
    assert first.state.sequence == 2, "the fact of the old term is not there"


def test_repeats_gaps_and_strangers_are_told_apart(master: Callable[..., Master], link: RedisLink) -> None:
    first = master().lead()
    first.append(3)
    first.settle()
    keys = [KEYS.head, KEYS.journal]
    journal: Any = link.call(b"HGET", KEYS.head, b"journal")
    assert link.run(APPEND, keys, journal, first.epoch, 2, 3, b"x") == 3, "a repeat"
    assert link.run(APPEND, keys, journal, first.epoch, 5, 5, b"x") == [-3, 3], "a gap"
    assert link.run(APPEND, keys, journal, first.epoch, 3, 4, b"x") == [-3, 3], "an overlap"
    assert link.run(APPEND, keys, journal, first.epoch + 1, 4, 4, b"x") == [-2], "an epoch that never was"
    assert link.run(APPEND, keys, b"other", first.epoch, 4, 4, b"x") == [-2], "another journal"
    assert link.call(b"HGET", KEYS.head, b"sequence") == b"3"


def test_the_epoch_can_be_raised_and_goes_on_from_there(master: Callable[..., Master]) -> None:
    first = master(group_bytes=64).lead()
    first.append(50, urgent=False)
    first.journal.raise_epoch(first.epoch + 40)
    first.append(50, urgent=False)
    raised = first.until(lambda: first.of(EpochRaised), "raised")
    assert raised[0].epoch == first.of(Elected)[0].epoch + 41
    first.append(5)
    first.settle()
    first.close(release=True)
    second = master("second").lead()
    assert (second.epoch, second.state.sequence) == (raised[0].epoch + 1, 105)


def test_two_masters_never_lead_in_one_epoch(master: Callable[..., Master]) -> None:
    several = [master(f"m{number}") for number in range(3)]
    order: list[Master] = []
    while several:
        ahead: list[Master] = []
        while not ahead:
            for one in several:
                one.until(lambda: True, "a look")
            ahead = [one for one in several if one.of(Elected)]
            time.sleep(0.01)
        assert len(ahead) == 1
        ahead[0].append(2)
        ahead[0].settle()
        ahead[0].close(release=True)
        several.remove(ahead[0])
        order.append(ahead[0])
    assert [one.epoch - order[0].epoch for one in order] == [0, 1, 2]
    assert order[-1].state.sequence == 6


def test_a_killed_redis_deposes_and_nothing_durable_is_lost(server: PrivateRedis, folder: Path) -> None:
    one = Master("first", data_dir=str(folder / "own")).lead()
    try:
        one.append(20)
        one.settle()
        link = RedisLink(RedisAddress.parse(f"redis+unix://{folder}/own/redis.sock"), 1_000)
        link.close()
        os.kill(link.process_id, signal.SIGKILL)
        one.until(lambda: one.of(Deposed), "deposed")
        one.until(lambda: len(one.of(Elected)) == 2, "elected again over a server started anew")
        assert one.state.sequence == 20
        one.append(2)
        one.settle()
    finally:
        one.close(release=True)
    assert not PrivateRedis(str(folder / "own"), 1_000, 1_000).alive()


def test_a_stopped_redis_is_trouble_and_then_goes_on(master: Callable[..., Master], link: RedisLink) -> None:
    one = master(timeout_ms=400, slow_ms=50).lead()
    one.append(3)
    one.settle()
    os.kill(link.process_id, signal.SIGSTOP)
    try:
        one.append(3)
        one.until(lambda: "slow" in one.journal.trouble, "slow")
        one.until(lambda: "slow" not in one.journal.trouble, "away")
        assert one.journal.trouble
        assert one.journal.durable == 3
        one.until(
            lambda: not one.journal.may_answer(time.clock_gettime_ns(time.CLOCK_BOOTTIME)),
            "the lease ends by the leader's own clock",
        )
        one.append(40, urgent=False)
    finally:
        os.kill(link.process_id, signal.SIGCONT)
    one.settle()
    assert not one.of(Deposed), "nobody led in between"
    one.until(lambda: one.journal.may_answer(time.clock_gettime_ns(time.CLOCK_BOOTTIME)), "leads again")
    one.until(lambda: one.journal.trouble == "", "no trouble")


def test_a_journal_that_went_back_or_is_gone_deposes(master: Callable[..., Master], link: RedisLink) -> None:
    one = master().lead()
    one.append(4)
    one.settle()
    link.call(b"HSET", KEYS.head, b"sequence", 2)
    link.call(b"XTRIM", KEYS.journal, b"MAXLEN", 0)
    link.call(b"DEL", KEYS.journal)
    one.append()
    one.until(lambda: one.of(Deposed), "deposed")
    one.until(lambda: "missing" in one.journal.trouble, "facts are missing, so nothing is served")
    assert len(one.of(Elected)) == 1
    link.call(b"FLUSHALL")
    one.until(lambda: len(one.of(Elected)) == 2, "a new journal, when somebody cleared the old one away")
    assert one.state.sequence == 0


def test_a_truncated_file_loses_the_tail_and_the_leader_notices(folder: Path) -> None:
    one = Master("first", data_dir=str(folder / "own")).lead()
    try:
        one.append(10)
        one.settle()
        link = RedisLink(RedisAddress.parse(f"redis+unix://{folder}/own/redis.sock"), 1_000)
        link.close()
        os.kill(link.process_id, signal.SIGSTOP)
        (increments,) = (folder / "own" / "appendonlydir").glob("*.incr.aof")
        os.truncate(increments, increments.stat().st_size - 200)
        os.kill(link.process_id, signal.SIGKILL)
        one.until(lambda: len(one.of(Elected)) == 2, "elected again")
        assert one.of(Deposed)
        assert one.state.sequence < 10
    finally:
        one.close(release=True)


@pytest.mark.parametrize("wrong", [("version", b"2"), ("sequence", b"many"), ("sequence", b"99")])
def test_what_cannot_be_read_is_not_served(
    master: Callable[..., Master], link: RedisLink, wrong: tuple[str, bytes]
) -> None:
    first = master().lead()
    first.append(2)
    first.settle()
    first.close(release=True)
    link.call(b"HSET", KEYS.head, wrong[0], wrong[1])
    second = master("second")
    second.until(lambda: "cannot be l" in second.journal.trouble, "unreadable")
    assert not second.of(Elected)


def test_an_unknown_fact_is_not_served(master: Callable[..., Master], link: RedisLink) -> None:
    first = master().lead()
    first.append()
    first.journal.append(2, [bytes([0x92, 99, 1])], 5, urgent=True)
    first.until(lambda: first.journal.durable == 2, "durable")
    first.close(release=True)
    second = master("second")
    second.until(lambda: "type 99" in second.journal.trouble, "unreadable")
    assert not second.of(Elected)


def test_snapshots_bound_the_journal_and_are_loaded(master: Callable[..., Master], link: RedisLink) -> None:
    one = master(journal_bytes_max=1 << 20, snapshot_piece_bytes=64 << 10, lease_ms=5_000).lead()
    for _ in range(30):
        one.append(1_000, urgent=False)
        one.settle()
    taken = one.until(lambda: one.journal.counters()["journal_snapshots"] >= 1, "a snapshot")
    assert taken
    assert one.journal.counters()["journal_snapshots_failed"] == 0
    assert one.journal.room()
    stream: Any = link.call(b"MEMORY", b"USAGE", KEYS.journal)
    assert stream < 2 << 20
    one.append(10)
    one.settle()
    keys: Any = link.call(b"KEYS", b"*snapshot*:head")
    assert len(keys) == 1, "the old one is gone"
    assert link.call(b"PTTL", keys[0]) == -1
    wanted = one.state.state_hash()
    one.close(release=True)
    second = master("second").lead()
    assert second.state.state_hash() == wanted


def test_a_snapshot_that_ends_amid_a_group(master: Callable[..., Master]) -> None:
    one = master(snapshot_every_ms=100, linger_us=800_000, lease_ms=5_000).lead()
    one.append()
    one.settle()
    one.append(5, urgent=False)  # they linger, and others will join them
    one.until(lambda: one.of(SnapshotWanted), "a snapshot is taken meanwhile")
    one.append(5, urgent=False)
    one.until(lambda: one.journal.counters()["journal_snapshots"], "it is current")
    wanted = one.state.state_hash()
    one.close(release=True)
    second = master("second").lead()
    assert second.state.sequence == 11
    assert second.state.state_hash() == wanted


def test_a_standby_follows_past_a_snapshot(master: Callable[..., Master]) -> None:
    first = master(snapshot_every_ms=200).lead()
    standby = master("second")
    standby.until(lambda: standby.journal.leader_endpoints, "the standby looks")
    first.append(3_000, urgent=False)
    first.until(lambda: first.journal.counters()["journal_snapshots"] >= 2 or first.append(), "snapshots")
    first.settle()
    wanted = first.state.state_hash()
    first.close(release=True)
    standby.lead()
    assert standby.state.state_hash() == wanted


@pytest.mark.parametrize("damage", ["piece", "byte", "head"])
def test_a_damaged_snapshot_is_not_served(
    master: Callable[..., Master], link: RedisLink, damage: str
) -> None:
    first = master(snapshot_every_ms=100).lead()
    first.append(100)
    first.until(lambda: first.journal.counters()["journal_snapshots"], "a snapshot")
    first.close(release=True)
    number = int(str(link.call(b"HGET", KEYS.head, b"snapshot"), "ascii"))  # type: ignore[arg-type]
    piece = KEYS.snapshot_piece(number, 0)
    if damage == "piece":
        link.call(b"DEL", piece)
    elif damage == "byte":
        link.call(b"SETRANGE", piece, 40, b"\x00\x01\x02")
    else:
        link.call(b"HSET", KEYS.snapshot_head(number), b"version", 9)
    second = master("second")
    second.until(lambda: "cannot be loaded" in second.journal.trouble, "unreadable")
    assert not second.of(Elected)


def test_a_full_redis_is_trouble_until_it_has_room(
    master: Callable[..., Master], link: RedisLink, caplog: pytest.LogCaptureFixture
) -> None:
    one = master(queue_bytes_max=64 << 10).lead()
    link.call(b"CONFIG", b"SET", b"maxmemory", 1)
    one.append(5)
    one.until(lambda: "OOM" in one.journal.trouble, "out of memory")
    while one.journal.room():
        one.append(200, urgent=False)
    link.call(b"CONFIG", b"SET", b"maxmemory", 0)
    one.settle()
    assert one.journal.room()
    one.until(lambda: one.journal.trouble == "", "no trouble")
    told = [each for each in caplog.messages if "in trouble" in each]
    assert "OOM" in told[0]
    assert len(told) < 5


def test_a_replica_that_is_missing_holds_facts_back(master: Callable[..., Master]) -> None:
    one = master(replicas=1, replicas_wait_ms=50).lead()
    one.append(2)
    one.until(lambda: "replicas" in one.journal.trouble, "no replica")
    assert one.journal.durable == 0
    assert one.of(Elected)


def test_a_replica_that_is_there_lets_facts_through(
    server: PrivateRedis, folder: Path, master: Callable[..., Master]
) -> None:
    # A replica needs tcp, which a private server has not: one of its own, on a port the system chooses.
    link = RedisLink(RedisAddress.parse(server.url), 5_000)
    try:
        link.call(b"CONFIG", b"SET", b"bind", b"127.0.0.1")
        port = free_port()
        link.call(b"CONFIG", b"SET", b"port", port)
        replica = PrivateRedis(str(folder / "replica"), 1_000, 20_000)
        follower = RedisLink(replica.ensure(), 5_000)
        try:
            follower.call(b"REPLICAOF", b"127.0.0.1", port)
            one = master(replicas=1, replicas_wait_ms=100, lease_ms=5_000).lead()
            one.append(20)
            one.settle()
            one.until(lambda: one.journal.trouble == "", "no trouble")
            assert follower.call(b"HGET", KEYS.head, b"sequence") == b"20"
        finally:
            follower.close()
            replica.leave()
    finally:
        link.close()


def free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@pytest.mark.parametrize("end", ["clean", "killed", "tampered"])
def test_a_clean_end_of_a_private_server_is_no_other_run(folder: Path, end: str) -> None:
    data = folder / "own"
    one = Master("first", data_dir=str(data)).lead()
    run = one.of(Elected)[0].run
    one.append(3)
    one.settle()
    if end == "killed":
        link = RedisLink(RedisAddress.parse(f"redis+unix://{data}/redis.sock"), 1_000)
        link.close()
        one.close(release=False)
        os.kill(link.process_id, signal.SIGKILL)
    else:
        one.close(release=True)
    if end == "tampered":
        (increments,) = (data / "appendonlydir").glob("*.incr.aof")
        os.truncate(increments, increments.stat().st_size - 200)
    two = Master("second", data_dir=str(data)).lead()
    try:
        assert (two.of(Elected)[0].run == run) == (end == "clean")
        assert not (data / "redis.clean").exists(), "good for one start"
    finally:
        two.close(release=True)


def test_a_link_bounds_its_waits(server: PrivateRedis, link: RedisLink) -> None:
    config = JournalConfig(address=server.url, timeout_ms=100)
    one = connect_link(config, RedisAddress.parse(server.url))
    os.kill(link.process_id, signal.SIGSTOP)
    try:
        with pytest.raises(JournalUnavailable, match="no answer within 100 ms"):
            one.call(b"PING")
        with pytest.raises(JournalUnavailable):
            connect_link(config, RedisAddress.parse(server.url))
    finally:
        os.kill(link.process_id, signal.SIGCONT)
        one.close()


def test_a_refusal_carries_its_code(link: RedisLink) -> None:
    with pytest.raises(RedisRefusal) as caught:
        link.call(b"NOSUCH")
    assert caught.value.code == "ERR"
