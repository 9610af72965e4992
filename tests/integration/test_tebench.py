"""tebench as a user runs it: a target and an initiator in two processes, small sizes, every exit code."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

TEBENCH = (sys.executable, "-P", "-m", "moonpool.bench.cli")
TIMEOUT_S = 60.0
BUFFER = "--total_buffer_size=4MiB"
QUICK = ("--duration=0.05", "--warmup=0", "--start_block_size=4KiB", "--max_block_size=16KiB")
NAME = re.compile(r"--target_seg_name=(\S+)")


@dataclass(slots=True)
class Target:
    """A running tebench target."""

    process: subprocess.Popen[str]
    name: str
    printed: list[str] = field(default_factory=list)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> str:
        """Sends the signal and returns what the target printed after it was ready."""
        self.process.send_signal(number)
        rest, _ = self.process.communicate(timeout=TIMEOUT_S)
        return rest


@contextlib.contextmanager
def target(*flags: str) -> Iterator[Target]:
    command = [*TEBENCH, BUFFER, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            printed = [process.stdout.readline(), process.stdout.readline()]
            found = NAME.search(printed[1])
            assert found is not None, printed
            yield Target(process, found[1], printed)
        finally:
            process.kill()


def initiator(name: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [*TEBENCH, f"--target_seg_name={name}", BUFFER, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def points(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def shared_target() -> Iterator[Target]:
    with target() as running:
        yield running


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("op", ["read", "write", "mix"])
def test_every_operation_moves_the_right_bytes(shared_target: Target, transport: str, op: str) -> None:
    flags = (
        *QUICK,
        "--check_consistency",
        f"--op_type={op}",
        f"--xport_type={transport}",
        "--max_batch_size=2",
    )
    rows = points(initiator(shared_target.name, "--json", *flags))
    assert [(row["block_size"], row["batch_size"]) for row in rows] == [
        (size, batch) for size in (4096, 8192, 16384) for batch in (1, 2)
    ]
    for row in rows:
        assert row["op_type"] == op
        assert row["xport_type"] == transport
        assert row["operations"] > 0
        assert row["checked_bytes"] == row["transferred_bytes"] > 0
        assert 0 < row["p50_us"] <= row["p99_us"] <= row["p999_us"] <= row["max_us"]


def test_the_table_has_one_row_a_point_and_threads_go_first(shared_target: Target) -> None:
    flags = ("--duration=0.05", "--warmup=0", "--max-block-size=8KiB", "--max-num-threads=2")
    done = initiator(shared_target.name, *flags)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(
        "BlkSize (B)   Batch   BW (GB/s)     Avg Inst GB/s     Avg Lat (us)  Avg Tx (us)"
    )
    assert lines[1] == "-" * 160
    rows = [line.split() for line in lines[2:]]
    assert [(row[-1], row[0]) for row in rows] == [("1", "4096"), ("1", "8192"), ("2", "4096"), ("2", "8192")]
    assert all(float(row[2]) > 0 for row in rows)


def test_what_one_process_seeds_another_verifies(shared_target: Target) -> None:
    window = ("--target_offset=1MiB", "--target_range_size=1MiB", "--seed=9", *QUICK)
    (*_, last) = points(initiator(shared_target.name, "--json", "--op_type=write_seed", *window))
    assert last["transferred_bytes"] >= 1 << 20
    rows = points(initiator(shared_target.name, "--json", "--op_type=read_verify", *window))
    assert all(row["checked_bytes"] == row["transferred_bytes"] > 0 for row in rows)


def test_wrong_bytes_are_found_and_have_their_own_exit_code(shared_target: Target) -> None:
    assert initiator(shared_target.name, "--op_type=write_seed", "--seed=1", *QUICK).returncode == 0
    done = initiator(shared_target.name, "--op_type=read_verify", "--seed=2", *QUICK)
    assert done.returncode == 3
    assert re.search(r"DataMismatch: byte \d+ of the target's region is wrong after READ", done.stderr)


def test_two_targets_share_the_threads(shared_target: Target) -> None:
    with target() as other:
        flags = (*QUICK, "--start_num_threads=2", "--max_num_threads=2", "--check_consistency")
        rows = points(initiator(f"{shared_target.name},{other.name}", "--json", *flags))
    assert all(row["num_threads"] == 2 and row["checked_bytes"] > 0 for row in rows)


def test_pacing_limits_the_rate(shared_target: Target) -> None:
    flags = ("--duration=0.2", "--warmup=0", "--max_block_size=4KiB", "--request_interval_us=20000")
    (row,) = points(initiator(shared_target.name, "--json", *flags))
    assert 1 <= row["operations"] <= 11


def test_a_target_counts_notifications_and_ends_cleanly() -> None:
    with target("--notifi") as running:
        (row,) = points(
            initiator(
                running.name,
                "--json",
                "--notifi=true",
                "--duration=0.05",
                "--warmup=0",
                "--max_block_size=4KiB",
            )
        )
        printed = running.stop(signal.SIGINT)
        assert running.process.returncode == 0
    received = re.search(r"(\d+) notifications received", printed)
    assert received is not None
    assert int(received[1]) == row["operations"]


def test_local_stays_in_one_process() -> None:
    rows = points(initiator("self", "--json", "--xport_type=local", "--check_consistency", *QUICK))
    assert len(rows) == 3
    done = subprocess.run(
        [*TEBENCH, "--xport_type=local"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 2
    assert "--target_seg_name=self" in done.stderr


def test_a_port_where_nobody_listens_is_a_typed_error(shared_target: Target) -> None:
    with target() as other:
        gone = other.name
    done = initiator(gone, *QUICK)
    assert done.returncode == 1
    assert "tebench: PeerRefused" in done.stderr


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_target_killed_in_mid_run_ends_the_initiator_with_a_typed_error(transport: str) -> None:
    with target() as running:
        command = [
            *TEBENCH,
            f"--target_seg_name={running.name}",
            BUFFER,
            f"--xport_type={transport}",
            "--json",
            "--duration=0.3",
            "--warmup=0",
            "--max_block_size=4KiB",
            "--max_batch_size=512",
            "--start_num_threads=2",
            "--max_num_threads=2",
            "--timeout=5",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            first = json.loads(process.stdout.readline())
            running.process.kill()
            _, errors = process.communicate(timeout=TIMEOUT_S)
    assert first["operations"] > 0
    assert process.returncode == 1, errors
    assert re.search(rf"^tebench: [A-Z]\w+: .*\bpeer={re.escape(running.name)}\b", errors), errors


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--no_such_flag"], "No such option"),
        (["--qos-classes=a:1"], "write name:threads:slo_us:weight"),
        (["--qos-classes=a:1:1:1", "--qos-classes-json=[]"], "exclude each other"),
        (["--workload_classes_json={"], "no JSON"),
        (["--xport_type=carrier-pigeon"], "there is no 'carrier-pigeon'"),
        (["--deadline_us=5"], "--deadline_tight_threads"),
        (["--metadata_type=etcd"], "names are kept in redis"),
        (["--seg_type=FILE"], "--seg_location=file:"),
        (["--seg_type_mix=dram,tape"], "holds 'TAPE'"),
        (["--tent_transport_hint=morse"], "--tent_transport_hint is one of"),
        (["--start_block_size=0"], "--start_block_size must be at least 1"),
        (["--seg_type=TAPE"], "'TAPE' is not"),
        (["--total_buffer_size=lots"], "is not a size"),
        (["--metadata_url_list=redis://x"], "needs --metadata_type=redis"),
    ],
)
def test_wrong_usage_is_told(flags: list[str], sentence: str) -> None:
    done = subprocess.run([*TEBENCH, *flags], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 2
    assert sentence in done.stderr


def test_a_window_beyond_the_target_is_refused(shared_target: Target) -> None:
    done = initiator(shared_target.name, "--target_offset=3MiB", "--target_range_size=2MiB", *QUICK)
    assert done.returncode == 2
    assert "reach beyond the target's region" in done.stderr


def test_the_backend_flag_is_ignored_with_a_note(shared_target: Target) -> None:
    done = initiator(
        shared_target.name, "--backend=tent", "--duration=0.02", "--warmup=0", "--max_block_size=4KiB"
    )
    assert done.returncode == 0
    assert "--backend=tent is ignored" in done.stderr
