"""tebench's active side: opens the targets, and runs the threads of each point."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from moonpool import Engine, EngineConfig, Segment
from moonpool.bench.classes import ClassResult, Traffic
from moonpool.bench.latency import LatencyRecorder
from moonpool.bench.report import PointResult
from moonpool.bench.segments import LocalMemory, local_memory, needed_transports, offer
from moonpool.bench.stream import DataMismatch, RemoteWindow, Stopped, Stream
from moonpool.bench.workload import (
    OWN_SEGMENT,
    PAGE_BYTES,
    Options,
    Point,
    points_of,
    tasks_of,
    window_of,
)
from moonpool.errors import NoSuchSegment, UsageError

__all__ = ["DataMismatch", "engine_config", "run_initiator"]

BARRIER_SLACK_S: Final = 60.0  # beyond warm-up and one transfer's deadline, for threads that start late


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
    base = EngineConfig.from_env()
    changes: dict[str, Any] = {"metadata": metadata}
    if options.seg_name:
        changes["name"] = options.seg_name
    if options.rpc_server_port:
        changes["port"] = options.rpc_server_port
    if options.deadline_bw_arbitration:
        changes["submit_order"] = "deadline"
    if options.device_names:
        changes["rdma_devices"] = options.device_names
    changes["transports"] = options.transports or needed_transports(options.kinds, base.transports)
    return replace(base, **changes)


def open_target(engine: Engine, name: str, options: Options) -> list[RemoteWindow]:
    """Opens a segment: its largest region, or all of that size; ``NoSuchSegment`` when it offers none."""
    if name == OWN_SEGMENT:
        how = (options.locations, options.target_gpu_id)
        own = [offer(engine, kind, options.total_buffer_size, how) for kind in options.kinds]
        segment = engine.open(engine.endpoint, timeout_s=options.timeout_s)
        chosen = [region for region in segment.regions if region.handle in {one.handle for one in own}]
    else:
        segment = engine.open(name, timeout_s=options.timeout_s)
        largest = max((region.size_bytes // PAGE_BYTES for region in segment.regions), default=0)
        chosen = [region for region in segment.regions if region.size_bytes // PAGE_BYTES == largest]
    if not chosen:
        raise NoSuchSegment(
            f"the target {name} offers no region; start one with `tebench` there", segment=name
        )
    path = path_for(segment, options.tent_transport_hint)
    return [RemoteWindow(segment, region.handle, region.size_bytes, path) for region in chosen]


def path_for(segment: Segment, transport: str) -> int | None:
    """The first path of a transport; None for any. UsageError when the segment has none of it."""
    if not transport:
        return None
    for path in segment.paths:
        if path.transport == transport:
            return path.id
    there = ", ".join(dict.fromkeys(path.transport for path in segment.paths))
    raise UsageError(f"no path to {segment.name} is by {transport}; there are {there}")


def reach_of(options: Options, targets: Sequence[RemoteWindow]) -> int:
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
    gpu = options.local_gpu_id if "VRAM" in options.kinds else None
    local = local_memory(engine, options.total_buffer_size, gpu)
    opened = [open_target(engine, name, options) for name in options.target_seg_names]
    # The first region of each target, then the second of each: threads go over targets and kinds in turn.
    deepest = max(len(windows) for windows in opened)
    targets = [windows[k] for k in range(deepest) for windows in opened if k < len(windows)]
    reach = reach_of(options, targets)
    done = 0
    for point in points_of(options, reach):
        report(run_point(options, point, streams_of(options, engine, point, (local, targets, reach))))
        done += 1
    return done


def streams_of(
    options: Options, engine: Engine, point: Point, memory: tuple[LocalMemory, Sequence[RemoteWindow], int]
) -> list[tuple[Stream, RemoteWindow]]:
    """The threads of a point with their shares; UsageError when a class's operations are larger than one."""
    local, targets, reach = memory
    streams = []
    for thread, (traffic, sizes) in enumerate(tasks_of(options, point)):
        window = window_of(point, thread, reach, options.target_offset)
        if sizes.operation_bytes > window.size_bytes:
            raise UsageError(
                f"class {traffic.name!r}: {sizes.operation_bytes} bytes are more than a thread's share of "
                f"{window.size_bytes}; raise --total_buffer_size"
            )
        stream = Stream(engine, options, (traffic, sizes), (local, window))
        streams.append((stream, targets[thread % len(targets)]))
    return streams


def run_point(options: Options, point: Point, streams: list[tuple[Stream, RemoteWindow]]) -> PointResult:
    """One point: runs its threads to their end and merges what they recorded."""
    wall_s, cpu_s = PointRun(streams, options).run()
    latencies = LatencyRecorder()
    by_class: dict[Traffic, list[Stream]] = {}
    for stream, _ in streams:
        latencies.merge(stream.latencies)
        by_class.setdefault(stream.traffic, []).append(stream)
    return PointResult(
        point=point,
        op_type=options.op_type,
        transport=",".join(options.transports) or "auto",
        wall_s=wall_s,
        cpu_s=cpu_s,
        latencies=latencies,
        checked_bytes=sum(stream.checked_bytes for stream, _ in streams),
        classes=tuple(class_result(traffic, members, wall_s) for traffic, members in by_class.items()),
        is_workload=options.is_workload,
    )


def class_result(traffic: Traffic, members: Sequence[Stream], wall_s: float) -> ClassResult:
    """What the threads of one class did."""
    latencies = LatencyRecorder()
    for stream in members:
        latencies.merge(stream.latencies)
    return ClassResult(
        traffic=traffic,
        block_bytes=members[0].point.block_bytes,
        batch=members[0].point.batch,
        wall_s=wall_s,
        latencies=latencies,
        within_slo=sum(stream.within_slo for stream in members),
        missed=sum(stream.missed for stream in members),
    )
