"""The table behind which every way to move bytes stands.

A transport decides, once per region and once per peer, how bytes could go; the moving itself is done by
native paths that it adds to a segment (`moonpool.native.io.segment`), so that nothing in Python runs per
slice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias, runtime_checkable

from moonpool.native.io.lanes import LanePool
from moonpool.native.io.memory import BufferHold, SharedMemory
from moonpool.native.io.regions import LocalRegions
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
    over_unix: bool = False  # owners on this host pass something to peers, so these want a unix session
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
    #: Set by a transport whose owner keeps something for our session: it is told when we are done.
    has_release: bool

    @property
    def is_self(self) -> bool: ...

    @property
    def session(self) -> Session: ...

    def request(self, method: str, params: Mapping[str, Any]) -> Answer:
        """Asks the peer on its control session."""
        ...


class Backing(Protocol):
    """What a transport offers as a region (`Transport.offer`): far memory, a file, a namespace.

    Owned by the region from then on; `close` is called once, when nobody can touch the bytes any more.
    """

    @property
    def address(self) -> int:
        """Where the bytes are mapped in this process; 0 when they are not."""
        ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def writable(self) -> bool: ...

    @property
    def location(self) -> str:
        """As regions are tagged: cxl:0, file:/path, nvme:1."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Mappable(Protocol):
    """A `Backing` that peers of this host map too, by a descriptor passed to them ("map")."""

    def share(self, *, writable: bool) -> tuple[int, int, int]:
        """A descriptor (borrowed), where in it the region starts, and the size of what it is of, in bytes."""
        ...


@runtime_checkable
class OnDevice(Protocol):
    """A `Backing` whose bytes have an address on a device, which no CPU may touch; its `address` is 0."""

    @property
    def device_address(self) -> int: ...

    def dma_buf(self) -> tuple[int, int]:
        """A dma-buf that holds the bytes, and where in it they start; the caller closes the descriptor.

        UnsupportedOperation or ResourceError where the device's runtime makes none.
        """
        ...


