"""The plain twin of `objects`: dictionaries, slow and obviously right. Its tests' oracle."""

from __future__ import annotations

import heapq
import struct
from collections.abc import Iterator
from typing import Final, final

from moonpool.errors import InternalError, LimitExceeded, UsageError
from moonpool.native.table.objects_dump import Dump, QueueDump, decode_dump, encode_dump
from moonpool.native.table.queues_reference import (
    HELD,
    MAIN,
    POLICIES,
    QUEUES,
    SMALL,
    SOFT,
    SegmentQueues,
    Walk,
)
from moonpool.native.table.stored import (
    ID_MAX,
    PIN_HARD,
    PIN_SOFT,
    PLACES_MAX,
    TIME_MAX,
    Place,
    StoredObject,
    check_object,
    check_place,
    extent_bytes,
)

#: Soft pins that end in one search for victims.
ENDED_PINS_MAX: Final = 64
#: Entries that a search looks at beyond four for each victim.
LOOKS_BEYOND: Final = 64


@final
class ReferenceObjectTable:
    """Objects by (tenant, key), with the queues of each segment, each with `ghosts_max` ghosts."""

    def __init__(self, policy: str = "lru", *, objects_max: int = 1 << 26, ghosts_max: int = 1 << 16) -> None:
        if policy not in POLICIES:
            raise UsageError(
                f"there is no policy {policy!r}; there are {', '.join(POLICIES)}", field="policy"
            )
        self._policy = POLICIES.index(policy)
        self._objects_max = objects_max
        self._ghosts_max = ghosts_max
        self._segments: dict[int, SegmentQueues] = {}
        self._clear()

    def _clear(self) -> None:
        self._objects: dict[int, StoredObject] = {}
        self._by_key: dict[tuple[int, bytes], int] = {}
        self._leases: dict[int, int] = {}
        #: Objects whose soft pin still holds.
        self._soft: set[int] = set()
        self._groups: dict[tuple[int, int], dict[int, None]] = {}
        self._tenant_bytes: dict[int, int] = {}
        self._free: list[int] = []
        self._used = 0
        for segment, queues in self._segments.items():
            self._segments[segment] = SegmentQueues(self._policy, queues.capacity_bytes, self._ghosts_max)

    def __len__(self) -> int:
        return len(self._objects)

    def add_segment(self, segment: int, capacity_bytes: int) -> None:
        if not 0 <= segment <= ID_MAX or capacity_bytes < 0 or segment in self._segments:
            raise InternalError(f"segment {segment} cannot be added")
        self._segments[segment] = SegmentQueues(self._policy, capacity_bytes, self._ghosts_max)

    def drop_segment(self, segment: int) -> None:
        if len(self._queues(segment)):
            raise InternalError(f"segment {segment} still has places")
        del self._segments[segment]

    def find(self, tenant: int, key: bytes) -> int:
        return self._by_key.get((tenant, key), -1)

    def add(self, stored: StoredObject) -> int:
        check_object(stored)
        for place in stored.places:
            check_place(place)
            self._queues(place.segment)
        if (stored.tenant, stored.key) in self._by_key:
            raise InternalError(f"the key of object {stored.object_id} is taken")
        if len(self._objects) >= self._objects_max:
            raise LimitExceeded("the table of objects is full", field="objects_max", limit=self._objects_max)
        index = self._free.pop() if self._free else self._used
        self._used = max(self._used, index + 1)
        self._objects[index] = stored._replace(places=())
        self._by_key[stored.tenant, stored.key] = index
        if stored.pin == PIN_SOFT:
            self._soft.add(index)
        if stored.group:
            self._groups.setdefault((stored.tenant, stored.group), {})[index] = None
        for place in stored.places:
            self.add_place(index, place)
        return index

    def at(self, index: int) -> StoredObject:
        """The object at a live index; InternalError for any other."""
        if index not in self._objects:
            raise InternalError(f"there is no object at index {index}")
        return self._objects[index]

    def object_id(self, index: int) -> int:
        """Its id, as `at(index).object_id` and cheaper."""
        return self.at(index).object_id

    def drop(self, index: int) -> StoredObject:
        stored = self.at(index)
        for place in stored.places:
            self._unlink(index, place.segment)
        del self._objects[index]
        del self._by_key[stored.tenant, stored.key]
        self._leases.pop(index, None)
        self._soft.discard(index)
        if stored.group:
            members = self._groups[stored.tenant, stored.group]
            del members[index]
            if not members:
                del self._groups[stored.tenant, stored.group]
        self._free.append(index)
        return stored

    def add_place(self, index: int, place: Place) -> None:
        """One more complete copy; InternalError when the segment has one of it."""
        stored = self.at(index)
        check_place(place)
        queues = self._queues(place.segment)
        if index in queues.queue_of or len(stored.places) >= PLACES_MAX:
            raise InternalError(f"object {stored.object_id} cannot have one more place on {place.segment}")
        queue = self._pinned_queue(index)
        if queue < 0:
            queue = queues.first_queue((stored.tenant, stored.key))
        queues.link(index, queue, extent_bytes(stored.size))
        total = self._tenant_bytes.get(stored.tenant, 0) + extent_bytes(stored.size)
        self._tenant_bytes[stored.tenant] = total
        self._objects[index] = stored._replace(places=(*stored.places, place))

    def drop_place(self, index: int, segment: int) -> Place:
        stored = self.at(index)
        for place in stored.places:
            if place.segment == segment:
                self._unlink(index, segment)
                left = tuple(other for other in stored.places if other != place)
                self._objects[index] = stored._replace(places=left)
                return place
        raise InternalError(f"object {stored.object_id} has no place on segment {segment}")

    def set_pin(self, index: int, pin: int, soft_pin_end_ms: int) -> None:
        """Changes how it may be evicted."""
        stored = self.at(index)._replace(pin=pin, soft_pin_end_ms=soft_pin_end_ms)
        check_object(stored)
        before = self._pinned_queue(index)
        self._objects[index] = stored
        if pin == PIN_SOFT:
            self._soft.add(index)
        else:
            self._soft.discard(index)
        if self._pinned_queue(index) != before:
            self._move(index)

    def lease_until(self, index: int) -> int:
        """When its last lease ends; 0 when it never had one."""
        self.at(index)
        return self._leases.get(index, 0)

    def extend_lease(self, index: int, until_ms: int) -> None:
        self.at(index)
        if not 0 <= until_ms <= TIME_MAX:
            raise InternalError(f"{until_ms} is no time")
        self._leases[index] = max(self._leases.get(index, 0), until_ms)

    def touch(self, index: int) -> None:
        for place in self.at(index).places:
            self._segments[place.segment].touch(index)

    def victims(
        self, segment: int, wanted_bytes: int, now_ms: int, *, count_max: int, soft: bool
    ) -> list[int]:
        queues = self._queues(segment)
        self._end_soft_pins(now_ms)
        walk = Walk(queues)
        looks = 4 * count_max + LOOKS_BEYOND
        found: dict[int, None] = {}
        blocked: set[tuple[int, int]] = set()
        covered = 0
        while covered < wanted_bytes and len(found) < count_max and looks > 0:
            index = walk.next_entry(soft)
            if index < 0:
                break
            looks -= 1
            if index in found:
                continue
            members = self._members(index)
            group = (self._objects[index].tenant, self._objects[index].group)
            if members and group not in blocked:
                looks -= len(members)
            may_go = group not in blocked and all(
                self._may_go(member, now_ms, soft) for member in members or (index,)
            )
            if not may_go:
                if members:
                    blocked.add(group)
                walk.put_back(index)
            elif not walk.gets_another_round(index):
                leaving = self._leaving(members, segment) if members else [index]
                if found and len(found) + len(leaving) > count_max:
                    break
                for member in leaving:
                    found[member] = None
                    if member in queues.queue_of:
                        queues.chosen.add(member)
                        covered += extent_bytes(self._objects[member].size)
        return list(found)

    def places_on(self, segment: int, after_index: int, count_max: int) -> list[int]:
        return heapq.nsmallest(count_max, (i for i in self._queues(segment).queue_of if i > after_index))

    def bytes_on(self, segment: int) -> int:
        return self._queues(segment).total_bytes()

    def bytes_of(self, tenant: int) -> int:
        return self._tenant_bytes.get(tenant, 0)

    def packed_places(self, segment: int) -> bytes:
        rows = []
        for index in self._queues(segment).queue_of:
            stored = self._objects[index]
            place = next(place for place in stored.places if place.segment == segment)
            rows.append((place.offset, extent_bytes(stored.size), place.slot))
        return b"".join(struct.pack("<3Q", *row) for row in sorted(rows))

    def drop_places(self, segment: int) -> int:
        ended = 0
        for index in [index for order in self._queues(segment).order for index in order]:
            if len(self._objects[index].places) == 1:
                self.drop(index)
                ended += 1
            else:
                self.drop_place(index, segment)
        return ended

    def find_prefix(
        self, tenant: int, prefix: bytes, after_index: int, count_max: int, looks_max: int
    ) -> tuple[list[int], int]:
        found: list[int] = []
        first = max(after_index, -1) + 1
        for index in range(first, min(first + looks_max, self._used)):
            stored = self._objects.get(index)
            if stored and stored.tenant == tenant and stored.key.startswith(prefix):
                found.append(index)
                if len(found) >= count_max:
                    return found, index if index + 1 < self._used else -1
        return found, first + looks_max - 1 if first + looks_max < self._used else -1

    def scan(self, after_index: int, count_max: int) -> list[int]:
        return heapq.nsmallest(count_max, (index for index in self._objects if index > after_index))

    def dump(self) -> bytes:
        ordinals = {index: ordinal for ordinal, index in enumerate(sorted(self._objects))}
        queues = [
            QueueDump(
                segment, queue, [(ordinals[index], queues.uses[index]) for index in queues.order[queue]]
            )
            for segment, queues in sorted(self._segments.items())
            for queue in range(QUEUES)
            if queues.order[queue]
        ]
        return encode_dump(Dump(self._policy, [self._objects[index] for index in ordinals], queues))

    def load(self, data: bytes) -> None:
        if self._objects:
            raise UsageError("a dump is loaded into an empty table only")
        self._clear()
        try:
            self._restore(decode_dump(data, frozenset(self._segments)))
        except (UsageError, LimitExceeded):
            self._clear()
            raise

    def memory_bytes(self) -> int:
        """An estimate: the twin is not made to be small."""
        return sum(1000 + len(stored.key) for stored in self._objects.values())

    def check(self) -> None:
        for problem in self._problems():
            raise InternalError(problem)

    def _problems(self) -> Iterator[str]:
        indices = {self._by_key[stored.tenant, stored.key] for stored in self._objects.values()}
        if indices != self._objects.keys() or len(self._by_key) != len(self._objects):
            yield "keys and objects differ"
        if sorted([*self._free, *self._objects]) != list(range(self._used)):
            yield "an index is neither free nor live"
        if not self._soft <= self._objects.keys() or not self._leases.keys() <= self._objects.keys():
            yield "a pin or a lease without an object"
        for members in self._groups.values():
            if not members or not members.keys() <= self._objects.keys():
                yield "a group of nobody"
        tenants = dict.fromkeys(self._tenant_bytes, 0)
        for stored in self._objects.values():
            if stored.places:
                tenants[stored.tenant] += extent_bytes(stored.size) * len(stored.places)
        if tenants != self._tenant_bytes:
            yield "bytes of a tenant are miscounted"
        for segment, queues in self._segments.items():
            yield from self._segment_problems(segment, queues)

    def _segment_problems(self, segment: int, queues: SegmentQueues) -> Iterator[str]:
        holders = {
            index
            for index, stored in self._objects.items()
            if any(place.segment == segment for place in stored.places)
        }
        lengths = sum(len(order) for order in queues.order)
        if not holders == queues.queue_of.keys() == queues.uses.keys() or lengths != len(holders):
            yield f"queues of segment {segment} do not hold its objects"
        if queues.bytes_in != [sum(order.values()) for order in queues.order]:
            yield f"bytes of segment {segment} are miscounted"
        for index, queue in queues.queue_of.items():
            if self._pinned_queue(index) not in (queue, -1 if queue in (SMALL, MAIN) else queue):
                yield f"object {index} is in the wrong queue of segment {segment}"

    def _queues(self, segment: int) -> SegmentQueues:
        if segment not in self._segments:
            raise InternalError(f"there is no segment {segment} in this table")
        return self._segments[segment]

    def _pinned_queue(self, index: int) -> int:
        if index in self._soft:
            return SOFT
        return HELD if self._objects[index].pin == PIN_HARD else -1

    def _move(self, index: int) -> None:
        """Into the queue that its pin asks for, in each segment."""
        queue = self._pinned_queue(index)
        for place in self._objects[index].places:
            queues = self._segments[place.segment]
            queues.uses[index] = 0
            queues.move(index, MAIN if queue < 0 else queue)

    def _unlink(self, index: int, segment: int) -> None:
        stored = self._objects[index]
        self._segments[segment].leave_ghost(index, (stored.tenant, stored.key))
        self._tenant_bytes[stored.tenant] -= self._segments[segment].unlink(index)

    def _end_soft_pins(self, now_ms: int) -> None:
        ends = [(self._objects[i].soft_pin_end_ms, self._objects[i].object_id, i) for i in self._soft]
        for _, _, index in sorted(end for end in ends if end[0] <= now_ms)[:ENDED_PINS_MAX]:
            self._soft.discard(index)
            self._move(index)

    def _members(self, index: int) -> list[int]:
        stored = self._objects[index]
        return list(self._groups[stored.tenant, stored.group]) if stored.group else []

    def _may_go(self, index: int, now_ms: int, soft: bool) -> bool:
        hard = self._objects[index].pin == PIN_HARD
        return not hard and self._leases.get(index, 0) <= now_ms and (soft or index not in self._soft)

    def _leaving(self, members: list[int], segment: int) -> list[int]:
        here = [index for index in members if index in self._segments[segment].queue_of]
        ends = any(len(self._objects[index].places) == 1 for index in here)
        return members if ends else here

    def _restore(self, dump: Dump) -> None:
        if len(dump.objects) > self._objects_max:
            raise LimitExceeded("the dump has too many objects", field="objects_max", limit=self._objects_max)
        for stored in dump.objects:
            self.add(stored)
        moved: set[int] = set()
        for queue in dump.queues:
            for index, uses in queue.entries:
                if queue.queue in (SMALL, MAIN) and index in self._soft:
                    self._soft.discard(index)
                    moved.add(index)
                target = MAIN if queue.queue == SMALL and self._policy == 0 else queue.queue
                queues = self._segments[queue.segment]
                queues.move(index, target)
                queues.uses[index] = uses
