"""Asks the disk for the append-only file of a private Redis, once a second.

With `appendfsync everysec` Redis answers before it has written when an fsync runs long: a kill of its process
then loses up to two seconds of what it confirmed. So the private server has `appendfsync no`: each answer is
written to the system first, and a killed process loses nothing. What a crash of the machine may lose is
bounded here instead, by a thread of the master.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Final, final

_LOG: Final = logging.getLogger("moonpool.store.journal")
PERIOD_S: Final = 1.0
#: Longest wait of `close`: a disk may take its time.
_CLOSE_S: Final = 10.0


@final
class FileSync:
    """Syncs the files of one folder that have changed. Owns a thread from `start` to `close`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stopped = threading.Event()
        self._seen: dict[str, tuple[int, int]] = {}
        self._thread = threading.Thread(target=self._run, name="moonpool-journal-sync", daemon=True)
        #: Files synced so far.
        self.syncs = 0

    def start(self) -> None:
        """Begins; idempotent."""
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Syncs once more and ends; idempotent."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S)

    def sync(self) -> None:
        """Syncs what has changed since the last time; a file that is gone is none of ours any more."""
        for entry in self._entries():
            try:
                about = entry.stat()
                now = (about.st_size, about.st_mtime_ns)
                if self._seen.get(entry.name) == now:
                    continue
                file = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fdatasync(file)
                finally:
                    os.close(file)
            except FileNotFoundError:
                continue
            except OSError as exc:
                _LOG.error("the journal's file %s cannot be synced: %s", entry.path, exc)
                continue
            self._seen[entry.name] = now
            self.syncs += 1

    def _entries(self) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._folder) as found:
                entries = [each for each in found if each.is_file(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        except OSError as exc:
            _LOG.error("the journal's folder %s cannot be read: %s", self._folder, exc)
            return []
        self._seen = {each.name: self._seen[each.name] for each in entries if each.name in self._seen}
        return entries

    def _run(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            self.sync()
        self.sync()
