"""Sends millions of fuzzed frames to an engine and holds it to its contract.

``python -m moonpool.bench.frame_fuzz --frames 10000000`` takes some minutes. Lanes, control sessions and
hellos, over tcp and unix sockets, are fuzzed from two processes; every answer is compared with what the
reference predicts. The exit code is 1 when anything was violated. See docs/fuzzing.md.
"""

from __future__ import annotations

import json
import multiprocessing
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final, Protocol, final

import click

from moonpool.bench.frame_fuzz_bystanders import bystand
from moonpool.bench.frame_fuzz_control import ControlFuzzer, map_once
from moonpool.bench.frame_fuzz_hellos import HelloFuzzer
from moonpool.bench.frame_fuzz_lanes import LaneFuzzer
from moonpool.bench.frame_fuzz_model import TargetFacts, Violation
from moonpool.bench.frame_fuzz_target import serve
from moonpool.bench.frame_fuzz_watch import MemoryWatch, counts
from moonpool.bench.frame_fuzz_wire import Where, wait_until
from moonpool.units import KIB

#: Of all frames: control frames and hellos cost the target ten and thirty times what a lane's frame does.
CONTROL_SHARE: Final = 0.04
HELLO_SHARE: Final = 0.005
#: Lane frames that the first process sends; the second has the control frames and hellos too.
FIRST_PROCESS_SHARE: Final = 0.55
#: Frames after which the target's memory has seen every kind of use.
WARM_SHARE: Final = 0.25
ROUND_FRAMES: Final = 16_384


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzPlan:
    """How much is sent, and what is allowed."""

    frames: int
    seed: int
    #: Longest wait for one answer, or for a process to end.
    patience_s: float = 60.0
    #: Growth of the target's resident memory after the warm-up that is still called flat.
    memory_slack_kib: int = 32 * KIB


@final
@dataclass(slots=True)
class Outcome:
    """What came of it; `violations` is empty when the target held."""

    plan: FuzzPlan
    tallies: dict[str, Counter[str]] = field(default_factory=dict)
    bystanders: dict[str, Any] = field(default_factory=dict)
    target: dict[str, Any] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def frames(self) -> int:
        """All that were sent."""
        return sum(tally["frames"] for tally in self.tallies.values())


class Fuzzer(Protocol):
    """One way into the target."""

    tally: Counter[str]

    def run(self, frames_max: int) -> int:
        """Sends at most so many frames, at least one, and returns how many."""


class Progress(Protocol):
    """A number that two processes share."""

    value: int


