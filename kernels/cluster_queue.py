"""How requests enter a modelled cluster."""

from __future__ import annotations

from moonpool.kernels._jit import jit
from moonpool.kernels.cluster_state import ClusterArrays


@jit
def enqueue_prefill(a: ClusterArrays, r: int, now: float) -> None:
    """Queues a request at its prefill instance."""
    me = a.instances[a.requests[r].prefill]
    width = a.prefill_queue.shape[1]
    if me.prefill_count == width:
        a.cluster[0].lost += 1
        return
    if me.now < now:
        me.now = now
    a.prefill_queue[a.requests[r].prefill, (me.prefill_head + me.prefill_count) % width] = r
    me.prefill_count += 1
