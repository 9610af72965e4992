"""A process of the demo that speaks JSON lines: start it, hear it, and never leave it behind."""

from __future__ import annotations

import contextlib
import json
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

from moonpool.errors import PeerGone, PeerStalled, ProtocolError

LINE_BYTES_MAX: Final = 1 << 20
STOP_S: Final = 10.0
"""How long a child may take to end after SIGTERM before it is killed."""


class ChildProcess:
    """`python -P -m MODULE ...` with JSON lines on standard output and, when it listens, on standard input.

    Use as a context manager: at the end it is gone, whatever happened. Its standard error is ours.
    """

    def __init__(
        self, what: str, arguments: Sequence[str], *, environment: Mapping[str, str] | None = None
    ) -> None:
        self.what: Final = what
        # A process group of its own, so that Ctrl-C on a terminal reaches the demo only, which then ends the
        # child. Unbuffered, so that closing the pipe of a dead child has nothing left to write.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            process_group=0,
            env=None if environment is None else dict(environment),
        )
        assert self.process.stdout is not None
        self.fd: Final = self.process.stdout.fileno()
        self._held = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Closes its input, asks it to end, kills it when it does not, and reaps it. Idempotent."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def say(self, value: Any) -> None:
        """Writes one line; raises `PeerGone` when the child has ended."""
        assert self.process.stdin is not None
        line = json.dumps(value, separators=(",", ":")).encode() + b"\n"
        try:
            self.process.stdin.write(line)
        except BrokenPipeError as exc:
            raise PeerGone(f"{self.what} ended early; its own message is above") from exc

    def hear(self, timeout_s: float) -> Any:
        """The next line's value; raises `PeerStalled` after the timeout and `PeerGone` at its end."""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.fd, selectors.EVENT_READ)
            while True:
                lines = self._lines()
                if lines:
                    return lines[0]
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise PeerStalled(f"{self.what} does not answer", timeout_ms=timeout_s * 1e3)
                self._read()

    def ready_lines(self) -> list[Any]:
        """Reads what is there, once `fd` is readable, and returns the values of all whole lines."""
        self._read()
        return self._lines(all_of_them=True)

    def _read(self) -> None:
        assert self.process.stdout is not None
        piece = self.process.stdout.read(65_536)
        if not piece:
            raise PeerGone(f"{self.what} ended early; its own message is above")
        self._held += piece
        if len(self._held) > LINE_BYTES_MAX:
            raise ProtocolError(f"{self.what} wrote a line of more than {LINE_BYTES_MAX} bytes")

    def _lines(self, *, all_of_them: bool = False) -> list[Any]:
        found = []
        while (end := self._held.find(b"\n")) >= 0:
            line = bytes(self._held[:end])
            del self._held[: end + 1]
            try:
                found.append(json.loads(line))
            except ValueError as exc:
                raise ProtocolError(f"{self.what} wrote a line that is not JSON: {line[:80]!r}") from exc
            if not all_of_them:
                break
        return found
