"""Reads: look up, choose a copy, fetch, verify; and if anything is not right, another copy, or a fresh
look-up.

The first pass serves all keys of a call with one look-up and one batch for each node. Keys that it could not
serve go one by one through `Recovery`, which tries every copy before it gives up. What did not verify is
never returned: the destination is cleared.

A copy in shared memory is hashed before it is copied, chunk by chunk (see copying.pyx). That proves what was
returned only while nobody may write there: within the lease. After 90 % of it the destination is hashed anew.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from moonpool.errors import InternalError, MoonpoolError, PeerError
from moonpool.native.io.object_batch import (
    MISMATCH,
    batch_verdicts,
    check_objects,
    clear_memory,
    object_batch,
)
from moonpool.operations import Op
from moonpool.store.client_config import Verify
from moonpool.store.client_io import Work
from moonpool.store.client_results import GetResult, GetStatus
from moonpool.store.directory import word_offset
from moonpool.store.location_cache import Location
from moonpool.units import KIB, NS_PER_MS

if TYPE_CHECKING:
    from moonpool.native.io.batch import Batch as NativeBatch
    from moonpool.store.client_context import Context, Span
    from moonpool.store.segments_view import Target

#: Where the bytes of key number i go, given the object's size; may raise DestinationTooSmall.
MemoryFor = Callable[[int, int], "Span"]

#: Reads one key thoroughly: the key, its memory given the size, and what to verify.
Recover = Callable[[bytes, Callable[[int], "Span"], Verify], Awaitable[GetResult]]

MISS: Final = GetResult(GetStatus.MISS)
#: From so many bytes on a second pass over memory costs more than hashing in the copy.
_HASH_IN_COPY_BYTES: Final = 256 * KIB
_NEVER_NS: Final = 1 << 62
#: A lease counts as over for us when this much of it is.
LEASE_SHARE: Final = 0.9


class Asked(NamedTuple):
    """A look-up's answer: when it was sent, until when its leases hold for us, a location for each key."""

    sent_ns: int
    safe_until_ns: int
    locations: Sequence[Location | None]


class Item(NamedTuple):
    """One key of a group: its number in the call, where it is, which copy was chosen, and local memory."""

    number: int
    location: Location
    place: tuple[int, int, int]
    span: Span


@final
class Group:
    """The items that one target serves in one batch."""

    __slots__ = ("_hashed", "_items_words", "batch", "items", "target", "words")

    def __init__(self, target: Target) -> None:
        self.target = target
        self.items: list[Item] = []
        self.words: array[int] | None = None
        self.batch: NativeBatch | None = None
        self._hashed = False

    @property
    def total_bytes(self) -> int:
        """What all items have together."""
        return sum(item.location.size for item in self.items)

    def plan(self, with_words: bool, verify: bool, timeout_ns: int) -> Work:
        """Makes the batch: payloads in order, then the state words, so each is read after its payload."""
        data, directory = self.target.data, self.target.directory
        local, region, offset, length = array("Q"), array("Q"), array("Q"), array("Q")
        pieces = 0
        for _, _, (_, start, _), span in self.items:
            for address, size in zip(span.addresses, span.lengths, strict=True):
                local.append(address)
                offset.append(start)
                length.append(size)
                start += size
                pieces += 1
        plain = pieces == len(self.items)
        self._hashed = verify and plain and not with_words and sum(length) >= _HASH_IN_COPY_BYTES
        things: Any = [item.span for item in self.items]
        if with_words:
            region.extend([data] * pieces + [directory] * len(self.items))
            self.words = words = array("Q", bytes(8 * len(self.items)))
            base = words.buffer_info()[0]
            local.extend(range(base, base + 8 * len(self.items), 8))
            offset.extend(word_offset(item.place[2]) for item in self.items)
            length.extend([8] * len(self.items))
            things.append(words)
        where = region if with_words else data
        self.batch = object_batch(Op.READ, things, local, where, offset, length, self._hashed, timeout_ns)
        return Work(self.target, self.batch)

    def verdicts(self, verify: bool, need_words: bool, trust_copy: bool) -> bytes:
        """One byte an item: 0 when it is right, MISMATCH, or the status with which it failed."""
        batch = self.batch
        if batch is None:
            raise InternalError("a group was judged before its batch was made")
        if self._hashed and trust_copy:
            return batch_verdicts(batch, b"".join(item.location.digest for item in self.items))
        statuses = batch.statuses()
        n = len(self.items)
        marks = bytearray(self._worst_of_pieces(statuses))
        if verify:
            for i, wrong in enumerate(self._check()):
                marks[i] = marks[i] or wrong
        if need_words and self.words is not None:
            told = statuses[len(statuses) - n :]
            for i, item in enumerate(self.items):
                if not marks[i] and (told[i] or self.words[i] != item.location.object_id):
                    marks[i] = MISMATCH
        return bytes(marks)

    def _worst_of_pieces(self, statuses: bytes) -> bytes:
        n = len(self.items)
        if len(statuses) == n or (self.words is not None and len(statuses) == 2 * n):
            return statuses[:n]
        out = bytearray()
        at = 0
        for item in self.items:
            pieces = len(item.span.addresses)
            out.append(max(statuses[at : at + pieces]))
            at += pieces
        return bytes(out)

    def _check(self) -> bytes:
        addresses, lengths, first = array("Q"), array("Q"), array("Q", [0])
        for item in self.items:
            addresses.extend(item.span.addresses)
            lengths.extend(item.span.lengths)
            first.append(len(addresses))
        roots = b"".join(item.location.digest for item in self.items)
        return check_objects(addresses, lengths, roots, first)


