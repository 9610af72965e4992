"""Which run of its server a journal is of, and when a new run counts as the old one going on.

A leader writes the run of its server into its LEADER fact. One that finds another run must suppose that the
journal lost its end, which costs time: no place is seen before its node reported. A private server that was
ended cleanly lost nothing. So whoever ended it leaves a mark in its folder with the run's name and the sizes
of its files; whoever starts it next takes the mark away first, and vouches for the new run (key
`{prefix}:run`: the new server's id, and the name of the run that goes on). A mark is good for one start, so a
crash after it is a crash.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, Final, NamedTuple, final

from moonpool.store.redis_link import RedisLink
from moonpool.store.redis_scripts import Keys

_MARK_NAME: Final = "redis.clean"
_MARK_BYTES_MAX: Final = 65_536


class Run(NamedTuple):
    """A run of a server: the server's own id of it, and the name that the journal has for it."""

    server: str = ""
    name: str = ""


NO_RUN: Final = Run()


def run_of(link: RedisLink, keys: Keys) -> Run:
    """The run that this server's journal is of."""
    told: Any = link.call(b"GET", keys.run)
    words = told.decode("utf-8", "replace").split() if isinstance(told, bytes) else []
    known = len(words) == 2 and words[0] == link.run_id
    return Run(link.run_id, words[1] if known else link.run_id)


def vouch(link: RedisLink, keys: Keys, run: str) -> None:
    """Says that this server goes on where that run ended, with everything."""
    link.call(b"SET", keys.run, f"{link.run_id} {run}")


@final
class CleanMark:
    """The mark in a private server's folder. Who uses it holds the lock that keeps the server single."""

    def __init__(self, folder: Path, files: str) -> None:
        self._path = folder / _MARK_NAME
        self._folder = folder
        self._files = folder / files

    def leave(self, run: str) -> None:
        """The server ended cleanly, and was of that run."""
        text = json.dumps({"run": run, "sizes": self._sizes()}).encode()
        made = self._path.with_suffix(".new")
        file = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, text)
            os.fsync(file)
        finally:
            os.close(file)
        os.rename(made, self._path)
        self._sync_folder()

    def take(self) -> str:
        """Takes the mark away, for good, and returns its run; "" without one or when the files are others."""
        try:
            with open(self._path, "rb") as file:
                text = file.read(_MARK_BYTES_MAX)
        except FileNotFoundError:
            return ""
        self._path.unlink()
        self._sync_folder()
        with contextlib.suppress(ValueError, TypeError, KeyError):
            mark = json.loads(text)
            if mark["sizes"] == self._sizes() and isinstance(mark["run"], str):
                return str(mark["run"])
        return ""

    def _sizes(self) -> dict[str, int]:
        try:
            with os.scandir(self._files) as found:
                return {entry.name: entry.stat().st_size for entry in found}
        except FileNotFoundError:
            return {}

    def _sync_folder(self) -> None:
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
