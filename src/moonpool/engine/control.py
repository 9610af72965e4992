"""The control service of an engine: serves initiators, and opens sessions with the engines of others.

One thread, "moonpool-control", runs it all (docs/architecture.md, "Wire"). Methods may be called from any
other thread. What the engine supplies are `ServiceHooks`; they run on the control thread and must not block.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import socket
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypeAlias, final

from moonpool.clock import Deadline, SystemClock
from moonpool.config import EngineConfig
from moonpool.engine.control_channel import ChannelBounds, OutboundBudget
from moonpool.engine.control_connection import (
    ConnectionSettings,
    ControlConnection,
    Handler,
    Reply,
    Result,
    SessionInfo,
)
from moonpool.engine.control_counters import ControlCounters
from moonpool.engine.control_listener import Arrival, ControlListener, Doors
from moonpool.engine.dialing import DialRequest, GreetedPeer, dial
from moonpool.engine.loop_thread import LoopThread
from moonpool.engine.peer_address import unix_name_of
from moonpool.engine.session import ControlSession
from moonpool.errors import (
    EngineClosed,
    InternalError,
    LimitExceeded,
    MoonpoolError,
)
from moonpool.ids import InstanceId
from moonpool.metadata.endpoint import format_endpoint
from moonpool.units import KIB, MIB, MS_PER_S
from moonpool.wire.control import ControlLimits
from moonpool.wire.hello import ConnectionKind

__all__ = ["ControlService", "Handler", "LaneInfo", "Reply", "Result", "ServiceHooks", "SessionInfo"]

#: Requests are small, and so is what a stranger can make us hold per connection.
REQUEST_LIMITS: Final = ControlLimits(frame_bytes_max=64 * KIB, containers_max=4_096)
#: All replies that wait for peers to read them.
OUTBOUND_BYTES_MAX: Final = 64 * MIB

#: What `on_lane` is told of a data lane.
LaneInfo: TypeAlias = Arrival


def _ignore_closed(_info: SessionInfo, _reason: MoonpoolError) -> None:
    """The default of `on_session_closed`."""


def _no_lanes() -> int:
    """The default of `lanes_open`."""
    return 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceHooks:
    """What an engine supplies; all run on the control thread.

    A handler gets the session and the params, and returns a result, a `Reply` with descriptors, or an
    awaitable of either; what it raises goes to the peer as a typed error.
    """

    #: Answers requests of initiators, by method.
    handlers: Mapping[str, Handler]
    #: Takes a blocking, close-on-exec descriptor of a data lane; raising refuses it, untouched.
    on_lane: Callable[[int, LaneInfo], object]
    #: Answers requests of the owners that this engine has sessions with (revoke), by method.
    session_handlers: Mapping[str, Handler] = field(default_factory=dict)
    #: Told once of each initiator's session that ended, and why.
    on_session_closed: Callable[[SessionInfo, MoonpoolError], object] = _ignore_closed
    #: How many data lanes are open; with the sessions they make up `connections_max`.
    lanes_open: Callable[[], int] = _no_lanes


@final
class ControlService:
    """Listens from its creation, serves from `start` to `close`. Creation raises as `listen_tcp` does."""

    def __init__(self, config: EngineConfig, instance: InstanceId, hooks: ServiceHooks) -> None:
        self._config = config
        self._instance = instance
        self._hooks = hooks
        self._counters = ControlCounters()
        doors = Doors(has_room=self._has_room, on_session=self._begin_session, on_lane=hooks.on_lane)
        self._loop_thread = LoopThread("moonpool-control")
        try:
            self._listener = ControlListener(config, instance, self._counters, doors)
        except BaseException:
            self._loop_thread.discard()
            raise
        self._tcp_address = self._listener.tcp_address
        budget = OutboundBudget(OUTBOUND_BYTES_MAX)
        stall_timeout_s = config.stall_timeout_ms / MS_PER_S
        self._serving = ConnectionSettings(
            handlers=hooks.handlers,
            bounds=ChannelBounds(stall_timeout_s=stall_timeout_s, limits=REQUEST_LIMITS),
            budget=budget,
            counters=self._counters,
        )
        self._asking = ConnectionSettings(
            handlers=hooks.session_handlers,
            bounds=ChannelBounds(stall_timeout_s=stall_timeout_s),
            budget=budget,
            counters=self._counters,
        )
        self._session_ids = itertools.count(1)
        #: Initiators' connections and our own sessions, by session id; changed on the control thread only.
        self._accepted: dict[int, ControlConnection] = {}
        self._opened: dict[int, ControlSession] = {}
        self._is_closed = False

    @property
    def instance(self) -> InstanceId:
        """The instance that the service answers for."""
        return self._instance

    @property
    def port(self) -> int:
        """The tcp port listened on, also when the config asked for any."""
        return self._tcp_address[1]

    @property
    def endpoint(self) -> str:
        """ "host:port" for peers, with `advertise_host` where it is set."""
        return format_endpoint(self._config.advertise_host or self._tcp_address[0], self.port)

    @property
    def unix_name(self) -> str:
        """The abstract unix socket listened on, "@moonpool/<instance>"."""
        return unix_name_of(self._instance)

    @property
    def counters(self) -> dict[str, int]:
        """A copy of the counters that `CONTROL_COUNTERS` explains."""
        return self._counters.snapshot()

    def start(self) -> None:
        """Begins to serve."""
        self._loop_thread.start()
        self._loop_thread.post(self._listener.start)

    def connect(
        self, address: str, expected_instance: InstanceId | None = None, timeout_s: float | None = None
    ) -> ControlSession:
        """Opens a session with the engine at an address; blocks the caller, who owns the session.

        `address` is "host:port", "[v6]:port" or a unix name "@moonpool/..."; without `timeout_s` the bounds
        of the config hold. Raises `LimitExceeded` beyond `peers_max` sessions, and otherwise as `dial` does.
        """
        if self._is_closed:
            raise EngineClosed()
        bounds_ms = self._config.connect_timeout_ms + self._config.handshake_timeout_ms
        patience_s = bounds_ms / MS_PER_S if timeout_s is None else timeout_s
        deadline = Deadline.after_s(SystemClock().now_ns(), patience_s)
        request = DialRequest(ConnectionKind.CONTROL, self._instance, expected_instance)
        greeted = dial(address, request, self._config, deadline)
        # Taken once: by the control thread, or by this one when that thread did not come to it.
        ownership = threading.Lock()

        async def adopt() -> ControlSession:
            if not ownership.acquire(blocking=False):
                raise EngineClosed()
            return self._open_session(greeted)

        try:
            left_s = deadline.remaining_s(SystemClock().now_ns()) or 0.0
            return self._loop_thread.call(adopt, left_s, ControlSession.close)
        except BaseException:
            if ownership.acquire(blocking=False):
                greeted.close()
            raise

    def sessions(self) -> list[SessionInfo]:
        """The initiators that have a session now."""
        return [connection.info for connection in list(self._accepted.values())]

    def call_peers(
        self,
        method: str,
        params: Mapping[str, Any],
        timeout_s: float,
        session_ids: Collection[int] | None = None,
    ) -> dict[int, Any]:
        """Asks every connected initiator (or those of `session_ids`) at once and waits for all of them.

        Returns per session id its result, or the `MoonpoolError` it failed with: `TransferTimeout` when it
        did not answer, `PeerGone` when it left. Descriptors in answers are closed.
        """

        async def ask(connection: ControlConnection) -> Any:
            try:
                with await connection.request(method, params, timeout_s) as result:
                    return result.value
            except MoonpoolError as exc:
                return exc

        async def ask_all() -> dict[int, Any]:
            asked = {
                session_id: connection
                for session_id, connection in self._accepted.items()
                if session_ids is None or session_id in session_ids
            }
            answers = await asyncio.gather(*map(ask, asked.values()))
            return dict(zip(asked, answers, strict=True))

        return self._loop_thread.call(ask_all, timeout_s, lambda _answers: None)

    def close_session(self, session_id: int, reason: MoonpoolError) -> None:
        """Closes an initiator's session, soon; nothing happens when it is closed already."""

        def close() -> None:
            connection = self._accepted.get(session_id)
            if connection is not None:
                connection.close(reason)

        self._loop_thread.post(close)

    def close(self) -> None:
        """Closes listeners and sessions and joins the thread within close_timeout_ms; idempotent.

        Raises `InternalError` when called on the control thread, or when a hook does not return.
        """
        if self._loop_thread.is_foreign:
            self.abandon_after_fork()
            return
        if self._loop_thread.is_current:
            raise InternalError("the control service cannot be closed from its own thread")
        self._is_closed = True
        timeout_s = self._config.close_timeout_ms / MS_PER_S
        if not self._loop_thread.stop(self._close_all, timeout_s):
            message = "the control thread did not end within close_timeout_ms: a hook does not return"
            raise InternalError(message, timeout_ms=self._config.close_timeout_ms)
        self._listener.abandon()

    def abandon_after_fork(self) -> None:
        """In a forked child: closes the child's copies of all descriptors; the parent notices nothing."""
        self._is_closed = True
        self._loop_thread.abandon_after_fork()
        self._listener.abandon()
        for connection in list(self._accepted.values()):
            connection.abandon()
        for session in list(self._opened.values()):
            session.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    # On the control thread

    async def _close_all(self) -> None:
        await self._listener.close()
        reason = EngineClosed("this engine was closed")
        for connection in list(self._accepted.values()):
            connection.close(reason)
        for session in list(self._opened.values()):
            session.end(reason)

    def _has_room(self) -> bool:
        return len(self._accepted) + self._hooks.lanes_open() < self._config.connections_max

    def _begin_session(self, sock: socket.socket, arrival: Arrival) -> None:
        info = SessionInfo(
            session_id=next(self._session_ids),
            peer_instance=arrival.peer_instance,
            peer_address=arrival.peer_address,
            is_unix=arrival.is_unix,
            peer_pid=arrival.peer_pid,
            peer_uid=arrival.peer_uid,
        )
        connection = ControlConnection(sock, info, self._serving)
        self._accepted[info.session_id] = connection
        connection.on_closed(functools.partial(self._end_accepted, info))
        connection.start()

    def _end_accepted(self, info: SessionInfo, reason: MoonpoolError) -> None:
        del self._accepted[info.session_id]
        self._hooks.on_session_closed(info, reason)

    def _open_session(self, greeted: GreetedPeer) -> ControlSession:
        if len(self._opened) >= self._config.peers_max:
            greeted.close()
            message = f"{self._config.peers_max} sessions are open; close one or raise peers_max"
            raise LimitExceeded(message, field="peers_max", limit=self._config.peers_max)
        info = SessionInfo(
            session_id=next(self._session_ids),
            peer_instance=InstanceId(greeted.server.instance),
            peer_address=greeted.address.text,
            is_unix=greeted.address.is_unix,
            peer_pid=greeted.peer_pid,
            peer_uid=greeted.peer_uid,
        )
        greeted.sock.setblocking(False)
        connection = ControlConnection(greeted.sock, info, self._asking)
        session = ControlSession(connection, self._loop_thread, greeted.pidfd)
        self._opened[info.session_id] = session
        connection.on_closed(lambda _reason: self._opened.pop(info.session_id, None))
        connection.start()
        session.watch_process()
        return session
