"""Which instance decodes: `load_score = batch + k * waiting`, among those with memory for the request.

The way of the blocks from the prefill instance counts too: what arrives later than the prefill ends is added,
in units of the decode step that it delays.
"""

from __future__ import annotations

import numpy as np

from moonpool.conductor.request import NOBODY
from moonpool.conductor.view import View


def choose_decode(view: View, prefill: int, prefill_ends_s: float) -> int:
    """The decode instance for a prompt that instance `prefill` ends in `prefill_ends_s` seconds.

    NOBODY when none has room.
    """
    beliefs = view.beliefs
    load, config = beliefs.load, beliefs.config
    need = view.tokens + (view.prompt.output_tokens or config.expected_output_tokens)
    if beliefs.aggregated:
        # An aggregated instance holds the request back by itself until there is room; only what can never
        # fit is refused.
        return prefill if need <= load.kv_tokens_max.item(prefill) else NOBODY
    at = load.decodes
    scores = load.batch[at] + config.waiting_weight * load.waiting[at]
    room = load.reserved[at] + need <= load.kv_tokens_max[at]
    room &= load.batch[at] + load.waiting[at] < load.batch_max[at]
    if not room.all():
        scores[~room] = np.inf
        if not room.any():
            return NOBODY
    size = view.tokens * config.token_bytes
    if beliefs.links.latest_arrival(prefill, size, view.now) > prefill_ends_s:
        arrival = beliefs.links.arrival_seconds(prefill, at, np.full(len(at), size), view.now)
        scores += np.maximum(arrival - prefill_ends_s, 0.0) / load.step_seconds()[at]
    return int(at[view.least(scores)])
