"""Serving our devices to peers that do not reach them: over tcp, RDMA without dma-buf, from another host.

Each such session gets two slots of host memory, a region that only its peer is told of. The peer asks, once a
window, to have a slot filled from our devices or emptied into them, and moves the slot's bytes itself, by any
transport. All methods but `close` run on the control thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, final

from moonpool.config import EngineConfig
from moonpool.errors import LimitExceeded, MoonpoolError, PeerStalled, ProtocolError, UsageError
from moonpool.native.device.runtime import DeviceRuntime
from moonpool.native.device.serving import ENTRY_BYTES, PIECES_MAX, Serving
from moonpool.transport.base import Host, OwnerSession, OwnRegion
from moonpool.units import MS_PER_S

logger: Final = logging.getLogger("moonpool.cuda")

#: Where the slots are said to lie: memory of the host that is no place for anything else.
SLOTS_LOCATION: Final = "cpu:slots"
#: How often a copy is asked whether it has ended: first, and at most.
_ASK_S: Final = 0.0002
_ASK_MOST_S: Final = 0.02
#: How long a lent region is waited for when its session has ended: nobody else knows it.
_TAKE_BACK_S: Final = 0.05
#: Memory that a copy may still touch: leaking it is the only safe thing left.
_never_freed: list[object] = []


@final
@dataclass(slots=True, eq=False)
class _Served:
    """One session's slots."""

    region: OwnRegion
    serving: Serving
    pinned: bool
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: The slot of the window whose answer the peer has not had yet, and what waits for its copies.
    open_slot: int | None = None
    watch: asyncio.Task[None] | None = None


def pin_memory(runtime: DeviceRuntime, region: OwnRegion) -> bool:
    """Pin a region's memory; False, and a line in the log, where that cannot be: copies are slower then."""
    try:
        runtime.pin(region.address, region.size_bytes)
    except MoonpoolError as problem:
        logger.warning("staging memory is not pinned: %s", str(problem))
        return False
    return True


@final
class DeviceServing:
    """The sessions that are served; at most `device_sessions_max`."""

    def __init__(self, config: EngineConfig, runtime: DeviceRuntime, host: Host, slot_bytes: int) -> None:
        self._config, self._runtime, self._host = config, runtime, host
        self._slot_bytes = slot_bytes
        self._served: dict[int, _Served] = {}
        self._opening: set[int] = set()
        #: Of sessions that have ended while copies ran.
        self._ending: list[_Served] = []
        self._ended_bytes = 0

    @property
    def sessions(self) -> int:
        """How many peers are served now."""
        return len(self._served)

    @property
    def served_bytes(self) -> int:
        """Bytes copied for peers since the beginning."""
        return self._ended_bytes + sum(one.serving.served_bytes for one in list(self._served.values()))

    async def open(self, session: OwnerSession) -> Mapping[str, Any]:
        """Give a session slots; it learns of them when it asks for our regions again."""
        number = session.session_id
        if number not in self._served:
            if number in self._opening:
                raise UsageError("the slots of this session are being made already")
            if len(self._served) + len(self._opening) >= self._config.device_sessions_max:
                raise LimitExceeded(
                    f"{self._config.device_sessions_max} peers are served from our devices already: "
                    "raise device_sessions_max",
                    field="device_sessions_max",
                    limit=self._config.device_sessions_max,
                )
            self._opening.add(number)
            try:
                # Making and pinning memory takes milliseconds: not on this thread.
                self._served[number] = await asyncio.to_thread(self._make, number)
            finally:
                self._opening.discard(number)
        return {"slot_bytes": self._slot_bytes}

    def _make(self, number: int) -> _Served:
        region = self._host.lend(2 * self._slot_bytes, SLOTS_LOCATION, number)
        pinned = pin_memory(self._runtime, region)
        serving = Serving(self._runtime, self._host.table, region.address, self._slot_bytes, region)
        return _Served(region, serving, pinned)

    async def stage(self, session: OwnerSession, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Begin a window's copies, if entries come along, and tell how those of the window before ended."""
        slot, write, entries = params.get("slot"), params.get("write"), params.get("entries")
        if slot not in (0, 1) or type(write) is not bool or not isinstance(entries, bytes):
            raise ProtocolError("a window is a slot (0 or 1), whether to write, and its entries")
        if len(entries) % ENTRY_BYTES or len(entries) > PIECES_MAX * ENTRY_BYTES:
            raise ProtocolError(f"a window has at most {PIECES_MAX} entries of {ENTRY_BYTES} bytes")
        served = self._served.get(session.session_id)
        if served is None:
            raise UsageError("this session has no slots: ask cuda.open first")
        async with served.turn:
            return await self._stage(served, int(slot), write, entries)

    async def _stage(self, served: _Served, slot: int, write: bool, entries: bytes) -> Mapping[str, Any]:
        before, watch = served.open_slot, served.watch
        statuses = b""
        if before is not None and (before == slot or not entries):
            # The same slot: its copies must have ended first.
            statuses, before = await self._finish(served, before, watch), None
        if entries:
            served.serving.start(slot, write, entries)
            served.open_slot = slot
            served.watch = asyncio.ensure_future(self._watch(served.serving, slot))
        if before is not None:
            statuses = await self._ended(served.serving, before, watch)
        return {"statuses": statuses}

    async def _finish(self, served: _Served, slot: int, watch: asyncio.Task[None] | None) -> bytes:
        statuses = await self._ended(served.serving, slot, watch)
        served.open_slot = served.watch = None
        return statuses

    async def _ended(self, serving: Serving, slot: int, watch: asyncio.Task[None] | None) -> bytes:
        if watch is not None:
            stall_s = self._config.stall_timeout_ms / MS_PER_S
            await asyncio.wait({watch}, timeout=stall_s)
            if not watch.done():
                raise PeerStalled("a device copies nothing any more")
        return serving.take(slot)

    async def _watch(self, serving: Serving, slot: int) -> None:
        """Ask until the copies have ended, so that a revoke, which waits for them, hears of it."""
        nap_s = _ASK_S
        while not serving.done(slot):
            await asyncio.sleep(nap_s)
            nap_s = min(nap_s * 1.5, _ASK_MOST_S)

    def session_ended(self, number: int) -> None:
        """Its slots go as soon as no copy touches them."""
        served = self._served.pop(number, None)
        if served is None:
            return
        if served.watch is None or served.watch.done():
            self._let_go(served)
        else:
            self._ending.append(served)
            served.watch.add_done_callback(lambda _task: self._ended_late(served))

    def _ended_late(self, served: _Served) -> None:
        if served in self._ending:
            self._ending.remove(served)
            self._let_go(served)

    def _let_go(self, served: _Served) -> None:
        served.watch = None
        self._ended_bytes += served.serving.served_bytes
        whole = served.serving.close()
        if whole and served.pinned:
            with contextlib.suppress(MoonpoolError):
                self._runtime.unpin(served.region.address)
        if not self._host.take_back(served.region.handle, _TAKE_BACK_S) or not whole:
            _never_freed.append(served)

    def close(self, timeout_s: float) -> None:
        """The control thread has ended: wait, bounded, for the copies that run."""
        until = time.monotonic() + timeout_s
        left = [*self._served.values(), *self._ending]
        self._served.clear()
        self._ending.clear()
        for served in left:
            while not served.serving.close() and time.monotonic() < until:
                time.sleep(_ASK_S)
            self._let_go(served)
