"""Socket options of connections between engines: no delay, early notice of a dead host, congestion control.

Sources: tcp(7); docs/architecture.md. A connection that stays on this host gets its own congestion control,
because algorithms made for long paths pace loopback traffic far below what it can do.
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
    congestion = config.congestion_local if stays_on_host(sock) else config.congestion_remote
    if congestion:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())


def _host_of(address: Any) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The host of a socket address, without the scope of a link-local one or IPv6's wrapping of IPv4."""
    host = ipaddress.ip_address(str(address[0]).partition("%")[0])
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return mapped or host
