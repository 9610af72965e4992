"""The studies as programs: cells, verdicts, resuming; and the published traces where they are at hand."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from moonpool.bench import paper_study, scheduler_study
from moonpool.bench.scheduler_study import Cell, cells_of, load_rows, verdicts_of
from moonpool.conductor.cache_study import hit_ratios
from moonpool.conductor.request_bounds import bounds_of
from moonpool.conductor.settings import load_settings
from moonpool.conductor.trace import GeneratorConfig, Trace, generate_trace, load_trace, trace_of
from moonpool.errors import UsageError

TRACES = os.environ.get("MOONPOOL_TRACES", "")


def row(policy: str, seed: int, **metrics: Any) -> dict[str, Any]:
    values = {"reuse": 0.3, "ttft_p99_s": 1.0, "in_slo": 100, **metrics}
    return {
        "trace": "t",
        "arrivals": "raw",
        "speed": 4.0,
        "instances": 8,
        "policy": policy,
        "seed": seed,
        **values,
    }


def write_trace(trace: Trace, path: Path) -> Path:
    lines = [
        json.dumps(
            {
                "timestamp": round(1e3 * float(trace.arrival[at])),
                "input_length": int(trace.tokens[at]),
                "output_length": int(trace.output[at]),
                "hash_ids": trace.block_ids[trace.starts[at] : trace.starts[at + 1]].tolist(),
            }
        )
        for at in range(len(trace))
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_cells_are_the_cross_product() -> None:
    cells = list(cells_of(["a", "b"], ["raw"], [1.0, 2.0], [8]))
    assert len(cells) == 4
    assert str(cells[1]) == "a raw x2 8 instances"


def test_a_verdict_needs_an_interval_clear_of_zero() -> None:
    rows = [row("affinity", seed, ttft_p99_s=0.9, in_slo=100 - seed % 2) for seed in range(12)]
    rows += [row("local", seed, ttft_p99_s=1.0) for seed in range(12)]
    rows += [row("random", seed, ttft_p99_s=5.0, reuse=0.1) for seed in range(12)]
    found = {each.metric: each for each in verdicts_of(rows)}
    assert found["ttft_p99_s"].best_policy == "local"
    assert found["ttft_p99_s"].strict
    assert found["ttft_p99_s"].met
    assert found["reuse"].met
    assert found["in_slo"].met
    worse = [row("affinity", seed, in_slo=90) for seed in range(12)] + rows[12:]
    judged = {each.metric: each for each in verdicts_of(worse)}
    assert not judged["in_slo"].met
    # Equal is not lower.
    assert not judged["ttft_p99_s"].met
    assert verdicts_of(rows[:12]) == []


def test_the_matrix_runs_in_parts_and_goes_on(tmp_path: Path) -> None:
    path = write_trace(generate_trace(GeneratorConfig(requests=30), seed=3), tmp_path / "small.jsonl")
    results = tmp_path / "results.jsonl"
    part = ["run", "--trace", str(path), "--arrivals", "raw", "--speeds", "4", "--instances", "2"]
    part += ["--policy", "affinity", "--policy", "random", "--seeds", "1,2", "--results", str(results)]
    runner = CliRunner()
    first = runner.invoke(scheduler_study.main, [*part, "--limit", "3"])
    assert first.exit_code == 0, first.output
    assert len(load_rows(results)) == 3
    assert runner.invoke(scheduler_study.main, part).exit_code == 0
    assert runner.invoke(scheduler_study.main, part).exit_code == 0
    rows = load_rows(results)
    assert len(rows) == 4
    assert {(each["policy"], each["seed"]) for each in rows} == {
        (policy, seed) for policy in ("affinity", "random") for seed in (1, 2)
    }
    judged = runner.invoke(scheduler_study.main, ["verdict", "--results", str(results), "--trace", str(path)])
    assert judged.exit_code in (0, 1)
    assert "no schedule has reuse above" in judged.output
    results.write_text("{\n")
    with pytest.raises(UsageError, match="line 1"):
        load_rows(results)


def test_verdicts_of_nothing_are_an_error(tmp_path: Path) -> None:
    done = CliRunner().invoke(scheduler_study.main, ["verdict", "--results", str(tmp_path / "none.jsonl")])
    assert done.exit_code == 1
    assert "holds no cell" in done.output


def test_the_papers_studies_run_on_a_small_trace(tmp_path: Path) -> None:
    path = write_trace(generate_trace(GeneratorConfig(requests=80), seed=5), tmp_path / "small.jsonl")
    done = CliRunner().invoke(paper_study.main, [str(path), "--seeds", "1"])
    assert done.exit_code == 0, done.output
    for part in paper_study.PARTS:
        assert f"{part}\n" in done.output


def test_the_bound_is_what_one_unlimited_cache_gives() -> None:
    chains = [[1, 2], [1, 2, 3], [9]]
    trace = trace_of([(float(at), 512 * len(chain), 1, chain) for at, chain in enumerate(chains)], 512)
    settings = load_settings()
    bound = bounds_of(trace, settings)
    assert bound.reuse == pytest.approx(1_024 / 3_072)
    cost = settings.prefill_cost
    alone = [cost.seconds(1_024.0, 0.0), cost.seconds(1_536.0, 1_024.0), cost.seconds(512.0, 0.0)]
    assert bound.ttft_mean_s == pytest.approx(np.mean(alone))


def test_a_cell_knows_its_order() -> None:
    assert Cell("a", "raw", 1.0, 8) < Cell("a", "raw", 2.0, 8) < Cell("b", "raw", 1.0, 8)


@pytest.mark.skipif(not TRACES, reason="needs the published traces: set MOONPOOL_TRACES to their folder")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("conversation", {1 << 30: 0.3664, 50_000: 0.3546, 10_000: 0.2116, 5_860: 0.1361, 1_000: 0.0445}),
        ("synthetic", {1 << 30: 0.6396, 50_000: 0.6396, 10_000: 0.4239, 5_860: 0.3094, 1_000: 0.0841}),
    ],
)
def test_hit_ratios_of_the_published_traces(name: str, expected: dict[int, float]) -> None:
    """Figures that were found independently, by a plain program over an ordered dictionary."""
    trace = load_trace(Path(TRACES) / f"{name}_trace.jsonl")
    found = hit_ratios(trace, list(expected))
    assert {capacity: round(ratio, 4) for capacity, ratio in found.items()} == expected
