"""Totals of closed segments: each segment counts once, sums never go back, months of peers stay bounded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from moonpool.engine import past
from moonpool.engine.measuring import added_up, paths_of
from moonpool.engine.past import ELDERS, PastTotals


@dataclass(frozen=True)
class Info:
    id: int = 0
    transport: str = "tcp"


@dataclass
class Native:
    transfers: int

    def path_stats(self, _path: int) -> dict[str, Any]:
        one = {
            "batches": self.transfers,
            "transfers": self.transfers,
            "bytes": self.transfers * 10,
            "latency_sum_ns": self.transfers * 1_000,
            "errors": {4: 1} if self.transfers else {},
            "latency_ns_buckets": [(1_000, self.transfers), (2_000, 0)],
        }
        nothing = {
            **one,
            **dict.fromkeys(("batches", "transfers", "bytes", "latency_sum_ns"), 0),
            "errors": {},
        }
        return {
            "fallbacks": 2,
            "READ": one,
            "WRITE": {**nothing, "latency_ns_buckets": [(1_000, 0), (2_000, 0)]},
        }


@dataclass
class Lanes:
    def counters(self) -> dict[str, int]:
        return {"connects": 3, "lost": 1}


@dataclass
class Peer:
    lanes: Lanes = field(default_factory=Lanes)


@dataclass
class Segment:
    endpoint: str
    native: Native
    paths: tuple[Info, ...] = (Info(),)
    peer: Peer = field(default_factory=Peer)


def close(totals: PastTotals, endpoint: str, transfers: int, *, last: bool = True) -> None:
    segment: Any = Segment(endpoint, Native(transfers))
    totals.closing(segment)
    totals.closed(segment, last_of_peer=last)


def test_a_segment_is_live_then_past_and_never_both() -> None:
    totals = PastTotals()
    segment: Any = Segment("h:1", Native(5))
    assert totals.snapshot() == ([], [], {})
    totals.closing(segment)
    live, rows, _ = totals.snapshot()
    assert (live, rows) == ([segment], [])
    totals.closed(segment, last_of_peer=False)
    totals.closed(segment, last_of_peer=True)  # once is enough
    live, rows, counts = totals.snapshot()
    assert live == []
    assert [(row["op"], row["transfers"], row["bytes"]) for row in rows] == [("READ", 5, 50)]
    assert counts == {"path_fallbacks": 2}


def test_what_came_again_is_added_up() -> None:
    totals = PastTotals()
    for transfers in (5, 7):
        close(totals, "h:1", transfers)
    _, rows, counts = totals.snapshot()
    (row,) = rows
    assert (row["transfers"], row["latency_sum_us"], row["errors"]) == (12, 12.0, {"PEER_GONE": 2})
    assert row["latency_us_buckets"] == [(1.0, 12), (2.0, 0)]
    assert counts == {"lanes_connected": 6, "lanes_lost": 2, "path_fallbacks": 4}
    again: Any = Segment("h:1", Native(1))
    whole = {row["op"]: row["transfers"] for row in added_up([*rows, *paths_of(again)])}
    assert whole == {"READ": 13, "WRITE": 0}
    assert totals.snapshot()[1][0]["transfers"] == 12  # what is shown is a copy


def test_months_of_peers_are_bounded_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past, "ROWS_MAX", 4)
    totals = PastTotals()
    for peer in range(50):
        close(totals, f"h:{peer}", 1)
    _, rows, _ = totals.snapshot()
    assert len(rows) == 4
    assert sum(row["transfers"] for row in rows) == 50
    assert {row["peer"] for row in rows} == {ELDERS, "h:47", "h:48", "h:49"}


def test_paths_that_moved_nothing_leave_nothing() -> None:
    totals = PastTotals()
    close(totals, "h:1", 0)
    assert totals.snapshot()[1] == []
