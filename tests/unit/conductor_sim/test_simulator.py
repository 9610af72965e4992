"""The simulator: figures that can be had by hand, studies of the papers in small, reports and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonpool.cli import main
from moonpool.conductor import plots
from moonpool.conductor.policy import policy_names
from moonpool.conductor.report import instance_table, summary, to_json
from moonpool.conductor.settings import ClusterSettings, load_settings
from moonpool.conductor.simulation_result import SimulationResult, replication_curves
from moonpool.conductor.simulator import SimulationOptions, Simulator
from moonpool.conductor.trace import GeneratorConfig, Trace, generate_trace, trace_of
from moonpool.errors import LimitExceeded, UsageError

PAPER = load_settings()
#: More prefill than eight instances can take without reuse.
BUSY = generate_trace(GeneratorConfig(requests=1_200, per_s=6.0, turn_tokens_mean=5_000), seed=2)


def simulate(trace: Trace, settings: ClusterSettings = PAPER, **options: Any) -> SimulationResult:
    return Simulator(settings, trace, SimulationOptions(**options)).run()


def test_one_request_by_hand() -> None:
    trace = trace_of([(1.0, 10_000, 101, list(range(20)))], 512)
    result = simulate(trace)
    prefill = PAPER.prefill_cost.seconds(10_000.0, 0.0)
    assert result.ttft.mean == pytest.approx(prefill)
    cost = PAPER.decode_cost
    steps = [cost.step_seconds(1.0, 10_001.0 + step) for step in range(100)]
    stream = 10_000 * PAPER.model.token_bytes / PAPER.link_bytes_per_s
    assert stream < prefill
    end = 1.0 + prefill + PAPER.link_latency_s + sum(steps)
    assert result.elapsed_s == pytest.approx(end)
    assert result.tbt.mean == pytest.approx(np.mean(sorted([*steps[1:], steps[0] + 0.0005])[-10:]), rel=1e-4)
    assert (result.finished, result.in_slo, result.rejections) == (1, 1, 0)


def test_a_second_request_finds_the_first_ones_blocks() -> None:
    rows = [(0.0, 10_100, 2, list(range(20))), (60.0, 10_100, 2, list(range(20)))]
    result = simulate(trace_of(rows, 512), policy="local")
    assert result.hit_ratio == 0.5
    # All but the last token is cached; loading it from host memory takes longer than computing that one.
    assert result.ttft_s[1] == pytest.approx(20 * 512 * 327_680 / 1.28e11, rel=1e-6)


def test_same_seed_same_run_and_other_seed_other_run() -> None:
    trace = BUSY.first(300)
    first, again, other = (simulate(trace, policy="random", seed=seed) for seed in (1, 1, 2))
    assert first.to_dict() == again.to_dict()
    assert first.ttft.mean != other.ttft.mean


@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("aggregated", [0, 4])
def test_every_policy_serves_everything(policy: str, aggregated: int) -> None:
    settings = PAPER
    if aggregated:
        settings = replace(load_settings(name="study_settings.toml"), aggregated=aggregated)
    simulator = Simulator(settings, BUSY.first(300), SimulationOptions(policy=policy, seed=4))
    result = simulator.run()
    simulator.cluster.check()
    simulator.scheduler.check()
    assert result.finished == 300
    assert 0.0 < result.hit_ratio < 1.0
    assert result.ttft.p50 <= result.ttft.p90 <= result.ttft.p99 <= result.ttft.worst
    assert sum(load.prefills for load in result.instances) == 300
    decoded = sum(load.decode_tokens for load in result.instances)
    assert decoded == int((BUSY.first(300).output - 1).sum())


def test_the_papers_order_of_policies_holds_under_load() -> None:
    """FAST'25 Fig. 5 in small: random is far the worst, caches count more than balance, and a pool helps."""
    means = {
        policy: np.mean([simulate(BUSY, policy=policy, seed=seed).ttft.mean for seed in (1, 2)])
        for policy in ("random", "least_loaded", "local", "global", "affinity")
    }
    assert means["random"] > 1.5 * means["least_loaded"]
    assert means["least_loaded"] > means["local"] > means["global"]
    assert means["affinity"] < 1.05 * means["global"]


def test_prediction_turns_fewer_away_and_wastes_less() -> None:
    """arXiv 2407.00079 Table 3 in small: decode is the scarce side."""
    settings = replace(PAPER, decode=3)
    trace = BUSY.at_speed(1.5)
    found = {
        name: simulate(trace, settings, policy="global", admission=name, seed=1)
        for name in ("none", "baseline", "early", "predictive", "priced")
    }
    assert found["none"].rejections == 0 or found["none"].verdicts["no_room"] > 0
    assert found["baseline"].refused > found["early"].refused
    assert found["predictive"].wasted_prefill_s < found["baseline"].wasted_prefill_s
    assert found["priced"].rejections < found["baseline"].rejections
    assert found["priced"].in_slo > found["baseline"].in_slo


