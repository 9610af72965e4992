"""One run of a policy in a world of rails: what came when, what it took, and how the rails were used."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

from moonpool.bench.path_policies import Piece, Policy
from moonpool.bench.path_world import Rail, RailPlan, Sender, fluid_makespan_ns

#: A run that needs more events than this is stuck.
EVENTS_MAX: Final = 5_000_000
_PROBE_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Load:
    """Transfers of a run: (when it comes in ns, bytes), sorted by time."""

    transfers: tuple[tuple[int, int], ...]

    @property
    def total_bytes(self) -> int:
        """Of all of them."""
        return sum(n_bytes for _at, n_bytes in self.transfers)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run showed. Latencies are by transfer, in ns; `busy` is each rail's share of the makespan."""

    makespan_ns: int
    optimum_ns: int
    latencies_ns: tuple[int, ...]
    slices: int
    empty_slices: int
    lost_slices: int
    rail_bytes: tuple[int, ...]
    busy: tuple[float, ...]

    @property
    def over_optimum(self) -> float:
        """Makespan over the fluid bound: 1 is perfect."""
        return self.makespan_ns / self.optimum_ns

    def latency_ns(self, share: float) -> int:
        """A quantile of the transfers' latencies."""
        ordered = sorted(self.latencies_ns)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def fairness(self, alone_ns: Sequence[int]) -> float:
        """Jain's index over how much of its best speed each transfer had: 1 when all had the same."""
        shares = [best / took for best, took in zip(alone_ns, self.latencies_ns, strict=True)]
        return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


@final
class Run:
    """Plays one load through one policy; everything is decided by the arguments."""

    def __init__(self, plans: Sequence[RailPlan], sender: Sender, seed: int) -> None:
        self._plans = list(plans)
        self._sender = sender
        self._rails = [Rail(plan, sender.slice_overhead_ns, sender.detect_ns) for plan in plans]
        self._look = random.Random(f"{seed}/look")
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self._now = 0
        self._slices = self._empty = self._lost = 0

    def play(self, make: Callable[[Sequence[RailPlan], int], Policy], load: Load, seed: int) -> Outcome:
        """Until every byte has arrived."""
        self._policy = make(self._plans, seed)
        self._left = [n_bytes for _at, n_bytes in load.transfers]
        self._ended = [0] * len(self._left)
        self._load = load
        for index, (at, _n_bytes) in enumerate(load.transfers):
            self._at(at, self._arrival(index))
        while any(self._left):
            if not self._events or self._count > EVENTS_MAX:
                raise RuntimeError(f"the policy left {sum(self._left)} bytes behind")
            self._turn()
        took = tuple(end - at for end, (at, _n_bytes) in zip(self._ended, load.transfers, strict=True))
        makespan = max(self._ended) - load.transfers[0][0]
        return Outcome(
            makespan,
            fluid_makespan_ns(self._plans, load.total_bytes),
            took,
            self._slices,
            self._empty,
            self._lost,
            tuple(rail.carried_bytes for rail in self._rails),
            tuple(rail.busy_ns / makespan for rail in self._rails),
        )

    def _at(self, when: int, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, what))

    def _turn(self) -> None:
        """Sleep until something happens, look, hear all that happened until then, post what may be posted."""
        if self._events[0][0] > self._now:
            self._now = self._events[0][0] + round(self._look.expovariate(1.0) * self._sender.look_ns)
        while self._events and self._events[0][0] <= self._now:
            heapq.heappop(self._events)[2]()
        probe = self._policy.probe(self._now)
        if probe >= 0:
            self._send_probe(probe)
        while (piece := self._policy.take(self._now)) is not None:
            self._post(piece)
            if self._events and self._events[0][0] <= self._now:
                break  # something ended meanwhile

    def _post(self, piece: Piece) -> None:
        self._now += self._sender.post_ns
        self._slices += 1
        self._empty += piece.n_bytes == 0
        known, ok = self._rails[piece.rail].post(self._now, piece.n_bytes)
        self._at(known, lambda: self._hear(piece, ok, known))

    def _hear(self, piece: Piece, ok: bool, known: int) -> None:
        self._policy.ended(piece, ok, self._now)
        if not ok:
            self._lost += 1
            return
        self._left[piece.transfer] -= piece.n_bytes
        if self._left[piece.transfer] == 0:
            self._ended[piece.transfer] = known

    def _send_probe(self, rail: int) -> None:
        state = self._rails[rail]
        ok = not state.is_dead(self._now)
        known = self._now + (state.plan.latency_ns if ok else self._sender.detect_ns)
        self._at(known, lambda: self._policy.probed(rail, ok, self._now))

    def _arrival(self, index: int) -> Callable[[], None]:
        n_bytes = self._load.transfers[index][1]
        return lambda: self._policy.submit(index, n_bytes, self._now)
