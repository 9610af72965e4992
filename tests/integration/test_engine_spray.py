"""One batch over several transports between two engines; what one of them fails another one carries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from moonpool import Engine, EngineConfig, Op
from moonpool.units import MIB

SIZE = 16 * MIB


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Any]]:
    engines: list[Engine] = []

    def make(**settings: Any) -> Any:
        config = EngineConfig(stripe_min_bytes=4 * MIB, **settings)
        target, initiator = Engine(config), Engine(config)
        engines.extend((initiator, target))
        theirs, mine = target.allocate(SIZE), initiator.allocate(SIZE)
        theirs.view[:] = np.arange(SIZE, dtype=np.uint32).astype(np.uint8).tobytes()
        return initiator, mine, initiator.open(target.name), theirs

    yield make
    for engine in engines:
        engine.close()


def bytes_by_transport(engine: Engine) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in engine.metrics()["paths"]:
        found[row["transport"]] = found.get(row["transport"], 0) + row["bytes"]
    return found


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
def test_one_transfer_goes_by_shm_and_tcp(make_pair: Any, op: Op) -> None:
    engine, mine, segment, theirs = make_pair(spray="transports")
    if op is Op.WRITE:
        mine.view[:] = bytes(theirs.view)[::-1]
    engine.transfer(op, segment, mine.address, theirs.handle, 0, SIZE).check()
    assert bytes(mine.view) == bytes(theirs.view)
    by = bytes_by_transport(engine)
    assert by["shm"] >= MIB
    assert by["tcp"] >= MIB
    assert by["shm"] + by["tcp"] == SIZE
    counters = engine.metrics()["counters"]
    assert (counters["spray_batches"], counters["spray_failovers"]) == (1, 0)


def test_a_transport_that_fails_leaves_its_part_to_another(make_pair: Any) -> None:
    """The tcp lanes cannot be opened any more: their slices end well by shm, and the caller sees no error."""
    engine, mine, segment, theirs = make_pair(spray="transports", lanes_per_peer_max=4)
    segment.peer.lanes.shut()
    for _ in range(3):
        engine.read(segment, theirs.handle, 0, mine.address, SIZE)
        assert bytes(mine.view) == bytes(theirs.view)
        mine.view[:] = bytes(SIZE)
    by = bytes_by_transport(engine)
    assert by["shm"] == 3 * SIZE
    assert by.get("tcp", 0) == 0
    assert engine.metrics()["counters"]["spray_failovers"] == 1, "once; then the path rests"


def test_without_leave_a_batch_goes_by_one_transport(make_pair: Any) -> None:
    engine, mine, segment, theirs = make_pair()
    engine.read(segment, theirs.handle, 0, mine.address, SIZE)
    assert bytes_by_transport(engine).get("tcp", 0) == 0
    assert "spray_batches" not in engine.metrics()["counters"]


def test_small_transfers_and_submitted_ones_go_by_the_first_path(make_pair: Any) -> None:
    engine, mine, segment, theirs = make_pair(spray="transports")
    engine.read(segment, theirs.handle, 0, mine.address, 4096)
    engine.submit(Op.READ, segment, mine.address, theirs.handle, 0, SIZE).wait(30.0)
    assert bytes_by_transport(engine).get("tcp", 0) == 0
