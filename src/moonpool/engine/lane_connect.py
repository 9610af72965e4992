"""Opening a data lane: a connection of kind 2 whose descriptor goes to the native side."""

from __future__ import annotations

from collections.abc import Callable

from moonpool.clock import Deadline, SystemClock
from moonpool.config import EngineConfig
from moonpool.engine.dialing import DialRequest, dial
from moonpool.ids import InstanceId
from moonpool.wire.hello import ConnectionKind


def connect_lane(
    address: str,
    config: EngineConfig,
    instance: InstanceId,
    expected_instance: InstanceId | None,
    timeout_s: float,
    on_socket: Callable[[int], None] | None = None,
) -> int:
    """A connected, blocking, close-on-exec descriptor, ready for the first group; the caller owns it.

    `address` is "host:port", "[v6]:port" or "@name"; `expected_instance` None takes whoever answers. Blocks
    the calling thread, without the GIL, for at most `timeout_s` seconds; who duplicates the descriptor given
    to `on_socket` can end the wait by shutting it down. Errors as `dial` lists them.
    """
    deadline = Deadline.after_s(SystemClock().now_ns(), timeout_s)
    request = DialRequest(ConnectionKind.LANE, instance, expected_instance, on_socket)
    greeted = dial(address, request, config, deadline)
    fd = greeted.sock.detach()
    greeted.close()
    return fd
