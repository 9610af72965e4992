"""Requests and replies between two engines, over one channel; the same for both ends of a connection.

Both ends may ask. A request is answered by a handler: a plain function run on the loop's thread, which must
not block; one that has to wait returns an awaitable instead (a revoke waits for transfers). The first reason
to close is kept: everyone who waits is told it, then each `on_closed` callback is.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self, TypeAlias, final

from moonpool.engine.control_channel import (
    ChannelBounds,
    ChannelEvents,
    ControlChannel,
    OutboundBudget,
    close_fds,
)
from moonpool.engine.control_counters import ControlCounters
from moonpool.errors import (
    MoonpoolError,
    PeerGone,
    PeerStalled,
    ProtocolError,
    QueueFull,
    TransferTimeout,
    UnsupportedOperation,
)
from moonpool.ids import InstanceId
from moonpool.wire.control import (
    ControlMessage,
    PushMessage,
    ReplyMessage,
    RequestMessage,
    encode_message,
    error_from_wire,
    wire_error,
)

logger: Final = logging.getLogger("moonpool.control")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """Who is at the other end of a control session; `peer_pid` and `peer_uid` only over unix sockets."""

    session_id: int
    peer_instance: InstanceId
    peer_address: str
    is_unix: bool = False
    peer_pid: int | None = None
    peer_uid: int | None = None


@final
@dataclass(frozen=True, slots=True)
class Reply:
    """What a handler returns to pass descriptors: borrowed, and duplicated before any handler runs again."""

    result: object = None
    fds: Sequence[int] = ()


Handler: TypeAlias = Callable[[SessionInfo, Mapping[str, Any]], object]


@final
class Result:
    """The answer to a request: a value, and descriptors that it owns (close-on-exec) until `take_fds`.

    `close`, or the end of the object, closes what was not taken.
    """

    __slots__ = ("_fds", "value")

    def __init__(self, value: Any, fds: Sequence[int] = ()) -> None:
        self.value = value
        self._fds = list(fds)

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors still owned by this result, borrowed."""
        return tuple(self._fds)

    def take_fds(self) -> list[int]:
        """Passes the descriptors' ownership to the caller."""
        taken, self._fds = self._fds, []
        return taken

    def close(self) -> None:
        """Closes the descriptors that nobody took; idempotent."""
        close_fds(self.take_fds())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """What all connections of one direction share; `requests_max` bounds what is in flight each way."""

    handlers: Mapping[str, Handler]
    bounds: ChannelBounds
    budget: OutboundBudget
    counters: ControlCounters = field(default_factory=ControlCounters)
    requests_max: int = 64


