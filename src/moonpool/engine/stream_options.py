"""Socket options of connections between engines: no delay, early notice of a dead host, congestion control.

Sources: tcp(7); docs/architecture.md. A connection that stays on this host gets its own congestion control,
because algorithms made for long paths pace loopback traffic far below what it can do.

It is chosen before the connection is made. A socket that was established under bbr keeps its pacing when it
changes to another algorithm later (the kernel sets sk_pacing_status and never clears it), which costs about a
fifth of the bandwidth.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from typing import Any, Final

from moonpool.config import EngineConfig

KEEPALIVE_IDLE_S: Final = 5
KEEPALIVE_INTERVAL_S: Final = 2
KEEPALIVE_PROBES: Final = 3


def stays_on_host(sock: socket.socket) -> bool:
    """True when both ends of a connection are on this host: unix, loopback, or the same address twice."""
    if sock.family == socket.AF_UNIX:
        return True
    local, remote = _host_of(sock.getsockname()), _host_of(sock.getpeername())
    return local == remote or remote.is_loopback


def tune_stream_socket(sock: socket.socket, config: EngineConfig) -> None:
    """Sets the options of a connected socket; a unix socket needs none.

    A congestion control that the system does not offer is left alone: the lane works without it. Raises
    OSError when the connection is gone already.
    """
    if sock.family == socket.AF_UNIX:
        return
    options = (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
        # Without it the kernel sends unacknowledged bytes again and again for a quarter of an hour.
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, config.stall_timeout_ms),
    )
    for level, option, value in options:
        sock.setsockopt(level, option, value)
    if stays_on_host(sock):
        _set_congestion(sock, config.congestion_local)
    else:
        _set_congestion(sock, config.congestion_remote or _system_congestion())


def tune_listener(sock: socket.socket, config: EngineConfig) -> None:
    """Before listen: accepted connections start with the local choice; those from other hosts are changed on
    accept.

    (From a plain algorithm to a pacing one is the direction in which a late change works.)
    """
    if sock.family != socket.AF_UNIX:
        _set_congestion(sock, config.congestion_local)


def tune_before_connect(sock: socket.socket, address: Any, config: EngineConfig) -> None:
    """Before connect: the local choice when the address is one of this host's, else the remote one."""
    if sock.family != socket.AF_UNIX:
        local = _is_own_address(sock.family, address)
        _set_congestion(sock, config.congestion_local if local else config.congestion_remote)


def _is_own_address(family: int, address: Any) -> bool:
    """True when the route to an address starts at that very address (nothing is sent to find out)."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return _host_of(probe.getsockname()) == _host_of(address)
    except (OSError, ValueError):
        return False


def _set_congestion(sock: socket.socket, name: str) -> None:
    """Sets an algorithm. One that the system does not offer, or not to us, is left out: all works without it.

    Of an unprivileged process the system may refuse cubic (net.ipv4.tcp_allowed_congestion_control); reno,
    which it always allows and which does not pace either, then stands in for it.
    """
    for wanted in dict.fromkeys((name, "reno" if name == "cubic" else name)):
        with contextlib.suppress(OSError):
            if wanted and _congestion_of(sock) != wanted:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, wanted.encode())
            return


def _system_congestion() -> str:
    """What a new socket of this host uses."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as fresh:
        return _congestion_of(fresh)


def _congestion_of(sock: socket.socket) -> str:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def _host_of(address: Any) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The host of a socket address, without the scope of a link-local one or IPv6's wrapping of IPv4."""
    host = ipaddress.ip_address(str(address[0]).partition("%")[0])
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return mapped or host
