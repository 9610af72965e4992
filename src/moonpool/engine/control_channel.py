"""Control frames over a non-blocking socket on the loop, descriptors included; knows no requests or replies.

Theory of operation
-------------------
Everything runs on the loop's thread. Bounds, and what happens at each:

- A receiver that does not read lets `outbound` grow. Above `pause_bytes` this end stops reading, so a peer
  that floods requests and ignores replies stops itself; a peer that takes no byte for `stall_timeout_s`
  loses the connection.
- What all channels of a service hold for slow receivers is bounded by one `OutboundBudget`.
- A frame must be whole `stall_timeout_s` after its first byte.
- One turn delivers at most `MESSAGES_PER_TURN` messages, then the other connections have theirs.

Descriptors (unix sockets only) go with the first byte of their frame, and each frame is handed to the kernel
by calls of its own. The kernel never joins bytes behind a piece that carries descriptors, so those received
in one read belong to the last frame that began in that read (unix(7); net/unix/af_unix.c).
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, final

from moonpool.errors import (
    LimitExceeded,
    MoonpoolError,
    PeerGone,
    PeerStalled,
    ProtocolError,
    QueueFull,
    ResourceError,
    UnsupportedOperation,
)
from moonpool.units import KIB
from moonpool.wire.control import ControlLimits, ControlMessage, ControlParser

READ_BYTES: Final = 65_536
MESSAGES_PER_TURN: Final = 64
FRAME_FDS_MAX: Final = 4

_FD_BYTES: Final = array.array("i").itemsize


def close_fds(fds: Iterable[int]) -> None:
    """Closes descriptors that this process owns and nobody took."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


