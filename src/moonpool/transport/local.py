"""`local`: memory copies inside the process, fused with the digest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from moonpool.native.io.copying import stream_kernel
from moonpool.native.io.shm import add_mapped_path
from moonpool.transport.base import (
    Capabilities,
    PathInfo,
    PeerSide,
    RemoteRegionSide,
    SegmentSide,
)
from moonpool.transport.plain import PlainTransport


@final
class LocalTransport(PlainTransport):
    """The peer is this very engine: its regions are "mapped" where they are."""

    name = "local"
    capabilities = Capabilities(same_process=True)

    def connect(self, peer: PeerSide, segment: SegmentSide) -> Sequence[PathInfo]:
        """One path, by memory copy, when the peer is ourselves."""
        if not peer.is_self:
            return ()
        return (PathInfo(add_mapped_path(segment.native), self.name, "cpu", stream_kernel()),)

    def reach(self, peer: PeerSide, segment: SegmentSide, region: RemoteRegionSide) -> bool:
        """The region's own address is its mapping."""
        if not peer.is_self or region.address == 0:
            return False
        segment.native.set_mapping(region.handle, region.address, True, None)
        return True
