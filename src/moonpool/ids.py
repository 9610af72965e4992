"""Identities: integer handles with a generation, and the id of a running engine.

A handle is `generation << 32 | index`. Removing an entry raises its slot's generation, so a handle kept
too long is an error and never someone else's entry. Generations start at 1: the handle 0 is never valid.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Generic, NewType, TypeVar, final

from moonpool.errors import InternalError, LimitExceeded, StaleHandle, UsageError
from moonpool.units import U32_MAX, U64_MAX

#: Into the owner's table of regions (u64).
RegionHandle = NewType("RegionHandle", int)
#: Into the initiator's table of open segments (u64).
SegmentHandle = NewType("SegmentHandle", int)
#: Which path carries a slice (u16).
PathId = NewType("PathId", int)
#: How often a segment's memory was made anew on its node (u64).
Generation = NewType("Generation", int)
#: One run of one engine: 16 random bytes, never all zero.
InstanceId = NewType("InstanceId", bytes)

#: "The engine chooses" in an array of path ids.
AUTO_PATH: Final = PathId(0xFFFF)
INSTANCE_BYTES: Final = 16
#: In a hello: any instance will do.
ANY_INSTANCE: Final = InstanceId(bytes(INSTANCE_BYTES))
NULL_HANDLE: Final = 0
GENERATION_MAX: Final = U32_MAX

_Entry = TypeVar("_Entry")


def pack_handle(generation: int, index: int) -> int:
    """The handle of a slot; raises `UsageError` when a part does not fit or the generation is 0."""
    if not 1 <= generation <= GENERATION_MAX or not 0 <= index <= U32_MAX:
        raise UsageError(f"no handle has generation {generation} and index {index}")
    return generation << 32 | index


def unpack_handle(handle: int) -> tuple[int, int]:
    """(generation, index) of a handle; raises `StaleHandle` for what can never be one."""
    if not 0 < handle <= U64_MAX or handle >> 32 == 0:
        raise StaleHandle(f"{handle} is not a handle; take one from an open segment or region")
    return handle >> 32, handle & U32_MAX


def new_instance_id(random_bytes: Callable[[int], bytes] = os.urandom) -> InstanceId:
    """A fresh instance id; `random_bytes(n)` gives n bytes, from the system unless a simulator gives them."""
    for _ in range(4):
        made = random_bytes(INSTANCE_BYTES)
        if len(made) == INSTANCE_BYTES and any(made):
            return InstanceId(made)
    raise InternalError("the random source gave no usable instance id in 4 tries")


def check_instance_id(raw: bytes) -> InstanceId:
    """Takes 16 bytes, not all zero, as an instance id; raises `UsageError` otherwise."""
    if len(raw) != INSTANCE_BYTES or not any(raw):
        raise UsageError(f"an instance id is {INSTANCE_BYTES} bytes, not all zero; got {len(raw)} bytes")
    return InstanceId(bytes(raw))


@final
class HandleTable(Generic[_Entry]):
    """A bounded table of entries found by handle: O(1) insert, get and remove.

    Slots are reused oldest first, and a slot whose generation is used up is retired. Not thread-safe: the
    owner holds a lock or keeps the table to one thread. `limit_field` names the config field in errors.
    """

    __slots__ = ("_capacity", "_free", "_generations", "_limit_field", "_live", "_slots")

    def __init__(self, capacity: int, limit_field: str) -> None:
        if not 1 <= capacity <= U32_MAX:
            raise UsageError(f"a table cannot hold {capacity} entries", field=limit_field)
        self._capacity = capacity
        self._limit_field = limit_field
        # A 1-tuple per live slot, so that an entry may itself be None.
        self._slots: list[tuple[_Entry] | None] = []
        self._generations: list[int] = []
        self._free: deque[int] = deque()
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def insert(self, entry: _Entry) -> int:
        """Stores an entry and returns its handle; raises `LimitExceeded` when the table is full."""
        if self._free:
            index = self._free.popleft()
        elif len(self._slots) < self._capacity:
            index = len(self._slots)
            self._slots.append(None)
            self._generations.append(1)
        else:
            raise LimitExceeded(
                f"all {self._capacity} slots are taken; remove an entry or raise {self._limit_field}",
                field=self._limit_field,
                limit=self._capacity,
            )
        if self._slots[index] is not None:
            raise InternalError("a slot was free and live at once", index=index)
        self._slots[index] = (entry,)
        self._live += 1
        return pack_handle(self._generations[index], index)

    def get(self, handle: int) -> _Entry:
        """The entry of a live handle; raises `StaleHandle` for any other number."""
        return self._find(handle)[1]

    def remove(self, handle: int) -> _Entry:
        """Takes an entry out and makes its handle stale; raises `StaleHandle` when it already is."""
        index, entry = self._find(handle)
        self._slots[index] = None
        self._live -= 1
        if self._generations[index] < GENERATION_MAX:
            self._generations[index] += 1
            self._free.append(index)
        return entry

    def items(self) -> Iterator[tuple[int, _Entry]]:
        """Live (handle, entry) pairs by slot, as they stood at the call."""
        pairs = [
            (pack_handle(generation, index), slot[0])
            for index, (generation, slot) in enumerate(zip(self._generations, self._slots, strict=True))
            if slot is not None
        ]
        return iter(pairs)

    def check(self) -> None:
        """Asserts the table's invariants; raises `InternalError` that names the failing slot."""
        free = set(self._free)
        if len(free) != len(self._free) or len(self._slots) > self._capacity:
            raise InternalError("the free list repeats a slot, or the table outgrew its capacity")
        if self._live != sum(slot is not None for slot in self._slots):
            raise InternalError(f"the table counts {self._live} live slots and has another number")
        for index, (generation, slot) in enumerate(zip(self._generations, self._slots, strict=True)):
            retired = generation == GENERATION_MAX and slot is None
            if not retired and (slot is not None) == (index in free):
                raise InternalError("a slot must be either live or free", index=index)

    def _find(self, handle: int) -> tuple[int, _Entry]:
        generation, index = unpack_handle(handle)
        slot = self._slots[index] if index < len(self._slots) else None
        if slot is None or self._generations[index] != generation:
            raise StaleHandle(handle=handle)
        return index, slot[0]
