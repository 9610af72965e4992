"""The rows that tebench prints: the columns of Mooncake's tebench, then ours, or one JSON object a line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from moonpool.bench.classes import ClassResult, Summary, summarize
from moonpool.bench.latency import LatencyRecorder
from moonpool.bench.workload import TIGHT, Point

RULE: Final = "-" * 160
#: What a JSON line of classes says of all of them.
QOS_FIGURES: Final = (
    "weighted_goodput_gbps",
    "jain_fairness",
    "max_isolation_leakage",
    "total_utilization",
)
COLUMNS: Final = (
    ("BlkSize (B)", 14),
    ("Batch", 8),
    ("BW (GB/s)", 14),
    ("Avg Inst GB/s", 18),
    ("Avg Lat (us)", 14),
    ("Avg Tx (us)", 14),
    ("P99 Tx (us)", 14),
    ("P999 Tx (us)", 14),
    ("P50 Tx (us)", 14),
    ("CPU s/GB", 14),
    ("Threads", 8),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PointResult:
    """What one point cost. CPU seconds are those of the initiator's process, all threads."""

    point: Point
    op_type: str
    transport: str
    wall_s: float
    cpu_s: float
    latencies: LatencyRecorder
    checked_bytes: int
    #: What each class did; without classes one without a name.
    classes: tuple[ClassResult, ...] = ()
    is_workload: bool = False

    @property
    def transferred_bytes(self) -> int:
        """Of operations that ended in time."""
        if not self.classes:
            return self.latencies.operations * self.point.operation_bytes
        return sum(one.transferred_bytes for one in self.classes)

    @property
    def bandwidth(self) -> float:
        """GB/s (10^9) over the wall time of the point, pacing and checks included."""
        return self.transferred_bytes / self.wall_s / 1e9 if self.wall_s else 0.0

    @property
    def mean_instant_bandwidth(self) -> float:
        """Mean of the bandwidths of single operations, GB/s."""
        if not self.latencies.operations:
            return 0.0
        if not self.classes:
            rates = self.latencies.inverse_sum_s * self.point.operation_bytes
        else:
            rates = sum(one.latencies.inverse_sum_s * one.block_bytes * one.batch for one in self.classes)
        return rates / self.latencies.operations / 1e9

    @property
    def mean_latency_us(self) -> float:
        """Wall time a thread spent for an operation, pacing and checks included."""
        operations = self.latencies.operations
        return self.wall_s * self.point.threads / operations * 1e6 if operations else 0.0

    @property
    def cpu_s_per_gigabyte(self) -> float:
        return self.cpu_s / (self.transferred_bytes / 1e9) if self.transferred_bytes else 0.0

    def percentile_us(self, fraction: float) -> float:
        """Percentile of the transfer latencies."""
        return self.latencies.percentile_ns(fraction) / 1e3


def header() -> str:
    """Column titles and the rule under them."""
    return "".join(f"{name:<{width}}" for name, width in COLUMNS).rstrip() + "\n" + RULE


