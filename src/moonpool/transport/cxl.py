"""`cxl`: far memory (a DAX device, memory of a numa node) that every attached process maps by itself.

A peer on the same host gets the owner's descriptor over the unix session, as with `shm`: the kernel has shown
its uid, and what it could do with the descriptor it could do by opening the device. A peer on another host
that is attached to the same memory maps its own device; both sides' configs must name that memory
(`cxl_shared`), because nothing but the administrator's word says that the two devices are one.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

from moonpool.config import EngineConfig
from moonpool.errors import (
    AccessDenied,
    MoonpoolError,
    ProtocolError,
    TransportUnavailable,
    UnsupportedOperation,
)
from moonpool.native.cxl.mapping import FarMapping, cache_line_kernel
from moonpool.native.cxl.path import FarView, add_far_path, bad_memory_faults, catch_bad_memory, reach_far
from moonpool.native.io.memory import MAPPING_BYTES_MAX, SharedMemory, map_memory
from moonpool.operations import Access
from moonpool.topology import read_topology
from moonpool.transport import cxl_attribute, dax_device
from moonpool.transport.base import (
    Availability,
    Backing,
    Capabilities,
    Host,
    OwnerSession,
    OwnMethod,
    OwnRegion,
    PathInfo,
    PeerSide,
    RemoteRegionSide,
    SegmentSide,
)
from moonpool.transport.cxl_attribute import DaxRange
from moonpool.transport.cxl_holders import HolderBook
from moonpool.transport.dax_device import DaxBacking
from moonpool.transport.plain import PlainTransport
from moonpool.units import MS_PER_S, format_size

SOFTWARE: Final = "software"
ATTACH: Final = "cxl.attach"
DETACH: Final = "cxl.detach"
#: How many stall timeouts an engine of another host gets to notice that its session has ended.
QUARANTINE_STALLS: Final = 2
#: Locations of engine memory that peers reach by this transport: `Engine.allocate` binds them to a numa node.
BOUND: Final = ("numa:", "cxl:")


def available() -> Availability:
    """Always possible where the native modules are; the reason says what far memory this host has."""
    topology = read_topology()
    found = [
        f"{dax.name} ({format_size(dax.size_bytes or 0)})" for dax in topology.dax_devices if dax.mappable
    ]
    found += [f"numa node {node.id} ({format_size(node.memory_bytes)})" for node in topology.far_nodes]
    if found:
        return Availability(True, f"far memory here: {', '.join(found)}")
    advice = "far memory is a CXL or persistent-memory device as /dev/dax* (daxctl) or as a numa node"
    return Availability(True, "no far memory here: only numa nodes with CPUs can be named", advice)


@final
class CxlTransport(PlainTransport):
    """Far memory of this engine, and copies into and out of what peers offer."""

    name = "cxl"
    capabilities = Capabilities(same_process=True, same_host=True, other_hosts=True, over_unix=True)

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._software = config.cxl_coherence == SOFTWARE
        self._host: Host | None = None
        self._lock = threading.Lock()
        self._holders = HolderBook(QUARANTINE_STALLS * config.stall_timeout_ms / MS_PER_S)

    def open(self, host: Host) -> None:
        """TransportUnavailable when caches have to be kept coherent by hand and the CPU cannot do it."""
        if self._software and not cache_line_kernel():
            raise TransportUnavailable(
                "cxl_coherence='software' needs a CPU whose cache lines a program can write back (x86-64)",
                "use memory that the hosts' hardware keeps coherent, and cxl_coherence='coherent'",
                transport=self.name,
            )
        catch_bad_memory()
        self._host = host

    def takes(self, location: str) -> bool:
        """Ranges of DAX devices."""
        return location.startswith(dax_device.PREFIX)

    def offer(self, location: str, size_bytes: int | None, how: Mapping[str, Any]) -> Backing:
        """Map and lock a range of "dax:<device>"; option `offset` in bytes. Its bytes are as they were."""
        with self._lock:
            self._holders.sweep(time.monotonic())
        return dax_device.offer_range(location, size_bytes, how, software=self._software)

    def attribute(self, region: OwnRegion) -> bytes | None:
        """The range of the device, or that the region is engine memory of a numa node."""
        if isinstance(region.backing, DaxBacking):
            return cxl_attribute.pack_dax(region.backing.about)
        if region.memory is not None and region.location.startswith(BOUND):
            return cxl_attribute.pack_node()
        return None

    # ---- of the initiator ----------------------------------------------------------------------------------

    def connect(self, peer: PeerSide, segment: SegmentSide) -> Sequence[PathInfo]:
        """One path; on another host only when this engine's config names shared memory."""
        if not peer.is_self and not peer.session.is_unix and not self.config.cxl_shared:
            return ()
        return (PathInfo(add_far_path(segment.native), self.name, "cpu", peer.endpoint),)

    def reach(self, peer: PeerSide, segment: SegmentSide, region: RemoteRegionSide) -> bool:
        """Map the region here: by the owner's descriptor, or by this host's own device."""
        published = region.attributes.get(self.name)
        if published is None or region.handle in segment.mappings:
            return False  # not far memory; or shm has mapped it already, and the bytes are the same
        try:
            about = cxl_attribute.parse(published)
            if about is not None and about.length < region.size_bytes:
                raise ProtocolError("the peer's far region is longer than the range it lies in")
            view = self._view(peer, segment, region, about)
        except MoonpoolError as problem:
            segment.note_unreachable(region.handle, self.name, problem)
            return False
        if view is None:
            return False
        reach_far(segment.native, region.handle, view)
        segment.hold(region.handle, view)
        return True

    def _view(
        self, peer: PeerSide, segment: SegmentSide, region: RemoteRegionSide, about: DaxRange | None
    ) -> FarView | None:
        if peer.is_self:
            return self._own_view(region.handle)
        if peer.session.is_unix:
            return self._passed_view(peer, segment, region, about)
        if about is not None and about.identity in self.config.cxl_shared:
            return self._attached_view(peer, region, about)
        return None

    def _own_view(self, handle: int) -> FarView | None:
        assert self._host is not None
        region = self._host.region(handle)
        if isinstance(region.backing, DaxBacking):
            return FarView(
                region.backing.mapped_at,
                region.size_bytes,
                None,
                writable=True,
                by_hand=region.backing.about.software_coherence,
            )
        return FarView(region.address, region.size_bytes, None, writable=True) if region.address else None

    def _passed_view(
        self, peer: PeerSide, segment: SegmentSide, region: RemoteRegionSide, about: DaxRange | None
    ) -> FarView:
        with peer.request("map", {"handle": region.handle, "access": int(region.access)}) as answer:
            told = answer.value if isinstance(answer.value, Mapping) else {}
            offset, size, writable = told.get("offset"), told.get("size"), told.get("writable") is True
            if len(answer.fds) != 1 or type(offset) is not int or type(size) is not int:
                raise ProtocolError("the answer to map is one descriptor, an offset and a size")
            if offset < 0 or not offset + region.size_bytes <= size <= MAPPING_BYTES_MAX:
                raise ProtocolError(
                    f"a region of {region.size_bytes} bytes at {offset} is not inside {size} bytes"
                )
            (fd,) = answer.take_fds()
        if about is None:
            memory = map_memory(fd, size, writable=writable)
            segment.mappings[region.handle] = memory  # who reads in place looks for it there
            kept = _Kept(memory)
            return FarView(memory.address + offset, region.size_bytes, kept, writable=writable)
        mapping = self._map_device(fd, (offset, region.size_bytes), about, writable=writable)
        return _view_of(mapping, mapping)

    def _map_device(self, fd: int, where: tuple[int, int], about: DaxRange, *, writable: bool) -> FarMapping:
        """Map (offset, bytes) of the DAX device behind a descriptor, which is taken over, also on failure."""
        try:
            found = dax_device.device_of(fd, "what the peer passed")
            if where[0] + where[1] > found.size_bytes:
                raise ProtocolError("the peer's region does not lie inside its device")
        except BaseException:
            os.close(fd)
            raise
        by_hand = self._software or about.software_coherence
        return FarMapping(fd, *where, align=found.align_bytes, writable=writable, by_hand=by_hand)

    def _attached_view(self, peer: PeerSide, region: RemoteRegionSide, about: DaxRange) -> FarView:
        """Map this host's own device for memory that a peer of another host offers; the owner is told."""
        fd, _found = dax_device.attached_device(about)
        writable = bool(region.access & Access.WRITE)
        mapping = self._map_device(fd, (about.offset, region.size_bytes), about, writable=writable)
        try:
            peer.request(ATTACH, {"handle": region.handle, "access": int(region.access)}).close()
        except BaseException:
            mapping.close()
            raise
        return _view_of(mapping, _Attached(mapping, peer, region.handle))

    # ---- of the owner --------------------------------------------------------------------------------------

    def methods(self) -> Mapping[str, OwnMethod]:
        """What engines of other hosts say when they map our far memory by their own device, and let go."""
        return {ATTACH: self._attach, DETACH: self._detach}

    def _attach(self, session: OwnerSession, params: Mapping[str, Any]) -> object:
        handle, access = _asked(params)
        assert self._host is not None
        region = self._host.region(handle)
        if access & ~region.access or not access:
            raise AccessDenied(region=handle)
        backing = region.backing
        if not isinstance(backing, DaxBacking) or backing.about.identity not in self.config.cxl_shared:
            raise UnsupportedOperation(
                "this far memory is not shared with other hosts: name it in the config field cxl_shared",
                region=handle,
            )
        writes = bool(access & Access.WRITE)
        with self._lock:
            self._holders.attached(handle, session.session_id, session.peer_instance, writes=writes)
        return {}

    def _detach(self, session: OwnerSession, params: Mapping[str, Any]) -> object:
        handle, _access = _asked(params)
        with self._lock:
            self._holders.detached(handle, session.session_id)
        return {}

    def holders(self, handle: int) -> set[int]:
        """Sessions of other hosts whose engines map the region."""
        with self._lock:
            return self._holders.holders(handle)

    def writers(self, handle: int, instance: bytes | None) -> set[int]:
        """Those of them that may write it."""
        with self._lock:
            return self._holders.writers(handle, instance)

    def fence(self, session_id: int, timeout_s: float) -> bool:
        """Nobody can end another host's stores: False while the session's engine maps anything of ours."""
        with self._lock:
            return not self._holders.of_session(session_id)

    def forget(self, region: OwnRegion, timeout_s: float) -> bool:
        """False while an engine whose session ended without a word may still write the range."""
        with self._lock:
            return self._holders.forget(region.handle, region.backing, time.monotonic())

    def session_ended(self, session_id: int) -> None:
        """What its engine had not let go of is in quarantine."""
        with self._lock:
            self._holders.session_ended(session_id, time.monotonic())

    def counters(self) -> Mapping[str, int]:
        """Transfers of this process that met bad memory, and mappings that other hosts have."""
        with self._lock:
            return {
                "memory_faults": bad_memory_faults(),
                "attached_open": self._holders.attached_count,
                "quarantined_open": self._holders.sweep(time.monotonic()),
            }


