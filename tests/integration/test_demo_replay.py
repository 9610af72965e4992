"""`moonpool demo`: the whole pool as processes, request traffic through it, every byte checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.terminal import run_on_terminal

from moonpool.cli.demonstration.block_bytes import hash_of, key_of
from moonpool.cli.demonstration.child_process import ChildProcess
from moonpool.cli.demonstration.pool_processes import PoolProcesses
from moonpool.cli.demonstration.replay import replay, started_workers
from moonpool.cli.demonstration.replay_tally import ReplayTally
from moonpool.cli.demonstration.replay_worker import WorkerSettings
from moonpool.errors import PeerGone, PeerStalled, ProtocolError
from moonpool.store.client import connect

BLOCK_BYTES = 16 << 10


def run_demo(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "moonpool.cli", "demo", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        stdin=subprocess.DEVNULL,
        check=False,
        env={**os.environ, **environment},
    )


def write_trace(path: Path) -> Path:
    """Thirty conversations of three turns under one first block, turn by turn."""
    rows: list[dict[str, object]] = []
    for turn in range(3):
        for talk in range(30):
            chain = [0, *(100 * talk + block + 1 for block in range(6 * (turn + 1)))]
            rows.append(
                {
                    "timestamp": len(rows),
                    "input_length": 512 * len(chain),
                    "output_length": 1,
                    "hash_ids": chain,
                }
            )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def left_behind(folder: str) -> str:
    processes = subprocess.run(
        ["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True, timeout=10
    )
    return "\n".join(line for line in processes.stdout.splitlines() if folder in line)


def test_a_small_trace_as_json(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "small.jsonl")
    done = run_demo(
        "--trace", str(trace), "--block", "16KiB", "--share", "0.5", "--json", TMPDIR=str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert (result["ok"], result["verify_errors"], result["wrong_bytes"]) == (True, 0, 0)
    assert (result["source"], result["requests"], result["blocks"]) == ("small.jsonl", 90, 90 + 30 * 36)
    assert result["distinct_blocks"] == 30 * 18 + 1
    assert (result["nodes"], result["capacity_blocks"]) == (2, 270)
    assert result["pool_bytes"] == 270 * BLOCK_BYTES
    # 450 of 1,170 blocks can be found again; half of the blocks fit, so some are lost, and not all.
    assert result["max_hit_ratio"] == pytest.approx((89 + 30 * 18) / 1170)
    assert 0.05 < result["hit_ratio"] < result["max_hit_ratio"]
    assert 0.05 < result["lru_hit_ratio"] < result["max_hit_ratio"]
    assert result["hit_ratio"] <= result["block_hit_ratio"]
    assert result["verified_bytes"] == round(result["block_hit_ratio"] * 1170) * BLOCK_BYTES
    assert result["puts"]["stored"] * BLOCK_BYTES == result["stored_bytes"]
    assert sum(result["puts"].values()) == 1170 - round(result["block_hit_ratio"] * 1170)
    moved = result["bytes_by_transport"]
    assert set(moved) == {"shm", "tcp"}
    assert sum(each["get"] for each in moved.values()) >= result["verified_bytes"]
    assert sum(each["put"] for each in moved.values()) >= result["stored_bytes"]
    for name in ("get_p50_us", "get_p99_us", "put_p50_us", "put_p99_us", "seconds"):
        assert result[name] > 0
    assert not left_behind(str(tmp_path / "moonpool-demo")), "its Redis is gone"
    assert [path.name for path in tmp_path.iterdir()] == ["small.jsonl"], "and its files"


def test_the_generator_as_text(tmp_path: Path) -> None:
    done = run_demo("--requests", "20", "--block", "4KiB", "--transport", "tcp", "--workers", "2")
    assert done.returncode == 0, done.stderr
    for piece in ("generated, seed 0: 20 requests", "hit ratio", "exact LRU", "tcp", " 0 wrong blocks"):
        assert piece in done.stdout, piece
    assert "shm" not in done.stdout
    assert "\x1b[" not in done.stdout, "no terminal codes"


def test_a_trace_from_the_environment_and_a_folder(tmp_path: Path) -> None:
    write_trace(tmp_path / "one.jsonl")
    done = run_demo(
        "--requests",
        "5",
        "--block",
        "4KiB",
        "--share",
        "1",
        "--workers",
        "1",
        "--json",
        MOONPOOL_TRACES=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["source"], result["requests"]) == ("one.jsonl", 5)


def test_a_damaged_object_is_seen(tmp_path: Path) -> None:
    """Somebody else put other bytes under a block's key before the replay asks for it."""
    chains = [(1, 2, 3), (4,), (1, 2, 3)]
    with PoolProcesses(1, 4 << 20) as pool:
        settings = WorkerSettings(pool.address, ("shm",), BLOCK_BYTES, 7)
        with connect(pool.address) as other:
            assert other.put(key_of(hash_of(2, 7)), bytes(BLOCK_BYTES)).stored
        tally = ReplayTally(BLOCK_BYTES)
        with started_workers(settings, [("shm",)]) as workers:
            replay(workers, chains, tally)
    assert tally.requests == 3
    assert tally.wrong_blocks == 2
    assert (tally.hits.found, tally.hits.leading) == (1 + 3, 3)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--trace", "/nonexistent/trace.jsonl"),
        ("--requests", "0"),
        ("--block", "12"),
        ("--share", "2"),
        ("--transport", "pigeon"),
    ],
)
def test_wrong_options_are_usage_errors(arguments: tuple[str, str]) -> None:
    done = run_demo(*arguments)
    assert done.returncode == 2, done.stdout
    assert done.stderr


def test_a_file_that_is_no_trace_is_a_usage_error(tmp_path: Path) -> None:
    file = tmp_path / "no.jsonl"
    file.write_text("{}\n")
    done = run_demo("--trace", str(file))
    assert done.returncode == 2
    assert "line 1" in done.stderr


CHILD = "moonpool.cli.demonstration.replay_worker"


def test_a_child_that_ends_early_or_says_nothing_is_reported_and_reaped() -> None:
    with ChildProcess("a worker", [CHILD]) as child:
        assert child.process.stdin is not None
        child.process.stdin.close()  # it reads its settings: there are none
        with pytest.raises(PeerGone, match="a worker ended early"):
            child.hear(60)
    assert child.process.returncode not in (None, 0)
    with ChildProcess("a worker", [CHILD]) as child, pytest.raises(PeerStalled):
        child.hear(0.01)
    assert child.process.returncode is not None
    child.stop()


def test_a_child_that_does_not_speak_json_is_reported() -> None:
    with ChildProcess("a child", ["this"]) as child, pytest.raises(ProtocolError, match="not JSON"):
        child.hear(60)


def test_on_a_terminal_the_table_is_redrawn() -> None:
    words = ["--requests", "150", "--block", "16KiB", "--workers", "2"]
    code, text = run_on_terminal("demo", *words)
    assert code == 0, text
    assert "of 150 requests" in text, "drawn while it runs"
    assert "generated, seed 0: 150 requests" in text
    assert " 0 wrong blocks" in text
