"""Values between files and memory, with a progress bar for those that take a while."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

import click

from moonpool.units import MIB

PIECE_BYTES: Final = 4 * MIB
BAR_FROM_BYTES: Final = 64 * MIB
"""Smaller values are over before a bar could be read."""

STANDARD: Final = "-"


@contextlib.contextmanager
def progress(what: str, total_bytes: int | None) -> Iterator[Callable[[int], None]]:
    """Gives a function that is told how many bytes were done; shows a bar on a terminal, on standard error.

    A total that is not known, or large enough, is worth a bar.
    """
    if not sys.stderr.isatty() or (total_bytes is not None and total_bytes < BAR_FROM_BYTES):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda done: bar.update(task, advance=done)


def read_value(file: str) -> bytearray:
    """All bytes of a file or, for "-", of standard input. Raises `click.ClickException` when it cannot."""
    if file == STANDARD:
        return _read_all(sys.stdin.buffer, "standard input", None)
    path = Path(file)
    try:
        with path.open("rb") as stream:
            return _read_all(stream, path.name, path.stat().st_size)
    except OSError as exc:
        raise click.ClickException(f"cannot read {file}: {exc.strerror}") from exc


def _read_all(stream: BinaryIO, what: str, expected_bytes: int | None) -> bytearray:
    value = bytearray()
    with progress(f"reading {what}", expected_bytes) as advance:
        while piece := stream.read(PIECE_BYTES):
            value += piece
            advance(len(piece))
    return value


def write_value(file: str, value: memoryview) -> None:
    """Writes all bytes to a file or, for "-", to standard output; an existing file is replaced when whole."""
    if file == STANDARD:
        _write_all(sys.stdout.buffer, "standard output", value)
        sys.stdout.buffer.flush()
        return
    path = Path(file)
    try:
        if path.exists() and not path.is_file():  # a pipe or a device
            with path.open("wb") as stream:
                _write_all(stream, path.name, value)
            return
        part = path.with_name(f".{path.name}.part")
        try:
            with part.open("wb") as stream:
                _write_all(stream, path.name, value)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as exc:
        raise click.ClickException(f"cannot write {file}: {exc.strerror}") from exc


def _write_all(stream: BinaryIO, what: str, value: memoryview) -> None:
    with progress(f"writing {what}", value.nbytes) as advance:
        for start in range(0, value.nbytes, PIECE_BYTES):
            piece = value[start : start + PIECE_BYTES]
            stream.write(piece)
            advance(piece.nbytes)
