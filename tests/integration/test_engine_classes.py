"""Classes of submitted batches through two engines: order, caps, deadlines, and what is counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from moonpool import Engine, EngineConfig, Op, Priority
from moonpool.errors import Status, UsageError

KIB, MIB = 1 << 10, 1 << 20
WAIT_S = 30.0


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Any]]:
    engines: list[Engine] = []

    def make(**settings: Any) -> Any:
        """An initiator with these settings, its memory, the target's segment and region."""
        target, initiator = (
            Engine(EngineConfig(transports=("local", "tcp"), **each)) for each in ({}, settings)
        )
        engines.extend((initiator, target))
        theirs = target.allocate(4 * MIB)
        mine = initiator.allocate(4 * MIB)
        theirs.view[:] = np.arange(4 * MIB, dtype=np.uint32).astype(np.uint8).tobytes()
        return initiator, mine, initiator.open(target.name), theirs

    yield make
    for engine in engines:
        engine.close()


def counts(engine: Engine, name: str) -> dict[str, int]:
    counters = engine.metrics()["counters"]
    return {
        key.split("_", 2)[2]: value for key, value in counters.items() if key.startswith(f"class_{name}_")
    }


def test_every_class_arrives_and_is_counted(make_pair: Any) -> None:
    engine, mine, segment, theirs = make_pair()
    batches = [
        engine.submit(
            Op.READ, segment, mine.address + k * KIB, theirs.handle, k * KIB, KIB, priority=priority
        )
        for k, priority in enumerate(["low", "normal", "high", 0, 1, 2, Priority.HIGH])
    ]
    for batch in batches:
        batch.wait(WAIT_S)
        batch.check()
    assert bytes(mine.view[: 7 * KIB]) == bytes(theirs.view[: 7 * KIB])
    assert [counts(engine, name)["batches"] for name in ("low", "normal", "high")] == [2, 2, 3]
    assert counts(engine, "high")["held"] == 0


def test_a_wrong_class_leaves_nothing_behind(make_pair: Any) -> None:
    engine, mine, segment, theirs = make_pair()
    with pytest.raises(UsageError, match="priority"):
        engine.submit(Op.READ, segment, mine.address, theirs.handle, 0, KIB, priority="urgent")
    assert engine.metrics()["gauges"]["batches_queued"] == 0


def test_a_capped_class_keeps_its_rate(make_pair: Any) -> None:
    engine, mine, segment, theirs = make_pair(class_rates=("low=20MiB",))
    began = time.monotonic()
    # 7 MiB at 20 MiB/s: the bucket holds 2 MiB, and the last one's debt is paid by nobody.
    low = [
        engine.submit(Op.READ, segment, mine.address, theirs.handle, 0, MIB, priority="low") for _ in range(7)
    ]
    for batch in low:
        assert batch.wait(WAIT_S)
        batch.check()
    assert time.monotonic() - began >= 0.15
    assert counts(engine, "low")["held"] >= 3
    assert counts(engine, "low")["bytes"] == 7 * MIB


def test_a_direct_call_is_never_capped(make_pair: Any) -> None:
    engine, mine, segment, theirs = make_pair(class_rates=("low=1", "normal=1", "high=1"))
    for _ in range(3):
        engine.read(segment, theirs.handle, 0, mine.address, MIB)
    assert bytes(mine.view[:MIB]) == bytes(theirs.view[:MIB])


def test_a_held_batch_times_out_and_is_cancelled_at_once(make_pair: Any) -> None:
    engine, mine, segment, theirs = make_pair(class_rates=("low=1",))
    first = engine.submit(Op.READ, segment, mine.address, theirs.handle, 0, MIB, priority="low")
    first.wait(WAIT_S)
    late = engine.submit(
        Op.READ, segment, mine.address, theirs.handle, 0, MIB, priority="low", timeout_s=0.05
    )
    cancelled = engine.submit(Op.READ, segment, mine.address, theirs.handle, 0, MIB, priority="low")
    high = engine.submit(Op.READ, segment, mine.address + MIB, theirs.handle, MIB, MIB, priority="high")
    assert high.wait(WAIT_S), "others do not wait"
    assert not cancelled.done
    cancelled.cancel()
    assert cancelled.done
    assert cancelled.status[0] == Status.CANCELLED
    assert late.wait(WAIT_S)
    assert late.status[0] == Status.TIMED_OUT


def test_closing_an_engine_ends_what_a_cap_holds(make_pair: Any) -> None:
    engine, mine, segment, theirs = make_pair(class_rates=("normal=1",))
    batches = [engine.submit(Op.READ, segment, mine.address, theirs.handle, 0, MIB) for _ in range(4)]
    engine.close()
    assert all(batch.done for batch in batches)
