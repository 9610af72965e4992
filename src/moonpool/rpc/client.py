"""A client of the rpc for threads: one connection, any number of calls at once, pushes on request.

A call runs in its caller's thread: who waits for an answer reads the socket, for the others too.
Reconnecting is the caller's business: once a call has raised a `PeerError` other than `TransferTimeout` and
`RpcError`, the connection is over (`closed_reason`), and a new client has to be made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeAlias, final

from moonpool.errors import Status
from moonpool.ids import InstanceId, new_instance_id
from moonpool.native.io.rpc_client import RpcConnection
from moonpool.native.io.rpc_codec import EndReply, LookupReply, PutReply
from moonpool.rpc.dialing import dial_server
from moonpool.rpc.errors import RpcError
from moonpool.rpc.limits import ClientLimits
from moonpool.wire.rpc import RpcFault, pack_value, unpack_fault, unpack_value

DEFAULT_TIMEOUT_S: Final = 10.0
Key: TypeAlias = str | bytes
Buffer: TypeAlias = bytes | bytearray | memoryview


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

    def fileno(self) -> int:
        """The descriptor, borrowed; -1 once it is closed."""
        return self._connection.fileno()

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

    # The hot methods, encoded and decoded natively; errors as those of `call`. Keys are str or bytes.

    def exists(self, keys: Sequence[Key], lease_ms: int = 0, timeout_s: float = DEFAULT_TIMEOUT_S) -> bytes:
        """One byte for each key: 1 when the object is there, 0 when not."""
        return self._connection.exists(keys, lease_ms, timeout_s)

    def lookup(
        self, keys: Sequence[Key], lease_ms: int = 0, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> LookupReply:
        """Where the objects are: entries in the order of the keys."""
        return self._connection.lookup(keys, lease_ms, timeout_s)

    def put_start(
        self,
        keys: Sequence[Key],
        sizes: Sequence[int],
        policy: Mapping[str, Any] | None = None,
        wait_ms: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> PutReply:
        """Extents for new objects, with their grants. `timeout_s` is to be longer than `wait_ms`."""
        packed = pack_value(dict(policy)) if policy else None
        return self._connection.put_start(keys, sizes, packed, wait_ms, timeout_s)

    def put_end(
        self,
        put_id: int,
        indexes: Sequence[int],
        digests: Buffer,
        chunks: Sequence[Buffer] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> EndReply:
        """Ends entries of a put.

        `digests` holds 16 bytes for each index, `chunks` the chunk digests of each (None: none has any).
        """
        return self._connection.put_end(put_id, indexes, digests, chunks, timeout_s)

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
