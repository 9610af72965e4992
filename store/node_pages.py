"""What a node shows over HTTP: `/metrics` for Prometheus, `/healthz` for those who watch it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from moonpool.http_status import Page, health_page, text_page
from moonpool.metrics import render_prometheus

PREFIX: Final = "moonpool_node"
#: Numbers of the view endpoint that go up and down.
_PORT_GAUGES: Final = frozenset({"connections", "handshakes_open", "buffer_bytes"})


def node_pages(
    name: str,
    numbers: Callable[[], dict[str, Any]],
    engine: Callable[[], dict[str, Any]],
    problem: Callable[[], str],
) -> dict[str, Callable[[], Page]]:
    """Path → page. `numbers` and `engine` are snapshots as `moonpool.metrics` renders them."""

    def metrics() -> Page:
        labels = {"node": name}
        own = render_prometheus(numbers(), prefix=PREFIX, labels=labels)
        return text_page(own + render_prometheus(engine(), labels=labels))

    return {"/metrics": metrics, "/healthz": lambda: health_page(problem(), name=name)}


def snapshot(core: dict[str, dict[str, int]], plain: dict[str, int], views: dict[str, int]) -> dict[str, Any]:
    """One snapshot of the core's numbers, plain counters, and those of the view endpoint."""
    gauges = dict(core["gauges"])
    counters = {**core["counters"], **plain}
    for key, value in views.items():
        (gauges if key in _PORT_GAUGES else counters)[f"views_{key}"] = value
    return {"paths": [], "counters": counters, "gauges": gauges}
