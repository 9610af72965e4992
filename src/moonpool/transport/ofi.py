"""`ofi`: one-sided reads and writes by libfabric: AWS EFA, Slingshot, whatever it has a provider for.

The owner opens an endpoint for each control session that asks, so that closing it ends what that peer can
reach; an initiator has up to `lanes_per_peer_max` endpoints for each peer. The provider is the config's
`ofi_provider`; when that is empty, the first that has hardware. Those made of software must be named.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

from moonpool.config import EngineConfig
from moonpool.errors import MoonpoolError, PeerGone, TransportUnavailable, UnsupportedOperation
from moonpool.native.io.memory import SharedMemory, create_memory
from moonpool.native.ofi.fabric import Fabric, OwnEnd, OwnMemory
from moonpool.native.ofi.library import HOW_TO_GET_IT, library_version, providers
from moonpool.native.ofi.link import Link
from moonpool.native.ofi.path import add_ofi_path, reach_region, use_locally
from moonpool.operations import Access
from moonpool.transport.base import (
    Availability,
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
from moonpool.transport.ofi_attribute import Asked, Endpoint, RegionKey
from moonpool.transport.plain import PlainTransport
from moonpool.units import NS_PER_MS, NS_PER_US

CONNECT: Final = "ofi.connect"
#: Providers that have hardware, the preferred first.
HARDWARE: Final = ("cxi", "efa", "verbs")
#: From this version on "tcp" has endpoints of the kind we need; before, they are called "net".
TCP_HAS_OWN: Final = (1, 18)
FLUSH_BYTES: Final = 4096


def available() -> Availability:
    """Whether libfabric is there; which of its providers can be used is known once one is opened."""
    try:
        major, minor = library_version()
        found = providers()
    except TransportUnavailable as problem:
        return Availability(False, problem.reason or str(problem), problem.how_to_get_it or HOW_TO_GET_IT)
    names = ", ".join(dict.fromkeys(name.partition(";")[0] for name in found)) or "none"
    return Availability(True, f"libfabric {major}.{minor}, providers: {names}")


def provider_names(wanted: str, version: tuple[int, int]) -> tuple[str, ...]:
    """The library's names to try, in order, for what the config says."""
    if not wanted:
        return HARDWARE
    if wanted == "tcp" and version < TCP_HAS_OWN:
        return ("net", "tcp")
    return (wanted,)


def open_fabric(config: EngineConfig) -> Fabric:
    """The config's provider; TransportUnavailable when none of them can run here."""
    node = config.advertise_host if config.bind_host in ("0.0.0.0", "::") else config.bind_host
    for name in provider_names(config.ofi_provider, library_version()):
        try:
            return Fabric(name, node)
        except TransportUnavailable as problem:
            last = problem
    if config.ofi_provider:
        raise last
    raise TransportUnavailable(
        f"libfabric has no provider with hardware here ({', '.join(HARDWARE)}) that listens on {node}",
        "set bind_host to an address of its device, or name a provider of software with ofi_provider='tcp'",
        transport="ofi",
    )


