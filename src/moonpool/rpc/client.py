"""A client of the rpc for threads: one connection, any number of calls at once, pushes on request.

A call runs in its caller's thread: who waits for an answer reads the socket, for the others too.
Reconnecting is the caller's business: once a call has raised a `PeerError` other than `TransferTimeout` and
`RpcError`, the connection is over (`closed_reason`), and a new client has to be made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self, final

from moonpool.errors import Status
from moonpool.ids import InstanceId, new_instance_id
from moonpool.native.io.rpc_client import RpcConnection
from moonpool.rpc.dialing import dial_server
from moonpool.rpc.errors import RpcError
from moonpool.rpc.limits import ClientLimits
from moonpool.wire.rpc import RpcFault, pack_value, unpack_fault, unpack_value

DEFAULT_TIMEOUT_S: Final = 10.0


@final
class RpcClient:
    """A connection to a server; threads may share it. Made by connecting, which blocks.

    `address` is "host:port", "@abstract name" or "/path/of/a/unix/socket". `make_error` turns the fault of a
    reply into what the call raises (`RpcError` by default). Raises as `moonpool.rpc.dialing.dial_server`.
    """

    def __init__(
        self,
        address: str,
        *,
        instance: InstanceId | None = None,
        secret: bytes | None = None,
        limits: ClientLimits | None = None,
        make_error: Callable[[RpcFault], Exception] | None = None,
    ) -> None:
        limits = limits or ClientLimits()
        greeted = dial_server(address, instance=instance or new_instance_id(), secret=secret, limits=limits)
        make: Callable[[RpcFault], Exception] = make_error or (lambda fault: RpcError(fault, address))
        try:
            if greeted.server is None:
                raise AssertionError
            #: The server's instance, as it said in its hello.
            self.server_instance = InstanceId(greeted.server.instance)
            fd = greeted.sock.detach()
        finally:
            greeted.close()
        self.address = address
        self._connection = RpcConnection(
            fd, limits, peer=address, make_error=lambda told: make(unpack_fault(told))
        )

    @property
    def native(self) -> RpcConnection:
        """The native connection: hot methods with fewer steps in between."""
        return self._connection

    @property
    def closed_reason(self) -> Status | None:
        """None while calls can be made, else why not."""
        status = self._connection.closed_reason
        return Status(status) if status else None

    def call(self, method: str, params: Sequence[Any] = (), timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        """The result of a method.

        Raises what `make_error` made of the server's error, `TransferTimeout` (the answer may still come and
        is then dropped), another `PeerError` when the connection is over, `UsageError` or
        `LimitExceeded` for params that cannot be sent.
        """
        return unpack_value(self._connection.call(method, pack_value(list(params)), timeout_s))

    def next_push(self, timeout_s: float) -> tuple[str, list[Any]] | None:
        """The oldest push as (method, params), or None when none came in time; any thread may wait.

        Pushes are kept up to `pushes_max`. They are read while somebody waits, for a push or for an answer.
        """
        push = self._connection.next_push(timeout_s)
        return None if push is None else (push[0], unpack_value(push[1]))

    def close(self) -> None:
        """Ends the connection; calls in progress raise `PeerGone`. Idempotent."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
