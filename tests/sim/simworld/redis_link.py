"""A process's connection to the modelled Redis.

Pipelined commands, each answered with the server's run id.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from simworld.loop import MS, Future
from simworld.network import End, Network
from simworld.process import Process


class Reply(NamedTuple):
    """What Redis answered."""

    run_id: int
    result: Any


class RedisLink:
    """One connection; made anew by its owner when it ends."""

    def __init__(self, process: Process, end: End, timeout_ms: int) -> None:
        self._process = process
        self._end = end
        self._timeout_us = timeout_ms * MS
        self._waiting: dict[int, Future[Reply | None]] = {}
        self._next = 1
        end.on_message = self._arrived
        end.on_close = self._ended

    @property
    def is_open(self) -> bool:
        return self._end.is_open

    def call(self, command: str, *params: Any) -> Future[Reply | None]:
        """The answer, or None when the connection ended before it came."""
        future: Future[Reply | None] = Future()
        number = self._next
        self._next += 1
        if not self._end.is_open:
            future.set(None)
            return future
        self._waiting[number] = future
        self._end.send((number, command, *params))
        self._process.after(self._timeout_us, lambda: self.close() if number in self._waiting else None)
        return future

    def close(self) -> None:
        self._end.close()
        self._ended()

    def _arrived(self, message: tuple[int, int, Any]) -> None:
        future = self._waiting.pop(message[0], None)
        if future is not None:
            future.set(Reply(message[1], message[2]))

    def _ended(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set(None)


async def dial_redis(process: Process, network: Network, timeout_ms: int) -> RedisLink | None:
    """A new connection to Redis, or None."""
    end = await network.connect(process, "redis")
    return None if end is None else RedisLink(process, end, timeout_ms)
