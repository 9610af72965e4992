"""Child processes that are cheap to start: forks of a process that has imported everything.

A child answers requests, one JSON object a line, over a socket pair. The parent has no engine and no thread,
so a fork copies no state that matters; engines are made after the fork. A child dies with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Self, TypeAlias, final

from moonpool.units import KIB

Answers: TypeAlias = Mapping[str, Callable[..., Any]]
LINE_BYTES_MAX: Final = 1 << 16
END_TIMEOUT_S: Final = 20.0
#: What an engine loads when it needs it; a child would load it anew each time.
LOADED_EARLY: Final = (
    "encodings.idna",
    "numpy",
    "moonpool.metadata.redis",
    "moonpool.native.io.ring",
    "moonpool.transport.shm",
    "moonpool.transport.tcp",
    "redis",
)
_FDS: Final = Path("/proc/self/fd")
_SET_PARENT_DEATH_SIGNAL: Final = 1  # PR_SET_PDEATHSIG, sys/prctl.h


class ChildFailed(Exception):
    """A child did not answer in time, ended, or says what went wrong."""


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def load_early() -> None:
    """Import in the parent what its children will need. No thread comes of it, so that forks are safe."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for name in LOADED_EARLY:
        importlib.import_module(name)


@final
class Child:
    """A forked process. `make` runs in it and returns what it answers to; an answer named "close" ends it."""

    def __init__(self, name: str, make: Callable[[], Answers], nice: int = 0) -> None:
        self.name = name
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            _run_child(theirs, make, nice)
        theirs.close()
        self._sock = ours
        self._pending = b""
        self._is_over = False

    def ask(self, request: str, timeout_s: float, **arguments: Any) -> Any:
        """Send a request and return the answer; `ChildFailed` after `timeout_s`."""
        self.post(request, **arguments)
        return self.answer(timeout_s)

    def post(self, request: str, **arguments: Any) -> None:
        """Send a request; `answer` takes what comes back."""
        try:
            self._sock.sendall(json.dumps([request, arguments]).encode() + b"\n")
        except OSError as problem:
            raise ChildFailed(f"{self.name} is gone: {problem}") from problem

    def has_answer(self) -> bool:
        """Whether `answer` would return at once."""
        if b"\n" not in self._pending:
            self._sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                self._pending += self._sock.recv(LINE_BYTES_MAX)
        return b"\n" in self._pending

    def answer(self, timeout_s: float) -> Any:
        """The next answer; `ChildFailed` when it does not come in time or is a failure."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            self._sock.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                piece = self._sock.recv(LINE_BYTES_MAX)
            except TimeoutError as problem:
                raise ChildFailed(f"{self.name} gave no answer in {timeout_s} s") from problem
            except OSError as problem:
                raise ChildFailed(f"{self.name} is gone: {problem}") from problem
            if not piece:
                raise ChildFailed(f"{self.name} ended without an answer")
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        failure, value = json.loads(line)
        if failure:
            raise ChildFailed(f"{self.name}: {failure}")
        return value

    def kill(self) -> None:
        """kill -9, and take note of its end. Idempotent; also for one that somebody else has killed."""
        if self._is_over:
            return
        self._is_over = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._sock.close()

    def close(self) -> None:
        """Have it close what it has and end; kill it when it does not. Idempotent."""
        if not self._is_over:
            try:
                self.ask("close", END_TIMEOUT_S)
            finally:
                self.kill()

    def cpu_seconds(self) -> float:
        """CPU time that it has used so far."""
        return time.clock_gettime((~self.pid << 3) | 2)  # MAKE_PROCESS_CPUCLOCK, linux/posix-timers.h

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_problem: object) -> None:
        self.kill()


def _run_child(sock: socket.socket, make: Callable[[], Answers], nice: int) -> None:
    """The whole life of a child; never returns."""
    code = 1
    try:
        die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.nice(nice)
        for fd in [int(entry.name) for entry in _FDS.iterdir()]:
            if fd > 2 and fd != sock.fileno():
                with contextlib.suppress(OSError):
                    os.close(fd)
        _serve(sock, make())
        code = 0
    except BaseException:
        _send(sock, traceback.format_exc(), None)
    finally:
        os._exit(code)


def _serve(sock: socket.socket, answers: Answers) -> None:
    with sock.makefile("rb") as lines:
        for line in lines:
            request, arguments = json.loads(line)
            try:
                value = answers[request](**arguments)
            except Exception:
                _send(sock, traceback.format_exc(), None)
            else:
                _send(sock, "", value)
            if request == "close":
                return


def _send(sock: socket.socket, failure: str, value: Any) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        sock.sendall(json.dumps([failure, value]).encode() + b"\n")


def thread_names() -> list[str]:
    """The names of this process's threads, in order."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            names.append((task / "comm").read_text().strip())
    return sorted(names)


def observe() -> dict[str, int]:
    """What this process holds: descriptors, mappings, threads, resident bytes; garbage is collected first.

    Pages of files are left out: which of a library's are resident is the kernel's business.
    """
    gc.collect()
    # What libc keeps for later is no leak.
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return {
        "descriptors": len(list(_FDS.iterdir())),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "threads": int(fields["Threads"]),
        "private_bytes": int(fields["RssAnon"].split()[0]) * KIB,
        "shared_bytes": int(fields["RssShmem"].split()[0]) * KIB,
    }