async def _no_recovery(_key: bytes, _memory: Callable[[int], Span], _verify: Verify) -> GetResult:
    raise InternalError("a reader was used before it was given its recovery")


@final
class Reader:
    """Whole objects into local memory."""

    def __init__(self, context: Context) -> None:
        self.context = context
        config = context.config
        self._lease_base_ms = config.lease_base_ms
        self._lease_bytes_per_ms = config.lease_bytes_per_ms
        #: Cut to the masters' own limit at each join.
        self.lease_ms_max = config.lease_ms_max
        self.patience_ns = context.patience_ns
        #: Size of the largest objects read lately: what a read of unknown size asks a lease for.
        self.recent_bytes = 64 * KIB
        #: Reads one key that the first pass could not serve (`moonpool.store.reading_recovery`).
        self.recover: Recover = _no_recovery

    def lease_ms(self, size_bytes: int) -> int:
        """How long to ask the master to keep extents for reading so much."""
        return min(self._lease_base_ms + size_bytes // self._lease_bytes_per_ms, self.lease_ms_max)

    def note_size(self, size: int) -> None:
        """Remembers the largest size read lately."""
        if size > self.recent_bytes:
            self.recent_bytes = size

    async def locate(self, keys: Sequence[bytes], lease_ms: int) -> Asked:
        """Asks the master; remembers what it said when there is a location cache.

        The master counts each key as used, in the order of the request, and evicts what was used longest ago
        first: asked in reverse, the end of a chain goes before its head, without which it is of no use.
        """
        context = self.context
        sent = time.monotonic_ns()
        reply = await context.link.lookup(keys[::-1], lease_ms)
        if (reply.epoch, reply.segments_version) != context.segments.version:
            await context.fetch_segments()
        entries = map(reply.entry, range(len(keys) - 1, -1, -1))
        locations = [None if entry is None else Location._make(entry) for entry in entries]
        if context.cache is not None:
            for key, location in zip(keys, locations, strict=True):
                if location is not None:
                    context.cache.remember(key, location, sent)
        return Asked(sent, sent + int(lease_ms * NS_PER_MS * LEASE_SHARE), locations)

    async def read(
        self, keys: Sequence[bytes], memory: MemoryFor, verify: Verify, expected_bytes: int = 0
    ) -> list[GetResult]:
        """Reads each key's object into the memory that `memory` gives for it.

        `expected_bytes` says how long the leases must be; 0 when nobody knows.
        """
        results: list[GetResult | None] = [None] * len(keys)
        left: Sequence[int] = range(len(keys))
        cache = self.context.cache
        if cache is not None:
            now = time.monotonic_ns()
            known = [cache.find(key, now) for key in keys]
            if any(known):
                # The word says whether the bytes were the object's: no lease is needed for that.
                await self._pass(known, memory, (verify, True, _NEVER_NS), results)
            left = [i for i, result in enumerate(results) if result is None]
        if left:
            asked = await self.locate(
                [keys[i] for i in left], self.lease_ms(expected_bytes or self.recent_bytes * len(left))
            )
            found: list[Location | None] = [None] * len(keys)
            for i, location in zip(left, asked.locations, strict=True):
                found[i] = location
                if location is None:
                    results[i] = MISS
            await self._pass(found, memory, (verify, False, asked.safe_until_ns), results)
        for i, result in enumerate(results):
            if result is None:
                results[i] = await self.recover(keys[i], partial(memory, i), verify)
        return results  # type: ignore[return-value]  # every one is set now

    async def _pass(
        self,
        locations: Sequence[Location | None],
        memory: MemoryFor,
        how: tuple[Verify, bool, int],
        results: list[GetResult | None],
    ) -> None:
        """Serves what it can with one batch a target; leaves the result None where that did not work."""
        verify, cached, safe_until_ns = how
        hashing = verify in (Verify.FULL, Verify.RANGE)
        with_words = cached or verify is Verify.GENERATION
        groups: dict[int, Group] = {}
        for i, location in enumerate(locations):
            if location is None:
                continue
            try:
                target, place = await self.choose(location)
                span = memory(i, location.size) if target is not None else None
            except MoonpoolError as problem:
                # What a hint says of the size may be out of date: only the master's word refuses.
                if not cached and not isinstance(problem, PeerError):
                    results[i] = GetResult(GetStatus.FAILED, 0, location.object_id, problem)
                continue
            if target is not None and span is not None:
                group = groups.get(id(target)) or groups.setdefault(id(target), Group(target))
                group.items.append(Item(i, location, place, span))
        if not groups:
            return
        works = [
            group.plan(with_words, hashing, self.patience_ns(group.total_bytes)) for group in groups.values()
        ]
        await self.context.io.carry(works)
        in_time = time.monotonic_ns() < safe_until_ns
        for group in groups.values():
            marks = group.verdicts(hashing, with_words, in_time or not group.target.is_near)
            for item, mark in zip(group.items, marks, strict=True):
                size = item.location.size
                if not mark:
                    results[item.number] = GetResult(GetStatus.HIT, size, item.location.object_id)
                    self.note_size(size)
            if any(marks):
                self._after_failures(group, marks)

    def _after_failures(self, group: Group, marks: bytes) -> None:
        """Forgets a way that led nowhere, and clears what was read of other objects, or in part."""
        for item, mark in zip(group.items, marks, strict=True):
            if mark:
                clear_memory(array("Q", item.span.addresses), array("Q", item.span.lengths))
        if any(mark not in (0, MISMATCH) for mark in marks):
            self.context.segments.drop(group.target.info.segment_id)

    async def choose(self, location: Location) -> tuple[Target | None, tuple[int, int, int]]:
        """The nearest copy; of equally near ones that which we load least. (None, ...) when there is none.

        Raises the engine's error when there is but one and its node does not answer.
        """
        places = location.places
        segments = self.context.segments
        if len(places) == 1:
            target = segments.ready.get(places[0][0])
            if target is None or target.peer.native.dead:
                target = await self.open(places[0][0])
            return target, places[0]
        best: tuple[Target | None, tuple[int, int, int]] = (None, (0, 0, 0))
        for place in places:
            try:
                target = segments.ready.get(place[0]) or await self.open(place[0])
            except PeerError:
                continue
            if target is not None and (
                best[0] is None or (target.nearness, target.loading) < (best[0].nearness, best[0].loading)
            ):
                best = (target, place)
        return best

    async def open(self, segment_id: int) -> Target | None:
        """The way to a segment, opened if need be; the list is fetched again when it does not name it."""
        context = self.context
        target = await context.io.blocking(context.segments.target, segment_id)
        if target is None:
            await context.fetch_segments()
            target = await context.io.blocking(context.segments.target, segment_id)
        return target