def test_a_universal_first_block_does_not_collapse_the_load() -> None:
    settings = replace(PAPER, prefill=16, decode=16)
    result = simulate(BUSY, settings)
    assert result.work_imbalance < 1.15
    assert max(load.prefills for load in result.instances) < 3 * len(BUSY) / 16


def test_copies_of_blocks_are_sampled() -> None:
    result = simulate(BUSY.first(400), policy="random", sample_s=10.0)
    curve = result.replication[10]
    assert len(curve) == int(BUSY.first(400).arrival[-1] // 10.0)
    assert 0 <= min(curve) <= max(curve) <= 8
    assert curve[-1] >= curve[0]
    samples = (np.array([3, 0, 1], np.int16), np.array([4, 0, 2], np.int16))
    assert replication_curves(samples) == {}


def test_a_full_queue_is_an_error_that_names_its_bound() -> None:
    rows = [(0.0, 5_000, 5, []) for _ in range(40)]
    settings = replace(PAPER, prefill=1, decode=1, queue_max=8)
    with pytest.raises(LimitExceeded) as caught:
        simulate(trace_of(rows, 512), settings)
    assert caught.value.field == "queue_max"


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a mixture"):
        replace(PAPER, aggregated=4)
    with pytest.raises(UsageError, match="both prefill and decode"):
        replace(PAPER, decode=0)
    with pytest.raises(UsageError, match="blocks of 16 tokens"):
        simulate(trace_of([(0.0, 16, 1, [1])], 16))
    with pytest.raises(UsageError, match="cannot read"):
        load_settings(tmp_path / "none.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("[model]\n")
    with pytest.raises(UsageError, match="lacks or misnames"):
        load_settings(bad)
    bad.write_text("[model\n")
    with pytest.raises(UsageError, match="not TOML"):
        load_settings(bad)


def test_reports_say_what_the_result_says() -> None:
    result = simulate(BUSY.first(100))
    text = summary({"mine": result})
    assert f"{result.ttft.mean:.3f}" in text
    assert len(text.splitlines()) == 2
    assert instance_table(result).count("\n") == 16
    plain = json.loads(json.dumps(to_json({"mine": result}, {"seed": 0})))
    assert plain["runs"]["mine"]["ttft"]["mean"] == result.ttft.mean
    assert plain["runs"]["mine"]["goodput"] == result.in_slo / 100


class RecordedAxes:
    """Stands for a plot's axes: keeps what is drawn."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def plot(self, *_: Any, label: str, **__: Any) -> None:
        self.lines.append(label)

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class RecordedFigure:
    """Stands for matplotlib's figure; writes a file with the number of its curves."""

    def __init__(self, **_: Any) -> None:
        self.axes = np.empty((2, 2), object)
        for at in range(4):
            self.axes.flat[at] = RecordedAxes()

    def subplots(self, *_: int) -> Any:
        return self.axes

    def savefig(self, path: Path, **_: Any) -> None:
        path.write_text(str([len(each.lines) for each in self.axes.flat]))


def test_plots_draw_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "load_matplotlib", lambda: type("Module", (), {"Figure": RecordedFigure}))
    result = simulate(BUSY.first(200), sample_s=5.0)
    plots.draw({"a": result, "b": result}, tmp_path / "p.png")
    curves = 2 * len(result.replication)
    assert (tmp_path / "p.png").read_text() == str([2, 2, 2, curves])
    with pytest.raises(UsageError, match="cannot write"):
        plots.draw({"a": result}, tmp_path / "none" / "p.png")


def test_without_matplotlib_plots_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"moonpool\[plots\]"):
        plots.load_matplotlib()


def run_command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(("simulate", *arguments))
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_the_command_compares_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.json"
    options = ("--requests", "60", "--policy", "random", "--policy", "affinity", "--output", str(output))
    assert run_command(*options, "--instances") == 0
    shown = capsys.readouterr().out
    assert "random" in shown
    assert "prefill-7" in shown
    assert run_command(*options, "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(output.read_text())
    assert run_command("--requests", "40", "--study", "--aggregated", "2", "--json") == 0
    assert json.loads(capsys.readouterr().out)["about"]["instances"] == ["instance-0", "instance-1"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--policy", "nope"),
        ("--admission", "nope"),
        ("--speed", "0"),
        ("--trace", "/nonexistent.jsonl"),
        ("--trace", "/nonexistent.jsonl", "--rate", "3"),
        ("--study", "--settings", "/nonexistent.toml"),
        ("--requests", "20", "--prefill", "0", "--decode", "2"),
    ],
)
def test_wrong_usage_is_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(*arguments) == 2
    assert len(capsys.readouterr().err) > 20
