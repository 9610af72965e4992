"""Where a prompt should be prefilled: the costs of all candidates of the affinity policy in one pass.

Rows of arrays over all n instances (float64[rows, n], C-contiguous), as the scheduler keeps them:

    load    QUEUED_S QUEUED_TOKENS BATCH WAITING CONTEXT RESERVED SLOW_STEPS STEP_S REQUEST_S CONTEXT_S
            HEAD_SINCE HEAD_S
    speed   CONSTANT LINEAR QUADRATIC (seconds of prefill, by token and by squared token)
    links   SENDER_FREE RECEIVER_FREE RATE (bytes a second)

Source of the terms: docs/conductor/scheduler.md; `moonpool.conductor.affinity` explains each.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from moonpool.kernels._jit import jit

F64: TypeAlias = NDArray[np.float64]
I32: TypeAlias = NDArray[np.int32]
I64: TypeAlias = NDArray[np.int64]

LOAD_ROWS: Final = 12
(QUEUED_S, QUEUED_TOKENS, BATCH, WAITING, CONTEXT, RESERVED, SLOW_STEPS) = range(7)
(STEP_S, REQUEST_S, CONTEXT_S, HEAD_SINCE, HEAD_S) = range(7, 12)
SPEED_ROWS: Final = 3
CONSTANT, LINEAR, QUADRATIC = range(3)
LINK_ROWS: Final = 3
SENDER_FREE, RECEIVER_FREE, RATE = range(3)

#: Rows of what `affinity_costs` writes, float64[COST_ROWS, p].
COST_ROWS: Final = 4
COST, QUEUE, WORK, FETCH = range(4)

_SECONDS_MIN: Final = 1.0e-6
#: The share of its intervals by which a request's promise is judged.
_TAIL: Final = 0.1


class Rules(NamedTuple):
    """What does not change from prompt to prompt: the policy's weights and the promises."""

    block_tokens: float
    token_bytes: float
    latency_s: float
    tbt_limit_s: float
    output_tokens: float
    slack: float
    slack_max_s: float
    balance: float
    displaced: float
    step_penalty_s: float
    step_margin: float
    broken_promise_s: float
    fetch: bool
    mixed: bool


class Standing(NamedTuple):
    """How the instances stand: the rows above, past work float64[n], candidates int64[p], chunks float64[p].

    A chunk is the tokens that share a step with a decode batch; 0 where that never happens.
    """

    load: F64
    speed: F64
    links: F64
    past: F64
    candidates: I64
    chunks: F64


@jit
def _prefill(s: Standing, i: int, j: int, tokens: float, cached: float, step_s: float) -> float:
    """Seconds of prefill on candidate j, which is instance i, with the decode steps that run between."""
    squares = tokens * tokens - cached * cached
    seconds: float = (
        s.speed[CONSTANT, i] + s.speed[LINEAR, i] * (tokens - cached) + s.speed[QUADRATIC, i] * squares
    )
    seconds = max(seconds, _SECONDS_MIN)
    chunk = s.chunks[j]
    if chunk > 0.0 and s.load[BATCH, i] > 0.0:
        seconds += math.ceil((tokens - cached) / max(chunk, 1.0)) * step_s
    return seconds


@jit
def _slow_steps(s: Standing, i: int, j: int, tokens: float, cached: float, room_s: float) -> float:
    """Steps of the prompt on candidate j that would be slower than promised."""
    if s.chunks[j] <= 0.0:
        return 0.0
    chunk = min(s.chunks[j], tokens)
    room = room_s - s.speed[LINEAR, i] * chunk
    # A chunk that begins at x tokens takes about chunk * (linear + 2 * quadratic * x).
    first = max(room / max(2.0 * s.speed[QUADRATIC, i] * chunk, 1e-300), cached)
    steps: float = max(tokens - first, 0.0) / max(chunk, 1.0)
    return steps


