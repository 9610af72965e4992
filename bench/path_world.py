"""A seeded world of rails: what a slice takes there, given rates that change, jitter, congestion and death.

Each rail serves one slice after another. Its rate is a row of steps, jitter among them; a slice served over a
step takes its parts at each rate, so that how finely a policy cuts changes nothing of its luck. Whoever sends
is one thread that pays for each post, and learns of completions when it looks. Times are whole nanoseconds.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

NS_PER_S: Final = 1_000_000_000
#: The rate of a rail that does not answer at all.
DEAD: Final = 0.0
#: How long a rail's noise stays the same.
JITTER_NS: Final = 20_000


@dataclass(frozen=True, slots=True)
class RailPlan:
    """A rail as it really is: steps of (from ns, bytes a second), sorted, the first at 0; 0 means dead.

    `link_bytes_per_s` is what the policies are told.
    """

    link_bytes_per_s: int
    steps: tuple[tuple[int, float], ...]
    latency_ns: int = 5_000

    def rate_at(self, at_ns: float) -> float:
        """Bytes a second at a time."""
        return self.steps[bisect.bisect_right(self.steps, (at_ns, math.inf)) - 1][1]

    def jittery(self, dice: random.Random, spread: float, until_ns: int) -> RailPlan:
        """The same with noise: each JITTER_NS a new factor, whose logarithm has this standard deviation."""
        starts = [at for at, _rate in self.steps]
        moments = sorted({*starts, *range(0, max(until_ns, starts[-1] + 1), JITTER_NS)})
        mean = -spread * spread / 2
        steps = [(at, self.rate_at(at) * math.exp(dice.gauss(mean, spread))) for at in moments]
        return RailPlan(self.link_bytes_per_s, (*steps, (until_ns, self.rate_at(until_ns))), self.latency_ns)


@dataclass(frozen=True, slots=True)
class Sender:
    """What the sender and the rails pay for a slice, and how long until somebody knows of its end."""

    #: Of the sending thread, for a slice posted.
    post_ns: int = 150
    #: From a completion until the sleeping sender looks, on average.
    look_ns: int = 500
    #: From the death of a rail until its slices are known to have failed.
    detect_ns: int = 200_000
    #: Of the rail, besides service.
    slice_overhead_ns: int = 100


@dataclass(slots=True)
class Rail:
    """The state of one rail: when it is free, and how it was used."""

    plan: RailPlan
    overhead_ns: int
    detect_ns: int
    free_ns: int = 0
    busy_ns: int = 0
    carried_bytes: int = 0
    inflight: int = 0
    starts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.starts = [at for at, _rate in self.plan.steps]

    def post(self, now_ns: int, n_bytes: int) -> tuple[int, bool]:
        """When the slice's end is known, and whether it arrived."""
        begin = max(now_ns, self.free_ns)
        end, died_ns = self._served(begin, float(n_bytes))
        if died_ns is not None:
            known = max(died_ns, now_ns) + self.detect_ns
            # What is behind it fails at the same moment; who posts again finds the rail as it is then.
            self.free_ns = max(begin, died_ns)
            return known, False
        end += self.overhead_ns
        self.free_ns = end
        self.busy_ns += end - begin
        self.carried_bytes += n_bytes
        return end + self.plan.latency_ns, True

    def is_dead(self, now_ns: int) -> bool:
        """Whether it answers now."""
        return self.plan.rate_at(now_ns) == DEAD

    def _served(self, begin: int, work: float) -> tuple[int, int | None]:
        """When the service of `work` bytes ends, or since when the rail is dead."""
        index = bisect.bisect_right(self.starts, begin) - 1
        at = float(begin)
        while True:
            rate = self.plan.steps[index][1]
            if rate == DEAD:
                return 0, max(self.starts[index], 0)
            until = self.starts[index + 1] if index + 1 < len(self.starts) else math.inf
            needed = work / rate * NS_PER_S
            if at + needed <= until:
                return round(at + needed), None
            work -= (until - at) * rate / NS_PER_S
            at, index = float(until), index + 1


def fluid_makespan_ns(plans: Sequence[RailPlan], n_bytes: int) -> int:
    """The least time in which the rails could move the bytes, all of them cut as finely as one likes.

    A bound that nobody can beat: it knows the future, pays no overhead, and loses nothing when a rail dies.
    """
    moments = sorted({at for plan in plans for at, _rate in plan.steps})
    latency = min(plan.latency_ns for plan in plans)
    left, now = float(n_bytes), 0.0
    for index, at in enumerate(moments):
        rate = sum(plan.rate_at(at) for plan in plans)
        until = moments[index + 1] if index + 1 < len(moments) else math.inf
        if rate > 0 and left <= (until - at) * rate / NS_PER_S:
            return math.ceil(now + left / rate * NS_PER_S) + latency
        left -= (until - at) * rate / NS_PER_S
        now = float(until)
    raise ValueError("the rails never move so many bytes")
