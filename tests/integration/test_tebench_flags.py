"""tebench's further flags, with real targets and initiators: kinds of segments, classes, deadlines, hints."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TEBENCH = (sys.executable, "-P", "-m", "moonpool.bench.cli")
OLDER = (sys.executable, "-P", "-m", "moonpool.bench.transfer_engine_bench")
TIMEOUT_S = 60.0
BUFFER = "--total_buffer_size=2MiB"
QUICK = ("--duration=0.1", "--warmup=0", "--max_block_size=4KiB")
NAME = re.compile(r"--target_seg_name=(\S+)")


@contextlib.contextmanager
def target(*flags: str, program: tuple[str, ...] = TEBENCH) -> Iterator[tuple[str, str]]:
    """A running target: its name, and the command that it prints."""
    with subprocess.Popen([*program, *flags], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            printed = process.stdout.readline() + process.stdout.readline()
            found = NAME.search(printed)
            assert found is not None, printed
            yield found[1], printed
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 0
        finally:
            process.kill()


def run(*command: str, code: int = 0) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def points(name: str, *flags: str) -> list[dict[str, Any]]:
    out = run(*TEBENCH, f"--target_seg_name={name}", BUFFER, "--json", *QUICK, *flags)
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture(scope="module")
def shared() -> Iterator[str]:
    with target(BUFFER) as (name, _):
        yield name


def test_classes_run_at_once_and_are_reported(shared: str, tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    flags = (
        "--qos_classes=fast:2:100000:4:0.5,slow:1:100000:1",
        "--qos_link_capacity_gbps=10",
        f"--qos_output_jsonl={records}",
    )
    out = run(*TEBENCH, f"--target_seg_name={shared}", BUFFER, *QUICK, *flags)
    assert re.search(
        r"^  \[qos-summary\] throughput=[\d.]+ GB/s weighted_goodput=[\d.]+ jain_fairness=[\d.]+ "
        r"max_isolation_leakage=[\d.]+ total_utilization=[\d.]+$",
        out,
        re.MULTILINE,
    )
    assert re.findall(r"^  \[qos-class\] name=(\w+) threads=(\d)", out, re.MULTILINE) == [
        ("fast", "2"),
        ("slow", "1"),
    ]
    (record,) = [json.loads(line) for line in records.read_text().splitlines()]
    assert record["schema_version"] == 1
    assert (record["block_size"], record["batch_size"], record["num_threads"]) == (4096, 1, 3)
    fast, slow = record["classes"]
    assert (fast["priority"], slow["priority"]) == ("high", "low")
    assert 0 < fast["slo_attainment"] <= 1
    assert record["aggregate_throughput_gbps"] == pytest.approx(
        fast["throughput_gbps"] + slow["throughput_gbps"], abs=2e-6
    )


def test_classes_can_be_given_as_json(shared: str) -> None:
    classes = json.dumps([{"name": "only", "threads": 2, "slo_us": 1}])
    (row,) = points(shared, f"--qos_classes_json={classes}")
    assert row["num_threads"] == 2
    (only,) = row["classes"]
    assert row["jain_fairness"] == 1.0
    assert row["total_utilization"] == 0.0
    assert only["operations"] == row["operations"] > 0


def test_a_workload_replaces_the_sweep(shared: str) -> None:
    classes = [
        {"name": "get", "threads": 1, "block_size": 4096, "intent_type": "foreground_get", "slo_us": 50_000},
        {"name": "save", "threads": 2, "block_size": 65536, "batch_size": 2, "intent_type": "checkpoint"},
        {"name": "late", "threads": 1, "block_size": 262144, "deadline_us": 1},
    ]
    (row,) = points(shared, f"--workload_classes_json={json.dumps(classes)}")
    get, save, late = row["classes"]
    assert [one["priority"] for one in (get, save, late)] == ["high", "low", ""]
    assert (get["block_size"], save["block_size"], save["batch_size"]) == (4096, 65536, 2)
    assert get["operations"] > 0
    assert save["transferred_bytes"] == save["operations"] * 131072
    assert late["missed"] > 0
    assert row["transferred_bytes"] == sum(one["transferred_bytes"] for one in row["classes"])


def test_deadlines_of_some_threads_are_counted(shared: str) -> None:
    flags = ("--deadline_us=1", "--deadline_tight_threads=1", "--start_num_threads=2", "--max_num_threads=2")
    common = (*TEBENCH, f"--target_seg_name={shared}", BUFFER, *QUICK, *flags)
    for more in ((), ("--deadline_bw_arbitration",)):
        out = run(*common, *more)
        found = re.search(r"\[deadline-tight\] threads=1 deadline_us=1 operations=(\d+) missed=(\d+) ", out)
        assert found is not None, out
        assert 0 < int(found[2]) <= int(found[1])


def test_a_hint_and_an_intent_choose_path_and_priority(shared: str) -> None:
    (row,) = points(
        shared, "--tent_transport_hint=tcp", "--tent_intent_type=migration", "--check_consistency"
    )
    assert row["checked_bytes"] == row["transferred_bytes"] > 0
    wrong = run(
        *TEBENCH, f"--target_seg_name={shared}", BUFFER, *QUICK, "--tent_transport_hint=local", code=2
    )
    assert "there are shm, tcp" in wrong


def test_several_transports_can_be_allowed(shared: str) -> None:
    (row,) = points(shared, "--xport_type=shm,tcp", "--check_consistency", "--op_type=write")
    assert row["xport_type"] == "shm,tcp"
    assert row["checked_bytes"] > 0


def test_libfabric_is_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("moonpool.native.ofi.library", reason="needs libfabric's headers at build time")
    monkeypatch.setenv("MOONPOOL_OFI_PROVIDER", "tcp")
    with target(BUFFER, "--xport_type=ofi,tcp") as (name, _):
        (row,) = points(name, "--xport_type=ofi", "--check_consistency", "--op_type=mix")
    assert row["checked_bytes"] == row["transferred_bytes"] > 0


@pytest.mark.parametrize("op", ["read", "mix"])
def test_a_segment_in_a_file(tmp_path: Path, op: str) -> None:
    pytest.importorskip("moonpool.native.disk", reason="needs the file transport")
    file = tmp_path / "segment"
    with target(BUFFER, "--seg_type=file", f"--seg_location=file:{file}") as (name, printed):
        assert "--seg_type=FILE" in printed
        (row,) = points(name, "--seg_type=FILE", "--check_consistency", f"--op_type={op}")
    assert row["checked_bytes"] == row["transferred_bytes"] > 0
    assert file.stat().st_size >= 2 << 20


def test_a_mix_of_kinds_is_shared_by_the_threads(tmp_path: Path) -> None:
    file = tmp_path / "segment"
    mix = ("--seg_type_mix=dram,file", f"--seg_location=file:{file}")
    with target(BUFFER, *mix) as (name, printed):
        assert "2097152 + 2097152 bytes" in printed
        flags = ("--start_num_threads=2", "--max_num_threads=2", "--op_type=write_seed", "--seed=3")
        (row,) = points(name, "--seg_type_mix=dram,file", *flags)
    assert row["transferred_bytes"] >= 2 << 20
    halves = file.read_bytes()
    assert any(halves[: 1 << 20]) is not any(halves[1 << 20 :])  # one of the two threads had it


def test_memory_of_a_numa_node() -> None:
    with target(BUFFER, "--seg_type=CXL", "--seg_location=numa:0") as (name, _):
        (row,) = points(name, "--check_consistency", "--op_type=write")
    assert row["checked_bytes"] > 0


def test_the_older_program(shared: str) -> None:
    flags = ("--buffer_size=2MiB", "--batch_size=4", "--threads=2", "--duration=0.1", "--protocol=tcp")
    out = run(*OLDER, f"--segment_id={shared}", *flags, "--report_unit=MiB", "--report_precision=3")
    found = re.fullmatch(
        r"Test completed: duration (\d+\.\d\d), batch count (\d+), throughput (\d+\.\d{3}) MiB/s\n", out
    )
    assert found is not None, out
    assert int(found[2]) > 0
    seconds, rate = float(found[1]), float(found[3])
    assert rate == pytest.approx(int(found[2]) * 4 * 65536 / 2**20 / seconds, rel=0.2)
    assert "needs --segment_id" in run(*OLDER, "--mode=initiator", code=2)


def test_the_older_program_as_a_target() -> None:
    with target("--mode=target", "--buffer_size=2MiB", "--backend=classic", program=OLDER) as (name, _):
        out = run(
            *OLDER,
            f"--segment_id={name}",
            "--buffer_size=2MiB",
            "--operation=write",
            "--threads=1",
            "--duration=0.05",
            "--batch_size=2",
        )
    assert out.startswith("Test completed: duration ")
