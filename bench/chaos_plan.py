"""What a chaos run does to the processes of a pool, and when: a plan from a seed. Pure.

At most one process of a kind is down at a time, so that the pool can serve: another master stands by, other
nodes hold memory. Clients die and stop in the middle of whatever they are at.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final, final

#: What may happen to each kind of process, each as often as it stands here.
STRIKES: Final[dict[str, tuple[str, ...]]] = {
    "node": ("kill", "stop", "cut", "stall", "cut_lanes", "stall_lanes"),
    "master": ("kill", "stop", "cut", "stall"),
    "redis": ("kill", "stop", "cut", "stall"),
    "client": ("kill", "stop"),
}
#: In seconds: how long a process is stopped, away or unheard, at least and at most.
LASTS_S: Final[dict[str, tuple[float, float]]] = {
    "kill": (0.05, 1.5),
    "stop": (0.2, 5.0),
    "cut": (0.0, 0.0),
    "stall": (0.3, 4.0),
    "cut_lanes": (0.0, 0.0),
    "stall_lanes": (0.3, 2.0),
}
#: Redis that is away longer than the leader's lease (2 s) ends its term; mostly it is not.
REDIS_S_MAX: Final = 2.5
#: Quiet time at the beginning and before the end.
QUIET_S: Final = (1.0, 2.0)
EVENTS_PER_S: Final = 0.6


@final
@dataclass(frozen=True, slots=True, order=True)
class Strike:
    """At a time from the start, something happens to the `number`-th process of a kind, for a while."""

    at_s: float
    kind: str
    number: int
    what: str
    lasts_s: float


def make_plan(seed: int, seconds: float, counts: dict[str, int]) -> list[Strike]:
    """The strikes of a run, ascending; the same for the same seed. `counts`: processes of each kind."""
    chance = random.Random(seed)
    busy_until: dict[str, float] = dict.fromkeys(counts, 0.0)
    client_until = [0.0] * counts["client"]
    plan: list[Strike] = []
    events = max(len(STRIKES), int(seconds * EVENTS_PER_S))
    span = max(0.1, seconds - sum(QUIET_S))
    for index in range(events):
        at_s = QUIET_S[0] + span * (index + chance.random() * 0.9) / events
        free = [kind for kind in STRIKES if kind != "client" and busy_until[kind] <= at_s]
        idle = [number for number, until in enumerate(client_until) if until <= at_s]
        kind = chance.choice([*free, "client", "client"] if idle else free or ["node"])
        number = chance.choice(idle) if kind == "client" else chance.randrange(counts[kind])
        what = chance.choice(STRIKES[kind])
        low, high = LASTS_S[what]
        if kind == "redis":
            high = min(high, REDIS_S_MAX)
        lasts_s = min(chance.uniform(low, high), max(0.0, seconds - QUIET_S[1] - at_s))
        plan.append(Strike(at_s, kind, number, what, lasts_s))
        if kind == "client":
            client_until[number] = at_s + lasts_s + 0.2
        else:
            # Some time to come back before the next one of the kind is struck.
            busy_until[kind] = at_s + lasts_s + (1.0 if kind == "master" else 0.5)
    return sorted(plan)
