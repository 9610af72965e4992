"""Parts of objects: only the chunks that a range touches are read and checked.

The digest of a chunk comes from the list in the directory of the segment. A peer wrote that list, but its
own digest must be the root that the master gave, so it is as good as the root. Where there is no list (the
directory's log was full), or the object is one chunk, the whole object is read and checked instead.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, final

from moonpool.errors import MoonpoolError, OutOfRange, PeerError, ProtocolError
from moonpool.native.io.object_batch import copy_memory, hash_one, object_batch, root_of_chunks
from moonpool.operations import Op
from moonpool.store.client_config import Verify
from moonpool.store.client_context import Span
from moonpool.store.client_io import Work
from moonpool.store.client_results import GetResult, GetStatus
from moonpool.store.directory import (
    CHUNK_BYTES,
    ENTRY_BYTES,
    HEADER_BYTES,
    entry_offset,
    read_entry,
    read_header,
)
from moonpool.store.errors import DataLost
from moonpool.store.location_cache import Location
from moonpool.store.reading import MISS, MemoryFor, Reader

if TYPE_CHECKING:
    from moonpool.store.segments_view import Target

_LOOKUPS_MAX: Final = 3
_DIGEST_BYTES: Final = 8


@final
class RangeReader:
    """Ranges of objects into local memory. Thread-safe as its reader is."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._context = reader.context
        self._lists: OrderedDict[int, bytes] = OrderedDict()
        self._lists_max = reader.context.config.chunk_lists_max

    async def read(
        self, key: bytes, place: tuple[int, int | None], memory: MemoryFor, verify: Verify
    ) -> GetResult:
        """Reads from `place` = (offset, length or None for the rest); less when the object ends before.

        OutOfRange in the result when the object ends before `offset`.
        """
        offset, wanted = place
        located = None
        for _ in range(_LOOKUPS_MAX):
            asked = await self._reader.locate([key], self._reader.lease_ms(wanted or 1 << 20))
            located = asked.locations[0]
            if located is None:
                return MISS
            if offset > located.size:
                error: MoonpoolError = OutOfRange(
                    "the object ends before the range begins", offset=offset, limit=located.size
                )
                return GetResult(GetStatus.FAILED, 0, located.object_id, error)
            length = located.size - offset if wanted is None else min(wanted, located.size - offset)
            try:
                span = memory(0, length)
            except MoonpoolError as problem:
                return GetResult(GetStatus.FAILED, 0, located.object_id, problem)
            if length == 0 or await self._try_places(located, (offset, length), span, verify):
                return GetResult(GetStatus.HIT, length, located.object_id)
        error = DataLost("no copy gave bytes of the range that match their digests", offset=offset)
        return GetResult(GetStatus.FAILED, 0, located.object_id if located else 0, error)

    async def _try_places(
        self, location: Location, part: tuple[int, int], span: Span, verify: Verify
    ) -> bool:
        hashing = verify in (Verify.FULL, Verify.RANGE)
        for place in location.places:
            try:
                target = await self._reader.open(place[0])
                if target is None:
                    continue
                if not hashing:
                    if await self._fetch(target, place[1] + part[0], span):
                        return True
                elif await self._fetch_checked(target, (location, place), part, span):
                    return True
            except PeerError:
                self._context.segments.drop(place[0])
        return False

    async def _fetch_checked(
        self,
        target: Target,
        where: tuple[Location, tuple[int, int, int]],
        part: tuple[int, int],
        span: Span,
    ) -> bool:
        """Reads the chunks that the part touches, checks them, and copies the part out of them."""
        location, place = where
        offset, length = part
        digests = await self._digests(target, location, place[2])
        first, stop = offset // CHUNK_BYTES, -(-(offset + length) // CHUNK_BYTES)
        if digests is None:
            first, stop = 0, -(-location.size // CHUNK_BYTES)
        start, end = first * CHUNK_BYTES, min(stop * CHUNK_BYTES, location.size)
        with self._context.values.take(end - start) as room:
            whole = Span((room,), [room.address], [end - start])
            if not await self._fetch(target, place[1] + start, whole):
                return False
            root, found = hash_one(room.address, end - start)
            if digests is None:
                right = root == location.digest
            else:
                right = found == digests[first * _DIGEST_BYTES : stop * _DIGEST_BYTES]
            if right:
                source = room.address + offset - start
                for address, size in zip(span.addresses, span.lengths, strict=True):
                    copy_memory(address, source, size)
                    source += size
            return right

    async def _fetch(self, target: Target, start: int, span: Span) -> bool:
        local, offset, length = array("Q"), array("Q"), array("Q")
        for address, size in zip(span.addresses, span.lengths, strict=True):
            local.append(address)
            offset.append(start)
            length.append(size)
            start += size
        return await self._run(target, span, (local, target.data, offset, length))

    async def _digests(self, target: Target, location: Location, slot: int) -> bytes | None:
        """The object's chunk digests, 8 bytes each, proved by its root; None when there is no list."""
        if location.size <= CHUNK_BYTES:
            return None
        known = self._lists.get(location.object_id)
        if known is None:
            known = await self._read_list(target, location, slot)
            if known is not None:
                self._lists[location.object_id] = known
                while len(self._lists) > self._lists_max:
                    self._lists.popitem(last=False)
        return known

    async def _read_list(self, target: Target, location: Location, slot: int) -> bytes | None:
        page, raw = bytearray(HEADER_BYTES), bytearray(ENTRY_BYTES)
        info = target.info
        slots = Span.of([page, raw], writable=True)
        local = array("Q", slots.addresses)
        offset, length = array("Q", [0, entry_offset(info.slots, slot)]), array("Q", slots.lengths)
        if not await self._run(target, slots, (local, target.directory, offset, length)):
            return None
        try:
            region_bytes = target.peer.region(target.directory).size_bytes
            entry = read_entry(raw, read_header(page, region_bytes))
        except ProtocolError:  # of another object by now, or being written: the whole object is read instead
            return None
        chunks = -(-location.size // CHUNK_BYTES)
        if entry.object_id != location.object_id or entry.chunk_count != chunks:
            return None
        digests = bytearray(chunks * _DIGEST_BYTES)
        room = Span.of(digests, writable=True)
        where = (room.addresses[0], target.directory, entry.chunks_place, len(digests))
        if not await self._run(target, room, where):
            return None
        return bytes(digests) if root_of_chunks(digests) == location.digest else None

    async def _run(self, target: Target, things: Any, what: tuple[Any, int, Any, Any]) -> bool:
        local, region, offset, length = what
        total = length if isinstance(length, int) else sum(length)
        patience_ns = self._reader.patience_ns(total)
        batch = object_batch(Op.READ, things, local, region, offset, length, False, patience_ns)
        await self._context.io.carry([Work(target, batch)])
        return batch.worst == 0
