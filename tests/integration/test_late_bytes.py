"""The late-bytes program in its short form, and that it notices what it is there to notice."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from moonpool.bench.fault_proxy import FaultProxy
from moonpool.bench.late_bytes import plan_jobs
from moonpool.bench.late_bytes_cases import (
    ENDINGS,
    FILL,
    WAYS,
    Ledger,
    Tally,
    WayPlan,
    draw_case,
    gaps_of,
)
from moonpool.bench.late_bytes_station import Station

TIMEOUT_S = 100.0
SEED = 23
SMALL_WAY = WayPlan("tcp-blocking", "tcp", "blocking", slot_bytes=128 << 10, group_cases=3)


def test_a_hundred_and_fifty_cases() -> None:
    command = [sys.executable, "-P", "-m", "moonpool.bench.late_bytes", "--cases=150", f"--seed={SEED}"]
    ended = subprocess.run(
        [*command, "--stations=2", "--processes=1", "--json"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, f"seed {SEED}: {ended.stdout}\n{ended.stderr}"
    told = json.loads(ended.stdout)
    assert told["cases"] == 150
    assert told["violations"] == 0
    assert {name.split()[0] for name in told["by_way"]} == {way.name for way in WAYS}
    assert {name.split()[1] for name in told["by_way"]} == set(ENDINGS)
    assert told["ended"]["TIMED_OUT"] > 0
    assert told["ended"]["CANCELLED"] > 0
    # Without these the run would have proved nothing.
    assert told["held_when_ended"] > 0
    assert told["torn"] > 0


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_pieces_are_disjoint_and_the_gaps_are_the_rest(way: WayPlan) -> None:
    for number in range(200):
        case = draw_case(f"{SEED}:{number}", way)
        assert case == draw_case(f"{SEED}:{number}", way)
        covered = sum(stop - start for start, stop in gaps_of(case, way.slot_bytes)) + case.total_bytes
        assert covered == way.slot_bytes
        assert all(start <= stop for start, stop in gaps_of(case, way.slot_bytes)), f"seed {SEED}:{number}"
        assert all(piece.offset + piece.length <= way.slot_bytes for piece in case.pieces)
        assert all(piece.length > 0 for piece in case.pieces)


@pytest.mark.parametrize(("cases", "stations"), [(1, 1), (7, 4), (150, 2), (10_000, 4)])
def test_jobs_are_all_cases_and_each_has_its_own_seed(cases: int, stations: int) -> None:
    jobs = plan_jobs(cases, SEED, stations)
    assert sum(job.count for job in jobs) == cases
    assert all(job.count > 0 for job in jobs)
    assert len({job.seed for job in jobs}) == len(jobs)


def test_the_ledger_tells_which_slot_changed() -> None:
    view = memoryview(bytearray(4096))
    ledger = Ledger(view, 1024)
    for slot in range(4):
        ledger.remember(slot)
    assert ledger.changed() == []
    view[2 * 1024 + 1023] = 1
    assert ledger.changed() == [2]
    ledger.forget()
    assert ledger.changed() == []


def test_tallies_add_up() -> None:
    whole, part = Tally(), Tally()
    part.cases["a"] += 2
    part.violate("first")
    part.end_late_ms_max = 3.0
    whole.add(part)
    whole.add(part)
    assert whole.cases["a"] == 4
    assert (whole.violation_count, whole.violations) == (2, ["first", "first"])
    assert whole.end_late_ms_max == 3.0


def test_a_byte_that_lands_late_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine that did not tear its lane down would do is done to the buffer by hand."""
    with Station(SMALL_WAY, f"{SEED}:late") as station:
        heal = FaultProxy.heal

        def heal_and_write(proxy: FaultProxy) -> None:
            heal(proxy)
            slot = station.ledger.slot(0)
            slot[7] = slot[7] ^ 1

        station.run(0, 1)
        assert station.tally.violations == []
        monkeypatch.setattr(FaultProxy, "heal", heal_and_write)
        station.run(0, 1)
    assert station.tally.violation_count == 2  # after the late bytes, and with the group
    assert "changed after it had ended" in station.tally.violations[0]


def test_a_byte_that_lands_with_the_group_is_noticed() -> None:
    with Station(SMALL_WAY, f"{SEED}:group") as station:
        station.run_case(0, 0)
        station.ledger.slot(0)[0] = FILL ^ 1
        station.end_group()
    assert station.tally.violation_count == 1
    assert "before the group's end" in station.tally.violations[0]
