"""How long a simulated request waited between its tokens."""

from __future__ import annotations

from typing import Final

import numpy as np

from moonpool.kernels._jit import jit
from moonpool.kernels.cluster_state import FINISHED, ClusterArrays

_TAIL_SHARE: Final = 10


@jit
def longest_intervals(a: ClusterArrays, i: int, r: int) -> float:
    """The mean of the longest tenth of a request's token intervals, in seconds (FAST'25 section 5.1)."""
    me, request = a.instances[i], a.requests[r]
    width = a.segment_step.shape[1]
    last = me.segments - 1
    while a.segment_step[i, last % width] >= request.finish_step:
        last -= 1
    first = last
    while first > max(0, me.segments - width) and a.segment_step[i, first % width] > request.join_step:
        first -= 1
    number = last + 1 - first
    took = np.empty(number, np.float64)
    count = np.empty(number, np.int64)
    end = request.finish_step
    for k in range(number - 1, -1, -1):
        slot = (first + k) % width
        begin = max(a.segment_step[i, slot], request.join_step)
        took[k] = a.segment_s[i, slot]
        count[k] = end - begin
        end = begin
    left = (request.output - 1 + _TAIL_SHARE - 1) // _TAIL_SHARE
    total = left
    # The first interval also holds the way from the prefill instance.
    gap = request.gap_s + took[0]
    added = False
    mean = 0.0
    for k in np.argsort(-took):
        if not added and gap >= took[k]:
            mean += gap
            left -= 1
            added = True
        use = min(left, count[k] - (1 if k == 0 else 0))
        mean += use * took[k]
        left -= use
        if left <= 0:
            break
    return float(mean / max(total - max(left, 0), 1))


@jit
def measure_finished(a: ClusterArrays) -> None:
    """Fills `tbt` of every request that the notices call finished; call it before the cluster goes on."""
    for k in range(a.cluster[0].notices):
        r = a.notices[k].request
        if a.notices[k].state == FINISHED and a.requests[r].output > 1:
            a.requests[r].tbt = longest_intervals(a, a.requests[r].decode, r)
