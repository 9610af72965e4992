"""Addresses of peers, what a failed connect means, and which connections stay on this host."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator

import pytest

from moonpool.clock import Deadline, SystemClock
from moonpool.engine import peer_address
from moonpool.engine.peer_address import connect_failure, resolve_peer_address, unix_name_of
from moonpool.engine.stream_options import stays_on_host
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


def within(timeout_s: float) -> Deadline:
    return Deadline.after_s(SystemClock().now_ns(), timeout_s)


def test_digits_are_resolved_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda self: pytest.fail("a thread was started"))
    (v4,) = resolve_peer_address("127.0.0.1:80", within(0))
    assert (v4.family, v4.address, v4.text) == (socket.AF_INET, ("127.0.0.1", 80), "127.0.0.1:80")
    (v6,) = resolve_peer_address("[::1]:81", within(0))
    assert (v6.family, v6.address, v6.text) == (socket.AF_INET6, ("::1", 81, 0, 0), "[::1]:81")
    assert not v4.is_unix


@pytest.mark.parametrize("mark", ["@", "\0"])
def test_unix_names(mark: str) -> None:
    (found,) = resolve_peer_address(mark + "moonpool/ab", within(0))
    assert found.is_unix
    assert (found.address, found.text) == ("\0moonpool/ab", "@moonpool/ab")
    assert unix_name_of(InstanceId(b"\xab" * 16)) == "@moonpool/" + "ab" * 16


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:65536", "@", "@" + "n" * 108, "a..b:1"])
def test_texts_that_are_no_address(text: str) -> None:
    with pytest.raises(UsageError):
        resolve_peer_address(text, within(20))


@pytest.fixture
def silent_resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A resolver of host names that answers only once the test is over."""
    release = threading.Event()
    real = socket.getaddrinfo

    def look_up(host: str, port: int, *, type: int, flags: int) -> object:
        if not flags & socket.AI_NUMERICHOST:
            release.wait(20)
        return real(host, port, type=type, flags=flags)

    monkeypatch.setattr(peer_address.socket, "getaddrinfo", look_up)
    yield
    release.set()
    for thread in threading.enumerate():
        if thread.name == "moonpool-resolver":
            thread.join(20)


@pytest.mark.usefixtures("silent_resolver")
def test_a_resolver_that_hangs_does_not_hold_the_caller() -> None:
    with pytest.raises(TransferTimeout, match="not resolved in time"):
        resolve_peer_address("localhost:80", within(0.02))


@pytest.mark.parametrize(
    ("number", "error"), [(socket.EAI_AGAIN, PeerStalled), (socket.EAI_FAIL, UsageError)]
)
def test_a_resolver_that_fails(
    monkeypatch: pytest.MonkeyPatch, number: int, error: type[MoonpoolError]
) -> None:
    def look_up(_host: str, _port: int, *, type: int, flags: int) -> object:
        raise socket.gaierror(socket.EAI_NONAME if flags & socket.AI_NUMERICHOST else number, "no")

    monkeypatch.setattr(peer_address.socket, "getaddrinfo", look_up)
    with pytest.raises(error):
        resolve_peer_address("some-host:80", within(20))


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ECONNREFUSED, PeerRefused),
        (errno.EHOSTUNREACH, PeerStalled),
        (errno.ENETUNREACH, PeerStalled),
        (errno.ETIMEDOUT, PeerStalled),
        (errno.EACCES, AccessDenied),
        (errno.EMFILE, ResourceError),
        (errno.EADDRNOTAVAIL, ResourceError),
    ],
)
def test_each_failure_of_connect_has_its_error(number: int, kind: type[MoonpoolError]) -> None:
    error = connect_failure(OSError(number, "text"), "host:1")
    assert type(error) is kind
    assert (error.peer, error.errno) == ("host:1", number)


class Ends:
    """Stands for a socket: only its two addresses matter."""

    family = socket.AF_INET6

    def __init__(self, local: str, remote: str) -> None:
        self._local, self._remote = local, remote

    def getsockname(self) -> tuple[str, int]:
        return self._local, 1

    def getpeername(self) -> tuple[str, int]:
        return self._remote, 2


@pytest.mark.parametrize(
    ("local", "remote", "stays"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "127.9.9.9", True),
        ("::1", "::1", True),
        ("10.0.0.7", "10.0.0.7", True),
        ("10.0.0.7", "10.0.0.8", False),
        ("::ffff:10.0.0.7", "::ffff:10.0.0.7", True),
        ("::ffff:127.0.0.1", "::ffff:127.0.0.2", True),
        ("fe80::1%eth0", "fe80::1%eth0", True),
        ("fe80::1%eth0", "fe80::2%eth0", False),
        ("2001:db8::1", "2001:db8::2", False),
    ],
)
def test_which_connections_stay_on_this_host(local: str, remote: str, stays: bool) -> None:
    assert stays_on_host(Ends(local, remote)) is stays  # type: ignore[arg-type]
