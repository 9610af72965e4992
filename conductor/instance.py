"""Engines that can receive requests, and how loaded the scheduler believes them to be."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from moonpool.conductor.cost import DecodeCost, PrefillCost, check_positive
from moonpool.errors import UsageError
from moonpool.kernels.placement import (
    BATCH,
    CONTEXT,
    CONTEXT_S,
    HEAD_S,
    HEAD_SINCE,
    LOAD_ROWS,
    QUEUED_S,
    QUEUED_TOKENS,
    REQUEST_S,
    RESERVED,
    SLOW_STEPS,
    STEP_S,
    WAITING,
)

F64 = NDArray[np.float64]
INSTANCES_MAX: Final = 65_536


class Role(IntFlag):
    """What an instance does."""

    PREFILL = 1
    DECODE = 2
    BOTH = 3


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSpec:
    """One engine: what it does, how fast, and what it has room for. Raises `UsageError` for wrong numbers.

    `chunk_tokens` is how much of a prompt one step takes (0: all of it). `kv_tokens_max` bounds prompts and
    answers that are decoded at once.
    """

    name: str
    role: Role
    prefill: PrefillCost
    decode: DecodeCost
    kv_tokens_max: int
    batch_max: int = 256
    chunk_tokens: int = 0
    link_bytes_per_s: float = 1.0e11

    def __post_init__(self) -> None:
        check_positive(self, zero=("chunk_tokens",))
        if not self.role & Role.BOTH:
            raise UsageError("an instance prefills, decodes or both", field="role", value=str(self.role))


@final
class FadingWork:
    """Seconds of work given to n instances; what was given fades by e in `memory_s`."""

    def __init__(self, instances: int, memory_s: float) -> None:
        self.memory_s: Final = memory_s
        #: float64[n], as of the last call; the array stays the same.
        self.seconds: Final[F64] = np.zeros(instances)
        self._at: float | None = None

    def at(self, now: float) -> F64:
        """float64[n]; borrowed until the next call."""
        if self._at is not None and now > self._at:
            self.seconds[:] *= math.exp((self._at - now) / self.memory_s)
            self._at = now
        return self.seconds

    def add(self, at: int, seconds: float, now: float) -> None:
        """Gives an instance work."""
        if self._at is None:
            self._at = now
        self.at(now)[at] += seconds


@final
class LoadTable:
    """What is booked on each instance, corrected by what they report. Arrays are float64[n], in list order.

    An instance's prefill queue is taken to be first come, first served: its length in seconds is what was
    booked, less the time that its head has been running, but never less than nothing for the head.
    """

    def __init__(self, instances: Sequence[InstanceSpec], *, balance_memory_s: float) -> None:
        if not 1 <= len(instances) <= INSTANCES_MAX:
            raise UsageError(f"a scheduler needs 1 to {INSTANCES_MAX} instances, not {len(instances)}")
        names = [instance.name for instance in instances]
        if len(set(names)) != len(names):
            raise UsageError("two instances have one name; names must differ")
        self.instances: Final = tuple(instances)
        roles = [instance.role for instance in instances]
        self.prefills: Final = np.flatnonzero([bool(role & Role.PREFILL) for role in roles])
        self.decodes: Final = np.flatnonzero([bool(role & Role.DECODE) for role in roles])
        if not len(self.prefills) or not len(self.decodes):
            raise UsageError("there must be an instance that prefills and one that decodes")
        n = len(instances)
        #: float64[LOAD_ROWS, n]: what the placement kernel reads; the arrays below are its rows.
        self.rows: Final[F64] = np.zeros((LOAD_ROWS, n))
        self.queued_s: Final[F64] = self.rows[QUEUED_S]
        self.queued_tokens: Final[F64] = self.rows[QUEUED_TOKENS]
        self.batch: Final[F64] = self.rows[BATCH]
        self.waiting: Final[F64] = self.rows[WAITING]
        self.context: Final[F64] = self.rows[CONTEXT]
        self.reserved: Final[F64] = self.rows[RESERVED]
        #: Prefill steps booked that will be slower than the promised token interval.
        self.slow_steps: Final[F64] = self.rows[SLOW_STEPS]
        self.kv_tokens_max: Final[F64] = np.array([float(each.kv_tokens_max) for each in instances])
        self.batch_max: Final[F64] = np.array([float(each.batch_max) for each in instances])
        self._step_s: Final[F64] = self.rows[STEP_S]
        self._request_s: Final[F64] = self.rows[REQUEST_S]
        self._context_s: Final[F64] = self.rows[CONTEXT_S]
        self._head_since: Final[F64] = self.rows[HEAD_SINCE]
        self._head_s: Final[F64] = self.rows[HEAD_S]
        for position, each in enumerate(instances):
            self._step_s[position] = each.decode.step_s
            self._request_s[position] = each.decode.request_s
            self._context_s[position] = each.decode.context_token_s
        self._queues: list[OrderedDict[Hashable, tuple[float, float]]] = [OrderedDict() for _ in range(n)]
        self.balance: Final = FadingWork(n, balance_memory_s)

    def queue_seconds(self, now: float) -> F64:
        """Prefill seconds ahead of a request that comes now."""
        elapsed = np.minimum(now - self._head_since, self._head_s)
        waits: F64 = self.queued_s - elapsed
        return waits

    def step_seconds(self, more_requests: float = 0.0, more_context: float = 0.0) -> F64:
        """How long a decode step takes on each instance with its batch and that much more."""
        steps: F64 = (
            self._step_s
            + self._request_s * (self.batch + more_requests)
            + self._context_s * (self.context + more_context)
        )
        return steps

    def step_at(self, at: int, more_requests: float = 0.0, more_context: float = 0.0) -> float:
        """As `step_seconds`, for one instance."""
        return (
            self._step_s.item(at)
            + self._request_s.item(at) * (self.batch.item(at) + more_requests)
            + self._context_s.item(at) * (self.context.item(at) + more_context)
        )

    def queue_at(self, at: int, now: float) -> float:
        """As `queue_seconds`, for one instance."""
        elapsed = min(now - self._head_since.item(at), self._head_s.item(at))
        return self.queued_s.item(at) - elapsed

    def past_work(self, now: float) -> F64:
        """float64[n]: prefill seconds given to each instance, remembered for `balance_memory_s`."""
        return self.balance.at(now)

    def queue_prefill(self, key: Hashable, at: int, seconds: float, tokens: float, now: float) -> None:
        """Books a prefill of `tokens` uncached tokens behind the others of instance `at`."""
        queue = self._queues[at]
        if not queue:
            self._head_since[at], self._head_s[at] = now, seconds
        queue[key] = (seconds, tokens)
        self.queued_s[at] += seconds
        self.queued_tokens[at] += tokens
        self.balance.add(at, seconds, now)

    def inherit_prefill(self, other: LoadTable, key: Hashable, places: tuple[int, int], now: float) -> None:
        """Books a prefill as it stands in another table: `places` are its positions there and here.

        Call it in the order of the other's queue, so that the head stays the head and keeps its start.
        """
        there, here = places
        seconds, tokens = other._queues[there][key]
        is_head = not self._queues[here]
        self.queue_prefill(key, here, seconds, tokens, now)
        if is_head and next(iter(other._queues[there])) == key:
            self._head_since[here] = other._head_since[there]

    def end_prefill(self, key: Hashable, at: int, now: float) -> float | None:
        """Takes a prefill off the queue; its service time if it was the head, else None."""
        queue = self._queues[at]
        was_head = next(iter(queue), None) == key
        seconds, tokens = queue.pop(key)
        service = now - float(self._head_since[at]) if was_head else None
        if queue:
            self.queued_s[at] -= seconds
            self.queued_tokens[at] -= tokens
            if was_head:
                self._head_since[at], self._head_s[at] = now, next(iter(queue.values()))[0]
        else:
            # Exactly zero, so that no rounding is left over from millions of bookings.
            self.queued_s[at] = self.queued_tokens[at] = self._head_s[at] = 0.0
        return service

    def check(self) -> None:
        """Asserts that the sums equal what is queued, and that nothing is negative."""
        for at, queue in enumerate(self._queues):
            booked = sum(seconds for seconds, _ in queue.values())
            assert abs(self.queued_s[at] - booked) <= 1e-6 * (1 + booked), (at, self.queued_s[at], booked)
        for name in ("batch", "waiting", "context", "reserved", "queued_tokens"):
            assert (getattr(self, name) > -1e-3).all(), (name, getattr(self, name))
