"""Queue pairs of two processes over one fake fabric: bytes move, and a killed peer is noticed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.native.fake_verbs.fabric import SOURCES, library_path


def test_bytes_move_between_processes_and_a_killed_peer_is_noticed(tmp_path: Path) -> None:
    environment = {**os.environ, "FAKE_VERBS_SHARE": str(tmp_path / "fabric")}
    command = [sys.executable, str(SOURCES / "two_processes.py"), "initiator", library_path()]
    for _ in range(2):  # the second run finds what the killed process left behind
        ran = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stderr
