"""Room in a directory's log: blocks of whole units, reused by size, merged when none is large enough."""

from __future__ import annotations

from typing import Final, final

from moonpool.errors import InternalError

#: Blocks start on this and are rounded up to it.
LOG_UNIT: Final = 16


def rounded(size_bytes: int) -> int:
    """What a block of this size takes up."""
    return -(-size_bytes // LOG_UNIT) * LOG_UNIT


@final
class LogSpace:
    """Space [0, size_bytes). `take` costs O(1) but for the rare merge of all free blocks."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes // LOG_UNIT * LOG_UNIT
        self._fresh = 0
        self._free: dict[int, list[int]] = {}
        self._free_bytes = 0
        #: Blocks that were free after the last merge, and how many came back since.
        self._merged_blocks = 0
        self._returned = 0

    @property
    def free_bytes(self) -> int:
        """Bytes that no block takes up, in pieces perhaps."""
        return self.size_bytes - self._fresh + self._free_bytes

    def take(self, size_bytes: int) -> int:
        """Where a block of this size begins; -1 when there is no room for it."""
        size = rounded(size_bytes)
        if size == 0:
            return 0
        found = self._reuse(size)
        # A full log must not be merged for each block: only when enough came back since the last time.
        if found < 0 and self.free_bytes >= size and self._returned * 4 > self._merged_blocks:
            self._merge()
            found = self._reuse(size)
        return found

    def give_back(self, offset: int, size_bytes: int) -> None:
        """A block as it was taken is free again."""
        size = rounded(size_bytes)
        if size == 0:
            return
        if offset % LOG_UNIT or offset + size > self._fresh:
            raise InternalError(f"no log block of {size} bytes begins at {offset}")
        self._free.setdefault(size, []).append(offset)
        self._free_bytes += size
        self._returned += 1

    def clear(self) -> None:
        """Everything is free."""
        self._fresh = 0
        self._free.clear()
        self._free_bytes = self._merged_blocks = self._returned = 0

    def _reuse(self, size: int) -> int:
        same = self._free.get(size)
        if same:
            self._free_bytes -= size
            return same.pop()
        if self._fresh + size <= self.size_bytes:
            self._fresh += size
            return self._fresh - size
        larger = min((other for other, blocks in self._free.items() if other > size and blocks), default=0)
        if not larger:
            return -1
        offset = self._free[larger].pop()
        self._free.setdefault(larger - size, []).append(offset + size)
        self._free_bytes -= size
        return offset

    def _merge(self) -> None:
        """Joins neighbours; free space at the end becomes fresh again."""
        blocks = sorted((offset, size) for size, offsets in self._free.items() for offset in offsets)
        merged: list[tuple[int, int]] = []
        for offset, size in blocks:
            if merged and merged[-1][0] + merged[-1][1] == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        if merged and sum(merged[-1]) == self._fresh:
            self._fresh = merged.pop()[0]
        self._free = {}
        for offset, size in merged:
            self._free.setdefault(size, []).append(offset)
        self._free_bytes = sum(size for _, size in merged)
        self._merged_blocks, self._returned = len(merged), 0
