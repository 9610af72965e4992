"""Classes of traffic in one tebench run: what is asked of each, and what it got. Pure.

A class has threads of its own, a bound on latency (SLO), a weight, and what it reached when it was alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from moonpool.bench.latency import LatencyRecorder
from moonpool.errors import UsageError

CLASSES_MAX: Final = 32
THREADS_MAX: Final = 256
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z", re.ASCII)
#: What Mooncake calls intents, as classes of our submitted batches.
INTENTS: Final[Mapping[str, str]] = {
    "unspec": "",
    "foreground_get": "high",
    "weight_loading": "normal",
    "staging_internal": "normal",
    "migration": "low",
    "checkpoint": "low",
    "background_prefetch": "low",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One class. Times in us, bandwidth in GB/s (10^9); 0 means none, and the sweep's sizes.

    `priority` is that of the engine's submitted batches; empty: the thread drives its transfers itself.
    """

    name: str = ""
    threads: int = 1
    slo_us: float = 0.0
    weight: float = 1.0
    isolated_gb_s: float = 0.0
    block_size: int = 0
    batch_size: int = 0
    priority: str = ""
    deadline_us: float = 0.0

    def __post_init__(self) -> None:
        if self.name and not _NAME.match(self.name):
            raise UsageError(f"a class has a name of letters, digits, _ . and -, not {self.name!r}")
        if type(self.threads) is not int or not 1 <= self.threads <= THREADS_MAX:
            raise UsageError(f"class {self.name!r} has 1 to {THREADS_MAX} threads, not {self.threads!r}")
        for what in ("slo_us", "weight", "isolated_gb_s", "block_size", "batch_size", "deadline_us"):
            value = getattr(self, what)
            if type(value) not in (int, float) or not 0 <= value < 1e15:
                raise UsageError(f"{what} of class {self.name!r} is a number of at least 0, not {value!r}")
        for what in ("block_size", "batch_size"):
            if type(getattr(self, what)) is not int:
                raise UsageError(f"{what} of class {self.name!r} is a whole number")
        if not self.weight:
            raise UsageError(f"the weight of class {self.name!r} must be above 0")

    @property
    def is_watched(self) -> bool:
        """Whether each operation is held against a bound."""
        return bool(self.slo_us or self.deadline_us)


def parse_classes(text: str) -> tuple[Traffic, ...]:
    """Classes from `name:threads:slo_us:weight[:isolated_gbps],...`; UsageError names the wrong one."""
    found = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        parts = word.split(":")
        try:
            name, threads, slo_us, weight, *alone = parts
            isolated = float(alone[0]) if alone else 0.0
            one = Traffic(
                name=name,
                threads=int(threads),
                slo_us=float(slo_us),
                weight=float(weight),
                isolated_gb_s=isolated,
            )
        except ValueError as wrong:
            if isinstance(wrong, UsageError):
                raise
            raise UsageError(
                f"{word!r} is no class: write name:threads:slo_us:weight[:isolated_gbps]", value=word
            ) from wrong
        if len(parts) > 5:
            raise UsageError(f"{word!r} has more than five parts", value=word)
        found.append(one)
    return ranked(found)


def parse_classes_json(text: str, *, workload: bool) -> tuple[Traffic, ...]:
    """Classes from a JSON array of objects; for a `workload` each has sizes of its own. UsageError else."""
    try:
        given = json.loads(text)
    except ValueError as wrong:
        raise UsageError(f"the classes are no JSON: {wrong}") from wrong
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise UsageError("the classes are a JSON array of objects")
    found = [_from_object(one, workload=workload) for one in given]
    return tuple(_checked(found)) if workload else ranked(found)


