"""What the journal costs: Redis CPU for each put, bytes in Redis, how long a snapshot stops the service.

    python -m moonpool.bench.journal [--keys 1000000] [--puts 20000] [--json]

A private redis-server in a folder of its own, the native tables, keys of 26 bytes with one replica each. All
numbers are of this machine and this moment; `load` says how busy it was.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import click

from moonpool.store import facts
from moonpool.store.facts import decode_group, encode_fact, encode_group
from moonpool.store.journal import Elected, Identity
from moonpool.store.journal_config import JournalConfig
from moonpool.store.journal_fork import SnapshotChild
from moonpool.store.journal_thread import RedisJournal
from moonpool.store.private_redis import PrivateRedis
from moonpool.store.records import Place
from moonpool.store.redis_link import RedisLink
from moonpool.store.redis_scripts import Keys
from moonpool.store.snapshots import SnapshotPlace, read_snapshot
from moonpool.store.state import State
from moonpool.store.table_factory import TableConfig, native_tables
from moonpool.store.tables import ObjectTable
from moonpool.units import MIB

_EPOCH: Final = 1
_EXTENT: Final = 4096
_TAIL_FACTS: Final = 200_000
_GROUP_FACTS: Final = 500
_TIMEOUT_MS: Final = 60_000
_WAIT_S: Final = 120.0
_SEED: Final = 20_261_129
#: Facts that are appended together, as puts of so many keys would.
_SHARES: Final = (1, 16, 128)


def empty_table() -> ObjectTable:
    """A native table."""
    return native_tables(TableConfig()).objects


def begin(state: State, slots: int) -> None:
    """One node with one segment whose space is all open."""
    capacity = slots * _EXTENT
    state.apply(facts.Leader(_EPOCH, "bench", ("@bench",), ""))
    state.apply(facts.Node(1, "node", "host", bytes(16), "@engine", "@view", 2))
    state.apply(facts.Segment(1, 1, "segment", 1, capacity, slots, 2, 1, "cpu:0", 1, 2, 2))
    state.apply(facts.Window(1, 0, capacity))


def puts(count: int) -> Iterator[facts.Object]:
    """Facts of puts with keys of 26 bytes and random digests."""
    rng = random.Random(_SEED)
    for number in range(count):
        key = b"kv/%s" % rng.randbytes(12).hex().encode()[:23]
        place = Place(1, number * _EXTENT, number)
        object_id = _EPOCH << 40 | number + 1
        yield facts.Object(object_id, 0, key, _EXTENT, rng.randbytes(16), 0, 0, 0, 0, (place,), 0)


@contextmanager
def private_server() -> Iterator[tuple[PrivateRedis, RedisLink]]:
    """A server of our own and a connection to it."""
    with tempfile.TemporaryDirectory(prefix="moonpool-bench-") as folder:
        server = PrivateRedis(folder, _TIMEOUT_MS, _TIMEOUT_MS)
        link = RedisLink(server.ensure(), _TIMEOUT_MS)
        try:
            yield server, link
        finally:
            link.close()
            server.leave()


def info(link: RedisLink, section: bytes, name: bytes) -> float:
    """One number of INFO."""
    text: Any = link.call(b"INFO", section)
    for line in text.split(b"\r\n"):
        if line.startswith(name + b":"):
            return float(line.split(b":")[1])
    raise click.ClickException(f"Redis does not tell {name.decode()}")


def resident_bytes() -> int:
    """This process's resident memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure_snapshot(keys: int) -> dict[str, float]:
    """A snapshot of so many keys: written by a forked child, read back, compared."""
    before = resident_bytes()
    state = State(empty_table())
    begin(state, keys)
    for fact in puts(keys):
        state.apply(fact)
    found: dict[str, float] = {"keys": keys, "master_bytes_per_key": (resident_bytes() - before) / keys}
    with private_server() as (server, link):
        used = info(link, b"memory", b"used_memory")
        names, own = Keys("moonpool"), RedisLink(server.ensure(), _TIMEOUT_MS)
        place = SnapshotPlace(names, 1, MIB - 64, _TIMEOUT_MS)
        started = time.perf_counter()
        child = SnapshotChild(own, place, state)
        found["pause_ms"] = (time.perf_counter() - started) * 1e3
        while not child.done():
            time.sleep(0.005)
        found["write_s"] = time.perf_counter() - started
        written = child.result()
        if written is None:
            raise click.ClickException(child.problem())
        child.close()
        own.close()
        found["redis_bytes_per_key"] = (info(link, b"memory", b"used_memory") - used) / keys
        started = time.perf_counter()
        restored = read_snapshot(link, names, 1, empty_table(), lambda: None)
        found["restore_s"] = time.perf_counter() - started
    if restored is None or restored[0].state_hash() != state.state_hash():
        raise click.ClickException("the restored state is not the one that was written")
    return found