@final
class SessionEnds:
    """The endpoint that each control session was given. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[int, OwnEnd] = {}
        self._instances: dict[int, bytes] = {}
        self._last_number = 0

    def give(self, session: OwnerSession, fabric: Fabric) -> tuple[int, OwnEnd]:
        """A new endpoint for a session, and its number; the one that it had is closed first.

        Whatever question of the session got lost on its way, the last one asked is the one that counts.
        """
        with self._lock:
            self._close(session.session_id)
            end = fabric.listen()
            self._ends[session.session_id] = end
            self._instances[session.session_id] = session.peer_instance
            self._last_number += 1
            return self._last_number, end

    def close(self, session_id: int) -> None:
        """Nothing of that session lands any more."""
        with self._lock:
            self._close(session_id)

    def _close(self, session_id: int) -> None:
        self._instances.pop(session_id, None)
        end = self._ends.pop(session_id, None)
        if end is not None:
            end.close()

    def close_all(self) -> None:
        """Nothing of anybody lands any more."""
        for session_id in self.sessions(None):
            self.close(session_id)

    def sessions(self, instance: bytes | None) -> set[int]:
        """The sessions with an endpoint: of one instance, or all."""
        with self._lock:
            return {one for one, of in self._instances.items() if instance in (None, of)}


@final
class OfiTransport(PlainTransport):
    """One-sided accesses by a libfabric provider."""

    name = "ofi"
    capabilities = Capabilities(same_host=True, other_hosts=True)

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._ends = SessionEnds()
        self._lock = threading.Lock()
        self._memories: dict[int, OwnMemory] = {}
        self._writable: set[int] = set()
        self._links: weakref.WeakKeyDictionary[PeerSide, Link] = weakref.WeakKeyDictionary()
        self._every_link: weakref.WeakSet[Link] = weakref.WeakSet()
        self._flush_bytes: SharedMemory | None = None
        self._flush: OwnMemory | None = None

    def open(self, host: Host) -> None:
        """Open the provider; TransportUnavailable when it does not run on this machine."""
        self._host = host
        self._fabric = open_fabric(self.config)
        try:
            self._flush_bytes = create_memory(FLUSH_BYTES, huge_pages=False, prefault=True)
            address, size = self._flush_bytes.address, self._flush_bytes.size_bytes
            self._flush = self._fabric.register(address, size, True, True, False)
        except BaseException:
            self._fabric.close()
            raise

    @property
    def device(self) -> str:
        """The provider and its device."""
        return f"{self._fabric.provider}:{self._fabric.device}"

    # The owner's side

    def attribute(self, region: OwnRegion) -> bytes | None:
        """Register the region with the provider: its key and base address there."""
        if not region.address or _on_device(region) or not (region.access or self._fabric.needs_local):
            return None
        reads, writes = bool(region.access & Access.READ), bool(region.access & Access.WRITE)
        memory = self._fabric.register(
            region.address, region.size_bytes, _writable_here(region), reads, writes
        )
        with self._lock:
            self._memories[region.handle] = memory
            if writes:
                self._writable.add(region.handle)
        return RegionKey(memory.key, memory.base).encode() if region.access else None

    def registered(self, region: OwnRegion) -> None:
        """Where the device must know local buffers, note how it knows this one."""
        with self._lock:
            memory = self._memories.get(region.handle)
        if memory is not None and self._fabric.needs_local:
            use_locally(self._host.table, region.handle, memory)

    def forget(self, region: OwnRegion, timeout_s: float) -> bool:
        """Take the region back from the provider.

        Peers that confirmed have nothing under way: an endpoint of theirs that was torn down with something
        in flight had ours closed before its batch ended. Those that did not confirm have no session any more,
        and with it went their endpoint.
        """
        with self._lock:
            memory = self._memories.get(region.handle)
            self._writable.discard(region.handle)
        if memory is None:
            return True
        if not memory.close():
            return False
        with self._lock:
            self._memories.pop(region.handle, None)
        return True

    def methods(self) -> Mapping[str, OwnMethod]:
        """`ofi.connect`: an endpoint for the asking session."""
        return {CONNECT: self._connect_asked}

    def _connect_asked(self, session: OwnerSession, params: Mapping[str, Any]) -> object:
        asked = Asked.from_params(params)
        fabric = self._fabric
        if (asked.provider, asked.address_format) != (fabric.provider, fabric.address_format):
            raise UnsupportedOperation(
                f"this engine's libfabric provider is {fabric.provider}, the peer's {asked.provider}: "
                "give both the same ofi_provider"
            )
        if fabric.provider == "shm" and asked.process == os.getpid():
            raise UnsupportedOperation("libfabric's shm provider crashes between two engines of one process")
        if fabric.is_shared and asked.previous is not None:
            raise UnsupportedOperation(
                "this provider has one endpoint for all peers, which cannot be closed for one: "
                "open the segment again once the peer is well"
            )
        assert self._flush is not None
        number, end = self._ends.give(session, fabric)
        return Endpoint(number, end.address, RegionKey(self._flush.key, self._flush.base)).to_answer()

    def holders(self, handle: int) -> set[int]:
        """Every session that has an endpoint here."""
        with self._lock:
            known = handle in self._memories
        return self._ends.sessions(None) if known else set()

    def writers(self, handle: int, instance: bytes | None) -> set[int]:
        """The sessions with an endpoint, when peers may write the region."""
        with self._lock:
            known = handle in self._writable
        return self._ends.sessions(instance) if known else set()

    def fence(self, session_id: int, timeout_s: float) -> bool:
        """Close the session's endpoint; False where there is one for all."""
        if self._fabric.is_shared:
            return session_id not in self._ends.sessions(None)
        self._ends.close(session_id)
        return True

    def session_ended(self, session_id: int) -> None:
        """Close its endpoints."""
        self._ends.close(session_id)

    # The initiator's side

    def connect(self, peer: PeerSide, segment: SegmentSide) -> Sequence[PathInfo]:
        """A path to the peer's endpoint, when it has one of the same provider."""
        if peer.is_self:
            return ()
        try:
            link = self._link_to(peer)
        except MoonpoolError as problem:
            segment.note_unreachable(0, self.name, problem)
            return ()
        peer.has_release = True
        return (PathInfo(add_ofi_path(segment.native, link), self.name, self.device, peer.endpoint),)

    def _link_to(self, peer: PeerSide) -> Link:
        link = self._links.get(peer)
        if link is not None:
            return link
        of, fabric = weakref.ref(peer), self._fabric

        def ask(previous: int | None) -> tuple[int, bytes, int, int]:
            owner = of()
            if owner is None:
                raise PeerGone("the peer was let go of")
            asked = Asked(fabric.provider, fabric.address_format, os.getpid(), previous)
            with owner.request(CONNECT, asked.to_params()) as answer:
                found = Endpoint.from_answer(answer.value)
            return found.number, found.address, found.flush.key, found.flush.base

        config = self.config
        link = Link(
            fabric,
            ask,
            ends_max=config.lanes_per_peer_max,
            spin_ns=config.spin_us * NS_PER_US,
            spin_max_bytes=config.spin_max_bytes,
            stall_ns=config.stall_timeout_ms * NS_PER_MS,
            connect_ns=min(config.connect_timeout_ms, config.stall_timeout_ms) * NS_PER_MS,
        )
        link.connect()
        self._links[peer] = link
        self._every_link.add(link)
        return link

    def reach(self, peer: PeerSide, segment: SegmentSide, region: RemoteRegionSide) -> bool:
        """Note the region's key, when the segment has a path of ours."""
        data = region.attributes.get(self.name)
        if data is None or peer.is_self or peer not in self._links:
            return False
        try:
            found = RegionKey.decode(data)
        except MoonpoolError as problem:
            segment.note_unreachable(region.handle, self.name, problem)
            return False
        segment.hold(region.handle, reach_region(segment.native, region.handle, found.key, found.base))
        return True

    def counters(self) -> Mapping[str, int]:
        """Endpoints on both sides, regions known to the provider, and what went wrong and was mended."""
        return {"regions_now": len(self._memories), **self._fabric.counters()}

    def close(self) -> None:
        """Close endpoints, memory and the domain. What a batch still uses stays, and with it the domain."""
        idle = False not in [link.shut() for link in list(self._every_link)]
        self._ends.close_all()
        with self._lock:
            memories = [*self._memories.values(), *([self._flush] if self._flush is not None else [])]
            self._memories.clear()
        closed = False not in [memory.close() for memory in memories]
        if idle and closed:
            self._fabric.close()
        if self._flush_bytes is not None and closed:
            with contextlib.suppress(MoonpoolError):
                self._flush_bytes.close()


def _writable_here(region: OwnRegion) -> bool:
    """Whether this process's READs may put bytes there."""
    source = region.memory or region.hold or region.backing
    return source is not None and source.writable


def _on_device(region: OwnRegion) -> bool:
    """Whether the bytes are a device's: providers that could take them are not asked to."""
    return region.hold is not None and region.hold.on_device
