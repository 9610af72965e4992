"""The engine demo's hold on its target process: ask it, kill it, and never leave it behind."""

from __future__ import annotations

from types import TracebackType
from typing import Final, Self

from moonpool.cli.demonstration.child_process import ChildProcess

ANSWER_TIMEOUT_S: Final = 30.0
"""Longest wait for a line of the target: it has to start an interpreter, load numpy and fill its regions."""


class TargetProcess:
    """A running target. Use as a context manager: at the end it is gone, whatever happened."""

    def __init__(self, regions: int, size_bytes: int) -> None:
        module = "moonpool.cli.demonstration.target"
        self._child = ChildProcess("the target process of the demo", [module, str(regions), str(size_bytes)])
        self.process = self._child.process
        self.endpoint = ""
        self.regions: list[int] = []

    def __enter__(self) -> Self:
        try:
            hello = self._child.hear(ANSWER_TIMEOUT_S)
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
        self._child.stop()

    def kill(self) -> None:
        """kill -9, then waits until the process is no more."""
        self.process.kill()
        self.process.wait()

    def wrong_bytes(self, region: int, round_number: int) -> int:
        """Asks the target how many bytes of a region (by index) are not those of a round."""
        self._child.say([region, round_number])
        return int(self._child.hear(ANSWER_TIMEOUT_S))
