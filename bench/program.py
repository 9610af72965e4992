"""A process that a benchmark starts: heard line by line, signalled, and never left behind."""

from __future__ import annotations

import contextlib
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final, final

from moonpool.errors import PeerGone, PeerStalled

REAP_S: Final = 10.0
ERROR_BYTES_MAX: Final = 4_096
LINE_BYTES_MAX: Final = 65_536


def module_words(module: str, *words: str) -> list[str]:
    """The words that run a module of this package with this interpreter."""
    return [sys.executable, "-P", "-m", module, *words]


@final
class Program:
    """A child with pipes to its standard input and output.

    Its standard error goes to the file `error_path`, or where ours goes. Not thread-safe.
    """

    def __init__(self, name: str, words: Sequence[str], error_path: str | None = None) -> None:
        self.name = name
        self._error_path = error_path
        self._held = b""
        with contextlib.ExitStack() as stack:
            errors = stack.enter_context(open(error_path, "ab")) if error_path else None
            # A group of its own, so that Ctrl-C reaches the run only, which then ends its children.
            self.process = subprocess.Popen(
                list(words),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                process_group=0,
            )

    def wait_line(self, timeout_s: float) -> str:
        """Its next line; PeerStalled after the timeout, PeerGone when it ended instead."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._held:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    words = self.last_words()
                    raise PeerStalled(f"{self.name} says nothing: {words}", timeout_ms=timeout_s * 1e3)
                piece = self.process.stdout.read(LINE_BYTES_MAX)
                if not piece or len(self._held) > LINE_BYTES_MAX:
                    raise PeerGone(f"{self.name} ended, or wrote no line: {self.last_words()}")
                self._held += piece
        line, _, self._held = self._held.partition(b"\n")
        return line.decode()

    def say(self, line: str) -> None:
        """Writes a line to its standard input; PeerGone when it has ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line.encode() + b"\n")
        except BrokenPipeError as exc:
            raise PeerGone(f"{self.name} ended: {self.last_words()}") from exc

    def last_words(self) -> str:
        """The end of what it wrote to standard error, where that is kept."""
        if self._error_path is None:
            return "its own message is above"
        with open(self._error_path, "rb") as file:
            return file.read()[-ERROR_BYTES_MAX:].decode("utf-8", "replace")

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        """Sends a signal, if the process is there."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def end_input(self) -> None:
        """Closes its standard input."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within the time."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self, timeout_s: float = REAP_S) -> None:
        """SIGTERM, and kill -9 when it has not ended after that time. Idempotent."""
        self.signal(signal.SIGTERM)
        self.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """kill -9, its end, and its pipes. Idempotent."""
        self.signal(signal.SIGKILL)
        self.process.wait(REAP_S)
        self.end_input()
        if self.process.stdout is not None:
            self.process.stdout.close()
