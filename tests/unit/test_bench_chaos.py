"""The chaos run's plan, record and judge, without a pool."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.bench.chaos_history import content_digest
from moonpool.bench.chaos_plan import STRIKES, make_plan
from moonpool.bench.chaos_record import Recorder, is_within, judge, read_lines

COUNTS = {"node": 3, "master": 2, "redis": 1, "client": 4}
OLD, NEW = content_digest(b"old").hex(), content_digest(b"new").hex()


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_has_its_events_within_its_time(seed: int) -> None:
    plan = make_plan(seed, 120.0, COUNTS)
    assert len(plan) >= 40
    assert plan == make_plan(seed, 120.0, COUNTS)
    assert plan != make_plan(seed + 1, 120.0, COUNTS)
    assert all(0 < strike.at_s < strike.at_s + strike.lasts_s + 1e-9 < 120.0 for strike in plan)
    assert all(strike.what in STRIKES[strike.kind] for strike in plan)
    assert all(strike.number < COUNTS[strike.kind] for strike in plan)


def test_plans_strike_everything() -> None:
    plans = [make_plan(seed, 120.0, COUNTS) for seed in range(10)]
    struck = {(strike.kind, strike.what) for plan in plans for strike in plan}
    assert struck == {(kind, what) for kind, ways in STRIKES.items() for what in ways}


@pytest.mark.parametrize("kind", ["node", "master", "redis"])
@pytest.mark.parametrize("seed", range(20))
def test_one_of_a_kind_at_a_time(seed: int, kind: str) -> None:
    until = 0.0
    for strike in make_plan(seed, 120.0, COUNTS):
        if strike.kind == kind:
            assert strike.at_s >= until
            until = strike.at_s + strike.lasts_s


def test_a_record_is_read_back_in_order_and_half_lines_are_left_out(tmp_path: Path) -> None:
    first, second = Recorder(tmp_path / "a", "c1"), Recorder(tmp_path / "b", "c2")
    first.note("put_began", 1, "k", OLD)
    assert is_within(tmp_path / "a", "put_began")
    second.note("remove_began", "7", "k")
    first.note("put_ended", 1, "stored", False)
    assert not is_within(tmp_path / "a", "put_began")
    assert not is_within(tmp_path / "c", "put_began")
    first.close()
    second.close()
    with (tmp_path / "b").open("ab") as file:
        file.write(b'[99, "remove_en')
    lines = read_lines([tmp_path / "a", tmp_path / "b"])
    assert [line[1] for line in lines] == ["put_began", "remove_began", "put_ended"]


def test_a_good_history_holds() -> None:
    verdict = judge(
        [
            [1, "put_began", "c1", 1, "k", OLD],
            [2, "got", "c1", "k", 0, "miss", ""],
            [3, "put_ended", "c1", 1, "stored", False],
            [5, "got", "c1", "k", 4, "hit", OLD],
            [6, "put_began", "c1", 2, "k", NEW],
            [7, "got", "c1", "k", 6, "hit", OLD],
            [8, "put_ended", "c1", 2, "stored", True],
            [9, "view_began", "c1", "3"],
            [10, "viewed", "c1", "3", "k", 9, NEW],
            [11, "view_ended", "c1", "3", "kept"],
            [12, "lasted", "c1", "view", 0.5],
            [13, "failed", "c1", "get", "DataLost", "no replica"],
        ]
    )
    assert verdict.broken == []
    assert verdict.counts["get hit"] == 2
    assert verdict.longest == (0.5, "view")
    assert verdict.errors == {"get DataLost": "no replica"}
    assert (verdict.in_mid_put, verdict.in_mid_view) == (0, 0)


@pytest.mark.parametrize(
    ("last", "text"),
    [
        ([9, "got", "c1", "k", 6, "hit", OLD], "erased"),
        ([9, "got", "c1", "k", 6, "hit", content_digest(b"torn").hex()], "nobody put"),
        ([9, "viewed", "c1", "3", "k", 6, OLD], "erased"),
        ([9, "view_ended", "c1", "3", "changed"], "changed under a view"),
    ],
)
def test_a_bad_history_is_seen(last: list[object], text: str) -> None:
    history = [
        [1, "put_began", "c1", 1, "k", OLD],
        [2, "put_ended", "c1", 1, "stored", False],
        [3, "put_began", "c1", 2, "k", NEW],
        [5, "put_ended", "c1", 2, "stored", True],
    ]
    verdict = judge([*history, last])
    assert len(verdict.broken) == 1
    assert text in verdict.broken[0]
    assert verdict.counts["BROKEN"] == 1


def test_what_was_begun_and_not_ended_was_in_the_middle() -> None:
    verdict = judge(
        [
            [1, "put_began", "c1", 1, "k", OLD],
            [2, "view_began", "c1", "3"],
            [3, "put_began", "c1", 2, "k", NEW],
        ]
    )
    assert (verdict.in_mid_put, verdict.in_mid_view) == (2, 1)