@final
class OutboundBudget:
    """Bytes that all channels of one service may hold for peers that do not read yet."""

    __slots__ = ("_limit_bytes", "held_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0

    def take(self, size_bytes: int, *, is_bulk: bool) -> None:
        """Takes bytes from the budget; raises `QueueFull` when a bulk frame does not fit.

        A frame larger than all of it passes when nothing else is held. What is not bulk always passes: a
        revoke or an error must get through when others hoard replies.
        """
        if is_bulk and self.held_bytes and self.held_bytes + size_bytes > self._limit_bytes:
            message = "too many control replies wait for peers that do not read them; try again"
            raise QueueFull(message, limit=self._limit_bytes)
        self.held_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Gives bytes back once the kernel has them or the channel is closed."""
        self.held_bytes -= size_bytes


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelBounds:
    """The bounds of one channel (see the module's text)."""

    stall_timeout_s: float
    #: Of the frames that the peer sends.
    limits: ControlLimits = field(default_factory=ControlLimits)
    #: Queued outbound bytes above which this end stops reading.
    pause_bytes: int = 256 * KIB
    #: Frames queued at once.
    frames_max: int = 1_024


@final
@dataclass(frozen=True, slots=True)
class ChannelEvents:
    """What a channel tells its owner, always from the loop and never from inside a call of the owner's.

    `received(message, fds)` passes the descriptors' ownership on. `failed(reason)` comes once at most; the
    channel still holds its socket then, until `close`.
    """

    received: Callable[[ControlMessage, list[int]], None]
    failed: Callable[[MoonpoolError], None]


@final
@dataclass(slots=True)
class _OutboundFrame:
    left: memoryview
    fds: list[int]


@final
class ControlChannel:
    """Owns a connected non-blocking socket after its hello. `start`, then `send` and events, then `close`."""

    def __init__(
        self,
        sock: socket.socket,
        bounds: ChannelBounds,
        budget: OutboundBudget,
        events: ChannelEvents,
    ) -> None:
        self._sock = sock
        self._bounds = bounds
        self._budget = budget
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._parser = ControlParser(bounds.limits)
        self._outbound: deque[_OutboundFrame] = deque()
        self._outbound_bytes = 0
        self._fds_of_frame: dict[int, list[int]] = {}
        self._is_unix = sock.family == socket.AF_UNIX
        self._is_open = True
        self._is_reading = False
        self._is_writing = False
        self._has_failed = False
        self._is_delivery_due = False
        self._frame_timer: asyncio.TimerHandle | None = None
        self._timed_frame = 0
        self._write_timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begins to read."""
        self._resume_reading()

    def send(self, frame: bytes, fds: Sequence[int] = (), *, is_bulk: bool = False) -> None:
        """Queues one whole frame; `fds` are borrowed for the call and duplicated, bulk is for results.

        Raises `UnsupportedOperation` for descriptors over tcp, `LimitExceeded` for too many of them,
        `QueueFull` at a bound, `PeerGone` after a failure, and `ResourceError` when no descriptor is free.
        Nothing was queued then.
        """
        if not self._is_open or self._has_failed:
            raise PeerGone()
        if fds and not self._is_unix:
            raise UnsupportedOperation("descriptors can only be passed over a unix socket", transport="tcp")
        if len(fds) > FRAME_FDS_MAX:
            raise LimitExceeded(f"a frame carries at most {FRAME_FDS_MAX} descriptors", limit=FRAME_FDS_MAX)
        if len(self._outbound) >= self._bounds.frames_max:
            raise QueueFull("the peer does not read its control messages", limit=self._bounds.frames_max)
        self._budget.take(len(frame), is_bulk=is_bulk)
        try:
            copies = _duplicate(fds)
        except BaseException:
            self._budget.give_back(len(frame))
            raise
        self._outbound.append(_OutboundFrame(memoryview(frame), copies))
        self._outbound_bytes += len(frame)
        if not self._is_writing:
            self._write()
        if self._outbound_bytes > self._bounds.pause_bytes:
            self._pause_reading()
            self._stop_frame_timer()

    def close(self) -> None:
        """Closes the socket and every descriptor still held; idempotent, no event follows."""
        if not self._is_open:
            return
        self._pause_reading()
        self._stop_writing()
        self._stop_frame_timer()
        self.abandon()

    def abandon(self) -> None:
        """`close` without touching the loop: for a forked child, whose loop is its parent's."""
        self._is_open = False
        self._sock.close()
        for frame in self._outbound:
            close_fds(frame.fds)
        for fds in self._fds_of_frame.values():
            close_fds(fds)
        self._fds_of_frame.clear()
        self._outbound.clear()
        self._budget.give_back(self._outbound_bytes)
        self._outbound_bytes = 0

    # Reading

    def _resume_reading(self) -> None:
        if self._is_open and not self._has_failed and not self._is_reading:
            self._is_reading = True
            self._loop.add_reader(self._sock, self._read)

    def _pause_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._sock)

    def _read(self) -> None:
        try:
            data, fds = self._receive()
        except (BlockingIOError, InterruptedError):
            return
        except MoonpoolError as exc:
            self._fail(exc)
            return
        except OSError as exc:
            self._fail(_connection_failure(exc))
            return
        if not data:
            close_fds(fds)
            self._fail(PeerGone("the peer closed the connection"))
            return
        begun_before = self._parser.frames_begun
        self._parser.feed(data)
        if fds:
            last = self._parser.frames_begun - 1
            if last < begun_before:
                close_fds(fds)
                self._fail(ProtocolError("descriptors came with no control frame"))
                return
            self._fds_of_frame[last] = fds
        self._deliver()

    def _receive(self) -> tuple[bytes, list[int]]:
        if not self._is_unix:
            return self._sock.recv(READ_BYTES), []
        data, ancillary, flags, _ = self._sock.recvmsg(
            READ_BYTES, socket.CMSG_SPACE(FRAME_FDS_MAX * _FD_BYTES), socket.MSG_CMSG_CLOEXEC
        )
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % _FD_BYTES])
        if flags & socket.MSG_CTRUNC:
            close_fds(fds)
            if len(fds) == FRAME_FDS_MAX:
                raise ProtocolError(f"a peer sent more than {FRAME_FDS_MAX} descriptors at once")
            message = "a peer's descriptor found no free slot in this process; raise its RLIMIT_NOFILE"
            raise ResourceError(message, errno=errno.EMFILE)
        return data, list(fds)

    def _deliver(self) -> None:
        for _ in range(MESSAGES_PER_TURN):
            if not self._is_open or self._has_failed or self._outbound_bytes > self._bounds.pause_bytes:
                return
            try:
                frame = self._parser.next_frame()
            except ProtocolError as exc:
                self._fail(exc)
                return
            if frame is None:
                self._check_frame_timer()
                self._resume_reading()
                return
            self._events.received(frame.message, self._fds_of_frame.pop(frame.index, []))
        self._pause_reading()
        self._schedule_delivery()

    def _schedule_delivery(self) -> None:
        if not self._is_delivery_due:
            self._is_delivery_due = True
            self._loop.call_soon(self._deliver_later)

    def _deliver_later(self) -> None:
        self._is_delivery_due = False
        self._deliver()

    def _check_frame_timer(self) -> None:
        """Keeps a timer running for the frame that is unfinished now; a newer frame gets a new one."""
        if self._parser.is_inside_frame and self._timed_frame == self._parser.frames_begun:
            return
        self._stop_frame_timer()
        if self._parser.is_inside_frame:
            self._timed_frame = self._parser.frames_begun
            reason = ProtocolError("a control frame was begun and not finished in time")
            self._frame_timer = self._loop.call_later(self._bounds.stall_timeout_s, self._fail, reason)

    def _stop_frame_timer(self) -> None:
        self._timed_frame = 0
        if self._frame_timer is not None:
            self._frame_timer.cancel()
            self._frame_timer = None

    # Writing

    def _write(self) -> None:
        while self._outbound:
            head = self._outbound[0]
            try:
                sent = self._send_some(head)
            except (BlockingIOError, InterruptedError):
                self._start_writing()
                return
            except OSError as exc:
                self._fail(_connection_failure(exc))
                return
            close_fds(head.fds)
            head.fds = []
            head.left = head.left[sent:]
            self._outbound_bytes -= sent
            self._budget.give_back(sent)
            self._restart_write_timer()
            if not head.left:
                self._outbound.popleft()
        self._stop_writing()
        if not self._is_reading:
            # Back-pressure ends: what was already read comes first.
            self._schedule_delivery()

    def _send_some(self, frame: _OutboundFrame) -> int:
        if not frame.fds:
            return self._sock.send(frame.left, socket.MSG_NOSIGNAL)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", frame.fds))
        return self._sock.sendmsg([frame.left], [rights], socket.MSG_NOSIGNAL)

    def _start_writing(self) -> None:
        if not self._is_writing:
            self._is_writing = True
            self._loop.add_writer(self._sock, self._write)
            self._restart_write_timer()

    def _restart_write_timer(self) -> None:
        if self._is_writing:
            if self._write_timer is not None:
                self._write_timer.cancel()
            reason = PeerStalled("the peer does not read its control messages")
            self._write_timer = self._loop.call_later(self._bounds.stall_timeout_s, self._fail, reason)

    def _stop_writing(self) -> None:
        if self._is_writing:
            self._is_writing = False
            self._loop.remove_writer(self._sock)
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _fail(self, reason: MoonpoolError) -> None:
        """Stops all traffic now and tells the owner a turn later, so that none of its calls is re-entered."""
        if self._is_open and not self._has_failed:
            self._has_failed = True
            self._pause_reading()
            self._stop_writing()
            self._stop_frame_timer()
            self._loop.call_soon(self._tell_failure, reason)

    def _tell_failure(self, reason: MoonpoolError) -> None:
        if self._is_open:
            self._events.failed(reason)


def _connection_failure(exc: OSError) -> PeerGone:
    return PeerGone(f"the connection failed: {exc.strerror or exc}", errno=exc.errno or 0)


def _duplicate(fds: Sequence[int]) -> list[int]:
    copies: list[int] = []
    try:
        for fd in fds:
            copies.append(os.dup(fd))  # noqa: PERF401 - each copy must be known when the next one fails
    except OSError as exc:
        close_fds(copies)
        message = f"a descriptor cannot be duplicated for the peer: {exc.strerror}"
        raise ResourceError(message, errno=exc.errno or 0) from exc
    return copies
