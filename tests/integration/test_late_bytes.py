"""The late-bytes program in its short form, and that it notices what it is there to notice."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from moonpool import Engine, Op, PeerStalled, Segment, Status, TransferTimeout
from moonpool.bench.fault_proxy import Fault, FaultProxy
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
from moonpool.engine.batch import END_BOUND_S

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


@contextlib.contextmanager
def unanswered(**config: Any) -> Iterator[tuple[Engine, Segment, int]]:
    """An initiator whose lanes get no answer to their hello, a segment of its peer, and a region's handle."""
    with Engine() as target, FaultProxy(target.endpoint) as proxy:
        target.allocate(4096)
        with Engine(transports=("tcp",), handshake_timeout_ms=60_000, **config) as initiator:
            segment = initiator.open(proxy.endpoint)
            proxy.set_fault(Fault(action="stall", kind="lane", direction="down"))
            yield initiator, segment, segment.regions[0].handle
            assert proxy.wait_held(1, TIMEOUT_S), "no hello was on its way"
            initiator.close_segment(segment)


def test_a_cancel_ends_a_read_whose_lane_is_being_made() -> None:
    with unanswered(stall_timeout_ms=60_000) as (initiator, segment, handle):
        batch = initiator.submit(Op.READ, segment, bytearray(64), handle, 0)
        assert not batch.wait(0.05)
        started = time.monotonic()
        assert batch.cancel()
        # Far below the minute that the hello may take.
        assert time.monotonic() - started < END_BOUND_S
        assert list(batch.status) == [Status.CANCELLED]


def test_a_deadline_that_passes_while_a_lane_is_made_is_a_timeout() -> None:
    with unanswered() as (initiator, segment, handle), pytest.raises(TransferTimeout):
        initiator.read(segment, handle, 0, bytearray(64), timeout_s=0.05)


def test_a_peer_that_does_not_answer_a_lane_has_stalled() -> None:
    with unanswered(stall_timeout_ms=50) as (initiator, segment, handle), pytest.raises(PeerStalled):
        initiator.read(segment, handle, 0, bytearray(64), timeout_s=TIMEOUT_S)


def test_an_ended_batch_lets_go_of_its_segment() -> None:
    with Engine() as target, Engine(transports=("tcp",)) as initiator:
        target.allocate(4096)
        segment = initiator.open(target.endpoint)
        waited = initiator.submit(Op.READ, segment, bytearray(64), segment.regions[0].handle, 0).result()
        dropped = initiator.submit(Op.READ, segment, bytearray(64), segment.regions[0].handle, 0)
        assert waited.native.segment is None
        dropped.native.wait()  # as a batch ends whose owner does not look
        initiator.close_segment(segment)
        assert dropped.native.segment is None
