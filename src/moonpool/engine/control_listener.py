"""Listening and the server's half of every hello, on the loop's thread.

Theory of operation
-------------------
Two listeners, tcp and an abstract unix socket, feed one set of unfinished hellos, oldest first. Each hello
has one deadline for all of it, so a client that sends a byte at a time gets no further than a silent one.
When `handshakes_max` are unfinished, a newcomer displaces the oldest: a flood then costs its own connections
first, since an honest client is done within a round trip. A listener that cannot accept (no free descriptor)
waits and tries again.

The server's last bytes are sent in one piece without waiting: the socket is fresh, so its buffer has room.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

from moonpool.config import EngineConfig
from moonpool.engine.control_channel import close_fds
from moonpool.engine.control_counters import ControlCounters
from moonpool.engine.peer_address import unix_name_of
from moonpool.engine.peer_credentials import PeerCredentials, is_trusted_uid, read_peer_credentials
from moonpool.engine.stream_options import stays_on_host, tune_listener, tune_stream_socket
from moonpool.errors import (
    HandshakeFailed,
    MoonpoolError,
    ProtocolError,
    ResourceError,
    Status,
    UsageError,
    status_of,
)
from moonpool.ids import InstanceId
from moonpool.metadata.endpoint import format_endpoint
from moonpool.wire.hello import NONCE_BYTES, ConnectionKind, ServerHandshake, ServerIdentity

logger: Final = logging.getLogger("moonpool.control")

ACCEPT_RETRY_FIRST_S: Final = 0.01
ACCEPT_RETRY_LAST_S: Final = 0.5

_REFUSAL_COUNTERS: Final[dict[Status, str]] = {
    Status.PROTOCOL: "versions_refused",
    Status.STALE_HANDLE: "instances_refused",
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """An initiator whose hello is proved, on either kind of socket; unix ones come with the kernel's word."""

    peer_instance: InstanceId
    peer_address: str
    is_unix: bool
    stays_on_host: bool
    peer_pid: int | None = None
    peer_uid: int | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """Where the listener sends what it let in; all are called on the loop's thread.

    `has_room()` says whether one more connection fits. `on_session(sock, arrival)` owns the non-blocking
    socket. `on_lane(fd, arrival)` owns the blocking descriptor unless it raises, which refuses the lane.
    """

    has_room: Callable[[], bool]
    on_session: Callable[[socket.socket, Arrival], object]
    on_lane: Callable[[int, Arrival], object]


def listen_tcp(config: EngineConfig) -> socket.socket:
    """A non-blocking listener on `bind_host` and `port`; the caller owns it.

    Raises `ResourceError` with the errno when the address cannot be taken (EADDRINUSE: another listener has
    it), `UsageError` when `bind_host` is no address of any host.
    """
    flags = socket.AI_PASSIVE | socket.AI_NUMERICSERV
    try:
        found = socket.getaddrinfo(config.bind_host, config.port, type=socket.SOCK_STREAM, flags=flags)
    except (socket.gaierror, UnicodeError) as exc:
        raise UsageError(f"bind_host {config.bind_host!r} is not known: {exc}", field="bind_host") from exc
    family, _, _, _, address = found[0]
    where = format_endpoint(config.bind_host, config.port)
    sock = _new_listener(family, where)
    try:
        # A restarted process must not wait for its predecessor's closed connections to time out.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        return _begin_listening(sock, address, config)
    except OSError as exc:
        sock.close()
        raise _cannot_listen(where, exc) from exc


def listen_unix(config: EngineConfig, instance: InstanceId) -> socket.socket:
    """A non-blocking listener on the instance's abstract unix socket, which leaves no file behind.

    Raises `ResourceError` with the errno when it cannot be had.
    """
    name = unix_name_of(instance)
    sock = _new_listener(socket.AF_UNIX, name)
    try:
        return _begin_listening(sock, "\0" + name[1:], config)
    except OSError as exc:
        sock.close()
        raise _cannot_listen(name, exc) from exc


