"""Transfers of one engine: driven by their caller, or submitted and kept until they have ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, final

from moonpool.config import EngineConfig
from moonpool.engine.batch import Batch
from moonpool.engine.notifications import check_message
from moonpool.engine.plan import How, What, as_memory, plan_batch, timeout_ns
from moonpool.engine.segment import Segment
from moonpool.engine.spraying import Sprayer
from moonpool.engine.striping import plan_stripes, run_striped
from moonpool.errors import UsageError, error_from_status
from moonpool.native.io.batch import Batch as NativeBatch
from moonpool.native.io.lanes import announce_by_lane
from moonpool.native.io.workers import WorkerPool
from moonpool.operations import Op, Priority
from moonpool.transport.base import DeviceTaking
from moonpool.units import NS_PER_MS

#: After so many submissions those that have ended are let go of.
_REAP_EVERY: Final = 64


class Wishes(NamedTuple):
    """What else a submitted batch asks for: a message to the owner after it, and its class."""

    notify: bytes | None = None
    priority: Any = Priority.NORMAL


@final
class Transfers:
    """Thread-safe. `find` turns what a caller gave as a segment into an open one, or raises.

    Submitted batches are kept here, with their buffers, so that whoever drops one frees nothing too early.
    """

    def __init__(
        self,
        config: EngineConfig,
        workers: WorkerPool,
        find: Callable[[Segment | int], Segment],
        devices: DeviceTaking | None = None,
    ) -> None:
        self._config = config
        self._workers = workers
        self._find = find
        self._devices = devices
        self._sprayer = Sprayer(workers, config.stripe_min_bytes) if config.spray == "transports" else None
        self._timeout_ns = config.transfer_timeout_ms * NS_PER_MS
        self._inflight: dict[int, NativeBatch] = {}
        self._submitted = 0

    def quick(
        self, op: Op, segment: Segment | int, where: tuple[int, int, int, int], timeout_s: float | None
    ) -> None:
        """One plain transfer from or into registered memory, with nothing made for it.

        `where` is region, offset, local address and length.
        """
        # The common case spelt out: a call costs a tenth of the whole. The handle of a closed segment is 0.
        found = segment if type(segment) is Segment and segment.handle else self._find(segment)
        region, offset, local, length = where
        if length >= self._config.stripe_min_bytes and (self._sprayer or self._lane_count(found) > 1):
            self.run(op, found, (local, region, offset, length), (None, False, timeout_s, None)).check()
            return
        limit_ns = self._timeout_ns if timeout_s is None else timeout_ns(timeout_s)
        try:
            status = found.native.transfer_one(op, local, region, offset, length, limit_ns)
        except (OverflowError, TypeError) as problem:
            raise UsageError(
                f"addresses, handles, offsets and lengths are unsigned 64-bit numbers: {problem}"
            ) from problem
        if status:
            raise error_from_status(
                status,
                peer=found.endpoint,
                segment=found.name,
                operation=op.name,
                region=region,
                offset=offset,
                length_bytes=length,
            )

    def one(self, op: Op, segment: Segment | int, what: What, how: How) -> list[int] | None:
        """One transfer of any kind, driven here; its chunk digests when asked for. Raises its error."""
        local, region, offset, length = what
        # A buffer, even one of 64-bit integers: in `run` such a one would be a vector of addresses.
        batch = self.run(op, segment, (as_memory(local, op, self._devices), region, offset, length), how)
        batch.check()
        digests = batch.digests
        return digests[0] if digests is not None else None

    def run(self, op: Op, segment: Segment | int, what: What, how: How) -> Batch:
        """A batch, driven by the calling thread to its end; large ones on several lanes at once."""
        found = self._find(segment)
        path, digest, timeout_s, grants = how
        lanes = self._lane_count(found)
        if path is None and not digest and lanes == 1 and grants is None and self._sprayer is None:
            limit_ns = self._timeout_ns if timeout_s is None else timeout_ns(timeout_s)
            try:
                ended = found.native.carry_plain(op, *what, limit_ns, self._config.batch_transfers_max)
            except OverflowError as problem:
                raise UsageError(f"these are no transfers: {problem}") from problem
            if ended is not None:
                return Batch(ended, found)
        native = plan_batch(op, what, how, self._config, self._devices)
        found.native.bind(native)
        if path is None and not digest:
            sprayed = self._sprayer is not None and self._sprayer.carry(native, found)
            if lanes > 1 and not sprayed:
                stripes = plan_stripes(native, found, (lanes, self._config.stripe_min_bytes))
                if stripes is not None:
                    run_striped(native, stripes, self._workers)
        native.drive_here()  # nothing is left to do when it went in parts
        native.let_go()
        return Batch(native, found)

    def submit(self, op: Op, segment: Segment | int, what: What, how: How, wishes: Wishes) -> Batch:
        """A batch for a worker, or for its waiter if that comes first. QueueFull leaves nothing behind."""
        found = self._find(segment)
        priority = Priority.of(wishes.priority)
        native = plan_batch(op, what, how, self._config, self._devices)
        found.native.bind(native)
        if wishes.notify is not None:
            native.attach_notice(check_message(wishes.notify, self._config))
            announce_by_lane(native)
        self._workers.submit(native, priority)
        self._keep(native)
        return Batch(native, found)

    def carry(self, segment: Segment, native: NativeBatch) -> None:
        """A batch that its caller built, driven here to its end; look at its statuses."""
        segment.native.bind(native)
        native.drive_here()
        native.let_go()

    def launch(self, segment: Segment, native: NativeBatch, priority: Priority = Priority.NORMAL) -> Batch:
        """A batch that its caller built, submitted. QueueFull leaves nothing behind."""
        segment.native.bind(native)
        self._workers.submit(native, priority)
        self._keep(native)
        return Batch(native, segment)

    def counters(self) -> dict[str, int]:
        """Of batches that were dealt over several transports (config field spray)."""
        return {} if self._sprayer is None else self._sprayer.counters()

    def reap(self) -> None:
        """Let go of submitted batches that have ended, and with them of their buffers and segments."""
        for key, old in self._inflight.copy().items():
            if old.done:
                old.let_go()
                self._inflight.pop(key, None)

    def cancel_all(self) -> None:
        """Ask every submitted batch to end."""
        for native in list(self._inflight.values()):
            native.cancel()

    def close(self) -> None:
        """Join the workers, which ends what is submitted; afterwards no buffer is held any more."""
        self._workers.close()
        for native in list(self._inflight.values()):
            native.let_go()
        self._inflight.clear()

    def _lane_count(self, segment: Segment) -> int:
        """Over how many lanes a large batch on a segment is cut: 1 unless tcp is its only way."""
        # The path of device memory stands before the others and carries none of the host's.
        first = segment.paths[0].transport
        if first == "cuda" and len(segment.paths) > 1:
            first = segment.paths[1].transport
        if first != "tcp":
            return 1
        return self._config.bulk_lanes if segment.peer.stays_on_host else self._config.bulk_lanes_remote

    def _keep(self, native: NativeBatch) -> None:
        self._submitted += 1
        if self._submitted % _REAP_EVERY == 0:
            self.reap()
        self._inflight[id(native)] = native