def measure_tail(count: int) -> dict[str, float]:
    """Facts read from a stream and applied, without a snapshot."""
    encoded = [encode_fact(fact) for fact in puts(count)]
    groups = [
        encode_group(_EPOCH, start + 5, 1, encoded[start : start + _GROUP_FACTS])
        for start in range(0, count, _GROUP_FACTS)
    ]
    state = State(empty_table())
    begin(state, count)
    started = time.perf_counter()
    for data in groups:
        state.apply_group(decode_group(data))
    spent = time.perf_counter() - started
    return {
        "facts": count,
        "tail_s": spent,
        "tail_us_per_fact": spent / count * 1e6,
        "journal_bytes_per_fact": sum(map(len, groups)) / count,
    }


def measure_appends(count: int) -> list[dict[str, float]]:
    """Redis CPU and latency of appends through the journal, by how many facts share a decision."""
    with private_server() as (server, link):
        return [{"share": share, **measure_share(server, link, count, share)} for share in _SHARES]


def measure_share(server: PrivateRedis, link: RedisLink, count: int, share: int) -> dict[str, float]:
    """One journal of its own, led and written to."""
    woken = threading.Event()
    config = JournalConfig(address=server.url, prefix=f"bench{share}", lease_ms=10_000)
    journal = RedisJournal(config, Identity(name="bench", endpoints=("@bench",)), empty_table, woken.set)
    journal.start()
    try:
        until(woken, lambda: any(isinstance(each, Elected) for each in journal.take()))
        return appends(journal, link, woken, count, share)
    finally:
        journal.close(release=True)


def appends(
    journal: RedisJournal, link: RedisLink, woken: threading.Event, count: int, share: int
) -> dict[str, float]:
    """Appends `count` facts, `share` at a time: first without waiting for each, then waiting."""
    encoded = [encode_fact(fact) for fact in puts(share)]
    cpu = redis_cpu_s(link)
    started = time.perf_counter()
    sequence = 0
    while sequence < count:
        if not journal.room():
            until(woken, journal.room)
        journal.append(sequence + 1, encoded, 1, urgent=False)
        sequence += share
    wait_durable(woken, journal, sequence)
    spent = time.perf_counter() - started
    cost_us = (redis_cpu_s(link) - cpu) / sequence * 1e6
    waits: list[float] = []
    for _ in range(300):
        started = time.perf_counter()
        journal.append(sequence + 1, encoded, 1, urgent=True)
        sequence += share
        wait_durable(woken, journal, sequence)
        waits.append((time.perf_counter() - started) * 1e6)
    waits.sort()
    return {
        "redis_cpu_us_per_fact": cost_us,
        "facts_per_s": count / spent,
        "durable_p50_us": waits[len(waits) // 2],
        "durable_p99_us": waits[len(waits) * 99 // 100],
    }


def wait_durable(woken: threading.Event, journal: RedisJournal, sequence: int) -> None:
    """Waits until everything up to a sequence is durable."""
    until(woken, lambda: journal.durable == sequence)


def redis_cpu_s(link: RedisLink) -> float:
    """CPU that the server has used."""
    return info(link, b"cpu", b"used_cpu_sys") + info(link, b"cpu", b"used_cpu_user")


def until(woken: threading.Event, found: Callable[[], bool]) -> None:
    """Waits until something is true."""
    end = time.monotonic() + _WAIT_S
    while not found():
        if time.monotonic() > end:
            raise click.ClickException(f"nothing happened for {_WAIT_S:.0f} s")
        woken.wait(0.01)
        woken.clear()


@click.command()
@click.option("--keys", default=1_000_000, show_default=True, type=click.IntRange(1, 50_000_000))
@click.option("--puts", "count", default=20_000, show_default=True, type=click.IntRange(1, 10_000_000))
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def main(keys: int, count: int, as_json: bool) -> None:
    """Measure what the journal costs on this machine."""
    result = {
        "load": os.getloadavg()[0],
        "snapshot": measure_snapshot(keys),
        "tail": measure_tail(min(keys, _TAIL_FACTS)),
        "appends": measure_appends(count),
    }
    if as_json:
        json.dump(result, sys.stdout)
        print()
        return
    for name, value in result.items():
        rows: list[Any] = value if isinstance(value, list) else [value]
        for row in rows:
            shown = row.items() if isinstance(row, dict) else [("", row)]
            print(f"{name:9}", "  ".join(f"{key} {number:,.2f}" for key, number in shown))


if __name__ == "__main__":
    main()
