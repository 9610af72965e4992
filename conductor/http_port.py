"""A small HTTP/1.1 server on asyncio: requests parsed by httptools, one answer each, every wait bounded.

It is here because a general framework costs more than the conductor's work on a request does. What it leaves
out it refuses: upgrades, trailers' meaning, streamed answers. Source of the rules: RFC 9112.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any, Final, NamedTuple, TypeAlias, final

from moonpool.errors import ResourceError

logger: Final = logging.getLogger("moonpool.http")

#: Longest request line and headers together, in bytes.
HEAD_BYTES_MAX: Final = 64 * 1024
#: Most requests of one connection that wait for the one before them; then it is not read any more.
PIPELINE_MAX: Final = 16
_SWEEP_S: Final = 1.0
_LINGER_S: Final = 2.0
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


def load_httptools() -> Any:
    """The parser module; raises `ResourceError` that says how to get it."""
    try:
        import httptools
    except ImportError as exc:
        raise ResourceError("the service needs httptools; install moonpool[service]") from exc
    return httptools


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Bounds of one port; times are seconds."""

    body_bytes_max: int
    connections_max: int = 1_024
    #: From the first byte of a request to its last, and from an answer to the client's having taken it.
    request_s: float = 30.0
    #: Between an answer and the next request.
    idle_s: float = 75.0


@final
@dataclass(slots=True)
class HttpRequest:
    """One request, whole. `path` is as it was sent, without the query; header names are in small letters."""

    method: str = ""
    path: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def content_type(self) -> str:
        """The media type in small letters, without parameters; "" when there is none."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


class HttpResponse(NamedTuple):
    """An answer."""

    body: bytes
    content_type: str
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()


Outcome: TypeAlias = HttpResponse | Awaitable[HttpResponse]
#: Must not raise; what takes long returns an awaitable. An error in it is answered with 500 and logged.
Handler: TypeAlias = Callable[[HttpRequest], Outcome]


def response_bytes(response: HttpResponse, *, keep: bool, head_only: bool = False) -> bytes:
    """The answer on the wire."""
    status, body = response.status, response.body
    lines = [f"HTTP/1.1 {status} {_PHRASES.get(status, 'Unknown')}\r\nContent-Type: {response.content_type}"]
    lines += [f"{name}: {value}" for name, value in response.headers]
    lines.append(f"Content-Length: {len(body)}" + ("" if keep else "\r\nConnection: close"))
    head = "\r\n".join(lines) + "\r\n\r\n"
    return head.encode("latin-1") + (b"" if head_only else body)


_PHRASES: Final = {status.value: status.phrase for status in HTTPStatus}


def _refusal(status: int, text: str) -> HttpResponse:
    return HttpResponse(b'{"error": "%s"}' % text.encode(), "application/json", status)


@final
class HttpPort:
    """Serves one listening socket on the running loop, from `start` to `close`."""

    def __init__(self, handler: Handler, limits: HttpLimits) -> None:
        self.handler: Final = handler
        self.limits: Final = limits
        self.connections: set[_Connection] = set()
        #: Connections refused because there were too many, and those closed for being slow.
        self.refused = 0
        self.slow = 0
        self.parser: Final[Any] = load_httptools()
        self.loop: asyncio.AbstractEventLoop
        self.tasks: set[asyncio.Future[Any]] = set()
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self, listener: socket.socket) -> None:
        """Begins to serve; owns the socket from now on."""
        self.loop = asyncio.get_running_loop()
        self._server = await self.loop.create_server(lambda: _Connection(self), sock=listener)
        self._sweep()

    async def close(self, timeout_s: float = 5.0) -> None:
        """Stops listening, lets requests under way end, then cuts what is left. Idempotent."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self.connections):
            connection.finish()
        if self.tasks:
            await asyncio.wait(set(self.tasks), timeout=timeout_s)
        for task in list(self.tasks):
            task.cancel()
        for connection in list(self.connections):
            connection.abort()
        # The transports' ends are told by the loop: let them come.
        await asyncio.sleep(0)

    def _sweep(self) -> None:
        now = self.loop.time()
        for connection in list(self.connections):
            if now >= connection.deadline:
                self.slow += connection.is_busy
                connection.abort()
        self._sweeper = self.loop.call_later(_SWEEP_S, self._sweep)


