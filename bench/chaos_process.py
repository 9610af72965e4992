"""One process of a chaos run: started, heard until it is ready, signalled, and never left behind."""

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


def module_words(module: str, *words: str) -> list[str]:
    """The words that run a module of this package with this interpreter."""
    return [sys.executable, "-P", "-m", module, *words]


@final
class Program:
    """A child with pipes to its standard input and output; its standard error goes to a file."""

    def __init__(self, name: str, words: Sequence[str], error_path: str) -> None:
        self.name = name
        self._error_path = error_path
        with open(error_path, "ab") as errors:
            # A group of its own, so that Ctrl-C reaches the run only, which then ends its children.
            self.process = subprocess.Popen(
                list(words),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                process_group=0,
            )

    def wait_line(self, timeout_s: float) -> None:
        """Waits for its first line; PeerStalled after the timeout, PeerGone when it ended instead."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                words = self.last_words()
                raise PeerStalled(f"{self.name} does not get ready: {words}", timeout_ms=timeout_s * 1e3)
        if not self.process.stdout.read(65_536):
            self.process.wait(REAP_S)
            raise PeerGone(f"{self.name} ended before it was ready: {self.last_words()}")

    def last_words(self) -> str:
        """The end of what it wrote to standard error."""
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

    def kill(self) -> None:
        """kill -9, its end, and its pipes. Idempotent."""
        self.signal(signal.SIGKILL)
        self.process.wait(REAP_S)
        self.end_input()
        if self.process.stdout is not None:
            self.process.stdout.close()
