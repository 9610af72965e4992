"""Policies that deal slices over rails, as the simulator of `path_run` asks them: ours and three others.

Each is told the same: links' speeds, transfers as they come, ends of slices. The others are written from
their published descriptions: round robin; the uniformly random choice with a walk over the rails at retries;
and weighted shares by bytes in flight over a bandwidth average, where left-over slices go to the best rail.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from moonpool.bench.path_world import NS_PER_S, RailPlan
from moonpool.native.paths.rails import Rails

KIB: Final = 1_024
SLICE_BYTES: Final = 65_536
#: Slices posted and not ended on a rail; the others wait in the policy.
POSTED_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a transfer on their way: `tries` counts the rails that failed it."""

    transfer: int
    n_bytes: int
    rail: int = -1
    tries: int = 0
    queued_ns: int = 0


class Policy(Protocol):
    """Decides; the simulator acts. Transfers are numbered as they come."""

    def submit(self, transfer: int, n_bytes: int, now_ns: int) -> None:
        """A transfer came."""
        ...

    def take(self, now_ns: int) -> Piece | None:
        """The next piece to post; None when nothing is to be posted before something ends."""
        ...

    def ended(self, piece: Piece, ok: bool, now_ns: int) -> None:
        """A posted piece ended; what failed must be sent again."""
        ...

    def probe(self, now_ns: int) -> int:
        """A rail to be probed now, or -1."""
        ...

    def probed(self, rail: int, ok: bool, now_ns: int) -> None:
        """How a probe ended."""
        ...


class LeastCompletion:
    """Ours: the native core of `moonpool.native.paths.rails` itself.

    Transfers that are under way at once take turns, as the threads of their callers do in an engine.
    """

    def __init__(self, plans: Sequence[RailPlan], seed: int) -> None:
        del seed  # it throws no dice
        self.rails = Rails()
        for plan in plans:
            self.rails.add(plan.link_bytes_per_s, plan.latency_ns, slots=POSTED_MAX)
        self._waiting: deque[Piece] = deque()
        self._backlog = 0

    def submit(self, transfer: int, n_bytes: int, now_ns: int) -> None:
        """Cut when a rail has room for it, not before."""
        self._waiting.append(Piece(transfer, n_bytes))
        self._backlog += n_bytes

    def take(self, now_ns: int) -> Piece | None:
        """As much of the transfer whose turn it is as a rail should take now."""
        if not self._waiting:
            return None
        first = self._waiting[0]
        rail, n_bytes = self.rails.next(first.n_bytes, self._backlog - first.n_bytes, now_ns)
        if rail < 0:
            return None
        self._backlog -= n_bytes
        self._waiting.popleft()
        if n_bytes < first.n_bytes:
            self._waiting.append(Piece(first.transfer, first.n_bytes - n_bytes, tries=first.tries))
        return Piece(first.transfer, n_bytes, rail, first.tries)

    def ended(self, piece: Piece, ok: bool, now_ns: int) -> None:
        """What failed goes first."""
        if ok:
            self.rails.done(piece.rail, piece.n_bytes, now_ns)
            return
        self.rails.failed(piece.rail, piece.n_bytes, now_ns)
        self._waiting.appendleft(Piece(piece.transfer, piece.n_bytes, tries=piece.tries + 1))
        self._backlog += piece.n_bytes

    def probe(self, now_ns: int) -> int:
        """A paused or demoted rail whose time has come."""
        return self.rails.idle_probe(now_ns)

    def probed(self, rail: int, ok: bool, now_ns: int) -> None:
        """Back in use, or paused for longer."""
        self.rails.probed(rail, ok, now_ns)


class Dealt:
    """What the three others share: a slice gets its rail when its transfer comes, and waits for it there."""

    def __init__(self, plans: Sequence[RailPlan], seed: int) -> None:
        self.n = len(plans)
        self.dice = random.Random(seed)
        self.queues: list[deque[Piece]] = [deque() for _ in plans]
        self.posted = [0] * self.n
        self._next = 0

    def submit(self, transfer: int, n_bytes: int, now_ns: int) -> None:
        """Slices of 64 KiB, the last one up to a quarter longer, dealt at once."""
        while n_bytes:
            size = n_bytes if n_bytes <= SLICE_BYTES * 5 // 4 else SLICE_BYTES
            self.put(Piece(transfer, size, queued_ns=now_ns), self.rail_for(size))
            n_bytes -= size

    def put(self, piece: Piece, rail: int) -> None:
        """Queue a piece at a rail."""
        self.queues[rail].append(Piece(piece.transfer, piece.n_bytes, rail, piece.tries, piece.queued_ns))

    def take(self, now_ns: int) -> Piece | None:
        """From the rails in turn, each up to what may be posted."""
        for _ in range(self.n):
            rail = self._next
            self._next = (rail + 1) % self.n
            if self.queues[rail] and self.posted[rail] < POSTED_MAX:
                self.posted[rail] += 1
                return self.queues[rail].popleft()
        return None

    def ended(self, piece: Piece, ok: bool, now_ns: int) -> None:
        """A failed slice walks on to the next rail."""
        self.posted[piece.rail] -= 1
        if not ok:
            again = Piece(piece.transfer, piece.n_bytes, piece.rail, piece.tries + 1, now_ns)
            self.put(again, self.next_rail(again))

    def next_rail(self, piece: Piece) -> int:
        """Where a slice that failed goes."""
        return (piece.rail + 1) % self.n

    def rail_for(self, n_bytes: int) -> int:
        """Where a new slice goes."""
        raise NotImplementedError

    def probe(self, now_ns: int) -> int:
        """They probe with data, or not at all."""
        return -1

    def probed(self, rail: int, ok: bool, now_ns: int) -> None:
        """Never asked."""


