"""What each contender's driver provides, and the loop that times a call made from Python."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from moonpool.bench.workers.protocol import Job, Operation

Bytes = npt.NDArray[np.uint8]
Call = Callable[
    [int], None
]  # moves the blocks of position `index`; raises when the system says that it failed

ENTRIES_PREPARED: Final = 65536  # blocks whose addresses are laid out before the clock starts


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    operations: int
    elapsed_s: float
    latencies_ns: Sequence[int]


class Target(Protocol):
    """The passive side. It lives in its own process and does nothing after ``start`` but keep its memory."""

    def start(self, size_bytes: int) -> tuple[Bytes, dict[str, Any]]:
        """Offers ``size_bytes`` of memory; returns it and what the initiator must know to reach it (JSON)."""


class Initiator(Protocol):
    """The active side."""

    def start(self, size_bytes: int, target: dict[str, Any]) -> Bytes:
        """Makes local memory of that size, connects to the target and returns the memory."""

    def run(self, job: Job) -> Timing:
        """Does the job's operations, position 0 first; raises when one fails."""


_pages_as_they_come = False


def take_pages_as_they_come() -> None:
    """From now on `anonymous_memory` is what mmap gives without advice: pages of 4 KiB."""
    global _pages_as_they_come
    _pages_as_they_come = True


def anonymous_memory(size_bytes: int) -> Bytes:
    """Page-aligned private memory, huge pages advised, every page present (first touch outweighs a copy)."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE if _pages_as_they_come else mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, dtype=np.uint8)
    array[:] = 0
    return array


def address_of(array: Bytes) -> int:
    return int(array.ctypes.data)


def pattern(size_bytes: int, seed: int) -> Bytes:
    """Bytes that depend on seed and position, 8-byte words; ``size_bytes`` must be a multiple of 8."""
    words = np.arange(size_bytes // 8, dtype=np.uint64)
    words += np.uint64(seed) << np.uint64(32)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(29)
    return words.view(np.uint8)


def starts_of(size_bytes: int, block_bytes: int, count: int, most: int = ENTRIES_PREPARED) -> list[int]:
    """Offsets at which the operations of a job start: they step through the whole buffer.

    At most ``most`` blocks are laid out in all, evenly spread when the buffer holds more.
    """
    step = block_bytes * count
    positions = max(1, size_bytes // step)
    wanted = min(positions, max(1, most // count))
    return [position * (positions // wanted) * step for position in range(wanted)]


def timed_loop(call: Call, job: Job) -> Timing:
    """Calls until the job's bounds are reached. Latencies contain the loop's own cost."""
    clock = time.perf_counter_ns
    latencies: list[int] = []
    record = latencies.append
    minimum_ns = int(job.minimum_s * 1e9)
    index = 0
    started = before = clock()
    while index < job.maximum_operations and (
        index < job.minimum_operations or before - started < minimum_ns
    ):
        call(index)
        after = clock()
        record(after - before)
        before = after
        index += 1
    return Timing(operations=index, elapsed_s=(before - started) / 1e9, latencies_ns=latencies)


class PreparedCalls:
    """Keeps what a driver prepared for a cell, so that its jobs of later rounds start at once."""

    def __init__(self, prepare: Callable[[Operation, int, int, str], Call]) -> None:
        self._prepare = prepare
        self._calls: dict[tuple[Operation, int, int, str], Call] = {}

    def run(self, job: Job) -> Timing:
        key = (job.operation, job.block_bytes, job.count, job.variant)
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = self._prepare(*key)
        return timed_loop(call, job)
