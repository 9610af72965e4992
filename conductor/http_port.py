"""A small HTTP/1.1 server on asyncio: requests parsed by httptools, one answer each, every wait bounded.

It is here because a general framework costs more than the conductor's work on a request does. What it leaves
out it refuses (compressed bodies, transfer codings but chunked) or ignores (upgrades, trailers). Rules: RFC
9110 and 9112.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Final, final

from moonpool.conductor.http_connection import Connection
from moonpool.conductor.http_messages import Handler, HttpLimits
from moonpool.errors import ResourceError

_SWEEP_S: Final = 1.0


def load_httptools() -> Any:
    """The parser module; raises `ResourceError` that says how to get it."""
    try:
        import httptools
    except ImportError as exc:
        raise ResourceError("the service needs httptools; install moonpool[service]") from exc
    return httptools


@final
class HttpPort:
    """Serves one listening socket on the running loop, from `start` to `close`."""

    def __init__(self, handler: Handler, limits: HttpLimits) -> None:
        self.handler: Final = handler
        self.limits: Final = limits
        self.connections: set[Connection] = set()
        #: Connections refused because there were too many, and those closed for being slow.
        self.refused = 0
        self.slow = 0
        #: Bytes of bodies that connections wait with.
        self.held_bytes = 0
        self.closing = False
        self.parser: Final[Any] = load_httptools()
        self.loop: asyncio.AbstractEventLoop
        self.tasks: set[asyncio.Future[Any]] = set()
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self, listener: socket.socket) -> None:
        """Begins to serve; owns the socket from now on."""
        self.loop = asyncio.get_running_loop()
        self._server = await self.loop.create_server(lambda: Connection(self), sock=listener)
        self._sweep()

    async def close(self, timeout_s: float = 5.0) -> None:
        """Stops listening, lets requests under way end, then cuts what is left. Idempotent."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        self.closing = True
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
