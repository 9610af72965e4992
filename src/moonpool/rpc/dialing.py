"""Connecting to a server: the engine's way of connecting and greeting, with the bounds of an rpc client."""

from __future__ import annotations

from moonpool.clock import Deadline, SystemClock
from moonpool.config import EngineConfig
from moonpool.engine.dialing import DialRequest, GreetedPeer, dial
from moonpool.ids import InstanceId
from moonpool.rpc.limits import ClientLimits
from moonpool.wire.hello import ConnectionKind


def dial_server(
    address: str, *, instance: InstanceId, secret: bytes | None, limits: ClientLimits
) -> GreetedPeer:
    """A greeted connection to "host:port", "@abstract name" or "/path/of/a/unix/socket"; blocks.

    Raises `PeerRefused`, `PeerStalled`, `HandshakeFailed`, `AccessDenied`, `ProtocolError`, `ResourceError`,
    and `UsageError` for what is no address. The caller owns the blocking socket.
    """
    config = EngineConfig(
        cluster_secret=secret,
        connect_timeout_ms=limits.connect_ms,
        handshake_timeout_ms=limits.handshake_ms,
        stall_timeout_ms=limits.stall_ms,
    )
    within_ms = limits.connect_ms + limits.handshake_ms
    deadline = Deadline.after_ms(SystemClock().now_ns(), within_ms)
    return dial(address, DialRequest(ConnectionKind.RPC, instance), config, deadline)
