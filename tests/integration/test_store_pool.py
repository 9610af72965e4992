"""A pool of true processes: a master, two nodes, and clients in this one. And a pool inside one process."""

from __future__ import annotations

import gc
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import moonpool
from moonpool import Pin, PutStatus, RemoveCode

PEER = Path(__file__).with_name("store_peer.py")
MIB = 1 << 20
WAIT_S = 20.0


class Peers:
    """Processes that end with the test. `start` returns the address that the process says."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, role: str, **told: Any) -> str:
        process = subprocess.Popen(
            [sys.executable, "-P", str(PEER), role, json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, "the process ended at once"
        return address

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate(timeout=WAIT_S)


@pytest.fixture
def peers() -> Iterator[Peers]:
    peers = Peers()
    yield peers
    peers.end()


def until(what: Any) -> None:
    """Waits, bounded, until it is true."""
    give_up = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < give_up, "did not come true in time"
        time.sleep(0.005)


def active_segments(pool: moonpool.Pool) -> int:
    return sum(segment["state"] == "active" for segment in pool.status()["segments"])


def start_cluster(peers: Peers) -> str:
    """A master and two nodes of 32 MiB, on "hosts" of their own: the master's address."""
    master = peers.start("master")
    for number in (1, 2):
        peers.start(
            "node",
            addresses=[master],
            name=f"n{number}",
            host=f"h{number}",
            segment_bytes=32 * MIB,
            slot_bytes=1024,
        )
    return master


def wait_for_both(pool: moonpool.Pool) -> None:
    until(lambda: active_segments(pool) == 2)
    until(lambda: pool.upsert("probe", b"", replicas=2).replicas == 2)  # both have open windows
    pool.remove("probe")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """For tests that leave every process alive."""
    peers = Peers()
    try:
        yield start_cluster(peers)
    finally:
        peers.end()


@pytest.fixture(params=["shm", "tcp"])
def pool(request: pytest.FixtureRequest, cluster: str) -> Iterator[moonpool.Pool]:
    """The shared pool, empty, reached one way."""
    with moonpool.connect(cluster, transports=(request.param,)) as pool:
        wait_for_both(pool)
        yield pool
        pool.remove_all(force=True)


@pytest.fixture(params=["shm", "tcp"])
def own_pool(request: pytest.FixtureRequest, peers: Peers) -> Iterator[moonpool.Pool]:
    """A pool whose processes (`peers`: master, n1, n2) the test may stop and kill."""
    with moonpool.connect(start_cluster(peers), transports=(request.param,)) as pool:
        wait_for_both(pool)
        yield pool


def test_objects_go_round(pool: moonpool.Pool) -> None:
    rng = random.Random(5)
    sizes = [0, 1, 64, 4095, 4096, 65_536, 65_537, 3 * MIB]
    contents = {f"k{size}": rng.randbytes(size) for size in sizes}
    assert all(result.stored for result in pool.put_many(list(contents), list(contents.values())))
    for key, content in contents.items():
        assert pool.get(key) == content
        assert pool.exists(key)
    values = pool.get_many([*contents, "absent"])
    assert values[-1] is None
    assert all(value == content for value, content in zip(values, contents.values(), strict=False))
    assert sorted(listed.key.decode() for listed in pool.list("k")) == sorted(contents)
    whole = contents["k3145728"]
    assert pool.get("k3145728", offset=2 * MIB - 7, length=100) == whole[2 * MIB - 7 :][:100]
    with pytest.raises(moonpool.DestinationTooSmall):
        pool.get_into("k64", bytearray(63))


def test_the_chunk_list_in_the_directory_serves_ranges(pool: moonpool.Pool) -> None:
    whole = random.Random(6).randbytes(4 * MIB)
    pool.put("big", whole)
    until(lambda: pool.get("big", offset=70_000, length=10) == whole[70_000:70_010])
    calls = pool._calls

    def listed() -> bool:
        assert pool.get("big", offset=70_000, length=10) == whole[70_000:70_010]
        return len(calls.ranges._lists) == 1

    until(listed)


