"""What closed segments and gone peers have moved: counters of an engine never go back."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, final

if TYPE_CHECKING:
    from moonpool.engine.peers import Peer
    from moonpool.engine.segment import Segment

#: Rows kept apart: beyond it the oldest peer's become those of `ELDERS`, so that peers that come and go for
#: months cost a bounded amount of memory.
ROWS_MAX: Final = 2_048
ELDERS: Final = "(earlier peers)"
#: What tells rows apart.
KEY: Final = ("transport", "peer", "path", "op")
Row = dict[str, Any]


def rows_of(segment: Segment) -> list[Row]:
    """What a segment's paths have moved until now: two rows for each path, READ and WRITE."""
    from moonpool.engine.measuring import paths_of

    return list(paths_of(segment))


def merge(into: Row, row: Mapping[str, Any]) -> None:
    """Adds a row's counts to those of another with the same bucket bounds."""
    for name in ("batches", "transfers", "bytes", "latency_sum_us"):
        into[name] += row[name]
    for status, count in row["errors"].items():
        into["errors"][status] = into["errors"].get(status, 0) + count
    pairs = zip(into["latency_us_buckets"], row["latency_us_buckets"], strict=True)
    into["latency_us_buckets"] = [(upper, count + more) for (upper, count), (_, more) in pairs]


@final
class PastTotals:
    """Thread-safe. A segment is measured live until it is added here: once, never twice."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closing: dict[int, Segment] = {}
        self._rows: dict[tuple[Any, ...], Row] = {}
        self._plain: dict[str, int] = {}

    def closing(self, segment: Segment) -> None:
        """The segment has left the engine's table, and its last batches are ending."""
        with self._lock:
            self._closing[id(segment)] = segment

    def closed(self, segment: Segment, *, last_of_peer: bool) -> None:
        """Nothing runs on it any more: its counts are taken over, with its peer's when it was the last."""
        with self._lock:
            if self._closing.pop(id(segment), None) is None:
                return
            if last_of_peer:
                for name, count in lane_counts(segment.peer).items():
                    self._count(name, count)
            for row in rows_of(segment):
                if any(row["errors"].values()) or row["transfers"]:
                    self._add(row)
            self._count("path_fallbacks", fallbacks_of(segment))

    def snapshot(self) -> tuple[list[Segment], list[Row], dict[str, int]]:
        """Segments that are closing, and copies of the rows and counters of what is over."""
        with self._lock:
            rows = [{**row, "errors": dict(row["errors"])} for row in self._rows.values()]
            return list(self._closing.values()), rows, dict(self._plain)

    def _count(self, name: str, count: int) -> None:
        self._plain[name] = self._plain.get(name, 0) + count

    def _add(self, row: Row) -> None:
        key = tuple(row[name] for name in KEY)
        known = self._rows.get(key)
        if known is not None:
            merge(known, row)
            return
        self._rows[key] = row
        while len(self._rows) > ROWS_MAX:
            oldest = next(key for key in self._rows if key[1] != ELDERS)
            old = self._rows.pop(oldest)
            self._add({**old, "peer": ELDERS, "path": 0})


def fallbacks_of(segment: Segment) -> int:
    """Transfers that a path of the segment gave up to the next one."""
    return sum(int(segment.native.path_stats(info.id)["fallbacks"]) for info in segment.paths)


def lane_counts(peer: Peer) -> dict[str, int]:
    """Lanes that were connected to a peer, and lost."""
    counts = peer.lanes.counters()
    return {"lanes_connected": counts["connects"], "lanes_lost": counts["lost"]}


def add_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sums by name."""
    total: dict[str, int] = {}
    for one in counts:
        for name, count in one.items():
            total[name] = total.get(name, 0) + count
    return total
