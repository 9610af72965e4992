"""Moonpool's own policy: affinity that is bounded by work.

A cached prefix draws a request to its holder only while the prefill seconds it saves exceed the extra queue
there: both are times, so there is no threshold to tune, and a prefix that everybody holds draws nobody. Three
terms are added to the request's own time to its first token:

- *price*: each second of prefill work delays those who come after; the busier the instances, the more. In a
  queue of utilisation u a second of work costs the others about u / (1 - u) seconds (M/G/1, processor time as
  the scarce good), so work is priced at that, up to a bound.
- *balance*: work given in the last minutes, so that idle instances are filled evenly; since a fetched prefix
  is nearly as good as a local one, it mostly decides between equals.
- *step*: where prefill and decode share an instance, a batch that would break the promised token interval.

Each candidate may also fetch the longest match from its holder when that is quicker than computing it; the
transfer overlaps the queue, and is booked on both ends' links.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from moonpool.conductor.cost import check_positive
from moonpool.conductor.policy import Placement, Stateless
from moonpool.conductor.view import View

F64 = NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AffinityWeights:
    """How much others count. `fetch` False uses only what an instance holds itself."""

    price_max: float = 3.0
    balance: float = 0.05
    step_penalty_s: float = 1.0
    step_margin: float = 0.8
    fetch: bool = True

    def __post_init__(self) -> None:
        check_positive(self, zero=("price_max", "balance", "step_penalty_s"))


@final
class WorkBoundedAffinity(Stateless):
    """The least own time plus what the choice costs others."""

    name: Final = "affinity"

    def __init__(self, weights: AffinityWeights | None = None) -> None:
        self._weights: Final = weights or AffinityWeights()

    def choose(self, view: View) -> Placement:
        weights, load = self._weights, view.beliefs.load
        work = view.local_prefill_s
        own = view.queue_s + work
        fetch = None
        if weights.fetch and view.best_blocks > 0:
            missing = view.best_blocks - view.local
            fetched = view.prefill_seconds(view.best_blocks)
            arrival = view.fetch_seconds(view.best, np.maximum(missing, 0))
            # The transfer runs while the request queues, and layer by layer beside its own prefill.
            pulled = np.maximum(view.queue_s + fetched, arrival)
            fetch = (missing > 0) & (pulled < own)
            own = np.where(fetch, pulled, own)
            work = np.where(fetch, fetched, work)
        utilisation = min(load.utilisation(view.now), 0.99)
        price = min(utilisation / (1.0 - utilisation), weights.price_max)
        past = load.past_work(view.now)[load.prefills]
        cost = own + price * work + weights.balance * (past - past.min())
        if view.beliefs.mixed:
            cost = cost + self._step_cost(view)
        at = view.least(cost)
        if fetch is None or not fetch[at]:
            return Placement(at, cost=cost)
        return Placement(at, source=view.best, fetch_blocks=view.best_blocks, cost=cost)

    def _step_cost(self, view: View) -> F64:
        """Grows from the margin on as the instance's decode step with this request nears the promised one."""
        load, weights = view.beliefs.load, self._weights
        limit = view.beliefs.config.tbt_limit_s
        waiting = load.waiting[load.prefills]
        mean_context = view.tokens
        steps = load.step_seconds(1.0, float(mean_context))[load.prefills]
        # Requests that wait for their prefill will join the same batch.
        steps = steps * (1.0 + waiting / np.maximum(load.batch[load.prefills] + 1.0, 1.0))
        excess = np.maximum(steps / limit - weights.step_margin, 0.0)
        return weights.step_penalty_s * excess / max(1.0 - weights.step_margin, 0.05)
