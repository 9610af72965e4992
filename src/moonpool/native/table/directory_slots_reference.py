"""The plain twin of `directory_slots`: a set. Its tests' oracle."""

from __future__ import annotations

import heapq
import struct
from typing import Final, final

from moonpool.errors import InternalError, UsageError

SLOTS_MAX: Final = 1 << 30


@final
class ReferenceSlots:
    """`count` slots of one segment's directory, none free at first; the lowest free one is given first."""

    def __init__(self, count: int) -> None:
        if not 1 <= count <= SLOTS_MAX:
            raise UsageError(f"there can be 1 to {SLOTS_MAX} slots", field="slots", value=str(count))
        self._count = count
        self._taken: set[int] = set()
        self._free: set[int] = set()
        #: The same and perhaps some that are free no more, lowest first.
        self._heap: list[int] = []

    def add_range(self, first: int, count: int) -> None:
        added = range(first, first + count)
        if first < 0 or count < 1 or first + count > self._count:
            raise InternalError(f"there are no slots {first} to {first + count - 1}")
        if not self._taken.isdisjoint(added) or not self._free.isdisjoint(added):
            raise InternalError(f"slots {first} to {first + count - 1} are partly added already")
        self._free.update(added)
        self._heap = sorted(self._free)

    def allocate(self) -> int:
        while self._heap:
            slot = heapq.heappop(self._heap)
            if slot in self._free:
                self.take(slot)
                return slot
        return -1

    def free(self, slot: int) -> None:
        if slot not in self._taken:
            raise InternalError(f"slot {slot} is not taken")
        self._taken.remove(slot)
        self._free.add(slot)
        heapq.heappush(self._heap, slot)

    def take(self, slot: int) -> None:
        if slot not in self._free:
            raise InternalError(f"slot {slot} is not free")
        self._free.remove(slot)
        self._taken.add(slot)

    def take_all(self, packed: bytes) -> None:
        if len(packed) % 24:
            raise InternalError("these are no packed places")
        for _, _, slot in struct.iter_unpack("<3Q", packed):
            self.take(slot)

    def used(self) -> int:
        """How many slots are given."""
        return len(self._taken)

    def free_count(self) -> int:
        """How many slots may be given now."""
        return len(self._free)
