"""tebench's rows: widths, formulas, JSON."""

from __future__ import annotations

import json

import pytest

from moonpool.bench.latency import LatencyRecorder
from moonpool.bench.report import COLUMNS, PointResult, as_json, header, row
from moonpool.bench.workload import Point


def result_of(
    latencies_ns: list[int], *, threads: int = 2, wall_s: float = 0.5, cpu_s: float = 0.25
) -> PointResult:
    recorder = LatencyRecorder()
    recorder.extend(latencies_ns)
    return PointResult(
        point=Point(threads, 1000, 2),
        op_type="read",
        transport="tcp",
        wall_s=wall_s,
        cpu_s=cpu_s,
        latencies=recorder,
        checked_bytes=0,
    )


def test_the_header_has_the_known_columns_and_widths_first() -> None:
    title, rule = header().split("\n")
    assert rule == "-" * 160
    known = (
        "BlkSize (B)",
        "Batch",
        "BW (GB/s)",
        "Avg Inst GB/s",
        "Avg Lat (us)",
        "Avg Tx (us)",
        "P99 Tx (us)",
    )
    start = 0
    for name, width in zip((*known, "P999 Tx (us)"), (14, 8, 14, 18, 14, 14, 14, 14), strict=True):
        assert title[start : start + width].rstrip() == name
        start += width


def test_a_row_has_the_documented_formulas_and_decimals() -> None:
    result = result_of([1_000, 2_000, 4_000, 1_000])
    cells = row(result).split()
    assert len(cells) == len(COLUMNS)
    assert cells[:2] == ["1000", "2"]
    assert cells[2] == "0.000016"  # 4 operations x 2000 bytes / 0.5 s
    assert cells[3] == "1.375000"  # mean of 2, 1, 0.5 and 2 GB/s
    assert cells[4] == "250000.0"  # 0.5 s x 2 threads / 4 operations
    assert cells[5] == "2.0"
    assert result.percentile_us(1.0) == pytest.approx(4.0)
    assert cells[9] == "31250.0000"  # 0.25 s / 8 KB
    assert cells[10] == "2"


def test_json_has_the_same_figures() -> None:
    values = json.loads(as_json(result_of([1_000, 3_000])))
    assert (values["block_size"], values["batch_size"], values["num_threads"]) == (1000, 2, 2)
    assert values["operations"] == 2
    assert values["transferred_bytes"] == 4000
    assert values["avg_tx_us"] == pytest.approx(2.0)
    assert values["max_us"] == pytest.approx(3.0)
    assert values["p50_us"] <= values["p99_us"] <= values["p999_us"] <= values["max_us"]


def test_a_point_without_operations_has_no_division() -> None:
    result = result_of([], wall_s=0.0)
    assert json.loads(as_json(result))["bandwidth_gb_s"] == 0
    assert row(result).split()[2] == "0.000000"
