"""How a prefill instance is chosen: the seam for policies, and those that the papers compare.

A policy is any object with a name and `choose`; register a factory with `register_policy` to make it
available by name. Policies keep no load of their own unless they say so: the scheduler books what they
choose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, final

import numpy as np
from numpy.typing import NDArray

from moonpool.conductor.request import NOBODY, Decision, Prompt
from moonpool.conductor.view import View
from moonpool.errors import UsageError

F64 = NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True)
class Placement:
    """A policy's choice: `at` is a position among the prefill instances, `source` one among all.

    `cost` is float64[p], lower is better; NaN where a policy has none.
    """

    at: int
    source: int = NOBODY
    fetch_blocks: int = 0
    cost: F64 | None = None


class Policy(Protocol):
    """Chooses where a prompt is prefilled, and which blocks come from elsewhere."""

    @property
    def name(self) -> str:
        """The name it is registered under."""

    def choose(self, view: View) -> Placement:
        """The choice for one prompt. Must not change what it sees."""

    def booked(self, prompt: Prompt, decision: Decision) -> None:
        """The request was accepted; for policies with state of their own."""

    def released(self, prompt: Prompt, decision: Decision) -> None:
        """The request has ended."""


class Stateless:
    """The two hooks of a policy that keeps nothing."""

    def booked(self, prompt: Prompt, decision: Decision) -> None:
        """Keeps nothing."""

    def released(self, prompt: Prompt, decision: Decision) -> None:
        """Keeps nothing."""


@final
class RandomChoice(Stateless):
    """Any instance with equal chance."""

    name: Final = "random"

    def choose(self, view: View) -> Placement:
        return Placement(int(view.beliefs.random.random() * len(view.local)))


@final
class RoundRobin(Stateless):
    """Each instance in turn."""

    name: Final = "round_robin"

    def __init__(self) -> None:
        self._next = 0

    def choose(self, view: View) -> Placement:
        at = self._next % len(view.local)
        self._next = at + 1
        return Placement(at)


@final
class LeastLoaded(Stateless):
    """The shortest queue in predicted seconds; among equal queues the smallest decode batch."""

    name: Final = "least_loaded"

    def choose(self, view: View) -> Placement:
        load = view.beliefs.load
        cost = view.queue_s
        if view.beliefs.mixed:
            # A step of the batch is what a prompt on an idle queue waits for and shares.
            present = load.batch[load.prefills] + load.waiting[load.prefills]
            cost = cost + view.step_s * (present > 0)
        return Placement(view.least(cost), cost=cost)


@final
class LocalCacheAware(Stateless):
    """The least predicted time to the first token with what each instance holds itself."""

    name: Final = "local"

    def choose(self, view: View) -> Placement:
        cost = view.queue_s + view.local_prefill_s
        return Placement(view.least(cost), cost=cost)


@final
class GlobalCacheAware(Stateless):
    """Algorithm 1 of FAST'25: as `local`, and an instance whose own match is poor counts on a transfer.

    Where the best match of all is more than `threshold` times the own one, the instance would fetch it. The
    ratio is infinite where an instance holds nothing and another something, and 1 where nobody does.
    """

    name: Final = "global"

    def __init__(self, threshold: float = 1.5) -> None:
        if threshold < 1:
            raise UsageError("the balancing threshold is 1 or more", field="threshold", value=str(threshold))
        self._threshold: Final = threshold

    def choose(self, view: View) -> Placement:
        fetch = view.best_blocks > self._threshold * view.local
        depth = np.where(fetch, view.best_blocks, view.local).astype(np.int32)
        cost = view.queue_s + view.prefill_seconds(depth)
        if fetch.any():
            cost = cost + np.where(fetch, view.fetch_seconds(view.best, depth - view.local), 0.0)
        at = view.least(cost)
        if not fetch[at]:
            return Placement(at, cost=cost)
        return Placement(at, source=view.best, fetch_blocks=view.best_blocks, cost=cost)


_factories: dict[str, Callable[[], Policy]] = {
    RandomChoice.name: RandomChoice,
    RoundRobin.name: RoundRobin,
    LeastLoaded.name: LeastLoaded,
    LocalCacheAware.name: LocalCacheAware,
    GlobalCacheAware.name: GlobalCacheAware,
}


def register_policy(name: str, factory: Callable[[], Policy]) -> None:
    """Makes a policy available by name; raises `UsageError` for a name that is taken."""
    if name in _factories:
        raise UsageError(f"a policy {name!r} exists already; choose another name", field="policy", value=name)
    _factories[name] = factory


def make_policy(name: str) -> Policy:
    """A fresh policy of that name; raises `UsageError` that lists the known ones."""
    from moonpool.conductor import affinity, block_cost

    builtin: dict[str, Callable[[], Policy]] = {
        affinity.WorkBoundedAffinity.name: affinity.WorkBoundedAffinity,
        block_cost.BlockCost.name: block_cost.BlockCost,
    }
    factory = _factories.get(name) or builtin.get(name)
    if factory is None:
        known = ", ".join(sorted(_factories | builtin))
        raise UsageError(f"there is no policy {name!r}; known are {known}", field="policy", value=name)
    return factory()


def policy_names() -> tuple[str, ...]:
    """All names that `make_policy` takes."""
    from moonpool.conductor import affinity, block_cost

    return tuple(sorted({*_factories, affinity.WorkBoundedAffinity.name, block_cost.BlockCost.name}))
