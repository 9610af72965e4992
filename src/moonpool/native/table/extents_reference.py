"""The plain twin of `extents`: a sorted list of free ranges, first fit. Its tests' oracle."""

from __future__ import annotations

import struct
from bisect import bisect_right
from itertools import pairwise
from typing import Final, final

from moonpool.errors import InternalError, UsageError
from moonpool.native.table.stored import LINE_BYTES, PAGE_BYTES, extent_bytes

CAPACITY_MAX: Final = 1 << 41


@final
class ReferenceExtents:
    """Free space of one segment of `capacity_bytes`, none of which is free until `add_range`."""

    def __init__(self, capacity_bytes: int) -> None:
        if not 0 < capacity_bytes <= CAPACITY_MAX or capacity_bytes % LINE_BYTES:
            raise UsageError(
                "capacity_bytes must be a multiple of 64 up to 2^41",
                field="capacity_bytes",
                value=str(capacity_bytes),
            )
        self.capacity_bytes = capacity_bytes
        #: Start and end of each free range, ascending; they never touch.
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._given: dict[int, int] = {}

    def add_range(self, offset: int, length: int) -> None:
        self._check_inside(offset, length)
        if any(offset < start + size and start < offset + length for start, size in self._given.items()):
            raise InternalError(f"the range at {offset} is partly given")
        self._insert(offset, length)

    def allocate(self, size: int) -> int:
        length = extent_bytes(size)
        unit = PAGE_BYTES if length >= PAGE_BYTES else LINE_BYTES
        for start, end in zip(self._starts, self._ends, strict=True):
            offset = -(-start // unit) * unit
            if offset + length <= end:
                self.take(offset, size)
                return offset
        return -1

    def free(self, offset: int, size: int) -> None:
        length = extent_bytes(size)
        if self._given.get(offset) != length:
            raise InternalError(f"no extent of {length} bytes starts at {offset}")
        del self._given[offset]
        self._insert(offset, length)

    def take(self, offset: int, size: int) -> None:
        length = extent_bytes(size)
        unit = PAGE_BYTES if length >= PAGE_BYTES else LINE_BYTES
        at = bisect_right(self._starts, offset) - 1
        if at < 0 or offset % unit or offset + length > self._ends[at]:
            raise InternalError(f"the {length} bytes at {offset} are not all free")
        start, end = self._starts.pop(at), self._ends.pop(at)
        if offset + length < end:
            self._starts.insert(at, offset + length)
            self._ends.insert(at, end)
        if start < offset:
            self._starts.insert(at, start)
            self._ends.insert(at, offset)
        self._given[offset] = length

    def take_all(self, packed: bytes) -> None:
        if len(packed) % 24:
            raise InternalError("these are no packed places")
        for offset, length, _ in struct.iter_unpack("<3Q", packed):
            if extent_bytes(length) != length:
                raise InternalError(f"{length} bytes are no length of an extent")
            self.take(offset, length)

    def free_bytes(self) -> int:
        """Bytes that may be given now, in whatever pieces."""
        return sum(self._ends) - sum(self._starts)

    def largest_free(self) -> int:
        """The largest payload that fits: a whole number of pages, or of 64 where not one page is free."""
        pages = lines = 0
        for start, end in zip(self._starts, self._ends, strict=True):
            pages = max(pages, end // PAGE_BYTES * PAGE_BYTES - -(-start // PAGE_BYTES) * PAGE_BYTES)
            lines = max(lines, min(end - start, PAGE_BYTES - LINE_BYTES))
        return pages or lines

    def extents(self) -> int:
        return len(self._given)

    def check(self) -> None:
        for at, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if not start < end <= self.capacity_bytes or (at and self._ends[at - 1] >= start):
                raise InternalError(f"the free range at {start} is broken")
        everything = sorted([*zip(self._starts, self._ends, strict=True), *self._given_ranges()])
        for (_, end), (start, _) in pairwise(everything):
            if start < end:
                raise InternalError(f"two ranges share the bytes at {start}")

    def _given_ranges(self) -> list[tuple[int, int]]:
        return [(offset, offset + length) for offset, length in self._given.items()]

    def _check_inside(self, offset: int, length: int) -> None:
        whole = offset % LINE_BYTES == 0 and length % LINE_BYTES == 0
        if not whole or offset < 0 or length <= 0 or offset + length > self.capacity_bytes:
            raise InternalError(f"the {length} bytes at {offset} are no range of this segment")

    def _insert(self, offset: int, length: int) -> None:
        """Adds a range to what is free and merges it with its neighbours."""
        end = offset + length
        at = bisect_right(self._starts, offset)
        before, after = at - 1, at
        if (before >= 0 and self._ends[before] > offset) or (
            after < len(self._starts) and self._starts[after] < end
        ):
            raise InternalError(f"the range at {offset} is partly free already")
        if after < len(self._starts) and self._starts[after] == end:
            end = self._ends.pop(after)
            self._starts.pop(after)
        if before >= 0 and self._ends[before] == offset:
            self._ends[before] = end
        else:
            self._starts.insert(at, offset)
            self._ends.insert(at, end)
