"""Views: an object's bytes read in place, in the memory of a node on this host, with nothing copied.

A view is a pin: the node counts it for this process and does not use the extent again before it is closed,
even when the object is removed or replaced meanwhile. The bytes are verified at the first view of an object;
after that a view costs one short message. The node drops the pins of a process that dies.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from moonpool.errors import LimitExceeded, MoonpoolError, PeerGone
from moonpool.native.io.object_batch import is_intact
from moonpool.rpc.client import RpcClient
from moonpool.store.value import ObjectBytes

if TYPE_CHECKING:
    from moonpool.engine.engine import Engine
    from moonpool.store.location_cache import Location
    from moonpool.store.segments_view import Target

_CALL_TIMEOUT_S: Final = 5.0
_VERIFIED_MAX: Final = 65_536
_JOIN_TIMEOUT_S: Final = 10.0


class Pinned(NamedTuple):
    """A pin as the node counts it: on which connection, and what."""

    client: RpcClient
    segment: int
    slot: int
    object_id: int


@final
class Hold:
    """Keeps an extent at its node, and the mapping here, until the last view of the bytes is gone."""

    __slots__ = ("_give_up", "_memory", "pinned")

    def __init__(self, pinned: Pinned, memory: object, give_up: Callable[[Pinned], None]) -> None:
        self.pinned = pinned
        self._memory = memory
        self._give_up = give_up

    def __del__(self) -> None:
        # Any thread, at any time: it only notes what the desk's own thread then tells the node.
        self._memory = None
        self._give_up(self.pinned)


@final
class View(ObjectBytes):
    """An object's bytes where the node has them; read-only. Close it soon: it keeps the extent from reuse.

    `close` (or the end of a `with` block, or dropping it) unpins once no buffer of it lives.
    """

    __slots__ = ()


@final
class ViewDesk:
    """Opens views at the nodes of this host, and closes them in a thread of its own. Thread-safe; blocks."""

    def __init__(self, engine: Engine, secret: bytes | None, views_max: int) -> None:
        self._engine = engine
        self._secret = secret
        self._views_max = views_max
        self._lock = threading.Lock()
        self._clients: dict[str, RpcClient] = {}
        self._given_up: deque[Pinned] = deque()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._open = 0
        self._closed = False
        self._verified: OrderedDict[tuple[int, int, int], None] = OrderedDict()

    @property
    def open_views(self) -> int:
        """Pins held now."""
        return self._open

    def open(self, target: Target, location: Location, place: tuple[int, int, int]) -> View | None:
        """A view of a copy; None when the node says that the object is not there (yet, or any more).

        Raises what connecting to the node raises, and LimitExceeded at views_max.
        """
        segment, offset, slot = place
        base = self._mapped(target)
        if base is None:
            return None
        client = self._client(target.info.view_endpoint)
        self._count_one()
        try:
            told = client.call("view_open", [[[segment, slot, location.object_id]]], _CALL_TIMEOUT_S)
        except BaseException:
            self._open -= 1
            raise
        if told != b"\1":
            self._open -= 1
            return None
        address, memory = base
        hold = Hold(Pinned(client, segment, slot, location.object_id), memory, self._note)
        view = View(address + offset, location.size, hold, None, False)
        view.object_id = location.object_id
        return view

    def is_verified(self, view: View, target: Target, digest: bytes) -> bool:
        """True when the bytes have the digest: hashed at the first view of this object in this memory."""
        known = (target.info.segment_id, target.info.generation, view.object_id)
        if known in self._verified:
            return True
        if not is_intact(view.address, view.size_bytes, digest):
            return False
        with self._lock:
            self._verified[known] = None
            while len(self._verified) > _VERIFIED_MAX:
                self._verified.popitem(last=False)
        return True

    def close(self) -> None:
        """Gives all pins up with their connections. Views that still live keep mapped memory, unpinned."""
        with self._lock:
            self._closed = True
            clients, self._clients = list(self._clients.values()), {}
            thread, self._thread = self._thread, None
        self._wake.set()
        if thread is not None:
            thread.join(_JOIN_TIMEOUT_S)
        for client in clients:
            client.close()

    def abandon(self) -> None:
        """In a forked child: the parent's connections are the parent's."""
        self._closed = True
        self._clients.clear()
        self._thread = None

    def _mapped(self, target: Target) -> tuple[int, Any] | None:
        """Where the segment's data lies in this process, and what keeps it there."""
        mapping = target.peer.mappings.get(target.data)
        if mapping is not None:
            return mapping.address, memoryview(mapping)
        if target.peer.instance == self._engine.instance:
            for region in self._engine.regions:
                if region.handle == target.data:
                    return region.address, region
        return None

    def _client(self, endpoint: str) -> RpcClient:
        with self._lock:
            if self._closed:
                raise PeerGone("the pool is closed")
            client = self._clients.get(endpoint)
            if client is None or client.closed_reason is not None:
                client = RpcClient(endpoint, secret=self._secret)
                self._clients[endpoint] = client
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="moonpool-views", daemon=True)
                self._thread.start()
            return client

    def _count_one(self) -> None:
        with self._lock:
            if self._open >= self._views_max:
                raise LimitExceeded(field="views_max", limit=self._views_max)
            self._open += 1

    def _note(self, pinned: Pinned) -> None:
        self._given_up.append(pinned)
        self._wake.set()

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait()
            self._wake.clear()
            self._tell_nodes()

    def _tell_nodes(self) -> None:
        by_client: dict[int, tuple[RpcClient, list[list[int]]]] = {}
        while self._given_up:
            client, segment, slot, object_id = self._given_up.popleft()
            with self._lock:
                self._open -= 1
            by_client.setdefault(id(client), (client, []))[1].append([segment, slot, object_id])
        for client, places in by_client.values():
            try:
                client.call("view_close", [places], _CALL_TIMEOUT_S)
            except MoonpoolError:  # with the connection the node has dropped its pins
                client.close()
