"""A chaos run: carries a plan out on a pool under load, lets everything heal, waits for rest, and judges."""

from __future__ import annotations

import heapq
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from moonpool.bench.chaos_client import ChaosClient, ClientSettings
from moonpool.bench.chaos_plan import Strike, make_plan
from moonpool.bench.chaos_pool import KEYS, ChaosPool, Member
from moonpool.bench.chaos_record import Recorder, Verdict, is_within, judge, read_lines
from moonpool.bench.fault_proxy import Fault
from moonpool.errors import MoonpoolError
from moonpool.store.client import Pool, connect

#: Longest time in which clients end when they are asked to, and in which the pool comes to rest afterwards.
END_S: Final = 45.0
REST_S: Final = 10.0
#: A call that takes longer hangs. Its client may have been stopped meanwhile, which counts for it.
CALL_S: Final = 30.0
#: Longest wait for the right moment.
AIM_S: Final = 0.8
GAUGES: Final = ("writing", "quarantined", "leaving")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosSettings:
    """How long, how many, and the seed."""

    seconds: float = 120.0
    seed: int = 1
    nodes: int = 3
    clients: int = 4


@final
@dataclass(slots=True)
class ChaosFindings:
    """What a run came to."""

    verdict: Verdict
    strikes: Counter[str] = field(default_factory=Counter)
    #: What must not be: hangs, deaths of processes that nobody killed, gauges that do not add up.
    violations: list[str] = field(default_factory=list)
    rest_s: float = 0.0
    seconds: float = 0.0
    final_hits: int = 0
    gauges: dict[str, int] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        return not self.violations and not self.verdict.broken


