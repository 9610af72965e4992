"""tebench's active side: threads that each move blocks between their share of the buffer and of a target's
region.

A thread times nothing but the call that moves the bytes (and notifies, if asked to). Filling and comparing
patterns, and pacing, happen between the timed calls; they show in the bandwidth over wall time and in ``Avg
Lat`` only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from moonpool import Engine, EngineConfig, Op, Region, Segment
from moonpool.bench.latency import LatencyRecorder
from moonpool.bench.report import PointResult
from moonpool.bench.workload import (
    OWN_SEGMENT,
    Options,
    Point,
    Window,
    first_difference,
    pattern_words,
    points_of,
    window_of,
)
from moonpool.errors import NoSuchSegment, UsageError

BARRIER_SLACK_S: Final = 60.0  # beyond warm-up and one transfer's deadline, for threads that start late
NOTIFICATION: Final = b"tebench"


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


class Stream:
    """One thread's work at one point. Positions go round its window; each keeps its generation."""

    def __init__(self, engine: Engine, options: Options, point: Point, local: Region, window: Window) -> None:
        self._engine = engine
        self._options = options
        self._point = point
        self._window = window
        self._address = local.address + window.local_offset
        end = window.local_offset + window.size_bytes
        self._words = np.frombuffer(local.view[window.local_offset : end], dtype=np.uint8)
        self._positions = window.size_bytes // point.operation_bytes
        self._generations = [0] * self._positions
        self.checked_bytes = 0
        self.latencies = LatencyRecorder()

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
        self.checked_bytes = 0
        if self._options.verifies or self._options.request_interval_us or self._options.op_type == "mix":
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
        move(position)
        latency_ns = time.perf_counter_ns() - began
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
        point, options, engine = self._point, self._options, self._engine
        block_bytes, batch, step = point.block_bytes, point.batch, point.operation_bytes
        segment, region, first = remote.segment, remote.region_handle, self._window.remote_offset
        address, timeout_s = self._address, options.timeout_s
        single = engine.read if op is Op.READ else engine.write
        starts = np.arange(self._positions * batch if batch > 1 else 0, dtype=np.uint64)
        starts *= np.uint64(block_bytes)
        local, offsets = starts + np.uint64(address), starts + np.uint64(first)

        def move_one(position: int) -> None:
            start = position * step
            single(segment, region, first + start, address + start, block_bytes, timeout_s=timeout_s)

        def move_batch(position: int) -> None:
            mine = slice(position * batch, (position + 1) * batch)
            engine.transfer(op, segment, local[mine], region, offsets[mine], block_bytes, timeout_s=timeout_s)

        move = move_one if batch == 1 else move_batch
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


class PointRun:
    """The threads of one point: they warm up, start measuring together, and stop together when one fails."""

    def __init__(self, streams: list[tuple[Stream, RemoteWindow]], options: Options) -> None:
        self._streams = streams
        self._options = options
        self._failed = threading.Event()
        self._failures: list[BaseException] = []
        self._barrier = threading.Barrier(len(streams), action=self._start_clock)
        self._began_s = 0.0
        self._began_cpu_s = 0.0

    def run(self) -> tuple[float, float]:
        """Wall and CPU seconds of the measured part; raises the first failure of any thread."""
        threads = [
            threading.Thread(target=self._thread, args=pair, name=f"tebench-{number}")
            for number, pair in enumerate(self._streams)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:  # the user's interrupt: let the threads end before it goes on
            self._failed.set()
            self._barrier.abort()
            raise
        if self._failures:
            raise self._failures[0]
        return time.perf_counter() - self._began_s, time.process_time() - self._began_cpu_s

    def _start_clock(self) -> None:
        self._began_s, self._began_cpu_s = time.perf_counter(), time.process_time()

    def _thread(self, stream: Stream, remote: RemoteWindow) -> None:
        options = self._options
        try:
            stream.prepare(remote)
            stream.run(time.perf_counter() + options.warmup_s, False, self._failed.is_set)
            self._barrier.wait(options.warmup_s + options.timeout_s + BARRIER_SLACK_S)
            stream.run(self._began_s + options.duration_s, True, self._failed.is_set)
        except (Stopped, threading.BrokenBarrierError):
            pass
        except BaseException as failure:  # told by run(), in the thread that can end the program
            self._failures.append(failure)
            self._failed.set()
            self._barrier.abort()


def engine_config(options: Options, metadata: str) -> EngineConfig:
    """The engine that these options ask for; the rest is the environment's or the default."""
    changes: dict[str, Any] = {"metadata": metadata}
    if options.seg_name:
        changes["name"] = options.seg_name
    if options.rpc_server_port:
        changes["port"] = options.rpc_server_port
    if options.xport_type:
        changes["transports"] = (options.xport_type,)
    return replace(EngineConfig.from_env(), **changes)


def open_target(engine: Engine, name: str, options: Options) -> RemoteWindow:
    """Opens a segment and picks its largest region; raises ``NoSuchSegment`` when it offers none."""
    if name == OWN_SEGMENT:
        own = engine.allocate(options.total_buffer_size)  # not the buffer that the transfers start from
        segment = engine.open(engine.endpoint, timeout_s=options.timeout_s)
        return RemoteWindow(segment, own.handle, own.size_bytes)
    segment = engine.open(name, timeout_s=options.timeout_s)
    if not segment.regions:
        raise NoSuchSegment(
            f"the target {name} offers no region; start one with `tebench` there", segment=name
        )
    region = max(segment.regions, key=lambda one: one.size_bytes)
    return RemoteWindow(segment, region.handle, region.size_bytes)


def reach_of(options: Options, targets: list[RemoteWindow]) -> int:
    """Bytes of the targets' regions that may be used; ``UsageError`` when the window is outside of one."""
    smallest = min(target.region_bytes for target in targets)
    if options.target_offset + options.target_range_size > smallest or options.target_offset >= smallest:
        raise UsageError(
            f"--target_offset {options.target_offset} and --target_range_size {options.target_range_size} "
            f"reach beyond the target's region of {smallest} bytes"
        )
    return min(options.total_buffer_size, options.target_range_size or smallest - options.target_offset)


def run_initiator(options: Options, engine: Engine, report: Callable[[PointResult], None]) -> int:
    """Runs the sweep against open targets and reports each point; returns how many points there were."""
    local = engine.allocate(options.total_buffer_size)
    targets = [open_target(engine, name, options) for name in options.target_seg_names]
    reach = reach_of(options, targets)
    done = 0
    for point in points_of(options, reach):
        streams = []
        for thread in range(point.threads):
            window = window_of(point, thread, reach, options.target_offset)
            streams.append((Stream(engine, options, point, local, window), targets[thread % len(targets)]))
        report(run_point(options, point, streams))
        done += 1
    return done


def run_point(options: Options, point: Point, streams: list[tuple[Stream, RemoteWindow]]) -> PointResult:
    """One point: runs its threads to their end and merges what they recorded."""
    wall_s, cpu_s = PointRun(streams, options).run()
    latencies = LatencyRecorder()
    for stream, _ in streams:
        latencies.merge(stream.latencies)
    return PointResult(
        point=point,
        op_type=options.op_type,
        transport=options.xport_type or "auto",
        wall_s=wall_s,
        cpu_s=cpu_s,
        latencies=latencies,
        checked_bytes=sum(stream.checked_bytes for stream, _ in streams),
    )
