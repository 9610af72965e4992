"""One thread of a tebench initiator: moves blocks between its share of the buffer and of a target's region.

It times nothing but the call that moves the bytes (and notifies, if asked to). Filling and comparing
patterns, and pacing, happen between the timed calls; they show in the bandwidth over wall time and in ``Avg
Lat`` only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from moonpool import Engine, Op, Segment
from moonpool.bench.classes import Traffic
from moonpool.bench.latency import LatencyRecorder
from moonpool.bench.segments import LocalMemory
from moonpool.bench.workload import Options, Point, Window, first_difference, pattern_words
from moonpool.errors import TransferTimeout

NOTIFICATION: Final = b"tebench"
US_PER_S: Final = 1e6
NS_PER_US: Final = 1_000


class DataMismatch(Exception):
    """Bytes that arrived are not those that belong there."""


class Stopped(Exception):
    """Another thread of the point failed; that one's error is the one to tell."""


@dataclass(frozen=True, slots=True)
class RemoteWindow:
    """The region of one target that the benchmark works on."""

    segment: Segment
    region_handle: int
    region_bytes: int
    #: The one path that transfers may take; None: any.
    path: int | None = None


class Stream:
    """One thread's work at one point. Positions go round its window; each keeps its generation."""

    def __init__(
        self, engine: Engine, options: Options, task: tuple[Traffic, Point], share: tuple[LocalMemory, Window]
    ) -> None:
        self._engine = engine
        self._options = options
        self.traffic, self._point = task
        local, window = share
        self._window = window
        self._address = local.address + window.local_offset
        if local.view is not None:
            end = window.local_offset + window.size_bytes
            self._words = np.frombuffer(local.view[window.local_offset : end], dtype=np.uint8)
        self._positions = window.size_bytes // self._point.operation_bytes
        self._generations = [0] * self._positions
        self._slo_ns = self.traffic.slo_us * NS_PER_US
        self._deadline_ns = self.traffic.deadline_us * NS_PER_US
        self.checked_bytes = 0
        self.within_slo = self.missed = 0
        self.latencies = LatencyRecorder()

    @property
    def point(self) -> Point:
        """Sizes of this thread's operations."""
        return self._point

    def prepare(self, remote: RemoteWindow) -> None:
        """Gives every position the bytes that reads will look for; once, before a checked read or mix."""
        self._moves = {op: self._mover(op, remote) for op in Op}
        if self._options.check_consistency and self._options.op_type in ("read", "mix"):
            for position in range(self._positions):
                self._block(position)[:] = self._expected(position)
                self._moves[Op.WRITE](position)

    def run(self, until_s: float, record: bool, should_stop: Callable[[], bool]) -> None:
        """Works until the clock reads ``until_s``; a seeding run goes on until every position is written."""
        recorder = self.latencies if record else LatencyRecorder()
        self.checked_bytes = self.within_slo = self.missed = 0
        options = self._options
        mixed = options.op_type == "mix" or options.request_interval_us > 0
        if self.traffic.is_watched or options.verifies or mixed:
            self._run_checked(until_s, recorder, should_stop)
        else:
            self._run_plain(until_s, recorder, should_stop)

    def _run_plain(self, until_s: float, recorder: LatencyRecorder, should_stop: Callable[[], bool]) -> None:
        """The loop with nothing but the transfers in it: its own cost shows with small blocks."""
        move, record, clock = self._moves[self._op(0)], recorder.record, time.perf_counter_ns
        position, positions, until_ns = 0, self._positions, int(until_s * 1e9)
        began = clock()
        while began < until_ns:
            if should_stop():
                raise Stopped
            move(position)
            record(clock() - began)
            position += 1
            if position == positions:
                position = 0
            began = clock()

    def _run_checked(
        self, until_s: float, recorder: LatencyRecorder, should_stop: Callable[[], bool]
    ) -> None:
        interval_s = self._options.request_interval_us / 1e6
        least = self._positions if self._options.op_type == "write_seed" else 1
        clock = time.perf_counter
        done, due_s = 0, clock()
        while done < least or clock() < until_s:
            if should_stop():
                raise Stopped
            recorder.record(self._one(done))
            done += 1
            if interval_s:
                due_s += interval_s
                time.sleep(max(0.0, due_s - clock()))

    def _one(self, number: int) -> int:
        """One operation with whatever checks the options ask for; returns the ns of the transfer alone."""
        position = number % self._positions
        op = self._op(number)
        verifies = self._options.verifies
        if verifies:
            self._before(op, position)
        move = self._moves[op]
        began = time.perf_counter_ns()
        try:
            move(position)
        except TransferTimeout:
            if not self.traffic.deadline_us:
                raise
            self.missed += 1
            return time.perf_counter_ns() - began
        latency_ns = time.perf_counter_ns() - began
        self.missed += 0 < self._deadline_ns < latency_ns
        self.within_slo += latency_ns <= self._slo_ns
        if verifies:
            self._after(op, position)
        return latency_ns

    def _op(self, number: int) -> Op:
        if self._options.op_type == "mix":
            # Each round of the window starts with the other kind, so every position sees both.
            return Op.WRITE if (number + number // self._positions) % 2 else Op.READ
        return Op.WRITE if self._options.op_type in ("write", "write_seed") else Op.READ

    def _before(self, op: Op, position: int) -> None:
        block = self._block(position)
        if op is Op.READ:
            block[:] = ~self._expected(position)  # no byte is right by accident
            return
        if self._options.op_type != "write_seed":
            self._generations[position] += 1
        block[:] = self._expected(position)

    def _after(self, op: Op, position: int) -> None:
        if op is Op.WRITE:
            if not self._options.check_consistency:
                return
            self._block(position)[:] = ~self._expected(position)
            self._moves[Op.READ](position)
        wrong = first_difference(self._block(position), self._expected(position))
        if wrong is not None:
            offset = self._remote_offset(position) + wrong
            raise DataMismatch(f"byte {offset} of the target's region is wrong after {op.name}")
        self.checked_bytes += self._point.operation_bytes

    def _mover(self, op: Op, remote: RemoteWindow) -> Callable[[int], None]:
        """The transfer of a position; all that does not depend on it is laid out before the clock starts."""
        point, engine = self._point, self._engine
        block_bytes, batch, step = point.block_bytes, point.batch, point.operation_bytes
        segment, region, first = remote.segment, remote.region_handle, self._window.remote_offset
        address, options, path = self._address, self._options, remote.path
        timeout_s = self.traffic.deadline_us / US_PER_S or options.timeout_s
        priority = self.traffic.priority or options.priority
        single = engine.read if op is Op.READ else engine.write
        many = self._positions * batch if batch > 1 or priority else 0
        starts = np.arange(many, dtype=np.uint64) * np.uint64(block_bytes)
        local, offsets = starts + np.uint64(address), starts + np.uint64(first)

        def move_one(position: int) -> None:
            start = position * step
            single(
                segment, region, first + start, address + start, block_bytes, path=path, timeout_s=timeout_s
            )

        def move_batch(position: int) -> None:
            mine = slice(position * batch, (position + 1) * batch)
            engine.transfer(
                op, segment, local[mine], region, offsets[mine], block_bytes, path=path, timeout_s=timeout_s
            )

        def move_submitted(position: int) -> None:
            mine = slice(position * batch, (position + 1) * batch)
            here, there = local[mine], offsets[mine]
            engine.submit(
                op,
                segment,
                here,
                region,
                there,
                block_bytes,
                path=path,
                timeout_s=timeout_s,
                priority=priority,
            ).result()

        move = move_submitted if priority else move_one if batch == 1 else move_batch
        if not options.notifi:
            return move

        def move_and_notify(position: int) -> None:
            move(position)
            engine.notify(segment, NOTIFICATION, timeout_s=timeout_s)

        return move_and_notify

    def _remote_offset(self, position: int) -> int:
        return self._window.remote_offset + position * self._point.operation_bytes

    def _expected(self, position: int) -> npt.NDArray[np.uint64]:
        generation = self._generations[position]
        return pattern_words(
            self._remote_offset(position), self._point.operation_bytes, self._options.seed, generation
        )

    def _block(self, position: int) -> npt.NDArray[np.uint64]:
        start = position * self._point.operation_bytes
        return self._words[start : start + self._point.operation_bytes].view(np.uint64)
