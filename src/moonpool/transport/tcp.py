"""`tcp`: lanes straight between socket and destination; the path of last resort, so it is connected last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from moonpool.native.io.carry import add_tcp_path
from moonpool.transport.base import (
    Capabilities,
    OwnRegion,
    PathInfo,
    PeerSide,
    RemoteRegionSide,
    SegmentSide,
)
from moonpool.transport.plain import PlainTransport

#: OP_FLUSH of the data lane.
FLUSH: Final = 3


@final
class TcpTransport(PlainTransport):
    """One path a peer: the lane pool shares its lanes between batches."""

    name = "tcp"
    capabilities = Capabilities(same_host=True, other_hosts=True)

    def attribute(self, region: OwnRegion) -> bytes | None:
        """Nothing beyond handle and keys; None for bytes that have no address in this process."""
        return b"" if region.address else None

    def connect(self, peer: PeerSide, segment: SegmentSide) -> Sequence[PathInfo]:
        """The path over the peer's lanes; lanes are opened when first needed."""
        if peer.is_self:
            return ()
        return (PathInfo(add_tcp_path(segment.native, peer.lanes), self.name, "tcp", peer.endpoint),)

    def reach(self, peer: PeerSide, segment: SegmentSide, region: RemoteRegionSide) -> bool:
        """Every region that was published for tcp can be reached."""
        return not peer.is_self and self.name in region.attributes

    def flush(self, peer: PeerSide, segment: SegmentSide, timeout_s: float) -> None:
        """A WRITE is answered after it landed; one round trip proves that the peer is still there."""
        if not peer.is_self:
            peer.lanes.call(FLUSH, b"", timeout_s)
