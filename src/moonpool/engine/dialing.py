"""Connecting to a peer and its hello, in the calling thread, within a deadline.

A thread that needs a connection waits for it here itself, so no other traffic waits with it. Whatever goes
wrong, the socket and the pidfd are closed before the error leaves.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

from moonpool.clock import Deadline, SystemClock
from moonpool.config import EngineConfig
from moonpool.engine.control_channel import close_fds
from moonpool.engine.peer_address import PeerAddress, connect_failure, resolve_peer_address
from moonpool.engine.peer_credentials import (
    PeerCredentials,
    is_trusted_uid,
    open_peer_pidfd,
    read_peer_credentials,
)
from moonpool.engine.stream_options import tune_before_connect, tune_stream_socket
from moonpool.errors import (
    AccessDenied,
    HandshakeFailed,
    InternalError,
    MoonpoolError,
    PeerError,
    PeerRefused,
    PeerStalled,
    ResourceError,
    TransferTimeout,
)
from moonpool.ids import ANY_INSTANCE, InstanceId
from moonpool.wire.hello import NONCE_BYTES, ClientHandshake, ClientHello, ConnectionKind, ServerHello

_RETRY_FIRST_S: Final = 0.001
_RETRY_LAST_S: Final = 0.05
_clock: Final = SystemClock()


@final
@dataclass(frozen=True, slots=True)
class DialRequest:
    """What a connection is for: whom we are, whom we expect (None: anyone), and for which use.

    `on_socket` is called with each descriptor before it is waited on, and may raise a MoonpoolError.
    """

    kind: ConnectionKind
    instance: InstanceId
    expected_instance: InstanceId | None = None
    on_socket: Callable[[int], None] | None = None


@final
@dataclass(slots=True)
class GreetedPeer:
    """A connection whose hello ended well; owns its blocking socket and pidfd until they are taken.

    `peer_pid` and `pidfd` are set when the kernel and the peer itself name the same process: over tcp, or
    across pid namespaces, they are None.
    """

    sock: socket.socket
    server: ServerHello
    address: PeerAddress
    peer_pid: int | None = None
    peer_uid: int | None = None
    pidfd: int | None = None

    def close(self) -> None:
        """Closes the socket and the pidfd; idempotent."""
        self.sock.close()
        pidfd, self.pidfd = self.pidfd, None
        if pidfd is not None:
            close_fds((pidfd,))


def dial(address: str, request: DialRequest, config: EngineConfig, deadline: Deadline) -> GreetedPeer:
    """Connects, sets the socket's options, and does the hello; blocks, without the GIL, until the deadline.

    Raises `PeerRefused` (nothing listens), `PeerStalled` (unreachable, or no answer within
    connect_timeout_ms), `TransferTimeout` (the deadline passed before a connection was made),
    `HandshakeFailed` (the hello was not finished in time or was cut off), `AccessDenied` (secret or user),
    `StaleHandle` (another instance), `ProtocolError` (another protocol or version), `ResourceError` (this
    machine), and `UsageError` for a text that is no address.
    """
    failure: MoonpoolError | None = None
    for peer in resolve_peer_address(address, deadline):
        try:
            sock = _connect(peer, request, config, deadline)
        except (PeerError, ResourceError) as exc:
            failure = exc
            if isinstance(exc, TransferTimeout):
                break
            continue
        return _greet(sock, peer, request, config, deadline)
    raise failure or InternalError("an address resolved to nothing", peer=address)


def _connect(
    peer: PeerAddress, request: DialRequest, config: EngineConfig, deadline: Deadline
) -> socket.socket:
    try:
        sock = socket.socket(peer.family, socket.SOCK_STREAM)
    except OSError as exc:
        raise connect_failure(exc, peer.text) from exc
    try:
        if request.on_socket is not None:
            request.on_socket(sock.fileno())
        limit = deadline.earlier(Deadline.after_ms(_clock.now_ns(), config.connect_timeout_ms))
        if peer.is_unix:
            _connect_unix(sock, peer, limit)
        else:
            sock.settimeout(_left_s(limit))
            tune_before_connect(sock, peer.address, config)
            sock.connect(peer.address)
            if sock.getsockname() == sock.getpeername():
                # A free port of this host, picked as our own source port: TCP connected the socket to itself.
                raise PeerRefused(peer=peer.text)
        tune_stream_socket(sock, config)
        return sock
    except TimeoutError as exc:
        sock.close()
        if deadline.expired(_clock.now_ns()):
            message = "the deadline passed before a connection was made"
            raise TransferTimeout(message, peer=peer.text) from exc
        message = "the peer's host did not answer within connect_timeout_ms"
        raise PeerStalled(message, peer=peer.text, timeout_ms=config.connect_timeout_ms) from exc
    except MoonpoolError:
        sock.close()
        raise
    except OSError as exc:
        sock.close()
        raise connect_failure(exc, peer.text) from exc
    except BaseException:
        sock.close()
        raise


def _connect_unix(sock: socket.socket, peer: PeerAddress, limit: Deadline) -> None:
    """A unix socket with a full queue refuses at once with EAGAIN, where tcp would wait: so wait here."""
    pause_s = _RETRY_FIRST_S
    sock.setblocking(False)
    while True:
        try:
            sock.connect(peer.address)
            return
        except BlockingIOError:
            time.sleep(min(pause_s, _left_s(limit)))
            pause_s = min(2 * pause_s, _RETRY_LAST_S)


def _greet(
    sock: socket.socket,
    peer: PeerAddress,
    request: DialRequest,
    config: EngineConfig,
    deadline: Deadline,
) -> GreetedPeer:
    pidfd: int | None = None
    try:
        credentials: PeerCredentials | None = None
        if peer.is_unix:
            credentials = _trusted_credentials(sock, peer)
            # Before the hello: the peer's answer then proves that its pid still was its own (see there).
            pidfd = open_peer_pidfd(sock, credentials.pid)
        hello = ClientHello(
            request.kind, request.instance, os.urandom(NONCE_BYTES), request.expected_instance or ANY_INSTANCE
        )
        handshake = ClientHandshake(hello, config.cluster_secret, peer.text)
        limit = deadline.earlier(Deadline.after_ms(_clock.now_ns(), config.handshake_timeout_ms))
        server = _shake(sock, handshake, peer.text, limit)
        sock.settimeout(None)
        greeted = GreetedPeer(sock, server, peer, pidfd=pidfd)
        if credentials is not None:
            greeted.peer_uid = credentials.uid
            if server.pid == credentials.pid:
                greeted.peer_pid = credentials.pid
            elif pidfd is not None:
                close_fds((pidfd,))
                greeted.pidfd = None
        return greeted
    except BaseException:
        sock.close()
        if pidfd is not None:
            close_fds((pidfd,))
        raise


def _trusted_credentials(sock: socket.socket, peer: PeerAddress) -> PeerCredentials:
    """Abstract unix names belong to whoever binds them first, so the client checks the server's user too."""
    credentials = read_peer_credentials(sock)
    if not is_trusted_uid(credentials.uid):
        message = f"the process behind the unix socket runs as user {credentials.uid}, which is not ours"
        raise AccessDenied(message, peer=peer.text)
    return credentials


