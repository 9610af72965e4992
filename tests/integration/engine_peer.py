"""A peer that the tests of the engine run as a process: one engine, told what to do by lines of JSON.

Each line on the standard input is `{"do": name, ...}`; each is answered by one line, `{"ok": value}` or
`{"error": type, "message": text}`. The process ends when its standard input does, or its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from moonpool import Access, Engine, Op

PR_SET_PDEATHSIG = 1
NOBODY = 65_534


def pattern(size: int, seed: int) -> Any:
    """Bytes that depend on their position: uint8[size]; the same as in the tests' conftest."""
    place = np.arange(size, dtype=np.uint64)
    mixed = (place + np.uint64(seed * 1_000_003 + 1)) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(37)).astype(np.uint8)


class Peer:
    """The engine of this process, its memory, and what runs in the background."""

    def __init__(self, config: dict[str, Any]) -> None:
        if config.pop("as_nobody", False):
            # What is imported late must be there before: the new user may not be let into its folders.
            with Engine() as first, Engine(transports=("tcp",)) as second:
                second.close_segment(second.open(first.endpoint))
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        secret = config.pop("secret", None)
        if "transports" in config:
            config["transports"] = tuple(config["transports"])
        self.engine = Engine(cluster_secret=secret and secret.encode(), **config)
        self.memory: dict[int, Any] = {}
        self.segment: Any = None
        self.rounds = 0
        self.problem = ""
        self._stop = threading.Event()
        self._worker: threading.Thread | None = None

    def hello(self) -> dict[str, Any]:
        return {"endpoint": self.engine.endpoint, "instance": self.engine.instance.hex(), "pid": os.getpid()}

    def offer(self, size: int, seed: int, foreign: bool = False, access: int = 3) -> int:
        """A region with a pattern in it; returns its handle."""
        if foreign:
            content = pattern(size, seed)
            region = self.engine.register(content, access=Access(access))
        else:
            region = self.engine.allocate(size, access=Access(access))
            content = np.frombuffer(region.view, dtype=np.uint8)[:size]
            content[:] = pattern(size, seed)
        self.memory[region.handle] = content
        return region.handle

    def offer_at(self, location: str, size: int | None = None, access: int = 3, **how: Any) -> int:
        """A region of what a location names; returns its handle."""
        return self.engine.offer(location, size, access=Access(access), **how).handle

    def withdraw(self, handle: int) -> None:
        """Revoke a region that `offer_at` made."""
        self.engine.revoke(handle)

    def holds(self, handle: int, seed: int) -> bool:
        """Whether a region holds the pattern of a seed."""
        content = self.memory[handle]
        return bool(np.array_equal(content, pattern(content.size, seed)))

    def revoke(self, handle: int) -> None:
        self.engine.revoke(handle)
        del self.memory[handle]

    def open(self, endpoint: str) -> list[str]:
        self.segment = self.engine.open(endpoint)
        return [path.transport for path in self.segment.paths]

    def work(self, op: int, handle: int, length: int, seed: int = 0) -> None:
        """Transfer the same range over and over in the background, until stopped or failed."""
        mine = self.engine.allocate(length)
        content = np.frombuffer(mine.view, dtype=np.uint8)[:length]
        content[:] = pattern(length, seed)

        def run() -> None:
            try:
                while not self._stop.is_set():
                    self.engine.transfer(Op(op), self.segment, mine.address, handle, 0, length)
                    self.rounds += 1
            except BaseException as problem:
                self.problem = type(problem).__name__

        self._stop.clear()
        self._worker = threading.Thread(target=run, daemon=True)
        self._worker.start()

    def progress(self) -> list[Any]:
        return [self.rounds, self.problem]

    def stop(self) -> list[Any]:
        self._stop.set()
        if self._worker is not None:
            self._worker.join()
        return self.progress()

    def read(self, handle: int, length: int, seed: int) -> bool:
        """One read of a pattern; whether it was that."""
        target = bytearray(length)
        self.engine.read(self.segment, handle, 0, target)
        return target == pattern(length, seed).tobytes()

    def notify(self, text: str) -> None:
        self.engine.notify(self.segment, text.encode())

    def notifications(self, timeout_s: float) -> list[str]:
        return [one.message.decode() for one in self.engine.notifications(timeout_s=timeout_s)]

    def counters(self) -> dict[str, int]:
        return {**self.engine.metrics()["counters"], **self.engine.metrics()["gauges"]}

    def rows(self) -> list[dict[str, Any]]:
        return [row for row in self.engine.metrics()["paths"] if row["transfers"]]

    def facts(self) -> dict[str, int]:
        """What must not grow: descriptors, threads, mappings of engine memory."""
        maps = Path("/proc/self/maps").read_text()
        return {
            "fds": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "mappings": maps.count("memfd:moonpool"),
        }

    def close(self) -> None:
        self.engine.close()


def main() -> None:
    """Serves the lines of the standard input."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    peer: Peer | None = None
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("do")
        try:
            if peer is None:
                peer = Peer(request)
                value: Any = peer.hello()
            else:
                value = getattr(peer, name)(**request)
            answer = {"ok": value}
        except Exception as problem:
            answer = {"error": type(problem).__name__, "message": str(problem)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
