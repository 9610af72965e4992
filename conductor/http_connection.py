"""One client of the HTTP port: from bytes to requests, and answers in their order."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

from moonpool.conductor.http_messages import (
    HttpRequest,
    HttpResponse,
    origin_path,
    refusal,
    response_bytes,
)

if TYPE_CHECKING:
    from moonpool.conductor.http_port import HttpPort

logger: Final = logging.getLogger("moonpool.http")

#: Longest request line and headers together, in bytes; and what chunks and trailers may cost beside a body.
HEAD_BYTES_MAX: Final = 64 * 1024
#: Bytes of framing that a byte of a chunked body may cost: chunks of one byte cost five.
_FRAMING: Final = 8
#: Most requests of one connection that wait for the one before them; then it is not read any more.
PIPELINE_MAX: Final = 16
_LINGER_S: Final = 2.0
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


@final
class Connection(asyncio.Protocol):
    """Requests are answered in order, one at a time; a refusal takes its place in that order and ends it."""

    def __init__(self, port: HttpPort) -> None:
        self._port: Final = port
        self._limits: Final = port.limits
        self._transport: Any = None
        self._parser: Any = port.parser.HttpRequestParser(self)
        self._request = HttpRequest()
        self._body: bytes | bytearray = b""
        self._raw_bytes = self._head_bytes = self._held_bytes = 0
        self._in_head = True
        #: Requests with whether the connection goes on after them; or, in its place, a refusal.
        self._waiting: deque[tuple[HttpRequest | HttpResponse, bool]] = deque()
        self._answering = self._slow_reader = self._deaf = self._ended = self._planned = False
        self._reading = True
        self.is_busy = False
        #: When it is cut, unless something happens before.
        self.deadline = port.loop.time() + self._limits.request_s

    # ---- asyncio.Protocol ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is there; one too many is told so."""
        self._transport = transport
        if len(self._port.connections) >= self._limits.connections_max:
            self._port.refused += 1
            self._deaf = self._ended = True
            too_many = refusal(503, "too many connections; try again later")
            self._transport.write(response_bytes(too_many, keep=False))
            self._transport.close()
            return
        self._port.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone, and what waited with it."""
        self._port.connections.discard(self)
        self._port.held_bytes -= self._held_bytes
        self._held_bytes = 0
        self._deaf = self._ended = True
        self._waiting.clear()

    def eof_received(self) -> bool:
        """True, to keep the way back open, while there are answers to give."""
        self._deaf = True
        if not (self._waiting or self._answering):
            return False
        self._waiting.append((HttpResponse(b"", ""), False))  # nothing is said there: the end
        return True

    def pause_writing(self) -> None:
        """The client does not take what it is sent: nothing more is read or answered."""
        self._slow_reader = True
        self._read(False)

    def resume_writing(self) -> None:
        """It took it."""
        self._slow_reader = False
        self._rest()
        self._go_on()

    def data_received(self, data: bytes) -> None:
        """Bytes of requests."""
        if self._deaf:
            return
        if not self.is_busy:
            self.is_busy = True
            self.deadline = self._port.loop.time() + self._limits.request_s
        self._raw_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except self._port.parser.HttpParserUpgrade:
            self._deaf = True  # not taken up: the request was served as it stands, and is the last
        except self._port.parser.HttpParserError as problem:
            logger.debug("bad request: %s", problem)
            self._refuse(400, "this is not a request of HTTP/1.1")
        else:
            self._check_framing()

    def _check_framing(self) -> None:
        if self._in_head:
            if self._raw_bytes > HEAD_BYTES_MAX:
                self._refuse(431, "the headers are too long")
        elif self._raw_bytes > HEAD_BYTES_MAX + (_FRAMING + 1) * len(self._body):
            self._refuse(400, "chunks and trailers cost more than they carry")

    # ---- httptools ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins."""
        self._request = HttpRequest()
        self._body = b""
        self._head_bytes = 0
        self._in_head = True

    def on_url(self, url: bytes) -> None:
        """A piece of its target."""
        self._head_bytes += len(url)
        self._request.path += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or a trailer, which does not count."""
        if not self._in_head:
            return  # a trailer: not merged into the headers (RFC 9110, 6.5.1)
        self._head_bytes += len(name) + len(value)
        text = name.decode("latin-1").lower()
        if text == "host" and text in self._request.headers:
            self._refuse(400, "a request has one Host")
        self._request.headers[text] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """The head is whole: whether the request is one that is taken."""
        request, headers = self._request, self._request.headers
        request.method = self._parser.get_method().decode("latin-1")
        request.path = origin_path(request.path)
        self._in_head = False
        self._raw_bytes = 0
        length = headers.get("content-length", "")
        is_new = self._parser.get_http_version() == "1.1"
        if self._head_bytes > HEAD_BYTES_MAX:
            self._refuse(431, "the headers are too long")
        elif is_new and "host" not in headers:
            self._refuse(400, "a request has a Host")
        elif headers.get("content-encoding", "identity").lower() != "identity":
            self._refuse(415, "bodies are taken as they are, not compressed")
        elif headers.get("transfer-encoding", "chunked").lower() != "chunked":
            self._refuse(501, "chunked is the one transfer coding")
        elif length.isdecimal() and int(length) > self._limits.body_bytes_max:
            self._refuse(413, f"a body has at most {self._limits.body_bytes_max} bytes")
        elif is_new and headers.get("expect", "").lower() == "100-continue" and self._is_quiet:
            self._transport.write(_CONTINUE)

    @property
    def _is_quiet(self) -> bool:
        """False between the answers to others: then who awaits leave sends without it, after a moment."""
        return not (self._waiting or self._answering or self._deaf)

    def on_body(self, piece: bytes) -> None:
        """A piece of the body."""
        if self._deaf:
            return
        if len(self._body) + len(piece) > self._limits.body_bytes_max:
            self._refuse(413, f"a body has at most {self._limits.body_bytes_max} bytes")
            return
        if self._port.held_bytes + len(piece) > self._limits.held_bytes_max:
            self._refuse(503, "too much is being sent at once; try again later")
            return
        self._held_bytes += len(piece)
        self._port.held_bytes += len(piece)
        if not self._body:
            self._body = piece
        else:
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += piece

    def on_message_complete(self) -> None:
        """The request is whole."""
        if self._deaf:
            return
        self._request.body = bytes(self._body)
        self._body = b""
        self._raw_bytes = 0
        keep = self._parser.should_keep_alive() and not self._parser.should_upgrade()
        self._deaf = not keep
        self._waiting.append((self._request, keep))
        self._go_on()

    # ---- answers ------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Answers what waits, until one takes its time or the client does not take what it is sent.

        After `PIPELINE_MAX` of them others get their turn.
        """
        for _ in range(PIPELINE_MAX):
            if not self._waiting or self._answering or self._slow_reader or self._ended or self._planned:
                break
            self._serve(*self._waiting.popleft())
        else:
            if self._waiting and not self._planned:
                self._planned = True
                self._port.loop.call_soon(self._later)
        self._read(self._deaf or (not self._slow_reader and len(self._waiting) < PIPELINE_MAX))

    def _later(self) -> None:
        self._planned = False
        self._go_on()

    def _serve(self, item: HttpRequest | HttpResponse, keep: bool) -> None:
        if isinstance(item, HttpResponse):
            self._end(item)
            return
        self._held_bytes -= len(item.body)
        self._port.held_bytes -= len(item.body)
        self._answering = True
        try:
            outcome = self._port.handler(item)
        except Exception:
            self._failed(item, keep)
            return
        if isinstance(outcome, HttpResponse):
            self._answer(item, outcome, keep)
        else:
            task = asyncio.ensure_future(outcome)
            self._port.tasks.add(task)
            task.add_done_callback(partial(self._done, item, keep))

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
        self._answer(request, refusal(500, "an internal error; the log has it"), keep)

    def _answer(self, request: HttpRequest, response: HttpResponse, keep: bool) -> None:
        self._answering = False
        if self._ended or self._transport.is_closing():
            return
        keep = keep and not self._port.closing
        self._transport.write(response_bytes(response, keep=keep, head_only=request.method == "HEAD"))
        self._rest()
        if not keep:
            self._deaf = self._ended = True
            self._transport.close()

    def _rest(self) -> None:
        """How long what comes next may take: an answer to be taken, or the next request to begin."""
        self.is_busy = bool(self._waiting) or self._slow_reader
        self.deadline = self._port.loop.time() + (
            self._limits.request_s if self.is_busy else self._limits.idle_s
        )

    def _refuse(self, status: int, text: str) -> None:
        """Takes nothing more in: what follows on this connection cannot be told apart any more."""
        if not self._deaf:
            self._deaf = True
            self._held_bytes -= len(self._body)
            self._port.held_bytes -= len(self._body)
            self._body = b""
            self._waiting.append((refusal(status, text), False))
            self._go_on()

    def _end(self, last: HttpResponse) -> None:
        """Sends the last answer and ends.

        What the client still sends is read and dropped for a moment, for closing with bytes unread would take
        the answer away from it.
        """
        self._ended = True
        self._waiting.clear()
        if last.content_type:
            self._transport.write(response_bytes(last, keep=False))
        if last.content_type and self._transport.can_write_eof():
            self._transport.write_eof()
            self.deadline = self._port.loop.time() + _LINGER_S
            self._read(True)
        else:
            self._transport.close()

    def finish(self) -> None:
        """Closes after the answer under way, or at once when there is none."""
        self._deaf = True
        if not self._answering:
            self.abort()

    def abort(self) -> None:
        """Cuts the connection."""
        self._deaf = self._ended = True
        if self._transport is not None:
            self._transport.abort()
