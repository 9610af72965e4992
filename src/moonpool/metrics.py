"""An engine's counters as Prometheus text, and quantiles from its latency buckets.

The snapshot is what ``Engine.metrics()`` returns::

    {"paths": [{"transport", "peer", "path", "op", "transfers", "bytes", "errors": {status: n},
                "latency_us_buckets": [(upper_us, count), ...], "latency_sum_us"}],
     "counters": {name: n}, "gauges": {name: value}}

Bucket counts are of the bucket alone, not cumulative; ``upper_us`` ascends and may end with infinity. Source
of the text form: the Prometheus exposition format 0.0.4
(prometheus.io/docs/instrumenting/exposition_formats).
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from moonpool.errors import InternalError, Status, UsageError

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""What an HTTP reply with this text must say."""

US_PER_S: Final = 1e6

LATENCY_BOUNDS_US: Final = tuple(2**power / 1000 for power in range(8, 38))
"""Bucket bounds in the text: powers of two nanoseconds from 256 ns to 137 s.

The engine keeps four times as many. One fixed grid keeps a path at 32 lines and lets series of all paths,
engines and versions be added.
"""

Bucket = tuple[float, int]
"""Upper bound in microseconds, inclusive, and how many samples fell between it and the bound before."""

_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_PATH_LABELS: Final = ("transport", "peer", "path", "op")
_OWN_LABELS: Final = frozenset({*_PATH_LABELS, "status", "le"})
_STATUS_NAMES: Final = {str(int(status)): status.name for status in Status}


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Latencies in microseconds; None where there was no sample."""

    p50_us: float | None
    p99_us: float | None
    p999_us: float | None


def quantile_us(buckets: Iterable[Bucket], fraction: float) -> float | None:
    """The latency that ``fraction`` (0 to 1) of the samples did not exceed; None without samples.

    Samples are taken as evenly spread inside their bucket, so the error is below the bucket's width. In the
    unbounded last bucket the answer is its lower bound: a floor, not an estimate.
    """
    if not 0.0 <= fraction <= 1.0:
        raise UsageError(f"a quantile is a fraction from 0 to 1, not {fraction}", field="fraction")
    filled = [(upper, count) for upper, count in _with_lower(buckets) if count > 0]
    total = sum(count for _, count in filled)
    if total == 0:
        return None
    rank = fraction * total
    for (lower, upper), count in filled:
        if rank <= count:
            return lower if math.isinf(upper) else lower + (upper - lower) * (rank / count)
        rank -= count
    (lower, upper), _ = filled[-1]  # reached by rounding of rank only
    return lower if math.isinf(upper) else upper


def quantiles(buckets: Sequence[Bucket]) -> Quantiles:
    """Median, p99 and p99.9 of one histogram."""
    return Quantiles(*(quantile_us(buckets, fraction) for fraction in (0.5, 0.99, 0.999)))


class LatencyHistogram:
    """Samples counted in buckets a quarter of a power of two wide: bounded memory, quantiles within 19 %.

    Not for use by several threads at once.
    """

    __slots__ = ("_counts",)

    #: Bounds from 0.25 us to 2**27 us (134 s).
    BOUNDS_US: Final = (*(2.0 ** (step / 4) for step in range(-8, 109)), math.inf)

    def __init__(self) -> None:
        self._counts = [0] * len(self.BOUNDS_US)

    def add(self, latency_us: float) -> None:
        """Counts one sample."""
        self._counts[bisect.bisect_left(self.BOUNDS_US, latency_us)] += 1

    @property
    def buckets(self) -> list[Bucket]:
        """What ``quantile_us`` and ``merge_buckets`` take."""
        return list(zip(self.BOUNDS_US, self._counts, strict=True))


def merge_buckets(histograms: Iterable[Iterable[Bucket]]) -> list[Bucket]:
    """One histogram with the samples of all, over the union of their bounds.

    Exact when all have the same bounds, as those of one engine do; a sample of a coarser histogram stays at
    its own upper bound otherwise.
    """
    merged: dict[float, int] = {}
    for histogram in histograms:
        for upper, count in histogram:
            merged[upper] = merged.get(upper, 0) + count
    return sorted(merged.items())


def _with_lower(buckets: Iterable[Bucket]) -> Iterable[tuple[tuple[float, float], int]]:
    """Each bucket as ((lower, upper), count). Raises ``InternalError`` when the bounds do not ascend."""
    lower = 0.0
    for upper, count in buckets:
        if not upper > lower or count < 0:
            raise InternalError(f"latency bucket ({upper}, {count}) after bound {lower}: bounds must ascend")
        yield (lower, upper), count
        lower = upper


@dataclass(slots=True)
class _Family:
    """One metric: its HELP and TYPE lines, and the sample lines that must follow them without a gap."""

    name: str
    kind: str
    help: str
    lines: list[str] = field(default_factory=list)

    def add(self, labels: Mapping[str, str], value: float, suffix: str = "") -> None:
        self.lines.append(f"{self.name}{suffix}{_label_text(labels)} {_number(value)}")

    def text(self) -> str:
        escaped = self.help.replace("\\", "\\\\").replace("\n", "\\n")
        head = f"# HELP {self.name} {escaped}\n# TYPE {self.name} {self.kind}\n"
        return head + "".join(line + "\n" for line in self.lines)


def render_prometheus(
    snapshot: Mapping[str, Any], *, prefix: str = "moonpool", labels: Mapping[str, str] | None = None
) -> str:
    """The snapshot as exposition text, ending in a line feed.

    Counters get ``_total``, times become seconds. ``labels`` are put on every sample (e.g. the engine's
    name). Metrics without samples are left out. Raises ``UsageError`` for a prefix or label that is no
    Prometheus name, or two counters or gauges whose names would be the same in Prometheus.
    """
    base = dict(labels or {})
    for label in base:
        if _LABEL_NAME.fullmatch(label) is None or label.startswith("__") or label in _OWN_LABELS:
            rule = f"{label!r} cannot be a label here; use letters and digits, and none of our own names"
            raise UsageError(rule, field="labels", value=label)
    if _METRIC_NAME.fullmatch(prefix) is None:
        raise UsageError(f"{prefix!r} cannot begin a metric's name", field="prefix", value=prefix)
    families = [
        *_path_families(snapshot.get("paths", ()), prefix, base),
        *_plain_families(snapshot.get("counters", {}), "counter", prefix, base),
        *_plain_families(snapshot.get("gauges", {}), "gauge", prefix, base),
    ]
    names = [family.name for family in families]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"two metrics are called {repeated[0]}; rename one", field="name", value=repeated[0])
    return "".join(family.text() for family in families if family.lines)


def _path_families(paths: Iterable[Mapping[str, Any]], prefix: str, base: Mapping[str, str]) -> list[_Family]:
    name = f"{prefix}_transfer"
    ended = _Family(f"{name}s_total", "counter", "Transfers that ended, whatever their status.")
    moved = _Family(f"{name}_bytes_total", "counter", "Bytes of completed transfers.")
    failed = _Family(f"{name}_errors_total", "counter", "Transfers that failed, by status.")
    latency = _Family(f"{name}_latency_seconds", "histogram", "Time from submit to end, one sample a batch.")
    for key, path in _merge_paths(paths).items():
        labels = {**base, **dict(zip(_PATH_LABELS, key, strict=True))}
        ended.add(labels, path.transfers)
        moved.add(labels, path.bytes)
        for status, count in path.errors.items():
            failed.add({**labels, "status": status}, count)
        _add_histogram(latency, labels, path.latency_counts, path.latency_sum_us)
    return [ended, moved, failed, latency]


@dataclass(slots=True)
class _PathTotals:
    """Counts of all rows with one set of labels; latencies on the grid of the text."""

    transfers: int = 0
    bytes: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    latency_counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_US) + 1))
    latency_sum_us: float = 0.0


def _merge_paths(paths: Iterable[Mapping[str, Any]]) -> dict[tuple[str, ...], _PathTotals]:
    """Rows by their labels. A peer that was opened twice has two rows, which are one series in Prometheus."""
    merged: dict[tuple[str, ...], _PathTotals] = {}
    for row in paths:
        total = merged.setdefault(tuple(str(row[label]) for label in _PATH_LABELS), _PathTotals())
        total.transfers += row["transfers"]
        total.bytes += row["bytes"]
        total.latency_sum_us += row.get("latency_sum_us", 0)
        for status, count in row.get("errors", {}).items():
            name = _status_name(status)
            total.errors[name] = total.errors.get(name, 0) + count
        for (_, upper), count in _with_lower(row.get("latency_us_buckets", ())):
            total.latency_counts[bisect.bisect_left(LATENCY_BOUNDS_US, upper)] += count
    return merged


def _status_name(status: object) -> str:
    """The name of a status that is given as a member, a number or already a name."""
    text = str(int(status)) if isinstance(status, int) else str(status)
    return _STATUS_NAMES.get(text, text)


def _add_histogram(family: _Family, labels: Mapping[str, str], counts: Sequence[int], sum_us: float) -> None:
    for bound, total in zip((*LATENCY_BOUNDS_US, math.inf), itertools.accumulate(counts), strict=True):
        family.add({**labels, "le": _number(bound / US_PER_S)}, total, "_bucket")
    family.add(labels, sum_us / US_PER_S, "_sum")
    # Prometheus wants _count equal to the last bucket, so it does not come from "transfers", which the engine
    # counts at another moment.
    family.add(labels, sum(counts), "_count")


def _plain_families(
    values: Mapping[str, float], kind: str, prefix: str, base: Mapping[str, str]
) -> list[_Family]:
    families = []
    for name, value in values.items():
        full = f"{prefix}_{re.sub('[^a-zA-Z0-9_:]', '_', name)}"
        if kind == "counter":
            full = full.removesuffix("_total") + "_total"
        families.append(_Family(full, kind, f"Engine {kind} {name}."))
        families[-1].add(base, value)
    return families


def _label_text(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items()) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    """Whole numbers exactly, others as the shortest text that reads back the same."""
    if isinstance(value, int):
        return str(int(value))
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
