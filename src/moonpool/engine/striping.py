"""Large batches over several lanes: cut into slices, carried side by side, judged as the batch they came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from moonpool.engine.batch import Batch
from moonpool.errors import Status
from moonpool.native.io.batch import Batch as NativeBatch

if TYPE_CHECKING:
    from moonpool.engine.segment import Segment
    from moonpool.native.io.workers import WorkerPool


@final
@dataclass(frozen=True, slots=True)
class Stripe:
    """The slices that one lane carries, and which transfer each belongs to."""

    native: NativeBatch
    owners: Any


def plan_stripes(native: NativeBatch, segment: Segment, bounds: tuple[int, int]) -> list[Stripe] | None:
    """Cut a batch for `lanes` lanes; None when it is smaller than `stripe_min_bytes` (bounds = both)."""
    lanes, stripe_min_bytes = bounds
    if native.total_bytes < stripe_min_bytes:
        return None
    # numpy and numba are loaded by the first large batch over several lanes, and by nothing before it.
    import numpy as np

    from moonpool.kernels.striping import stripe_evenly

    local, region, offset, length = (np.frombuffer(a, dtype=np.uint64) for a in native.arrays())
    slices = stripe_evenly(local, offset, length, lanes)
    stripes: list[Stripe] = []
    for lane in range(lanes):
        mine = np.flatnonzero(slices.path == lane)
        if len(mine) == 0:
            continue
        owners = slices.transfer[mine]
        part = NativeBatch(native.op, len(mine))
        part.fill(slices.local[mine], region[owners], slices.offset[mine], slices.length[mine], None, False)
        part.share_deadline(native)
        segment.native.bind(part)
        stripes.append(Stripe(part, owners))
    return stripes


@final
class StripedBatch:
    """A batch carried as stripes. It has ended when all of them have; then it reads like a `Batch`."""

    def __init__(self, whole: Batch, stripes: list[Stripe]) -> None:
        self._whole = whole
        self._stripes = stripes

    def whole(self) -> Batch:
        """The uncut batch, for a worker to carry over one lane."""
        return self._whole

    def run(self, workers: WorkerPool) -> None:
        """Carry one stripe in the calling thread and the others on workers; return when all have ended."""
        first, *others = self._stripes
        for stripe in others:
            workers.submit(stripe.native)
        first.native.drive_here()
        for stripe in others:
            stripe.native.wait()
        failed = {
            int(owner): status
            for stripe in self._stripes
            for owner, status in zip(stripe.owners, stripe.native.statuses(), strict=True)
            if status != Status.COMPLETE
        }
        self._whole.native.settle_as(failed)
        self._whole.native.let_go()

    def check(self) -> None:
        """Raise the first failed transfer's error."""
        self._whole.check()

    @property
    def digests(self) -> list[list[int]] | None:
        """Always None: batches with digests are not cut."""
        return self._whole.digests

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)
