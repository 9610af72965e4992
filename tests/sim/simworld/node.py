"""A node process: the production `NodeCore` and `Directory` between modelled memory, lanes and a leader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moonpool.bench.chaos_history import content_digest
from moonpool.errors import ProtocolError, UsageError
from moonpool.native.io.grants import make_grant, read_grant
from moonpool.store.directory import Directory, Header, directory_bytes, entry_offset
from moonpool.store.errors import StaleEpoch
from moonpool.store.node_core import CoreLimits, NodeCore, Phase
from moonpool.store.node_segment import CoreSegment
from simworld.calls import Caller, dial
from simworld.fencing import EngineFencing
from simworld.loop import MS, Future
from simworld.memory import CopyOptions, Engine, SegmentMemory
from simworld.network import End, Network
from simworld.process import Process

LOG_BYTES = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What a node offers, and its times."""

    name: str
    masters: list[str]
    capacity_bytes: int
    slots: int
    segments: int = 1
    beat_ms: int = 200
    call_timeout_ms: int = 1_000


class Node:
    """One incarnation of one node process. Its memory is new."""

    def __init__(self, process: Process, network: Network, birth: str, options: NodeOptions) -> None:
        self.process = process
        self.name = options.name
        self._network = network
        self._options = options
        self.instance = process.loop.chance.randbytes(16)
        self.view_endpoint = f"view:{birth}"
        self.engine = Engine(process, network, f"engine:{birth}", CopyOptions())
        self.engine.check_grant = self._admits
        self.memories = [self._memory(number) for number in range(options.segments)]
        self.fencing = EngineFencing(process, self.engine, self.memories)
        identity = {
            "name": options.name,
            "host": process.host,
            "instance": self.instance,
            "engine_endpoint": self.engine.endpoint,
            "view_endpoint": self.view_endpoint,
        }
        segments = [self._core_segment(number) for number in range(options.segments)]
        self.core = NodeCore(identity, segments, self.fencing, CoreLimits(report_page_bytes=1_024))
        #: The key that grants are checked with, and the moment its clock began: both of one join.
        self._grants: tuple[bytes, int] = (b"", 0)
        self._wake: Future[None] = Future()
        self._caller: Caller | None = None
        self._leaving = False
        self._turn = process.loop.chance.randrange(len(options.masters))
        network.listen(process, self.view_endpoint, self._accept_view)
        process.spawn(self._live())
        process.spawn(self._hash())

    @property
    def is_active(self) -> bool:
        return self.core.phase is Phase.ACTIVE

    def _memory(self, number: int) -> SegmentMemory:
        slots = self._options.slots
        directory = bytearray(directory_bytes(slots, LOG_BYTES))
        return SegmentMemory(f"{self.name}/{number}", self._options.capacity_bytes, directory)

    def _core_segment(self, number: int) -> CoreSegment:
        slots, capacity = self._options.slots, self._options.capacity_bytes
        header = Header(0, slots, 1, capacity, 0, entry_offset(slots, slots), LOG_BYTES, self.instance)
        about = {
            "name": f"{self.name}/{number}",
            "tier": 2,
            "kind": 1,
            "location": "cpu:0",
            "data": self._handle(number),
            "directory": self._handle(number) + 1,
        }
        return CoreSegment(about=about, directory=Directory(self.memories[number].directory, header))

    def _handle(self, number: int) -> int:
        return (1 << 32) + 2 * number + 1

    # ---- the data plane ---------------------------------------------------------------------------

    def _admits(self, segment: int, offset: int, length: int, grant: bytes) -> bool:
        """Whether a WRITE over a lane may begin, as the engine checks its grant."""
        memory = self.engine.segments[segment]
        number = self.memories.index(memory)
        start, extent, deadline_ms, tag, _ = read_grant(grant)
        key, zero_ms = self._grants
        now_ms = self.process.clock.now_ms()
        if not key or make_grant(key, self._handle(number), start, extent, deadline_ms, tag) != grant:
            return False
        if now_ms - zero_ms >= deadline_ms or self.fencing.is_denied(number, start, tag, now_ms):
            return False
        return start <= offset and offset + length <= start + extent

    def _accept_view(self, end: End) -> None:
        def asked(message: list[Any]) -> None:
            _, number, method, params = message
            assert method == "view_open"
            try:
                end.send([1, number, None, list(self.core.views.open(end.key, params[0]))])
            except UsageError as wrong:
                end.send([1, number, [65, "BAD_PARAMS", str(wrong)], None])

        end.on_message = asked
        end.on_close = lambda: self._view_ended(end)

    def _view_ended(self, end: End) -> None:
        self.core.views.holder_gone(end.key)

    async def _hash(self) -> None:
        while True:
            job = self.core.hashing.take()
            if job is None:
                await self.process.sleep(20 * MS)
                continue
            await self.process.sleep(self.process.loop.chance.randint(10, 2_000))
            data = self.memories[job.place.segment].data[job.offset : job.offset + job.size]
            self.core.hashing.hashed(job, content_digest(data), b"")

    # ---- the leader -------------------------------------------------------------------------------

    def leave(self, ended: Callable[[], None]) -> None:
        """Says goodbye to the master, if there is one, and ends."""
        if not self._leaving:
            self._leaving = True
            self.process.spawn(self._leave(ended))

    async def _leave(self, ended: Callable[[], None]) -> None:
        if self._caller is not None and self.core.phase is Phase.ACTIVE:
            await self._caller.call("node_leave", [], self._options.call_timeout_ms)
        ended()
        # Not from within one of its own tasks.
        self.process.loop.after(0, self.process.kill)

    async def _live(self) -> None:
        while not self._leaving:
            self._turn += 1
            masters = self._options.masters
            caller = await dial(self.process, self._network, masters[self._turn % len(masters)])
            if caller is not None:
                self._caller = caller
                await self._serve(caller)
                self._caller = None
                caller.close()
                self.core.lost()
            await self.process.sleep(self.process.loop.chance.randint(5 * MS, 60 * MS))

    async def _serve(self, caller: Caller) -> None:
        """One connection: join, report, acknowledge, until something is wrong."""
        try:
            now_ms = self.process.clock.now_ms()
            params = self.core.join_params(now_ms)
            answer = await caller.call("node_join", params, self._options.call_timeout_ms)
            if answer is None or answer[0] is not None:
                return
            caller.on_push = lambda method, params: self._pushed(caller, params)
            self.core.joined(answer[1])
            self._grants = (self.core.grant_key, now_ms)
            for segment, memory in zip(self.core.segments, self.memories, strict=True):
                self.engine.segments[segment.id] = memory
            if await self._report(caller):
                await self._acknowledge(caller)
        except (StaleEpoch, ProtocolError):
            return

    async def _report(self, caller: Caller) -> bool:
        while (page := self.core.next_page()) is not None:
            answer = await caller.call("node_report", page, self._options.call_timeout_ms)
            if answer is None or answer[0] is not None:
                return False
            self.core.page_answered(answer[1])
        return True

    async def _acknowledge(self, caller: Caller) -> None:
        said_ms = told = 0
        while caller.is_open and self.core.phase is Phase.ACTIVE:
            now_ms = self.process.clock.now_ms()
            urgent = self.core.tick(now_ms) or self.core.applied != told
            if urgent or now_ms - said_ms >= self._options.beat_ms:
                params = None if self._leaving else self.core.ack_params(now_ms)
                if params is not None:
                    said_ms = now_ms
                    told = self.core.applied
                    answer = await caller.call("node_ack", params, self._options.call_timeout_ms)
                    if answer is None or answer[0] is not None:
                        return
                    self.core.ack_answered(answer[1])
            self._wake = Future()
            self.process.after(20 * MS, self._nudge)
            await self._wake

    def _nudge(self) -> None:
        self._wake.set(None)

    def _pushed(self, caller: Caller, params: list[Any]) -> None:
        try:
            epoch, first, effects = params
            self.core.effects(epoch, first, effects, self.process.clock.now_ms())
        except (StaleEpoch, ProtocolError):
            caller.close()
        self._nudge()
