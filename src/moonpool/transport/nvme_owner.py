"""The owner's side of ranges of namespaces: who was told of them, and the blocks that only it writes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, final

from moonpool.errors import AccessDenied, ProtocolError, StaleHandle, UnsupportedOperation
from moonpool.native.nvmeof.namespace import NamespaceRegion
from moonpool.operations import Access
from moonpool.transport.base import Host, OwnerSession, OwnMethod, OwnRegion
from moonpool.transport.nvme_book import RangeBook
from moonpool.transport.nvme_offers import NamespaceBacking
from moonpool.units import MS_PER_S

OPEN: Final = "nvmeof.open"
EDGES: Final = "nvmeof.edges"
#: What one request may carry; native/nvmeof/ways.pyx sends less.
PIECES_MAX: Final = 1024
BYTES_MAX: Final = 64 << 10
BUDGET_MS_MAX: Final = 60_000
#: Requests with edges that one owner works on at once; more are told to come again.
WRITERS_MAX: Final = 16


@final
class RangeOwner:
    """Control methods of owners; on the control thread, which they never hold up."""

    def __init__(self, host: Host, book: RangeBook, write: Callable[..., list[int]]) -> None:
        self._host = host
        self._book = book
        self._write = write
        self._changed = threading.Condition()
        #: By region: requests whose bytes are being written.
        self._writing: dict[int, int] = {}

    def methods(self) -> Mapping[str, OwnMethod]:
        """For `Transport.methods`."""
        return {OPEN: self.open, EDGES: self.edges}

    def open(self, session: OwnerSession, params: Mapping[str, Any]) -> object:
        """A peer is about to use a region: it is asked when the region is revoked."""
        region, _backing = self._asked(params)
        access = params.get("access")
        if type(access) is not int or not 0 < access <= int(Access.READ_WRITE):
            raise ProtocolError("a range of a namespace is asked for by access bits")
        if access & ~int(region.access):
            raise AccessDenied(f"the region does not allow access {access}", region=region.handle)
        writes = bool(access & Access.WRITE)
        if session.is_unix and session.peer_pid is not None:
            self._host.given(region.handle, session, writes=writes)
        else:
            self._book.note(region.handle, session.session_id, session.peer_instance, writes=writes)
            self._host.region(region.handle)  # a revoke that came between does not know of the session
        return {}

    def edges(self, _session: OwnerSession, params: Mapping[str, Any]) -> object:
        """Bytes of blocks that a peer's WRITE covers in part: written here; a status for each."""
        region, backing = self._asked(params)
        if not region.access & Access.WRITE:
            raise AccessDenied("the region does not allow WRITE", region=region.handle)
        pieces = check_pieces(params.get("pieces"), backing)
        budget_ms = params.get("budget_ms")
        if type(budget_ms) is not int or not 0 <= budget_ms <= BUDGET_MS_MAX:
            raise ProtocolError("edges come with a budget of milliseconds")
        return self._write_soon(region.handle, backing.range, pieces, budget_ms / MS_PER_S)

    async def _write_soon(
        self, handle: int, where: NamespaceRegion, pieces: list[tuple[int, bytes]], budget_s: float
    ) -> list[int]:
        with self._changed:
            if sum(self._writing.values()) >= WRITERS_MAX:
                raise UnsupportedOperation("too many edges are being written; send them again")
            self._writing[handle] = self._writing.get(handle, 0) + 1
        try:
            self._host.region(handle)  # not revoked before it was counted
            return await asyncio.to_thread(self._write, where, pieces, budget_s)
        finally:
            with self._changed:
                self._writing[handle] -= 1
                if not self._writing[handle]:
                    del self._writing[handle]
                self._changed.notify_all()

    def settle(self, handle: int, timeout_s: float) -> bool:
        """Wait until no edge of a revoked region is being written; False when it took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: handle not in self._writing, timeout_s)

    def _asked(self, params: Mapping[str, Any]) -> tuple[OwnRegion, NamespaceBacking]:
        handle = params.get("handle")
        if type(handle) is not int:
            raise ProtocolError("a region is asked for by its handle")
        region = self._host.region(handle)
        if not isinstance(region.backing, NamespaceBacking):
            raise StaleHandle("the region is no range of a namespace", region=handle)
        return region, region.backing


def check_pieces(asked: object, backing: NamespaceBacking) -> list[tuple[int, bytes]]:
    """Pieces as a peer sent them, each inside one block of the range; ProtocolError for anything else."""
    if not isinstance(asked, list) or not 0 < len(asked) <= PIECES_MAX:
        raise ProtocolError(f"edges are a list of 1 to {PIECES_MAX} pieces")
    block, size, total = backing.about.block_bytes, backing.size_bytes, 0
    pieces: list[tuple[int, bytes]] = []
    for piece in asked:
        if not isinstance(piece, list | tuple) or len(piece) != 2:
            raise ProtocolError("an edge is an offset and bytes")
        offset, data = piece
        if type(offset) is not int or not isinstance(data, bytes) or not data:
            raise ProtocolError("an edge is an offset and bytes")
        end = offset + len(data)
        if not 0 <= offset < end <= size or offset // block != (end - 1) // block:
            raise ProtocolError("an edge lies inside one block of its region")
        total += len(data)
        pieces.append((offset, data))
    if total > BYTES_MAX:
        raise ProtocolError(f"edges of one request have at most {BYTES_MAX} bytes")
    return pieces
