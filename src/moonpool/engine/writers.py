"""Which processes of this host were given a region's memory for writing, and may still write into it.

A peer that mapped our memory writes without us: nobody but itself can say that it has ended. It counts as a
writer from the moment it was given the memory until it says that it is done with everything (`release`), or
its process has ended. One whose session ended otherwise counts while its process lives.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from dataclasses import dataclass, field
from typing import final

from moonpool.engine.control import SessionInfo
from moonpool.engine.grants import PROCESS_END_MS
from moonpool.ids import InstanceId


@final
@dataclass(slots=True)
class _Writer:
    """A session that was given memory for writing, or what ended sessions of one process leave behind."""

    instance: InstanceId
    pid: int | None
    handles: set[int] = field(default_factory=set)
    ended: bool = False


@final
class WriterBook:
    """Thread-safe. Bounded by sessions and living processes, times regions."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writers: dict[int, _Writer] = {}
        self._pidfds: dict[int, int] = {}

    def note(self, handle: int, session: SessionInfo) -> None:
        """The session was given the region's memory for writing."""
        with self._lock:
            writer = self._writers.get(session.session_id)
            if writer is None:
                self._sweep()  # a number that passed to another process must not keep the one before alive
                writer = _Writer(session.peer_instance, session.peer_pid)
                self._writers[session.session_id] = writer
                self._watch(session.peer_pid)
            writer.handles.add(handle)

    def _watch(self, pid: int | None) -> None:
        if pid is None or pid in self._pidfds:
            return
        # Without a descriptor the process is taken to live as long as the session, and after that for ever.
        with contextlib.suppress(OSError):
            self._pidfds[pid] = os.pidfd_open(pid)

    def release(self, session_id: int) -> None:
        """The initiator has let go of everything it was given."""
        with self._lock:
            self._writers.pop(session_id, None)
            self._sweep()

    def session_ended(self, session_id: int) -> None:
        """The session is closed; its process may live on and write."""
        with self._lock:
            writer = self._writers.get(session_id)
            if writer is not None:
                writer.ended = True
                heir = self._heir(session_id, writer)
                if heir is not None:
                    heir.handles |= writer.handles
                    del self._writers[session_id]
                # A killed process closes its sockets a moment before its pidfd tells of its end.
                if writer.pid in self._pidfds:
                    self._has_ended(writer.pid, PROCESS_END_MS)
            self._sweep()

    def _heir(self, session_id: int, writer: _Writer) -> _Writer | None:
        """What stands for the ended sessions of the same engine already."""
        for other_id, other in self._writers.items():
            if other_id != session_id and other.ended and other.instance == writer.instance:
                return other
        return None

    def of_region(self, handle: int, instance: InstanceId | None) -> set[int]:
        """Sessions that may still write the region: of an instance, or of any (None)."""
        with self._lock:
            self._sweep()
            return {
                session_id
                for session_id, writer in self._writers.items()
                if handle in writer.handles and instance in (None, writer.instance)
            }

    def forget_region(self, handle: int) -> None:
        """The region is revoked."""
        with self._lock:
            for writer in self._writers.values():
                writer.handles.discard(handle)
            self._sweep()

    def close(self) -> None:
        """Closes the descriptors."""
        with self._lock:
            self._writers.clear()
            self._sweep()

    def _sweep(self) -> None:
        """Forgets the writers of ended processes, and the descriptors that nobody needs."""
        gone = {pid for pid in self._pidfds if self._has_ended(pid)}
        self._writers = {
            session_id: writer
            for session_id, writer in self._writers.items()
            if writer.pid not in gone and writer.handles
        }
        needed = {writer.pid for writer in self._writers.values()}
        for pid in [pid for pid in self._pidfds if pid not in needed]:
            os.close(self._pidfds.pop(pid))

    def _has_ended(self, pid: int, patience_ms: int = 0) -> bool:
        # A pidfd is readable once its process has ended: pidfd_open(2).
        watch = select.poll()
        watch.register(self._pidfds[pid], select.POLLIN)
        return bool(watch.poll(patience_ms))
