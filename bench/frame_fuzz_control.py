"""Fuzzes control sessions: requests that must be answered in order, then a frame that ends the session."""

from __future__ import annotations

import array
import os
import random
import select
import socket
import struct
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final, final

import msgpack  # type: ignore[import-untyped]

from moonpool.bench.frame_fuzz_model import Violation
from moonpool.bench.frame_fuzz_wire import Where, end_connection
from moonpool.engine.control import REQUEST_LIMITS
from moonpool.errors import ProtocolError, Status
from moonpool.units import MS_PER_S, U32_MAX, U64_MAX
from moonpool.wire.control import (
    ControlParser,
    PushMessage,
    ReplyMessage,
    RequestMessage,
    encode_message,
)
from moonpool.wire.hello import ConnectionKind

RUN_FRAMES_MAX: Final = 1_024
_READ_BYTES: Final = 65_536
_METHODS: Final = ("probe",) * 12 + ("map", "map", "grant_vm", "release", "describe")


@final
@dataclass(frozen=True, slots=True)
class ControlPiece:
    """One frame and, for a request, the id that its answer must carry."""

    data: bytes
    request_id: int | None
    #: The answer must have this status; None: any.
    status: int | None = None


@final
class ControlFuzzer:
    """One session after the other. `tally` counts what was sent and what the target must have counted."""

    def __init__(self, where: Where, seed: int) -> None:
        self._where = where
        self._seed = seed
        self.tally: Counter[str] = Counter()
        self._runs = 0
        handles = [region.handle for region in where.facts.regions]
        self._handles = [*handles, *handles, where.facts.stale_handle, 0, 1, U32_MAX, U64_MAX]

    def run(self, frames_max: int) -> int:
        """One session with at most `frames_max` frames; returns how many. Raises `Violation`."""
        self._runs += 1
        rng = random.Random(f"{self._seed} control {self._runs}")
        n = max(1, min(frames_max - 1, int(RUN_FRAMES_MAX ** rng.random())))
        try:
            pieces = [self._piece(rng) for _ in range(n)]
            self._run(rng, pieces)
        except Violation as exc:
            raise Violation(f"control run {self._runs} of seed {self._seed}: {exc}") from exc
        self.tally["frames"] += n + 1
        self.tally["connections"] += 1
        return n + 1

    def _run(self, rng: random.Random, pieces: list[ControlPiece]) -> None:
        is_unix = rng.random() < 0.5
        sock = self._where.greet(ConnectionKind.CONTROL, is_unix)
        try:
            self._exchange(sock, pieces)
            self._end(sock, rng, is_unix)
        finally:
            sock.close()
        self.tally["closed"] += 1

    # Frames

    def _piece(self, rng: random.Random) -> ControlPiece:
        for _ in range(8):
            data = self._legal(rng)
            if rng.random() < 0.3:
                data = _mutated(rng, data)
            piece = _judge(data)
            if piece is not None:
                return piece
        return ControlPiece(encode_message(RequestMessage(7, "probe")), 7, Status.COMPLETE)

    def _legal(self, rng: random.Random) -> bytes:
        if rng.random() < 0.1:
            return encode_message(PushMessage(rng.choice(("news", "revoke", "probe")), _params(rng)))
        number = rng.choice((0, 1, U64_MAX, rng.getrandbits(16), rng.getrandbits(64)))
        if rng.random() < 0.2:
            method = rng.choice(("revoke", "shutdown", "x" * 64, "\u00e9", "__class__"))
            return encode_message(RequestMessage(number, method, _params(rng)))
        params: dict[str, Any] = {}
        if rng.random() < 0.8:
            params["handle"] = rng.choice((*self._handles, rng.getrandbits(64), -1, "1", None, 1.5, [], {}))
            params["access"] = rng.choice((0, 1, 2, 3, 4, 255, U64_MAX, -1, True, None, b"\1"))
        return encode_message(RequestMessage(number, rng.choice(_METHODS), params))

    # Traffic

    def _exchange(self, sock: socket.socket, pieces: list[ControlPiece]) -> None:
        out = memoryview(b"".join(piece.data for piece in pieces))
        waiting = [piece for piece in pieces if piece.request_id is not None]
        parser = ControlParser()
        answered = 0
        poll = select.poll()
        sock.setblocking(False)
        while out or answered < len(waiting):
            poll.register(sock, select.POLLIN | (select.POLLOUT if out else 0))
            if not poll.poll(self._where.patience_s * MS_PER_S):
                raise Violation(f"{len(waiting) - answered} control requests are not answered")
            try:
                if out:
                    out = out[sock.send(out) :]
            except BlockingIOError:
                pass
            except ConnectionError as exc:
                raise Violation(f"a session was closed without a reason: {exc}") from exc
            answered += self._take(sock, parser, waiting, answered)
        sock.settimeout(self._where.patience_s)
        self.tally["answered"] += answered

    def _take(
        self, sock: socket.socket, parser: ControlParser, waiting: list[ControlPiece], answered: int
    ) -> int:
        """Reads what is there and checks it against the requests from number `answered` on."""
        try:
            # Descriptors that come along are dropped by the kernel, as there is no room for them.
            data = sock.recv(_READ_BYTES)
        except BlockingIOError:
            return 0
        except ConnectionError as exc:
            raise Violation(f"a session was closed without a reason: {exc}") from exc
        if not data:
            raise Violation(f"a session ended with {len(waiting) - answered} answers missing")
        parser.feed(data)
        taken = 0
        while (frame := parser.next_frame()) is not None:
            reply = frame.message
            if answered + taken >= len(waiting) or not isinstance(reply, ReplyMessage):
                raise Violation(f"the target sent {reply!r}, which nobody asked for")
            self._check(waiting[answered + taken], reply)
            taken += 1
        return taken

    def _check(self, asked: ControlPiece, reply: ReplyMessage) -> None:
        status = Status.COMPLETE if reply.error is None else reply.error.code
        self.tally["failed"] += status != Status.COMPLETE
        if reply.request_id != asked.request_id or asked.status not in (None, status):
            raise Violation(f"{reply!r} answers the request {asked.data.hex()}")
        if status == Status.INTERNAL:
            raise Violation(f"the request {asked.data.hex()} met a bug: {reply!r}")

    def _end(self, sock: socket.socket, rng: random.Random, is_unix: bool) -> None:
        choice = rng.random()
        if choice < 0.1:
            end_connection(sock, b"", True, self._where)
            return
        if choice < 0.2 and is_unix:
            _send_descriptor(sock)
            self.tally["broken"] += 1
            end_connection(sock, b"", False, self._where)
            return
        data = rng.randbytes(rng.choice((1, 4, 5, 100)))
        if choice < 0.7:
            data = _mutated(rng, self._legal(rng))
        elif choice < 0.8:
            data = encode_message(ReplyMessage(rng.choice((0, 1, U64_MAX))))
        parser = ControlParser(REQUEST_LIMITS)
        parser.feed(data)
        try:
            frame = parser.next_frame()
        except ProtocolError:
            frame, breaks = None, True
        else:
            breaks = isinstance(frame.message, ReplyMessage) if frame else False
        if frame is not None and not breaks:
            # A mutation that is a good message, and would be answered: its first half ends the session too.
            data = data[: len(data) // 2]
            breaks = False
        self.tally["broken"] += breaks
        end_connection(sock, data, not breaks, self._where)


def map_once(where: Where) -> None:
    """Has the target open the read-only descriptors that it keeps for mapping, one a region it allocated."""
    for region in where.facts.regions:
        with where.greet(ConnectionKind.CONTROL, is_unix=True) as sock:
            params = {"handle": region.handle, "access": 1}
            sock.sendall(encode_message(RequestMessage(1, "map", params)))
            if not sock.recv(_READ_BYTES):
                raise Violation("a session ended instead of answering")
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(_READ_BYTES):
                pass


def _params(rng: random.Random) -> dict[str, Any]:
    return {rng.choice(("", "handle", "a" * 32)): rng.choice((0, None, "x", [[[]]], {"a": {}}, b"\0" * 64))}


def _mutated(rng: random.Random, data: bytes) -> bytes:
    """Some bytes after the length word changed, dropped or repeated, the length word fitted or left."""
    body = bytearray(data[4:])
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(body) + 1)
        choice = rng.random()
        if choice < 0.6 and at < len(body):
            body[at] ^= 1 << rng.randrange(8)
        elif choice < 0.8:
            del body[at : at + rng.randint(1, 4)]
        else:
            body[at:at] = msgpack.packb(rng.choice((None, 0, -1, [], {}, "x", 1.5, U64_MAX)))
    length = len(body) if rng.random() < 0.95 else rng.choice((0, 65_537, 1 << 24, U32_MAX))
    return struct.pack("<I", length) + bytes(body)


def _judge(data: bytes) -> ControlPiece | None:
    """The frame and its answer as the reference sees it, or None for one that ends the session."""
    parser = ControlParser(REQUEST_LIMITS)
    parser.feed(data)
    try:
        frame = parser.next_frame()
    except ProtocolError:
        return None
    if frame is None or parser.is_inside_frame or isinstance(frame.message, ReplyMessage):
        return None
    message = frame.message
    if isinstance(message, PushMessage):
        return ControlPiece(data, None)
    known = {"probe": Status.COMPLETE, "describe": Status.COMPLETE, "release": Status.COMPLETE}
    status: int | None = known.get(message.method)
    if message.method not in _METHODS:
        status = Status.UNSUPPORTED
    return ControlPiece(data, message.request_id, status)


def _send_descriptor(sock: socket.socket) -> None:
    """Sends a request with a descriptor, which no request may have."""
    fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    try:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd] * 3))
        sock.sendmsg([encode_message(RequestMessage(1, "probe"))], [rights])
    finally:
        os.close(fd)
