"""Bounds on what the two ends of the rpc hold, and how long they wait: one frozen value for each end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

from moonpool.config_ranges import check_ranges
from moonpool.units import KIB, MIB
from moonpool.wire.rpc import FRAME_BYTES_MAX

#: A connection's number has 20 bits for its place.
CONNECTIONS_AT_MOST: Final = 1 << 20

_HOUR_MS: Final = 3_600_000
_SERVER_RANGES: Final[Mapping[str, tuple[int, int]]] = {
    "connections_max": (1, CONNECTIONS_AT_MOST),
    "frame_bytes_max": (1 * KIB, FRAME_BYTES_MAX),
    "outbound_bytes_max": (1 * KIB, 1 << 32),
    "buffer_bytes_max": (1 * MIB, 1 << 40),
    "unanswered_max": (1, 1 << 20),
    "events_max": (1, 1 << 16),
    "stall_ms": (1, _HOUR_MS),
    "frame_ms": (1, _HOUR_MS),
    "spin_us": (0, 10_000),
    "linger_us": (0, 1_000_000),
    "handshakes_max": (1, 65_535),
    "handshake_ms": (1, _HOUR_MS),
}
_CLIENT_RANGES: Final[Mapping[str, tuple[int, int]]] = {
    "frame_bytes_max": (1 * KIB, FRAME_BYTES_MAX),
    "pushes_max": (1, 1 << 20),
    "push_bytes_max": (1 * KIB, 1 << 32),
    "spin_us": (0, 10_000),
    "connect_ms": (1, _HOUR_MS),
    "handshake_ms": (1, _HOUR_MS),
    "stall_ms": (1, _HOUR_MS),
    "calls_max": (1, 1 << 20),
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What a server holds for its clients. Raises `UsageError` that names the wrong field."""

    #: Most connections at once, bound or not.
    connections_max: int = 4_096
    #: Bytes of one frame after its length word, both ways.
    frame_bytes_max: int = FRAME_BYTES_MAX
    #: A connection with more unsent bytes is not read until it has taken some; with a frame more it is
    #: closed.
    outbound_bytes_max: int = 4 * MIB
    #: All buffers above 64 KiB together; a connection that needs more is closed.
    buffer_bytes_max: int = 256 * MIB
    #: Requests of one connection that wait in Python; beyond it the connection is not read.
    unanswered_max: int = 1_024
    #: Requests that one `poll` hands to Python.
    events_max: int = 256
    #: A connection that takes none of its bytes for so long is closed, in milliseconds.
    stall_ms: int = 10_000
    #: Longest time for one frame to arrive whole, in milliseconds.
    frame_ms: int = 10_000
    #: How many microseconds the loop looks again after traffic before it sleeps; 0 never does.
    spin_us: int = 50
    #: Longest time that changes by hot methods wait for Python, in microseconds.
    linger_us: int = 500
    #: Most connections whose hello is not finished; beyond it the oldest is closed.
    handshakes_max: int = 64
    #: Longest time for a whole hello, in milliseconds.
    handshake_ms: int = 2_000

    def __post_init__(self) -> None:
        check_ranges(self, _SERVER_RANGES)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """What a client holds, and how long it waits to connect.

    Raises `UsageError` that names the wrong field.
    """

    #: Bytes of one frame after its length word, both ways.
    frame_bytes_max: int = FRAME_BYTES_MAX
    #: Pushes that came and were not taken; one more ends the connection with `QueueFull`.
    pushes_max: int = 4_096
    #: Bytes of those.
    push_bytes_max: int = 64 * MIB
    #: How many microseconds a waiting caller looks again before it sleeps; 0 never does.
    spin_us: int = 50
    #: Longest wait for a connection to be made, in milliseconds.
    connect_ms: int = 3_000
    #: Longest time for a whole hello, in milliseconds.
    handshake_ms: int = 2_000
    #: A server's host that acknowledges nothing for so long is given up (tcp), in milliseconds.
    stall_ms: int = 10_000
    #: Calls of one asyncio client that wait for their answers; one more raises `QueueFull`.
    calls_max: int = 4_096

    def __post_init__(self) -> None:
        check_ranges(self, _CLIENT_RANGES)