def _from_object(given: dict[str, Any], *, workload: bool) -> Traffic:
    known = {"name", "threads", "slo_us", "weight", "isolated_gbps"}
    if workload:
        known |= {"block_size", "batch_size", "intent_type", "deadline_us"}
    unknown = sorted(given.keys() - known)
    if unknown:
        raise UsageError(f"a class has no {unknown[0]!r}; it has {', '.join(sorted(known))}")
    lacks = sorted(({"name", "threads", "block_size"} if workload else {"name", "threads"}) - given.keys())
    if lacks:
        raise UsageError(f"class {given.get('name')!r} lacks {lacks[0]!r}")
    intent = given.get("intent_type", "unspec")
    if intent not in INTENTS:
        raise UsageError(f"{intent!r} is no intent; there are {', '.join(INTENTS)}")
    if not isinstance(given["name"], str):
        raise UsageError(f"a class's name is text, not {given['name']!r}")
    return Traffic(
        name=given["name"],
        threads=given["threads"],
        slo_us=given.get("slo_us", 0),
        weight=given.get("weight", 1),
        isolated_gb_s=given.get("isolated_gbps", 0),
        block_size=given.get("block_size", 0),
        batch_size=given.get("batch_size", 1 if workload else 0),
        priority=INTENTS[intent],
        deadline_us=given.get("deadline_us", 0),
    )


def ranked(classes: Sequence[Traffic]) -> tuple[Traffic, ...]:
    """Classes with priorities by weight: the heaviest high, the lightest low, others and equals normal."""
    weights = {one.weight for one in classes}
    if len(weights) < 2:
        return _checked([replace(one, priority="normal") for one in classes])
    rank = {max(weights): "high", min(weights): "low"}
    return _checked([replace(one, priority=rank.get(one.weight, "normal")) for one in classes])


def _checked(classes: Sequence[Traffic]) -> tuple[Traffic, ...]:
    if not 1 <= len(classes) <= CLASSES_MAX:
        raise UsageError(f"a run has 1 to {CLASSES_MAX} classes, not {len(classes)}")
    names = [one.name for one in classes]
    if "" in names or len(set(names)) != len(names):
        raise UsageError("each class has a name of its own")
    if sum(one.threads for one in classes) > THREADS_MAX:
        raise UsageError(f"all classes together have at most {THREADS_MAX} threads")
    return tuple(classes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassResult:
    """What one class did in one point: operations in all, within the SLO, past the deadline."""

    traffic: Traffic
    block_bytes: int
    batch: int
    wall_s: float
    latencies: LatencyRecorder
    within_slo: int
    missed: int

    @property
    def operations(self) -> int:
        """Those that ended in time."""
        return self.latencies.operations - self.missed

    @property
    def transferred_bytes(self) -> int:
        return self.operations * self.block_bytes * self.batch

    @property
    def throughput(self) -> float:
        """GB/s."""
        return self.transferred_bytes / self.wall_s / 1e9 if self.wall_s else 0.0

    @property
    def slo_attainment(self) -> float:
        """The part of all operations that was as quick as asked; 1 when nothing was asked."""
        if not self.traffic.slo_us:
            return 1.0
        return self.within_slo / self.latencies.operations if self.latencies.operations else 0.0

    @property
    def isolation_leakage(self) -> float:
        """The part of what it reached alone that it lost to the others; 0 when that is not known."""
        alone = self.traffic.isolated_gb_s
        return max(0.0, 1.0 - self.throughput / alone) if alone else 0.0


@dataclass(frozen=True, slots=True)
class Summary:
    """One point over all classes; bandwidths in GB/s."""

    throughput: float
    weighted_goodput: float
    jain_fairness: float
    max_isolation_leakage: float
    total_utilization: float


def summarize(results: Sequence[ClassResult], capacity_gb_s: float) -> Summary:
    """Over all classes: see docs/bench.md for what each figure means."""
    total = sum(one.throughput for one in results)
    weights = sum(one.traffic.weight for one in results)
    good = sum(one.traffic.weight * one.throughput * one.slo_attainment for one in results)
    shares = [one.throughput / one.traffic.weight for one in results]
    squares = sum(share * share for share in shares)
    return Summary(
        throughput=total,
        weighted_goodput=good / weights if weights else 0.0,
        jain_fairness=sum(shares) ** 2 / (len(shares) * squares) if squares else 0.0,
        max_isolation_leakage=max((one.isolation_leakage for one in results), default=0.0),
        total_utilization=total / capacity_gb_s if capacity_gb_s else 0.0,
    )