@jit
def _burden(s: Standing, r: Rules, i: int, j: int, tokens: float, cached: float, step_s: float) -> float:
    """What the prompt costs those that decode on candidate j, in seconds."""
    judged = _TAIL * r.output_tokens
    slow = min(_slow_steps(s, i, j, tokens, cached, r.tbt_limit_s - step_s) / judged, 1.0)
    others = s.load[BATCH, i] + s.load[WAITING, i]
    broken = slow * others + min(s.load[SLOW_STEPS, i] / judged, 1.0)
    step = s.load[STEP_S, i] + s.load[REQUEST_S, i] * (s.load[BATCH, i] + 1.0)
    step += s.load[CONTEXT_S, i] * (s.load[CONTEXT, i] + tokens)
    # Requests that wait for their prefill will join the same batch.
    step *= 1.0 + s.load[WAITING, i] / (s.load[BATCH, i] + 1.0)
    excess = max(step / r.tbt_limit_s - r.step_margin, 0.0)
    burden: float = r.step_penalty_s * excess / max(1.0 - r.step_margin, 0.05) + r.broken_promise_s * broken
    return burden


@jit
def _near_equals(s: Standing, r: Rules, out: F64, ties: I64) -> int:
    """Candidates of the least cost; among near equals those of the least past work. How many, in `ties`."""
    candidates = s.candidates
    p = len(candidates)
    low = out[COST, 0]
    for j in range(1, p):
        low = min(low, out[COST, j])
    edge = low + min(low * r.slack, r.slack_max_s)
    count = 0
    least_past = math.inf
    best = 0
    for j in range(p):
        if out[COST, j] < out[COST, best]:
            best = j
        if out[COST, j] <= edge:
            count += 1
            least_past = min(least_past, s.past[candidates[j]])
    if count == 1:
        ties[0] = best
        return 1
    count = 0
    for j in range(p):
        if out[COST, j] <= edge and s.past[candidates[j]] <= least_past + 1e-9 * abs(least_past):
            ties[count] = j
            count += 1
    return count


@jit
def affinity_costs(
    held: I32, s: Standing, r: Rules, prompt: tuple[float, float], room: tuple[F64, I64]
) -> tuple[int, int, int]:
    """Costs of placing a prompt on each candidate.

    `held` is int32[n]: leading blocks that each instance has. `prompt` is (tokens, now). Writes `room[0]`,
    float64[COST_ROWS, p], and into `room[1]`, int64[p], the positions that are equally good. Returns how many
    those are, the instance with the longest match, and how many blocks every candidate has.
    """
    tokens, now = prompt
    out, ties = room
    source = 0
    for i in range(1, len(held)):
        if held[i] > held[source]:
            source = i
    best = held[source]
    fewest = best
    lowest_past = math.inf
    for i in s.candidates:
        fewest = min(fewest, held[i])
        lowest_past = min(lowest_past, s.past[i])
    may_fetch = r.fetch and best > fewest
    sent = max(now, s.links[SENDER_FREE, source])
    for j in range(len(s.candidates)):
        i = s.candidates[j]
        queue = s.load[QUEUED_S, i] - min(now - s.load[HEAD_SINCE, i], s.load[HEAD_S, i])
        step_s = (
            s.load[STEP_S, i]
            + s.load[REQUEST_S, i] * s.load[BATCH, i]
            + s.load[CONTEXT_S, i] * s.load[CONTEXT, i]
        )
        cached = min(held[i] * r.block_tokens, tokens - 1.0)
        work = _prefill(s, i, j, tokens, cached, step_s)
        cost = queue + work
        fetch = 0.0
        if may_fetch and best > held[i]:
            deeper = min(best * r.block_tokens, tokens - 1.0)
            fetched = _prefill(s, i, j, tokens, deeper, step_s)
            size = (best - held[i]) * (r.block_tokens * r.token_bytes)
            rate = min(s.links[RATE, i], s.links[RATE, source])
            arrival = max(s.links[RECEIVER_FREE, i], sent) - now + size / rate + r.latency_s
            # The transfer runs while the request queues, and layer by layer beside its own prefill.
            pulled = max(queue + fetched, arrival)
            displaced = r.displaced * (work - fetched)
            if pulled + displaced < cost:
                fetch, cached, cost = 1.0, deeper, pulled + displaced
        cost += r.balance * (s.past[i] - lowest_past)
        if r.mixed:
            cost += _burden(s, r, i, j, tokens, cached, step_s)
        out[COST, j], out[QUEUE, j], out[WORK, j], out[FETCH, j] = cost, queue, work, fetch
    return _near_equals(s, r, out, ties), source, fewest
