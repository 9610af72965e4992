"""libfabric by its providers of software: its own tcp endpoints, and those it layers over connections."""

from __future__ import annotations

from fabric_ways.far import Way
from moonpool.errors import TransportUnavailable

NEEDS_LIBFABRIC = "needs libfabric (apt-get install libfabric1) and its module"


def what_lacks() -> str:
    """Why no way of these can run here; empty when they can."""
    try:
        from moonpool.native.ofi.library import library_version

        library_version()
    except (ImportError, TransportUnavailable):
        return NEEDS_LIBFABRIC
    return ""


WAYS = [
    Way(
        "ofi-tcp",
        ("ofi",),
        {"ofi_provider": "tcp"},
        target_transports=("ofi",),
        on_request=what_lacks(),
    ),
    Way(
        "ofi-tcp-foreign",
        ("ofi",),
        {"ofi_provider": "tcp", "bind_host": "::1"},
        foreign=True,
        target_transports=("ofi",),
        on_request=what_lacks(),
    ),
    Way(
        "ofi-rxm",
        ("ofi",),
        {"ofi_provider": "tcp;ofi_rxm"},
        target_transports=("ofi",),
        on_request=what_lacks() or "needs 300 MB for each pair of engines",
    ),
]
