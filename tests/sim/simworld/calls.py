"""Requests and replies over a modelled connection, MessagePack values only.

What arrives was encoded and decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack  # type: ignore[import-untyped]

from simworld.loop import MS, Future
from simworld.network import End, Network
from simworld.process import Process

Answer = tuple[list[Any] | None, Any]


def as_sent(value: Any) -> Any:
    """The value as its receiver decodes it: fresh lists, no shared objects."""
    return msgpack.unpackb(msgpack.packb(value, use_bin_type=True), raw=False, strict_map_key=False)


class Caller:
    """The asking end of a connection."""

    def __init__(self, process: Process, end: End) -> None:
        self._process = process
        self._end = end
        self._waiting: dict[int, Future[Answer | None]] = {}
        self._next = 1
        self.on_push: Callable[[str, list[Any]], None] = lambda method, params: None
        self.on_end: Callable[[], None] = lambda: None
        end.on_message = self._arrived
        end.on_close = self._closed

    @property
    def is_open(self) -> bool:
        return self._end.is_open

    def call(self, method: str, params: list[Any], timeout_ms: int) -> Future[Answer | None]:
        """(error, result), or None when the connection ended or the time was over: the outcome is unknown."""
        future: Future[Answer | None] = Future()
        number = self._next
        self._next += 1
        if not self._end.is_open:
            future.set(None)
            return future
        self._waiting[number] = future
        self._end.send(as_sent([0, number, method, params]))
        self._process.after(timeout_ms * MS, lambda: self._settle(number, None))
        return future

    def close(self) -> None:
        """Ends the connection; calls under way have unknown outcomes."""
        self._end.close()
        self._closed()

    def _settle(self, number: int, answer: Answer | None) -> None:
        future = self._waiting.pop(number, None)
        if future is not None:
            future.set(answer)

    def _arrived(self, message: list[Any]) -> None:
        if message[0] == 1:
            self._settle(message[1], (message[2], message[3]))
        elif message[0] == 2:
            self.on_push(message[1], message[2])

    def _closed(self) -> None:
        for number in list(self._waiting):
            self._settle(number, None)
        self.on_end()


async def dial(process: Process, network: Network, address: str, *, is_local: bool = False) -> Caller | None:
    """A caller connected to an address, or None."""
    end = await network.connect(process, address, is_local=is_local)
    if end is None:
        return None
    return Caller(process, end)
