"""An endurance run: its processes, its cycles, the windows of the healthy pair, and what was found."""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from moonpool.bench.endurance_children import Child, die_with_parent, load_early
from moonpool.bench.endurance_plan import BOUNDS_MS, WARMUP_CYCLES, WAYS, Cycle, Slack, draw_cycle
from moonpool.bench.endurance_roles import (
    Names,
    Survivor,
    make_healthy_initiator,
    make_target,
    make_victim,
)
from moonpool.units import MS_PER_S

ANSWER_S: Final = 60.0
VIOLATIONS_KEPT: Final = 20
SHARED_MEMORY: Final = Path("/dev/shm")
#: Below the ports that the system gives to outgoing connections: between two lives nobody takes ours.
PORTS: Final = range(20_000, 32_000)
PORT_TRIES: Final = 200
REDIS_START_S: Final = 20.0
HEALTHY_WAYS: Final = ("tcp", "shm")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run does. `quiet_s` and `busy_s` are one window of the healthy pair without and with cycles."""

    cycles: int
    seed: int
    quiet_s: float = 0.7
    busy_s: float = 1.5
    cycle_nice: int = 19
    slack: Slack = field(default_factory=Slack)


@final
@dataclass(slots=True)
class Findings:
    """What a run saw."""

    cycles: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    #: Cycles whose signal came while the batch was under way.
    hits: int = 0
    steps_ms: dict[str, list[float]] = field(default_factory=dict)
    retried: int = 0
    #: Process → what it held after warm-up, at half time and at the end.
    held: dict[str, list[dict[str, int]]] = field(default_factory=dict)
    #: Way of the healthy pair → per window: bytes a second without, with cycles; the same a CPU second.
    windows: dict[str, list[tuple[float, float, float, float]]] = field(default_factory=dict)
    violation_count: int = 0
    violations: list[str] = field(default_factory=list)
    elapsed_s: float = 0.0
    metadata: str = "p2p"

    def violate(self, sentence: str) -> None:
        """Count a violation; the first few are kept in words."""
        self.violation_count += 1
        if len(self.violations) < VIOLATIONS_KEPT:
            self.violations.append(sentence)

    def step(self, cycle: Cycle, name: str, took_ms: float) -> None:
        """Note how long a step took; a violation beyond its bound."""
        self.steps_ms.setdefault(name, []).append(took_ms)
        if took_ms > BOUNDS_MS[name]:
            self.violate(f"{cycle}: {name} after {took_ms:.0f} ms, the bound is {BOUNDS_MS[name]:.0f} ms")

    def ended_as(self, cycle: Cycle, answer: dict[str, Any], allowed: tuple[str, ...]) -> None:
        """Note how a batch ended; a violation when not as allowed (complete counts: it was quicker)."""
        status = answer["status"]
        self.ended[f"{cycle.kind}, {cycle.way}: {status}"] += 1
        self.hits += answer["hit"]
        if status not in allowed:
            self.violate(f"{cycle}: the batch ended as {status}, not as {' or '.join(allowed)}")


def free_port(choice: random.Random) -> int:
    """A port that is free now and that no outgoing connection is given."""
    for _ in range(PORT_TRIES):
        port = choice.choice(PORTS)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"no free port between {PORTS.start} and {PORTS.stop} in {PORT_TRIES} tries")


@contextlib.contextmanager
def names_service() -> Iterator[str]:
    """The URL of a redis-server of our own; "p2p" where that program is not installed."""
    server = shutil.which("redis-server")
    if server is None:
        yield "p2p"
        return
    # Not the working folder: a unix socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="moonpool-endurance-") as folder:
        path = f"{folder}/redis.sock"
        command = [server, "--port", "0", "--unixsocket", path, "--dir", folder, "--save", ""]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
        )
        try:
            _wait_for_socket(path, time.monotonic() + REDIS_START_S)
            yield f"redis+unix://{path}"
        finally:
            process.kill()
            process.wait()


def _wait_for_socket(path: str, deadline: float) -> None:
    while True:
        with socket.socket(socket.AF_UNIX) as sock:
            try:
                sock.connect(path)
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
        time.sleep(0.01)


@final
class Run:
    """The parent of all processes. `run` does everything; use once."""

    def __init__(self, settings: Settings, progress: Callable[[str], None]) -> None:
        self._settings = settings
        self._progress = progress
        self.findings = Findings()
        self._choice = random.Random(settings.seed)
        self._life = 0
        self._threads: dict[str, list[Counter[str]]] = {}

    def run(self) -> Findings:
        """Warm up, cycle, and look at what the survivors hold before and after."""
        started = time.monotonic()
        load_early()
        before = {path.name for path in SHARED_MEMORY.iterdir()}
        with names_service() as metadata, contextlib.ExitStack() as stack:
            self.findings.metadata = metadata.partition(":")[0]
            self._start(metadata, stack)
            for number in range(WARMUP_CYCLES):
                self._cycle(draw_cycle(self._settings.seed, number))
            self.findings.cycles.clear()
            self._look()
            self._run_cycles()
            self._look()
            self.judge_growth()
            for child in (self._survivor, self._server, self._victim, self._target):
                child.close()
        left = {path.name for path in SHARED_MEMORY.iterdir()} - before
        if any("moonpool" in name for name in left):
            self.findings.violate(f"left in {SHARED_MEMORY}: {sorted(left)}")
        self.findings.elapsed_s = time.monotonic() - started
        return self.findings

    # ---- processes -----------------------------------------------------------------------------------------

    def _start(self, metadata: str, stack: contextlib.ExitStack) -> None:
        def named(name: str) -> Names:
            return Names(free_port(self._choice), "" if metadata == "p2p" else name, metadata)

        self._target_names, self._victim_names = named("endurance-target"), named("endurance-initiator")
        self._server_names = named("endurance-server")
        self._healthy = {way: self._start_healthy(way, stack) for way in HEALTHY_WAYS}
        nice = self._settings.cycle_nice
        self._server = stack.enter_context(
            Child("surviving target", lambda: make_target(self._server_names, 1), nice)
        )
        self._server.ask("endpoint", ANSWER_S)
        self._target, self._victim = self._fork_target(), self._fork_victim()
        # Whichever is alive at the end.
        stack.callback(lambda: self._target.kill())
        stack.callback(lambda: self._victim.kill())
        self._survivor = stack.enter_context(
            Child("surviving initiator", lambda: Survivor(self._target_names, WAYS).answers(), nice)
        )

    def _start_healthy(self, way: str, stack: contextlib.ExitStack) -> tuple[Child, Child]:
        target = stack.enter_context(Child(f"healthy target, {way}", lambda: make_target(Names(0), 1)))
        endpoint = target.ask("endpoint", ANSWER_S)
        name = f"healthy initiator, {way}"
        return stack.enter_context(Child(name, lambda: make_healthy_initiator(endpoint, way))), target

    def _fork_target(self) -> Child:
        self._life += 1
        names, life = self._target_names, self._life
        child = Child("target", lambda: make_target(names, life), self._settings.cycle_nice)
        child.ask("endpoint", ANSWER_S)
        return child

    def _fork_victim(self) -> Child:
        server, own = self._server_names, self._victim_names
        child = Child("initiator", lambda: make_victim(server, own, 1), self._settings.cycle_nice)
        child.ask("check", ANSWER_S)
        return child

    # ---- cycles --------------------------------------------------------------------------------------------

    def _run_cycles(self) -> None:
        """All cycles, in windows: after each quiet window of the healthy pair one with cycles."""
        number, last, ways = WARMUP_CYCLES, WARMUP_CYCLES + self._settings.cycles, 0
        half = WARMUP_CYCLES + self._settings.cycles // 2
        while number < last:
            way = HEALTHY_WAYS[ways % len(HEALTHY_WAYS)]
            ways += 1
            initiator, target = self._healthy[way]
            quiet = self._window(way, self._settings.quiet_s)
            cpu = initiator.cpu_seconds() + target.cpu_seconds()
            initiator.post("window", duration_s=self._settings.busy_s)
            first = number
            while number < last and not initiator.has_answer():
                self._cycle(draw_cycle(self._settings.seed, number))
                number += 1
                if number == half:
                    break
            whole = number < last and number != half
            busy = initiator.answer(ANSWER_S)
            cpu = initiator.cpu_seconds() + target.cpu_seconds() - cpu
            if whole:  # else a part of the window was without cycles
                rates = (busy["bytes"] / busy["seconds"], busy["bytes"] / cpu)
                self.findings.windows.setdefault(way, []).append((quiet[0], rates[0], quiet[1], rates[1]))
            if first < half <= number:
                self._look()
            self._progress(f"{number - WARMUP_CYCLES} of {self._settings.cycles} cycles")

    def _window(self, way: str, duration_s: float) -> tuple[float, float]:
        """The healthy pair alone: bytes a second, bytes a CPU second."""
        initiator, target = self._healthy[way]
        cpu = initiator.cpu_seconds() + target.cpu_seconds()
        moved = initiator.ask("window", ANSWER_S, duration_s=duration_s)
        cpu = initiator.cpu_seconds() + target.cpu_seconds() - cpu
        return moved["bytes"] / moved["seconds"], moved["bytes"] / cpu

    def _cycle(self, cycle: Cycle) -> None:
        self.findings.cycles[f"{cycle.kind}, {cycle.way}"] += 1
        {
            "kill target": self._kill_target,
            "kill initiator": self._kill_initiator,
            "stop target": self._stop_target,
            "pause target": self._pause_target,
            "clean": self._clean,
        }[cycle.kind](cycle)

    def _bulk(self, cycle: Cycle, request: str, **more: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self._survivor.ask(
            request,
            ANSWER_S,
            pid=self._target.pid,
            way=cycle.way,
            is_write=cycle.is_write,
            delay_ms=cycle.delay_ms,
            **more,
        )
        return answer

    def _kill_target(self, cycle: Cycle) -> None:
        answer = self._bulk(cycle, "kill")
        self.findings.ended_as(cycle, answer, ("PEER_GONE", "COMPLETE"))
        self.findings.step(cycle, "batch ends after kill", answer["ended_ms"])
        self.findings.step(cycle, "dead segment closes", answer["closed_ms"])
        self._target.kill()
        started = time.monotonic()
        self._target = self._fork_target()
        self._again(cycle, True, started)

    def _stop_target(self, cycle: Cycle) -> None:
        answer = self._bulk(cycle, "stop", is_stall=cycle.is_stall)
        early = "STALLED" if cycle.is_stall else "TIMED_OUT"
        # Mapped memory needs no target: it completes while that is stopped, unless the deadline is too near.
        early = "COMPLETE" if cycle.way == "shm" and cycle.is_stall else early
        self.findings.ended_as(cycle, answer, (early, "COMPLETE"))
        self.findings.step(cycle, "batch ends after stop", answer["late_ms"])
        self._again(cycle, False, time.monotonic())

    def _pause_target(self, cycle: Cycle) -> None:
        answer = self._bulk(cycle, "pause", stop_ms=cycle.stop_ms)
        self.findings.ended_as(cycle, answer, ("COMPLETE",))
        self.findings.step(cycle, "paused batch completes", answer["ended_ms"])
        self._again(cycle, True, time.monotonic())

    def _again(self, cycle: Cycle, patient: bool, started: float) -> None:
        answer = self._survivor.ask("again", ANSWER_S, way=cycle.way, patient=patient, life=self._life)
        self.findings.retried += answer["attempts"] > 1
        self.findings.step(cycle, "transfers work again", (time.monotonic() - started) * MS_PER_S)

    def _kill_initiator(self, cycle: Cycle) -> None:
        self.findings.hits += self._victim.ask("begin", ANSWER_S, way=cycle.way, is_write=cycle.is_write)
        time.sleep(cycle.delay_ms / MS_PER_S)
        killed = time.monotonic()
        self._victim.kill()
        bound_s = BOUNDS_MS["target forgets dead initiator"] / MS_PER_S
        if not self._server.ask("wait_alone", ANSWER_S, within_s=10 * bound_s):
            self.findings.violate(f"{cycle}: the target still has the dead initiator as a peer")
        started = time.monotonic()
        self.findings.step(cycle, "target forgets dead initiator", (started - killed) * MS_PER_S)
        self._victim = self._fork_victim()
        self.findings.step(cycle, "new initiator transfers", (time.monotonic() - started) * MS_PER_S)

    def _clean(self, cycle: Cycle) -> None:
        took_ms = self._survivor.ask("clean", ANSWER_S, way=cycle.way, life=self._life)
        self.findings.step(cycle, "engine made, used and closed", took_ms)

    # ---- what the survivors hold ---------------------------------------------------------------------------

    def _look(self) -> None:
        """Both survivors without any peer: what they hold then is all theirs."""
        self._victim.close()
        self._survivor.ask("settle", ANSWER_S)
        if not self._server.ask("wait_alone", ANSWER_S, within_s=10.0):
            self.findings.violate("the surviving target still has a peer after all have gone")
        for child in (self._survivor, self._server):
            self.findings.held.setdefault(child.name, []).append(child.ask("observe", ANSWER_S))
            self._threads.setdefault(child.name, []).append(Counter(child.ask("thread_names", ANSWER_S)))
        self._victim = self._fork_victim()

    def judge_growth(self) -> None:
        """A violation for whatever a survivor holds more of at the last look than at the first."""
        slack = self._settings.slack
        allowed = {
            "descriptors": 0,
            "threads": 0,
            "mappings": slack.mappings,
            "private_bytes": slack.private_bytes,
            "shared_bytes": 0,
        }
        for name, looks in self.findings.held.items():
            for what, limit in allowed.items():
                grown = looks[-1][what] - looks[0][what]
                if grown > limit:
                    self.findings.violate(f"{name}: {grown} more {what} than after warm-up, allowed {limit}")
        for name, names in self._threads.items():
            if new := names[-1] - names[0]:
                self.findings.violate(f"{name}: threads that were not there after warm-up: {dict(new)}")
