"""Copies of hot prefixes, asked for when they are expected to save more than they cost.

For each prefix that requests end their match on, the rate of its requests is estimated (a count that fades
by e in `memory_s`). A copy to an instance without it saves, for every request that the copy will serve
while it stays cached, the prefill seconds of the prefix. It costs the time that it takes both links, and
the room that it takes from what would be evicted, priced as the prefill seconds of as many average blocks.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final, final

import numpy as np

from moonpool.conductor.request import CopyRequest
from moonpool.conductor.view import View

#: A copy must be expected to save this many times its cost: estimates are noisy, and links are shared.
_GAIN_MIN: Final = 2.0
#: Under this rate estimate nothing is hot, however cheap the copy.
_REQUESTS_MIN: Final = 3.0


@final
class HotPrefixes:
    """Demand for prefixes, bounded to `prefixes_max`; the least recently asked for are forgotten."""

    def __init__(self, *, prefixes_max: int, memory_s: float) -> None:
        self._prefixes_max: Final = prefixes_max
        self._memory_s: Final = memory_s
        self._demand: OrderedDict[int, tuple[float, float]] = OrderedDict()

    def note(self, prefix: int, now: float) -> float:
        """Counts a request for the prefix; how many came lately, this one among them."""
        count, last = self._demand.pop(prefix, (0.0, now))
        count = count * math.exp((last - now) / self._memory_s) + 1.0
        self._demand[prefix] = (count, now)
        if len(self._demand) > self._prefixes_max:
            self._demand.popitem(last=False)
        return count

    def __len__(self) -> int:
        return len(self._demand)

    def propose(self, view: View, chosen: int) -> CopyRequest | None:
        """A copy worth making now that a request was placed on instance `chosen`, or None.

        The target is the instance without the prefix that has the least queue, so that the next request for
        it finds a quick holder. Only the part of the match that not every instance holds counts: what all
        hold carries no information about where to go.
        """
        depth = view.best_blocks
        if depth <= view.least_blocks:
            return None
        count = self.note(int(view.prompt.hashes[depth - 1]) ^ view.prompt.space, view.now)
        if count < _REQUESTS_MIN:
            return None
        load = view.beliefs.load
        lacking = (view.local < depth) & (load.prefills != chosen)
        if not lacking.any():
            return None
        waits = np.where(lacking, view.queue_s, np.inf)
        at = view.least(waits)
        holders = int((view.local >= depth).sum())
        # Demand spreads over all holders, so the copy's share of future requests is one in (holders + 1).
        served = count / (holders + 1)
        saved_each = view.prefill_at(at, int(view.local[at])) - view.prefill_at(at, depth)
        config = view.beliefs.config
        size = (depth - int(view.local[at])) * config.block_tokens * config.token_bytes
        target = int(load.prefills[at])
        copy_s = view.beliefs.links.arrival_at(view.best, target, size, view.now)
        # A block of unknown future is worth what it would save if one in ten were asked for again.
        room_s = 0.1 * saved_each
        saving = served * saved_each
        if saving < _GAIN_MIN * (copy_s + room_s):
            return None
        hashes = tuple(int(block) for block in view.prompt.hashes[:depth])
        return CopyRequest(view.best, target, hashes, saving)
