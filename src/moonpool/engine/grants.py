"""Which initiator was given which region's memory, so that a revoke knows whom to ask and what must be kept.

A mapped memfd is harmless after a revoke: the peer's stray stores go to pages that are no longer ours.
process_vm is not: it writes at addresses of this process, so the region's memory is kept until the peer
confirmed or its process has ended. What ended sessions of one process hold is held by one of them, so that a
process that comes and goes costs one descriptor, and one that has ended none after the next session's end.
"""

from __future__ import annotations

import os
import select
import threading
from typing import final

from moonpool.engine.control import SessionInfo
from moonpool.engine.region import Region

#: How long a process may take from closing its sockets to its end; a session that ends alone costs this once.
PROCESS_END_MS = 50


@final
class GrantBook:
    """Thread-safe. Bounded by sessions and living processes, times regions."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[int, set[int]] = {}
        self._pidfds: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        #: The ended session that stands for all ended ones of its process, by pid.
        self._heirs: dict[int, int] = {}
        self._vm: set[tuple[int, int]] = set()
        self._kept: list[tuple[Region, set[int]]] = []

    def note(self, handle: int, session: SessionInfo, *, process_vm: bool) -> None:
        """Session `session` was given region `handle`."""
        with self._lock:
            if process_vm and session.session_id not in self._pidfds and session.peer_pid is not None:
                self._pidfds[session.session_id] = os.pidfd_open(session.peer_pid)
                self._pids[session.session_id] = session.peer_pid
            if process_vm:
                self._vm.add((handle, session.session_id))
            self._sessions.setdefault(handle, set()).add(session.session_id)

    def holders(self, handle: int) -> set[int]:
        """Ids of the sessions that were given the region."""
        with self._lock:
            return set(self._sessions.get(handle, ()))

    def confirmed(self, handle: int, sessions: set[int]) -> None:
        """These sessions said that nothing of theirs can touch the region any more."""
        with self._lock:
            self._vm -= {(handle, session) for session in sessions}

    def release(self, session_id: int) -> None:
        """An initiator is done with everything it was given, and says so before it ends its session."""
        with self._lock:
            self._vm = {(handle, session) for handle, session in self._vm if session != session_id}
            for holders in self._sessions.values():
                holders.discard(session_id)

    def settle(self, handle: int, unconfirmed: set[int], region: Region) -> bool:
        """After a revoke: forget the grants. True when the memory must be kept, which this book then does."""
        with self._lock:
            self._sessions.pop(handle, None)
            dangerous = {session for session in unconfirmed if (handle, session) in self._vm}
            self._vm = {(h, s) for h, s in self._vm if h != handle}
            if dangerous:
                self._kept.append((region, dangerous))
            return bool(dangerous)

    def keeps(self, handle: int) -> bool:
        """True while a revoked region is kept for a process that may still touch it."""
        with self._lock:
            return any(region.handle == handle for region, _ in self._kept)

    def sweep(self) -> int:
        """Let go of what ended processes held; returns how many regions stay kept."""
        with self._lock:
            self._sweep()
            return len(self._kept)

    def _sweep(self) -> None:
        alive = {session for session in list(self._pidfds) if self._process_alive(session)}
        self._vm = {(handle, session) for handle, session in self._vm if session in alive}
        kept = [(region, sessions & alive) for region, sessions in self._kept]
        self._kept = [(region, sessions) for region, sessions in kept if sessions]
        self._heirs = {pid: session for pid, session in self._heirs.items() if session in alive}

    def session_ended(self, session_id: int) -> None:
        """The session is closed and given nothing more. Its process may live on, so kept memory stays."""
        with self._lock:
            for holders in self._sessions.values():
                holders.discard(session_id)
            self._await_end(session_id)
            self._sweep()
            waited_for = any(session_id in sessions for _, sessions in self._kept)
            holds_vm = any(session == session_id for _, session in self._vm)
            if not waited_for and not holds_vm:
                self._close_pidfd(session_id)
            elif session_id in self._pids:
                self._inherit(session_id)

    def _await_end(self, session_id: int) -> None:
        """A killed process closes its sockets a moment before its pidfd tells of its end: wait for it."""
        fd = self._pidfds.get(session_id)
        if fd is not None:
            watch = select.poll()
            watch.register(fd, select.POLLIN)
            watch.poll(PROCESS_END_MS)

    def _inherit(self, session_id: int) -> None:
        """Hands what an ended session holds to the one that ended first of the same, living process."""
        heir = self._heirs.setdefault(self._pids[session_id], session_id)
        if heir == session_id:
            return
        self._vm = {(handle, heir if session == session_id else session) for handle, session in self._vm}
        for _, sessions in self._kept:
            if session_id in sessions:
                sessions.discard(session_id)
                sessions.add(heir)
        self._close_pidfd(session_id)

    def vm_holders_alive(self, handle: int) -> set[int]:
        """Sessions, ended ones too, whose living process may use process_vm on the region."""
        with self._lock:
            holders = {session for h, session in self._vm if h == handle}
            return {session for session in holders if self._process_alive(session)}

    def close(self) -> None:
        """Close the pidfds."""
        with self._lock:
            for session in list(self._pidfds):
                self._close_pidfd(session)

    def _process_alive(self, session_id: int) -> bool:
        fd = self._pidfds.get(session_id)
        if fd is None:
            return False
        watch = select.poll()
        watch.register(fd, select.POLLIN)
        if watch.poll(0):
            self._close_pidfd(session_id)
            return False
        return True

    def _close_pidfd(self, session_id: int) -> None:
        fd = self._pidfds.pop(session_id, None)
        self._pids.pop(session_id, None)
        if fd is not None:
            os.close(fd)
