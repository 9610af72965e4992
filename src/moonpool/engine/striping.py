"""Large batches over several lanes: cut into slices, carried side by side, judged as one batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from moonpool.errors import MoonpoolError, Status
from moonpool.native.io.batch import Batch as NativeBatch

if TYPE_CHECKING:
    from moonpool.engine.segment import Segment
    from moonpool.kernels.striping import Slices
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

    local, _region, offset, length = (np.frombuffer(a, dtype=np.uint64) for a in native.arrays())
    slices = stripe_evenly(local, offset, length, lanes)
    found = [np.flatnonzero(slices.path == lane) for lane in range(lanes)]
    return [part_of(native, segment, (slices, rows), None) for rows in found if len(rows)]


def part_of(native: NativeBatch, segment: Segment, cut: tuple[Slices, Any], path: int | None) -> Stripe:
    """Some rows of a cut (all slices, and which rows) as a batch of its own, for one path or any."""
    import numpy as np

    slices, rows = cut
    owners = slices.transfer[rows]
    region = np.frombuffer(native.arrays()[1], dtype=np.uint64)
    part = NativeBatch(native.op, len(rows))
    part.fill(slices.local[rows], region[owners], slices.offset[rows], slices.length[rows], path, False)
    if native.grants is not None:
        grants = np.frombuffer(native.grants, dtype=np.uint8).reshape(-1, 24)
        part.attach_grants(grants[owners].tobytes())
    part.be_part_of(native)
    segment.native.bind(part)
    return Stripe(part, owners)


def run_striped(whole: NativeBatch, stripes: list[Stripe], workers: WorkerPool) -> None:
    """Carry one stripe in the calling thread and the others on workers; then the whole batch has ended.

    All stripes have ended when this returns, and when it raises.
    """
    drive_together(stripes, workers)
    whole.settle_as(failures(stripes))


def drive_together(stripes: list[Stripe], workers: WorkerPool) -> None:
    """Carry one stripe in the calling thread, others on workers; all have ended, even when this raises."""
    here = [stripes[0].native]
    try:
        for stripe in stripes[1:]:
            try:
                workers.submit(stripe.native)
            except MoonpoolError:  # no room for it, or no thread: it is carried after the first then
                here.append(stripe.native)
        for native in here:
            native.drive_here()
    except BaseException:
        for stripe in stripes:
            stripe.native.cancel()
        raise
    finally:
        for stripe in stripes:
            stripe.native.wait()


def failures(stripes: list[Stripe]) -> dict[int, int]:
    """The transfers that are not COMPLETE, each with the status of one of its slices."""
    return {
        int(owner): status
        for stripe in stripes
        for owner, status in zip(stripe.owners, stripe.native.statuses(), strict=True)
        if status != Status.COMPLETE
    }
