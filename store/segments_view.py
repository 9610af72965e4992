"""Which segments there are, and the way to each: opened when first used, bounded, closed when unused.

The master names segments by number, with a version that rises with every change. A reply that carries another
version than ours means that the list must be fetched again before its places are followed.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, final

from moonpool.errors import PeerError, ProtocolError, TransportUnavailable
from moonpool.store.records import NodeState

if TYPE_CHECKING:
    from moonpool.engine.engine import Engine
    from moonpool.engine.segment import Segment

#: Nearer first: the order in which places are tried.
_NEARNESS: Final = {"local": 0, "shm": 1, "cxl": 1}
_FAR: Final = 2
_SUSPECT: Final = 8
#: A node that could not be reached is not tried again for so long.
_FAILED_S: Final = 0.25


class SegmentInfo(NamedTuple):
    """One segment as the master lists it."""

    segment_id: int
    name: str
    node: str
    host: str
    endpoint: str
    view_endpoint: str
    instance: bytes
    generation: int
    data: int
    directory: int
    capacity: int
    slots: int
    state: int

    @classmethod
    def parse(cls, about: object) -> SegmentInfo:
        """Reads a segment map; ProtocolError when it is none."""
        try:
            if not isinstance(about, Mapping):
                raise TypeError("not a map")
            return cls(
                segment_id=int(about["id"]),
                name=str(about["name"]),
                node=str(about["node"]),
                host=str(about["host"]),
                endpoint=str(about["endpoint"]),
                view_endpoint=str(about["view_endpoint"]),
                instance=bytes(about["instance"]),
                generation=int(about["generation"]),
                data=int(about["data"]),
                directory=int(about["directory"]),
                capacity=int(about["capacity"]),
                slots=int(about["slots"]),
                state=int(about["state"]),
            )
        except (KeyError, TypeError, ValueError) as problem:
            raise ProtocolError(
                f"the master described a segment in a way we cannot read: {problem}"
            ) from None


class Target:
    """A segment that can be read and written: the engine's open segment, handles, and how near it is."""

    __slots__ = ("data", "directory", "info", "loading", "nearness", "peer")

    def __init__(self, info: SegmentInfo, peer: Segment) -> None:
        self.info = info
        self.peer = peer
        self.data = info.data
        self.directory = info.directory
        #: Bytes that reads of ours are fetching from it now: the lesser loaded of equal places is chosen.
        self.loading = 0
        nearness = _NEARNESS.get(peer.first_ways.get(info.data, ""), _FAR)
        self.nearness = nearness + (_SUSPECT if info.state == NodeState.SUSPECT else 0)

    @property
    def is_near(self) -> bool:
        """True when bytes are copied in memory: no network, no other process needed."""
        return self.nearness % _SUSPECT < _FAR


