"""The affinity policy and its terms in plain numpy: the oracle of the placement kernel."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moonpool.conductor.affinity import AffinityWeights
from moonpool.conductor.policy import Placement
from moonpool.conductor.view import View

F64 = NDArray[np.float64]
_TAIL = 0.1


def slow_steps(view: View, cached: F64) -> F64:
    """float64[p]: steps of this prompt slower than promised, with `cached` tokens there."""
    beliefs = view.beliefs
    load = beliefs.load
    chunk = np.minimum(beliefs.shared_chunk, float(view.tokens))
    linear, quadratic = beliefs.predictor.slopes(load.prefills)
    room = beliefs.config.tbt_limit_s - view.step_s - linear * chunk
    # A chunk that begins at x tokens takes about chunk * (linear + 2 * quadratic * x).
    first = np.maximum(room / np.maximum(2.0 * quadratic * chunk, 1e-300), cached)
    steps: F64 = np.maximum(view.tokens - first, 0.0) / np.maximum(chunk, 1.0)
    return steps * (beliefs.shared_chunk > 0)


def spoiled(view: View, steps: F64) -> F64:
    """float64[p]: the share of a mean answer's judged intervals that so many slow steps fill, at most 1."""
    return np.minimum(steps / (_TAIL * view.beliefs.config.expected_output_tokens), 1.0)


def interference(view: View, cached: F64) -> F64:
    """float64[p]: promises broken by placing the prompt: those of the batch there, and its own.

    Its own breaks when the instance has long prompts before it.
    """
    load = view.beliefs.load
    at = load.prefills
    others = load.batch[at] + load.waiting[at]
    return spoiled(view, slow_steps(view, cached)) * others + spoiled(view, load.slow_steps[at])


class PlainAffinity:
    """As `WorkBoundedAffinity`, array by array."""

    def __init__(self, weights: AffinityWeights) -> None:
        self._weights = weights

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
