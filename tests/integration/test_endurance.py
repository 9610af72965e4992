"""The endurance program in its short form, and that it notices what it is there to notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from moonpool.bench.endurance import healthy_ratios, judge_healthy
from moonpool.bench.endurance_children import Answers, Child, ChildFailed, observe
from moonpool.bench.endurance_plan import BOUNDS_MS, KINDS, WAYS, Slack, draw_cycle
from moonpool.bench.endurance_run import Findings, Run, Settings

TIMEOUT_S = 100.0
SEED = 11
LOOK = {"descriptors": 5, "threads": 2, "mappings": 100, "private_bytes": 1 << 20, "shared_bytes": 1 << 20}


def test_twenty_cycles() -> None:
    command = [sys.executable, "-P", "-m", "moonpool.bench.endurance", "--cycles=20", f"--seed={SEED}"]
    ended = subprocess.run(
        [*command, "--quiet=0.1", "--busy=0.4", "--json"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, f"seed {SEED}: {ended.stdout}\n{ended.stderr}"
    told = json.loads(ended.stdout)
    assert told["cycles"] == 20
    assert told["violations"] == 0
    assert told["steps"].keys() == BOUNDS_MS.keys()
    assert all(one["max_ms"] <= one["bound_ms"] for one in told["steps"].values())
    assert told["signals_during_a_transfer"] > 0
    for looks in told["held"].values():
        assert len(looks) == 3
        assert looks[0]["descriptors"] == looks[-1]["descriptors"]
    assert told["healthy"]


def test_the_same_seed_gives_the_same_cycles_and_the_first_are_each_kind_on_each_way() -> None:
    drawn = [draw_cycle(SEED, number) for number in range(60)]
    assert drawn == [draw_cycle(SEED, number) for number in range(60)]
    assert drawn != [draw_cycle(SEED + 1, number) for number in range(60)]
    first = {(cycle.kind, cycle.way) for cycle in drawn[: len(KINDS) * len(WAYS)]}
    assert first == {(kind, way) for kind in KINDS for way in WAYS}


def test_a_step_beyond_its_bound_and_an_unexpected_end_are_violations() -> None:
    found, cycle = Findings(), draw_cycle(SEED, 0)
    found.step(cycle, "batch ends after kill", BOUNDS_MS["batch ends after kill"])
    found.ended_as(cycle, {"status": "PEER_GONE", "hit": True}, ("PEER_GONE", "COMPLETE"))
    assert found.violation_count == 0
    found.step(cycle, "batch ends after kill", BOUNDS_MS["batch ends after kill"] + 1)
    found.ended_as(cycle, {"status": "PENDING", "hit": True}, ("PEER_GONE", "COMPLETE"))
    assert found.violation_count == 2
    assert "PENDING" in found.violations[1]


@pytest.mark.parametrize(
    ("what", "grown", "is_violation"),
    [
        ("descriptors", 1, True),
        ("threads", 1, True),
        ("shared_bytes", 4096, True),
        ("mappings", Slack().mappings, False),
        ("mappings", Slack().mappings + 1, True),
        ("private_bytes", Slack().private_bytes, False),
        ("private_bytes", Slack().private_bytes + 1, True),
    ],
)
def test_growth_is_a_violation(what: str, grown: int, is_violation: bool) -> None:
    run = Run(Settings(cycles=1, seed=SEED), lambda _line: None)
    run.findings.held["survivor"] = [LOOK, LOOK, {**LOOK, what: LOOK[what] + grown}]
    run.judge_growth()
    assert bool(run.findings.violation_count) is is_violation


@pytest.mark.parametrize(("rate", "is_violation"), [(0.97, False), (0.80, True)])
def test_a_slower_healthy_pair_is_a_violation(rate: float, is_violation: bool) -> None:
    found = Findings()
    found.windows["tcp"] = [(1e9, 0.5e9, 2e9, 2e9 * rate)] * 9
    told: dict[str, Any] = {"healthy": healthy_ratios(found)}
    judge_healthy(told, found)
    assert told["healthy"]["tcp by_clock"]["median"] == 0.5
    assert bool(told["violations"]) is is_violation


def make_echo() -> Answers:
    held: list[int] = []

    def hold(count: int) -> None:
        held.extend(os.open("/dev/null", os.O_RDONLY) for _ in range(count))

    def fail() -> None:
        raise ValueError("on purpose")

    return {"echo": lambda text: text, "hold": hold, "fail": fail, "observe": observe, "close": held.clear}


def test_a_child_answers_fails_and_is_seen_to_die() -> None:
    with Child("echo", make_echo) as child:
        assert child.ask("echo", TIMEOUT_S, text="there") == "there"
        child.post("echo", text="again")
        assert child.answer(TIMEOUT_S) == "again"
        assert not child.has_answer()
        with pytest.raises(ChildFailed, match="on purpose"):
            child.ask("fail", TIMEOUT_S)
        child.kill()
        child.kill()
        with pytest.raises(ProcessLookupError):
            os.kill(child.pid, 0)


def test_a_child_that_was_killed_is_missed_within_the_wait() -> None:
    with Child("echo", make_echo) as child:
        os.kill(child.pid, 9)
        with pytest.raises(ChildFailed, match=r"gone|ended"):
            child.ask("echo", TIMEOUT_S, text="there")


def test_what_a_process_holds_is_seen() -> None:
    with Child("echo", make_echo) as child:
        before = child.ask("observe", TIMEOUT_S)
        child.ask("hold", TIMEOUT_S, count=3)
        after = child.ask("observe", TIMEOUT_S)
        child.close()
    assert after["descriptors"] == before["descriptors"] + 3
    assert after["threads"] == before["threads"] == 1
