"""Payload that does not lie in a node's memory: files and far memory, by one setting of the node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.integration.pool_parts import open_master, open_node, until

import moonpool
from moonpool.config import EngineConfig
from moonpool.errors import MoonpoolError, UsageError
from moonpool.store.client import Pool
from moonpool.store.node import Node
from moonpool.store.node_config import NodeConfig
from moonpool.store.records import RemoveCode
from moonpool.units import KIB, MIB

SIZES = (1, 63, 4 * KIB, 64 * KIB + 1, 1 * MIB)


def block(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


class Place:
    """A master, a node whose payload lies in a file, and what opens clients."""

    def __init__(self, tmp_path: Path) -> None:
        self.file = tmp_path / "payload"
        self.master = open_master()
        self.address = self.master.addresses[0]
        self.nodes: list[Node] = []
        self.pools: list[Pool] = []

    def node(self, **changes: Any) -> Node:
        self.nodes.append(open_node(self.address, backing=f"file:{self.file}", **changes))
        return self.nodes[-1]

    def pool(self, *transports: str, **changes: Any) -> Pool:
        self.pools.append(moonpool.connect(self.address, transports=transports, **changes))
        return self.pools[-1]

    def close(self) -> None:
        for one in (*self.pools, *self.nodes, self.master):
            one.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_what_is_put_lies_in_the_file_and_comes_back_by_every_way_of_reading(place: Place) -> None:
    node = place.node(segments=2)
    assert place.file.stat().st_size >= 2 * node.config.segment_bytes
    pool = place.pool("local", "shm", "file")
    for seed, size in enumerate(SIZES):
        assert pool.put(f"k{seed}", block(size, seed)).stored
    for seed, size in enumerate(SIZES):
        room = bytearray(size)
        assert pool.get_into(f"k{seed}", room).hit
        assert room == block(size, seed)
        value = pool.get(f"k{seed}")
        assert value is not None
        with value:
            assert bytes(value) == block(size, seed)
    assert block(64 * KIB + 1, 3) in place.file.read_bytes()
    found = pool.get_many([f"k{seed}" for seed in range(len(SIZES))])
    for seed, value in enumerate(found):
        assert value is not None
        with value:
            assert bytes(value) == block(SIZES[seed], seed)
    assert pool.remove("k0") is RemoveCode.REMOVED
    assert pool.get("k0") is None
    assert pool.upsert("k1", b"newer").stored
    with pool.get("k1") as value:  # type: ignore[union-attr]
        assert bytes(value) == b"newer"


def test_many_puts_and_evictions_turn_the_file_over_and_no_byte_is_wrong(place: Place) -> None:
    place.node(segment_bytes=1 * MIB)
    pool = place.pool("local", "shm", "file")
    keys = [f"k{number}" for number in range(96)]
    blocks = {key: block(64 * KIB, number) for number, key in enumerate(keys)}
    for start in range(0, len(keys), 8):
        some = keys[start : start + 8]
        assert all(result.stored for result in pool.put_many(some, [blocks[key] for key in some]))
    held = 0
    for key, value in zip(keys, pool.get_many(keys), strict=True):
        if value is not None:
            with value:
                assert bytes(value) == blocks[key]
            held += 1
    assert 0 < held < len(keys)


def test_bytes_spoilt_in_the_file_are_never_returned_and_the_copy_is_dropped(place: Place) -> None:
    place.node()
    pool = place.pool("local", "shm", "file")
    assert pool.put("k", block(64 * KIB)).stored
    held = place.file.read_bytes()
    at = held.index(block(64 * KIB))
    with place.file.open("r+b") as file:
        file.seek(at + 100)
        file.write(bytes([held[at + 100] ^ 1]))
    with pytest.raises(MoonpoolError):
        pool.get("k")
    until(lambda: not pool.exists("k"))
    assert pool.put("k", b"again").stored
    with pool.get("k") as value:  # type: ignore[union-attr]
        assert bytes(value) == b"again"


def test_a_client_without_the_transport_is_told_which_one_it_needs(place: Place) -> None:
    place.node()
    pool = place.pool("local", "shm", "tcp", put_wait_ms=200)
    with pytest.raises(MoonpoolError, match=r"file:.*none of this pool's transports"):
        pool.put("k", b"x")


def test_a_node_that_comes_back_on_its_file_starts_empty(place: Place) -> None:
    first = place.node(name="same")
    pool = place.pool("local", "shm", "file")
    assert pool.put("old", block(8 * KIB)).stored
    first.close()
    place.node(name="same")
    until(lambda: not pool.exists("old"))
    assert pool.put("new", block(8 * KIB, 2)).stored
    with pool.get("new") as value:  # type: ignore[union-attr]
        assert bytes(value) == block(8 * KIB, 2)


def test_memory_of_a_numa_node_is_reached_without_further_settings() -> None:
    engine = EngineConfig(transports=("local", "shm", "cxl", "tcp"))
    with (
        closing(open_master()) as master,
        closing(open_node(master.addresses[0], location="numa:0", engine=engine)),
        moonpool.connect(master.addresses[0], transports=("local", "shm", "cxl", "tcp")) as pool,
    ):
        assert pool.put("k", block(1 * MIB)).stored
        with pool.get("k") as value:  # type: ignore[union-attr]
            assert bytes(value) == block(1 * MIB)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"backing": "tape:/dev/st0"}, "backing"),
        ({"backing": "file:/x", "backing_offset": 100}, "backing_offset"),
    ],
)
def test_wrong_places_are_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError, match=field):
        NodeConfig(addresses=("a:1",), **changes)
