"""What every worker process does around its driver: positions, timing, patterns, checks, the protocol."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import pytest

from moonpool.bench.workers.driver import (
    Bytes,
    PreparedCalls,
    Timing,
    anonymous_memory,
    pattern,
    starts_of,
    timed_loop,
)
from moonpool.bench.workers.main import TARGET_SEED, Worker, cpu_seconds, percentile_us
from moonpool.bench.workers.protocol import Job, Operation, Ready, WorkerFailed, decode, encode

SIZE_BYTES = 64 * 1024


def job(operation: Operation = "read", **changes: Any) -> Job:
    values: dict[str, Any] = {
        "operation": operation,
        "block_bytes": 4096,
        "count": 1,
        "minimum_s": 0.0,
        "minimum_operations": 3,
        "maximum_operations": 10,
    }
    return Job(**values | changes)


@pytest.mark.parametrize(
    ("block", "count"), [(4096, 1), (4096, 16), (4096, 128), (1 << 20, 4), (64 << 20, 1)]
)
def test_positions_step_through_the_whole_buffer(block: int, count: int) -> None:
    size = 256 << 20
    starts = starts_of(size, block, count)
    assert starts[0] == 0
    assert len(set(starts)) == len(starts)
    assert all(start % (block * count) == 0 for start in starts)
    assert max(starts) + block * count <= size
    assert max(starts) + block * count > size - 2 * max(block * count, size // len(starts))
    assert len(starts) * count <= 65536


def test_few_prepared_entries_are_spread_evenly() -> None:
    assert starts_of(1 << 20, 4096, 16, most=64) == [0, 1 << 18, 1 << 19, 3 << 18]


def test_an_operation_larger_than_the_buffer_still_has_its_first_position() -> None:
    assert starts_of(4096, 8192, 1) == [0]


def test_the_loop_obeys_its_bounds_and_starts_at_position_zero() -> None:
    seen: list[int] = []
    timing = timed_loop(seen.append, job())
    assert seen == [0, 1, 2]
    assert timing.operations == len(timing.latencies_ns) == 3
    assert sum(timing.latencies_ns) / 1e9 == pytest.approx(timing.elapsed_s)
    assert timed_loop(lambda _: None, job(minimum_s=3600.0)).operations == 10


def test_what_fails_ends_the_loop() -> None:
    def fail(index: int) -> None:
        raise RuntimeError(f"operation {index}")

    with pytest.raises(RuntimeError, match="operation 0"):
        timed_loop(fail, job())


def test_a_cell_is_prepared_once() -> None:
    prepared: list[tuple[Operation, int, int, str]] = []

    def prepare(operation: Operation, block_bytes: int, count: int, variant: str) -> Any:
        prepared.append((operation, block_bytes, count, variant))
        return lambda index: None

    calls = PreparedCalls(prepare)
    for _ in range(2):
        calls.run(job())
        calls.run(job(variant="digest"))
    assert prepared == [("read", 4096, 1, ""), ("read", 4096, 1, "digest")]


def test_memory_is_page_aligned_and_zero() -> None:
    memory = anonymous_memory(SIZE_BYTES)
    assert memory.ctypes.data % 4096 == 0
    assert not memory.any()


def test_patterns_differ_by_seed_and_position() -> None:
    one = pattern(SIZE_BYTES, 1).view(np.uint64)
    assert np.unique(one).size == one.size
    assert (one != pattern(SIZE_BYTES, 2).view(np.uint64)).all()


class OwnMemory:
    """An initiator whose target is a second array; ``damage`` spoils what it moves."""

    def __init__(self, damage: Operation | None = None) -> None:
        self.damage = damage
        self.jobs: list[Job] = []

    def start(self, size_bytes: int, target: dict[str, Any]) -> Bytes:
        self.local = np.zeros(size_bytes, dtype=np.uint8)
        self.remote = pattern(size_bytes, TARGET_SEED).copy()
        return self.local

    def run(self, job: Job) -> Timing:
        self.jobs.append(job)
        source, destination = (
            (self.local, self.remote) if job.operation == "write" else (self.remote, self.local)
        )

        def call(index: int) -> None:
            destination[: job.operation_bytes] = source[: job.operation_bytes]
            if self.damage == job.operation:
                destination[5] ^= 1

        return timed_loop(call, job)


def worker_of(initiator: OwnMemory) -> Worker:
    return Worker(initiator, initiator.start(SIZE_BYTES, {}), os.getpid())


def test_a_check_passes_where_the_right_bytes_move_and_leaves_them() -> None:
    initiator = OwnMemory()
    worker = worker_of(initiator)
    for _ in range(2):  # the second finds the target's bytes as the first did
        assert worker.check(4096, 2, "") == 8192


@pytest.mark.parametrize(("damage", "whose"), [("read", "own bytes"), ("write", "written before")])
def test_a_check_finds_one_wrong_byte(damage: Operation, whose: str) -> None:
    with pytest.raises(RuntimeError, match=f"byte 5 is not of .*{whose}"):
        worker_of(OwnMemory(damage)).check(4096, 1, "")


def test_a_job_is_warmed_up_and_counts_only_what_is_measured() -> None:
    initiator = OwnMemory()
    report = worker_of(initiator).run(job(minimum_operations=4))
    assert [one.minimum_operations for one in initiator.jobs] == [1, 4]
    assert (report.operations, report.transferred_bytes) == (4, 4 * 4096)
    assert report.initiator_cpu_s >= 0


def test_requests_are_answered_and_failures_are_sentences() -> None:
    worker = worker_of(OwnMemory())
    assert decode(worker.answer(encode("job", job())))[0] == "report"
    request = encode("check", {"block_bytes": 4096, "count": 1, "variant": ""})
    assert decode(worker.answer(request)) == ("checked", 4096)
    assert decode(worker.answer("not json"))[0] == "error"
    assert decode(worker.answer(json.dumps({"job": {"unknown": 1}})))[0] == "error"


def test_a_line_that_is_no_message_is_refused() -> None:
    for line in ("", "[]", "17", '{"a": 1, "b": 2}'):
        with pytest.raises(WorkerFailed, match="not of the protocol"):
            decode(line)
    assert decode(encode("ready", Ready(initiator_pid=1, target_pid=2)))[1]["target_pid"] == 2


def test_cpu_time_of_a_process_grows_with_work() -> None:
    before = cpu_seconds(os.getpid())
    sum(range(200_000))
    assert cpu_seconds(os.getpid()) > before


def test_percentiles_of_a_sorted_list() -> None:
    ordered = list(range(1000, 101_000, 1000))
    assert percentile_us(ordered, 0.5) == 51.0
    assert percentile_us(ordered, 0.99) == 100.0
    assert percentile_us([7000], 0.99) == 7.0
