"""Open segments: a peer's regions and the paths to them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NoReturn, final

from moonpool.engine.region import RemoteRegion
from moonpool.errors import StaleHandle, UsageError
from moonpool.native.io.segment import NativeSegment

if TYPE_CHECKING:
    from moonpool.engine.peers import Peer
    from moonpool.native.io.memory import SharedMemory
    from moonpool.transport.base import PathInfo, Releasable


@final
class Segment:
    """A peer's segment, opened. Made by `Engine.open`; usable until closed, or until its peer is gone.

    `handle` is the integer that the engine's calls also accept. All methods are safe from any thread.
    """

    def __init__(self, peer: Peer, name: str, native: NativeSegment) -> None:
        self.peer = peer
        self.name = name
        self.native = native
        self.handle = 0
        self.paths: list[PathInfo] = []
        self.mappings: dict[int, SharedMemory] = {}
        self.unreachable: dict[tuple[int, str], str] = {}
        #: By region: the first transport that reaches it; none for one that is not there.
        self.first_ways: dict[int, str] = {}
        self._held: dict[int, list[Releasable]] = {}
        self.again = False
        #: Held while regions are taken in, made reachable, or made stale: never two of these at once.
        self.changing = threading.RLock()
        self._regions: dict[int, RemoteRegion] = {}

    @property
    def endpoint(self) -> str:
        """ "host:port" of the owner."""
        return self.peer.endpoint

    @property
    def instance(self) -> bytes:
        """The owner's instance id: another one under the same name is another process."""
        return self.peer.instance

    @property
    def regions(self) -> list[RemoteRegion]:
        """The owner's regions as last heard of, by address."""
        shown = [region for region in self._regions.values() if not region.lent]
        return sorted(shown, key=lambda region: region.address)

    def region(self, handle: int) -> RemoteRegion:
        """One region by handle; StaleHandle when it is not known (any more)."""
        region = self._regions.get(handle)
        if region is None or region.lent:
            raise StaleHandle(region=handle, segment=self.name)
        return region

    def adopt(self, regions: Iterable[RemoteRegion]) -> Sequence[RemoteRegion]:
        """Take a fresh description: returns the regions that are new. Those that went are made stale."""
        fresh = {region.handle: region for region in regions}
        with self.changing:
            for gone in [handle for handle in self._regions if handle not in fresh]:
                self.forget(gone, 1.0)
            added = [region for handle, region in fresh.items() if handle not in self._regions]
            for region in added:
                self.native.put_region(
                    region.handle,
                    region.address,
                    region.size_bytes,
                    int(region.access),
                    region.read_key,
                    region.write_key,
                )
                self._regions[region.handle] = region
        return added

    def forget(self, handle: int, timeout_s: float) -> bool:
        """Make a region stale and unmap it; False when a running batch may still touch it after the wait."""
        with self.changing:
            self.first_ways.pop(handle, None)
            if self._regions.pop(handle, None) is None or not self.native.has_region(handle):
                return True
            ended = self.native.drop_region(handle, timeout_s)
            mapping = self.mappings.pop(handle, None)
            if mapping is not None and ended:
                self.native.release_mapping(mapping)
                if not mapping.exported:  # else it goes with the last view of it
                    mapping.close()
            for thing in self._held.pop(handle, ()):
                if ended:  # else it goes with the segment, which the running batch keeps
                    self.native.release_mapping(thing)
                    thing.close()
            return ended

    def hold(self, handle: int, thing: Releasable) -> None:
        """Keep what a transport reaches a region by; closed when the region is forgotten and unused."""
        with self.changing:
            self._held.setdefault(handle, []).append(thing)

    def knows(self, handle: int) -> bool:
        """True while the region is one of the segment's."""
        return handle in self._regions

    def was_stale(self, handle: int) -> bool:
        """True when a transport could not reach the region because its owner had taken it back."""
        return any(
            reason.startswith("StaleHandle") for (of, _), reason in self.unreachable.items() if of == handle
        )

    def note_unreachable(self, handle: int, transport: str, problem: Exception) -> None:
        """Remember why a transport cannot reach a region (`moonpool doctor` and tests read it)."""
        self.unreachable[(handle, transport)] = f"{type(problem).__name__}: {problem}"

    def release(self, timeout_s: float) -> bool:
        """Unmap everything once no batch runs on the segment; False when one still did after the wait."""
        if not self.native.drain(timeout_s):
            return False
        for handle in list(self._regions):
            self.forget(handle, timeout_s)
        return True

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "an open segment cannot be copied or pickled: it owns mappings and lanes; open it again there"
        )

    def __repr__(self) -> str:
        ways = "+".join(dict.fromkeys(path.transport for path in self.paths))
        return (
            f"<Segment {self.name} of {self.endpoint} by {ways or 'nothing'}, {len(self._regions)} regions>"
        )
