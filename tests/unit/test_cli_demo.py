"""The demo: its pattern catches every kind of wrong byte, its verdict follows, nothing is left behind."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.terminal import run_on_terminal

from moonpool.cli import main
from moonpool.cli.demonstration import target_process, traffic
from moonpool.cli.demonstration.ending import BOUND_S, Death, kill_and_watch
from moonpool.cli.demonstration.pattern import Pattern, round_key
from moonpool.cli.demonstration.target_process import TargetProcess
from moonpool.cli.demonstration.traffic import REGION_BYTES, SHAPES, Cell, make_cells
from moonpool.config import EngineConfig
from moonpool.engine.engine import Engine
from moonpool.errors import PeerGone, PeerStalled, UsageError
from moonpool.operations import Op

SIZE_BYTES = 64 * 1024


@pytest.fixture(scope="module")
def pattern() -> Pattern:
    return Pattern(SIZE_BYTES)


def filled(pattern: Pattern, round_number: int) -> bytearray:
    data = bytearray(SIZE_BYTES)
    pattern.write(memoryview(data), 0, round_number)
    return data


def test_right_bytes_are_right_in_whole_and_in_part(pattern: Pattern) -> None:
    data = filled(pattern, 7)
    assert pattern.wrong_bytes(memoryview(data), 0, 7) == 0
    assert pattern.wrong_bytes(memoryview(data)[4096:12288], 4096, 7) == 0


@pytest.mark.parametrize("seed", range(5))
def test_every_flipped_byte_is_counted(pattern: Pattern, seed: int) -> None:
    rng = random.Random(seed)
    data = filled(pattern, 3)
    places = rng.sample(range(SIZE_BYTES), rng.randint(1, 50))
    for place in places:
        data[place] ^= rng.randint(1, 255)
    assert pattern.wrong_bytes(memoryview(data), 0, 3) == len(places), f"seed {seed}"


@pytest.mark.parametrize("shift", [8, 64, 4096, 32768])
def test_misplaced_words_are_all_wrong(pattern: Pattern, shift: int) -> None:
    data = memoryview(filled(pattern, 1))
    wrong = pattern.wrong_bytes(data[shift : shift + 16384], 0, 1)
    assert wrong >= 16384 // 8, "at least a byte of each word"


def test_stale_bytes_are_all_wrong(pattern: Pattern) -> None:
    for round_number in (1, 254, 255, 256):
        stale = filled(pattern, round_number - 1)
        assert pattern.wrong_bytes(memoryview(stale), 0, round_number) == SIZE_BYTES
    assert all(round_key(r) != round_key(r + 1) for r in range(600))


def test_places_outside_the_pattern_are_refused(pattern: Pattern) -> None:
    for offset in (-8, 4, SIZE_BYTES):
        with pytest.raises(UsageError):
            pattern.write(memoryview(bytearray(8)), offset, 0)
    for size_bytes in (0, 12, -8):
        with pytest.raises(UsageError):
            Pattern(size_bytes)


@pytest.fixture
def cells() -> Iterator[tuple[list[Cell], TargetProcess]]:
    """Cells of one tcp engine and their target; everything is closed afterwards."""
    with (
        Engine(EngineConfig(transports=("tcp",))) as engine,
        TargetProcess(len(SHAPES), REGION_BYTES) as target,
    ):
        made = make_cells([engine], target)
        yield made, target
        for cell in made:
            cell.close()


def test_traffic_checks_both_directions_and_sees_damage(cells: tuple[list[Cell], TargetProcess]) -> None:
    made, target = cells
    cell = made[1]
    cell.check_first()
    cell.step()
    assert (cell.wrong_bytes, cell.verified_bytes) == (0, REGION_BYTES + cell.batch_bytes)
    cell.check_last(target, 1)
    assert cell.wrong_bytes == 0
    # Damage in the target's memory is seen by a reader here ...
    cell.engine.write(cell.segment, cell.handle, 4096, bytes(100))
    cell.engine.transfer(
        Op.READ, cell.segment, cell.memory.address + REGION_BYTES, cell.handle, 0, REGION_BYTES
    )
    cell._verify(cell.found, 0, cell.round)
    seen_here = cell.wrong_bytes
    assert 90 <= seen_here <= 100
    # ... and by the target itself.
    assert target.wrong_bytes(1, cell.round) == seen_here
    assert cell.transfers == 4


def test_each_shape_wraps_inside_its_region(cells: tuple[list[Cell], TargetProcess]) -> None:
    made, _ = cells
    for cell in made:
        rounds = 2 * REGION_BYTES // cell.batch_bytes + 1
        for _ in range(min(rounds, 40)):
            cell.step()
        assert cell.wrong_bytes == 0
        row = cell.to_dict()
        assert row["read_gb_per_s"] > 0
        assert row["write_p50_us"] > 0


def test_a_killed_target_gives_a_typed_error_in_time(cells: tuple[list[Cell], TargetProcess]) -> None:
    made, target = cells
    made[0].step()
    (death,) = kill_and_watch(made[:1], target)
    assert death.ok, death
    assert target.process.poll() == -9
    with pytest.raises(PeerGone):
        target.wrong_bytes(0, 0)


def test_a_death_is_only_proper_with_an_error_in_time() -> None:
    assert Death("tcp", "PeerGone", "gone", 0.1).ok
    assert not Death("tcp", "", "no error at all", 0.1).ok
    late = Death("tcp", "PeerGone", "gone", BOUND_S + 0.1)
    assert not late.ok
    assert late.to_dict()["ok"] is False


@pytest.mark.parametrize(
    ("child", "error"),
    [("import sys; sys.exit(3)", PeerGone), ("import sys; sys.stdin.read()", PeerStalled)],
)
def test_a_target_that_does_not_start_is_reported_and_reaped(
    child: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def start(_: object, **options: Any) -> subprocess.Popen[bytes]:
        started.append(real([sys.executable, "-I", "-S", "-c", child], **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(target_process, "ANSWER_TIMEOUT_S", 0.2 if error is PeerStalled else 30.0)
    with pytest.raises(error), TargetProcess(1, 4096):
        pytest.fail("it started")
    assert started[0].returncode is not None


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The demo in a process of its own, without a terminal."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "moonpool.cli", "demo", "engine", "--seconds", "0.1", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        stdin=subprocess.DEVNULL,
        check=False,
        env={**os.environ, "PYTHONWARNINGS": "error::ResourceWarning"},
    )


def test_demo_json_without_a_terminal() -> None:
    done = run_demo("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    body = json.loads(done.stdout)
    assert body["ok"] is True
    assert [(row["transport"], row["batch"]) for row in body["rows"]] == [
        (name, count) for name in ("shm", "tcp") for _, count in SHAPES
    ]
    assert all(row["wrong_bytes"] == 0 and row["verified_bytes"] > 2 * REGION_BYTES for row in body["rows"])
    assert [death["transport"] for death in body["deaths"]] == ["shm", "tcp"]
    assert all(death["ok"] and death["seconds"] <= death["bound_s"] for death in body["deaths"])


def test_demo_text_of_one_transport() -> None:
    done = run_demo("--transport", "tcp")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tcp" in done.stdout
    assert "shm" not in done.stdout
    assert " 0 wrong bytes" in done.stdout
    assert "\x1b[" not in done.stdout, "no terminal codes"


def test_demo_on_a_terminal_redraws_its_table() -> None:
    code, text = run_on_terminal("demo", "engine", "--seconds", "1", "--transport", "shm")
    assert code == 0, text
    assert text.count("every byte checked") > 1, "drawn while running, and at the end"
    assert "\x1b[" in text
    assert " 0 wrong bytes" in text


@pytest.mark.parametrize("as_json", [False, True])
def test_one_wrong_byte_makes_the_demo_fail(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verify = Cell._verify

    def lose_a_byte(cell: Cell, found: memoryview, place: int, round_number: int) -> None:
        if round_number == 1 and cell.count == 1:
            found[5] ^= 1
        verify(cell, found, place, round_number)

    monkeypatch.setattr(traffic.Cell, "_verify", lose_a_byte)
    with pytest.raises(SystemExit) as caught:
        main(["demo", "engine", "--seconds", "0.1", "--transport", "shm", *(["--json"] if as_json else [])])
    assert caught.value.code == 1
    output = capsys.readouterr().out
    assert ('"ok": false' if as_json else "2 wrong bytes") in output


@pytest.mark.parametrize("arguments", [("--seconds", "0"), ("--transport", "rdma")])
def test_wrong_options_are_usage_errors(
    arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["demo", "engine", *arguments])
    assert caught.value.code == 2
    assert capsys.readouterr().err
