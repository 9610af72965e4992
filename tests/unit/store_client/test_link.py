"""The way to the master: several addresses, leaders that change, masters that are away, closing, forking."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from moonpool.errors import AccessDenied, PeerError, UsageError
from moonpool.store.client import Pool, connect
from moonpool.store.errors import (
    ForkedPool,
    JournalUnavailable,
    MasterUnavailable,
    NotLeader,
    PoolClosed,
    TenantRefused,
)

NOBODY = "127.0.0.1:1"


@pytest.fixture
def other(scripted: Any) -> Iterator[Any]:
    """A second master over the same segments, which stands by."""
    with type(scripted)(0) as other:
        other.segments = scripted.segments
        other.bend["client_join"] = lambda _params: refuse(scripted.address)
        yield other


def refuse(leader: str) -> None:
    raise NotLeader(f"the leader is {leader}")


def test_the_leader_is_found_among_the_addresses(scripted: Any, other: Any) -> None:
    with connect(NOBODY, other.address, scripted.address) as pool:
        assert pool.put("k", b"v").stored
    assert scripted.names().count("client_join") == 1


def test_a_change_of_leader_is_followed(scripted: Any, other: Any) -> None:
    with connect(scripted.address, other.address) as pool:
        pool.put("k", b"v")
        other.objects, other.epoch = scripted.objects, 2
        other.bend.clear()
        scripted.bend["lookup"] = scripted.bend["client_join"] = lambda _params: refuse(other.address)
        assert pool.get("k") == b"v"
        assert pool.get("k") == b"v"
        assert other.names().count("lookup") == 2


def test_a_master_that_is_silent_is_left_for_the_next(scripted: Any, other: Any) -> None:
    release = threading.Event()
    with connect(scripted.address, other.address, lookup_timeout_ms=100, connect_timeout_ms=100) as pool:
        pool.put("k", b"v")
        other.objects, other.epoch = scripted.objects, 2
        other.bend.clear()
        scripted.bend["lookup"] = lambda _params: release.wait(10) and None
        try:
            assert pool.get("k") == b"v"
            assert not release.is_set()
            assert pool.put("other", b"v").stored
        finally:
            release.set()
    assert scripted.names().count("lookup") == 1
    assert other.names()[0] == "client_join"


def test_a_deposed_leader_is_not_believed(scripted: Any, other: Any) -> None:
    with connect(scripted.address, other.address, unavailable_ms=200) as pool:
        pool.put("k", b"v")
        scripted.epoch = 5
        assert pool.get("k") == b"v"
        scripted.epoch = 4  # it woke up and answers as if nothing had happened
        with pytest.raises(MasterUnavailable):
            pool.get("k")


def test_no_master_is_an_error_within_the_time(scripted: Any) -> None:
    with pytest.raises(MasterUnavailable, match="nothing listens") as caught:
        connect(NOBODY, unavailable_ms=50)
    assert caught.value.retryable
    with connect(scripted.address, unavailable_ms=50) as pool:
        pool.put("k", b"v")
        scripted.__exit__()
        with pytest.raises(MasterUnavailable):
            pool.get("k")


def test_a_refusal_is_raised_at_once(scripted: Any) -> None:
    scripted.bend["client_join"] = lambda _params: denied()
    with pytest.raises(TenantRefused):
        connect(scripted.address, tenant="other", token=b"wrong")
    assert scripted.names() == ["client_join"]
    assert scripted.calls[0][1][3:] == ["other", b"wrong"]


def denied() -> None:
    raise TenantRefused()


def test_a_wrong_secret_is_named(scripted: Any) -> None:
    with pytest.raises(AccessDenied, match="cluster_secret"):
        connect(scripted.address, secret=b"0123456789abcdef", unavailable_ms=50)


def test_a_journal_that_is_away_is_the_callers_to_judge(pool: Pool, scripted: Any) -> None:
    def away(_params: Any) -> None:
        raise JournalUnavailable()

    scripted.bend["remove"] = away
    with pytest.raises(JournalUnavailable):
        pool.remove("k")
    assert scripted.names().count("remove") == 1


def test_after_close_every_call_says_so(scripted: Any) -> None:
    pool = connect(scripted.address)
    pool.put("k", b"v")
    value = pool.get("k")
    pool.close()
    pool.close()
    calls = [
        lambda: pool.put("k", b"v"),
        lambda: pool.put_many(["k"], [b"v"]),
        lambda: pool.upsert("k", b"v"),
        lambda: pool.get("k"),
        lambda: pool.get_into("k", bytearray(1)),
        lambda: pool.exists("k"),
        lambda: pool.remove("k"),
        lambda: list(pool.list()),
        lambda: pool.stat("k"),
        lambda: pool.pin("k"),
        lambda: pool.status(),
    ]
    for call in calls:
        with pytest.raises(PoolClosed):
            call()
    assert value == b"v", "a value is its holder's, also after the pool was closed"


def test_closing_ends_calls_in_other_threads(scripted: Any) -> None:
    asked, errors = threading.Event(), []
    release = threading.Event()

    def slow(_params: Any) -> None:
        asked.set()
        release.wait(10)

    pool = connect(scripted.address)
    scripted.bend["lookup"] = slow

    def reader() -> None:
        try:
            pool.get("k")
        except PoolClosed as problem:
            errors.append(problem)

    thread = threading.Thread(target=reader)
    thread.start()
    assert asked.wait(10)
    pool.close()
    thread.join(10)
    release.set()
    assert not thread.is_alive()
    assert len(errors) == 1


def test_a_forked_child_is_refused_and_the_parent_goes_on(scripted: Any) -> None:
    with connect(scripted.address) as pool:
        pool.put("k", b"v")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                pool.get("k")
            except ForkedPool:
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert pool.get("k") == b"v"


def test_threads_share_a_pool(pool: Pool) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(20):
                key, data = f"{number}/{turn}", bytes([number]) * (turn * 500 + 1)
                assert pool.put(key, data).stored
                assert pool.get(key) == data
        except BaseException as problem:
            failures.append(problem)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


def test_a_pool_is_not_copied(pool: Pool) -> None:
    import copy
    import pickle

    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match="cannot be pickled"):
            attempt(pool)


def test_a_master_that_breaks_the_protocol_is_left(scripted: Any) -> None:
    with connect(scripted.address, unavailable_ms=50) as pool:
        for wrong in (None, 5, [], ["x"], [1, 1, [{}]]):
            scripted.version += 1
            scripted.bend["segments"] = lambda _params, wrong=wrong: wrong if wrong is not None else "no"
            with pytest.raises(PeerError):
                pool.put("k", b"v")
