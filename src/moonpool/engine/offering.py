"""What this engine offers: its regions, described, mapped, granted and revoked over control sessions."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast, final

from moonpool.config import EngineConfig
from moonpool.engine.control import ControlService, Handler, Reply, SessionInfo
from moonpool.engine.grants import GrantBook
from moonpool.engine.region import KEY_BYTES, Region
from moonpool.engine.writers import WriterBook
from moonpool.errors import (
    AccessDenied,
    LimitExceeded,
    MoonpoolError,
    PeerGone,
    PeerStalled,
    RevokeIncomplete,
    StaleHandle,
    UnsupportedOperation,
)
from moonpool.native.io.memory import BufferHold, SharedMemory, create_memory
from moonpool.native.io.regions import LocalRegions
from moonpool.native.io.server import TargetServer
from moonpool.operations import Access
from moonpool.transport.base import Answered, Backing, Mappable, OnDevice, OwnMethod, Transport
from moonpool.units import MS_PER_S

#: Regions of closed engines that a thread could still touch: leaking them is the only safe thing left.
_never_freed: list[Region] = []
#: The bit of the native table that says that this process may read into a region.
LOCAL_WRITABLE = 4
#: The bit of the native table that says that WRITEs over lanes show a grant.
GRANTED = 8
#: The bit of the native table for bytes that have no address in this process.
UNMAPPED = 16
#: With it: the table's address is one of a device.
DEVICE = 32


def table_room(config: EngineConfig) -> int:
    """Places in a table of regions: those of users, and those that transports lend."""
    lent = 1 + config.device_sessions_max if "cuda" in config.transports else 0
    return config.regions_max + lent


@final
class Offering:
    """The regions of one engine. Thread-safe; handlers run on the control thread."""

    def __init__(self, config: EngineConfig, table: LocalRegions, transports: Sequence[Transport]) -> None:
        self._config = config
        self._table = table
        self._transports = transports
        self._lock = threading.Lock()
        self._regions: dict[int, Region] = {}
        self._read_only_fds: dict[int, int] = {}
        #: Revoked, but a batch or a lane thread that saw them alive has not ended yet.
        self._undrained: list[Region] = []
        #: Revoked, and what backs them is to be closed once no batch and no peer can touch it, by handle.
        self._unclosed: dict[int, Region] = {}
        #: Revoked, but a transport says that a peer may still reach them; asked again now and then.
        self._unforgotten: dict[int, Region] = {}
        #: Regions for one session's peer, by its id, or for this engine's own use (None).
        self._lent: dict[int, int | None] = {}
        self.grants = GrantBook()
        self.writers = WriterBook()

    def add(
        self,
        source: SharedMemory | BufferHold | Backing,
        access: Access,
        location: str,
        *,
        granted: bool = False,
    ) -> Region:
        """Register memory and return its region; the region keeps it in place."""
        with self._lock:
            live = len(self._regions) - len(self._lent)
        if live >= self._config.regions_max:
            raise LimitExceeded(
                f"all {live} regions are in use: revoke some, or raise regions_max",
                field="regions_max",
                limit=live,
            )
        region = self._enter(source, access, location, granted)
        with self._lock:
            self._regions[region.handle] = region
        return region

    def _enter(
        self, source: SharedMemory | BufferHold | Backing, access: Access, location: str, granted: bool
    ) -> Region:
        memory = source if isinstance(source, SharedMemory) else None
        hold = source if isinstance(source, BufferHold) else None
        read_key, write_key = secrets.token_bytes(KEY_BYTES), secrets.token_bytes(KEY_BYTES)
        bits = int(access) | (LOCAL_WRITABLE if source.writable else 0) | (GRANTED if granted else 0)
        device_address = source.device_address if isinstance(source, OnDevice) else 0
        bits |= (0 if source.address else UNMAPPED) | (DEVICE if device_address else 0)
        self.let_go()
        address = source.address or device_address
        handle = self._table.add(address, source.size_bytes, bits, read_key, write_key)
        draft = Region(
            handle=handle,
            address=source.address,
            size_bytes=source.size_bytes,
            access=access,
            location=location,
            memory=memory,
            hold=hold,
            backing=None if memory is not None or hold is not None else cast("Backing", source),
            device_address=device_address,
            read_key=read_key,
            write_key=write_key,
        )
        return self._publish(draft)

    def _publish(self, draft: Region) -> Region:
        """The live region, with what each transport publishes of it; nothing is left when one fails."""
        try:
            attributes = {t.name: a for t in self._transports if (a := t.attribute(draft)) is not None}
            region = replace(draft, attributes=attributes)
            for transport in self._transports:
                transport.registered(region)
        except BaseException:
            self._table.remove(draft.handle, 0.0)
            for transport in self._transports:
                transport.forget(draft, 0.0)
            raise
        return region

    @property
    def regions(self) -> list[Region]:
        """Live regions, by address, but for what is lent."""
        with self._lock:
            shown = [region for region in self._regions.values() if region.handle not in self._lent]
        return sorted(shown, key=lambda region: region.address)

    def lend(self, size_bytes: int, location: str, session_id: int | None) -> Region:
        """Engine memory for one session's peer, or for this engine's own transfers; `take_back` undoes it."""
        access = Access.NONE if session_id is None else Access.READ_WRITE
        region = self._enter(create_memory(size_bytes), access, location, False)
        with self._lock:
            self._lent[region.handle] = session_id
            self._regions[region.handle] = region
        return region

    def take_back(self, handle: int, timeout_s: float) -> bool:
        """Revoke a lent region without asking anybody: its peer is gone, or has no use for it any more."""
        with self._lock:
            self._lent.pop(handle, None)
            region = self._regions.pop(handle, None)
            fd = self._read_only_fds.pop(handle, None)
        if fd is not None:
            os.close(fd)
        if region is None:
            return True
        self.writers.forget_region(handle)
        drained = self._table.remove(handle, timeout_s)
        self.grants.settle(handle, set(), region)
        forgotten = [transport.forget(region, timeout_s) for transport in self._transports]
        if not drained or not all(forgotten):
            self._undrained.append(region)
        return drained

    def get(self, handle: int) -> Region:
        """A live region by handle; StaleHandle otherwise."""
        with self._lock:
            region = self._regions.get(handle)
        if region is None:
            raise StaleHandle(region=handle)
        return region

    def handlers(self) -> dict[str, Handler]:
        """The control methods that concern regions, apart from `describe`."""
        lent = {
            name: _own_method(method)
            for transport in self._transports
            for name, method in transport.methods().items()
        }
        return lent | {
            "map": self._map,
            "grant_vm": self._grant_vm,
            "release": self._release,
            "probe": lambda _s, _p: {},
        }

    def describe(self, session_id: int | None = None) -> list[dict[str, Any]]:
        """The published regions: those that peers may use at all, and what is lent to this session's."""
        shown = [region for region in self.regions if region.access]
        if session_id is not None:
            with self._lock:
                lent = [self._regions[handle] for handle, of in self._lent.items() if of == session_id]
            return [region.describe() for region in shown] + [one.describe() | {"lent": True} for one in lent]
        return [region.describe() for region in shown]

    def revoke(self, handle: int, control: ControlService, server: TargetServer) -> None:
        """Make a region stale everywhere and return when nobody can touch its memory any more.

        RevokeIncomplete when somebody may still: then the memory is kept until a batch of ours or a process
        that could write it has ended.
        """
        region = self.get(handle)
        self.let_go()
        timeout_s = self._config.revoke_timeout_ms / MS_PER_S
        with self._lock:
            self._regions.pop(handle, None)
            fd = self._read_only_fds.pop(handle, None)
        self.writers.forget_region(handle)
        if fd is not None:
            os.close(fd)
        drained = self._table.remove(handle, timeout_s)
        if not drained:
            server.kick_busy()
            drained = self._table.drain(timeout_s)
        if not drained:
            self._undrained.append(region)
        gone, silent = self._ask_holders(handle, control, timeout_s)
        unconfirmed = gone | silent | self.grants.vm_holders_alive(handle)
        kept = self.grants.settle(handle, unconfirmed, region)
        forgotten = [transport.forget(region, timeout_s) for transport in self._transports]
        if not all(forgotten):
            self._unforgotten[handle] = region
        elif region.backing is not None:
            self._unclosed[handle] = region
            self.let_go()
        if kept or silent or not drained or not all(forgotten):
            raise RevokeIncomplete(
                "a peer did not confirm the revoke in time; "
                "the region is stale and its memory is kept until that is safe",
                region=handle,
                timeout_ms=self._config.revoke_timeout_ms,
            )

    def let_go(self) -> None:
        """Close and forget what revoked regions have kept, as far as that is safe by now. Never waits."""
        self.grants.sweep()
        for handle, late in list(self._unforgotten.items()):
            forgotten = [transport.forget(late, 0.0) for transport in self._transports]  # each is asked
            if all(forgotten):
                del self._unforgotten[handle]
                self._unclosed[handle] = late
        waiting = list(self._unclosed)
        if not (waiting or self._undrained) or not self._table.drain(0.0):
            return
        self._undrained.clear()
        for handle in waiting:
            region = None if self.grants.keeps(handle) else self._unclosed.pop(handle, None)
            if region is not None and region.backing is not None:
                region.backing.close()

    def _ask_holders(
        self, handle: int, control: ControlService, timeout_s: float
    ) -> tuple[set[int], set[int]]:
        """The sessions that ended while they were asked, and those that did not confirm."""
        holders = self.grants.holders(handle)
        for transport in self._transports:
            holders |= transport.holders(handle)
        if not holders:
            return set(), set()
        answers = control.call_peers("revoke", {"handles": [handle]}, timeout_s, holders)
        failed = {session for session, answer in answers.items() if isinstance(answer, MoonpoolError)}
        gone = {session for session in failed if isinstance(answers[session], PeerGone)}
        for session in failed - gone:
            control.close_session(session, PeerStalled("a revoke was not confirmed in time"))
        confirmed = set(answers) - failed
        self.grants.confirmed(handle, confirmed)
        return gone, failed - gone

    def session_ended(self, session: SessionInfo, _reason: MoonpoolError) -> None:
        """A session is closed: it is given nothing more. On the control thread."""
        self.grants.session_ended(session.session_id)
        self.writers.session_ended(session.session_id)
        for transport in self._transports:
            transport.session_ended(session.session_id)
        self.let_go()

    def close(self) -> None:
        """Close descriptors; memory goes with its last reference. The transports are closed already."""
        with self._lock:
            fds, self._read_only_fds = list(self._read_only_fds.values()), {}
            if not self._table.drain(0.0):
                kept = (*self._regions.values(), *self._undrained, *self._unclosed.values())
                _never_freed.extend((*kept, *self._unforgotten.values()))
            else:
                late = (*self._unclosed.values(), *self._unforgotten.values())
                for region in (*self._regions.values(), *late):
                    if region.backing is not None:
                        region.backing.close()
            self._regions.clear()
            self._undrained.clear()
            self._unclosed.clear()
            self._unforgotten.clear()
        for fd in fds:
            os.close(fd)
        self.grants.close()
        self.writers.close()

    # On the control thread

    def _asked_region(self, session: SessionInfo, params: Mapping[str, Any]) -> tuple[Region, Access]:
        if not session.is_unix:
            raise UnsupportedOperation("memory is passed over unix sockets only")
        handle, access = params.get("handle"), params.get("access")
        if type(handle) is not int or type(access) is not int or not 0 <= access <= int(Access.READ_WRITE):
            raise UnsupportedOperation("a region is asked for by an integer handle and access bits")
        region = self.get(handle)
        if self._lent.get(handle, session.session_id) != session.session_id:
            raise StaleHandle(region=handle)
        if access & ~int(region.access) or not access:
            raise AccessDenied(f"the region does not allow access {access}", region=handle)
        return region, Access(access)

    def _map(self, session: SessionInfo, params: Mapping[str, Any]) -> Reply:
        region, access = self._asked_region(session, params)
        writable = bool(access & Access.WRITE)
        if isinstance(region.backing, Mappable):
            return self._map_backing(session, region, region.backing, writable)
        if region.memory is None:
            raise UnsupportedOperation(
                "the region is not engine memory and cannot be mapped", region=region.handle
            )
        self.note_given(region.handle, session, writes=writable)
        fd = region.memory.fd if writable else self._read_only_fd(region, region.memory)
        return Reply({"offset": 0, "size": region.memory.size_bytes, "writable": writable}, [fd])

    def _map_backing(self, session: SessionInfo, region: Region, backing: Mappable, writable: bool) -> Reply:
        """As engine memory; but its bytes outlive the region, so whoever may write them is waited for."""
        if writable and session.peer_pid is None:
            raise UnsupportedOperation("a device is passed only to a process that the kernel names")
        self.note_given(region.handle, session, process_vm=writable, writes=writable)
        fd, offset, size = backing.share(writable=writable)
        return Reply({"offset": offset, "size": size, "writable": writable}, [fd])

    def _read_only_fd(self, region: Region, memory: SharedMemory) -> int:
        with self._lock:
            if region.handle not in self._read_only_fds:
                self._read_only_fds[region.handle] = memory.read_only_fd()
            return self._read_only_fds[region.handle]

    def _release(self, session: SessionInfo, _params: Mapping[str, Any]) -> dict[str, Any]:
        self.grants.release(session.session_id)
        self.writers.release(session.session_id)
        for transport in self._transports:
            transport.session_ended(session.session_id)
        return {}

    def _grant_vm(self, session: SessionInfo, params: Mapping[str, Any]) -> dict[str, Any]:
        region, access = self._asked_region(session, params)
        if session.peer_pid is None:
            raise UnsupportedOperation("process_vm is granted only to a process that the kernel names")
        self.note_given(region.handle, session, writes=bool(access & Access.WRITE), process_vm=True)
        return {}

    def note_given(
        self, handle: int, session: SessionInfo, *, writes: bool, process_vm: bool = False
    ) -> None:
        """Put it into the book while the region is live: a revoke that comes later then sees it."""
        with self._lock:
            if handle not in self._regions:
                raise StaleHandle(region=handle)
            self.grants.note(handle, session, process_vm=process_vm)
            if writes:
                self.writers.note(handle, session)


def _own_method(method: OwnMethod) -> Handler:
    """A transport's control method as a handler of the control service."""

    def answer(session: SessionInfo, params: Mapping[str, Any]) -> object:
        outcome = method(session, params)
        return Reply(outcome.result, outcome.fds) if isinstance(outcome, Answered) else outcome

    return answer
