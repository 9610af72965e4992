"""Long prompts beside decode batches: steps of an aggregated instance that break the promised token interval.

A chunk of a long prompt attends to all of the prompt before it, so late chunks take long, and every request
that is being decoded on that instance waits for each of them. A request keeps its promise on the mean of
its longest tenth of intervals; so a prompt whose slow steps are as many as a tenth of a mean answer spoils
the whole batch.
"""

from __future__ import annotations

from moonpool.conductor.view import View


def slow_steps_at(view: View, at: int, cached: float) -> float:
    """Steps of this prompt slower than promised on the candidate at position `at`, `cached` tokens there."""
    beliefs = view.beliefs
    chunk = min(float(beliefs.shared_chunk[at]), float(view.tokens))
    if not chunk:
        return 0.0
    position = int(beliefs.load.prefills[at])
    linear, quadratic = beliefs.predictor.slope(position)
    room = beliefs.config.tbt_limit_s - beliefs.load.step_at(position) - linear * chunk
    first = max(room / max(2.0 * quadratic * chunk, 1e-300), cached)
    return max(view.tokens - first, 0.0) / chunk
