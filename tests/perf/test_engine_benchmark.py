"""``python -m moonpool.bench.engine`` in small: ours beside the bare C ceilings, in real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 100.0
OURS = "moonpool-tcp,moonpool-tcp-digest,moonpool-shm"
CEILINGS = "c-blocking,c-spinning,copy-memcpy"


def bench(results: Path, *flags: str, search_path: str = os.defpath) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-P",
        "-m",
        "moonpool.bench.engine",
        f"--results={results}",
        "--buffer-mib=16",
        *flags,
    ]
    return subprocess.run(
        command,
        env={**os.environ, "PATH": search_path},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_a_run_measures_ours_beside_the_ceilings_and_is_recorded(tmp_path: Path) -> None:
    flags = ("--rounds=2", "--cells=4K,64K:16", "--job-ms=1", f"--contenders={OURS},{CEILINGS}", "--json")
    done = bench(tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)
    assert run["failures"] == {}
    measured = {
        (cell["contender"], cell["operation"], cell["block_bytes"], cell["count"]) for cell in run["cells"]
    }
    names = [*OURS.split(","), *CEILINGS.split(",")]
    assert measured == {
        (name, operation, block, count)
        for name in names
        for operation in ("read", "write")
        for block, count in ((4096, 1), (65536, 16))
    }
    assert all(cell["throughput"] > 0 and cell["p50"] > 0 and cell["rounds"] == 2 for cell in run["cells"])
    verdicts = {floor["against"]: floor["verdict"] for floor in run["floors"] if floor["block_bytes"] == 4096}
    assert verdicts["mooncake13"] == "not measured"
    assert verdicts["c-blocking"] in {"met, clear", "met", "not met"}
    (line,) = (tmp_path / "engine-history.jsonl").read_text().splitlines()
    assert json.loads(line) == run


def test_the_tables_are_printed(tmp_path: Path) -> None:
    done = bench(tmp_path, "--rounds=1", "--cells=4K", "--job-ms=1", "--contenders=c-blocking,copy-memcpy")
    assert done.returncode == 0, done.stderr
    for title in ("tcp, two processes on loopback: GB/s", "shared memory, two processes: p50 us", "floors"):
        assert title in done.stdout
    assert "C, blocking" in done.stdout


def test_nothing_measured_is_a_failure(tmp_path: Path) -> None:
    flags = ("--rounds=1", "--cells=4K", "--job-ms=1", "--contenders=c-blocking")
    done = bench(tmp_path, *flags, search_path=str(tmp_path))  # where there is no compiler
    assert done.returncode == 1
    assert "no contender could be measured" in done.stderr
    assert "needs gcc" in done.stdout


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--cells=4K:many"], "write a size and a batch"),
        (["--contenders=nobody", "--cells=4K"], "no contender is called nobody"),
        (["--cells=1G"], "does not fit into buffers"),
        (["--rounds=0"], "is not in the range"),
    ],
)
def test_wrong_usage_is_told(tmp_path: Path, flags: list[str], sentence: str) -> None:
    done = bench(tmp_path, *flags)
    assert done.returncode == 2
    assert sentence in done.stderr
