"""The owner's side of RDMA: its queue pairs, by session, and its registered regions."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

from moonpool.config import EngineConfig
from moonpool.errors import (
    AccessDenied,
    LimitExceeded,
    MoonpoolError,
    ProtocolError,
    ResourceError,
    StaleHandle,
    UnsupportedMemory,
    UnsupportedOperation,
)
from moonpool.native.io.memory import create_memory
from moonpool.native.verbs.attributes import LOCAL_WRITE, REMOTE_READ, REMOTE_WRITE, RegistrationPlan
from moonpool.native.verbs.devices import Device
from moonpool.native.verbs.memory import MemoryRegistration, register, register_dmabuf
from moonpool.native.verbs.queue_pairs import CompletionQueue, QueuePair
from moonpool.operations import Access
from moonpool.transport.base import OnDevice, OwnerSession, OwnRegion
from moonpool.transport.rdma_handshake import (
    ANY_NIC,
    RAILS_MAX,
    Answer,
    Mark,
    Offer,
    Rail,
    RegionKeys,
    choose_partner,
    decode_offer,
    encode_answer,
    encode_keys,
    without_keys,
)
from moonpool.transport.rdma_nics import OwnNic, devices_of, route_to

#: Completions of our ends of peers' queue pairs: they post nothing, so there are none.
_QUEUE_DEPTH: Final = 16
_MARK_BYTES: Final = 4096
#: Nobody looks at a region's bytes before a completion, which a READ of the (strictly ordered) mark precedes.
_PLAN: Final = RegistrationPlan(relaxed_ordering=True)
#: Queue pairs that one session may have: all its rails, and as many that are being replaced.
_PAIRS_MAX: Final = 2 * RAILS_MAX


@final
@dataclass(slots=True)
class _Session:
    """What one session holds: its queue pairs by (link, rail), and whether it may have more."""

    instance: bytes
    pairs: dict[tuple[int, int], QueuePair] = field(default_factory=dict)
    nics: dict[tuple[int, int], int] = field(default_factory=dict)
    fenced: bool = False


@final
class OwnerSide:
    """Thread-safe; its control methods run on the control thread and wait for nobody."""

    def __init__(self, nics: Sequence[OwnNic], config: EngineConfig) -> None:
        self._nics, self._config = nics, config
        self._lock = threading.Lock()
        self._sessions: dict[int, _Session] = {}
        self._regions: dict[int, tuple[MemoryRegistration, Access]] = {}
        self._queues = [CompletionQueue(nic.device, _QUEUE_DEPTH) for nic in nics]
        self._mark = create_memory(_MARK_BYTES)
        self._mark_keys = register(devices_of(nics), self._mark.address, _MARK_BYTES, REMOTE_READ)
        self.unpinnable = 0

    # ---- regions -------------------------------------------------------------------------------------------

    def attribute(self, region: OwnRegion) -> bytes | None:
        """Registers the region on all NICs; what peers need to know of it, or None when they cannot reach it.

        OutOfMemory when it cannot be pinned for want of RLIMIT_MEMLOCK; memory that no NIC takes is left to
        other transports.
        """
        access = Access(region.access)
        try:
            made = self._register(region, access)
        except (UnsupportedMemory, UnsupportedOperation):
            self.unpinnable += 1
            return None
        if made is None:
            return None
        with self._lock:
            self._regions[region.handle] = made, access
        return encode_keys(without_keys(self._keys_of(made))) if access else None

    def _register(self, region: OwnRegion, access: Access) -> MemoryRegistration | None:
        remote = (REMOTE_READ if access & Access.READ else 0) | (REMOTE_WRITE if access & Access.WRITE else 0)
        devices = devices_of(self._nics)
        if isinstance(region.backing, OnDevice):
            return _register_device_memory(devices, region, remote | LOCAL_WRITE)
        if not region.address:
            return None
        try:
            return register(devices, region.address, region.size_bytes, remote | LOCAL_WRITE, _PLAN)
        except UnsupportedMemory:
            if access & Access.WRITE:
                raise
            # Pages that this process may not write either: a NIC reads them all the same.
            return register(devices, region.address, region.size_bytes, remote, _PLAN)

    def _keys_of(self, made: MemoryRegistration) -> RegionKeys:
        by_nic = [made.rkeys(k) for k in range(len(self._nics))]
        keys = tuple(key for keys in by_nic for key in keys)
        return RegionKeys(made.address, len(by_nic), len(by_nic[0]), made.chunk_bytes, keys)

    def registration(self, handle: int) -> MemoryRegistration | None:
        """The registration of a region of ours; None when no NIC took it."""
        with self._lock:
            return self._regions.get(handle, (None, Access.NONE))[0]

    def forget(self, handle: int) -> None:
        """The region's keys are void when this returns."""
        with self._lock:
            found = self._regions.pop(handle, None)
        if found is not None:
            found[0].close()

    # ---- control methods -----------------------------------------------------------------------------------

    def connect(self, session: OwnerSession, params: Mapping[str, Any]) -> dict[str, Any]:
        """ "rdma.connect": pairs the offered queue pairs with ours; those that they replace go first."""
        offer = decode_offer(_bytes_of(params, "offer"))
        with self._lock:
            mine = self._sessions.setdefault(session.session_id, _Session(session.peer_instance))
            if mine.fenced:
                raise AccessDenied("this session was fenced: it gets no queue pairs any more")
            for rail in offer.rails:
                self._drop(mine, (offer.link, rail.index))
            if len(mine.pairs) + len(offer.rails) > _PAIRS_MAX:
                raise LimitExceeded(f"a session has at most {_PAIRS_MAX} queue pairs", limit=_PAIRS_MAX)
            answered = tuple(self._pair(mine, offer, rail) for rail in offer.rails)
        nics = tuple(nic.about for nic in self._nics)
        marks = tuple(Mark(self._mark.address, self._mark_keys.rkeys(k)[0]) for k in range(len(self._nics)))
        return {"answer": encode_answer(Answer(offer.link, nics, marks, answered))}

    def keys(self, session: OwnerSession, params: Mapping[str, Any]) -> dict[str, Any]:
        """ "rdma.keys": the keys of a region that has too many for its attribute."""
        handle = params.get("handle")
        with self._lock:
            made, access = self._regions.get(handle if type(handle) is int else 0, (None, Access.NONE))
            known = session.session_id in self._sessions
        if made is None or not access or not known:
            raise StaleHandle(region=handle if type(handle) is int else 0)
        return {"keys": encode_keys(self._keys_of(made))}

    def _pair(self, mine: _Session, offer: Offer, asked: Rail) -> Rail:
        """Our queue pair for an offered one; `nic` is ANY_NIC when we have none for it."""
        declined = Rail(asked.index, ANY_NIC, asked.nic, 0, 0)
        theirs = offer.nics[asked.nic]
        own = [nic.about for nic in self._nics]
        used = [list(mine.nics.values()).count(k) for k in range(len(own))]
        place = choose_partner(theirs, own, used) if asked.partner == ANY_NIC else asked.partner
        if not 0 <= place < len(own) or own[place].link_layer != theirs.link_layer:
            return declined
        nic, psn = self._nics[place], secrets.randbits(24)
        pair = QueuePair(self._queues[place], 1)
        try:
            pair.to_init(nic.port, REMOTE_READ | REMOTE_WRITE)
            pair.to_ready(route_to(nic, theirs, (asked, psn), self._config))
        except MoonpoolError:
            pair.close()
            return declined  # our NIC is in trouble, or theirs has an address that ours cannot reach
        mine.pairs[offer.link, asked.index] = pair
        mine.nics[offer.link, asked.index] = place
        return Rail(asked.index, place, asked.nic, pair.number, psn)

    @staticmethod
    def _drop(mine: _Session, key: tuple[int, int]) -> None:
        pair = mine.pairs.pop(key, None)
        mine.nics.pop(key, None)
        if pair is not None:
            _destroy(pair)

    # ---- who may reach what --------------------------------------------------------------------------------

    def holders(self, handle: int) -> set[int]:
        """Sessions with queue pairs, when the region is open to peers."""
        with self._lock:
            _, access = self._regions.get(handle, (None, Access.NONE))
            return self._live(None) if access else set()

    def writers(self, handle: int, instance: bytes | None) -> set[int]:
        """Sessions with queue pairs, of an instance or of any, when the region may be written by peers."""
        with self._lock:
            _, access = self._regions.get(handle, (None, Access.NONE))
            return self._live(instance) if access & Access.WRITE else set()

    def _live(self, instance: bytes | None) -> set[int]:
        return {
            number
            for number, session in self._sessions.items()
            if session.pairs and instance in (None, session.instance)
        }

    def fence(self, session_id: int) -> bool:
        """Destroys the session's queue pairs and gives it no others; nothing of it lands any more."""
        with self._lock:
            session = self._sessions.get(session_id)
            if session is not None:
                session.fenced = True
                self._destroy_all(session)
        return True

    def session_ended(self, session_id: int) -> None:
        """Destroys the session's queue pairs."""
        with self._lock:
            session = self._sessions.pop(session_id, None)
            if session is not None:
                self._destroy_all(session)

    @staticmethod
    def _destroy_all(session: _Session) -> None:
        for pair in session.pairs.values():
            _destroy(pair)
        session.pairs.clear()
        session.nics.clear()

    def counters(self) -> dict[str, int]:
        """Gauges: sessions and queue pairs that peers hold, and regions."""
        with self._lock:
            return {
                "peer_sessions": len(self._live(None)),
                "peer_queue_pairs": sum(len(session.pairs) for session in self._sessions.values()),
                "regions": len(self._regions),
                "regions_unpinnable": self.unpinnable,
            }

    def close(self) -> None:
        """Destroys everything; the memory of regions belongs to others."""
        with self._lock:
            for session in self._sessions.values():
                self._destroy_all(session)
            self._sessions.clear()
            regions, self._regions = list(self._regions.values()), {}
        for made, _ in regions:
            made.close()
        self._mark_keys.close()
        for queue in self._queues:
            queue.close()
        self._mark.close()


def _register_device_memory(
    devices: Sequence[Device], region: OwnRegion, access: int
) -> MemoryRegistration | None:
    """Memory of a device, as a dma-buf that NICs reach without any CPU; by its own address there."""
    assert isinstance(region.backing, OnDevice)
    try:
        fd, offset = region.backing.dma_buf()
    except (UnsupportedOperation, ResourceError):
        return None
    try:
        at = region.backing.device_address
        return register_dmabuf(devices, fd, offset, region.size_bytes, access, at, _PLAN)
    finally:
        os.close(fd)


def _destroy(pair: QueuePair) -> None:
    # A device that is gone refuses to destroy what went with it: then nothing can land either.
    with contextlib.suppress(MoonpoolError):
        pair.to_error()
    with contextlib.suppress(MoonpoolError):
        pair.close()


def _bytes_of(params: Mapping[str, Any], name: str) -> bytes:
    value = params.get(name)
    if not isinstance(value, bytes):
        raise ProtocolError(f"the request has no bytes {name!r}")
    return value