def test_replicas_are_on_two_hosts_and_either_will_do(own_pool: moonpool.Pool, peers: Peers) -> None:
    pool = own_pool
    content = random.Random(7).randbytes(200_000)
    assert pool.put("k", content, replicas=2).replicas == 2
    stat = pool.stat("k")
    assert stat is not None
    assert sorted(place["host"] for place in stat["places"]) == ["h1", "h2"]
    peers.processes[1].kill()
    peers.processes[1].wait(WAIT_S)
    started = time.monotonic()
    assert pool.get("k") == content
    assert time.monotonic() - started < WAIT_S
    assert pool.put("other", content).status in (PutStatus.STORED, PutStatus.NO_SPACE)
    assert pool.get("k") == content


@pytest.mark.parametrize("own_pool", ["tcp"], indirect=True)  # memory of this host is read without its node
def test_a_node_that_is_stopped_does_not_hold_a_read_up(own_pool: moonpool.Pool, peers: Peers) -> None:
    pool = own_pool
    keys = [f"k{number}" for number in range(8)]
    contents = [bytes([number]) * 50_000 for number in range(8)]
    assert all(result.replicas == 2 for result in pool.put_many(keys, contents, replicas=2))
    assert [bytes(value or b"") for value in pool.get_many(keys)] == contents  # connects to both
    peers.processes[1].send_signal(signal.SIGSTOP)
    try:
        started = time.monotonic()
        for key, content in zip(keys, contents, strict=True):
            assert pool.get(key) == content
        assert [bytes(value or b"") for value in pool.get_many(keys)] == contents
        # Alone, one read would wait for transfer_timeout_ms.
        assert time.monotonic() - started < pool.config.transfer_timeout_ms / 1_000
        assert pool._parts.context.hedger.won > 0
        # A put drops the copy that is not taken in time, and says so.
        result = pool.put("late", contents[3], replicas=2)
        assert result.status is PutStatus.STORED
        assert pool.get("late") == contents[3]
    finally:
        peers.processes[1].send_signal(signal.SIGCONT)


def test_upsert_and_remove_end_the_old_object_for_everyone(pool: moonpool.Pool) -> None:
    with moonpool.connect(*pool.config.addresses, location_cache_keys=100) as other:
        for turn in range(20):
            content = bytes([turn]) * 5000
            assert pool.upsert("k", content).stored
            assert other.get("k") == content, turn
        assert pool.remove("k") is RemoveCode.REMOVED
        assert other.get("k") is None
        assert pool.remove("k") is RemoveCode.ABSENT


def test_a_full_pool_evicts_and_keeps_what_is_pinned(pool: moonpool.Pool) -> None:
    keep = b"pinned" * 1000
    assert pool.put("keep", keep, pin=Pin.HARD).stored
    block = 1 * MIB
    for number in range(100):
        assert pool.put(f"b{number}", bytes([number]) * block, wait_ms=5_000).stored, number
    assert pool.get("b99") == bytes([99]) * block
    assert pool.get("b0") is None
    assert pool.get("keep") == keep
    assert pool.remove("keep") is RemoveCode.PINNED
    assert pool.pin("keep", Pin.NONE)
    assert pool.remove("keep") is RemoveCode.REMOVED
    assert pool.remove_prefix("b9") > 0
    assert pool.remove_all() > 0
    assert list(pool.list()) == []


@pytest.mark.parametrize("pool", ["tcp"], indirect=True)
def test_what_only_the_network_reaches_cannot_be_viewed(pool: moonpool.Pool) -> None:
    pool.put("k", b"v")
    with pytest.raises(moonpool.NotOnThisHost):
        pool.view("k")


@pytest.mark.parametrize("pool", ["shm"], indirect=True)
def test_views_pin_what_they_show(pool: moonpool.Pool) -> None:
    content = random.Random(8).randbytes(300_000)
    pool.put("k", content)
    view = pool.view("k")
    assert view is not None
    assert memoryview(view).readonly
    assert view == content
    assert pool.remove("k") is RemoveCode.REMOVED
    assert pool.view("k") is None
    for number in range(80):
        pool.put(f"b{number}", bytes([number]) * MIB, wait_ms=5_000)
    assert view == content, "the extent was used again while it was viewed"
    array = view.numpy()
    view.close()
    with pytest.raises(moonpool.UsageError, match="closed"):
        memoryview(view)
    assert bytes(array[:10]) == content[:10]
    del array
    gc.collect()
    until(lambda: pool._calls.desk.open_views == 0)
    pool.remove_all()
    until(lambda: pool.status()["gauges"]["quarantined"] == 0)


