"""Addresses of peers: "host:port", "[::1]:port", or a unix socket: "@moonpool/..." (abstract) or "/a/path".

Resolving a host name can take as long as the resolver likes, so it runs beside the caller, who waits no
longer than its deadline. Addresses in digits never leave the calling thread.
"""

from __future__ import annotations

import errno
import os
import queue
import socket
import threading
from dataclasses import dataclass
from typing import Final, TypeAlias, cast, final

from moonpool.clock import Deadline, SystemClock
from moonpool.errors import (
    AccessDenied,
    MoonpoolError,
    PeerRefused,
    PeerStalled,
    ResourceError,
    TransferTimeout,
    UsageError,
)
from moonpool.ids import InstanceId
from moonpool.metadata.endpoint import parse_endpoint

#: The kernel's sun_path has 108 bytes, of which an abstract name's leading NUL takes one.
UNIX_NAME_BYTES_MAX: Final = 107

_ABSTRACT_MARKS: Final = ("@", "\0")
_PATH_MARK: Final = "/"
#: Also a peer that took the connection and reset it at once.
_REFUSED: Final = frozenset(
    {errno.ECONNREFUSED, errno.ENOENT, errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN, errno.ECONNABORTED}
)
_UNREACHABLE: Final = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT})
_FORBIDDEN: Final = frozenset({errno.EACCES, errno.EPERM})

SocketAddress: TypeAlias = str | tuple[str, int] | tuple[str, int, int, int]
_Answer: TypeAlias = "list[PeerAddress] | socket.gaierror"


@final
@dataclass(frozen=True, slots=True)
class PeerAddress:
    """One address to connect to: what `socket` needs, and the text people know it by."""

    family: socket.AddressFamily
    address: SocketAddress
    text: str

    @property
    def is_unix(self) -> bool:
        """True for a unix socket of this host."""
        return self.family == socket.AF_UNIX


def unix_name_of(instance: InstanceId) -> str:
    """The abstract unix socket on which an instance listens, in its printable form "@moonpool/<hex>"."""
    return f"@moonpool/{instance.hex()}"


def resolve_peer_address(text: str, deadline: Deadline) -> list[PeerAddress]:
    """Every address a text stands for, best first; at least one.

    Raises `UsageError` for a text that is no address or a host that does not exist, `PeerStalled` when the
    resolver is away, and `TransferTimeout` at the deadline.
    """
    if text.startswith(_ABSTRACT_MARKS):
        if not 1 < len(os.fsencode(text)) <= UNIX_NAME_BYTES_MAX + 1:
            raise UsageError(f"a unix socket's name has 1 to {UNIX_NAME_BYTES_MAX} bytes", value=text)
        return [PeerAddress(socket.AF_UNIX, "\0" + text[1:], "@" + text[1:])]
    if text.startswith(_PATH_MARK):
        if len(os.fsencode(text)) > UNIX_NAME_BYTES_MAX or "\0" in text:
            raise UsageError(f"a unix socket's path has at most {UNIX_NAME_BYTES_MAX} bytes", value=text)
        return [PeerAddress(socket.AF_UNIX, text, text)]
    host, port = parse_endpoint(text)
    try:
        return _look_up(text, host, port, socket.AI_NUMERICHOST)
    except (socket.gaierror, UnicodeError) as exc:
        if getattr(exc, "errno", None) != socket.EAI_NONAME:
            raise UsageError(f"{text!r} is not an address: {exc}", value=text) from exc
    return _look_up_within(text, host, port, deadline)


def connect_failure(exc: OSError, peer: str) -> MoonpoolError:
    """Makes (does not raise) the error of a connect(2) that failed."""
    number = exc.errno or 0
    if number in _REFUSED:
        return PeerRefused(peer=peer, errno=number)
    if number in _UNREACHABLE:
        message = "the peer's host cannot be reached; check the network, the route and any firewall"
        return PeerStalled(message, peer=peer, errno=number)
    if number in _FORBIDDEN:
        return AccessDenied("the system forbids connecting to the peer", peer=peer, errno=number)
    reason = os.strerror(number) if number else str(exc)
    return ResourceError(f"no connection can be made from here: {reason}", peer=peer, errno=number)


def _look_up(text: str, host: str, port: int, flags: int) -> list[PeerAddress]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags | socket.AI_NUMERICSERV)
    return [
        PeerAddress(family, cast(SocketAddress, address), text)
        for family, _, _, _, address in found
        if family in (socket.AF_INET, socket.AF_INET6)
    ]


def _look_up_within(text: str, host: str, port: int, deadline: Deadline) -> list[PeerAddress]:
    answers: queue.Queue[_Answer] = queue.Queue(maxsize=1)

    def ask() -> None:
        try:
            answers.put_nowait(_look_up(text, host, port, 0))
        except socket.gaierror as exc:
            answers.put_nowait(exc)
        except UnicodeError:
            answers.put_nowait(socket.gaierror(socket.EAI_NONAME, "not a host name"))

    # A daemon: a resolver that hangs must not keep the process from ending. It ends with its own timeouts.
    threading.Thread(target=ask, name="moonpool-resolver", daemon=True).start()
    try:
        answer = answers.get(timeout=deadline.remaining_s(SystemClock().now_ns()))
    except queue.Empty:
        raise TransferTimeout("the host name was not resolved in time", peer=text) from None
    if isinstance(answer, socket.gaierror):
        if answer.errno == socket.EAI_AGAIN:
            raise PeerStalled("the resolver of host names does not answer", peer=text) from answer
        raise UsageError(f"the host of {text!r} is not known: {answer.strerror}", value=text) from answer
    if not answer:
        raise UsageError(f"the host of {text!r} has no IPv4 or IPv6 address", value=text)
    return answer