@final
class ChaosRun:
    """One run over a pool that serves."""

    def __init__(self, settings: ChaosSettings, pool: ChaosPool, tell: Callable[[str], None]) -> None:
        self._settings = settings
        self._pool = pool
        self._tell = tell
        self._started = time.monotonic()
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self.findings = ChaosFindings(Verdict())

    def strike_all(self) -> None:
        """Carries the plan out, to its end."""
        settings = self._settings
        plan = make_plan(settings.seed, settings.seconds, self._pool.counts)
        for strike in plan:
            self._at(strike.at_s, lambda strike=strike: self._strike(strike))  # type: ignore[misc]
        while self._later and self._later[0][0] <= settings.seconds:
            when, _, act = heapq.heappop(self._later)
            time.sleep(max(0.0, self._started + when - time.monotonic()))
            act()
        time.sleep(max(0.0, self._started + settings.seconds - time.monotonic()))
        while self._later:
            heapq.heappop(self._later)[2]()

    def _at(self, when_s: float, act: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._later, (when_s, self._order, act))

    def _strike(self, strike: Strike) -> None:
        member = self._pool.members[strike.kind, strike.number]
        if member.program is None or member.is_stopped:
            return
        self._aim(strike, member)
        self.findings.strikes[f"{strike.what} {strike.kind}"] += 1
        self._tell(f"{strike.at_s:6.1f} s  {strike.what} {member.name} for {strike.lasts_s:.1f} s")
        back_s = strike.at_s + strike.lasts_s
        if strike.what == "kill":
            member.kill()
            self._at(back_s, lambda: self._pool.start(member))
        elif strike.what == "stop":
            member.stop()
            self._at(back_s, member.go_on)
        else:
            self._strike_proxy(strike, member, back_s)

    def _aim(self, strike: Strike, member: Member) -> None:
        """Waits a little for a client to be in the middle of a put, or of a view."""
        if strike.kind != "client":
            return
        aim = "view_began" if strike.lasts_s * 1e3 % 3 < 1 and member.number % 2 == 0 else "put_began"
        until = time.monotonic() + AIM_S
        while time.monotonic() < until and not is_within(member.record, aim):
            time.sleep(0.001)

    def _strike_proxy(self, strike: Strike, member: Member, back_s: float) -> None:
        proxy = member.proxy
        assert proxy is not None
        if strike.what.startswith("cut"):
            proxy.cut("lane" if strike.what == "cut_lanes" else "any")
            return
        proxy.set_fault(Fault(action="stall", kind="lane" if strike.what == "stall_lanes" else "any"))
        self._at(back_s, proxy.heal)

    def heal(self) -> None:
        """Everything that was struck comes back."""
        for member in self._pool.members.values():
            if member.proxy is not None:
                member.proxy.heal()
            if member.is_stopped:
                member.go_on()
            if member.program is None:
                self._pool.start(member)

    def end(self) -> None:
        """Ends the clients, waits for rest, reads everything once more, and judges the history."""
        late = self._pool.end_clients(END_S)
        self.findings.violations += [f"{name} hangs: it did not end within {END_S:.0f} s" for name in late]
        self.findings.violations += self._pool.silent_deaths()
        reader = _last_reader(self._settings, self._pool)
        with reader.pool:
            self._wait_for_rest(reader.pool)
            reader.client.read_everything()
        reader.recorder.close()
        self.findings.verdict = judge(read_lines(self._pool.records))
        self.findings.final_hits = sum(
            1 for line in read_lines([reader.path]) if line[1] == "got" and line[5] == "hit"
        )
        longest, what = self.findings.verdict.longest
        if longest > CALL_S:
            self.findings.violations.append(f"a {what} took {longest:.1f} s")
        self.findings.seconds = time.monotonic() - self._started

    def _wait_for_rest(self, pool: Pool) -> None:
        """Gauges must add up always, and the passing ones be 0 within the bound."""
        began = time.monotonic()
        while True:
            wrong = self._look_at_gauges(pool)
            waited = time.monotonic() - began
            if not wrong:
                self.findings.rest_s = waited
                return
            if waited > REST_S:
                self.findings.violations.append(f"not at rest after {REST_S:.0f} s: {wrong}")
                return
            time.sleep(0.1)

    def _look_at_gauges(self, pool: Pool) -> str:
        try:
            status = pool.status()
        except MoonpoolError as error:
            return f"no status: {error}"
        segments = status["segments"]
        self.findings.gauges = total_gauges(segments)
        for segment in segments:
            parts = {name: int(segment[name]) for name in ("free", "live", *GAUGES)}
            if sum(parts.values()) != segment["capacity"]:
                self.findings.violations.append(f"gauges of {segment['name']} do not add up: {parts}")
            if any(parts[name] for name in GAUGES):
                return f"{segment['name']}: {parts}"
        if len(segments) != self._settings.nodes:
            return f"{len(segments)} of {self._settings.nodes} segments are there"
        return ""


def total_gauges(segments: list[dict[str, Any]]) -> dict[str, int]:
    """The five gauges over all segments."""
    return {name: sum(int(one[name]) for one in segments) for name in ("free", "live", *GAUGES)}


@dataclass(slots=True)
class _LastReader:
    pool: Pool
    client: ChaosClient
    recorder: Recorder
    path: Path


def _last_reader(settings: ChaosSettings, pool: ChaosPool) -> _LastReader:
    path = pool.folder / "client-last.jsonl"
    pool.records.append(path)
    about = ClientSettings(
        number=0,
        birth=1 << 20,
        seed=settings.seed,
        addresses=pool.master_addresses,
        record=str(path),
        keys=KEYS,
        transports=["local", "shm", "tcp"],
        cached=False,
    )
    opened = connect(*about.addresses)
    recorder = Recorder(path, about.who)
    return _LastReader(opened, ChaosClient(about, opened, recorder), recorder, path)


def run_chaos(settings: ChaosSettings, tell: Callable[[str], None]) -> ChaosFindings:
    """Starts a pool, strikes it, heals it, judges it; every process is gone afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="moonpool-chaos-") as folder,
        ChaosPool(Path(folder), settings.seed, settings.nodes, settings.clients) as pool,
    ):
        tell("the pool serves")
        run = ChaosRun(settings, pool, tell)
        run.strike_all()
        tell("everything heals")
        run.heal()
        run.end()
        return run.findings
