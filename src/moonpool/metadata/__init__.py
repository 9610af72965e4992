"""Where segments are found by name: peer to peer, or in Redis."""

from __future__ import annotations

from collections.abc import Callable

from moonpool.config import EngineConfig
from moonpool.metadata.base import Lease, LeaseReport, LeaseState, Metadata, Probe, Record
from moonpool.metadata.endpoint import format_endpoint, parse_endpoint
from moonpool.metadata.p2p import P2PMetadata

__all__ = [
    "Lease",
    "LeaseReport",
    "LeaseState",
    "Metadata",
    "Probe",
    "Record",
    "format_endpoint",
    "open_metadata",
    "parse_endpoint",
]


def open_metadata(
    config: EngineConfig, probe: Probe, changed: Callable[[Lease], None] = lambda lease: None
) -> Metadata:
    """The service that a configuration names; `probe` and `changed` as `RedisMetadata` takes them.

    Connects to nothing yet. The redis client is imported only for a Redis URL.
    """
    if config.metadata == "p2p":
        return P2PMetadata()
    from moonpool.metadata.redis import RedisMetadata, RedisOptions

    options = RedisOptions(config.metadata, config.connect_timeout_ms, config.lease_ms)
    return RedisMetadata(options, probe, changed)
