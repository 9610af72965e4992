"""The paired benchmark of the index runs, counts what it says, and judges floors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moonpool.bench import conductor_pair
from moonpool.bench.conductor_pair import DECISION, FLOORS, Floor, measure, rows_of, verdict_of
from moonpool.bench.interval import Interval
from moonpool.bench.workers.conductor_jobs import REPLAY_HOLDERS, replay_operations


def test_without_the_peer_ours_is_measured_and_the_reason_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"hash_ids": [0, 1, 10 + n, 20 + n]}) + "\n" for n in range(50)))
    monkeypatch.setattr(conductor_pair, "load_peer", lambda name: None)
    found, missing = measure(1, trace)
    assert "peers_setup dynamo-1.6.1" in missing
    assert set(found["moonpool"]) == set(FLOORS)
    assert all(cost > 0 for rounds in found["moonpool"].values() for cost in rounds.values())
    verdicts = {row.cell: row.verdict for row in rows_of(found)}
    assert verdicts["hash 1000 tokens"] == "unknown"
    assert DECISION in verdicts


def test_a_replay_evicts_what_a_holder_has_no_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonpool.bench.workers.conductor_jobs.REPLAY_BLOCKS", 4)
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"hash_ids": [n, n + 1]}) + "\n" for n in range(0, 400, 2)))
    held: dict[int, set[int]] = {}
    kinds = set()
    for operation in replay_operations(trace):
        kinds.add(operation.kind)
        if operation.kind == "store":
            held.setdefault(operation.holder, set()).update(operation.blocks)
        elif operation.kind == "remove":
            assert set(operation.blocks) <= held[operation.holder]
            held[operation.holder].difference_update(operation.blocks)
    assert kinds == {"find", "store", "remove"}
    assert len(held) == REPLAY_HOLDERS
    assert all(len(blocks) <= 4 for blocks in held.values())


@pytest.mark.parametrize(
    ("floor", "ours", "times", "verdict"),
    [
        (Floor(3.0), 2.9, None, "met"),
        (Floor(3.0), 3.1, None, "not met: 3 us"),
        (Floor(None, 5.0), 1.0, 5.1, "met"),
        (Floor(None, 5.0), 1.0, 4.9, "not met: 5 times"),
        (Floor(None, 5.0), 1.0, None, "unknown"),
    ],
)
def test_verdicts(floor: Floor, ours: float, times: float | None, verdict: str) -> None:
    ratio = None if times is None else Interval(times, times, times, 1)
    assert verdict_of(floor, Interval(ours, ours, ours, 1), ratio) == verdict
