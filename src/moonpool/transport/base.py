"""The table behind which every way to move bytes stands.

A transport decides, once per region and once per peer, how bytes could go; the moving itself is done by
native paths that it adds to a segment (`moonpool.native.io.segment`), so that nothing in Python runs per
slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from moonpool.engine.peers import Peer
    from moonpool.engine.region import Region, RemoteRegion
    from moonpool.engine.segment import Segment


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a transport can run here; if not, why, and what would help."""

    ok: bool
    reason: str = ""
    how_to_get_it: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a transport's paths can do: alignment in bytes, most pieces a transfer, and kinds of memory."""

    same_process: bool = False
    same_host: bool = False
    other_hosts: bool = False
    device_memory: bool = False
    alignment_bytes: int = 1
    pieces_max: int = 1 << 20


@dataclass(frozen=True, slots=True)
class PathInfo:
    """One path of a segment: its id (as in arrays of path ids), its transport, and its two ends."""

    id: int
    transport: str
    local_device: str
    remote_device: str


class Transport(Protocol):
    """One way to move bytes. Methods are called with the engine's lock held, never on the data path."""

    name: str
    capabilities: Capabilities

    def attribute(self, region: Region) -> bytes | None:
        """What a peer needs to reach the region this way (published with it), or None when it cannot."""
        ...

    def connect(self, peer: Peer, segment: Segment) -> Sequence[PathInfo]:
        """Add this transport's paths to a segment of a peer; none when it cannot reach that peer."""
        ...

    def reach(self, peer: Peer, segment: Segment, region: RemoteRegion) -> bool:
        """Make one region of the peer's reachable this way (map it, say); False when it is not."""
        ...

    def flush(self, peer: Peer, segment: Segment, timeout_s: float) -> None:
        """Return when all completed WRITEs of the segment are visible to every later READ by anyone."""
        ...
