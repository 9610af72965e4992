"""Extents that were given back and are not free yet.

States of an entry: *told* (a RETIRE or FENCE effect was queued, as number `effect` of the node's join; 0: the
node is away and will be told after its report) → *released* (the node acknowledged that effect and said so)
→ free, once every lease has ended. The fact is durable by then, since effects wait for their facts.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final


@final
@dataclass(slots=True)
class Quarantined:
    """One extent. With an `object_id` it was an object's, for `reason`; else a put's that may still write."""

    segment_id: int
    slot: int
    offset: int
    size: int
    #: Cluster time before which readers may hold leases on it.
    not_before_ms: int
    #: Number of the effect that told the node.
    effect: int = 0
    object_id: int = 0
    reason: int = 0
    put_id: int = 0
    instance: bytes = b""
    deadline_ms: int = 0
    released: bool = False


@final
class Releases:
    """Entries that nodes have released and whose leases have not ended, by the end of those."""

    __slots__ = ("_heap", "_number")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Quarantined]] = []
        self._number = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, entry: Quarantined) -> None:
        """The node released the entry."""
        entry.released = True
        self._number += 1
        heapq.heappush(self._heap, (entry.not_before_ms, self._number, entry))

    def due(self, now_ms: int) -> Iterator[Quarantined]:
        """Takes out the entries whose leases have ended."""
        while self._heap and self._heap[0][0] <= now_ms:
            yield heapq.heappop(self._heap)[2]

    def drop_segment(self, segment_id: int) -> None:
        """Forgets the entries of a segment that is gone."""
        self._heap = [row for row in self._heap if row[2].segment_id != segment_id]
        heapq.heapify(self._heap)
