"""Opening segments: name → endpoint → peer → regions → paths."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, final

from moonpool.config import EngineConfig
from moonpool.engine.control import ControlService, SessionInfo
from moonpool.engine.offering import Offering, table_room
from moonpool.engine.past import PastTotals
from moonpool.engine.peer_address import unix_name_of
from moonpool.engine.peers import Peer
from moonpool.engine.region import RemoteRegion
from moonpool.engine.segment import Segment
from moonpool.errors import AccessDenied, MoonpoolError, ProtocolError, Status, TransportUnavailable
from moonpool.ids import ANY_INSTANCE, HandleTable, InstanceId
from moonpool.metadata.base import Metadata, Record
from moonpool.native.io.lanes import set_notice_lanes
from moonpool.native.io.regions import LocalRegions
from moonpool.native.io.segment import NativeSegment
from moonpool.transport.base import Transport
from moonpool.units import MS_PER_S

#: How long a try of the same-host socket may take; a peer on this host answers far sooner.
UNIX_TRY_S = 1.0
#: How long the holder of a name that we want may take to answer.
HOLDER_TRY_S = 1.0


def holder_alive(control: ControlService, record: Record) -> bool:
    """Whether the holder of a name still answers as the instance that took it."""
    expected = None if record.instance == ANY_INSTANCE else record.instance
    try:
        control.connect(record.endpoint, expected, HOLDER_TRY_S).close()
    except MoonpoolError:
        return False
    return True


@final
class Openings:
    """The segments an engine has open, and its peers. Thread-safe; opening is serialised."""

    def __init__(
        self,
        config: EngineConfig,
        control: ControlService,
        offering: Offering,
        parts: tuple[Metadata, LocalRegions, Sequence[Transport]],
    ) -> None:
        self._config = config
        self._control = control
        self._offering = offering
        self._metadata, self._table, self._transports = parts
        self._opening = threading.Lock()
        self._lock = threading.Lock()
        self._segments: HandleTable[Segment] = HandleTable(config.peers_max, "peers_max")
        self._peers: dict[InstanceId, Peer] = {}
        self._past = PastTotals()

    def get(self, handle: int) -> Segment:
        """An open segment by handle; StaleHandle otherwise."""
        with self._lock:
            return self._segments.get(handle)

    @property
    def segments(self) -> list[Segment]:
        """All open segments."""
        with self._lock:
            return [segment for _handle, segment in self._segments.items()]

    def measured(self) -> tuple[list[Segment], list[dict[str, Any]], dict[str, int]]:
        """Segments open or closing, and what closed ones had moved: each segment is in one of the two."""
        with self._lock:
            closing, rows, counts = self._past.snapshot()
            return [segment for _handle, segment in self._segments.items()] + closing, rows, counts

    def open(self, name: str, timeout_s: float | None) -> Segment:
        """Open a segment by name. A peer that came back under its name is a new one."""
        with self._opening:
            record = self._metadata.resolve(name)
            peer = self._peer_at(record.endpoint, record.instance, timeout_s)
            try:
                return self._add_segment(peer, name)
            except BaseException:
                if not peer.segments:
                    self._drop_peer(peer)
                raise

    def refresh(self, segment: Segment) -> None:
        """Ask the owner for its regions again; new ones become usable, those that went become stale."""
        with self._opening:
            self._take_regions(segment.peer, segment)

    def close_segment(self, segment: Segment) -> None:
        """Close one segment: its handle is stale at once, its running batches end as CANCELLED.

        Returns when they have ended, within close_timeout_ms.
        """
        with self._lock:
            self._segments.remove(segment.handle)
            segment.handle = 0
            self._past.closing(segment)
        segment.native.mark_dead(int(Status.CANCELLED))
        segment.release(self._config.close_timeout_ms / MS_PER_S)
        last = segment.peer.remove(segment)
        self._past.closed(segment, last_of_peer=last)
        if last:
            self._drop_peer(segment.peer)

    def close(self) -> None:
        """Close every segment and peer."""
        for segment in self.segments:
            segment.native.mark_dead(int(Status.CANCELLED))
            segment.peer.lanes.shut()
        for segment in self.segments:
            self.close_segment(segment)

    def abandon_after_fork(self) -> None:
        """In a forked child: every segment is closed, and so are the child's copies of the sockets."""
        # Without the lock: another thread, which the child does not have, may have held it.
        for segment in [segment for _handle, segment in self._segments.items()]:
            segment.handle = 0
        for peer in self._peers.values():
            peer.abandon_after_fork()

    def own_region_added(self, handle: int) -> None:
        """Our own open segments learn of a new region of ours at once."""
        for segment in self.segments:
            if segment.peer.is_self:
                self.refresh(segment)
        del handle

    def own_region_gone(self, handle: int, timeout_s: float) -> bool:
        """Our own open segments forget a region; False when a batch still used it after the wait."""
        own = [segment for segment in self.segments if segment.peer.is_self]
        forgotten = [segment.forget(handle, timeout_s) for segment in own]  # all, whatever the first says
        return all(forgotten)

    def revoke(self, session: SessionInfo, params: Mapping[str, Any]) -> Any:
        """The method by which an owner takes regions back; answered when nothing of ours uses them."""
        handles = params.get("handles")
        if not isinstance(handles, list) or not all(type(handle) is int for handle in handles):
            raise ProtocolError("revoke takes a list of handles")
        return self._forget_soon(session.peer_instance, handles)

    async def _forget_soon(self, instance: InstanceId, handles: list[int]) -> dict[str, Any]:
        import asyncio

        peer = self._peers.get(instance)
        segments = list(peer.segments) if peer is not None else []
        timeout_s = self._config.revoke_timeout_ms / MS_PER_S
        for segment in segments:
            for handle in handles:
                if not await asyncio.to_thread(segment.forget, handle, timeout_s):
                    raise MoonpoolError(f"a transfer still uses region {handle:#x}")
        return {}

    def settle(self, session: SessionInfo, params: Mapping[str, Any]) -> Any:
        """The method by which an owner asks until when we write; answered when what runs now has ended."""
        if not isinstance(params.get("handles"), list):
            raise ProtocolError("settle takes a list of handles")
        return self._settle_soon(session.peer_instance)

    async def _settle_soon(self, instance: InstanceId) -> dict[str, Any]:
        import asyncio

        timeout_s = self._config.revoke_timeout_ms / MS_PER_S
        if not await asyncio.to_thread(self.drain, instance, timeout_s):
            raise MoonpoolError("a transfer still runs")
        return {}

    def drain(self, instance: InstanceId, timeout_s: float) -> bool:
        """Wait until what runs now on any segment of that peer has ended; False when it took too long."""
        with self._lock:
            found = {segment for _handle, segment in self._segments.items()}
            peer = self._peers.get(instance)
        if peer is not None:
            found |= set(peer.segments)
        mine = [segment for segment in found if segment.peer.instance == instance]
        return all(segment.native.drain(timeout_s) for segment in mine)

    def _peer_at(self, endpoint: str, instance: InstanceId, timeout_s: float | None) -> Peer:
        if endpoint == self._control.endpoint or instance == self._control.instance:
            return self._known(self._control.instance) or self._add_peer(self._own_peer())
        known = self._known(instance)
        if known is not None:
            return known
        expected = None if instance == ANY_INSTANCE else instance
        session = self._control.connect(endpoint, expected, timeout_s)
        found = session.peer_instance
        if found == self._control.instance:
            session.close()
            return self._known(found) or self._add_peer(self._own_peer())
        known = self._known(found)
        if known is not None:
            session.close()
            return known
        if any(transport.capabilities.over_unix for transport in self._transports):
            try:
                nearer = self._control.connect(unix_name_of(found), found, UNIX_TRY_S)
            except MoonpoolError:
                pass  # another host, another user, or another network namespace: tcp then
            else:
                session.close()
                session = nearer
        return self._add_peer(Peer(endpoint, found, session, (self._config, self._control.instance)))

    def _own_peer(self) -> Peer:
        instance = self._control.instance
        return Peer(self._control.endpoint, instance, None, (self._config, instance))

    def _known(self, instance: InstanceId) -> Peer | None:
        peer = self._peers.get(instance)
        return peer if peer is not None and peer.alive else None

    def _add_peer(self, peer: Peer) -> Peer:
        with self._lock:
            self._peers[peer.instance] = peer
        peer.watch(self._peer_gone)
        return peer

    def _peer_gone(self, peer: Peer) -> None:
        with self._lock:
            if self._peers.get(peer.instance) is peer:
                del self._peers[peer.instance]

    def _drop_peer(self, peer: Peer) -> None:
        with self._lock:
            if self._peers.get(peer.instance) is peer:
                del self._peers[peer.instance]
        peer.close(self._config.close_timeout_ms / MS_PER_S)

    def _add_segment(self, peer: Peer, name: str) -> Segment:
        # The peer may lend us a region; where in its table that lies we cannot know.
        room = table_room(self._config)
        native = NativeSegment(self._table, room, self._config.non_temporal_min_bytes)
        segment = Segment(peer, name, native)
        for transport in self._transports:
            segment.paths.extend(transport.connect(peer, segment))
        set_notice_lanes(native, peer.lanes)
        if not segment.paths:
            wanted = ", ".join(transport.name for transport in self._transports)
            raise TransportUnavailable(
                f"none of the configured transports ({wanted}) reaches {peer.endpoint}",
                "add 'tcp' to the config field transports (and 'local' for the engine's own segment)",
                peer=peer.endpoint,
                segment=name,
            )
        try:
            # Known to the peer before anything is mapped or granted: else a revoke that comes between
            # would be confirmed without a look at this segment.
            peer.add(segment)
            self._take_regions(peer, segment)
            with self._lock:
                segment.handle = self._segments.insert(segment)
        except BaseException:
            segment.native.mark_dead(int(Status.CANCELLED))
            segment.release(self._config.close_timeout_ms / MS_PER_S)
            peer.remove(segment)
            raise
        return segment

    def _take_regions(self, peer: Peer, segment: Segment) -> None:
        segment.again = False
        self._adopt_regions(peer, segment)
        if segment.again:
            self._adopt_regions(peer, segment)

    def _adopt_regions(self, peer: Peer, segment: Segment) -> None:
        if peer.is_self:
            regions = [RemoteRegion.parse(about) for about in self._offering.describe()]
        else:
            _name, regions = peer.describe()
        for region in segment.adopt(regions):
            # One at a time with whoever makes regions stale, who waits for it and then takes it back.
            with segment.changing:
                if segment.knows(region.handle):
                    self._reach(peer, segment, region)

    def _reach(self, peer: Peer, segment: Segment, region: RemoteRegion) -> None:
        reached = [transport.name for transport in self._transports if transport.reach(peer, segment, region)]
        if reached:
            segment.first_ways[region.handle] = reached[0]
        if reached or peer.is_self:
            return
        if segment.was_stale(region.handle):
            segment.forget(region.handle, 1.0)  # revoked between its description and our asking for it
        else:
            segment.note_unreachable(region.handle, "all", AccessDenied("no transport reaches it"))
