"""Reads by remembered locations: they ask no master, and never give what is no longer true."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from moonpool.store.client import Pool, connect
from moonpool.store.client_results import GetStatus
from moonpool.store.errors import MasterUnavailable


@pytest.fixture(params=["shm", "tcp"])
def pool(request: pytest.FixtureRequest, scripted: Any) -> Iterator[Pool]:
    with connect(
        scripted.address,
        transports=(request.param,),
        unavailable_ms=200,
        location_cache_keys=1_000,
        location_lease_ms=600_000,
    ) as pool:
        # The scripted master's own lease of 2 s would end within a slow test run.
        cache = pool._parts.context.cache
        assert cache is not None
        assert cache._lease_ns == int(2_000 * 1e6 * 0.9)
        cache._lease_ns = 600 * 10**9
        yield pool


def test_known_keys_ask_no_master(pool: Pool, scripted: Any) -> None:
    pool.put("k", b"v" * 5000)
    assert pool.get("k") == b"v" * 5000
    scripted.calls.clear()
    out = bytearray(5000)
    for _ in range(3):
        assert pool.get("k") == b"v" * 5000
        assert pool.get_into("k", out).hit
        assert pool.get_into("k", [memoryview(out)[:10], memoryview(out)[10:]]).hit
        if pool.config.engine.transports == ("shm",):  # else the master is as near
            assert pool.exists("k")
        assert pool.get_many(["k", "k"]) == [b"v" * 5000] * 2
    assert scripted.names() == []


def test_a_replaced_or_removed_object_is_looked_up_anew(pool: Pool, scripted: Any) -> None:
    pool.put("k", b"old" * 1000)
    assert pool.get("k") == b"old" * 1000
    with connect(scripted.address) as other:
        other.upsert("k", b"new")
        assert pool.get("k") == b"new"
        assert pool.get("k") == b"new"
        other.upsert("k", b"newer" * 1000)
        out = bytearray(b"x" * 3)
        with pytest.raises(ValueError, match="does not fit"):
            pool.get_into("k", out)
        assert pool.get("k") == b"newer" * 1000
        other.remove("k")
    assert not pool.exists("k")
    out = bytearray(b"x" * 5000)
    assert pool.get_into("k", out).status is GetStatus.MISS


def test_a_word_that_is_right_does_not_excuse_wrong_bytes(pool: Pool, scripted: Any) -> None:
    pool.put("k", b"v" * 5000, replicas=2)
    assert pool.get("k") == b"v" * 5000
    assert pool.get("k") == b"v" * 5000
    for number, offset, _ in scripted.objects[b"k"][3][:1]:
        scripted.segments[number - 1].data.view[offset] ^= 1
    for _ in range(4):
        assert pool.get("k") == b"v" * 5000


def test_known_keys_are_served_while_the_master_is_away(pool: Pool, scripted: Any) -> None:
    pool.put("k", b"v")
    assert pool.get("k") == b"v"
    scripted._stop = True
    scripted._port.wake()
    scripted._thread.join(10)
    scripted._port.close()
    with pytest.raises(MasterUnavailable):
        pool.get("other")
    assert pool.get("k") == b"v"
    assert pool.get("k") == b"v"


def test_the_lease_of_a_location_ends(pool: Pool, scripted: Any) -> None:
    pool.put("k", b"v")
    cache = pool._parts.context.cache
    assert cache is not None
    cache._lease_ns = 1
    assert pool.get("k") == b"v"
    scripted.calls.clear()
    time.sleep(0.001)
    assert pool.get("k") == b"v"
    assert scripted.names() == ["lookup"]