def _shake(sock: socket.socket, handshake: ClientHandshake, peer: str, limit: Deadline) -> ServerHello:
    outgoing = handshake.begin()
    try:
        while handshake.needed:
            if outgoing:
                sock.settimeout(_left_s(limit))
                sock.sendall(outgoing)
            outgoing = handshake.receive(_receive_exactly(sock, handshake.needed, limit))
    except MoonpoolError:
        raise
    except TimeoutError as exc:
        raise HandshakeFailed("the peer did not finish the hello in time", peer=peer) from exc
    except OSError as exc:
        message = f"the connection ended during the hello ({exc.strerror or exc}); the peer may be overloaded"
        raise HandshakeFailed(message, peer=peer, errno=exc.errno or 0) from exc
    if handshake.server is None:
        raise InternalError("the hello ended without the peer's part")
    return handshake.server


def _receive_exactly(sock: socket.socket, size_bytes: int, limit: Deadline) -> bytes:
    received = bytearray()
    while len(received) < size_bytes:
        sock.settimeout(_left_s(limit))
        piece = sock.recv(size_bytes - len(received))
        if not piece:
            raise ConnectionResetError(0, "closed by the peer")
        received += piece
    return bytes(received)


def _left_s(limit: Deadline) -> float:
    """Seconds left for a socket's timeout; raises TimeoutError at 0, which would mean non-blocking."""
    left_s = limit.remaining_s(_clock.now_ns())
    if not left_s:
        raise TimeoutError
    return left_s
