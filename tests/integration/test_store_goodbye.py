"""A node that ends cleanly: what it held is a miss at once, and what others hold stays readable."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from tests.integration.pool_parts import open_master, open_node, until

import moonpool
from moonpool.store.client import Pool
from moonpool.store.client_results import PutPolicy
from moonpool.store.master import Master

HOUR_MS = 3_600_000


@pytest.fixture
def master() -> Iterator[Master]:
    """One that would wait for an hour before it takes a silent node for dead."""
    with closing(open_master(suspect_ms=HOUR_MS // 2, dead_ms=HOUR_MS)) as made:
        yield made


@pytest.fixture
def pool(master: Master) -> Iterator[Pool]:
    with closing(moonpool.connect(master.addresses[0])) as made:
        yield made


def test_what_it_held_is_a_miss_at_once(master: Master, pool: Pool) -> None:
    node = open_node(master.addresses[0])
    assert pool.put("k", b"x" * 5_000).stored
    node.close()
    assert pool.get("k") is None
    assert pool.get_many(["k", "other"]) == [None, None]
    gauges = pool.status()["gauges"]
    assert gauges["live"] == gauges["quarantined"] == gauges["writing"] == 0


def test_the_other_copy_stays_and_a_node_of_the_same_name_starts_empty(master: Master, pool: Pool) -> None:
    first = open_node(master.addresses[0], name="first", host="a")
    with closing(open_node(master.addresses[0], name="second", host="b")):
        assert pool.put("both", b"y" * 5_000, policy=PutPolicy(replicas=2, need_all=True)).stored
        first.close()
        for _ in range(3):
            with pool.get("both") as value:  # type: ignore[union-attr]
                assert bytes(value) == b"y" * 5_000
        with closing(open_node(master.addresses[0], name="first", host="a")):
            assert pool.put("new", b"z" * 5_000, policy=PutPolicy(replicas=2, need_all=True)).stored
            with pool.get("new") as value:  # type: ignore[union-attr]
                assert bytes(value) == b"z" * 5_000


def test_a_node_whose_master_is_gone_ends_in_time(master: Master) -> None:
    node = open_node(master.addresses[0])
    master.close()
    until(lambda: not node.is_active, node.problem)
    node.close()


def test_a_client_that_brought_memory_takes_it_away_when_it_closes(master: Master, pool: Pool) -> None:
    with closing(moonpool.connect(master.addresses[0], contribute_bytes=4 << 20)) as brings:
        assert brings.put("k", b"w" * 5_000).stored
        with pool.get("k") as value:  # type: ignore[union-attr]
            assert bytes(value) == b"w" * 5_000
    assert pool.get("k") is None
