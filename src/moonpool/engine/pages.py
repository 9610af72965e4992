"""What an engine shows over HTTP when its config names an address: `/metrics` and `/healthz`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from moonpool.metrics import render_prometheus

if TYPE_CHECKING:
    from moonpool.http_status import HttpStatus, Page


def serve_pages(address: str, name: str, snapshot: Callable[[], Mapping[str, Any]]) -> HttpStatus | None:
    """Pages of an engine at "host:port"; None for "". ResourceError when it cannot listen there."""
    if not address:
        return None
    # Only here: an engine without pages must not load an HTTP server.
    from moonpool.http_status import HttpStatus, HttpStatusConfig, health_page, text_page

    def metrics() -> Page:
        return text_page(render_prometheus(snapshot(), labels={"engine": name}))

    host, _, port = address.rpartition(":")
    pages = {"/metrics": metrics, "/healthz": lambda: health_page(name=name)}
    return HttpStatus(pages, HttpStatusConfig(bind_host=host.strip("[]"), port=int(port)))
