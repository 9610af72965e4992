"""Long prompts beside decode batches: steps of an aggregated instance that break the promised token interval.

A chunk of a long prompt attends to all of the prompt before it, so late chunks take long, and every request
that is being decoded on that instance waits for each of them. A request keeps its promise on the mean of
its longest tenth of intervals; so a prompt whose slow steps are as many as a tenth of a mean answer spoils
the whole batch.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from moonpool.conductor.view import View

F64 = NDArray[np.float64]
#: The share of its intervals by which a request's promise is judged.
_TAIL: Final = 0.1


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


def slow_steps_at(view: View, at: int, cached: float) -> float:
    """As `slow_steps`, for the candidate at position `at` alone."""
    beliefs = view.beliefs
    chunk = min(float(beliefs.shared_chunk[at]), float(view.tokens))
    if not chunk:
        return 0.0
    linear, quadratic = beliefs.predictor.slope(int(beliefs.load.prefills[at]))
    room = beliefs.config.tbt_limit_s - float(view.step_s[at]) - linear * chunk
    first = max(room / max(2.0 * quadratic * chunk, 1e-300), cached)
    return max(view.tokens - first, 0.0) / chunk


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
