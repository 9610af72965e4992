"""What `moonpool top` makes of metrics pages: samples from text, rates from two pages. Pure.

Source of the text form: the Prometheus exposition format 0.0.4. Pages come from elsewhere: what makes no
sense is left out, and everything is bounded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from moonpool.metrics import quantile_us

#: Samples read of one page; a page of an engine with a thousand peers has about 150,000.
SAMPLES_MAX: Final = 500_000
PREFIX: Final = "moonpool_transfer"
START: Final = "moonpool_start_time_seconds"
#: What an engine's own threads served over tcp and unix lanes; memory that peers map moves without it.
SERVED: Final = {"moonpool_target_bytes_read_total": "READ", "moonpool_target_bytes_written_total": "WRITE"}
SERVED_TO: Final = "(served)"
US_PER_S: Final = 1e6
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]{0,200})(?:\{(.*)\})?\s+(\S{1,40})(?:\s+-?\d{1,20})?")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]{0,100})="((?:[^"\\]|\\.)*)"\s*,?')
_ESCAPE = re.compile(r"\\.")
_ESCAPES: Final = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


@dataclass(frozen=True, slots=True, order=True)
class PathKey:
    """What one line is about: a path of one engine, in one direction."""

    engine: str
    transport: str
    peer: str
    path: str
    op: str


@dataclass(slots=True)
class PathTotals:
    """Totals of one path at one moment. `buckets` are cumulative counts by upper bound in seconds."""

    transfers: float = 0.0
    bytes: float = 0.0
    errors: float = 0.0
    buckets: dict[float, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Page:
    """One reading of one metrics page, at a reading of a monotonic clock in seconds."""

    at_s: float
    paths: Mapping[PathKey, PathTotals]
    #: By engine: when it was made, which tells whether two pages are of one life.
    started: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Rate:
    """What a path did between two pages. Latencies in microseconds, None without a batch."""

    source: str
    key: PathKey
    bytes_per_s: float
    transfers_per_s: float
    errors_per_s: float
    p50_us: float | None
    p99_us: float | None
    bytes_total: float

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and texts, ready for JSON."""
        return {
            "source": self.source,
            "engine": self.key.engine,
            "transport": self.key.transport,
            "peer": self.key.peer,
            "path": self.key.path,
            "op": self.key.op,
            "bytes_per_s": round(self.bytes_per_s, 3),
            "transfers_per_s": round(self.transfers_per_s, 3),
            "errors_per_s": round(self.errors_per_s, 3),
            "p50_us": self.p50_us,
            "p99_us": self.p99_us,
            "bytes_total": self.bytes_total,
        }


#: Sort key of a table of rates: the largest first, names where they are equal.
ORDERS: Final = {
    "bandwidth": lambda rate: (-rate.bytes_per_s, rate.key),
    "transfers": lambda rate: (-rate.transfers_per_s, rate.key),
    "latency": lambda rate: (-(rate.p99_us or 0.0), rate.key),
    "errors": lambda rate: (-rate.errors_per_s, rate.key),
    "name": lambda rate: rate.key,
}


def parse_page(text: str, at_s: float) -> Page:
    """The transfer metrics of a page. Lines that make no sense are left out."""
    paths: dict[PathKey, PathTotals] = {}
    started: dict[str, float] = {}
    for number, line in enumerate(text.splitlines()):
        if number >= SAMPLES_MAX:
            break
        if not line.startswith((PREFIX, START, *SERVED)):
            continue
        sample = _parse_sample(line)
        if sample is None:
            continue
        name, labels, value = sample
        if name == START:
            started[_engine_of(labels)] = value
        elif name in SERVED:
            key = PathKey(_engine_of(labels), "lanes", SERVED_TO, "", SERVED[name])
            paths[key] = PathTotals(bytes=value)
        else:
            _take(paths, name.removeprefix(PREFIX), labels, value)
    return Page(at_s, paths, started)


def _parse_sample(line: str) -> tuple[str, dict[str, str], float] | None:
    match = _SAMPLE.fullmatch(line.strip())
    if match is None:
        return None
    try:
        value = float(match[3])
    except ValueError:
        return None
    labels = {label: _ESCAPE.sub(_unescaped, text) for label, text in _LABEL.findall(match[2] or "")}
    return None if math.isnan(value) else (match[1], labels, value)


def _unescaped(escape: re.Match[str]) -> str:
    return _ESCAPES.get(escape[0], escape[0])


def _engine_of(labels: Mapping[str, str]) -> str:
    return labels.get("engine") or labels.get("node") or ""


def _take(paths: dict[PathKey, PathTotals], what: str, labels: Mapping[str, str], value: float) -> None:
    key = PathKey(_engine_of(labels), *(labels.get(name, "") for name in ("transport", "peer", "path", "op")))
    total = paths.setdefault(key, PathTotals())
    if what == "s_total":
        total.transfers = value
    elif what == "_bytes_total":
        total.bytes = value
    elif what == "_errors_total":
        total.errors += value
    elif what == "_latency_seconds_bucket":
        try:
            total.buckets[float(labels.get("le", ""))] = value
        except ValueError:
            return


def rates(source: str, before: Page | None, after: Page) -> list[Rate]:
    """What each path did between two pages of one source; since its start where there is no page before.

    An engine that was restarted in between (its start time differs, or a total went back) counts from zero:
    what it did in its new life is spread over the time between the pages.
    """
    seconds = after.at_s - before.at_s if before is not None else 0.0
    found: list[Rate] = []
    for key, now in after.paths.items():
        then = _same_life(before, after, key)
        found.append(_rate(source, key, (then, now), seconds))
    return found


def _same_life(before: Page | None, after: Page, key: PathKey) -> PathTotals:
    if before is None or before.started.get(key.engine) != after.started.get(key.engine):
        return PathTotals()
    then, now = before.paths.get(key, PathTotals()), after.paths[key]
    went_back = then.bytes > now.bytes or then.transfers > now.transfers or then.errors > now.errors
    return PathTotals() if went_back else then


def _rate(source: str, key: PathKey, ends: tuple[PathTotals, PathTotals], seconds: float) -> Rate:
    then, now = ends
    per_s = 1.0 / seconds if seconds > 0 else 0.0
    fresh = list(_fresh_buckets(then.buckets, now.buckets))
    return Rate(
        source=source,
        key=key,
        bytes_per_s=(now.bytes - then.bytes) * per_s,
        transfers_per_s=(now.transfers - then.transfers) * per_s,
        errors_per_s=(now.errors - then.errors) * per_s,
        p50_us=quantile_us(fresh, 0.5),
        p99_us=quantile_us(fresh, 0.99),
        bytes_total=now.bytes,
    )


def _fresh_buckets(then: Mapping[float, float], now: Mapping[float, float]) -> Iterable[tuple[float, int]]:
    """Buckets alone, in microseconds, of what came between two cumulative histograms."""
    seen = 0
    for upper in sorted(bound for bound in now if bound > 0):
        more = int(now[upper] - then.get(upper, 0.0))
        yield upper * US_PER_S, max(0, more - seen)
        seen = max(seen, more)
