"""The examples run as they stand, and show what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def run(name: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", str(ROOT / "examples" / name)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_scheduler_finds_the_shared_prefix() -> None:
    decisions = run("conductor_scheduler.py").strip().split("\n\n")
    assert len(decisions) == 3
    assert "no cached block: no instance is known to hold its first block" in decisions[0]
    assert "200 of 250 blocks cached" in decisions[1]
    assert "200 of 250 blocks cached" in decisions[2]


def test_more_decode_instances_keep_more_promises() -> None:
    kept = [float(share) for share in re.findall(r"([\d.]+) % within", run("conductor_simulation.py"))]
    assert len(kept) == 3
    assert kept[0] < kept[1] <= kept[2]