class RoundRobin(Dealt):
    """Each slice to the next rail."""

    _turn = -1

    def rail_for(self, n_bytes: int) -> int:
        """The next."""
        self._turn = (self._turn + 1) % self.n
        return self._turn


class RandomRail(Dealt):
    """The classic choice: any rail of the preferred list with equal chance, blind to load."""

    def rail_for(self, n_bytes: int) -> int:
        """Any."""
        return self.dice.randrange(self.n)


class WeightedShares(Dealt):
    """TENT's formula: weights from bytes in flight over a bandwidth average, floor shares, rest to the best.

    The average keeps 1 % of its history and counts the wait in the queue as service. Its empty slices are
    left out here, which favours it. A rail with 3 failures within 10 s rests for 30 s, doubling to 300 s;
    success clears that.
    """

    NOMINAL: Final = 50.0  # bytes a nanosecond: 400 Gb/s, whatever the link
    SLICES_MAX: Final = 64
    KEPT: Final = 0.01
    PROBE_EVERY: Final = 100

    def __init__(self, plans: Sequence[RailPlan], seed: int) -> None:
        super().__init__(plans, seed)
        self._average = [self.NOMINAL] * self.n
        self._inflight = [0] * self.n
        self._calls = 0
        self._failed_ns: list[list[int]] = [[] for _ in plans]
        self._rests_until = [0] * self.n
        self._rest_ns = [30 * NS_PER_S] * self.n

    def submit(self, transfer: int, n_bytes: int, now_ns: int) -> None:
        """At most 64 slices, over the rails by their weights, each rail's in one run."""
        size = max(SLICE_BYTES, -(-n_bytes // self.SLICES_MAX))
        size = -(-size // SLICE_BYTES) * SLICE_BYTES
        sizes = [size] * (n_bytes // size) + ([n_bytes % size] if n_bytes % size else [])
        if len(sizes) > 1 and sizes[-1] <= size // 4:
            last = sizes.pop()
            sizes[-1] += last
        for rail, piece in zip(self._deal(len(sizes), size, now_ns), sizes, strict=True):
            self.put(Piece(transfer, piece, queued_ns=now_ns), rail)

    def _deal(self, count: int, size: int, now_ns: int) -> list[int]:
        rails = [rail for rail in range(self.n) if self._rests_until[rail] <= now_ns] or list(range(self.n))
        self._calls += 1
        if count > 1 and self._calls % self.PROBE_EVERY == 0:
            return [rails[k % len(rails)] for k in range(count)]
        if count < self.SLICES_MAX // 2:
            return self._one_by_one(rails, count, size)
        scores = {rail: self._score(rail, size) for rail in rails}
        weights = {rail: 1.0 / (score + 1e-12) for rail, score in scores.items()}
        whole = sum(weights.values())
        shares = {rail: int(count * weights[rail] / whole) for rail in rails}
        shares[min(rails, key=lambda rail: scores[rail])] += count - sum(shares.values())
        return [rail for rail in rails for _ in range(shares[rail])]

    def _one_by_one(self, rails: list[int], count: int, size: int) -> list[int]:
        """Few slices: each to the rail with the lowest score, which its bytes then raise."""
        chosen: list[int] = []
        added = [0] * self.n
        for _ in range(count):
            chosen.append(min(rails, key=lambda rail: self._score(rail, size + added[rail])))
            added[chosen[-1]] += size
        return chosen

    def _score(self, rail: int, n_bytes: int) -> float:
        seconds = (self._inflight[rail] + n_bytes) / (self._average[rail] * NS_PER_S)
        return seconds + self.dice.randrange(10) * 1e-9

    def next_rail(self, piece: Piece) -> int:
        """The next one that does not rest; the next one when all do."""
        following = [(piece.rail + step) % self.n for step in range(1, self.n + 1)]
        awake = [rail for rail in following if self._rests_until[rail] <= piece.queued_ns]
        return (awake or following)[0]

    def ended(self, piece: Piece, ok: bool, now_ns: int) -> None:
        """The average learns; failures are counted."""
        self._inflight[piece.rail] -= piece.n_bytes
        if ok:
            seen = piece.n_bytes / max(1, now_ns - piece.queued_ns)
            mixed = self.KEPT * self._average[piece.rail] + (1 - self.KEPT) * seen
            self._average[piece.rail] = min(max(mixed, self.NOMINAL / 10), self.NOMINAL * 10)
            self._failed_ns[piece.rail].clear()
            self._rest_ns[piece.rail] = 30 * NS_PER_S
        else:
            recent = [at for at in self._failed_ns[piece.rail] if now_ns - at < 10 * NS_PER_S] + [now_ns]
            self._failed_ns[piece.rail] = recent
            if len(recent) >= 3 and self._rests_until[piece.rail] <= now_ns:
                self._rests_until[piece.rail] = now_ns + self._rest_ns[piece.rail]
                self._rest_ns[piece.rail] = min(2 * self._rest_ns[piece.rail], 300 * NS_PER_S)
        super().ended(piece, ok, now_ns)

    def put(self, piece: Piece, rail: int) -> None:
        """Its bytes count as in flight from now on."""
        self._inflight[rail] += piece.n_bytes
        super().put(piece, rail)


POLICIES: Final[dict[str, Callable[[Sequence[RailPlan], int], Policy]]] = {
    "least completion": LeastCompletion,
    "round robin": RoundRobin,
    "random": RandomRail,
    "weighted shares": WeightedShares,
}
