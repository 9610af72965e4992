"""Snapshots of an engine's counters, in the shape that `moonpool.metrics` renders."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from moonpool.errors import Status
from moonpool.native.io.server import TargetServer
from moonpool.native.io.workers import WorkerPool

if TYPE_CHECKING:
    from moonpool.engine.control import ControlService
    from moonpool.engine.segment import Segment


def engine_metrics(
    segments: Iterable[Segment], server: TargetServer, control: ControlService, workers: WorkerPool
) -> dict[str, Any]:
    """Paths (by transport, peer, path and operation), counters, gauges; totals since a segment was opened."""
    served = server.counters()
    gauges = {name: served.pop(name) for name in ("lanes_open", "notices_waiting")}
    open_segments = list(segments)
    counters = {f"target_{name}": value for name, value in served.items()}
    counters |= {f"control_{name}": value for name, value in control.counters.items()}
    lanes = {segment.peer.instance: segment.peer.lanes.counters() for segment in open_segments}
    counters["lanes_connected"] = sum(one["connects"] for one in lanes.values())
    counters["lanes_lost"] = sum(one["lost"] for one in lanes.values())
    counters["path_fallbacks"] = sum(
        segment.native.path_stats(info.id)["fallbacks"] for segment in open_segments for info in segment.paths
    )
    return {
        "paths": [row for segment in open_segments for row in _paths_of(segment)],
        "counters": counters,
        "gauges": {**gauges, "segments_open": len(open_segments), "batches_queued": workers.queued},
    }


def _paths_of(segment: Segment) -> Iterable[dict[str, Any]]:
    for info in segment.paths:
        stats = segment.native.path_stats(info.id)
        for op in ("READ", "WRITE"):
            one = stats[op]
            yield {
                "transport": info.transport,
                "peer": segment.endpoint,
                "path": info.id,
                "op": op,
                "batches": one["batches"],
                "transfers": one["transfers"],
                "bytes": one["bytes"],
                "errors": {Status(status).name: count for status, count in one["errors"].items()},
                "latency_us_buckets": [(upper / 1e3, count) for upper, count in one["latency_ns_buckets"]],
                "latency_sum_us": one["latency_sum_ns"] / 1e3,
            }
