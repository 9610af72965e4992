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
from moonpool.conductor.policy import Placement, Stateless
from moonpool.conductor.view import Beliefs, View
from moonpool.kernels.placement import COST, COST_ROWS, FETCH, QUEUE, WORK, Rules, affinity_costs


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
        # Made for the first view's scheduler, and kept: a policy serves one scheduler.
        self._beliefs: Beliefs | None = None
        self._rules: Rules | None = None
        self._ties: NDArray[np.int64] = np.zeros(0, np.int64)

    def choose(self, view: View) -> Placement:
        beliefs, now = view.beliefs, view.now
        if beliefs is not self._beliefs or self._rules is None:
            self._beliefs, self._rules = beliefs, self._rules_of(beliefs)
            self._ties = np.zeros(len(beliefs.load.prefills), np.int64)
        beliefs.load.past_work(now)
        found = np.empty((COST_ROWS, len(self._ties)))
        held = np.ascontiguousarray(view.held[-1])
        prompt = (float(view.tokens), float(now))
        room = (found, self._ties)
        count, best, fewest = affinity_costs(held, beliefs.standing, self._rules, prompt, room)
        view.know(found[QUEUE], found[WORK], (best, fewest))
        tie = 0 if count == 1 else int(beliefs.random.random() * count)
        at = self._ties.item(tie)
        if found.item(FETCH, at):
            return Placement(at, source=best, fetch_blocks=view.best_blocks, cost=found[COST])
        return Placement(at, cost=found[COST])

    def _rules_of(self, beliefs: Beliefs) -> Rules:
        weights, config = self._weights, beliefs.config
        return Rules(
            block_tokens=float(config.block_tokens),
            token_bytes=float(config.token_bytes),
            latency_s=float(beliefs.links.latency_s),
            tbt_limit_s=float(config.tbt_limit_s),
            output_tokens=float(config.expected_output_tokens),
            slack=float(weights.slack),
            slack_max_s=float(weights.slack_max_s),
            balance=float(weights.balance),
            displaced=float(weights.displaced),
            step_penalty_s=float(weights.step_penalty_s),
            step_margin=float(weights.step_margin),
            broken_promise_s=float(weights.broken_promise_s),
            fetch=weights.fetch,
            mixed=beliefs.mixed,
        )