def row(result: PointResult) -> str:
    """One point as a line of the table."""
    cells = (
        str(result.point.block_bytes),
        str(result.point.batch),
        f"{result.bandwidth:.6f}",
        f"{result.mean_instant_bandwidth:.6f}",
        f"{result.mean_latency_us:.1f}",
        f"{result.latencies.mean_ns() / 1e3:.1f}",
        f"{result.percentile_us(0.99):.1f}",
        f"{result.percentile_us(0.999):.1f}",
        f"{result.percentile_us(0.5):.1f}",
        f"{result.cpu_s_per_gigabyte:.4f}",
        str(result.point.threads),
    )
    return "".join(f"{cell:<{width}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True)).rstrip()


def notes(result: PointResult, capacity_gb_s: float) -> list[str]:
    """The lines under a row that tell of its classes; none when it has no classes."""
    lines = []
    for one in result.classes:
        if one.traffic.name == TIGHT:
            missed = one.missed / one.latencies.operations if one.latencies.operations else 0.0
            lines.append(
                f"  [{TIGHT}] threads={one.traffic.threads} deadline_us={one.traffic.deadline_us:g} "
                f"operations={one.latencies.operations} missed={one.missed} miss_rate={missed:.4f} "
                f"p99_us={one.latencies.percentile_ns(0.99) / 1e3:.1f}"
            )
    if lines or not any(one.traffic.name for one in result.classes):
        return lines
    whole = summarize(result.classes, capacity_gb_s)
    lines.append(
        f"  [qos-summary] throughput={whole.throughput:.6f} GB/s "
        f"weighted_goodput={whole.weighted_goodput:.6f} jain_fairness={whole.jain_fairness:.4f} "
        f"max_isolation_leakage={whole.max_isolation_leakage:.4f} "
        f"total_utilization={whole.total_utilization:.4f}"
    )
    lines += [
        f"  [qos-class] name={one.traffic.name} threads={one.traffic.threads} operations={one.operations} "
        f"transferred_bytes={one.transferred_bytes} throughput={one.throughput:.6f} GB/s "
        f"p99_us={one.latencies.percentile_ns(0.99) / 1e3:.1f} slo_attainment={one.slo_attainment:.4f} "
        f"isolation_leakage={one.isolation_leakage:.4f} missed={one.missed}"
        for one in result.classes
    ]
    return lines


def qos_record(result: PointResult, capacity_gb_s: float) -> dict[str, Any]:
    """One point of classes as a record of --qos_output_jsonl (schema 1); bandwidths in GB/s."""
    whole: Summary = summarize(result.classes, capacity_gb_s)
    return {
        "schema_version": 1,
        "block_size": result.point.block_bytes,
        "batch_size": result.point.batch,
        "num_threads": result.point.threads,
        "aggregate_throughput_gbps": round(whole.throughput, 6),
        "weighted_goodput_gbps": round(whole.weighted_goodput, 6),
        "jain_fairness": round(whole.jain_fairness, 6),
        "max_isolation_leakage": round(whole.max_isolation_leakage, 6),
        "link_capacity_gbps": capacity_gb_s,
        "total_utilization": round(whole.total_utilization, 6),
        "classes": [class_record(one) for one in result.classes],
    }


def class_record(one: ClassResult) -> dict[str, Any]:
    """One class as an object."""
    return {
        "name": one.traffic.name,
        "threads": one.traffic.threads,
        "priority": one.traffic.priority,
        "block_size": one.block_bytes,
        "batch_size": one.batch,
        "operations": one.operations,
        "missed": one.missed,
        "transferred_bytes": one.transferred_bytes,
        "throughput_gbps": round(one.throughput, 6),
        "p50_us": round(one.latencies.percentile_ns(0.5) / 1e3, 3),
        "p99_us": round(one.latencies.percentile_ns(0.99) / 1e3, 3),
        "slo_us": one.traffic.slo_us,
        "slo_attainment": round(one.slo_attainment, 6),
        "isolation_leakage": round(one.isolation_leakage, 6),
        "deadline_us": one.traffic.deadline_us,
        "weight": one.traffic.weight,
    }


def as_json(result: PointResult, capacity_gb_s: float = 0.0) -> str:
    """The point as one JSON object; bandwidths in GB/s, latencies in us. With classes it has theirs too."""
    values: dict[str, Any] = {
        "op_type": result.op_type,
        "xport_type": result.transport,
        "block_size": result.point.block_bytes,
        "batch_size": result.point.batch,
        "num_threads": result.point.threads,
        "operations": result.latencies.operations,
        "transferred_bytes": result.transferred_bytes,
        "checked_bytes": result.checked_bytes,
        "wall_s": round(result.wall_s, 6),
        "bandwidth_gb_s": round(result.bandwidth, 6),
        "avg_inst_gb_s": round(result.mean_instant_bandwidth, 6),
        "avg_lat_us": round(result.mean_latency_us, 3),
        "avg_tx_us": round(result.latencies.mean_ns() / 1e3, 3),
        "p50_us": round(result.percentile_us(0.5), 3),
        "p99_us": round(result.percentile_us(0.99), 3),
        "p999_us": round(result.percentile_us(0.999), 3),
        "max_us": round(result.latencies.longest_ns / 1e3, 3),
        "cpu_s_per_gb": round(result.cpu_s_per_gigabyte, 6),
    }
    if any(one.traffic.name for one in result.classes):
        record = qos_record(result, capacity_gb_s)
        values |= {name: record[name] for name in QOS_FIGURES} | {"classes": record["classes"]}
    return json.dumps(values)