@final
class _Connection(asyncio.Protocol):
    """One client. Requests are answered in order, one at a time."""

    def __init__(self, port: HttpPort) -> None:
        self._port: Final = port
        self._limits: Final = port.limits
        self._transport: Any = None
        self._parser: Any = port.parser.HttpRequestParser(self)
        self._request = HttpRequest()
        self._pieces: list[bytes] = []
        self._body_bytes = self._head_bytes = 0
        self._in_head = True
        self._waiting: deque[tuple[HttpRequest, bool]] = deque()
        self._answering = self._slow_reader = self._ending = False
        self._reading = True
        self.is_busy = False
        #: When it is cut, unless something happens before.
        self.deadline = port.loop.time() + self._limits.request_s

    # ---- asyncio.Protocol ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        if len(self._port.connections) >= self._limits.connections_max:
            self._port.refused += 1
            self._refuse(503, "too many connections; try again later")
            return
        self._port.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._port.connections.discard(self)
        self._ending = True
        self._waiting.clear()

    def pause_writing(self) -> None:
        self._slow_reader = True
        self._read(False)

    def resume_writing(self) -> None:
        self._slow_reader = False
        self._go_on()

    def data_received(self, data: bytes) -> None:
        if self._ending:
            return
        if not self.is_busy:
            self.is_busy = True
            self.deadline = self._port.loop.time() + self._limits.request_s
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except self._port.parser.HttpParserUpgrade:
            pass  # refused when its headers were complete
        except self._port.parser.HttpParserError as problem:
            # An error in a callback of ours, which has answered already, comes out as one of the parser.
            if not self._ending:
                logger.debug("bad request: %s", problem)
                self._refuse(400, "this is not a request of HTTP/1.1")
        else:
            if self._in_head and self._head_bytes > HEAD_BYTES_MAX:
                self._refuse(431, "the headers are too long")

    # ---- httptools ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._request = HttpRequest()
        self._pieces = []
        self._body_bytes = 0
        self._in_head = True

    def on_url(self, url: bytes) -> None:
        self._request.path += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._request.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        request = self._request
        request.method = self._parser.get_method().decode("latin-1")
        request.path = request.path.partition("?")[0]
        self._in_head = False
        self._head_bytes = 0
        length = request.headers.get("content-length", "")
        if self._parser.should_upgrade():
            self._refuse(501, "upgrades are not supported")
        elif length.isdecimal() and int(length) > self._limits.body_bytes_max:
            self._refuse(413, f"a body has at most {self._limits.body_bytes_max} bytes")
        elif request.headers.get("expect", "").lower() == "100-continue":
            self._transport.write(_CONTINUE)

    def on_body(self, piece: bytes) -> None:
        self._body_bytes += len(piece)
        if self._body_bytes > self._limits.body_bytes_max:
            self._refuse(413, f"a body has at most {self._limits.body_bytes_max} bytes")
        elif not self._ending:
            self._pieces.append(piece)

    def on_message_complete(self) -> None:
        if self._ending:
            return
        pieces = self._pieces
        self._request.body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._pieces = []
        self._head_bytes = 0
        self._waiting.append((self._request, self._parser.should_keep_alive()))
        self._go_on()

    # ---- answers ------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Answers what waits, until one takes its time or the client does not take what it is sent."""
        while self._waiting and not (self._answering or self._slow_reader or self._ending):
            request, keep = self._waiting.popleft()
            self._answering = True
            try:
                outcome = self._port.handler(request)
            except Exception:
                self._failed(request, keep)
                continue
            if isinstance(outcome, HttpResponse):
                self._answer(request, outcome, keep)
            else:
                task = asyncio.ensure_future(outcome)
                self._port.tasks.add(task)
                task.add_done_callback(partial(self._done, request, keep))
        self._read(not self._slow_reader and len(self._waiting) < PIPELINE_MAX)

    def _read(self, wanted: bool) -> None:
        """Reads on, or lets the client wait."""
        if wanted == self._reading or self._transport.is_closing():
            return
        self._reading = wanted
        if wanted:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _done(self, request: HttpRequest, keep: bool, task: asyncio.Future[HttpResponse]) -> None:
        self._port.tasks.discard(task)
        if task.cancelled():
            self.abort()
        elif task.exception() is not None:
            self._failed(request, keep, task.exception())
        else:
            self._answer(request, task.result(), keep)
        self._go_on()

    def _failed(self, request: HttpRequest, keep: bool, problem: BaseException | None = None) -> None:
        logger.error("%s %s failed", request.method, request.path, exc_info=problem or True)
        self._answer(request, _refusal(500, "an internal error; the log has it"), keep)

    def _answer(self, request: HttpRequest, response: HttpResponse, keep: bool) -> None:
        self._answering = False
        if self._transport.is_closing():
            return
        keep = keep and not self._ending
        self._transport.write(response_bytes(response, keep=keep, head_only=request.method == "HEAD"))
        self.is_busy = bool(self._waiting) or self._slow_reader
        now = self._port.loop.time()
        self.deadline = now + (self._limits.request_s if self.is_busy else self._limits.idle_s)
        if not keep:
            self._ending = True
            self._transport.close()

    def _refuse(self, status: int, text: str) -> None:
        """Answers at once and ends: what follows on this connection cannot be told apart any more.

        What the client still sends is read and dropped for a moment, for closing with bytes unread would take
        the answer away from it.
        """
        if self._ending:
            return
        self._ending = True
        self._waiting.clear()
        self._transport.write(response_bytes(_refusal(status, text), keep=False))
        if self in self._port.connections and self._transport.can_write_eof():
            self._transport.write_eof()
            self.deadline = self._port.loop.time() + _LINGER_S
            self._read(True)
        else:
            self._transport.close()

    def finish(self) -> None:
        """Closes after the answer under way, or at once when there is none."""
        if self._answering:
            self._ending = True
        else:
            self.abort()

    def abort(self) -> None:
        """Cuts the connection."""
        self._ending = True
        if self._transport is not None:
            self._transport.abort()
