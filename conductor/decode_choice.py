"""Which instance decodes: `load_score = batch + k * waiting`, among those with memory for the request.

The way of the blocks from the prefill instance counts too: what arrives later than the prefill ends is added,
in units of the decode step that it delays.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moonpool.conductor.request import NOBODY
from moonpool.conductor.view import View

F64 = NDArray[np.float64]


class DecodeChoice(NamedTuple):
    """The chosen instance (NOBODY: none has room) and the score of each; inf where it has no room."""

    at: int
    scores: F64


def choose_decode(view: View, prefill: int, prefill_ends_s: float) -> DecodeChoice:
    """The decode instance for a prompt that instance `prefill` ends in `prefill_ends_s` seconds."""
    beliefs = view.beliefs
    load, config = beliefs.load, beliefs.config
    need = view.tokens + (view.prompt.output_tokens or config.expected_output_tokens)
    at = load.decodes
    scores = load.batch[at] + config.waiting_weight * load.waiting[at]
    room = load.reserved[at] + need <= load.kv_tokens_max[at]
    room &= load.batch[at] + load.waiting[at] < load.batch_max[at]
    if beliefs.aggregated:
        chosen = int(np.searchsorted(at, prefill))
        scores = np.where(np.arange(len(at)) == chosen, scores, np.inf)
        # An aggregated instance holds the request back by itself until there is room; only what can never
        # fit is refused.
        fits = need <= load.kv_tokens_max[prefill]
        return DecodeChoice(prefill if fits else NOBODY, scores)
    if not room.all():
        scores[~room] = np.inf
        if not room.any():
            return DecodeChoice(NOBODY, scores)
    size = view.tokens * config.token_bytes
    if beliefs.links.latest_arrival(prefill, size, view.now) > prefill_ends_s:
        arrival = beliefs.links.arrival_seconds(prefill, at, np.full(len(at), size), view.now)
        scores += np.maximum(arrival - prefill_ends_s, 0.0) / load.step_seconds()[at]
    return DecodeChoice(int(at[view.least(scores)]), scores)