@final
class ControlListener:
    """Owns the listeners and every accepted socket up to the end of its hello."""

    def __init__(
        self, config: EngineConfig, instance: InstanceId, counters: ControlCounters, doors: Doors
    ) -> None:
        self._config = config
        self._instance = instance
        self._counters = counters
        self._doors = doors
        self._tcp = listen_tcp(config)
        try:
            self._unix = listen_unix(config, instance)
        except BaseException:
            self._tcp.close()
            raise
        self._accepting: list[asyncio.Task[None]] = []
        # In order of arrival, so the first is the oldest.
        self._greeting: dict[asyncio.Task[None], socket.socket] = {}

    @property
    def tcp_address(self) -> tuple[str, int]:
        """(host, port) that the tcp listener has."""
        host, port = self._tcp.getsockname()[:2]
        return host, port

    def start(self) -> None:
        """Begins to accept; on the loop's thread."""
        loop = asyncio.get_running_loop()
        self._accepting = [
            loop.create_task(self._accept_forever(listener)) for listener in (self._tcp, self._unix)
        ]

    async def close(self) -> None:
        """Stops accepting and drops unfinished hellos; on the loop's thread."""
        tasks = [*self._accepting, *self._greeting]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.abandon()

    def abandon(self) -> None:
        """Closes the descriptors and leaves the loop alone: before a start, or in a forked child."""
        for sock in (self._tcp, self._unix, *self._greeting.values()):
            sock.close()

    async def _accept_forever(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        pause_s = ACCEPT_RETRY_FIRST_S
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError:
                self._counters.add("accept_failures")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, ACCEPT_RETRY_LAST_S)
                continue
            pause_s = ACCEPT_RETRY_FIRST_S
            self._counters.add("connections_accepted")
            self._begin_greeting(sock)
            # Accepting never waits while a flood lasts; the other tasks must have their turns.
            await asyncio.sleep(0)

    def _begin_greeting(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if len(self._greeting) >= self._config.handshakes_max:
            oldest = next(iter(self._greeting))
            del self._greeting[oldest]
            self._counters.add("handshakes_evicted")
            oldest.cancel()
        task = asyncio.get_running_loop().create_task(self._greet_within(sock))
        self._greeting[task] = sock
        task.add_done_callback(lambda done: self._end_greeting(done, sock))

    def _end_greeting(self, task: asyncio.Task[None], sock: socket.socket) -> None:
        # Here and not in the task: one that is cancelled before its first step never runs its own clean-up.
        self._greeting.pop(task, None)
        if task.cancelled():
            sock.close()

    async def _greet_within(self, sock: socket.socket) -> None:
        try:
            async with asyncio.timeout(self._config.handshake_timeout_ms / 1e3):
                await self._greet(sock)
        except ProtocolError:
            self._drop(sock, "hellos_malformed")
        except HandshakeFailed:
            self._drop(sock, "handshakes_cut_off")
        except TimeoutError:
            self._drop(sock, "handshakes_timed_out")
        except OSError:
            self._drop(sock, "handshakes_cut_off")
        except Exception:
            # A hook of the engine's failed; the listener must outlive it.
            self._drop(sock, "handler_bugs")
            logger.exception("a hello could not be served")
        except BaseException:
            sock.close()
            raise

    def _drop(self, sock: socket.socket, counter: str) -> None:
        self._counters.add(counter)
        sock.close()

    async def _greet(self, sock: socket.socket) -> None:
        is_unix = sock.family == socket.AF_UNIX
        credentials = read_peer_credentials(sock) if is_unix else None
        identity = ServerIdentity(self._instance, self._config.cluster_secret, os.getpid() if is_unix else 0)
        handshake = ServerHandshake(identity, os.urandom(NONCE_BYTES))
        verdict = handshake.receive(await _receive_exactly(sock, handshake.needed))
        if verdict is not Status.COMPLETE:
            self._counters.add(_REFUSAL_COUNTERS[verdict])
        elif credentials is not None and not is_trusted_uid(credentials.uid):
            self._counters.add("users_refused")
            verdict = Status.ACCESS_DENIED
        elif handshake.client is not None and handshake.client.kind is ConnectionKind.RPC:
            # The store's master has a port of its own.
            self._counters.add("kinds_refused")
            verdict = Status.PROTOCOL
        elif handshake.asks_for_secret:
            _send_now(sock, handshake.challenge())
            verdict = handshake.receive(await _receive_exactly(sock, handshake.needed))
            if verdict is not Status.COMPLETE:
                self._counters.add("secrets_refused")
        self._let_in(sock, handshake, verdict, credentials)

    def _let_in(
        self,
        sock: socket.socket,
        handshake: ServerHandshake,
        verdict: Status,
        credentials: PeerCredentials | None,
    ) -> None:
        """Answers, and passes the socket on when it may come in; no other task runs in between."""
        client = handshake.client
        if verdict is Status.COMPLETE and not self._doors.has_room():
            self._counters.add("connections_refused")
            verdict = Status.QUEUE_FULL
        if verdict is not Status.COMPLETE or client is None:
            _send_now(sock, handshake.answer(verdict))
            sock.close()
            return
        tune_stream_socket(sock, self._config)
        arrival = _arrival(sock, InstanceId(client.instance), credentials)
        if client.kind is ConnectionKind.LANE:
            verdict = self._hand_over_lane(sock, arrival)
            if verdict is Status.COMPLETE:
                self._counters.add("handshakes_completed")
            _send_now(sock, handshake.answer(verdict))
            sock.close()
            return
        _send_now(sock, handshake.answer(verdict))
        self._counters.add("handshakes_completed")
        self._doors.on_session(sock, arrival)

    def _hand_over_lane(self, sock: socket.socket, arrival: Arrival) -> Status:
        """Asks the engine before the client is answered, so that a refusal still has a reason."""
        try:
            fd = os.dup(sock.fileno())
        except OSError:
            self._counters.add("lanes_refused")
            return Status.NO_MEMORY
        # Of the open file, which both descriptors share.
        os.set_blocking(fd, True)
        try:
            self._doors.on_lane(fd, arrival)
        except Exception as exc:
            close_fds((fd,))
            self._counters.add("lanes_refused")
            if not isinstance(exc, MoonpoolError):
                self._counters.add("handler_bugs")
            return status_of(exc)
        self._counters.add("lanes_accepted")
        return Status.COMPLETE


def _arrival(sock: socket.socket, instance: InstanceId, credentials: PeerCredentials | None) -> Arrival:
    if credentials is None:
        peer = sock.getpeername()
        address = format_endpoint(peer[0], peer[1])
        return Arrival(
            peer_instance=instance,
            peer_address=address,
            is_unix=False,
            stays_on_host=stays_on_host(sock),
        )
    return Arrival(
        peer_instance=instance,
        peer_address=f"unix process {credentials.pid}",
        is_unix=True,
        stays_on_host=True,
        peer_pid=credentials.pid,
        peer_uid=credentials.uid,
    )


async def _receive_exactly(sock: socket.socket, size_bytes: int) -> bytes:
    loop = asyncio.get_running_loop()
    received = bytearray()
    while len(received) < size_bytes:
        piece = await loop.sock_recv(sock, size_bytes - len(received))
        if not piece:
            raise HandshakeFailed("the client closed the connection during the hello")
        received += piece
    return bytes(received)


def _send_now(sock: socket.socket, data: bytes) -> None:
    flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
    try:
        sent = sock.send(data, flags)
    except BlockingIOError:
        sent = 0
    if sent != len(data):
        raise HandshakeFailed("the client's connection took no answer")


def _new_listener(family: int, where: str) -> socket.socket:
    try:
        return socket.socket(family, socket.SOCK_STREAM)
    except OSError as exc:
        raise _cannot_listen(where, exc) from exc


def _begin_listening(
    sock: socket.socket, address: str | tuple[object, ...], config: EngineConfig
) -> socket.socket:
    sock.bind(address)
    tune_listener(sock, config)
    sock.listen(config.connections_max)
    sock.setblocking(False)
    return sock


def _cannot_listen(where: str, exc: OSError) -> ResourceError:
    advice = "stop what listens there or choose another port"
    if exc.errno in (errno.EMFILE, errno.ENFILE):
        advice = "close some descriptors or raise `ulimit -n`"
    message = f"cannot listen on {where}: {exc.strerror}; {advice}"
    return ResourceError(message, errno=exc.errno or 0, value=where)
