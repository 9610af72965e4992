"""What most transports need of the table of `moonpool.transport.base`: nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moonpool.config import EngineConfig
from moonpool.errors import UnsupportedOperation
from moonpool.transport.base import Backing, Host, OwnMethod, OwnRegion, PeerSide, SegmentSide


class PlainTransport:
    """What most transports need of the table: nothing. They are `Transport`s by deriving from it."""

    name = ""
    gauges: frozenset[str] = frozenset()

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    def open(self, host: Host) -> None:
        """Nothing to set up."""

    def takes(self, location: str) -> bool:
        """It offers nothing of its own."""
        return False

    def offer(self, location: str, size_bytes: int | None, how: Mapping[str, Any]) -> Backing:
        """UnsupportedOperation: it offers nothing of its own."""
        raise UnsupportedOperation(f"the transport {self.name} cannot offer {location!r}")

    def attribute(self, region: OwnRegion) -> bytes | None:
        """Nothing to publish."""
        return None

    def flush(self, peer: PeerSide, segment: SegmentSide, timeout_s: float) -> None:
        """Copies end with a store fence, so a completed one is visible already."""

    def methods(self) -> Mapping[str, OwnMethod]:
        """None."""
        return {}

    def registered(self, region: OwnRegion) -> None:
        """Nothing to note."""

    def holders(self, handle: int) -> set[int]:
        """None beyond those that the engine's books know."""
        return set()

    def writers(self, handle: int, instance: bytes | None) -> set[int]:
        """None beyond those that the engine's books know."""
        return set()

    def fence(self, session_id: int, timeout_s: float) -> bool:
        """Nothing lands by this transport that the engine's books do not know."""
        return True

    def forget(self, region: OwnRegion, timeout_s: float) -> bool:
        """Nothing to undo."""
        return True

    def session_ended(self, session_id: int) -> None:
        """Nothing held."""

    def counters(self) -> Mapping[str, int]:
        """None."""
        return {}

    def abandon_after_fork(self) -> None:
        """No descriptor that must not live on in a child."""

    def close(self) -> None:
        """Nothing to free."""
