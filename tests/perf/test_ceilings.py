"""The bare C ceilings: they compile, move the right bytes and obey their bounds, in real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.bench.ceiling import CeilingUnavailable, compile_ceiling
from moonpool.bench.contenders import COPY, SOCKET, Contender, ProcessRecipe, select
from moonpool.bench.pair import ProcessPair
from moonpool.bench.paired import PairedRun
from moonpool.bench.plan import Cell, Plan, Shape
from moonpool.bench.workers.protocol import OPERATIONS, Job, Operation, WorkerFailed
from moonpool.units import KIB, MIB

BUFFER_BYTES = 4 * MIB
TIMEOUT_S = 30.0
SHAPES = (Shape(4 * KIB, 1), Shape(4 * KIB, 16), Shape(1 * MIB, 1))


@pytest.fixture(scope="module")
def ceilings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ceilings")


def start(recipe: ProcessRecipe, ceilings: Path, *, spins: bool = False) -> ProcessPair:
    return ProcessPair(
        recipe.command(BUFFER_BYTES, ceilings), spins_when_idle=spins, start_timeout_s=TIMEOUT_S
    )


@pytest.fixture(scope="module", params=[SOCKET, COPY], ids=["socket", "copy"])
def recipe(request: pytest.FixtureRequest) -> ProcessRecipe:
    chosen: ProcessRecipe = request.param
    return chosen


@pytest.fixture(scope="module")
def pair(recipe: ProcessRecipe, ceilings: Path) -> Iterator[ProcessPair]:
    with start(recipe, ceilings) as running:
        yield running


def variant_of(recipe: ProcessRecipe) -> str:
    return "blocking" if recipe is SOCKET else "memcpy"


def job(operation: Operation, shape: Shape, variant: str, **bounds: float) -> Job:
    limits = {"minimum_s": 0.0, "minimum_operations": 3, "maximum_operations": 5} | bounds
    return Job(
        operation=operation,
        block_bytes=shape.block_bytes,
        count=shape.count,
        variant=variant,
        minimum_s=limits["minimum_s"],
        minimum_operations=int(limits["minimum_operations"]),
        maximum_operations=int(limits["maximum_operations"]),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_arrive_both_ways(pair: ProcessPair, recipe: ProcessRecipe, shape: Shape) -> None:
    assert pair.check(shape, variant_of(recipe), TIMEOUT_S) == shape.operation_bytes


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_job_reports_what_it_did(pair: ProcessPair, recipe: ProcessRecipe, operation: Operation) -> None:
    shape = Shape(64 * KIB, 2)
    report = pair.run(job(operation, shape, variant_of(recipe)), TIMEOUT_S)
    assert report.operations == 3
    assert report.transferred_bytes == 3 * shape.operation_bytes
    assert 0 < report.p50_us <= report.p99_us
    assert report.elapsed_s > 0
    assert report.initiator_cpu_s > 0
    assert report.target_cpu_s >= 0


def test_the_maximum_ends_a_job_that_has_time_left(pair: ProcessPair, recipe: ProcessRecipe) -> None:
    asked = job("read", SHAPES[0], variant_of(recipe), minimum_s=3600.0)
    assert pair.run(asked, TIMEOUT_S).operations == 5


def test_a_refused_job_is_an_error_and_the_pair_goes_on(pair: ProcessPair, recipe: ProcessRecipe) -> None:
    with pytest.raises(WorkerFailed, match="Invalid argument"):
        pair.run(job("read", Shape(2 * BUFFER_BYTES, 1), variant_of(recipe)), TIMEOUT_S)
    with pytest.raises(WorkerFailed, match="no-such"):
        pair.run(job("read", SHAPES[0], "no-such"), TIMEOUT_S)
    assert pair.run(job("read", SHAPES[0], variant_of(recipe)), TIMEOUT_S).operations == 3


def test_both_sides_of_the_socket_use_cpu(ceilings: Path) -> None:
    with start(SOCKET, ceilings) as pair:
        asked = job("write", SHAPES[2], "spinning", minimum_operations=20, maximum_operations=20)
        report = pair.run(asked, TIMEOUT_S)
    assert report.target_cpu_s > 0
    assert report.cpu_s_per_gigabyte > 0


def test_non_temporal_copies_move_the_same_bytes_where_the_cpu_has_them(ceilings: Path) -> None:
    flags = Path("/proc/cpuinfo").read_text()
    with start(COPY, ceilings) as pair:
        for variant, flag in (("avx2-nt", " avx2 "), ("avx512-nt", " avx512f ")):
            if flag in flags:
                assert pair.check(SHAPES[2], variant, TIMEOUT_S) == 1 * MIB
            else:
                with pytest.raises(WorkerFailed, match="this CPU has no"):
                    pair.check(SHAPES[2], variant, TIMEOUT_S)


def test_stopping_ends_both_processes(ceilings: Path) -> None:
    pair = start(SOCKET, ceilings)
    ready = pair.ready
    assert ready is not None
    pair.stop()
    pair.stop()
    for pid in (ready.initiator_pid, ready.target_pid):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(WorkerFailed):
        pair.run(job("read", SHAPES[0], "blocking"), TIMEOUT_S)


def process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_spinning_pair_is_stopped_while_idle_and_wakes_for_its_job(ceilings: Path) -> None:
    with start(SOCKET, ceilings, spins=True) as pair:
        assert pair.ready is not None
        pids = (pair.ready.initiator_pid, pair.ready.target_pid)
        before = pair.cpu_seconds()
        assert [process_state(pid) for pid in pids] == ["T", "T"]
        assert pair.run(job("read", SHAPES[0], "blocking"), TIMEOUT_S).operations == 3
        assert [process_state(pid) for pid in pids] == ["T", "T"]
        assert pair.cpu_seconds() > before


def test_a_silent_worker_is_ended_in_bounded_time(ceilings: Path) -> None:
    pair = start(SOCKET, ceilings)
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match="no answer within 0 s"):
        pair.run(job("read", SHAPES[0], "blocking", minimum_s=3600.0, maximum_operations=1 << 20), 0.2)
    assert pair.ready is None
    assert time.monotonic() - began < TIMEOUT_S


def test_a_worker_that_cannot_start_leaves_its_last_words() -> None:
    with pytest.raises(WorkerFailed, match="No module named"):
        ProcessPair(
            ["python3", "-c", "import no_such_module_at_all"],
            spins_when_idle=False,
            start_timeout_s=TIMEOUT_S,
        )


def test_sources_are_compiled_once(ceilings: Path) -> None:
    library = compile_ceiling("copy_loop", ceilings)
    stamp = library.stat().st_mtime_ns
    assert compile_ceiling("copy_loop", ceilings) == library
    assert library.stat().st_mtime_ns == stamp


def test_without_a_compiler_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CeilingUnavailable, match="apt-get install gcc"):
        compile_ceiling("copy_loop", tmp_path)


def test_a_paired_run_measures_everyone_in_every_round_and_leaves_out_what_is_missing(ceilings: Path) -> None:
    names = ("c-blocking", "c-spinning", "copy-memcpy", "mooncake13")
    plan = Plan(shapes=SHAPES[:2], rounds=2, job_s=0.001, buffer_bytes=BUFFER_BYTES)
    seen: list[tuple[int, int]] = []
    run = PairedRun(plan, select(names), ceilings, peers_directory=ceilings / "none")
    measurements = run.run(lambda what, number, total: seen.append((number, total)))
    assert set(measurements.failures) == {"mooncake13"}
    for cell in plan.cells:
        for name in names[:3]:
            assert sorted(measurements.reports[cell, name]) == [0, 1]
    assert [number for number, _ in seen] == list(range(seen[0][1]))
    ratio = measurements.ratio(Cell(SHAPES[0], "read"), "copy-memcpy", "copy-memcpy")
    assert ratio is not None
    assert (ratio.median, ratio.samples) == (1.0, 2)


def test_a_contender_that_fails_its_check_is_left_out(ceilings: Path) -> None:
    plan = Plan(shapes=SHAPES[:1], rounds=1, job_s=0.001, buffer_bytes=BUFFER_BYTES)
    broken = Contender(name="broken", title="broken", group="tcp", recipe=SOCKET, variant="no way to wait")
    measurements = PairedRun(plan, (broken, *select(("c-blocking",))), ceilings).run(lambda *_: None)
    assert "no way to wait" in measurements.failures["broken"]
    assert {name for _, name in measurements.reports} == {"c-blocking"}


def test_a_contender_that_dies_is_left_out_and_the_others_go_on(ceilings: Path) -> None:
    plan = Plan(shapes=SHAPES[:1], rounds=4, job_s=0.001, buffer_bytes=BUFFER_BYTES)
    run = PairedRun(plan, select(("c-blocking", "copy-memcpy")), ceilings)

    def kill_in_the_second_round(what: str, number: int, total: int) -> None:
        if what.startswith("round 2"):
            ready = run.pair_of(SOCKET).ready
            if ready is not None:  # None once its end has been noticed
                os.kill(ready.initiator_pid, signal.SIGKILL)

    measurements = run.run(kill_in_the_second_round)
    assert set(measurements.failures) == {"c-blocking"}
    cell = Cell(SHAPES[0], "write")
    assert list(measurements.reports[cell, "c-blocking"]) == [0]
    assert list(measurements.reports[cell, "copy-memcpy"]) == [0, 1, 2, 3]
