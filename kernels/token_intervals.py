"""How long a simulated request waited between its tokens."""

from __future__ import annotations

from typing import Final

import numpy as np

from moonpool.kernels._jit import jit
from moonpool.kernels.cluster_state import FINISHED, ClusterArrays

_TAIL_SHARE: Final = 10


@jit
def longest_intervals(a: ClusterArrays, i: int, r: int) -> float:
    """The mean of the longest tenth of a request's token intervals, in seconds (FAST'25 section 5.1).

    Stretches of equal batches count in the order of their longest step, which is the last one.
    """
    me, request = a.instances[i], a.requests[r]
    width = a.segment_step.shape[1]
    last = me.segments - 1
    while a.segment_step[i, last % width] >= request.finish_step:
        last -= 1
    first = last
    while first > max(0, me.segments - width) and a.segment_step[i, first % width] > request.join_step:
        first -= 1
    number = last + 1 - first
    longest = np.empty(number, np.float64)
    count = np.empty(number, np.int64)
    end = request.finish_step
    for k in range(number - 1, -1, -1):
        slot = (first + k) % width
        start = a.segment_step[i, slot]
        longest[k] = a.segment_s[i, slot] + a.segment_growth_s[i, slot] * (end - 1 - start)
        count[k] = end - max(start, request.join_step)
        end = start
    # The first interval also holds the way from the prefill instance.
    slot = first % width
    joined = a.segment_s[i, slot] + a.segment_growth_s[i, slot] * (
        request.join_step - a.segment_step[i, slot]
    )
    gap = request.gap_s + joined
    count[0] -= 1
    total = (request.output - 1 + _TAIL_SHARE - 1) // _TAIL_SHARE
    left = total
    added = False
    mean = 0.0
    for k in np.argsort(-longest):
        if not added and (gap >= longest[k] or count[k] == 0):
            mean += gap
            left -= 1
            added = True
        use = min(left, count[k])
        mean += use * (longest[k] - a.segment_growth_s[i, (first + k) % width] * (use - 1) / 2)
        left -= use
        if left <= 0:
            break
    return float(mean / total)


@jit
def measure_finished(a: ClusterArrays) -> None:
    """Fills `tbt` of every request that the notices call finished; call it before the cluster goes on."""
    for k in range(a.cluster[0].notices):
        r = a.notices[k].request
        if a.notices[k].state == FINISHED and a.requests[r].output > 1:
            a.requests[r].tbt = longest_intervals(a, a.requests[r].decode, r)
