"""Peers: one remote engine each, whatever number of its segments is open, with its session and its lanes."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, final

from moonpool.config import EngineConfig
from moonpool.engine.lane_connect import connect_lane
from moonpool.engine.region import RemoteRegion
from moonpool.errors import (
    HandshakeFailed,
    MoonpoolError,
    PeerGone,
    PeerRefused,
    PeerStalled,
    ProtocolError,
    ResourceError,
    StaleHandle,
    Status,
    TransferTimeout,
    TransportUnavailable,
)
from moonpool.ids import InstanceId
from moonpool.native.io.lanes import LanePool
from moonpool.units import MS_PER_S, NS_PER_MS, NS_PER_US

if TYPE_CHECKING:
    from moonpool.engine.control import Result
    from moonpool.engine.segment import Segment
    from moonpool.engine.session import ControlSession
    from moonpool.native.io.shm import VmSession

#: What keeps a connection from being made because of this machine, not of the peer.
_OUR_SHORTAGES: Final = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL, errno.EAGAIN}
)

#: How the native side numbers the ways to wait (stream.pxd).
IO_WAYS: Final[Mapping[str, int]] = {"auto": 0, "blocking": 0, "epoll": 1, "io_uring": 2}


def io_way(config: EngineConfig) -> int:
    """The native number of `tcp_io`; loads the ring module when it is asked for."""
    if config.tcp_io == "io_uring":
        try:
            import moonpool.native.io.ring  # noqa: F401
        except ImportError as problem:
            raise TransportUnavailable(
                f"tcp_io='io_uring' needs the ring module ({problem})",
                "install liburing-dev and reinstall moonpool, or use tcp_io='auto'",
                transport="tcp",
            ) from problem
    return IO_WAYS[config.tcp_io]


@final
class Peer:
    """A remote engine (or this one). Owns the control session and the lane pool.

    It is dead once its session has ended, for whatever reason: then every segment of it fails with PEER_GONE,
    and a new `Engine.open` makes a new peer.
    """

    def __init__(
        self,
        endpoint: str,
        instance: InstanceId,
        session: ControlSession | None,
        own: tuple[EngineConfig, InstanceId],
    ) -> None:
        self.endpoint = endpoint
        self.instance = instance
        self.vm: VmSession | None = None
        self.has_release = False
        self.segments: set[Segment] = set()
        self._session = session
        self._config, self._own_instance = own
        self._lock = threading.Lock()
        self._on_gone: Callable[[Peer], None] | None = None
        config = self._config
        self.lanes = LanePool(
            self._connect_lane,
            lanes_max=config.lanes_per_peer_max,
            io=io_way(config),
            spin_ns=config.spin_us * NS_PER_US,
            spin_max_bytes=config.spin_max_bytes,
            stall_ns=config.stall_timeout_ms * NS_PER_MS,
        )

    @property
    def is_self(self) -> bool:
        """True when the peer is the engine that opened it."""
        return self.instance == self._own_instance

    @property
    def session(self) -> ControlSession:
        """The control session; PeerGone for our own segment, which needs none."""
        if self._session is None:
            raise PeerGone("our own segment has no control session", peer=self.endpoint)
        return self._session

    @property
    def alive(self) -> bool:
        """False once the peer is known to be gone; from then on its segments fail every transfer."""
        if self._session is None or self._session.alive:
            return True
        # The session tells of its end before the callback has run: who hears of it here must find the same.
        self._mark_segments()
        return False

    @property
    def stays_on_host(self) -> bool:
        """True when its lanes never leave this host."""
        if self._session is None or self._session.is_unix:
            return True
        host = self.endpoint.rpartition(":")[0].strip("[]")
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    def watch(self, on_gone: Callable[[Peer], None]) -> None:
        """Call back, on the control thread, when the peer is gone."""
        self._on_gone = on_gone
        if self._session is not None:
            self._session.on_closed(self._gone)

    def _gone(self, _reason: MoonpoolError) -> None:
        self._mark_segments()
        self.lanes.shut()
        if self._on_gone is not None:
            self._on_gone(self)

    def _mark_segments(self) -> None:
        with self._lock:
            segments = list(self.segments)
        for segment in segments:
            segment.native.mark_dead(int(Status.PEER_GONE))

    def add(self, segment: Segment) -> None:
        """Count a segment as open on this peer; PeerGone when the peer went meanwhile."""
        with self._lock:
            self.segments.add(segment)
        if not self.alive:
            segment.native.mark_dead(int(Status.PEER_GONE))
            raise PeerGone(peer=self.endpoint, segment=segment.name)

    def remove(self, segment: Segment) -> bool:
        """True when that was its last segment."""
        with self._lock:
            self.segments.discard(segment)
            return not self.segments

    def request(self, method: str, params: Mapping[str, Any]) -> Result:
        """Ask the peer on its session, within connect_timeout_ms and handshake_timeout_ms together."""
        bound_ms = self._config.connect_timeout_ms + self._config.handshake_timeout_ms
        return self.session.request(method, params, bound_ms / MS_PER_S)

    def describe(self) -> tuple[str, list[RemoteRegion]]:
        """The peer's segment name and regions, now."""
        with self.request("describe", {}) as answer:
            about = answer.value
        if not isinstance(about, Mapping) or not isinstance(about.get("regions"), list):
            raise ProtocolError("the peer's description has no list of regions", peer=self.endpoint)
        return str(about.get("name", "")), [RemoteRegion.parse(region) for region in about["regions"]]

    def close(self, timeout_s: float) -> None:
        """Shut the lanes, wait for their batches, end the session."""
        self.lanes.close(timeout_s)
        if self._session is None:
            return
        if (self._session.is_unix or self.has_release) and self.alive:
            # So that the owner need not wonder whether we could still write into its memory; when it does not
            # hear this, it does.
            with contextlib.suppress(MoonpoolError):
                self.request("release", {}).close()
        self._session.close()

    def abandon_after_fork(self) -> None:
        """In a forked child: close the child's copies of the lanes."""
        self.lanes.close_after_fork()

    def _connect_lane(self, timeout_s: float, dialing: Callable[[int], None]) -> int:
        # A peer that does not answer a hello makes no progress, as one that answers no READ.
        limit_s = min(timeout_s, self._config.stall_timeout_ms / MS_PER_S)
        try:
            return connect_lane(
                self.endpoint, self._config, self._own_instance, self.instance, limit_s, dialing
            )
        except (PeerRefused, HandshakeFailed, StaleHandle, TransferTimeout) as problem:
            if isinstance(problem.__cause__, TimeoutError):
                # The batch's own deadline is told from this by whoever asked for the lane.
                raise PeerStalled(peer=self.endpoint) from problem
            # It was there when the segment was opened: so it is gone, whoever may have its place by now.
            raise PeerGone(peer=self.endpoint) from problem
        except ResourceError as problem:
            if problem.errno in _OUR_SHORTAGES:
                raise
            raise PeerGone(peer=self.endpoint) from problem  # cut off while its options were set, say
