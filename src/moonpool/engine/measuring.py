"""Snapshots of an engine's counters, in the shape that `moonpool.metrics` renders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from moonpool.engine.past import KEY, add_counts, fallbacks_of, lane_counts, merge
from moonpool.errors import Status
from moonpool.native.io.server import TargetServer
from moonpool.native.io.workers import WorkerPool
from moonpool.operations import Priority
from moonpool.units import NS_PER_US

if TYPE_CHECKING:
    from moonpool.engine.control import ControlService
    from moonpool.engine.opening import Openings
    from moonpool.engine.segment import Segment
    from moonpool.transport.base import Transport

#: A transport's counter whose name ends so is a gauge (what is there now, no total); others it names itself.
GAUGE_ENDINGS: Final = ("_open", "_now")


def engine_metrics(
    openings: Openings,
    own: tuple[TargetServer, ControlService, WorkerPool],
    transports: Sequence[Transport],
    started_s: float,
) -> dict[str, Any]:
    """Paths (by transport, peer, path and operation), counters, gauges: totals since the engine was made.

    `started_s`, seconds since 1970, tells who reads them whether two totals are of one life.
    """
    server, control, workers = own
    served = server.counters()
    gauges: dict[str, Any] = {name: served.pop(name) for name in ("lanes_open", "notices_waiting")}
    segments, rows, past = openings.measured()
    peers = {segment.peer.instance: segment.peer for segment in segments}
    live = [{"path_fallbacks": sum(map(fallbacks_of, segments))}, *map(lane_counts, peers.values())]
    counters = {f"target_{name}": value for name, value in served.items()}
    counters |= {f"control_{name}": value for name, value in control.counters.items()}
    counters |= add_counts(({"lanes_connected": 0, "lanes_lost": 0}, past, *live))
    counters |= class_counts(workers)
    for transport in transports:
        for name, value in transport.counters().items():
            now = name in transport.gauges or name.endswith(GAUGE_ENDINGS)
            (gauges if now else counters)[f"{transport.name}_{name}"] = value
    return {
        "paths": added_up([*rows, *(row for segment in segments for row in paths_of(segment))]),
        "counters": counters,
        "gauges": {
            **gauges,
            "segments_open": len(segments),
            "batches_queued": workers.queued,
            "start_time_seconds": started_s,
        },
    }


def class_counts(workers: WorkerPool) -> dict[str, int]:
    """Of each class of submitted batches, as "class_<name>_<what>": how many, what held them up."""
    found: dict[str, int] = {}
    for priority in Priority:
        counts, name = workers.counts(priority), f"class_{priority.name.lower()}"
        found |= {
            f"{name}_batches": counts["submitted"],
            f"{name}_bytes": counts["started_bytes"],
            f"{name}_wait_us": counts["waited_ns"] // NS_PER_US,
            f"{name}_held": counts["held"],
            f"{name}_late": counts["late"],
        }
    return found


def added_up(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each transport, peer, path and operation: a peer may be opened twice, or again."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = tuple(row[name] for name in KEY)
        if key in found:
            merge(found[key], row)
        else:
            found[key] = {**row, "errors": dict(row["errors"])}
    return list(found.values())


def paths_of(segment: Segment) -> Iterable[dict[str, Any]]:
    """Two rows for each path of a segment: what it has moved since it was opened."""
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
