"""The order of a paired run, its pairing, its floors and what is written about it: on made-up reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moonpool.bench import history
from moonpool.bench.contenders import CONTENDERS, COPY_LOOPS, Contender, select
from moonpool.bench.floors import FLOORS, SHM, TCP, Floor, Line, judge
from moonpool.bench.interval import Interval
from moonpool.bench.paired import Measurements, order_of, rotated
from moonpool.bench.plan import Cell, Plan, Shape, default_shapes, parse_shapes
from moonpool.bench.summary import contender_table, failure_table, floor_table, ratio_table, to_markdown
from moonpool.bench.workers.protocol import JobReport, Operation
from moonpool.errors import UsageError
from moonpool.units import KIB, MIB

WRITE_4K = Cell(Shape(4 * KIB, 1), "write")
PLAN = Plan(shapes=(Shape(4 * KIB, 1), Shape(1 * MIB, 16)), rounds=4)


def report(rate: float, *, p50_us: float = 10.0, cpu_s: float = 0.5) -> JobReport:
    """A job of one second that moved ``rate`` GB."""
    return JobReport(
        operations=1,
        transferred_bytes=int(rate * 1e9),
        elapsed_s=1.0,
        p50_us=p50_us,
        p99_us=2 * p50_us,
        initiator_cpu_s=cpu_s / 2,
        target_cpu_s=cpu_s / 2,
    )


def measured(rates: dict[str, list[float]], cell: Cell = WRITE_4K, p50_us: float = 10.0) -> Measurements:
    measurements = Measurements()
    for contender, values in rates.items():
        for number, rate in enumerate(values):
            measurements.add(cell, contender, number, report(rate, p50_us=p50_us))
    return measurements


def test_the_order_rotates_within_each_group_and_keeps_rounds_together() -> None:
    contenders = select(("moonpool-tcp", "mooncake13", "c-blocking", "moonpool-shm"))
    jobs = list(order_of(PLAN, contenders))
    assert len(jobs) == PLAN.rounds * len(PLAN.cells) * len(contenders)
    assert [number for number, _, _ in jobs] == sorted(number for number, _, _ in jobs)
    firsts = [jobs[(r * len(PLAN.cells)) * len(contenders)][2].name for r in range(PLAN.rounds)]
    assert firsts == ["moonpool-tcp", "mooncake13", "c-blocking", "moonpool-tcp"]
    for start in range(0, len(jobs), len(contenders)):
        block = jobs[start : start + len(contenders)]
        assert len({cell for _, cell, _ in block}) == 1
        assert {contender.name for _, _, contender in block} == {contender.name for contender in contenders}


def test_a_slow_contender_takes_part_in_some_rounds_only() -> None:
    (slow,) = select(("nixl-tcp",))
    assert {number for number, _, _ in order_of(PLAN, (slow,))} == {0, 3}
    assert slow.round_stride == 3


def test_rotation_keeps_everyone() -> None:
    members = CONTENDERS[:3]
    assert rotated(members, 4) == (members[1], members[2], members[0])
    assert rotated((), 3) == ()


def test_ratios_are_paired_by_round() -> None:
    seen = measured({TCP: [2.0, 4.0, 9.0], "mooncake13": [1.0, 1.0, 3.0]}).ratio(WRITE_4K, TCP, "mooncake13")
    assert seen is not None
    assert seen.median == 3.0  # of 2, 4 and 3; the ratio of the medians would be 4
    assert seen.samples == 3


def test_a_missing_contender_has_no_figure() -> None:
    measurements = measured({TCP: [1.0]})
    assert measurements.ratio(WRITE_4K, TCP, "mooncake13") is None
    assert measurements.median(WRITE_4K, "mooncake13", "throughput") is None


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [([4.0] * 9, "met, clear"), ([2.0] * 4 + [4.0] * 5, "met"), ([2.0] * 9, "not met"), ([], "not measured")],
)
def test_a_verdict_needs_the_median_and_is_clear_with_the_lower_bound(
    ours: list[float], verdict: str
) -> None:
    floor = Floor(ours=TCP, others=("mooncake13",), shapes=(WRITE_4K.shape,), bound=3.0)
    line = next(
        line
        for line in judge(measured({TCP: ours, "mooncake13": [1.0] * 9}), [floor])
        if line.cell.operation == "write"
    )
    assert line.verdict == verdict
    if line.seen is not None:
        assert line.worse_bound == line.seen.low


def test_a_latency_floor_looks_at_the_upper_bound() -> None:
    floor = Floor(ours=SHM, others=(), shapes=(WRITE_4K.shape,), bound=4.0, measure="p50")
    line = Line(floor, WRITE_4K, "", Interval(3.9, 3.0, 4.5, 15))
    assert (line.verdict, line.worse_bound) == ("met", 4.5)
    assert Line(floor, WRITE_4K, "", Interval(4.1, 3.0, 4.5, 15)).verdict == "not met"


def test_of_several_copy_loops_the_best_one_counts() -> None:
    cell = Cell(Shape(1 * MIB, 1), "read")
    rates = {SHM: [9.0] * 5} | dict(zip(COPY_LOOPS, ([5.0] * 5, [20.0] * 5, [10.0] * 5), strict=True))
    (line,) = [line for line in judge(measured(rates, cell)) if line.floor.bound == 0.85 and line.seen]
    assert line.against == "copy-avx2-nt"
    assert line.verdict == "not met"
    assert line.seen == Interval(0.45, 0.45, 0.45, 5)


def test_every_floor_names_contenders_that_exist_and_cells_of_the_default_plan() -> None:
    names, shapes = {contender.name for contender in CONTENDERS}, set(default_shapes())
    for floor in FLOORS:
        assert {floor.ours, *floor.others} <= names
        assert set(floor.shapes) <= shapes


def test_the_default_plan_has_the_promised_sizes() -> None:
    shown = [str(shape) for shape in default_shapes()]
    assert shown == [
        "4K",
        "4K x16",
        "4K x128",
        "64K",
        "64K x16",
        "64K x128",
        "1M",
        "1M x16",
        "1M x128",
        "16M",
        "64M",
    ]


def test_cells_are_read_from_text() -> None:
    assert parse_shapes(["4K", "64KiB:16", "1Mx128", "4K"]) == (
        Shape(4 * KIB, 1),
        Shape(64 * KIB, 16),
        Shape(1 * MIB, 128),
    )
    for wrong in ("abc", "4K:x", "100", "4K:0", ":3"):
        with pytest.raises(UsageError):
            parse_shapes([wrong])


def test_plans_have_bounds() -> None:
    for change in ({"rounds": 0}, {"job_s": 0.0}, {"shapes": (Shape(512 * MIB, 1),)}):
        with pytest.raises(UsageError):
            Plan(**{"shapes": (), **change})


def test_unknown_contenders_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="no contender is called mooncake12"):
        select(("mooncake12",))
    assert select(()) == CONTENDERS


def test_contenders_with_one_recipe_share_their_processes() -> None:
    recipes = {contender.recipe for contender in CONTENDERS}
    assert len(CONTENDERS) == 13
    assert len(recipes) == 9


def test_a_peer_that_is_not_installed_says_how_to_get_it(tmp_path: Path) -> None:
    (peer,) = select(("mooncake13",))
    with pytest.raises(UsageError, match=r"peers_setup mooncake-0\.3\.13"):
        peer.recipe.command(1 << 20, tmp_path, tmp_path)


def run_of(measurements: Measurements) -> dict[str, object]:
    return history.record(PLAN, measurements, judge(measurements))


def test_the_history_gains_one_line_a_run(tmp_path: Path) -> None:
    file = tmp_path / "new" / "history.jsonl"
    measurements = measured({TCP: [4.0, 5.0], "mooncake13": [1.0, 1.0]})
    for _ in range(2):
        history.append(file, run_of(measurements))
    runs = [json.loads(line) for line in file.read_text().splitlines()]
    assert [run["schema"] for run in runs] == [history.SCHEMA] * 2
    (ours,) = [cell for cell in runs[0]["cells"] if cell["contender"] == TCP]
    assert (ours["throughput"], ours["rounds"], ours["operation"]) == (4.5, 2, "write")
    floors = {(floor["against"], floor["operation"]): floor for floor in runs[0]["floors"]}
    assert floors["mooncake13", "write"]["verdict"] == "met, clear"
    assert floors["c-blocking", "write"]["verdict"] == "not measured"
    assert all(operation == "write" for _, operation in floors)  # no line for a cell that nobody measured
    assert runs[0]["machine"]["processors"] >= 1


def test_the_readme_block_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- bench-engine -->\nold\n<!-- /bench-engine -->\nafter\n")
    history.update_readme(readme, "| new |\n")
    expected = "before\n<!-- bench-engine -->\n| new |\n<!-- /bench-engine -->\nafter\n"
    assert readme.read_text() == expected
    history.update_readme(readme, "| new |")
    assert readme.read_text() == expected


@pytest.mark.parametrize("content", ["", "no block", "<!-- bench-engine --> not closed"])
def test_a_readme_without_the_block_is_left_alone(tmp_path: Path, content: str) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(content)
    with pytest.raises(UsageError, match="has no block"):
        history.update_readme(readme, "x")
    assert readme.read_text() == content


def test_tables_have_a_value_for_every_column() -> None:
    measurements = measured({TCP: [4.0] * 3, "mooncake13": [1.0] * 3, SHM: [3.0] * 3}, p50_us=12.0)
    measurements.failures["nixl-tcp"] = "not installed"
    tables = [ratio_table("tcp", PLAN, measurements), ratio_table("shm", PLAN, measurements)]
    tables += [contender_table("tcp", "p50", PLAN, measurements), failure_table(measurements)]
    tables.append(floor_table(judge(measurements)))
    for table in tables:
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.header)}
    first = dict(zip(tables[0].header, tables[0].rows[0], strict=True))
    assert first["x Mooncake 0.3.13"] == "4.00 (4.00-4.00) / -"
    assert first["p50 us"] == "12.0 / -"
    lines = to_markdown(tables[0]).splitlines()
    assert lines[3].count("|") == lines[2].count("|") == lines[4].count("|")


def test_the_caption_tells_where_the_figures_come_from() -> None:
    measurements = measured({TCP: [1.0]})
    measurements.failures["nixl-cma, read 4K"] = "it failed"
    run = run_of(measurements)
    text = history.caption(run, CONTENDERS)
    assert "4 rounds" in text
    assert "Left out: nixl-cma." in text


def test_a_reports_figures() -> None:
    one = report(2.0, cpu_s=1.0)
    assert one.gigabytes_per_s == pytest.approx(2.0)
    assert one.cpu_s_per_gigabyte == pytest.approx(0.5)


def test_large_blocks_need_fewer_operations() -> None:
    def least(shape: Shape, operation: Operation = "read") -> int:
        return PLAN.job(Cell(shape, operation), "").minimum_operations

    assert least(Shape(4 * KIB, 1)) == 3
    assert least(Shape(64 * MIB, 1)) == 2
    assert isinstance(CONTENDERS[0], Contender)
