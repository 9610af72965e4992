"""The initiator's side of a control session: any thread's handle on a connection that lives on the loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any, final

from moonpool.engine.control_channel import close_fds
from moonpool.engine.control_connection import ControlConnection, Result, SessionInfo
from moonpool.engine.loop_thread import LoopThread
from moonpool.errors import EngineClosed, MoonpoolError, PeerGone
from moonpool.ids import InstanceId


@final
class ProcessWatch:
    """Closes a connection when a peer's process ends, even while another process keeps the socket open.

    Owns a descriptor of its own, because the session's may be closed by any thread while the loop polls it.
    """

    def __init__(self, pidfd: int, connection: ControlConnection) -> None:
        self._fd = os.dup(pidfd)
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        # A pidfd is readable once the process has ended: pidfd_open(2).
        self._loop.add_reader(self._fd, self._process_ended)
        connection.on_closed(self._stop)

    def abandon(self) -> None:
        """In a forked child: closes the child's copy without touching the parent's loop."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close_fds((fd,))

    def _process_ended(self) -> None:
        reason = PeerGone("the peer's process has ended", peer=self._connection.info.peer_address)
        self._connection.close(reason)

    def _stop(self, _reason: MoonpoolError) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
        self.abandon()


@final
class ControlSession:
    """A control session with a peer, made by `ControlService.connect`; usable from any thread.

    States: alive, then closed for good: by `close`, by the peer, or with the service. Owns its pidfd, which
    stays open until `close` so that whoever polls it never polls another process.
    """

    def __init__(self, connection: ControlConnection, loop_thread: LoopThread, pidfd: int | None) -> None:
        self._connection = connection
        self._loop_thread = loop_thread
        self._lock = threading.Lock()
        self._pidfd = pidfd
        self._watch: ProcessWatch | None = None
        self._is_closed = False

    @property
    def info(self) -> SessionInfo:
        """Who is at the other end."""
        return self._connection.info

    @property
    def peer_instance(self) -> InstanceId:
        """The instance that answered the hello."""
        return self.info.peer_instance

    @property
    def is_unix(self) -> bool:
        """True when the session runs over a unix socket, so that the peer is on this host."""
        return self.info.is_unix

    @property
    def peer_pid(self) -> int | None:
        """The peer's process id; None over tcp, or when kernel and peer disagree (other pid namespace)."""
        return self.info.peer_pid

    @property
    def peer_uid(self) -> int | None:
        """The peer's user as the kernel knows it; None over tcp."""
        return self.info.peer_uid

    @property
    def pidfd(self) -> int | None:
        """A pidfd of the peer's process, borrowed until `close`; None over tcp or without kernel help."""
        return self._pidfd

    @property
    def alive(self) -> bool:
        """False once the connection ended, for whatever reason."""
        return not self._is_closed and self._connection.closed_reason is None

    @property
    def closed_reason(self) -> MoonpoolError | None:
        """Why the connection ended; None while it is alive."""
        return self._connection.closed_reason

    def request(self, method: str, params: Mapping[str, Any], timeout_s: float) -> Result:
        """Asks the peer and blocks until it answers; not from the control thread.

        Raises the error that the peer answered with, `TransferTimeout`, the reason of a closed session,
        `QueueFull` with too many requests in flight, and `UsageError` for params that cannot be encoded.
        """
        if self._is_closed:
            raise PeerGone("the session is closed", peer=self.info.peer_address)
        return self._loop_thread.call(
            lambda: self._connection.request(method, params, timeout_s), timeout_s, Result.close
        )

    def on_closed(self, callback: Callable[[MoonpoolError], object]) -> None:
        """Calls back once on the control thread with the reason; soon, when the session is closed already.

        Raises `EngineClosed` when the control thread has ended, so that nothing is promised in vain.
        """
        if not self._loop_thread.post(lambda: self._connection.on_closed(callback)):
            raise EngineClosed("the session's engine is closed; its callbacks have been called")

    def close(self) -> None:
        """Ends the session and closes the pidfd; idempotent, does not block."""
        with self._lock:
            self._is_closed = True
            pidfd, self._pidfd = self._pidfd, None
        reason = PeerGone("the session was closed by this engine", peer=self.info.peer_address)
        self._loop_thread.post(lambda: self._connection.close(reason))
        if pidfd is not None:
            close_fds((pidfd,))

    def watch_process(self) -> None:
        """Closes the session when the peer's process ends; on the control thread, once."""
        # Without a free descriptor the end of the connection still tells of the peer's.
        with contextlib.suppress(OSError):
            if self._pidfd is not None and self._watch is None:
                self._watch = ProcessWatch(self._pidfd, self._connection)

    def end(self, reason: MoonpoolError) -> None:
        """`close` for a reason and at once; on the control thread."""
        self._connection.close(reason)
        self.close()

    def abandon(self) -> None:
        """In a forked child: closes the child's copies of the descriptors."""
        self._is_closed = True
        self._connection.abandon()
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            close_fds((pidfd,))
        if self._watch is not None:
            self._watch.abandon()

    def __del__(self) -> None:
        if self._pidfd is not None:
            warnings.warn(
                f"a session with {self.info.peer_address} was not closed", ResourceWarning, stacklevel=2
            )
            self.close()
