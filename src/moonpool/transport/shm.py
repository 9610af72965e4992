"""`shm`: copies into the mapped memfd of a process on the same host, or process_vm_* for its other memory.

"Same host" is proved by what works: the peer's abstract unix socket answers, its uid is ours, its hello is
that of the instance we expect, and it passes us a file descriptor. Names and addresses prove nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from moonpool.errors import MoonpoolError, ProtocolError
from moonpool.native.io.memory import MAPPING_BYTES_MAX, SharedMemory, map_memory
from moonpool.native.io.shm import VmSession, add_mapped_path, add_vm_path
from moonpool.transport.base import (
    Answer,
    Capabilities,
    OwnRegion,
    PathInfo,
    PeerSide,
    RemoteRegionSide,
    SegmentSide,
)
from moonpool.transport.plain import PlainTransport

MEMFD = b"memfd"
PROCESS_VM = b"vm"


@final
class ShmTransport(PlainTransport):
    """Shared mappings first, then process_vm on the regions that the owner granted."""

    name = "shm"
    capabilities = Capabilities(same_host=True, over_unix=True)

    def attribute(self, region: OwnRegion) -> bytes | None:
        """How a peer on this host gets at the region: by mapping its memfd, or by process_vm."""
        if region.memory is not None:
            return MEMFD
        # What a transport offers (far memory) is reached by that transport, not by the owner's page tables.
        return PROCESS_VM if region.address and region.backing is None else None

    def connect(self, peer: PeerSide, segment: SegmentSide) -> Sequence[PathInfo]:
        """A mapped path, and a process_vm path when kernel and peer agree on who the process is."""
        if peer.is_self or not peer.session.is_unix:
            return ()
        paths = [PathInfo(add_mapped_path(segment.native), self.name, "memfd", peer.endpoint)]
        if peer.vm is None and peer.session.peer_pid is not None and peer.session.pidfd is not None:
            peer.vm = VmSession(peer.session.peer_pid, peer.session.pidfd)
        if peer.vm is not None:
            paths.append(
                PathInfo(add_vm_path(segment.native, peer.vm), self.name, "process_vm", peer.endpoint)
            )
        return paths

    def reach(self, peer: PeerSide, segment: SegmentSide, region: RemoteRegionSide) -> bool:
        """Ask the owner for the region's memfd, or for leave to use process_vm on it."""
        if peer.is_self or not peer.session.is_unix:
            return False
        way = region.attributes.get(self.name)
        if way == MEMFD:
            return self._map(peer, segment, region)
        if way == PROCESS_VM and peer.vm is not None and not peer.vm.refused:
            return self._grant(peer, segment, region)
        return False

    def _map(self, peer: PeerSide, segment: SegmentSide, region: RemoteRegionSide) -> bool:
        try:
            with peer.request("map", {"handle": region.handle, "access": int(region.access)}) as answer:
                mapping, offset = _map_answer(answer, region)
        except MoonpoolError as problem:
            segment.note_unreachable(region.handle, self.name, problem)
            return False
        segment.native.set_mapping(region.handle, mapping.address + offset, mapping.writable, mapping)
        segment.mappings[region.handle] = mapping
        return True

    def _grant(self, peer: PeerSide, segment: SegmentSide, region: RemoteRegionSide) -> bool:
        try:
            peer.request("grant_vm", {"handle": region.handle, "access": int(region.access)}).close()
        except MoonpoolError as problem:
            segment.note_unreachable(region.handle, self.name, problem)
            return False
        segment.native.set_process_vm(region.handle)
        return True


def _map_answer(answer: Answer, region: RemoteRegionSide) -> tuple[SharedMemory, int]:
    """Map what an owner passed for a region: the mapping, and where in it the region starts.

    ProtocolError for an answer that makes no sense: nothing that a peer says may lead outside the mapping.
    """
    about = answer.value if isinstance(answer.value, Mapping) else {}
    offset, size = about.get("offset"), about.get("size")
    if len(answer.fds) != 1 or type(offset) is not int or type(size) is not int:
        raise ProtocolError("the answer to map is one descriptor, an offset and a size")
    if offset < 0 or not offset + region.size_bytes <= size <= MAPPING_BYTES_MAX:
        raise ProtocolError(f"a region of {region.size_bytes} bytes at {offset} is not inside {size} bytes")
    (fd,) = answer.take_fds()
    return map_memory(fd, size, writable=about.get("writable") is True), offset
