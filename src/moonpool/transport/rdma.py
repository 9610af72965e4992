"""`rdma`: one-sided READs and WRITEs by RDMA NICs, over as many rails as there are pairs of NICs.

docs/transports/rdma.md says how to set it up, and what happens when what fails.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, final

from moonpool.config import EngineConfig
from moonpool.errors import MoonpoolError, ProtocolError, TransportUnavailable
from moonpool.native.io.memory import create_memory
from moonpool.native.rdma.bounce import BounceArena, bounce_bytes
from moonpool.native.rdma.keys import RemoteKeys
from moonpool.native.rdma.transfer import add_rdma_path, note_own, note_remote
from moonpool.native.verbs.attributes import LOCAL_WRITE
from moonpool.native.verbs.devices import default_library
from moonpool.native.verbs.memory import register
from moonpool.transport.base import (
    Availability,
    Capabilities,
    Host,
    OwnMethod,
    OwnRegion,
    PathInfo,
    PeerSide,
    RemoteRegionSide,
    SegmentSide,
)
from moonpool.transport.plain import PlainTransport
from moonpool.transport.rdma_handshake import RegionKeys, decode_keys
from moonpool.transport.rdma_links import PeerLink
from moonpool.transport.rdma_nics import OwnNic, devices_of, open_nics, usable_names
from moonpool.transport.rdma_owner import OwnerSide
from moonpool.transport.rdma_repairer import Repairer
from moonpool.units import MS_PER_S

#: Slots of 64 KiB through which unregistered buffers go, shared by all links of an engine.
BOUNCE_SLOTS: Final = 64


def available() -> Availability:
    """Whether libibverbs and a device are here."""
    try:
        usable_names(default_library(), EngineConfig())
    except TransportUnavailable as problem:
        return Availability(False, problem.reason or "", problem.how_to_get_it or "")
    except MoonpoolError as problem:
        return Availability(False, str(problem), "look at `ibv_devinfo` and at the kernel's log")
    return Availability(True)


@final
class RdmaTransport(PlainTransport):
    """Owns the NICs of an engine, what is registered on them, the links to peers and who repairs them."""

    name = "rdma"
    gauges = frozenset(
        {
            *("rails", "rails_up", "links", "nics", "bounce_slots_unused"),
            *("peer_sessions", "peer_queue_pairs", "regions", "regions_unpinnable"),
        }
    )
    capabilities = Capabilities(same_host=True, other_hosts=True, device_memory=True)
    gauges = frozenset(
        {
            *("links", "nics", "rails", "rails_up", "bounce_slots_unused"),
            *("peer_sessions", "peer_queue_pairs", "regions"),
        }
    )

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._lock = threading.Lock()
        self._links: dict[PeerSide, PeerLink] = {}
        self._nics: list[OwnNic] = []
        self._closed = False
        #: Totals of the links that are gone.
        self._past: Counter[str] = Counter()

    def open(self, host: Host) -> None:
        """Opens the NICs, pins the bounce arena and starts the repairer."""
        self._host = host
        self._nics = open_nics(default_library(), self.config)
        try:
            self._owner = OwnerSide(self._nics, self.config)
            memory = create_memory(bounce_bytes(BOUNCE_SLOTS))
            devices = devices_of(self._nics)
            self._arena_keys = register(devices, memory.address, memory.size_bytes, LOCAL_WRITE)
            self._arena = BounceArena(memory, self._arena_keys)
        except BaseException:
            for nic in self._nics:
                nic.device.close()
            raise
        self._repairer = Repairer(self._nics, self.links)
        self._repairer.forget = self._forget_link
        self._repairer.start()

    # ---- the owner's side ----------------------------------------------------------------------------------

    def attribute(self, region: OwnRegion) -> bytes | None:
        """The region's remote keys, by NIC and chunk."""
        return self._owner.attribute(region)

    def methods(self) -> Mapping[str, OwnMethod]:
        """The handshake, and keys that are too many for an attribute."""
        return {"rdma.connect": self._owner.connect, "rdma.keys": self._owner.keys}

    def registered(self, region: OwnRegion) -> None:
        """Own transfers use the region's local keys."""
        made = self._owner.registration(region.handle)
        if made is not None:
            note_own(self._host.table, region.handle, made)

    def holders(self, handle: int) -> set[int]:
        """Sessions with queue pairs, when the region is open to peers."""
        return self._owner.holders(handle)

    def writers(self, handle: int, instance: bytes | None) -> set[int]:
        """Sessions whose queue pairs may write the region."""
        return self._owner.writers(handle, instance)

    def fence(self, session_id: int, timeout_s: float) -> bool:
        """Destroys the session's queue pairs for good."""
        return self._owner.fence(session_id)

    def forget(self, region: OwnRegion, timeout_s: float) -> bool:
        """Unregisters the region: no NIC lets anybody at it any more."""
        self._owner.forget(region.handle)
        return True

    def session_ended(self, session_id: int) -> None:
        """Destroys the session's queue pairs."""
        self._owner.session_ended(session_id)

    # ---- the initiator's side ------------------------------------------------------------------------------

    def connect(self, peer: PeerSide, segment: SegmentSide) -> Sequence[PathInfo]:
        """The path over the rails to a peer; none when the peer has no rdma, or its memory is mapped here."""
        if peer.is_self or ("shm" in self.config.transports and peer.session.is_unix):
            return ()
        link = self._link_to(peer, segment)
        if link is None:
            return ()
        path = add_rdma_path(segment.native, link.native)
        ours = "+".join(nic.about.name for nic in self._nics)
        return (PathInfo(path, self.name, ours, "+".join(nic.name for nic in link.remote_nics)),)

    def _link_to(self, peer: PeerSide, segment: SegmentSide) -> PeerLink | None:
        with self._lock:
            link = self._links.get(peer)
        if link is not None and link.serve(segment):
            return link
        link = PeerLink(peer, (self._nics, self._arena, self.config), self._repairer.wake_fd)
        link.serve(segment)
        try:
            link.open()
        except MoonpoolError as problem:
            segment.note_unreachable(0, self.name, problem)
            return None
        peer.has_release = True
        with self._lock:
            self._links[peer] = link
        self._repairer.wake()
        return link

    def reach(self, peer: PeerSide, segment: SegmentSide, region: RemoteRegionSide) -> bool:
        """Take the region's keys, from its attribute or by asking for them."""
        published = region.attributes.get(self.name)
        with self._lock:
            link = self._links.get(peer)
        if published is None or link is None:
            return False
        try:
            keys = self._keys(peer, region, published)
            if keys.n_nics != len(link.remote_nics):
                raise ProtocolError(f"a region with keys of {keys.n_nics} NICs of {len(link.remote_nics)}")
        except MoonpoolError as problem:
            segment.note_unreachable(region.handle, self.name, problem)
            return False
        made = RemoteKeys(keys.base, region.size_bytes, keys.chunk_bytes, keys.n_nics, keys.keys)
        note_remote(segment.native, region.handle, made)
        segment.hold(region.handle, made)
        return True

    @staticmethod
    def _keys(peer: PeerSide, region: RemoteRegionSide, published: bytes) -> RegionKeys:
        keys = decode_keys(published, region.size_bytes)
        if keys.keys:
            return keys
        with peer.request("rdma.keys", {"handle": region.handle}) as answer:
            value = answer.value.get("keys") if isinstance(answer.value, Mapping) else None
            if not isinstance(value, bytes):
                raise ProtocolError("the answer to rdma.keys has no bytes", peer=peer.endpoint)
            keys = decode_keys(value, region.size_bytes)
        if not keys.keys:
            raise ProtocolError("the answer to rdma.keys has no keys", peer=peer.endpoint)
        return keys

    def flush(self, peer: PeerSide, segment: SegmentSide, timeout_s: float) -> None:
        """Nothing: a WRITE is complete only after a READ behind it has shown that it landed."""

    # ---- keeping -------------------------------------------------------------------------------------------

    def links(self) -> list[PeerLink]:
        """The links to peers, as they are now."""
        with self._lock:
            return list(self._links.values())

    def _forget_link(self, link: PeerLink) -> None:
        with self._lock:
            if self._links.get(link.peer) is link:
                del self._links[link.peer]
                self._past.update(self._totals(link))

    def _totals(self, link: PeerLink) -> Counter[str]:
        """What a link did so far."""
        done = Counter(resets=link.native.resets, refused=link.native.access_errors)
        for rail in link.rails():
            # The peer's NIC by its number: names that peers choose would make counters without bound.
            ends = f"{self._nics[rail.local_nic].about.name}_to_{rail.remote_nic}"
            done[f"read_bytes_{ends}"] += rail.bytes_read
            done[f"write_bytes_{ends}"] += rail.bytes_written
            done["rail_breaks"] += rail.breaks
            done["rail_repairs"] += rail.repairs
        return done

    def abandon_after_fork(self) -> None:
        """The child's copies of the devices' descriptors go: queue pairs end with us, not with the child."""
        for nic in self._nics:
            nic.device.abandon_after_fork()

    def counters(self) -> Mapping[str, int]:
        """Links, rails, what they carried and how often they broke; and what peers hold here."""
        with self._lock:
            links = list(self._links.values())
            done = Counter(dict.fromkeys(("resets", "refused", "rail_breaks", "rail_repairs"), 0))
            for part in (self._past, *map(self._totals, links)):
                done.update(part)
        states = [rail.state for link in links for rail in link.rails()]
        return {
            **done,
            **self._owner.counters(),
            "links": len(links),
            "nics": len(self._nics),
            "rails": len(states),
            "rails_up": states.count("up"),
            "bounce_slots_unused": self._arena.unused,
            "port_errors": self._repairer.port_errors,
            "nics_lost": self._repairer.fatal_errors,
        }

    def close(self) -> None:
        """Ends links and repairs, unregisters everything, closes the NICs."""
        if self._closed or not self._nics:
            return
        self._closed = True
        self._repairer.stop()
        for link in self.links():
            link.close(self.config.close_timeout_ms / MS_PER_S)
        self._links.clear()
        self._owner.close()
        self._arena_keys.close()
        self._arena.memory.close()
        for nic in self._nics:
            nic.device.close()
