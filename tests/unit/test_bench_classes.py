"""Classes of tebench: how they are written, and what their figures mean."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moonpool.bench.classes import (
    CLASSES_MAX,
    ClassResult,
    Traffic,
    parse_classes,
    parse_classes_json,
    summarize,
)
from moonpool.bench.latency import LatencyRecorder
from moonpool.bench.segments import location_for, needed_transports, parse_kinds
from moonpool.bench.workload import Options, Point, points_of, tasks_of
from moonpool.errors import UsageError


def test_classes_are_ranked_by_weight() -> None:
    found = parse_classes("a:2:100:4:1.5, b:1:0:1,c:3:50:2")
    assert [(one.name, one.threads, one.slo_us, one.isolated_gb_s) for one in found] == [
        ("a", 2, 100.0, 1.5),
        ("b", 1, 0.0, 0.0),
        ("c", 3, 50.0, 0.0),
    ]
    assert [one.priority for one in found] == ["high", "low", "normal"]
    assert [one.priority for one in parse_classes("a:1:0:2,b:1:0:2")] == ["normal", "normal"]


@pytest.mark.parametrize(
    "text",
    [
        ",",
        "a",
        "a:1:1",
        "a:1:1:1:1:1",
        "a:x:1:1",
        "a:0:1:1",
        "a:257:1:1",
        "a:1:-1:1",
        "a:1:nan:1",
        "a:1:1:0",
        "a b:1:1:1",
        "a:1:1:1,a:1:1:1",
        "a:200:1:1,b:200:1:1",
        ":1:1:1",
        ",".join(f"c{k}:1:1:1" for k in range(CLASSES_MAX + 1)),
    ],
)
def test_wrong_classes_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_classes(text)


def test_json_says_the_same() -> None:
    given = [{"name": "a", "threads": 2, "slo_us": 100, "weight": 4}, {"name": "b", "threads": 1}]
    assert parse_classes_json(json.dumps(given), workload=False) == parse_classes("a:2:100:4,b:1:0:1")


WRONG_JSON: tuple[Any, ...] = (
    {},
    [],
    [1],
    [{"name": "a"}],
    [{"threads": 1}],
    [{"name": 7, "threads": 1}],
    [{"name": "a", "threads": "1"}],
    [{"name": "a", "threads": True}],
    [{"name": "a", "threads": 1.5}],
    [{"name": "a", "threads": 1, "weight": "1"}],
    [{"name": "a", "threads": 1, "color": "red"}],
    [{"name": "a", "threads": 1, "block_size": 4096}],
)


@pytest.mark.parametrize("given", WRONG_JSON)
def test_wrong_json_is_refused(given: Any) -> None:
    with pytest.raises(UsageError):
        parse_classes_json(json.dumps(given), workload=False)


def test_a_workload_has_sizes_and_intents() -> None:
    one = {"name": "a", "threads": 1, "block_size": 4096, "intent_type": "checkpoint", "deadline_us": 9}
    (found,) = parse_classes_json(json.dumps([one]), workload=True)
    assert found == Traffic(name="a", block_size=4096, batch_size=1, priority="low", deadline_us=9)
    for wrong in ({"intent_type": "boredom"}, {"block_size": 1.5}, {"block_size": None}):
        with pytest.raises(UsageError):
            parse_classes_json(json.dumps([one | wrong]), workload=True)


def result(traffic: Traffic, latencies_us: list[int], within: int, missed: int = 0) -> ClassResult:
    recorder = LatencyRecorder()
    recorder.extend(value * 1000 for value in latencies_us)
    return ClassResult(
        traffic=traffic,
        block_bytes=1_000_000,
        batch=10,
        wall_s=1.0,
        latencies=recorder,
        within_slo=within,
        missed=missed,
    )


def test_figures_of_classes() -> None:
    first = result(Traffic(name="a", slo_us=10, weight=3, isolated_gb_s=0.08), [5] * 30 + [50] * 10, 30)
    second = result(Traffic(name="b", weight=1), [5] * 12, 0, missed=2)
    assert first.throughput == pytest.approx(0.4)
    assert first.slo_attainment == pytest.approx(0.75)
    assert first.isolation_leakage == 0.0
    assert (second.operations, second.slo_attainment) == (10, 1.0)
    assert second.throughput == pytest.approx(0.1)
    whole = summarize([first, second], 2.0)
    assert whole.throughput == pytest.approx(0.5)
    assert whole.total_utilization == pytest.approx(0.25)
    assert whole.weighted_goodput == pytest.approx((3 * 0.4 * 0.75 + 0.1) / 4)
    a, b = 0.4 / 3, 0.1
    assert whole.jain_fairness == pytest.approx((a + b) ** 2 / (2 * (a * a + b * b)))
    lost = result(Traffic(name="c", isolated_gb_s=0.2), [5] * 10, 0)
    assert lost.isolation_leakage == pytest.approx(0.5)
    assert summarize([], 0.0).jain_fairness == 0.0


def test_who_runs_what() -> None:
    plain = Options(start_num_threads=2, max_num_threads=2)
    assert tasks_of(plain, Point(2, 4096, 1)) == [(Traffic(), Point(2, 4096, 1))] * 2
    tight = Options(start_num_threads=2, max_num_threads=2, deadline_us=5, deadline_tight_threads=1)
    names = [traffic.name for traffic, _ in tasks_of(tight, Point(2, 4096, 1))]
    assert names == ["deadline-tight", "other"]
    classes = parse_classes("a:2:0:2,b:1:0:1")
    shared = Options(classes=classes, max_block_size=8192)
    assert [point.threads for point in points_of(shared, 1 << 20)] == [3, 3]
    assert [traffic.name for traffic, _ in tasks_of(shared, Point(3, 4096, 1))] == ["a", "a", "b"]
    given = [{"name": "x", "threads": 1, "block_size": 512}, {"name": "y", "threads": 2, "block_size": 64}]
    workload = Options(classes=parse_classes_json(json.dumps(given), workload=True), is_workload=True)
    (point,) = points_of(workload, 1 << 20)
    assert point == Point(3, 512, 1)
    assert [sizes.block_bytes for _, sizes in tasks_of(workload, point)] == [512, 64, 64]


def test_kinds_of_segments() -> None:
    assert parse_kinds("dram", "") == ("DRAM",)
    assert parse_kinds("DRAM", "dram, file") == ("DRAM", "FILE")
    with pytest.raises(UsageError):
        parse_kinds("DRAM", "tape")
    assert needed_transports(("DRAM",), ("local", "shm", "tcp")) == ("local", "shm", "tcp")
    assert needed_transports(("FILE", "CXL", "FILE"), ("shm", "tcp")) == ("shm", "file", "cxl", "tcp")
    assert needed_transports(("FILE",), ("file",)) == ("file",)
    assert location_for("CXL", ("file:/x", "numa:1")) == "numa:1"
    with pytest.raises(UsageError, match="--seg_location=nvme:"):
        location_for("NVME", ("file:/x",))
