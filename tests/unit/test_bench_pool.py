"""The pool benchmark: order of jobs, ratios and verdicts, the loop that times calls, and what it writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonpool.bench import history, pool, pool_cells, pool_run
from moonpool.bench.pair import ProcessPair
from moonpool.bench.plan import Shape
from moonpool.bench.pool_cells import FLOORS, PoolCell, PoolFloor, cell, jobs_of
from moonpool.bench.pool_contenders import CONTENDERS, PoolContender, PoolRecipe, select
from moonpool.bench.pool_run import PoolMeasurements, PoolPlan, PoolRun, judge, order_of
from moonpool.bench.workers import pool_main
from moonpool.bench.workers.pool_driver import Batch, Call, PoolWorker
from moonpool.bench.workers.pool_protocol import PoolJob, PoolOperation, PoolReport
from moonpool.bench.workers.protocol import WorkerFailed
from moonpool.errors import UsageError

GET = cell("get", 4096)
PUT = cell("put", 4096, 2)


def report(per_s: float, p50_us: float = 1.0, redis_cpu_s: float = 0.0) -> PoolReport:
    return PoolReport(
        operations=100,
        keys=200,
        transferred_bytes=100 * 4096,
        elapsed_s=100 / per_s,
        p50_us=p50_us,
        p99_us=2 * p50_us,
        cpu_s=0.1,
        redis_cpu_s=redis_cpu_s,
    )


def measured(*rows: tuple[PoolCell, str, int, PoolReport]) -> PoolMeasurements:
    found = PoolMeasurements()
    for where, name, number, what in rows:
        found.reports.setdefault((where, name), {})[number] = what
    return found


def test_every_floor_has_contenders_that_exist_and_are_asked() -> None:
    known = {contender.name for contender in CONTENDERS}
    jobs = jobs_of(FLOORS)
    for floor in FLOORS:
        assert {floor.ours} | ({floor.other} if floor.other else set()) <= known
        assert floor.ours in jobs[floor.cell]
        assert not floor.other or floor.other in jobs[floor.cell]
    assert {name for names in jobs.values() for name in names} == known


def test_ratios_are_paired_by_round_and_latencies_judged_alone() -> None:
    found = measured(
        *((GET, "a", number, report(200.0 * (number + 1), 10.0)) for number in range(3)),
        *((GET, "b", number, report(100.0 * (number + 1), 30.0)) for number in range(3)),
    )
    floors = (
        PoolFloor(GET, "a", 2.0, "b"),
        PoolFloor(GET, "a", 2.1, "b"),
        PoolFloor(GET, "a", 10.0),
        PoolFloor(GET, "a", 9.9),
        PoolFloor(GET, "a", 1.0, "nobody"),
        PoolFloor(PUT, "a", 1.0),
    )
    lines = judge(found, floors)
    assert [line.verdict for line in lines] == [
        "met, clear",
        "not met",
        "met, clear",
        "not met",
        "not measured",
        "not measured",
    ]
    assert lines[0].seen is not None
    assert lines[0].seen.median == pytest.approx(2.0)
    assert (lines[0].ours_p50_us, lines[0].other_p50_us) == (10.0, 30.0)


def test_a_wide_interval_is_met_but_not_clear() -> None:
    found = measured(
        *((GET, "a", number, report(rate)) for number, rate in enumerate((50.0, 150.0, 300.0, 310.0))),
        *((GET, "b", number, report(100.0)) for number in range(4)),
    )
    (line,) = judge(found, [PoolFloor(GET, "a", 2.0, "b")])
    assert line.verdict == "met"
    assert line.worse_bound < 2.0


def test_who_begins_rotates_and_everyone_does_everything_each_round() -> None:
    plan = PoolPlan(jobs={GET: ("a", "b", "c"), PUT: ("a", "c")}, rounds=3)
    order = list(order_of(plan, ["a", "b", "c"]))
    assert len(order) == len(set(order)) == 3 * 5
    assert [name for number, where, name in order if where == GET][::3] == ["a", "b", "c"]
    assert {name for _, _, name in order_of(plan, ["c"])} == {"c"}


@pytest.mark.parametrize("settings", [{"rounds": 0}, {"rounds": 1001}, {"job_s": 0.0}])
def test_a_senseless_plan_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        PoolPlan(jobs={}, **settings)


class DictDriver:
    """A store in a dictionary; `wrong` damages what it returns."""

    def __init__(self, capacity_bytes: int, wrong: bool = False) -> None:
        self.memory = np.zeros(1 << 20, np.uint8)
        self.capacity_bytes = capacity_bytes
        self.wrong = wrong
        self.held: dict[str, bytes] = {}
        self.most_bytes = 0
        self.clears = 0

    def pids(self) -> Sequence[int]:
        return []

    def redis_pid(self) -> int:
        return 0

    def call(self, operation: PoolOperation, variant: str, size: int, batches: Sequence[Batch]) -> Call:
        def call(index: int) -> None:
            for key, offset in zip(batches[index].keys, batches[index].offsets, strict=True):
                place = self.memory[offset : offset + size]
                if operation == "put":
                    assert key not in self.held, "puts are of new keys"
                    self.held[key] = place.tobytes()
                elif operation == "get":
                    place[:] = np.frombuffer(self.held[key], np.uint8)
                    place[0] ^= self.wrong
                else:
                    assert key in self.held
            self.most_bytes = max(self.most_bytes, sum(map(len, self.held.values())))

        return call

    def fill(self, variant: str, size: int, batches: Sequence[Batch]) -> None:
        put = self.call("put", variant, size, batches)
        for index in range(len(batches)):
            put(index)

    def clear(self) -> None:
        self.held.clear()
        self.clears += 1

    def close(self) -> None:
        pass


def job(operation: PoolOperation, size: int, count: int, calls: int) -> PoolJob:
    return PoolJob(
        operation=operation,
        block_bytes=size,
        count=count,
        minimum_s=0.0,
        minimum_operations=calls,
        maximum_operations=calls,
    )


@pytest.mark.parametrize(
    ("operation", "count"), [("put", 1), ("put", 5), ("get", 1), ("get", 5), ("exists", 7)]
)
def test_a_worker_makes_as_many_calls_as_asked(operation: PoolOperation, count: int) -> None:
    driver = DictDriver(capacity_bytes=4096 * 20)
    done = PoolWorker(driver).run(job(operation, 4096, count, 50))
    assert (done.operations, done.keys) == (50, 50 * count)
    assert done.transferred_bytes == (0 if operation == "exists" else 50 * count * 4096)
    assert done.elapsed_s > 0
    assert done.p99_us >= done.p50_us > 0
    assert driver.most_bytes <= driver.capacity_bytes, "puts go on in an emptied store"
    assert not driver.held
    assert driver.clears >= (2 if operation == "put" else 1)


def test_a_job_goes_on_until_its_time_is_over() -> None:
    asked = PoolJob(
        operation="get",
        block_bytes=64,
        count=1,
        minimum_s=0.002,
        minimum_operations=3,
        maximum_operations=10**6,
    )
    done = PoolWorker(DictDriver(1 << 16)).run(asked)
    assert done.elapsed_s >= 0.002
    assert done.operations >= 3


def test_a_check_compares_every_byte() -> None:
    assert PoolWorker(DictDriver(1 << 20)).check(1000, 3, "") == 3000
    with pytest.raises(RuntimeError, match="byte 0 is not what was put"):
        PoolWorker(DictDriver(1 << 20, wrong=True)).check(1000, 3, "")


def test_an_answer_is_a_report_a_number_or_the_error() -> None:
    worker = PoolWorker(DictDriver(1 << 20))
    line = json.dumps({"check": {"block_bytes": 64, "count": 2, "variant": ""}})
    assert json.loads(pool_main.answer(worker, line)) == {"checked": 128}
    asked = {name: getattr(job("put", 64, 1, 3), name) for name in PoolJob.__dataclass_fields__}
    assert json.loads(pool_main.answer(worker, json.dumps({"job": asked})))["report"]["operations"] == 3
    assert "error" in json.loads(pool_main.answer(worker, "{}"))


class FakePair:
    """Answers like a worker; fails in its third job, and if it is one that was started anew in its first."""

    started = 0

    def __init__(self, command: list[str], **_: Any) -> None:
        if "driver=none" in " ".join(command):
            raise WorkerFailed("no such store")
        self.asked = 2 if FakePair.started else 0
        FakePair.started += 1

    def __enter__(self) -> FakePair:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stop(self) -> None:
        pass

    def check(self, shape: Shape, variant: str, timeout_s: float) -> int:
        return shape.operation_bytes

    def ask(self, expected: str, request: str, timeout_s: float) -> Any:
        self.asked += 1
        if self.asked == 3:
            raise WorkerFailed("it died")
        return {name: getattr(report(100.0), name) for name in PoolReport.__dataclass_fields__}


def test_failures_are_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_run, "ProcessPair", FakePair)
    monkeypatch.setattr(FakePair, "started", 0)
    ours, broken, missing = (
        PoolContender(name=name, title=name, recipe=recipe)
        for name, recipe in (
            ("a", PoolRecipe(driver="moonpool")),
            ("b", PoolRecipe(driver="moonpool", options=(("driver", "none"),))),
            ("c", PoolRecipe(driver="moonpool", peer="redhare-0.6.0")),
        )
    )
    plan = PoolPlan(jobs={GET: ("a", "b", "c"), PUT: ("a",)}, rounds=2)
    seen: list[str] = []
    found = PoolRun(plan, (ours, broken, missing), Path("/nonexistent")).run(
        lambda what, number, total: seen.append(what)
    )
    assert found.failures["b"] == "no such store"
    assert "peers_setup redhare-0.6.0" in found.failures["c"]
    assert [where for where in found.failures if where.startswith("a")] == [f"a, {GET}"]
    assert found.restarts == {"a": 1}
    assert sum(len(rounds) for rounds in found.reports.values()) == 3
    assert len(seen) == 3 + 2 * 4


def test_the_real_pair_has_what_the_run_uses() -> None:
    assert all(hasattr(ProcessPair, name) for name in ("ask", "check", "__enter__"))


def test_names_are_selected_or_refused() -> None:
    assert select(()) == CONTENDERS
    assert [contender.name for contender in select((pool_cells.SHM,))] == [pool_cells.SHM]
    with pytest.raises(UsageError, match="no contender is called nobody"):
        select(("nobody",))


def test_the_record_the_tables_and_the_readme(tmp_path: Path) -> None:
    plan = PoolPlan(jobs=jobs_of(FLOORS), rounds=2)
    get = cell("get", 4096)
    found = measured(
        *((get, pool_cells.SHM, number, report(1e5, 20.0)) for number in range(2)),
        *((get, pool_cells.DUMMY, number, report(1e3, 300.0)) for number in range(2)),
        (cell("put", 4096), pool_cells.SYNC, 0, report(1e3, 90.0, redis_cpu_s=0.002)),
    )
    found.failures["redhare"] = "not installed"
    lines = judge(found, FLOORS)
    record = json.loads(json.dumps(pool.record_of(plan, found, lines)))
    verdicts = {(each["call"], each["ours"], each["against"]): each["verdict"] for each in record["floors"]}
    assert verdicts["get 4K", pool_cells.SHM, pool_cells.DUMMY] == "met, clear"
    assert verdicts["get 4K", pool_cells.SHM, ""] == "met, clear"
    assert verdicts["exists", pool_cells.SHM, ""] == "not measured"
    assert record["redis_us_per_put"][pool_cells.SYNC]["median"] == pytest.approx(10.0)
    assert "10.0" in pool.redis_text(found)
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- bench-pool -->\nold\n<!-- /bench-pool -->\nafter\n")
    history.update_readme(readme, pool.readme_text(found, lines, record), pool.BLOCK)
    text = readme.read_text()
    assert "old" not in text
    assert "| get 4K | Moonpool, shared memory | Mooncake 0.3.13, dummy client | 20.0/300 | 100" in text
    assert "Left out: redhare." in text
    assert len(pool.cell_table(found).rows) == 3
    assert pool.failure_table(found).rows == (("redhare", "not installed"),)
