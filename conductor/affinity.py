"""Moonpool's own policy: affinity that is bounded by work.

A cached prefix draws a request to its holder only while the prefill seconds it saves exceed the extra queue
there: both are times, so there is no threshold to tune, and a prefix that everybody holds draws nobody.
Each candidate may also fetch the longest match from its holder when that is quicker than computing it; the
transfer overlaps the queue, and is booked on both ends' links. What a choice costs others is added to the
request's own time to its first token:

- *balance*: a small share of the work that an instance was given in the last minutes beyond the least. It
  keeps long prompts apart: they make the longest queues, and the slow token intervals of whoever decodes
  beside them.
- *displaced*: a fetched copy takes the room of other blocks.
- *step*: where prefill and decode share an instance, a batch that nears the promised token interval.
- *broken promises*: where they share one, the token intervals that a long prompt's slow steps would spoil.

Among near equals (a fetched prefix is nearly as good as a local one) the least past work decides. The study
`moonpool.bench.scheduler_study` shows what each term is worth; a price on work by utilisation was tried, and
brought nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from moonpool.conductor.cost import check_positive
from moonpool.conductor.interference import interference
from moonpool.conductor.policy import Placement, Stateless
from moonpool.conductor.view import View

F64 = NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AffinityWeights:
    """How much others count.

    Candidates within a share `slack` of the least cost, at most `slack_max_s`, are near equals. A fetched
    copy displaces as many blocks of unknown future: `displaced` is their worth, as a share of what
    computing the fetched ones costs. `step_penalty_s` is reached when a step takes as long as promised,
    from 0 at `step_margin` of it; `broken_promise_s` counts for each request whose token intervals would be
    spoiled. `fetch` False uses only what an instance holds itself.
    """

    slack: float = 0.03
    slack_max_s: float = 0.02
    balance: float = 0.03
    displaced: float = 0.1
    step_penalty_s: float = 1.0
    step_margin: float = 0.8
    broken_promise_s: float = 0.5
    fetch: bool = True

    def __post_init__(self) -> None:
        check_positive(
            self, zero=("slack", "slack_max_s", "balance", "displaced", "step_penalty_s", "broken_promise_s")
        )


@final
class WorkBoundedAffinity(Stateless):
    """The least own time plus what the choice costs others."""

    name: Final = "affinity"

    def __init__(self, weights: AffinityWeights | None = None) -> None:
        self._weights: Final = weights or AffinityWeights()

    def choose(self, view: View) -> Placement:
        weights = self._weights
        work = view.local_prefill_s
        own = view.queue_s + work
        extra = None
        fetch = None
        if weights.fetch and view.best_blocks > view.least_blocks:
            missing = view.best_blocks - view.local
            fetched = view.prefill_seconds(view.best_blocks)
            arrival = view.fetch_seconds(view.best, np.maximum(missing, 0))
            # The transfer runs while the request queues, and layer by layer beside its own prefill.
            pulled = np.maximum(view.queue_s + fetched, arrival)
            displaced = weights.displaced * (work - fetched)
            fetch = (missing > 0) & (pulled + displaced < own)
            own = np.where(fetch, pulled, own)
            extra = np.where(fetch, displaced, 0.0)
        load = view.beliefs.load
        past = load.past_work(view.now)[load.prefills]
        cost = own + weights.balance * (past - past.min())
        if extra is not None:
            cost += extra
        if view.beliefs.mixed:
            depth = view.local if fetch is None else np.where(fetch, view.best_blocks, view.local)
            broken = interference(view, view.cached_tokens(depth))
            cost = cost + self._step_cost(view) + weights.broken_promise_s * broken
        at = self._least(view, cost, past)
        if fetch is None or not fetch[at]:
            return Placement(at, cost=cost)
        return Placement(at, source=view.best, fetch_blocks=view.best_blocks, cost=cost)

    def _least(self, view: View, cost: F64, past: F64) -> int:
        """The least cost; among near equals the one with the least past work, then any."""
        low = float(cost.min())
        equals = cost <= low + min(low * self._weights.slack, self._weights.slack_max_s)
        if np.count_nonzero(equals) == 1:
            return int(cost.argmin())
        return view.least(np.where(equals, past, np.inf))

    def _step_cost(self, view: View) -> F64:
        """Grows from the margin on as the instance's decode step with this request nears the promised one."""
        load, weights = view.beliefs.load, self._weights
        steps = load.step_seconds(1.0, float(view.tokens))[load.prefills]
        # Requests that wait for their prefill will join the same batch.
        steps = steps * (1.0 + load.waiting[load.prefills] / (load.batch[load.prefills] + 1.0))
        excess = np.maximum(steps / view.beliefs.config.tbt_limit_s - weights.step_margin, 0.0)
        return weights.step_penalty_s * excess / max(1.0 - weights.step_margin, 0.05)
