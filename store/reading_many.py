"""Reads of many keys at once, each into one piece of memory: planned and judged natively, out of the reply.

The same rules as in `moonpool.store.reading`: one look-up, one batch a segment, every root compared; a key
that did not come through is read again, alone and thoroughly.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from moonpool.errors import MoonpoolError, PeerError
from moonpool.native.io.memory import BufferHold
from moonpool.native.io.object_batch import clear_memory, copy_memory
from moonpool.native.io.object_calls import Plan
from moonpool.store.client_config import Verify
from moonpool.store.client_context import Span
from moonpool.store.client_io import BlockingIo, Work, run_now
from moonpool.store.client_results import GetResult, GetStatus
from moonpool.store.errors import DestinationTooSmall
from moonpool.store.hedging import Guard, Staged
from moonpool.store.location_cache import Location
from moonpool.store.reading import LEASE_SHARE, MISS, Group, Item, Reader
from moonpool.units import MIB, NS_PER_MS

if TYPE_CHECKING:
    from moonpool.native.io.rpc_codec import LookupReply
    from moonpool.store.segments_view import Target
    from moonpool.store.value import Value

#: From so many bytes on a second pass over memory costs more than hashing in the copy.
_HASH_IN_COPY_BYTES: Final = 1 * MIB
_MISS_MARK: Final = 1


class Room(NamedTuple):
    """Where bytes go: an address and a capacity for each key (uint64[n] each), and what owns the memory."""

    address: array[int]
    capacity: array[int]
    things: Any


#: Given the reply, in which keys stand last first: the memory for each key.
RoomFor = Callable[["LookupReply"], Room]


class Flat(NamedTuple):
    """What came of each key: marks (0: read), size and object id by key; results of those read alone."""

    marks: bytearray
    sizes: Sequence[int]
    object_ids: Sequence[int]
    alone: dict[int, GetResult]

    def results(self) -> list[GetResult]:
        """One result a key."""
        hit, alone = GetStatus.HIT, self.alone
        rows = zip(self.marks, self.sizes, self.object_ids, strict=True)
        made = [GetResult(hit, size, known) if not mark else MISS for mark, size, known in rows]
        for number, result in alone.items():
            made[number] = result
        return made


def take_staged(staged: Sequence[Staged], plan: Plan, room: Room) -> None:
    """Copies what a second read brought to where the first one, which has ended, did not bring it."""
    for number, value in staged:
        if plan.marks[number]:
            copy_memory(room.address[number], value.address, value.size_bytes)
            plan.marks[number] = 0
        value.close()


@final
class ManyReader:
    """Thread-safe as its reader is."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._context = reader.context

    async def values(self, keys: Sequence[bytes], verify: Verify) -> list[Value | None]:
        """A value a key, None for a miss. Raises the first key's error."""
        take = self._context.values.take
        values: list[Value | None] = []

        def room(reply: LookupReply) -> Room:
            sizes, known = reply.sizes[::-1], reply.object_ids[::-1]
            values[:] = [take(size, one) if one else None for size, one in zip(sizes, known, strict=True)]
            address = array("Q", [0 if value is None else value.address for value in values])
            return Room(address, array("Q", sizes.tobytes()), values)

        def again(number: int, size: int) -> Span:
            value = values[number] = take(size)
            return Span((value,), [value.address], [size])

        flat = await self._read(keys, (room, again), verify, 0)
        for number, mark in enumerate(flat.marks):
            if not mark:
                continue
            result = flat.alone.get(number, MISS)
            if result.error is not None:
                raise result.error
            value = values[number]
            if result.status is GetStatus.HIT and value is not None:
                value.object_id = result.object_id
            else:
                values[number] = None
        return values

    async def into(
        self, keys: Sequence[bytes], destinations: Sequence[Any], verify: Verify
    ) -> list[GetResult]:
        """One result a key; each destination is one writable buffer."""
        holds = [BufferHold(one, writable=True) for one in destinations]
        address = array("Q", [hold.address for hold in holds])
        capacity = array("Q", [hold.size_bytes for hold in holds])

        def again(number: int, size: int) -> Span:
            if size > capacity[number]:
                raise DestinationTooSmall(length_bytes=size, limit=capacity[number], index=number)
            return Span((holds[number],), [address[number]], [size])

        room = Room(address, capacity, holds)
        flat = await self._read(keys, (lambda _reply: room, again), verify, sum(capacity))
        return flat.results()

    async def _read(
        self,
        keys: Sequence[bytes],
        memory: tuple[RoomFor, Callable[[int, int], Span]],
        verify: Verify,
        expected_bytes: int,
    ) -> Flat:
        context, reader = self._context, self._reader
        lease_ms = reader.lease_ms(expected_bytes or reader.recent_bytes * len(keys))
        sent = time.monotonic_ns()
        reply = await context.link.lookup(keys[::-1], lease_ms)
        if (reply.epoch, reply.segments_version) != context.segments.version:
            await context.fetch_segments()
        await self._open_all(reply)
        sizes, known = reply.sizes[::-1], reply.object_ids[::-1]
        total = sum(sizes)
        room = memory[0](reply)
        hashing = verify in (Verify.FULL, Verify.RANGE)
        plan = Plan(reply)
        in_copy = hashing and total >= _HASH_IN_COPY_BYTES
        pairs = plan.prepare(self._ready, *room, in_copy, reader.patience_ns(total))
        works = [Work._make(pair) for pair in pairs]
        guards = self._guards(plan, reply, works) if max(reply.place_counts, default=0) > 1 else ()
        if works:
            await context.io.carry(works)
        # What was hashed before it was copied proves nothing once somebody else may have written there.
        in_time = time.monotonic_ns() < sent + int(lease_ms * NS_PER_MS * LEASE_SHARE)
        plan.judge(hashing, in_time)
        for guard in guards:
            take_staged(context.hedger.settle(guard), plan, room)
        alone: dict[int, GetResult] = {}
        if any(plan.marks):
            await self._read_alone(keys, (plan, room, sizes), (memory[1], verify), alone)
        reader.note_size(max(sizes, default=0))
        return Flat(plan.marks, sizes, known, alone)

    def _guards(self, plan: Plan, reply: LookupReply, works: Sequence[Work]) -> list[Guard]:
        """Watches the batches that go over the network, so that a slow one is read from other copies too."""
        hedger = self._context.hedger
        if not hedger.is_on:
            return []
        return [
            hedger.watch(work.batch, partial(self._read_again, reply, plan.members(work.batch), work.target))
            for work in works
            if not work.target.is_near
        ]

    def _read_again(self, reply: LookupReply, members: bytes, slow: Target) -> list[Staged]:
        """Reads the keys of a slow batch from other copies, into values; nothing when one has no other.

        Runs in a thread of the hedger.
        """
        groups: dict[int, Group] = {}
        staged: list[Staged] = []
        for number in memoryview(members).cast("I"):
            entry = reply.entry(len(reply) - 1 - number)
            if entry is None:
                return []
            location = Location._make(entry)
            other = self._other_copy(location, slow)
            if other is None:
                return []
            target, place = other
            value = self._context.values.take(location.size, location.object_id)
            span = Span((value,), [value.address], [location.size])
            group = groups.get(id(target)) or groups.setdefault(id(target), Group(target))
            group.items.append(Item(number, location, place, span))
            staged.append(Staged(number, value))
        patience_ns = self._reader.patience_ns
        works = [group.plan(False, True, patience_ns(group.total_bytes)) for group in groups.values()]
        run_now(BlockingIo(self._context.engine).carry(works))
        right = not any(any(group.verdicts(True, False, False)) for group in groups.values())
        return staged if right else []

    def _other_copy(self, location: Location, slow: Target) -> tuple[Target, tuple[int, int, int]] | None:
        for place in location.places:
            if place[0] == slow.info.segment_id:
                continue
            try:
                target = self._context.segments.target(place[0])
            except MoonpoolError:
                continue
            if target is not None and target.peer is not slow.peer:
                return target, place
        return None

    async def _read_alone(
        self,
        keys: Sequence[bytes],
        read: tuple[Plan, Room, Sequence[int]],
        how: tuple[Callable[[int, int], Span], Verify],
        alone: dict[int, GetResult],
    ) -> None:
        """Reads again, one by one, what was found and did not come through."""
        plan, room, sizes = read
        again, verify = how
        for number, mark in enumerate(plan.marks):
            if mark in (0, _MISS_MARK):
                continue
            if sizes[number] <= room.capacity[number]:
                clear_memory(array("Q", [room.address[number]]), array("Q", [sizes[number]]))
            alone[number] = await self._reader.recover(keys[number], partial(again, number), verify)

    def _ready(self, segment: int) -> Target | None:
        target = self._context.segments.ready.get(segment)
        return None if target is None or target.peer.native.dead else target

    async def _open_all(self, reply: LookupReply) -> None:
        """Opens the segments that the reply names and that are not open yet, as far as that is possible."""
        for segment in set(reply.place_segments):
            if self._ready(segment) is None:
                try:
                    await self._reader.open(segment)
                except PeerError:
                    continue
