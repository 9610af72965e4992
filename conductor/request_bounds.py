"""What no schedule can beat: each request alone, with all that was ever seen before it cached beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from moonpool.conductor.settings import ClusterSettings
from moonpool.conductor.simulation_result import prefill_seconds
from moonpool.conductor.trace import Trace


@final
@dataclass(frozen=True, slots=True)
class Bounds:
    """The clairvoyant bound: an unlimited pooled cache, no queue, no transfer, no decode beside."""

    reuse: float
    """Share of prompt tokens that were part of an earlier prompt."""
    ttft_mean_s: float
    ttft_p99_s: float


def bounds_of(trace: Trace, settings: ClusterSettings) -> Bounds:
    """The bounds of a trace on a machine. O(blocks).

    Requests of one time stamp count as one after the other, in the order of the trace.
    """
    seen: set[int] = set()
    cached = np.zeros(len(trace), np.int64)
    blocks, starts = trace.block_ids.tolist(), trace.starts.tolist()
    for number in range(len(trace)):
        chain = blocks[starts[number] : starts[number + 1]]
        depth = 0
        while depth < len(chain) and chain[depth] in seen:
            depth += 1
        cached[number] = depth
        seen.update(chain[depth:])
    saved = np.minimum(cached * settings.block_tokens, trace.tokens - 1)
    seconds = prefill_seconds(settings.prefill_cost, trace.tokens, saved)
    return Bounds(
        reuse=float(saved.sum()) / float(trace.tokens.sum()),
        ttft_mean_s=float(seconds.mean()),
        ttft_p99_s=float(np.quantile(seconds, 0.99)),
    )
