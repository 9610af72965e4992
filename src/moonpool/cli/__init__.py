"""The `moonpool` command, one file a command. Nothing here is part of the Python API."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and ends the process: exit code 0 done, 1 failed, 2 wrong usage."""
    from moonpool.cli.root import run

    run(arguments)
