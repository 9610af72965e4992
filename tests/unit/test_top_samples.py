"""`moonpool top`: pages to samples, two pages to rates, and what restarts and nonsense do to them."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.cli.top import shown
from moonpool.cli.top_samples import ORDERS, PathKey, parse_page, rates
from moonpool.metrics import render_prometheus

KEY = PathKey("a", "tcp", "h:1", "0", "READ")
Totals = tuple[int, int, int, list[tuple[float, int]]]


def page(totals: dict[PathKey, Totals], at_s: float, started: float = 1.0) -> str:
    """A page as an engine renders it."""
    paths = [
        {
            "transport": key.transport,
            "peer": key.peer,
            "path": int(key.path),
            "op": key.op,
            "transfers": transfers,
            "bytes": n_bytes,
            "errors": {"PEER_GONE": errors} if errors else {},
            "latency_us_buckets": buckets,
            "latency_sum_us": 0,
        }
        for key, (transfers, n_bytes, errors, buckets) in totals.items()
    ]
    snapshot = {"paths": paths, "counters": {}, "gauges": {"start_time_seconds": started}}
    return render_prometheus(snapshot, labels={"engine": "a"})


def test_rates_come_from_two_pages() -> None:
    before = parse_page(page({KEY: (10, 1_000, 0, [(8.0, 10)])}, 0), 5.0)
    after = parse_page(page({KEY: (30, 5_000, 4, [(8.0, 10), (1_000.0, 20)])}, 0), 7.0)
    (rate,) = rates("s", before, after)
    assert (rate.key, rate.source) == (KEY, "s")
    assert (rate.bytes_per_s, rate.transfers_per_s, rate.errors_per_s) == (2_000.0, 10.0, 2.0)
    assert rate.bytes_total == 5_000
    # Only the twenty new batches count; a page's buckets are powers of two nanoseconds.
    assert rate.p50_us is not None
    assert 500 < rate.p50_us < 1_100
    assert rate.to_dict()["transport"] == "tcp"


def test_the_first_page_tells_totals_and_no_rate() -> None:
    (rate,) = rates("s", None, parse_page(page({KEY: (10, 1_000, 0, [])}, 0), 5.0))
    assert (rate.bytes_per_s, rate.transfers_per_s, rate.bytes_total, rate.p50_us) == (0.0, 0.0, 1_000, None)


@pytest.mark.parametrize(
    ("then", "now", "started"),
    [
        ((30, 5_000, 0), (10, 800, 0), (1.0, 1.0)),  # a total went back
        ((30, 500, 0), (40, 800, 0), (1.0, 9.0)),  # all grew, but the engine is another
    ],
)
def test_a_restarted_engine_counts_from_zero(
    then: tuple[int, int, int], now: tuple[int, int, int], started: tuple[float, float]
) -> None:
    before = parse_page(page({KEY: (*then, [(8.0, then[0])])}, 0, started[0]), 1.0)
    after = parse_page(page({KEY: (*now, [(8.0, now[0])])}, 0, started[1]), 2.0)
    (rate,) = rates("s", before, after)
    assert rate.bytes_per_s == now[1]
    assert rate.transfers_per_s == now[0]
    assert rate.p99_us is not None


def test_new_paths_count_and_old_ones_go() -> None:
    other = PathKey("a", "shm", "h:2", "1", "WRITE")
    before = parse_page(page({KEY: (1, 10, 0, [])}, 0), 1.0)
    after = parse_page(page({other: (2, 20, 0, [])}, 0), 3.0)
    (rate,) = rates("s", before, after)
    assert (rate.key, rate.bytes_per_s) == (other, 10.0)


def test_labels_are_unescaped() -> None:
    text = 'moonpool_transfer_bytes_total{engine="a\\"b\\\\n\\n",transport="tcp",peer="{x=\\"1\\"}"} 5\n'
    (key,) = parse_page(text, 0.0).paths
    assert (key.engine, key.peer) == ('a"b\\n\n', '{x="1"}')


def test_what_a_page_says_does_not_move_the_cursor() -> None:
    assert shown("10.0.0.1:5") == "10.0.0.1:5"
    assert shown("\x1b[2J\x1b]0;title\x07x\n") == "?[2J?]0;title?x?"


@pytest.mark.parametrize(
    "line",
    [
        "moonpool_transfers_total",
        "moonpool_transfers_total{ 5",
        "moonpool_transfers_total x",
        "moonpool_transfers_total NaN",
        'moonpool_transfer_latency_seconds_bucket{le="x"} 5',
        "# moonpool_transfers_total 5",
        "other_total 5",
    ],
)
def test_what_makes_no_sense_is_left_out(line: str) -> None:
    found = parse_page(line, 0.0)
    assert all(total.bytes == total.transfers == 0 and not total.buckets for total in found.paths.values())


@given(st.text(max_size=300), st.text(max_size=300))
def test_any_page_gives_rates(before: str, after: str) -> None:
    prefix = "moonpool_transfer"
    pages = [
        parse_page(prefix + prefix.join(text.splitlines(keepends=True)), 0.0) for text in (before, after)
    ]
    for rate in rates("s", *pages):
        assert not math.isnan(rate.bytes_per_s)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(0, 9)), max_size=6),
    st.sampled_from(sorted(ORDERS)),
)
def test_every_order_is_total_and_names_break_ties(rows: list[tuple[str, int, int]], order: str) -> None:
    totals: dict[PathKey, Totals] = {
        PathKey("a", "tcp", peer, str(number), "READ"): (transfers, transfers * 7, 0, [])
        for number, (peer, transfers, _) in enumerate(rows)
    }
    empty = parse_page(page({}, 0), 0.0)
    found = rates("s", empty, parse_page(page(totals, 0), 1.0))
    once = sorted(found, key=ORDERS[order])
    found.reverse()
    assert once == sorted(found, key=ORDERS[order])
    if order == "bandwidth":
        assert all(a.bytes_per_s >= b.bytes_per_s for a, b in itertools.pairwise(once))
