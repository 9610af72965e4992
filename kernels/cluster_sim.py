"""A modelled serving cluster: prefix caches, prefill queues, continuous batches and links, advanced in time.

The caller owns all arrays (`cluster_state.ClusterArrays`) and says up to which time the cluster may act. A
step that is under way at that time ends later, at its own time: nothing is seen before it happened.

Prefill instances take whole prompts or chunks from a queue, first come first served. Decode instances run one
step after another over their batch; a step takes `step_s + request_s * batch + context_s * context`, so a run
of steps with the same batch is an arithmetic series and is advanced at once. An aggregated instance does both
in one step. Source of the cost model: Mooncake (FAST'25) section 2.2 for prefill; decode is linear.

Caches are least recently used; a prompt's blocks are touched from its end to its start, so that the start of
a chain outlives its tail.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from moonpool.kernels._jit import jit
from moonpool.kernels.cluster_state import (
    ABSENT,
    DECODING,
    FINISHED,
    I32,
    JOINING,
    PREFILLING,
    REFUSED,
    ROLE_DECODE,
    ROLE_PREFILL,
    WAITING,
    ClusterArrays,
)

#: Within a stretch each step is a little longer than the one before; a new stretch keeps the record true.
_STRETCH_STEPS_MAX: Final = 64


@jit
def touch_block(i: int, block: int, newer: I32, older: I32) -> int:
    """Makes a block the newest of instance i; 1 when it was not cached before, else 0."""
    end = newer.shape[1] - 1
    added = 1
    if newer[i, block] != ABSENT:
        before, after = older[i, block], newer[i, block]
        newer[i, before] = after
        older[i, after] = before
        added = 0
    newest = older[i, end]
    newer[i, block] = end
    older[i, block] = newest
    newer[i, newest] = block
    older[i, end] = block
    return added


@jit
def evict_oldest(i: int, newer: I32, older: I32) -> None:
    """Forgets the least recently used block of instance i, which must hold one."""
    end = newer.shape[1] - 1
    block = newer[i, end]
    after = newer[i, block]
    newer[i, end] = after
    older[i, after] = end
    newer[i, block] = ABSENT


@jit
def store_chain(a: ClusterArrays, i: int, ids: I32) -> None:
    """Caches a chain of blocks on instance i, its start as the newest, and evicts what no longer fits."""
    me = a.instances[i]
    for k in range(ids.shape[0] - 1, -1, -1):
        me.cached += touch_block(i, ids[k], a.newer, a.older)
    room = me.cache_blocks - (me.output_blocks if me.shares_memory else 0)
    while me.cached > max(room, 0):
        evict_oldest(i, a.newer, a.older)
        me.cached -= 1


@jit
def book_link(a: ClusterArrays, source: int, target: int, start: float, size_bytes: float) -> float:
    """Sends bytes over both ends' NICs, after what each has booked before; the time when all have arrived."""
    sender, receiver = a.instances[source], a.instances[target]
    begin = max(start, sender.sender_free, receiver.receiver_free)
    end = begin + size_bytes / a.cluster[0].link_bytes_per_s
    sender.sender_free = end
    receiver.receiver_free = end
    return float(end + a.cluster[0].link_latency_s)


@jit
def notify(a: ClusterArrays, r: int, state: int, time: float) -> None:
    """Tells the caller of a request's new state."""
    notice = a.notices[a.cluster[0].notices]
    notice.request = r
    notice.state = state
    notice.time = time
    a.cluster[0].notices += 1


