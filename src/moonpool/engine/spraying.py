"""Large batches over several transports of a segment at once: each takes what it is likely to end in time.

Shares follow what each path was seen to do with such batches before; until then, what its transport is
likely to do. What a path leaves or fails is sent again by the others: a transfer is whole or has failed,
however many paths carried it. A transport that leaves all it is given rests, longer each time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, final

from moonpool.engine.striping import Stripe, drive_together, failures, part_of
from moonpool.errors import Status
from moonpool.native.io.batch import Batch as NativeBatch
from moonpool.units import MIB, NS_PER_S

if TYPE_CHECKING:
    from moonpool.engine.segment import Segment
    from moonpool.kernels.striping import Slices
    from moonpool.native.io.workers import WorkerPool

#: Bytes a second of a path that has carried nothing yet, by its transport: for the first shares only.
LIKELY_RATES: Final = {
    "local": 8_000_000_000,
    "shm": 8_000_000_000,
    "cxl": 6_000_000_000,
    "rdma": 12_000_000_000,
    "ofi": 8_000_000_000,
    "file": 2_000_000_000,
    "nvmeof": 2_000_000_000,
    "tcp": 2_000_000_000,
}
#: A smaller share is not worth waking another thread for.
SHARE_MIN_BYTES: Final = MIB
#: Statuses that say more of a path than of the transfer: another path may do better.
PATH_FAILED: Final = frozenset(
    {Status.UNSUPPORTED, Status.PEER_GONE, Status.REFUSED, Status.STALLED, Status.NO_MEMORY}
)
REST_NS_MIN: Final = NS_PER_S
REST_NS_MAX: Final = 60 * NS_PER_S
#: How many regions' paths are remembered.
REMEMBERED_MAX: Final = 256


@dataclass(slots=True)
class Way:
    """One transport, as it was seen to carry large batches of a region, by one of its paths at a time."""

    paths: tuple[int, ...]
    rate: int
    turn: int = 0
    seen: bool = False
    rest_ns: int = 0
    until_ns: int = 0

    def carried(self, n_bytes: int, took_ns: int) -> None:
        """It carried so much: a new measurement counts a quarter, and the first one all."""
        rate = max(1, n_bytes * NS_PER_S // max(1, took_ns))
        self.rate = (3 * self.rate + rate) // 4 if self.seen else rate
        self.seen = True
        self.rest_ns //= 2

    @property
    def path(self) -> int:
        """The one whose turn it is."""
        return self.paths[self.turn]

    def left(self, now_ns: int) -> None:
        """The path left all that it was given: the next one's turn; after the last all rest, ever longer."""
        self.turn = (self.turn + 1) % len(self.paths)
        if self.turn:
            return
        self.rest_ns = min(max(2 * self.rest_ns, REST_NS_MIN), REST_NS_MAX)
        self.until_ns = now_ns + self.rest_ns


@final
@dataclass(slots=True)
class Sprayer:
    """Thread-safe. Counts what it deals."""

    workers: WorkerPool
    stripe_min_bytes: int
    _ways: dict[tuple[int, int], list[Way]] = field(default_factory=dict)
    _counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("spray_batches", "spray_slices", "spray_failovers"), 0)
    )
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def carry(self, whole: NativeBatch, segment: Segment) -> bool:
        """Carry a batch by several paths to its end; False, and nothing done, when it is not worth it."""
        if whole.total_bytes < max(self.stripe_min_bytes, 2 * SHARE_MIN_BYTES):
            return False
        # numpy and numba are loaded by the first large batch, and by nothing before it.
        import numpy as np

        region = int(np.frombuffer(whole.arrays()[1], dtype=np.uint64, count=1)[0])
        ways = self._usable(segment, region)
        if len(ways) < 2:
            return False
        slices = deal(whole, ways)
        rows = [np.flatnonzero(slices.path == place) for place in range(len(ways))]
        used = [(way, mine) for way, mine in zip(ways, rows, strict=True) if len(mine)]
        if len(used) < 2:
            return False
        stripes = [part_of(whole, segment, (slices, mine), way.path) for way, mine in used]
        drive_together(stripes, self.workers)
        again = self._judge(list(zip(stripes, used, strict=True)))
        failed = failures(stripes)
        if len(again):
            second = part_of(whole, segment, (slices, again), None)
            second.native.drive_here()
            failed = settled(failed, stripes, second)
        self._note(len(slices.length), len(again))
        whole.settle_as(failed)
        return True

    def counters(self) -> dict[str, int]:
        """Batches dealt, their slices, and slices that were sent again by another path."""
        with self._lock:
            return dict(self._counts)

    def _usable(self, segment: Segment, region: int) -> list[Way]:
        key, now_ns = (segment.handle, region), time.monotonic_ns()
        with self._lock:
            if key not in self._ways:
                if len(self._ways) >= REMEMBERED_MAX:
                    self._ways.clear()
                paths: dict[str, tuple[int, ...]] = {}
                for info in segment.paths:
                    paths[info.transport] = (*paths.get(info.transport, ()), info.id)
                self._ways[key] = [
                    Way(ids, LIKELY_RATES[name]) for name, ids in paths.items() if name in LIKELY_RATES
                ]
            return [way for way in self._ways[key] if way.until_ns <= now_ns]

    def _judge(self, parts: Sequence[tuple[Stripe, tuple[Way, Any]]]) -> Any:
        """Learn from how the parts ended; the rows that another path should carry again."""
        import numpy as np

        again = []
        now_ns = time.monotonic_ns()
        with self._lock:
            for stripe, (way, mine) in parts:
                marks = np.frombuffer(stripe.native.statuses(), dtype=np.uint8)
                if stripe.native.bytes_done:
                    way.carried(stripe.native.bytes_done, stripe.native.elapsed_ns)
                elif stripe.native.worst in PATH_FAILED:
                    way.left(now_ns)
                again.append(mine[np.isin(marks, list(PATH_FAILED))])
        return np.concatenate(again)

    def _note(self, slices: int, failovers: int) -> None:
        with self._lock:
            self._counts["spray_batches"] += 1
            self._counts["spray_slices"] += slices
            self._counts["spray_failovers"] += failovers


def deal(whole: NativeBatch, ways: Sequence[Way]) -> Slices:
    """The batch cut by the ways' rates; a slice's path is its way's place among them."""
    import numpy as np

    from moonpool.kernels.spraying import spray
    from moonpool.kernels.striping import Transfers, expected_paths

    local, _region, offset, length = (np.frombuffer(a, dtype=np.uint64) for a in whole.arrays())
    nothing = np.zeros(len(ways), np.uint64)
    rates = np.array([way.rate for way in ways], np.uint64)
    paths = expected_paths(np.arange(len(ways), dtype=np.uint16), rates, nothing, nothing)
    return spray(Transfers(local, offset, length), paths, SHARE_MIN_BYTES).slices


def settled(failed: dict[int, int], stripes: Sequence[Stripe], second: Stripe) -> dict[int, int]:
    """What is still failed after some slices were carried again: what failed for good, or failed twice."""
    for_good = {
        int(owner): status
        for stripe in stripes
        for owner, status in zip(stripe.owners, stripe.native.statuses(), strict=True)
        if status != Status.COMPLETE and status not in PATH_FAILED
    }
    return {owner: status for owner, status in {**failures([second]), **for_good}.items() if owner in failed}
