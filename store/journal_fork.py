"""Writing a snapshot without stopping the service: a forked child writes the state as it was at the fork.

The child has its own copy of the state and one connection that was made before the fork. It closes every
other descriptor first (so that nothing of the parent's stays open behind it), dies with its parent, starts no
thread, and ends by `os._exit`. What the parent pays is the fork: page tables copied, and pages that change
while the child runs. The parent polls `done` and kills a child that takes too long.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import struct
import warnings
from typing import Final, final

from moonpool.store.redis_link import RedisLink
from moonpool.store.snapshots import SnapshotAbout, SnapshotPlace, write_snapshot
from moonpool.store.state import State

_PR_SET_PDEATHSIG: Final = 1
_FDS_MAX: Final = 1 << 20
_RESULT: Final = struct.Struct("<sQQQQ")
_WRITTEN: Final = b"+"


@final
class SnapshotChild:
    """A child that writes a snapshot. `fileno` is readable once it has ended."""

    def __init__(self, link: RedisLink, place: SnapshotPlace, state: State) -> None:
        self.place = place
        self.sequence = state.sequence
        read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            with warnings.catch_warnings():
                # Python warns of threads that hold locks: the child uses one socket, zlib and the tables.
                warnings.simplefilter("ignore", DeprecationWarning)
                parent = os.getpid()
                self._pid = os.fork()
        except BaseException:
            os.close(read_end)
            os.close(write_end)
            raise
        if self._pid == 0:
            _child(link, place, state, parent, write_end)
        os.close(write_end)
        self._pipe = read_end
        self._result = b""
        self._closed = False

    def fileno(self) -> int:
        """Readable when the child has said what it wrote, or has died."""
        return self._pipe

    def done(self) -> bool:
        """Whether the child has ended its work, well or not; never waits."""
        while True:
            try:
                data = os.read(self._pipe, 4096)
            except BlockingIOError:
                return False
            if not data:
                return True
            self._result += data
            if self.result() is not None:
                return True

    def result(self) -> SnapshotAbout | None:
        """What it wrote; None when it failed. Call when `done`."""
        if len(self._result) != _RESULT.size or self._result[:1] != _WRITTEN:
            return None
        return SnapshotAbout(*_RESULT.unpack(self._result)[1:])

    def problem(self) -> str:
        """Why it failed, as far as it could say."""
        return self._result.decode("utf-8", "replace") or "its process was killed"

    def close(self) -> None:
        """Kills the child if it still runs, and reaps it. Idempotent."""
        if self._closed:
            return
        self._closed = True
        os.close(self._pipe)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _child(link: RedisLink, place: SnapshotPlace, state: State, parent: int, report: int) -> None:
    """Never returns."""
    code = 1
    try:
        gc.disable()
        _become_lone_child(parent, {link.fileno(), report})
        state_at = SnapshotAbout(state.sequence, 0, 0, 0)
        written = write_snapshot(link, place, state_at, state.snapshot_chunks())
        os.write(report, _RESULT.pack(_WRITTEN, *written))
        code = 0
    except BaseException as exc:
        with contextlib.suppress(OSError):
            os.write(report, f"{type(exc).__name__}: {exc}".encode()[:2_000])
    finally:
        os._exit(code)


def _become_lone_child(parent: int, kept: set[int]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    low = 0
    for fd in sorted(kept):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, _FDS_MAX)
