"""Listening sockets of a server: tcp on IPv4 or IPv6, unix sockets with a path or an abstract name."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from dataclasses import dataclass
from typing import Final, final

from moonpool.engine.peer_address import UNIX_NAME_BYTES_MAX
from moonpool.errors import ResourceError, UsageError
from moonpool.metadata.endpoint import format_endpoint, parse_endpoint

#: The kernel cuts a longer queue to net.core.somaxconn.
BACKLOG_MAX: Final = 4_096
_ANY_PORT: Final = ":0"
_PLACEHOLDER: Final = ":1"


@final
@dataclass(slots=True)
class Listening:
    """A non-blocking listener, and the address that clients use. Owns the socket and the file of a path."""

    sock: socket.socket
    address: str
    path: str = ""

    def close(self) -> None:
        """Closes the listener and removes its file; idempotent."""
        self.sock.close()
        if self.path:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            self.path = ""


def listen_on(endpoint: str, *, backlog: int) -> Listening:
    """Listens on "host:port" (port 0: any), "@abstract name" or "/path"; a path is open to its owner only.

    A socket file that nobody listens on any more is replaced. Raises `ResourceError` with the errno when the
    address cannot be had, `UsageError` for a text that is no endpoint.
    """
    try:
        if endpoint.startswith("@"):
            return _listen_unix(endpoint, "\0" + endpoint[1:], backlog)
        if endpoint.startswith("/"):
            return _listen_path(endpoint, backlog)
        return _listen_tcp(endpoint, backlog)
    except OSError as exc:
        if isinstance(exc, ResourceError | UsageError):
            raise
        reason = exc.strerror or str(exc)
        message = f"cannot listen on {endpoint}: {reason}; stop what listens there or choose another address"
        raise ResourceError(message, errno=exc.errno or 0, value=endpoint) from exc


def _listen_tcp(endpoint: str, backlog: int) -> Listening:
    if endpoint.endswith(_ANY_PORT):
        host, port = parse_endpoint(endpoint.removesuffix(_ANY_PORT) + _PLACEHOLDER)[0], 0
    else:
        host, port = parse_endpoint(endpoint)
    flags = socket.AI_PASSIVE | socket.AI_NUMERICSERV
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except (socket.gaierror, UnicodeError) as exc:
        raise UsageError(f"the host {host!r} is not known: {exc}", value=endpoint) from exc
    family, _, _, _, address = found[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A restarted process must not wait for its predecessor's closed connections to time out.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        _begin(sock, address, backlog)
        return Listening(sock, format_endpoint(host, sock.getsockname()[1]))
    except BaseException:
        sock.close()
        raise


def _listen_path(path: str, backlog: int) -> Listening:
    _check_name(path)
    _remove_stale(path)
    listening = _listen_unix(path, path, backlog)
    listening.path = path
    try:
        os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)
    except BaseException:
        listening.close()
        raise
    return listening


def _listen_unix(endpoint: str, name: str, backlog: int) -> Listening:
    _check_name(name)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _begin(sock, name, backlog)
        return Listening(sock, endpoint)
    except BaseException:
        sock.close()
        raise


def _check_name(name: str) -> None:
    if not 1 < len(os.fsencode(name)) <= UNIX_NAME_BYTES_MAX or "\0" in name[1:]:
        raise UsageError(f"a unix socket's name has 1 to {UNIX_NAME_BYTES_MAX - 1} bytes", value=name)


def _remove_stale(path: str) -> None:
    """Removes the file of a listener that is gone; one that lives is found by connecting, and stays."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError:
            return


def _begin(sock: socket.socket, address: object, backlog: int) -> None:
    sock.bind(address)  # type: ignore[arg-type]
    sock.listen(min(backlog, BACKLOG_MAX))
    sock.setblocking(False)