@pytest.mark.parametrize("own_pool", ["shm"], indirect=True)
def test_a_node_killed_under_a_view_leaves_its_bytes(own_pool: moonpool.Pool, peers: Peers) -> None:
    pool = own_pool
    content = random.Random(9).randbytes(100_000)
    pool.put("k", content)
    view = pool.view("k")
    assert view is not None
    for process in peers.processes[1:]:
        process.kill()
        process.wait(WAIT_S)
    assert view == content
    with pytest.raises(moonpool.DataLost):
        pool.get("k")
    assert view == content
    view.close()


def test_quotas_and_tenants_keep_apart(pool: moonpool.Pool) -> None:
    with pytest.raises(moonpool.TenantRefused):
        moonpool.connect(*pool.config.addresses, tenant="nobody")


def test_contributed_memory_is_part_of_the_pool(peers: Peers) -> None:
    master = peers.start("master")
    with moonpool.connect(master, contribute_bytes=8 * MIB) as giver, moonpool.connect(master) as taker:
        assert taker.put("k", b"v" * 100_000).stored
        assert giver.get("k") == b"v" * 100_000
        assert taker.get("k") == b"v" * 100_000
    with moonpool.connect(master) as later:
        assert later.put("k2", b"v", wait_ms=0).status is PutStatus.NO_SPACE


def test_an_embedded_pool_is_whole() -> None:
    with moonpool.connect(embedded_bytes=16 * MIB) as pool:
        content = random.Random(10).randbytes(3 * MIB)
        assert pool.put("k", content).stored
        assert pool.get("k") == content
        with moonpool.connect(pool.config.addresses[0]) as other:
            assert other.get("k") == content
        for number in range(40):
            assert pool.put(f"b{number}", content[: 1 * MIB]).stored
        gauges = pool.status()["gauges"]
        assert sum(gauges.values()) == 16 * MIB
        view = pool.view("b39")
        assert view == content[: 1 * MIB]
    assert view == content[: 1 * MIB], "a view keeps mapped memory, also after the pool was closed"


def test_two_embedded_pools_do_not_meet() -> None:
    with moonpool.connect(embedded_bytes=MIB) as one, moonpool.connect(embedded_bytes=MIB) as other:
        one.put("k", b"v")
        assert other.get("k") is None


def test_the_example_of_a_serving_engine_runs() -> None:
    example = Path(__file__).parents[2] / "examples" / "store_kv_blocks.py"
    ran = subprocess.run(
        [sys.executable, "-P", str(example)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert [line.split(" blocks")[0] for line in ran.stdout.splitlines()] == [
        "first: 0 of 40",
        "longer: 40 of 48",
        "first again: 40 of 40",
    ]
    assert ran.stdout.count(" 0 of them wrong") == 3


def test_an_object_whose_writer_lied_about_its_digest_is_never_returned_and_goes() -> None:
    with moonpool.connect(embedded_bytes=MIB) as pool:
        parts = pool._parts.context
        client = parts.link.client
        reply = client.native.put_start((b"lie",), (5000,), None, 1_000, 5.0)
        segment, offset, _, grant = reply.entry(0)[1][0]
        target = parts.segments.target(segment)
        assert target is not None
        data = bytearray(b"truth" * 1000)
        parts.engine.write(target.peer, target.data, offset, data)
        assert len(grant) == 24
        assert client.native.put_end(reply.put_id, (0,), bytes(16), None, 5.0).entry(0)[0] == 0
        assert pool.exists("lie")
        out = bytearray(b"x" * 5000)
        with pytest.raises(moonpool.DataLost):
            pool.get_into("lie", out)
        assert out == bytes(5000)
        # The reader reported it; the node hashed the bytes and agreed, so the object ends.
        until(lambda: not pool.exists("lie"))
        assert pool.get("lie") is None
        assert pool.put("lie", data).stored
        assert pool.get("lie") == data
