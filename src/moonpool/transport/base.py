"""The table behind which every way to move bytes stands.

A transport decides, once per region and once per peer, how bytes could go; the moving itself is done by
native paths that it adds to a segment (`moonpool.native.io.segment`), so that nothing in Python runs per
slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from moonpool.native.io.lanes import LanePool
from moonpool.native.io.memory import SharedMemory
from moonpool.native.io.segment import NativeSegment
from moonpool.native.io.shm import VmSession
from moonpool.operations import Access


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


class Answer(Protocol):
    """A peer's answer on the control session; closes the descriptors that nobody took."""

    value: Any

    @property
    def fds(self) -> tuple[int, ...]: ...

    def take_fds(self) -> list[int]:
        """Passes the descriptors' ownership to the caller."""
        ...

    def close(self) -> None:
        """Closes what was not taken."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Session(Protocol):
    """What a transport asks of a control session: who is at the other end, as the kernel knows it."""

    @property
    def is_unix(self) -> bool: ...

    @property
    def peer_pid(self) -> int | None: ...

    @property
    def pidfd(self) -> int | None: ...


class PeerSide(Protocol):
    """A remote engine, or this one (`is_self`), as transports see it."""

    endpoint: str
    lanes: LanePool
    #: Set by the transport that uses process_vm on the peer.
    vm: VmSession | None

    @property
    def is_self(self) -> bool: ...

    @property
    def session(self) -> Session: ...

    def request(self, method: str, params: Mapping[str, Any]) -> Answer:
        """Asks the peer on its control session."""
        ...


class OwnRegion(Protocol):
    """A region of this process, before it is published."""

    @property
    def memory(self) -> SharedMemory | None: ...


class RemoteRegionSide(Protocol):
    """A region of a peer."""

    @property
    def handle(self) -> int: ...

    @property
    def address(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def access(self) -> Access: ...

    @property
    def attributes(self) -> Mapping[str, bytes]: ...


class SegmentSide(Protocol):
    """An open segment, to which transports add paths and mappings."""

    native: NativeSegment
    mappings: dict[int, SharedMemory]

    def note_unreachable(self, handle: int, transport: str, problem: Exception) -> None:
        """Remembers why a transport cannot reach a region."""
        ...


class Transport(Protocol):
    """One way to move bytes. Methods are called with the engine's lock held, never on the data path."""

    name: str
    capabilities: Capabilities

    def attribute(self, region: OwnRegion) -> bytes | None:
        """What a peer needs to reach the region this way (published with it), or None when it cannot."""
        ...

    def connect(self, peer: PeerSide, segment: SegmentSide) -> Sequence[PathInfo]:
        """Add this transport's paths to a segment of a peer; none when it cannot reach that peer."""
        ...

    def reach(self, peer: PeerSide, segment: SegmentSide, region: RemoteRegionSide) -> bool:
        """Make one region of the peer's reachable this way (map it, say); False when it is not."""
        ...

    def flush(self, peer: PeerSide, segment: SegmentSide, timeout_s: float) -> None:
        """Return when all completed WRITEs of the segment are visible to every later READ by anyone."""
        ...
