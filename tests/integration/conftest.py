"""Engines as processes: a peer that can be killed, stopped and restarted, and what must not leak."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

Bytes = npt.NDArray[np.uint8]
PROGRAM = Path(__file__).with_name("engine_peer.py")
WAIT_S = 30.0


class PeerFailed(Exception):
    """The peer answered with an error; `kind` is the name of its class."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class PeerProcess:
    """An engine in a process of its own; see engine_peer.py for what it does."""

    def __init__(self, prefix: tuple[str, ...] = (), **config: Any) -> None:
        command = [*prefix, sys.executable, "-P", str(PROGRAM)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._pending = b""
        try:
            about = self.ask("start", **config)
        except BaseException:
            self.end()
            raise
        self.endpoint: str = about["endpoint"]
        self.port = int(self.endpoint.rpartition(":")[2])
        self.instance: str = about["instance"]
        self.pid: int = about["pid"]

    def ask(self, what: str, **params: Any) -> Any:
        """Has it do something; raises `PeerFailed` with its error."""
        self.tell(what, **params)
        return self.answer()

    def tell(self, what: str, **params: Any) -> None:
        """As `ask`, without waiting for the answer, which `answer` then takes."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **params}).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """The next answer."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + WAIT_S
        while b"\n" not in self._pending:
            left = max(0.0, deadline - time.monotonic())
            ready = select.select([self._process.stdout], [], [], left)[0]
            assert ready, "the peer did not answer"
            piece = os.read(self._process.stdout.fileno(), 1 << 20)
            assert piece, f"the peer ended with {self._process.wait()}"
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerFailed(answer["error"], answer["message"])
        return answer["ok"]

    def signal(self, number: int) -> None:
        """Sends a signal; after SIGSTOP, returns when every thread has really stopped."""
        os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            deadline = time.monotonic() + WAIT_S
            while not all(state == "T" for state in self._states()):
                assert time.monotonic() < deadline, "the process did not stop"
                time.sleep(0.001)

    def _states(self) -> list[str]:
        """The state of each thread, as proc(5) names it."""
        found = []
        for thread in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it ended meanwhile
                found.append((thread / "stat").read_text().rsplit(")", 1)[1].split()[0])
        return found

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self._process.kill()
        self.end()

    def end(self) -> None:
        """Ends it, in whatever state it is. Idempotent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)
        try:
            self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


@pytest.fixture
def make_peer() -> Iterator[Callable[..., PeerProcess]]:
    """`make_peer(prefix=(), **config)` starts a peer; all are ended with the test."""
    with contextlib.ExitStack() as stack:

        def make(prefix: tuple[str, ...] = (), **config: Any) -> PeerProcess:
            peer = PeerProcess(prefix, **config)
            stack.callback(peer.end)
            return peer

        yield make


@pytest.fixture(scope="session")
def pattern() -> Callable[[int, int], Bytes]:
    """`pattern(size, seed)`: bytes that depend on their position, as peers make them."""

    def make(size: int, seed: int) -> Bytes:
        place = np.arange(size, dtype=np.uint64)
        mixed = (place + np.uint64(seed * 1_000_003 + 1)) * np.uint64(0x9E3779B97F4A7C15)
        return (mixed >> np.uint64(37)).astype(np.uint8)

    return make


@pytest.fixture(scope="session")
def wait_until() -> Callable[[Callable[[], bool], str], None]:
    """`wait_until(condition, what)`: waits for what others bring about, within a generous bound."""

    def wait(condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, f"did not happen: {what}"
            time.sleep(0.002)

    return wait


@dataclass(frozen=True)
class Held:
    """What this process holds: descriptors, threads of ours, mappings of engine memory, and its memory."""

    fds: int
    threads: int
    mappings: int
    rss_bytes: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        names = []
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                names.append((task / "comm").read_text())
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            fds=len(os.listdir("/proc/self/fd")),
            threads=sum(name.startswith(("moonpool", "asyncio")) for name in names),
            mappings=Path("/proc/self/maps").read_text().count("memfd:moonpool"),
            rss_bytes=resident_pages * os.sysconf("SC_PAGESIZE"),
        )

    def covers(self, other: Held, slack_bytes: int) -> bool:
        """True when the other holds no more than this one."""
        counts = other.fds <= self.fds and other.threads <= self.threads and other.mappings <= self.mappings
        return counts and other.rss_bytes <= self.rss_bytes + slack_bytes


@pytest.fixture(scope="session")
def held() -> type[Held]:
    """`held.now()`: what this process holds."""
    return Held
