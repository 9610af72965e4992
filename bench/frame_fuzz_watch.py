"""Watches a process from outside: resident memory each second, descriptors and threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self, final

from moonpool.units import KIB

SAMPLE_EVERY_S: Final = 1.0


def rss_kib(pid: int) -> int:
    """Resident memory of a process; 0 once it is gone. Source: proc(5), statm."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // KIB
    except (FileNotFoundError, ProcessLookupError):
        return 0


def counts(pid: int) -> tuple[int, int]:
    """(descriptors, threads) that a process has now."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


@final
class MemoryWatch:
    """Samples in a thread while the block lasts; `growth_kib` begins when the target is warm."""

    def __init__(self, pid: int, is_warm: Callable[[], bool]) -> None:
        self._pid = pid
        self._is_warm = is_warm
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory-watch")
        self.samples: list[int] = []
        self._warm_kib: list[int] = []

    def _sample(self) -> None:
        while not self._ending.wait(SAMPLE_EVERY_S):
            self._take()

    def _take(self) -> None:
        self.samples.append(rss_kib(self._pid))
        if self._is_warm():
            self._warm_kib.append(self.samples[-1])

    def growth_kib(self) -> int:
        """From the first sample after the warm-up to the highest one."""
        return max(self._warm_kib) - self._warm_kib[0] if self._warm_kib else 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join()
        self._take()
