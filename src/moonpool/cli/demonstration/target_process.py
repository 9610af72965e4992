"""The demo's hold on its target process: start it, ask it, kill it, and never leave it behind."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
from types import TracebackType
from typing import Any, Final, Self

from moonpool.errors import PeerGone, PeerStalled

ANSWER_TIMEOUT_S: Final = 30.0
"""Longest wait for a line of the target: it has to start an interpreter, load numpy and fill its regions."""


class TargetProcess:
    """A running target. Use as a context manager: at the end it is gone, whatever happened."""

    def __init__(self, regions: int, size_bytes: int) -> None:
        command = [
            sys.executable,
            "-P",
            "-m",
            "moonpool.cli.demonstration.target",
            str(regions),
            str(size_bytes),
        ]
        # A process group of its own, so that Ctrl-C on a terminal reaches the demo only, which then ends the
        # target.
        # Unbuffered, so that closing the pipe of a dead target has nothing left to write.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, process_group=0
        )
        self.endpoint = ""
        self.regions: list[int] = []

    def __enter__(self) -> Self:
        try:
            hello = self._answer()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.endpoint = hello["endpoint"]
        self.regions = hello["regions"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def kill(self) -> None:
        """kill -9, then waits until the process is no more."""
        self.process.kill()
        self.process.wait()

    def wrong_bytes(self, region: int, round_number: int) -> int:
        """Asks the target how many bytes of a region (by index) are not those of a round."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps([region, round_number]).encode() + b"\n")
        except BrokenPipeError as exc:
            raise PeerGone("the target process of the demo ended early") from exc
        return int(self._answer())

    def _answer(self) -> Any:
        stream = self.process.stdout
        assert stream is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            if not selector.select(ANSWER_TIMEOUT_S):
                raise PeerStalled(
                    "the target process of the demo does not answer", timeout_ms=ANSWER_TIMEOUT_S * 1e3
                )
        line = stream.readline()
        if not line:
            raise PeerGone("the target process of the demo ended early; its own message is above")
        return json.loads(line)
