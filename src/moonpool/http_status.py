"""A few pages over HTTP for those who watch a process: `/metrics`, `/healthz`. Reading only.

One thread accepts, and one a request answers; both are bounded: connections beyond `connections_max` are
closed at once, and a request that is not over after `request_timeout_ms` has its socket shut, however slowly
it trickles. Each connection carries one answer. Only GET and HEAD are answered, and no body is ever read.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, NamedTuple, Self, final

from moonpool.config_ranges import check_ranges
from moonpool.errors import ResourceError
from moonpool.metrics import CONTENT_TYPE
from moonpool.units import MS_PER_S

#: How often overdue requests are looked for, and the longest wait of `close` for the accepting thread.
_LOOK_S: Final = 0.2
#: Pause after a connection that could not be taken.
_NO_DESCRIPTOR_S: Final = 0.05
_METHODS: Final = ("GET", "HEAD")


class Page(NamedTuple):
    """What a path answers with."""

    status: int
    content_type: str
    body: bytes


def text_page(text: str, status: int = HTTPStatus.OK, content_type: str = CONTENT_TYPE) -> Page:
    """A page of text; by default Prometheus's exposition format."""
    return Page(status, content_type, text.encode())


def health_page(reason: str = "", **about: Any) -> Page:
    """`/healthz`: 200 when `reason` is empty, else 503; the body is JSON with `ok`, `reason` and `about`."""
    body = json.dumps({"ok": not reason, "reason": reason, **about}) + "\n"
    status = HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK
    return Page(status, "application/json", body.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpStatusConfig:
    """Where to listen, and the bounds."""

    #: Loopback unless you say so: the pages tell much to whoever reads them.
    bind_host: str = "127.0.0.1"
    #: TCP port; 0 lets the system choose.
    port: int = 0
    #: Most requests answered at once; beyond it connections are closed.
    connections_max: int = 16
    #: Longest life of a connection, in milliseconds.
    request_timeout_ms: int = 2_000

    def __post_init__(self) -> None:
        ranges = {"port": (0, 65_535), "connections_max": (1, 1_024), "request_timeout_ms": (1, 3_600_000)}
        check_ranges(self, ranges)


@final
class HttpStatus:
    """Serves `pages` (path → function that makes the page, called on a thread of the server's).

    A page function that raises answers 500 with the error's text. `close` is idempotent.
    """

    def __init__(
        self, pages: Mapping[str, Callable[[], Page]], config: HttpStatusConfig | None = None
    ) -> None:
        self.config = config or HttpStatusConfig()
        try:
            self._server = _Server(dict(pages), self.config)
        except (OSError, OverflowError) as problem:
            raise ResourceError(
                f"cannot serve status pages at {self.config.bind_host}:{self.config.port}: {problem}",
                errno=getattr(problem, "errno", None) or 0,
                field="port",
            ) from problem
        host, port = self._server.server_address[:2]
        shown = str(host)
        #: "host:port" where the pages are.
        self.address: str = f"[{shown}]:{port}" if ":" in shown else f"{shown}:{port}"
        self._closed = False
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": _LOOK_S},
            name="moonpool-http",
            daemon=True,
        )
        self._thread.start()

    def counters(self) -> dict[str, int]:
        """Requests answered, connections refused for the bound, and requests cut off for their time."""
        with self._server._lock:
            return dict(self._server.counts)

    def close(self) -> None:
        """Stops listening, cuts off requests under way, and joins the threads."""
        if self._closed:
            return
        self._closed = True
        self._server.shutdown()
        self._server.cut_off(everything=True)
        self._server.server_close()
        patience_s = self.config.request_timeout_ms / MS_PER_S + _LOOK_S
        self._thread.join(patience_s)
        self._server.join(patience_s)

    def close_after_fork(self) -> None:
        """In a forked child, which has none of the threads: close its copy of the listening socket."""
        self._closed = True
        self._server.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_problem: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    """The listening socket, and what is known of connections under way."""

    daemon_threads = True
    allow_reuse_address = True
    #: Connections that wait to be accepted: one that finds no place here tries again after a second.
    request_queue_size = 128

    def __init__(self, pages: Mapping[str, Callable[[], Page]], config: HttpStatusConfig) -> None:
        self.pages = pages
        self.config = config
        self.counts = {"requests": 0, "connections_refused": 0, "requests_cut_off": 0}
        self._lock = threading.Lock()
        self._ends: dict[socket.socket, float] = {}
        self._serving: list[threading.Thread] = []
        family, _, _, _, address = socket.getaddrinfo(
            config.bind_host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self.address_family = family
        super().__init__((str(address[0]), int(address[1])), _Handler)

    def server_bind(self) -> None:
        """Binds without the look-up of the host's name that the base class does: it can block for seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def get_request(self) -> tuple[socket.socket, Any]:
        """The next connection. Where there is no descriptor for it, it stays and is tried again soon."""
        try:
            return self.socket.accept()
        except OSError:
            time.sleep(_NO_DESCRIPTOR_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread for the request, unless too many run."""
        with self._lock:
            taken = len(self._ends) < self.config.connections_max
            if taken:
                self._ends[request] = time.monotonic() + self.config.request_timeout_ms / MS_PER_S
            else:
                self.counts["connections_refused"] += 1
        if not taken:
            self.shutdown_request(request)
            return
        serving = threading.Thread(
            target=self.process_request_thread, args=(request, client_address), daemon=True
        )
        try:
            serving.start()
        except RuntimeError:  # no thread to be had
            self.shutdown_request(request)
            return
        self._serving = [each for each in self._serving if each.is_alive()]
        self._serving.append(serving)

    def join(self, timeout_s: float) -> None:
        """Waits for the threads of requests; to be called when nothing is accepted any more."""
        end = time.monotonic() + timeout_s
        for each in self._serving:
            each.join(max(0.0, end - time.monotonic()))

    def shutdown_request(self, request: Any) -> None:
        """The connection is over."""
        with self._lock:
            self._ends.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called by the accepting thread between connections."""
        self.cut_off()

    def cut_off(self, *, everything: bool = False) -> None:
        """Shuts the sockets of overdue requests down; their threads then end."""
        now = time.monotonic()
        with self._lock:
            late = [sock for sock, end in self._ends.items() if everything or end <= now]
            for sock in late:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                del self._ends[sock]  # its thread ends at once, and the place is free
            self.counts["requests_cut_off"] += len(late)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server: _Server
    server_version = "moonpool"
    sys_version = ""

    def parse_request(self) -> bool:
        """Refuses other methods before anything else is looked at."""
        if not super().parse_request():
            return False
        if self.command not in _METHODS:
            self._answer(Page(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"read only: use GET or HEAD\n"))
            return False
        return True

    def do_GET(self) -> None:
        """Answers with the page of the path."""
        make = self.server.pages.get(self.path.partition("?")[0])
        if make is None:
            known = " ".join(sorted(self.server.pages))
            self._answer(
                Page(HTTPStatus.NOT_FOUND, "text/plain", f"no such page; there are {known}\n".encode())
            )
            return
        try:
            page = make()
        except Exception as problem:  # a page must not take the process's watchers down with it
            text = f"the page failed: {type(problem).__name__}: {problem}\n"
            page = Page(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", text.encode())
        self._answer(page)

    do_HEAD = do_GET

    def _answer(self, page: Page) -> None:
        with self.server._lock:
            self.server.counts["requests"] += 1
        self.close_connection = True
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.send_header("Connection", "close")
        if page.status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", ", ".join(_METHODS))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged: the counters say enough."""