@jit
def start_prefill(a: ClusterArrays, i: int, r: int) -> None:
    """Looks the prompt up in the cache as it is now, and books the stream of its blocks to decode."""
    me, request, cluster = a.instances[i], a.requests[r], a.cluster[0]
    ids = a.block_ids[request.first_block : request.first_block + request.blocks]
    held = 0
    while held < ids.shape[0] and a.newer[i, ids[held]] != ABSENT:
        held += 1
    depth = max(held, request.fetch_blocks)
    request.cached_blocks = depth
    request.fetched_blocks = depth - held
    # The last token is always computed: its state is what the first output token is made from.
    request.done = min(depth * cluster.block_tokens, request.tokens - 1)
    request.started = me.now
    local = held * cluster.block_tokens * cluster.token_bytes / cluster.host_bytes_per_s
    request.load_end = max(me.now + local, request.fetch_end if depth > held else 0.0)
    request.state = PREFILLING
    if request.decode != i:
        size = request.tokens * cluster.token_bytes
        request.stream_end = book_link(a, i, request.decode, me.now, size)
    else:
        me.reserved += request.tokens + request.output
        me.output_blocks += -(-request.output // cluster.block_tokens)


@jit
def prefill_chunk(a: ClusterArrays, i: int) -> int:
    """How many prompt tokens instance i can prefill now: 0 when nothing waits or nothing fits."""
    me, cluster = a.instances[i], a.cluster[0]
    if me.prefill_count == 0:
        return 0
    r = a.prefill_queue[i, me.prefill_head]
    request = a.requests[r]
    if request.state == WAITING:
        if not cluster.layer_wise and request.fetch_end > me.now:
            return 0
        if request.decode == i and me.batch > 0:
            full = me.reserved + request.tokens + request.output > me.kv_tokens_max
            if full or me.batch >= me.batch_max:
                return 0
        start_prefill(a, i, r)
    left = request.tokens - request.done
    return int(left if me.chunk_tokens == 0 else min(left, me.chunk_tokens))


@jit
def insert_join(a: ClusterArrays, d: int, r: int) -> None:
    """Puts a prefilled request into the queue of its decode instance, by the time its blocks are there."""
    me = a.instances[d]
    if me.join_count == a.join_queue.shape[1]:
        a.cluster[0].lost += 1
        return
    k = me.join_count
    while k > 0 and a.requests[a.join_queue[d, k - 1]].ready > a.requests[r].ready:
        a.join_queue[d, k] = a.join_queue[d, k - 1]
        k -= 1
    a.join_queue[d, k] = r
    me.join_count += 1


@jit
def enter_batch(a: ClusterArrays, i: int, r: int) -> None:
    """Adds a request to the running batch; its first token exists already."""
    me, request = a.instances[i], a.requests[r]
    request.state = DECODING
    request.gap_s = me.now - request.first_token
    request.join_step = me.steps
    request.finish_step = me.steps + request.output - 1
    a.running[i, me.batch] = r
    me.batch += 1
    me.context += request.tokens + 1
    me.segment_batch = ABSENT


@jit
def end_prefill(a: ClusterArrays, i: int, r: int) -> None:
    """The first token: the prompt is cached, and the request goes on to its decode instance."""
    me, request = a.instances[i], a.requests[r]
    me.prefill_head = (me.prefill_head + 1) % a.prefill_queue.shape[1]
    me.prefill_count -= 1
    request.first_token = me.now
    store_chain(a, i, a.block_ids[request.first_block : request.first_block + request.blocks])
    request.state = JOINING
    notify(a, r, JOINING, me.now)
    if request.decode != i:
        request.ready = max(me.now + a.cluster[0].link_latency_s, request.stream_end)
        insert_join(a, request.decode, r)
    elif request.output > 1:
        enter_batch(a, i, r)
    else:
        release_memory(a, i, r)
        finish_request(a, r, me.now)


@jit
def release_memory(a: ClusterArrays, i: int, r: int) -> None:
    """Gives back the room that a request held on its decode instance."""
    me, request = a.instances[i], a.requests[r]
    me.reserved -= request.tokens + request.output
    if request.prefill == i:
        me.output_blocks -= -(-request.output // a.cluster[0].block_tokens)


@jit
def finish_request(a: ClusterArrays, r: int, time: float) -> None:
    """The last token."""
    request = a.requests[r]
    request.state = FINISHED
    request.finish = time
    notify(a, r, FINISHED, time)


@jit
def take_joins(a: ClusterArrays, i: int) -> None:
    """Admits prefilled requests whose blocks have arrived, while they fit; refuses what would be slow."""
    me, cluster = a.instances[i], a.cluster[0]
    while me.join_count > 0 and me.batch < me.batch_max:
        r = a.join_queue[i, 0]
        request = a.requests[r]
        if request.ready > me.now:
            return
        if me.batch > 0 and me.reserved + request.tokens + request.output > me.kv_tokens_max:
            return
        for k in range(1, me.join_count):
            a.join_queue[i, k - 1] = a.join_queue[i, k]
        me.join_count -= 1
        context = me.context + request.tokens
        if me.step_s + me.request_s * (me.batch + 1) + me.context_s * context > cluster.refuse_tbt_s:
            request.state = REFUSED
            notify(a, r, REFUSED, me.now)
        elif request.output <= 1:
            finish_request(a, r, me.now)
        else:
            me.reserved += request.tokens + request.output
            enter_batch(a, i, r)


@jit
def end_step(a: ClusterArrays, i: int) -> None:
    """What the steps in flight on instance i have brought, at their end."""
    me = a.instances[i]
    steps, chunk = me.in_flight, me.in_flight_chunk
    me.in_flight = 0
    me.in_flight_chunk = 0
    if me.batch > 0:
        me.steps += steps
        me.context += steps * me.batch
        me.decode_tokens += steps * me.batch
        k = 0
        while k < me.batch:
            r = a.running[i, k]
            if a.requests[r].finish_step > me.steps:
                k += 1
                continue
            me.batch -= 1
            a.running[i, k] = a.running[i, me.batch]
            me.context -= a.requests[r].tokens + a.requests[r].output
            me.segment_batch = ABSENT
            finish_request(a, r, me.now)
            release_memory(a, i, r)
    if chunk > 0:
        r = a.prefill_queue[i, me.prefill_head]
        a.requests[r].done += chunk
        if a.requests[r].done >= a.requests[r].tokens:
            end_prefill(a, i, r)


@jit
def record_steps(a: ClusterArrays, i: int, first_s: float, single: bool) -> None:
    """Notes how long the next step takes, unless it continues the last stretch."""
    me = a.instances[i]
    width = a.segment_step.shape[1]
    last = a.segment_step[i, (me.segments - 1) % width] if me.segments > 0 else 0
    if single or me.segment_batch != me.batch or me.steps - last >= _STRETCH_STEPS_MAX:
        a.segment_step[i, me.segments % width] = me.steps
        a.segment_s[i, me.segments % width] = first_s
        a.segment_growth_s[i, me.segments % width] = 0.0 if single else me.context_s * me.batch
        me.segments += 1
    me.segment_batch = ABSENT if single else me.batch


@jit
def steps_until(me: Any, until: float) -> int:
    """The least number of decode steps that end at `until` or later; at least 1."""
    first = me.step_s + me.request_s * me.batch + me.context_s * me.context
    growth = me.context_s * me.batch
    # A run ends with its first request at the latest: how long "never" is does not matter.
    span = min(until - me.now, 1e6)
    if growth * span < 1e-9 * first * first:
        return int(max(1, math.ceil(span / first)))
    half = first - growth / 2
    return int(max(1, math.ceil((math.sqrt(half * half + 2 * growth * span) - half) / growth)))


@jit
def decode_run(a: ClusterArrays, i: int, until: float) -> int:
    """How many steps the batch of instance i runs before anything else can happen to it."""
    me = a.instances[i]
    bound = until
    if me.join_count > 0 and a.requests[a.join_queue[i, 0]].ready > me.now:
        bound = min(bound, a.requests[a.join_queue[i, 0]].ready)
    if me.prefill_count > 0:
        fetch_end = a.requests[a.prefill_queue[i, me.prefill_head]].fetch_end
        if fetch_end > me.now:
            bound = min(bound, fetch_end)
    least = steps_until(me, bound)
    for k in range(me.batch):
        least = min(least, a.requests[a.running[i, k]].finish_step - me.steps)
    return int(max(least, 1))


@jit
def wake_time(a: ClusterArrays, i: int) -> float:
    """When an instance without a step in flight has something to do; infinity: nothing is queued."""
    me = a.instances[i]
    at = np.inf
    if me.join_count > 0:
        at = max(me.now, a.requests[a.join_queue[i, 0]].ready)
    if me.prefill_count > 0:
        r = a.prefill_queue[i, me.prefill_head]
        blocked = a.requests[r].fetch_end if not a.cluster[0].layer_wise else 0.0
        at = min(at, max(me.now, blocked))
    return float(at)


@jit
def start_step(a: ClusterArrays, i: int, until: float) -> bool:
    """Begins the next step or steps of instance i at its time; False when it has nothing to do."""
    me = a.instances[i]
    if me.role & ROLE_DECODE:
        take_joins(a, i)
    chunk = prefill_chunk(a, i) if me.role & ROLE_PREFILL else 0
    if chunk == 0 and me.batch == 0:
        return False
    first = me.step_s + me.request_s * me.batch + me.context_s * me.context if me.batch > 0 else 0.0
    steps = 1
    if chunk > 0:
        request = a.requests[a.prefill_queue[i, me.prefill_head]]
        done, after = request.done, request.done + chunk
        work = me.quadratic_s * (after * after - done * done) + me.linear_s * chunk
        took = first + work
        if after >= request.tokens:
            took = max(took, request.load_end - me.now)
        me.prefill_busy_s += work
    else:
        steps = decode_run(a, i, until)
        took = first * steps + me.context_s * me.batch * steps * (steps - 1) / 2
    if me.batch > 0:
        record_steps(a, i, took if chunk > 0 else first, chunk > 0)
        me.decode_busy_s += took
    me.in_flight = steps
    me.in_flight_chunk = chunk
    me.now += took
    return True


@jit
def advance_alone(a: ClusterArrays, i: int, until: float) -> None:
    """Runs one instance up to `until`; its steps in flight may end later."""
    me = a.instances[i]
    while me.in_flight == 0 or me.now <= until:
        if me.in_flight > 0:
            end_step(a, i)
        if not start_step(a, i, until):
            at = wake_time(a, i)
            if at > until or at <= me.now or at == np.inf:
                return
            me.now = at


@jit
def advance_cluster(a: ClusterArrays, until: float) -> None:
    """Runs all instances up to `until`, prefill first: it feeds decode, and never waits for it.

    Prefill instances share links, so they act in the order of time; the others only depend on what has
    arrived. Notices of one call are ordered by instance, not by time.
    """
    number = a.instances.shape[0]
    while True:
        chosen, earliest = -1, until
        for i in range(number):
            me = a.instances[i]
            if me.role != ROLE_PREFILL:
                continue
            at = me.now if me.in_flight > 0 else wake_time(a, i)
            if at < np.inf and at <= earliest and (chosen < 0 or at < earliest):
                chosen, earliest = i, at
        if chosen < 0:
            break
        if a.instances[chosen].in_flight > 0:
            end_step(a, chosen)
        else:
            a.instances[chosen].now = earliest
        start_step(a, chosen, until)
    for i in range(number):
        if a.instances[i].role != ROLE_PREFILL:
            advance_alone(a, i, until)
