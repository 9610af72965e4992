"""A pool for the demo: a master with a private Redis and nodes, each a process, all gone at the end."""

from __future__ import annotations

import contextlib
import tempfile
from types import TracebackType
from typing import Final, Self

from moonpool.cli.demonstration.child_process import ChildProcess

START_S: Final = 60.0
"""Longest wait for a master or a node to say that it serves."""

EVICTION: Final = ("s3fifo", 0.99, 0.98)
"""Policy, and the shares of a segment in use at which background eviction begins and ends.

A demo's pool is small, and the LRU beside it has all of it: so only the room that puts need within a few
round trips is kept free.
"""


class PoolProcesses:
    """A running pool. Use as a context manager; `address` is the master's."""

    def __init__(self, nodes: int, bytes_of_node: int) -> None:
        self._nodes = nodes
        self._bytes_of_node = bytes_of_node
        self._stack = contextlib.ExitStack()
        self.address = ""

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-demo-"))
            policy, high, low = EVICTION
            rules = ["--policy", policy, "--evict-high", str(high), "--evict-low", str(low)]
            where = ["--listen", "127.0.0.1:0", "--data-dir", folder]
            master = self._start(stack, "the master of the demo", ["master", *where, *rules])
            self.address = master.hear(START_S)["address"]
            started = []
            for number in range(self._nodes):
                own = ["--name", f"demo-{number}", "--memory", str(self._bytes_of_node)]
                words = ["node", "--master", self.address, *own]
                started.append(self._start(stack, f"node {number} of the demo", words))
            for node in started:
                node.hear(START_S)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _start(self, stack: contextlib.ExitStack, what: str, arguments: list[str]) -> ChildProcess:
        return stack.enter_context(
            ChildProcess(what, ["moonpool.cli", *arguments, "--log", "warning", "--json"])
        )
