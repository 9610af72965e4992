"""Counters of the service as Prometheus text.

Source of the form: prometheus.io/docs/instrumenting/exposition_formats (0.0.4).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Final, final

from moonpool.conductor.service_core import ConductorCore

#: Upper bounds of latency buckets, in seconds.
BOUNDS_S: Final = tuple(1e-6 * 2**power for power in range(4, 25))


@final
class Timings:
    """How often each operation was asked for, how it ended, and how long it took."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}
        self._statuses: dict[tuple[str, int], int] = {}

    def note(self, operation: str, status: int, seconds: float) -> None:
        """One request ended."""
        counts = self._counts.setdefault(operation, [0] * (len(BOUNDS_S) + 1))
        counts[bisect_left(BOUNDS_S, seconds)] += 1
        self._sums[operation] = self._sums.get(operation, 0.0) + seconds
        self._statuses[operation, status] = self._statuses.get((operation, status), 0) + 1

    def lines(self) -> Iterable[str]:
        """Their text."""
        yield "# TYPE moonpool_conductor_requests_total counter"
        for (operation, status), count in sorted(self._statuses.items()):
            labels = f'operation="{operation}",status="{status}"'
            yield f"moonpool_conductor_requests_total{{{labels}}} {count}"
        name = "moonpool_conductor_request_seconds"
        yield f"# TYPE {name} histogram"
        for operation, counts in sorted(self._counts.items()):
            total = 0
            for bound, count in zip((*BOUNDS_S, float("inf")), counts, strict=True):
                total += count
                edge = "+Inf" if bound == float("inf") else f"{bound:.6g}"
                yield f'{name}_bucket{{operation="{operation}",le="{edge}"}} {total}'
            yield f'{name}_sum{{operation="{operation}"}} {self._sums[operation]:.9g}'
            yield f'{name}_count{{operation="{operation}"}} {total}'


def render(core: ConductorCore, timings: Timings) -> str:
    """The whole page."""
    return "\n".join([*timings.lines(), *_index_lines(core), *_stream_lines(core), ""])


def _index_lines(core: ConductorCore) -> Iterable[str]:
    statistics = core.index.statistics()
    for field, value in statistics._asdict().items():
        kind, name = ("counter", f"{field}_total") if field == "forgotten" else ("gauge", field)
        yield f"# TYPE moonpool_conductor_index_{name} {kind}"
        yield f"moonpool_conductor_index_{name} {value}"
    yield "# TYPE moonpool_conductor_registrations gauge"
    yield f"moonpool_conductor_registrations {len(core.catalogue)}"
    yield "# TYPE moonpool_conductor_requests_running gauge"
    yield f"moonpool_conductor_requests_running {core.requests_running}"
    yield "# TYPE moonpool_conductor_requests_expired_total counter"
    yield f"moonpool_conductor_requests_expired_total {core.expired}"
    yield "# TYPE moonpool_conductor_decisions_total counter"
    for verdict, count in sorted(core.verdicts.items()):
        yield f'moonpool_conductor_decisions_total{{verdict="{verdict}"}} {count}'


def _stream_lines(core: ConductorCore) -> Iterable[str]:
    columns: dict[tuple[str, str], list[str]] = {}
    for registration in core.catalogue:
        feed = core.catalogue.feed(registration.key)
        assert feed is not None
        labels = f'instance="{_escape(registration.instance)}",rank="{registration.rank}"'
        labels += f',tenant="{_escape(registration.tenant)}"'
        counted, source = feed.counters, feed.source.counters
        for name in ("messages", "unreadable", "lost", "restarts", "replays_asked", "refused_by_index"):
            columns.setdefault((name, "counter"), []).append(f"{{{labels}}} {getattr(counted, name)}")
        for name in ("blocks_stored", "blocks_removed", "groups_passed_over", "unnamed", "media_unknown"):
            columns.setdefault((name, "counter"), []).append(f"{{{labels}}} {getattr(source, name)}")
        columns.setdefault(("suspect", "gauge"), []).append(f"{{{labels}}} {int(feed.is_suspect)}")
        columns.setdefault(("drift", "gauge"), []).append(f"{{{labels}}} {feed.drift:.6g}")
    for (name, kind), rows in columns.items():
        full = f"moonpool_conductor_stream_{name}" + ("_total" if kind == "counter" else "")
        yield f"# TYPE {full} {kind}"
        for row in rows:
            yield full + row


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