@final
class _Kept:
    """Keeps a mapping that the segment closes by itself, until nothing copies by it any more."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory: SharedMemory | None = memory

    def close(self) -> None:
        """Let it go."""
        self._memory = None


@final
class _Attached:
    """A mapping of this host's own device for a peer's region; its owner is told when it goes."""

    def __init__(self, mapping: FarMapping, peer: PeerSide, handle: int) -> None:
        self._mapping, self._peer, self._handle = mapping, peer, handle

    def close(self) -> None:
        """Unmap, then say so; an owner that is gone need not know."""
        self._mapping.close()
        with contextlib.suppress(MoonpoolError):
            self._peer.request(DETACH, {"handle": self._handle, "access": 0}).close()


def _view_of(mapping: FarMapping, owner: FarMapping | _Attached) -> FarView:
    return FarView(
        mapping.address, mapping.size_bytes, owner, writable=mapping.writable, by_hand=mapping.by_hand
    )


def _asked(params: Mapping[str, Any]) -> tuple[int, int]:
    """Handle and access of a request; ProtocolError when they make no sense."""
    handle, access = params.get("handle"), params.get("access")
    if type(handle) is not int or type(access) is not int or not 0 <= access <= int(Access.READ_WRITE):
        raise ProtocolError("the method takes a region's handle and an access")
    return handle, access
