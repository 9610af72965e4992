"""A server's rpc port as its loop thread sees it: decoded requests come out, results and errors go in.

One thread owns it. `poll` runs the native loop, which answers hot methods by itself; `reply`, `fail`,
`push`, `bind` and `close_connection` belong to the same thread, `wake` to any. Frames whose params cannot be
decoded are answered with BAD_PARAMS here and never come out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeAlias, final

from moonpool.errors import LimitExceeded, ProtocolError
from moonpool.ids import InstanceId
from moonpool.native.io.rpc_server import CLOSED, RpcServer
from moonpool.rpc.errors import fault_of
from moonpool.rpc.limits import ServerLimits
from moonpool.rpc.listener import RpcListener
from moonpool.wire.rpc import RpcCode, RpcFault, RpcPush, pack_fault, pack_value, unpack_value

_NIL: Final = pack_value(None)


class HotMethods(Protocol):
    """A native core that answers hot methods in the loop."""

    def hot_binding(self) -> object:
        """The capsule of native/io/rpc_hot.pxd; good as long as this object lives."""
        ...


@final
@dataclass(frozen=True, slots=True)
class Request:
    """A call that waits for `reply` or `fail`."""

    connection: int
    message_id: int
    method: str
    params: list[Any]


@final
@dataclass(frozen=True, slots=True)
class Closed:
    """A connection that is gone; its number will never be used again. Its open requests need no answer."""

    connection: int
    reason: str


PortEvent: TypeAlias = Request | Closed


@final
class RpcPort:
    """Listeners, connections and the loop of one server. Begins to accept with `start`.

    `hot` answers hot methods natively (see native/io/rpc_hot.pxd); `methods` are the names whose latencies
    are kept. Raises as `RpcListener`.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        instance: InstanceId,
        secret: bytes | None = None,
        limits: ServerLimits | None = None,
        hot: HotMethods | None = None,
        methods: Iterable[str] = (),
    ) -> None:
        limits = limits or ServerLimits()
        self.native = RpcServer(limits, hot=hot, methods=tuple(methods))
        try:
            self._listener = RpcListener(
                endpoints, self.native, instance=instance, secret=secret, limits=limits
            )
        except BaseException:
            self.native.close()
            raise

    @property
    def addresses(self) -> list[str]:
        """What clients may connect to, in the order of the endpoints."""
        return self._listener.addresses

    def start(self) -> None:
        """Begins to accept connections."""
        self._listener.start()

    def wake(self) -> None:
        """Makes the running or the next `poll` return; any thread may call."""
        self.native.wake()

    def poll(self, timeout_ms: int) -> list[PortEvent]:
        """Serves until there are events, a wake-up, changes by hot methods, or the timeout.

        Returns the events, oldest first.
        """
        events: list[PortEvent] = []
        for event in self.native.poll(timeout_ms):
            if event[0] == CLOSED:
                events.append(Closed(event[1], event[2]))
                continue
            _, connection, message_id, method, packed = event
            try:
                params = unpack_value(packed)
            except ProtocolError as exc:
                fault = RpcFault(RpcCode.BAD_PARAMS, RpcCode.BAD_PARAMS.name, exc.message)
                self.fail(connection, message_id, fault)
            else:
                events.append(Request(connection, message_id, method, params))
        return events

    def reply(self, connection: int, message_id: int, result: Any) -> bool:
        """Answers a request; False when nobody waits any more.

        A result above a frame becomes TOO_LARGE_FRAME.
        """
        try:
            return self.native.reply(connection, message_id, pack_value(result))
        except LimitExceeded as exc:
            fault = RpcFault(RpcCode.TOO_LARGE_FRAME, RpcCode.TOO_LARGE_FRAME.name, exc.message)
            return self.fail(connection, message_id, fault)

    def fail(self, connection: int, message_id: int, error: RpcFault | Exception) -> bool:
        """Answers a request with an error; False when nobody waits any more."""
        fault = error if isinstance(error, RpcFault) else fault_of(error)
        return self.native.reply(connection, message_id, _NIL, pack_fault(fault))

    def push(self, connection: int, method: str, params: Sequence[Any]) -> bool:
        """Tells a client something; False when it is gone. Raises `LimitExceeded` above a frame.

        One that does not read is closed once its unsent bytes pass `outbound_bytes_max` and a frame.
        """
        return self.native.push(connection, pack_push(RpcPush(method, params)))

    def bind(self, connection: int, client: int, tenant: int) -> bool:
        """Names a connection's client and tenant, which lets its hot methods in; False when it is gone."""
        return self.native.bind(connection, client, tenant)

    def close_connection(self, connection: int) -> bool:
        """Closes a connection once what it was sent is out; False when it is gone."""
        return self.native.close_connection(connection)

    def counters(self) -> dict[str, int]:
        """Totals and gauges of the loop and of the listeners."""
        return {**self.native.counters(), **self._listener.counters}

    def close(self) -> None:
        """Stops accepting and closes all connections; idempotent. Not while another thread polls."""
        self._listener.close()
        self.native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def pack_push(push: RpcPush) -> bytes:
    """The MessagePack of a push, as `RpcServer.push` takes it."""
    return pack_value([2, push.method, list(push.params)])
