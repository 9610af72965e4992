"""What a master shows over HTTP: `/metrics` for Prometheus, `/healthz` for those who watch it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, final

from moonpool.http_status import Page, health_page, text_page
from moonpool.metrics import render_prometheus
from moonpool.store.event_publisher import EventPublisher
from moonpool.store.journal import Journal

PREFIX: Final = "moonpool_master"
#: Numbers of the port and the journal that go up and down; all others only go up.
_GAUGES: Final = frozenset(
    {
        "connections",
        "handshakes_open",
        "buffer_bytes",
        "journal_bytes",
        "journal_queue_bytes",
        "journal_durable_sequence",
        "journal_leading",
        "journal_in_trouble",
        "journal_snapshot_bytes",
    }
)


@final
class MasterPages:
    """Makes the pages from what the loop last showed; its functions are called by threads of the pages."""

    def __init__(
        self,
        name: str,
        shown: Callable[[], Mapping[str, Any]],
        journal: Journal,
        events: EventPublisher | None,
    ) -> None:
        self._name = name
        self._shown = shown
        self._journal = journal
        self._events = events

    def pages(self) -> dict[str, Callable[[], Page]]:
        """Path → page."""
        return {"/metrics": self.metrics, "/healthz": self.healthz}

    def problem(self) -> str:
        """Why this master does not serve; "" when it does."""
        shown = self._shown()
        trouble = self._journal.trouble
        if shown["role"] != "leader":
            led_by = ", ".join(self._journal.leader_endpoints)
            told = f"the leader is at {led_by}" if led_by else "no master leads"
            return f"standby: {told}" + (f"; {trouble}" if trouble else "")
        if trouble:
            return f"the journal is away: {trouble}"
        if not shown["answering"]:
            return "the leader's lease is not renewed"
        return ""

    def healthz(self) -> Page:
        """200 while this master leads and its journal answers, else 503 with the reason."""
        shown = self._shown()
        return health_page(self.problem(), role=shown["role"], epoch=shown["epoch"], name=self._name)

    def metrics(self) -> Page:
        """All numbers; those of the pool only on its leader."""
        shown = self._shown()
        counters: dict[str, float] = dict(shown.get("counters", {}))
        gauges: dict[str, float] = {"leading": int(shown["role"] == "leader"), "epoch": shown["epoch"]}
        plain = {**shown.get("port", {}), **self._journal.counters()}
        if self._events is not None:
            plain |= self._events.counters()
        for name, value in plain.items():
            (gauges if name in _GAUGES else counters)[name] = value
        gauges |= {name: value for name, value in shown["gauges"].items() if isinstance(value, int | float)}
        snapshot = {"counters": counters, "gauges": gauges, "paths": list(_methods(shown))}
        return text_page(render_prometheus(snapshot, prefix=PREFIX, labels={"master": self._name}))


def _methods(shown: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Latencies of rpc methods, in the shape that the renderer has for an engine's paths."""
    return [
        {
            "transport": "rpc",
            "peer": "",
            "path": "",
            "op": method,
            "transfers": sum(count for _, count in buckets),
            "bytes": 0,
            "errors": {},
            "latency_us_buckets": buckets,
            "latency_sum_us": sum(upper * count for upper, count in buckets if upper != float("inf")),
        }
        for method, buckets in shown.get("latencies", {}).items()
    ]