class HeldBuffer(Protocol):
    """A device array of a caller's, held in place (`BufferHold` with `device`)."""

    @property
    def address(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def writable(self) -> bool: ...

    @property
    def stream(self) -> int: ...

    def release(self) -> None:
        """Lets the array go."""
        ...


@runtime_checkable
class DeviceTaking(Protocol):
    """A transport that takes device arrays, as regions and as the local side of transfers."""

    def adopt(self, hold: HeldBuffer) -> Backing:
        """A region's backing of a held device array; UnsupportedMemory when it is no device's."""
        ...

    def settle(self, hold: HeldBuffer) -> None:
        """Wait for what the array's own stream, if it names one, still does with it."""
        ...


class OwnRegion(Protocol):
    """A region of this process: as a draft in `attribute`, live in the other calls."""

    @property
    def handle(self) -> int: ...

    @property
    def address(self) -> int:
        """0 for bytes that have no address in this process."""
        ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def access(self) -> Access: ...

    @property
    def location(self) -> str: ...

    @property
    def memory(self) -> SharedMemory | None: ...

    @property
    def hold(self) -> BufferHold | None: ...

    @property
    def backing(self) -> Backing | None: ...


class OwnerSession(Protocol):
    """Who asks, in a transport's control method; see `OwnMethod`."""

    @property
    def session_id(self) -> int: ...

    @property
    def peer_instance(self) -> bytes: ...

    @property
    def is_unix(self) -> bool: ...

    @property
    def peer_pid(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Answered:
    """What a control method returns to pass descriptors along with its result; they are borrowed."""

    result: object
    fds: Sequence[int] = ()


#: A control method of the owner: params in, a result (or `Answered`) out; raises MoonpoolErrors, never waits.
OwnMethod: TypeAlias = Callable[[OwnerSession, Mapping[str, Any]], object]


class Host(Protocol):
    """What the engine lends its transports, from `open` to `close`."""

    @property
    def table(self) -> LocalRegions: ...

    @property
    def instance(self) -> bytes: ...

    def region(self, handle: int) -> OwnRegion:
        """A live region of ours; StaleHandle otherwise."""
        ...

    def given(self, handle: int, session: OwnerSession, *, writes: bool, lasting: bool = False) -> None:
        """A session gets a region's bytes (a mapping, a descriptor): it is asked when the region is revoked.

        With `writes` it counts as a writer until it lets go or its process ends; with `lasting` the region's
        bytes are kept until then, because what it got outlives the region. StaleHandle when the region is
        not live any more: then give nothing.
        """
        ...

    def lend(self, size_bytes: int, location: str, session_id: int | None) -> OwnRegion:
        """New engine memory as a region that only one session's peer is told of, or, without one, nobody."""
        ...

    def take_back(self, handle: int, timeout_s: float) -> bool:
        """Revoke what was lent, asking nobody; False when somebody of this process may still touch it."""
        ...


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
    def location(self) -> str: ...

    @property
    def attributes(self) -> Mapping[str, bytes]: ...


class Releasable(Protocol):
    """What a transport keeps for one region of a peer: a descriptor, say."""

    def close(self) -> None:
        """Lets go of it; called once nobody uses the region any more."""
        ...


class SegmentSide(Protocol):
    """An open segment, to which transports add paths and mappings."""

    native: NativeSegment
    mappings: dict[int, SharedMemory]
    #: Set by a transport in `reach` when its request made the owner offer more: it is asked once more.
    again: bool

    def hold(self, handle: int, thing: Releasable) -> None:
        """Keep what a region is reached by (as `keep` of `set_extra`, say) until the region is forgotten."""
        ...

    def note_unreachable(self, handle: int, transport: str, problem: Exception) -> None:
        """Remembers why a transport cannot reach a region."""
        ...


class Transport(Protocol):
    """One way to move bytes. Methods are called with the engine's lock held, never on the data path."""

    name: str
    capabilities: Capabilities
    #: Names in `counters` that are gauges, besides those that end in "_open" or "_now".
    gauges: frozenset[str]

    def open(self, host: Host) -> None:
        """Once, before anything is offered: TransportUnavailable when it cannot run after all."""

    def takes(self, location: str) -> bool:
        """True when `offer` is this transport's business for such a location."""

    def offer(self, location: str, size_bytes: int | None, how: Mapping[str, Any]) -> Backing:
        """Make or open what a location names, to be offered as a region; typed errors say what to do."""

    def attribute(self, region: OwnRegion) -> bytes | None:
        """What a peer needs to reach the region this way (published with it), or None when it cannot."""

    def connect(self, peer: PeerSide, segment: SegmentSide) -> Sequence[PathInfo]:
        """Add this transport's paths to a segment of a peer; none when it cannot reach that peer."""

    def reach(self, peer: PeerSide, segment: SegmentSide, region: RemoteRegionSide) -> bool:
        """Make one region of the peer's reachable this way (map it, say); False when it is not."""

    def flush(self, peer: PeerSide, segment: SegmentSide, timeout_s: float) -> None:
        """Return when all completed WRITEs of the segment are visible to every later READ by anyone."""

    # Of the owner's side

    def methods(self) -> Mapping[str, OwnMethod]:
        """Control methods of the owner that initiators call, named "<transport>.<verb>"."""

    def registered(self, region: OwnRegion) -> None:
        """A region became live: note what this process's own transfers need to use it as the local side."""

    def holders(self, handle: int) -> set[int]:
        """Sessions whose peers may reach the region by this transport: a revoke asks them first."""

    def writers(self, handle: int, instance: bytes | None) -> set[int]:
        """Sessions, of one instance or of any, that may write the region without our CPU seeing it."""

    def fence(self, session_id: int, timeout_s: float) -> bool:
        """End what a session can reach by this transport; True when nothing of it can land any more."""

    def forget(self, region: OwnRegion, timeout_s: float) -> bool:
        """A region is revoked: undo `attribute` and `registered`; True when no peer can touch it this way."""

    def session_ended(self, session_id: int) -> None:
        """A session is closed, or its peer is done with everything: free what it held. Again: nothing.

        On the control thread: never waits long.
        """

    def counters(self) -> Mapping[str, int]:
        """Totals and gauges for `Engine.metrics`, by name without the transport's."""

    def abandon_after_fork(self) -> None:
        """In a forked child: close its copies of descriptors that keep things of the parent's alive."""

    def close(self) -> None:
        """The engine is closing: free everything. Nothing of this process uses a path any more."""