@final
class FuzzingProcess:
    """Sends a share of the frames of each kind in turn, so that all kinds go on at the same time."""

    def __init__(self, where: Where, seed: int, shares: dict[str, int], progress: Progress) -> None:
        kinds: dict[str, Callable[[Where, int], Fuzzer]] = {
            "lanes": LaneFuzzer,
            "control": ControlFuzzer,
            "hellos": HelloFuzzer,
        }
        self.fuzzers = {name: kinds[name](where, seed) for name, n in shares.items() if n}
        self._left = {name: n for name, n in shares.items() if n}
        self._total = sum(shares.values())
        self._progress = progress

    def run(self) -> list[str]:
        """To the end, or to the first violation."""
        rounds = max(1, self._total // ROUND_FRAMES)
        quota = {name: -(-n // rounds) for name, n in self._left.items()}
        try:
            while any(self._left.values()):
                for name, fuzzer in self.fuzzers.items():
                    self._run_some(name, fuzzer, quota[name])
        except (Violation, OSError) as exc:
            return [f"{type(exc).__name__}: {exc}"]
        return []

    def _run_some(self, name: str, fuzzer: Fuzzer, n: int) -> None:
        todo = min(n, self._left[name])
        while todo > 0:
            sent = fuzzer.run(todo)
            todo -= sent
            self._left[name] = max(0, self._left[name] - sent)
            self._progress.value += sent


def fuzz(where: Where, seed: int, shares: dict[str, int], progress: Progress, pipe: Connection) -> None:
    """Body of the second fuzzing process; sends its tallies and violations."""
    process = FuzzingProcess(where, seed, shares, progress)
    problems = process.run()
    pipe.send(({name: fuzzer.tally for name, fuzzer in process.fuzzers.items()}, problems))


@contextmanager
def started(function: Any, *arguments: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    """A process with a pipe to it; gone when the block is left, whatever happened."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=function, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.join(1.0)
        if process.is_alive():
            process.kill()
        process.join()
        ours.close()


def ask(pipe: Connection, question: str, patience_s: float) -> Any:
    """The answer of another process of ours; raises `Violation` when it does not come."""
    try:
        if question:
            pipe.send(question)
        if pipe.poll(patience_s):
            return pipe.recv()
    except (EOFError, BrokenPipeError, ConnectionResetError) as exc:
        raise Violation("a process of the run died") from exc
    raise Violation(f"a process of the run does not answer {question!r} within {patience_s} s")


def run(plan: FuzzPlan) -> Outcome:
    """Runs it all and returns what happened; raises nothing for a target that fails."""
    outcome = Outcome(plan)
    begin = time.monotonic()
    with started(serve) as (target, pipe):
        try:
            facts: TargetFacts = ask(pipe, "", plan.patience_s)
            map_once(Where(facts, plan.patience_s))
            at_rest = _counts_at_rest(facts.pid)
            before = ask(pipe, "metrics", plan.patience_s)["counters"]
            _fuzz_target(plan, facts, outcome)
            _check_quiet(plan, facts, at_rest, outcome)
            after = ask(pipe, "metrics", plan.patience_s)["counters"]
            memory = ask(pipe, "check", plan.patience_s)
            outcome.violations += memory.pop("problems")
            outcome.target |= memory | {"counters": {name: after[name] - before[name] for name in before}}
            _check_counters(outcome)
            ask(pipe, "stop", plan.patience_s)
        except (Violation, OSError) as exc:
            outcome.violations.append(str(exc))
            if not target.is_alive():
                outcome.violations.append(f"the target ended with exit code {target.exitcode}")
    outcome.wall_s = time.monotonic() - begin
    return outcome


def _counts_at_rest(pid: int) -> tuple[int, int]:
    """Once two looks agree: the one client so far has just left."""
    last = [counts(pid)]

    def is_steady() -> bool:
        time.sleep(0.2)
        now, before = counts(pid), last[0]
        last[0] = now
        return now == before

    wait_until(is_steady, 10.0)
    return last[0]


def _fuzz_target(plan: FuzzPlan, facts: TargetFacts, outcome: Outcome) -> None:
    where = Where(facts, plan.patience_s)
    control, hellos = (max(1, int(plan.frames * share)) for share in (CONTROL_SHARE, HELLO_SHARE))
    lanes = max(2, plan.frames - control - hellos)
    first = int(lanes * FIRST_PROCESS_SHARE)
    shares = {"lanes": lanes - first, "control": control, "hellos": hellos}
    context = multiprocessing.get_context("spawn")
    here, there = (context.Value("q", 0, lock=False) for _ in range(2))

    def is_warm() -> bool:
        return bool(here.value + there.value >= plan.frames * WARM_SHARE)

    with started(bystand, facts, plan.patience_s, plan.seed) as (_, bystander_pipe):
        ask(bystander_pipe, "", plan.patience_s)
        with (
            MemoryWatch(facts.pid, is_warm) as watch,
            started(fuzz, where, plan.seed + 1, shares, there) as (
                other,
                fuzz_pipe,
            ),
        ):
            process = FuzzingProcess(where, plan.seed, {"lanes": first}, here)
            outcome.violations += process.run()
            while other.is_alive() and not fuzz_pipe.poll(plan.patience_s):
                pass
            outcome.tallies, problems = ask(fuzz_pipe, "", plan.patience_s)
            outcome.violations += problems
            outcome.tallies["lanes"] += process.fuzzers["lanes"].tally
        outcome.bystanders = ask(bystander_pipe, "stop", plan.patience_s)
    outcome.violations += outcome.bystanders.pop("problems")
    outcome.target["rss_kib"] = {"first": watch.samples[0], "last": watch.samples[-1]}
    outcome.target["rss_growth_kib"] = watch.growth_kib()
    if watch.growth_kib() > plan.memory_slack_kib:
        outcome.violations.append(
            f"the target grew by {watch.growth_kib()} KiB after its warm-up, "
            f"and {plan.memory_slack_kib} are allowed"
        )


def _check_quiet(plan: FuzzPlan, facts: TargetFacts, at_rest: tuple[int, int], outcome: Outcome) -> None:
    """When all clients have left, so have their descriptors and threads."""
    now = [at_rest]

    def is_quiet() -> bool:
        now[0] = counts(facts.pid)
        return now[0] == at_rest

    with suppress(FileNotFoundError):
        if not wait_until(is_quiet, plan.patience_s):
            outcome.violations.append(
                f"(descriptors, threads) were {at_rest} and are {now[0]} with nobody there"
            )
    outcome.target["descriptors_threads"] = now[0]


def _check_counters(outcome: Outcome) -> None:
    """What the target counted is what was sent to it."""
    if outcome.violations:
        return  # a run cut short would only repeat itself here
    counters, seen = outcome.target["counters"], outcome.bystanders["tally"]
    lanes, control, hellos = (outcome.tallies[name] for name in ("lanes", "control", "hellos"))
    expected = {
        "target_groups": lanes["groups"] + seen["healthy_groups"] + seen["slow_groups"],
        "target_groups_refused": lanes["refused"],
        "target_lanes_broken": lanes["broken"],
        "target_notices_refused": lanes["queue_full"],
        "control_sessions_broken": control["broken"] + seen["slow_control_closed"],
        "control_requests_failed": control["failed"],
        "control_hellos_malformed": hellos["malformed"],
        "control_versions_refused": hellos["versions_refused"],
        "control_kinds_refused": hellos["kinds_refused"],
        "control_instances_refused": hellos["instances_refused"],
        "control_handshakes_timed_out": seen["slow_hello_closed"],
        "control_handler_bugs": 0,
        "control_connections_refused": 0,
        "control_handshakes_evicted": 0,
    }
    outcome.violations += [
        f"the target counted {counters[name]} {name}, and {value} were sent"
        for name, value in expected.items()
        if counters[name] != value
    ]


def report(outcome: Outcome) -> dict[str, Any]:
    """What the run prints, as plain values."""
    latencies = outcome.bystanders.pop("latencies_us", [])
    total: Counter[str] = sum(outcome.tallies.values(), Counter())
    return {
        "frames": outcome.frames,
        "answered": total["answered"],
        "connections": total["connections"],
        "connections_closed": total["closed"],
        "seed": outcome.plan.seed,
        "wall_s": round(outcome.wall_s, 1),
        "sent": {name: dict(tally) for name, tally in outcome.tallies.items()},
        "bystanders": dict(outcome.bystanders.get("tally", {})),
        "healthy_4k_read_p50_us": round(latencies[len(latencies) // 2], 1) if latencies else None,
        "target": outcome.target,
        "violations": outcome.violations,
    }


@click.command(help=__doc__)
@click.option("--frames", type=click.IntRange(min=1_000), default=10_000_000, show_default=True)
@click.option(
    "--seed", type=int, default=None, help="Repeats a run's frames; a new one each time without it."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def main(frames: int, seed: int | None, as_json: bool) -> None:
    """Entry point."""
    plan = FuzzPlan(frames=frames, seed=secrets.randbits(32) if seed is None else seed)
    result = report(run(plan))
    if as_json:
        click.echo(json.dumps(result))
    else:
        for name, value in result.items():
            click.echo(f"{name:24} {json.dumps(value)}")
    sys.exit(1 if result["violations"] else 0)


if __name__ == "__main__":
    main()
