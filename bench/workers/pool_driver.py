"""What each store's driver provides, and the jobs that are done with it: the same loop for everyone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from moonpool.bench.workers.driver import Bytes, pattern
from moonpool.bench.workers.pool_protocol import PoolJob, PoolOperation, PoolReport

CALLS_PREPARED: Final = 4_096
READ_CALLS: Final = 64
READ_BYTES: Final = 128 << 20
"""What gets step through, again and again: more than a cache holds, and at least one call."""
KEYS_PREPARED: Final = 65_536
EXISTS_BYTES: Final = 64

Call = Callable[[int], None]
"""Does the call of batch ``index``; raises when the store does not say that all of its keys went well."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The keys of one call, and where in the client's memory their bytes are."""

    keys: list[str]
    offsets: list[int]


class PoolDriver(Protocol):
    """A store with its servers and clients. It lives in the worker's process, its servers in others."""

    memory: Bytes
    """The client's buffer, page-aligned and registered as the store wants it."""

    capacity_bytes: int
    """Payload that may be in the store at once."""

    def pids(self) -> Sequence[int]:
        """The servers' processes, Redis included."""

    def redis_pid(self) -> int:
        """Redis; 0 where the store has none."""

    def call(self, operation: PoolOperation, variant: str, size: int, batches: Sequence[Batch]) -> Call:
        """Prepares calls: what can be laid out before the clock starts is."""

    def fill(self, variant: str, size: int, batches: Sequence[Batch]) -> None:
        """Puts all keys of the batches as a reader of that variant needs them."""

    def clear(self) -> None:
        """Removes everything from the store, or makes sure that old objects make room for new ones."""

    def close(self) -> None:
        """Ends all servers."""


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process, ns resolution (clock id as in the kernel's posix-timers.h)."""
    return time.clock_gettime((~pid << 3) | 2)


def percentile_us(ordered_ns: Sequence[int], fraction: float) -> float:
    return ordered_ns[min(len(ordered_ns) - 1, int(len(ordered_ns) * fraction))] / 1e3


class PoolWorker:
    """Does jobs with one driver. Every job has keys of its own."""

    def __init__(self, driver: PoolDriver) -> None:
        self._driver = driver
        self._serial = 0

    def batches(self, size: int, count: int, wanted: int) -> list[Batch]:
        """At most ``wanted`` batches of new keys, as many as fit; their bytes step through the memory."""
        self._serial += 1
        step = size * count
        fits = min(self._driver.capacity_bytes // max(step, 1), KEYS_PREPARED // count)
        places = max(self._driver.memory.nbytes // max(step, 1), 1)
        made = []
        for number in range(max(min(wanted, fits), 1)):
            start = number % places * step
            keys = [f"bench-{self._serial:06d}-{number:06d}-{each:04d}" for each in range(count)]
            made.append(Batch(keys, [start + each * size for each in range(count)]))
        return made

    def run(self, job: PoolJob) -> PoolReport:
        """The job; the store is empty again afterwards."""
        latencies: list[int] = []
        cpu_s = redis_s = 0.0
        for call, calls in self._laps(job):
            own, redis = self._cpu(), self._redis_cpu()
            spent = sum(latencies)
            self._lap(call, calls, job, latencies, spent)
            cpu_s += self._cpu() - own
            redis_s += self._redis_cpu() - redis
            if len(latencies) >= job.maximum_operations or (
                len(latencies) >= job.minimum_operations and sum(latencies) >= job.minimum_s * 1e9
            ):
                break
        self._driver.clear()
        ordered = sorted(latencies)
        return PoolReport(
            operations=len(latencies),
            keys=len(latencies) * job.count,
            transferred_bytes=len(latencies) * job.operation_bytes if job.operation != "exists" else 0,
            elapsed_s=sum(latencies) / 1e9,
            p50_us=percentile_us(ordered, 0.5),
            p99_us=percentile_us(ordered, 0.99),
            cpu_s=cpu_s,
            redis_cpu_s=redis_s,
        )

    def _laps(self, job: PoolJob) -> Iterator[tuple[Call, int]]:
        """Prepared calls and how many of them may be made: puts go on with new keys in an empty store."""
        driver = self._driver
        size = EXISTS_BYTES if job.operation == "exists" else job.block_bytes
        if job.operation != "put":
            batches = self.batches(size, job.count, min(READ_CALLS, READ_BYTES // (size * job.count)))
            driver.fill(job.variant, size, batches)
            call = driver.call(job.operation, job.variant, size, batches)
            distinct = len(batches)
            call(0)
            yield lambda index: call(index % distinct), job.maximum_operations
            return
        while True:
            batches = self.batches(size, job.count, CALLS_PREPARED)
            yield driver.call("put", job.variant, size, batches), len(batches)
            driver.clear()

    def _lap(self, call: Call, calls: int, job: PoolJob, latencies: list[int], spent: int) -> None:
        clock = time.perf_counter_ns
        record = latencies.append
        minimum_ns = int(job.minimum_s * 1e9)
        done = len(latencies)
        for index in range(min(calls, job.maximum_operations - done)):
            before = clock()
            call(index)
            took = clock() - before
            record(took)
            spent += took
            if spent >= minimum_ns and done + index + 1 >= job.minimum_operations:
                return

    def check(self, size: int, count: int, variant: str) -> int:
        """Puts a pattern, reads it back into cleared memory, and compares every byte; how many there were."""
        (batch,) = self.batches(size, count, 1)
        length = size * count
        wanted = pattern(-(-length // 8) * 8, self._serial)[:length]
        self._driver.memory[:length] = wanted
        self._driver.fill(variant, size, [batch])
        self._driver.memory[:length] = 0
        self._driver.call("get", variant, size, [batch])(0)
        found = self._driver.memory[:length]
        wrong = np.flatnonzero(found != wanted)
        self._driver.clear()
        if wrong.size:
            raise RuntimeError(f"get of {count} x {size} bytes: byte {wrong[0]} is not what was put")
        return length

    def _cpu(self) -> float:
        return cpu_seconds(os.getpid()) + sum(cpu_seconds(pid) for pid in self._driver.pids())

    def _redis_cpu(self) -> float:
        pid = self._driver.redis_pid()
        return cpu_seconds(pid) if pid else 0.0