@final
class ControlConnection:
    """Owns a channel; every method but the properties belongs to the loop's thread.

    States: open, then closed with a reason, for good.
    """

    def __init__(self, sock: socket.socket, info: SessionInfo, settings: ConnectionSettings) -> None:
        self.info = info
        self._settings = settings
        self._counters = settings.counters
        events = ChannelEvents(received=self._received, failed=self.close)
        self._channel = ControlChannel(sock, settings.bounds, settings.budget, events)
        self._next_id = 1
        self._waiting: dict[int, asyncio.Future[Result]] = {}
        self._serving: set[asyncio.Future[Any]] = set()
        self._on_closed: list[Callable[[MoonpoolError], object]] = []
        self._closed_reason: MoonpoolError | None = None

    @property
    def closed_reason(self) -> MoonpoolError | None:
        """Why the connection closed; None while it is open."""
        return self._closed_reason

    def start(self) -> None:
        """Begins to serve."""
        self._counters.add("sessions_opened")
        self._channel.start()

    def on_closed(self, callback: Callable[[MoonpoolError], object]) -> None:
        """Calls back once with the reason, at once when closed already."""
        if self._closed_reason is None:
            self._on_closed.append(callback)
        else:
            self._call_back(callback, self._closed_reason)

    async def request(self, method: str, params: Mapping[str, Any], timeout_s: float) -> Result:
        """Asks the other end and waits for its answer.

        Raises the error the peer answered with, `TransferTimeout`, `QueueFull` beyond `requests_max`, the
        reason when the connection closes, `UsageError` or `LimitExceeded` for params that fit no frame.
        """
        if self._closed_reason is not None:
            raise copy.copy(self._closed_reason)
        if len(self._waiting) >= self._settings.requests_max:
            message = "too many control requests to this peer wait for an answer"
            raise QueueFull(message, peer=self.info.peer_address, limit=self._settings.requests_max)
        request_id, self._next_id = self._next_id, self._next_id + 1
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = answer
        try:
            self._channel.send(encode_message(RequestMessage(request_id, method, params)))
            await asyncio.wait((answer,), timeout=timeout_s)
            if not answer.done():
                message = f"the peer did not answer the control request {method} in time"
                raise TransferTimeout(message, peer=self.info.peer_address, timeout_ms=timeout_s * 1e3)
            return answer.result()
        finally:
            del self._waiting[request_id]
            # An answer that comes to a request just cancelled was seen, as far as asyncio is concerned.
            if answer.done() and not answer.cancelled():
                answer.exception()

    def close(self, reason: MoonpoolError) -> None:
        """Closes the connection for a reason; idempotent, the first reason stays."""
        if self._closed_reason is not None:
            return
        self._closed_reason = reason
        self._counters.add("sessions_closed")
        if isinstance(reason, ProtocolError):
            self._counters.add("sessions_broken")
        elif isinstance(reason, PeerStalled):
            self._counters.add("sessions_stalled")
        self._channel.close()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(copy.copy(reason))
        for serving in self._serving:
            serving.cancel()
        callbacks, self._on_closed = self._on_closed, []
        for callback in callbacks:
            self._call_back(callback, reason)

    def abandon(self) -> None:
        """In a forked child: closes the child's copies of the descriptors and calls nobody."""
        self._closed_reason = self._closed_reason or PeerGone("the connection belongs to the parent process")
        self._channel.abandon()

    def _call_back(self, callback: Callable[[MoonpoolError], object], reason: MoonpoolError) -> None:
        try:
            callback(reason)
        except Exception:
            self._counters.add("handler_bugs")
            logger.exception("a callback failed on a closed session with %s", self.info.peer_address)

    def _received(self, message: ControlMessage, fds: list[int]) -> None:
        if isinstance(message, ReplyMessage):
            self._take_answer(message, fds)
        elif fds:
            close_fds(fds)
            self.close(ProtocolError("descriptors came with a request", peer=self.info.peer_address))
        elif isinstance(message, RequestMessage):
            self._serve(message)
        elif isinstance(message, PushMessage):
            # Version 1 has no pushes; a later one may add some that need no answer from us.
            self._counters.add("pushes_ignored")

    def _take_answer(self, reply: ReplyMessage, fds: list[int]) -> None:
        result = Result(reply.result, fds)
        answer = self._waiting.get(reply.request_id)
        if not 0 < reply.request_id < self._next_id:
            result.close()
            self.close(ProtocolError("a reply came to no request", peer=self.info.peer_address))
        elif answer is None or answer.done():
            result.close()
            self._counters.add("replies_unclaimed")
        elif reply.error is not None:
            result.close()
            answer.set_exception(error_from_wire(reply.error, self.info.peer_address))
        else:
            answer.set_result(result)

    def _serve(self, request: RequestMessage) -> None:
        handler = self._settings.handlers.get(request.method)
        if handler is None:
            self._counters.add("requests_unknown")
            error = UnsupportedOperation(f"this engine has no control method {request.method!r}")
            self._answer_error(request, error)
            return
        try:
            outcome = handler(self.info, request.params)
        except Exception as exc:
            self._answer_error(request, exc)
            return
        if not inspect.isawaitable(outcome):
            self._answer(request, outcome)
        elif len(self._serving) < self._settings.requests_max:
            serving = asyncio.ensure_future(self._serve_later(request, outcome))
            self._serving.add(serving)
            serving.add_done_callback(self._serving.discard)
        else:
            if inspect.iscoroutine(outcome):
                outcome.close()
            message = "too many requests of this session are being served"
            self._answer_error(request, QueueFull(message, limit=self._settings.requests_max))

    async def _serve_later(self, request: RequestMessage, outcome: Awaitable[object]) -> None:
        try:
            value = await outcome
        except Exception as exc:
            self._answer_error(request, exc)
        else:
            self._answer(request, value)

    def _answer(self, request: RequestMessage, outcome: object) -> None:
        reply = outcome if isinstance(outcome, Reply) else Reply(outcome)
        if self._closed_reason is not None:
            return
        try:
            frame = encode_message(ReplyMessage(request.request_id, None, reply.result))
            self._channel.send(frame, reply.fds, is_bulk=True)
        except MoonpoolError as exc:
            self._answer_error(request, exc)
        else:
            self._counters.add("requests_served")

    def _answer_error(self, request: RequestMessage, error: Exception) -> None:
        if not isinstance(error, MoonpoolError):
            self._counters.add("handler_bugs")
            logger.error("the handler of %s failed", request.method, exc_info=error)
        self._counters.add("requests_failed")
        if self._closed_reason is not None:
            return
        try:
            self._channel.send(encode_message(ReplyMessage(request.request_id, wire_error(error))))
        except PeerGone:
            # The channel has failed already and will say so.
            return
        except MoonpoolError as exc:
            # Not even an error fits: the peer must not be left waiting for its answer.
            self.close(exc)
