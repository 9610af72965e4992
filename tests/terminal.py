"""A command of ours on a pseudo terminal, as people see it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

#: The command must have ended this long after its last words.
END_S = 60


def run_on_terminal(*arguments: str) -> tuple[int, str]:
    """Runs `moonpool` with these arguments; its exit code, and everything that it drew."""
    master, slave = os.openpty()
    try:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "moonpool.cli", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
        )
    finally:
        os.close(slave)
    shown = b""
    with child, os.fdopen(master, "rb", buffering=0) as terminal:
        try:
            while piece := terminal.read(65536):
                shown += piece
        except OSError as exc:
            if exc.errno != errno.EIO:  # how a pseudo terminal says that its last writer is gone
                raise
        return child.wait(timeout=END_S), shown.decode()