@final
class SegmentsView:
    """Thread-safe. `target` may open a connection and so take milliseconds the first time."""

    def __init__(self, engine: Engine, open_max: int, open_timeout_s: float) -> None:
        self._engine = engine
        self._open_max = open_max
        self._open_timeout_s = open_timeout_s
        self._lock = threading.RLock()
        self._infos: dict[int, SegmentInfo] = {}
        self._targets: dict[int, Target] = {}
        self._peers: OrderedDict[tuple[str, bytes], Segment] = OrderedDict()
        self._opening: dict[tuple[str, bytes], threading.Lock] = {}
        self._failed: dict[tuple[str, bytes], tuple[float, PeerError]] = {}
        #: Epoch and version of the list we have; None before the first. A journal that lost its tail counts
        #: versions again, but its epoch is another.
        self.version: tuple[int, int] | None = None
        #: Ready targets by segment id: a plain look-up for the hot path; `target` for what is not there.
        self.ready = self._targets

    def adopt(self, version: tuple[int, int], segments: object) -> None:
        """Takes a fresh list. Targets whose segment changed are made again when next used."""
        if not isinstance(segments, list | tuple):
            raise ProtocolError("the master's list of segments is no list")
        infos = {info.segment_id: info for info in map(SegmentInfo.parse, segments)}
        with self._lock:
            self._infos = infos
            self.version = version
            for segment_id, target in list(self._targets.items()):
                if infos.get(segment_id) != target.info:
                    del self._targets[segment_id]
            wanted = {(info.endpoint, info.instance) for info in infos.values()}
            for known in [known for known in self._peers if known not in wanted]:
                self._close(self._peers.pop(known))
            for known in [known for known in (*self._opening, *self._failed) if known not in wanted]:
                self._opening.pop(known, None)
                self._failed.pop(known, None)

    def info(self, segment_id: int) -> SegmentInfo | None:
        """What the master said of a segment; None when its list has no such segment."""
        return self._infos.get(segment_id)

    @property
    def infos(self) -> list[SegmentInfo]:
        """All segments of the last list."""
        return list(self._infos.values())

    def target(self, segment_id: int) -> Target | None:
        """The way to a segment, opened if need be; None when the list has no such segment.

        Raises the engine's error when its node cannot be reached; for a moment after that at once.
        """
        found = self._targets.get(segment_id)
        if found is not None and not found.peer.native.dead:
            return found
        info = self._infos.get(segment_id)
        if info is None:
            return None
        known = (info.endpoint, info.instance)
        with self._lock:
            opening = self._opening.setdefault(known, threading.Lock())
        # One lock a node: others are reached meanwhile, also while this one does not answer.
        with opening:
            peer = self._peer(info)
            if not (peer.knows(info.data) and peer.knows(info.directory)):
                self._engine.refresh(peer)
            if peer.knows(info.data) and info.data not in peer.first_ways:
                raise _out_of_reach(info, peer)
            made = Target(info, peer)
        with self._lock:
            if self._infos.get(segment_id) == info and self._peers.get(known) is peer:
                self._targets[segment_id] = made
        return made

    def drop(self, segment_id: int) -> None:
        """Forgets the way to a segment whose node failed, so that the next use opens it afresh."""
        with self._lock:
            target = self._targets.pop(segment_id, None)
            if target is None:
                return
            known = (target.info.endpoint, target.info.instance)
            if self._peers.get(known) is target.peer:
                del self._peers[known]
                for other in [i for i, one in self._targets.items() if one.peer is target.peer]:
                    del self._targets[other]
                self._close(target.peer)

    def close(self) -> None:
        """Closes every open segment."""
        with self._lock:
            self._targets.clear()
            while self._peers:
                self._close(self._peers.popitem()[1])

    def _peer(self, info: SegmentInfo) -> Segment:
        """The open segment of a node's engine; its `opening` lock is held."""
        known = (info.endpoint, info.instance)
        with self._lock:
            peer = self._peers.get(known)
            if peer is not None and not peer.native.dead:
                self._peers.move_to_end(known)
                return peer
            if peer is not None:
                self._close(self._peers.pop(known))
            failed_at, problem = self._failed.get(known, (0.0, None))
        if problem is not None and time.monotonic() < failed_at + _FAILED_S:
            raise problem.with_traceback(None)
        try:
            peer = self._open(info)
        except PeerError as failure:
            self._failed[known] = (time.monotonic(), failure)
            raise
        with self._lock:
            self._failed.pop(known, None)
            while len(self._peers) >= self._open_max:
                self._close(self._peers.popitem(last=False)[1])
            self._peers[known] = peer
        return peer

    def _open(self, info: SegmentInfo) -> Segment:
        peer = self._engine.open(info.endpoint, timeout_s=self._open_timeout_s)
        if any(info.instance) and peer.instance != info.instance:
            # The port belongs to another process now: bytes from it would be somebody else's.
            self._engine.close_segment(peer)
            raise ProtocolError(
                "another instance lives at the node's address; the master will hear of it",
                peer=info.endpoint,
                segment=info.name,
            )
        return peer

    def _close(self, peer: Segment) -> None:
        for segment_id in [i for i, one in self._targets.items() if one.peer is peer]:
            del self._targets[segment_id]
        self._engine.close_segment(peer)


def _out_of_reach(info: SegmentInfo, peer: Segment) -> TransportUnavailable:
    """The error for payload that no transport of ours gets at."""
    lies = peer.region(info.data).location
    reasons = "; ".join(text for (of, _), text in peer.unreachable.items() if of == info.data)
    advice = (
        "add the transport of that kind of place: connect(transports=...), or --transports and "
        "MOONPOOL_TRANSPORTS of the commands; `moonpool doctor` tells which can run here"
    )
    if any(of == info.data and name != "all" for of, name in peer.unreachable):
        advice = "look at that place on its node, and why this process may not open it"
    return TransportUnavailable(
        f"the payload of {info.name} lies at {lies}, which none of this pool's transports reaches"
        + (f" ({reasons})" if reasons else ""),
        advice,
        peer=info.endpoint,
        segment=info.name,
    )
