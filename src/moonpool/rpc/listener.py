"""Accepting connections and their hellos, in a thread of its own, for a loop that serves them.

Theory of operation
-------------------
Each listener (tcp or unix) feeds one set of unfinished hellos, oldest first. A hello has one deadline for
all of it, and when `handshakes_max` are unfinished a newcomer displaces the oldest: a flood costs its own
connections first. A listener that cannot accept (no free descriptor) is left alone for a while, longer each
time. A connection goes to the loop only when its hello is proved; a unix peer must also run as our user or
as root.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, final

from moonpool.config import EngineConfig
from moonpool.engine.peer_credentials import is_trusted_uid, read_peer_credentials
from moonpool.engine.stream_options import tune_listener, tune_stream_socket
from moonpool.errors import MoonpoolError, ProtocolError, ResourceError, Status
from moonpool.ids import InstanceId
from moonpool.metadata.endpoint import format_endpoint
from moonpool.rpc.endpoints import Listening, listen_on
from moonpool.rpc.limits import ServerLimits
from moonpool.wire.hello import NONCE_BYTES, ConnectionKind, ServerHandshake, ServerIdentity

logger: Final = logging.getLogger("moonpool.rpc")

ACCEPT_RETRY_FIRST_S: Final = 0.01
ACCEPT_RETRY_LAST_S: Final = 0.5
_ACCEPTS_AT_ONCE: Final = 64
_IDLE_S: Final = 3600.0


class ConnectionTaker(Protocol):
    """What takes greeted connections (`RpcServer`)."""

    @property
    def has_room(self) -> bool:
        """Whether one more connection fits."""
        ...

    def add(self, fd: int, label: str = "") -> int:
        """Takes the descriptor of a connection; raises a `MoonpoolError` when it cannot."""
        ...


@final
@dataclass(slots=True)
class _Greeting:
    """An accepted socket whose hello is not finished."""

    sock: socket.socket
    handshake: ServerHandshake
    deadline_s: float
    verdict: Status | None = None
    received: bytearray = field(default_factory=bytearray)


@final
@dataclass(slots=True)
class _Gate:
    """A listener; not accepting before `closed_until_s` after it could not."""

    listening: Listening
    pause_s: float = ACCEPT_RETRY_FIRST_S
    closed_until_s: float = 0.0


@final
class RpcListener:
    """Owns its listeners, its thread, and each accepted socket up to the end of its hello.

    `endpoints` are "host:port" (port 0: the system chooses), "@abstract name" and "/path/of/a/socket".
    Raises `ResourceError` when one cannot be had, `UsageError` for a text that is none.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        taker: ConnectionTaker,
        *,
        instance: InstanceId,
        secret: bytes | None = None,
        limits: ServerLimits | None = None,
    ) -> None:
        self._limits = limits or ServerLimits()
        self._taker = taker
        self._config = EngineConfig(cluster_secret=secret, stall_timeout_ms=self._limits.stall_ms)
        self._instance = instance
        self._greetings: dict[socket.socket, _Greeting] = {}
        self._counters: dict[str, int] = dict.fromkeys(_COUNTERS, 0)
        self._gates: list[_Gate] = []
        self._selector = selectors.DefaultSelector()
        self._is_closing = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, None)
        try:
            for endpoint in endpoints:
                listening = listen_on(endpoint, backlog=self._limits.connections_max)
                self._gates.append(_Gate(listening))
                tune_listener(listening.sock, self._config)
                self._selector.register(listening.sock, selectors.EVENT_READ, self._gates[-1])
        except BaseException:
            self._close_all()
            raise
        self._thread = threading.Thread(target=self._run, name="moonpool-rpc-accept", daemon=True)

    @property
    def addresses(self) -> list[str]:
        """What clients may connect to, in the order of the endpoints, with the ports that were given."""
        return [gate.listening.address for gate in self._gates]

    @property
    def counters(self) -> dict[str, int]:
        """Totals since the start, and the gauge `handshakes_open`."""
        return {**self._counters, "handshakes_open": len(self._greetings)}

    def start(self) -> None:
        """Begins to accept."""
        self._thread.start()

    def close(self) -> None:
        """Stops accepting and drops unfinished hellos; connections that were let in stay. Idempotent."""
        if not self._is_closing:
            self._is_closing = True
            os.eventfd_write(self._wake_fd, 1)
            if self._thread.ident is not None:
                self._thread.join()
            self._close_all()

    def _close_all(self) -> None:
        for sock in list(self._greetings):
            sock.close()
        self._greetings.clear()
        self._selector.close()
        for gate in self._gates:
            gate.listening.close()
        os.close(self._wake_fd)

    # The thread

    def _run(self) -> None:
        while not self._is_closing:
            for key, _ in self._selector.select(self._wait_s()):
                if isinstance(key.data, _Gate):
                    self._accept(key.data)
                elif isinstance(key.data, _Greeting) and key.data.sock in self._greetings:
                    self._advance(key.data)
            now_s = time.monotonic()
            self._expire(now_s)
            self._reopen(now_s)

    def _wait_s(self) -> float:
        now_s = time.monotonic()
        ends = [gate.closed_until_s for gate in self._gates if gate.closed_until_s]
        if self._greetings:
            # All have the same time, so the oldest ends first.
            ends.append(next(iter(self._greetings.values())).deadline_s)
        return max(0.0, min(ends, default=now_s + _IDLE_S) - now_s)

    def _accept(self, gate: _Gate) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                sock, _address = gate.listening.sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._count("accept_failures")
                self._selector.unregister(gate.listening.sock)
                gate.closed_until_s = time.monotonic() + gate.pause_s
                gate.pause_s = min(2 * gate.pause_s, ACCEPT_RETRY_LAST_S)
                return
            gate.pause_s = ACCEPT_RETRY_FIRST_S
            self._count("connections_accepted")
            self._begin(sock)

    def _reopen(self, now_s: float) -> None:
        for gate in self._gates:
            if gate.closed_until_s and now_s >= gate.closed_until_s:
                gate.closed_until_s = 0.0
                self._selector.register(gate.listening.sock, selectors.EVENT_READ, gate)

    def _begin(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if len(self._greetings) >= self._limits.handshakes_max:
            self._drop(next(iter(self._greetings.values())), "handshakes_evicted")
        pid = os.getpid() if sock.family == socket.AF_UNIX else 0
        identity = ServerIdentity(self._instance, self._config.cluster_secret, pid)
        handshake = ServerHandshake(identity, os.urandom(NONCE_BYTES))
        greeting = _Greeting(sock, handshake, time.monotonic() + self._limits.handshake_ms / 1e3)
        try:
            self._selector.register(sock, selectors.EVENT_READ, greeting)
        except OSError:
            self._count("accept_failures")
            sock.close()
            return
        self._greetings[sock] = greeting

    def _expire(self, now_s: float) -> None:
        for greeting in list(self._greetings.values()):
            if now_s < greeting.deadline_s:
                return
            self._drop(greeting, "handshakes_timed_out")

    def _forget(self, greeting: _Greeting) -> None:
        self._selector.unregister(greeting.sock)
        del self._greetings[greeting.sock]

    def _drop(self, greeting: _Greeting, counter: str) -> None:
        self._count(counter)
        self._forget(greeting)
        greeting.sock.close()

    def _count(self, counter: str) -> None:
        self._counters[counter] += 1

    # One hello

    def _advance(self, greeting: _Greeting) -> None:
        handshake = greeting.handshake
        try:
            piece = greeting.sock.recv(handshake.needed - len(greeting.received))
            if not piece:
                self._drop(greeting, "handshakes_cut_off")
                return
            greeting.received += piece
            if len(greeting.received) < handshake.needed:
                return
            data, greeting.received = bytes(greeting.received), bytearray()
            self._judge(greeting, handshake.receive(data))
        except (BlockingIOError, InterruptedError):
            return
        except ProtocolError:
            self._drop(greeting, "hellos_malformed")
        except OSError:
            self._drop(greeting, "handshakes_cut_off")
        except Exception:
            # The listener must outlive a bug in one hello.
            logger.exception("a hello could not be served")
            self._drop(greeting, "handshakes_failed")

    def _judge(self, greeting: _Greeting, verdict: Status) -> None:
        handshake, client = greeting.handshake, greeting.handshake.client
        if greeting.verdict is None and verdict is Status.COMPLETE and client is not None:
            verdict = self._admit(greeting.sock, client.kind)
            greeting.verdict = verdict
            if verdict is Status.COMPLETE and handshake.asks_for_secret:
                _send_now(greeting.sock, handshake.challenge())
                return
        elif verdict is not Status.COMPLETE:
            self._count("secrets_refused" if verdict is Status.ACCESS_DENIED else "hellos_refused")
        if verdict is Status.COMPLETE and not self._taker.has_room:
            self._count("connections_refused")
            verdict = Status.QUEUE_FULL
        _send_now(greeting.sock, handshake.answer(verdict))
        self._forget(greeting)
        if verdict is Status.COMPLETE:
            self._hand_over(greeting.sock)
        else:
            greeting.sock.close()

    def _admit(self, sock: socket.socket, kind: ConnectionKind) -> Status:
        """What may be refused before any proof: another kind of connection, another user."""
        if kind is not ConnectionKind.RPC:
            self._count("kinds_refused")
            return Status.PROTOCOL
        if sock.family == socket.AF_UNIX and not is_trusted_uid(read_peer_credentials(sock).uid):
            self._count("users_refused")
            return Status.ACCESS_DENIED
        return Status.COMPLETE

    def _hand_over(self, sock: socket.socket) -> None:
        try:
            tune_stream_socket(sock, self._config)
            label = _label(sock)
        except OSError:
            self._count("handshakes_cut_off")
            sock.close()
            return
        fd = sock.detach()
        try:
            self._taker.add(fd, label)
        except MoonpoolError:
            self._count("connections_refused")
            os.close(fd)
        else:
            self._count("handshakes_completed")


_COUNTERS: Final = (
    "connections_accepted",
    "accept_failures",
    "handshakes_completed",
    "handshakes_evicted",
    "handshakes_timed_out",
    "handshakes_cut_off",
    "handshakes_failed",
    "hellos_malformed",
    "hellos_refused",
    "kinds_refused",
    "users_refused",
    "secrets_refused",
    "connections_refused",
)


def _label(sock: socket.socket) -> str:
    if sock.family == socket.AF_UNIX:
        return f"unix process {read_peer_credentials(sock).pid}"
    peer = sock.getpeername()
    return format_endpoint(peer[0], peer[1])


def _send_now(sock: socket.socket, data: bytes) -> None:
    """The socket is fresh, so its buffer has room; if not, its client is not worth waiting for."""
    with contextlib.suppress(BlockingIOError):
        if sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) == len(data):
            return
    raise ResourceError("the client's connection took no answer")
