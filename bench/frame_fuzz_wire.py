"""Connections to a fuzzed target: hellos, exchanges that send and read at once, and how connections end."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any, Final, final

from moonpool.bench.frame_fuzz_model import TargetFacts, Violation
from moonpool.errors import Status
from moonpool.ids import new_instance_id
from moonpool.units import MIB, MS_PER_S
from moonpool.wire.hello import NONCE_BYTES, SERVER_HELLO_BYTES, ClientHello, ConnectionKind, ServerHello

SEND_BYTES_MAX: Final = MIB


@final
@dataclass(frozen=True, slots=True)
class Where:
    """The target and how long its answers may take; a machine under load needs patience."""

    facts: TargetFacts
    patience_s: float

    def address(self, is_unix: bool) -> Any:
        """Of the listener of that family."""
        return "\0" + self.facts.unix_name[1:] if is_unix else ("127.0.0.1", self.facts.port)

    def connect(self, is_unix: bool) -> socket.socket:
        """A connection whose hello has not begun."""
        sock = socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.settimeout(self.patience_s)
            sock.connect(self.address(is_unix))
            if not is_unix:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            sock.close()
            raise
        return sock

    def greet(self, kind: ConnectionKind, is_unix: bool) -> socket.socket:
        """A connection that the target let in."""
        sock = self.connect(is_unix)
        try:
            sock.sendall(ClientHello(kind, new_instance_id(), os.urandom(NONCE_BYTES)).encode())
            answer = receive_up_to(sock, SERVER_HELLO_BYTES)
            if len(answer) != SERVER_HELLO_BYTES:
                raise Violation("a good hello was not answered")
            status = ServerHello.decode(answer).status
            if status is not Status.COMPLETE:
                raise Violation(f"a good hello was refused with {status.name}")
        except BaseException:
            sock.close()
            raise
        return sock


def receive_up_to(sock: socket.socket, size_bytes: int) -> bytes:
    """So many bytes, or fewer when the connection ended."""
    # MSG_WAITALL does not wait on a socket that has a timeout, since Python makes that one non-blocking.
    out = b""
    while len(out) < size_bytes:
        piece = sock.recv(size_bytes - len(out))
        if not piece:
            break
        out += piece
    return out


def exchange(
    sock: socket.socket, data: bytes, answer_bytes: int, where: Where, piece_bytes: int
) -> bytearray:
    """Sends all of `data` in pieces while reading exactly `answer_bytes`; raises `Violation` if less came."""
    answer = bytearray(answer_bytes)
    out, into = memoryview(data), memoryview(answer)
    sock.setblocking(False)
    poll = select.poll()
    poll.register(sock, select.POLLIN | select.POLLOUT)
    try:
        while out or into:
            poll.modify(sock, (select.POLLIN if into else 0) | (select.POLLOUT if out else 0))
            if not poll.poll(where.patience_s * MS_PER_S):
                raise Violation(
                    f"no progress for {where.patience_s} s, {len(out)} bytes unsent, {len(into)} unread"
                )
            if out:
                out = out[_send(sock, out[:piece_bytes]) :]
            if into:
                into = into[_receive(sock, into) :]
    except ConnectionError as exc:
        raise Violation(f"the target closed a connection without a reason: {exc}") from exc
    sock.settimeout(where.patience_s)
    return answer


def _send(sock: socket.socket, data: memoryview) -> int:
    try:
        return sock.send(data)
    except BlockingIOError:
        return 0


def _receive(sock: socket.socket, into: memoryview) -> int:
    try:
        n = sock.recv_into(into)
    except BlockingIOError:
        return 0
    if not n:
        raise Violation(f"the target closed a connection with {len(into)} bytes of answers missing")
    return n


def end_connection(sock: socket.socket, data: bytes, hang_up: bool, where: Where) -> None:
    """Sends the last bytes and waits for the target's end of the connection; `Violation` for an answer."""
    with sock:
        try:
            sock.sendall(data)
            if hang_up:
                sock.shutdown(socket.SHUT_WR)
            rest = sock.recv(4_096)
        except TimeoutError as exc:
            raise Violation(f"the connection stays open after {data[:400].hex()}") from exc
        except (ConnectionError, BrokenPipeError):
            return
        if rest:
            raise Violation(f"{rest[:64].hex()} came back for the broken {data[:400].hex()}")


def reset(sock: socket.socket) -> None:
    """Closes a connection the rude way: the peer sees ECONNRESET."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def wait_until(condition: Any, timeout_s: float) -> bool:
    """Polls a condition that another process brings about; False after the bound."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
