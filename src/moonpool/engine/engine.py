"""The engine: it offers this process's memory to peers, and moves bytes between theirs and ours."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self, final

from moonpool.config import EngineConfig
from moonpool.engine.batch import Batch
from moonpool.engine.control import ControlService, ServiceHooks, SessionInfo
from moonpool.engine.fork import forget_forks, watch_forks
from moonpool.engine.gate import Gate, open_server
from moonpool.engine.measuring import engine_metrics
from moonpool.engine.notifications import NOTIFY, Notification, check_message
from moonpool.engine.offering import Offering, table_room
from moonpool.engine.opening import Openings, holder_alive
from moonpool.engine.own_memory import OwnerHost, OwnMemory, device_transport
from moonpool.engine.pages import serve_pages
from moonpool.engine.plan import as_number, timeout_ns
from moonpool.engine.segment import Segment
from moonpool.engine.transfers import Transfers, Wishes
from moonpool.errors import EngineClosed, ForkedEngine, MoonpoolError, UsageError, error_from_status
from moonpool.ids import InstanceId, new_instance_id
from moonpool.metadata import open_metadata
from moonpool.metadata.base import Record
from moonpool.native.io.regions import LocalRegions
from moonpool.native.io.workers import WorkerPool
from moonpool.operations import Op, Priority, class_rates
from moonpool.transport.registry import make_transports
from moonpool.units import MS_PER_S, NS_PER_MS, NS_PER_S, U32_MAX


@final
class Engine(OwnMemory):
    """A transfer engine. Use it as a context manager, or call `close`.

    Every method is safe from any thread; the blocking ones release the GIL. After a fork the child's copy
    refuses to work (`ForkedEngine`): make a new engine there. Errors are `MoonpoolError`s: see
    `moonpool.errors`.
    """

    def __init__(self, config: EngineConfig | None = None, **changes: Any) -> None:
        self.config = replace(config or EngineConfig(), **changes)
        config = self.config
        self.instance: InstanceId = new_instance_id()
        self._started_s = time.time()
        self._usable = True
        self._closed = False
        self._pid = os.getpid()
        self._close_lock = threading.Lock()
        transports = make_transports(config)
        self.transports: tuple[str, ...] = tuple(transport.name for transport in transports)
        self._by_name = {transport.name: transport for transport in transports}
        self._table = LocalRegions(table_room(config))
        self._offering = Offering(config, self._table, transports)
        self._server = open_server(self._table, config)
        # A batch over several lanes has a thread for each but the caller's own.
        threads = max(config.worker_threads, config.bulk_lanes - 1, config.bulk_lanes_remote - 1)
        self._workers = WorkerPool(
            threads,
            config.queued_batches_max,
            head_start_ns=config.priority_head_start_ms * NS_PER_MS,
            by_deadline=config.submit_order == "deadline",
            caps=class_rates(config.class_rates).items(),
        )
        #: For those who build their own native batches (the store).
        self.transfers = Transfers(config, self._workers, self._segment, device_transport(transports))
        self._quick = self.transfers.quick
        hooks = ServiceHooks(
            handlers={},
            on_lane=lambda fd, info: self._server.add_lane(fd, info.peer_instance),
            session_handlers={
                "revoke": lambda session, params: self._openings.revoke(session, params),
                "settle": lambda session, params: self._openings.settle(session, params),
            },
            on_session_closed=self._offering.session_ended,
            lanes_open=lambda: self._server.lanes,
        )
        with contextlib.ExitStack() as undo:
            undo.callback(self._server.close, 0.0)
            host = OwnerHost(self._table, self.instance, self._offering)
            for transport in transports:
                transport.open(host)
                undo.callback(transport.close)
            hooks = replace(hooks, handlers={"describe": self._describe, **self._offering.handlers()})
            self._control = ControlService(config, self.instance, hooks)
            undo.callback(self._control.close)
            self._start(transports)
            undo.pop_all()

    def _start(self, transports: Sequence[Any]) -> None:
        self._control.start()
        self.name = self.config.name or self._control.endpoint
        self._metadata = open_metadata(self.config, lambda record: holder_alive(self._control, record))
        self._openings = Openings(
            self.config, self._control, self._offering, (self._metadata, self._table, transports)
        )
        #: What lets peers write into granted regions, and tells who does (the store).
        self.gate = Gate(
            (self._table, self._server, self._control), self._offering.writers, self._openings, transports
        )
        try:
            self._lease = self._metadata.register(self._record())
        except BaseException:
            self._metadata.close()
            raise
        try:
            self._pages = serve_pages(self.config.metrics_address, self.name, self.metrics)
        except BaseException:
            with contextlib.suppress(MoonpoolError):  # the lease runs out by itself
                self._metadata.withdraw(self._lease)
            self._metadata.close()
            raise
        watch_forks(self)

    def _record(self) -> Record:
        host, _, port = self._control.endpoint.rpartition(":")
        return Record(self.name, host.strip("[]"), int(port), self._control.unix_name, self.instance)

    @property
    def endpoint(self) -> str:
        """ "host:port" where peers reach this engine; also a name that `open` takes."""
        return self._control.endpoint

    @property
    def metrics_address(self) -> str:
        """ "host:port" of the pages `/metrics` and `/healthz`; "" when the config names none."""
        return self._pages.address if self._pages is not None else ""

    # ---- segments of peers ---------------------------------------------------------------------------------

    def open(self, name: str, *, timeout_s: float | None = None) -> Segment:
        """Open a segment: "host:port", or a name published in the metadata service.

        PeerRefused, PeerStalled, AccessDenied, NoSuchSegment, TransportUnavailable (no configured transport
        reaches it).
        """
        self._check()
        return self._openings.open(name, timeout_s)

    def refresh(self, segment: Segment | int) -> Segment:
        """Ask the owner for its regions again. Returns the segment."""
        found = self._segment(segment)
        self._openings.refresh(found)
        return found

    def close_segment(self, segment: Segment | int) -> None:
        """Close a segment; its handle is stale from now on."""
        self._openings.close_segment(self._segment(segment))
        self.transfers.reap()

    def _segment(self, segment: Segment | int) -> Segment:
        if not self._usable:
            self._check()
        if type(segment) is Segment and segment.handle:
            return segment
        handle = as_number(segment.handle if type(segment) is Segment else segment)
        if type(handle) is not int:
            raise UsageError(f"a segment or its handle is needed, not {type(segment).__name__}")
        return self._openings.get(handle)

    # ---- transfers -----------------------------------------------------------------------------------------

    def read(
        self,
        segment: Segment | int,
        region: int,
        offset: int,
        into: Any,
        length: int | None = None,
        *,
        path: int | None = None,
        digest: bool = False,
        timeout_s: float | None = None,
    ) -> list[int] | None:
        """Read `length` bytes at `offset` of a peer's region into `into`, and wait for them.

        `into` is an address inside a registered region (then `length` is required) or a writable buffer.
        Returns the chunk digests when asked for. Raises the transfer's error; a failed READ's destination is
        undefined, but never changes after this returned.
        """
        if type(into) is type(offset) is type(length) is int and path is None and not digest:
            self._quick(Op.READ, segment, (region, offset, into, length), timeout_s)
            return None
        return self.transfers.one(
            Op.READ, segment, (into, region, offset, length), (path, digest, timeout_s, None)
        )

    def write(
        self,
        segment: Segment | int,
        region: int,
        offset: int,
        source: Any,
        length: int | None = None,
        *,
        path: int | None = None,
        digest: bool = False,
        timeout_s: float | None = None,
        grants: Any = None,
    ) -> list[int] | None:
        """Write `length` bytes from `source` to `offset` of a peer's region.

        It returns when every later READ by anyone sees them. `source` is an address inside a registered
        region or a readable buffer. See `read`.
        """
        plain = path is grants is None and not digest
        if plain and type(source) is type(offset) is type(length) is int:
            self._quick(Op.WRITE, segment, (region, offset, source, length), timeout_s)
            return None
        return self.transfers.one(
            Op.WRITE, segment, (source, region, offset, length), (path, digest, timeout_s, grants)
        )

    def transfer(
        self,
        op: Op,
        segment: Segment | int,
        local: Any,
        region: Any,
        offset: Any,
        length: Any = None,
        *,
        path: Any = None,
        digest: bool = False,
        timeout_s: float | None = None,
        grants: Any = None,
        check: bool = True,
    ) -> Batch:
        """Many transfers in one call, driven by the calling thread; returns the ended batch.

        `local` (addresses in registered regions, or one buffer for a single transfer), `region` (handles),
        `offset` and `length` are uint64 arrays of one length, or scalars for all; `path` ids are uint16
        (`AUTO_PATH`: any); `grants` (24 bytes a transfer) is what WRITEs show to granted regions. With
        `check` the first failed transfer's error is raised; without it, look at `status`.
        """
        how = (path, digest, timeout_s, grants)
        batch = self.transfers.run(op, segment, (local, region, offset, length), how)
        if check:
            batch.check()
        return batch

    def submit(
        self,
        op: Op,
        segment: Segment | int,
        local: Any,
        region: Any,
        offset: Any,
        length: Any = None,
        *,
        path: Any = None,
        digest: bool = False,
        timeout_s: float | None = None,
        grants: Any = None,
        notify: bytes | None = None,
        priority: Priority | int | str = Priority.NORMAL,
    ) -> Batch:
        """As `transfer`, but returns at once: a worker drives the batch unless a waiter gets there first.

        `timeout_s` is the batch's deadline from now (transfer_timeout_ms by default). With `notify` the owner
        gets that message after every transfer completed. Batches of a higher `priority` ("low", "normal",
        "high") start first (docs/transports/paths.md). QueueFull when queued_batches_max batches wait.
        """
        how = (path, digest, timeout_s, grants)
        return self.transfers.submit(
            op, segment, (local, region, offset, length), how, Wishes(notify, priority)
        )

    def flush(self, segment: Segment | int, *, timeout_s: float | None = None) -> None:
        """Return when every completed WRITE of the segment is visible to every later READ by anyone."""
        found = self._segment(segment)
        bound = self._bound_s(timeout_s)
        if found.native.dead:
            raise error_from_status(found.native.dead, peer=found.endpoint, segment=found.name)
        for name in dict.fromkeys(info.transport for info in found.paths):
            self._by_name[name].flush(found.peer, found, bound)

    # ---- notifications -------------------------------------------------------------------------------------

    def notify(self, segment: Segment | int, message: bytes, *, timeout_s: float | None = None) -> None:
        """Send a message to a segment's owner; returns when it is queued there.

        Messages of one engine keep their order. QueueFull (retryable) when the owner does not take its
        notifications.
        """
        found = self._segment(segment)
        found.peer.lanes.call(NOTIFY, check_message(message, self.config), self._bound_s(timeout_s))

    def notifications(self, count_max: int = 64, *, timeout_s: float | None = 0.0) -> list[Notification]:
        """Take up to `count_max` messages, oldest first; waits up to `timeout_s` (None: for ever) for one."""
        self._check()
        if not 0 <= count_max <= U32_MAX:
            raise UsageError(f"count_max={count_max}: take from 0 to {U32_MAX} at once", field="count_max")
        return [Notification(*one) for one in self._server.take_notices(count_max, timeout_s)]

    def _bound_s(self, timeout_s: float | None) -> float:
        """A timeout in seconds, checked; the config's when none is given."""
        limit_ns = self.config.transfer_timeout_ms * NS_PER_MS if timeout_s is None else timeout_ns(timeout_s)
        return limit_ns / NS_PER_S

    # ---- measuring and ending ------------------------------------------------------------------------------

    def metrics(self) -> dict[str, Any]:
        """Counters, gauges, and latency histograms per path; `moonpool.metrics.render` makes text of them."""
        self._check()
        own = (self._server, self._control, self._workers)
        found = engine_metrics(self._openings, own, list(self._by_name.values()), self._started_s)
        found["counters"] |= self.transfers.counters()
        return found

    def close(self) -> None:
        """Withdraw the name, end all transfers, stop serving, and let go of memory.

        Each step is bounded by close_timeout_ms. Idempotent. Peers with transfers under way see PEER_GONE.
        """
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
            self._usable = False
        if self._pid != os.getpid():
            return
        forget_forks(self)
        if self._pages is not None:
            self._pages.close()
        timeout_s = self.config.close_timeout_ms / MS_PER_S
        with contextlib.suppress(MoonpoolError):  # the lease runs out by itself
            self._metadata.withdraw(self._lease)
        self._metadata.close()
        self.transfers.cancel_all()
        self._openings.close()
        self.transfers.close()
        self._server.close(timeout_s)
        self._control.close()
        for transport in self._by_name.values():
            transport.close()
        self._offering.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_problem: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise UsageError(
            "an engine cannot be pickled: it owns sockets and threads; make one in the other process"
        )

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise ForkedEngine()
        if self._closed:
            raise EngineClosed()

    # ---- hooks of the control service ----------------------------------------------------------------------

    def _describe(self, session: SessionInfo, _params: Any) -> dict[str, Any]:
        return {
            "name": self.name,
            "instance": self.instance,
            "generation": self._lease.record.generation,
            "regions": self._offering.describe(session.session_id),
        }

    def abandon_after_fork(self) -> None:
        """In a forked child: close its copies of our sockets, so that peers notice the parent's death."""
        self._usable = False
        if self._pages is not None:
            self._pages.close_after_fork()
        self._openings.abandon_after_fork()
        self._workers.forget_after_fork()
        self._server.close_after_fork()
        self._control.abandon_after_fork()
        for transport in self._by_name.values():
            transport.abandon_after_fork()
