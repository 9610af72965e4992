"""What a call raises when the server answered with an error."""

from __future__ import annotations

from typing import Any, final

from moonpool.errors import MoonpoolError, PeerError
from moonpool.wire.rpc import RpcCode, RpcFault


@final
class RpcError(PeerError):
    """The server answered a call with an error: `code` and `wire_name` say which.

    Codes below 100 are the rpc's own (`moonpool.wire.rpc.RpcCode`).
    """

    sentence = "the server refused the call"

    def __init__(self, fault: RpcFault, peer: str = "") -> None:
        self.code = fault.code
        self.wire_name = fault.name
        super().__init__(f"the server answered {fault.name}: {fault.message}", peer=peer)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.code, self.wire_name, self.message, dict(self.fields)))


def _rebuild(code: int, wire_name: str, message: str, fields: dict[str, Any]) -> RpcError:
    error = RpcError.__new__(RpcError)
    error.code = code
    error.wire_name = wire_name
    MoonpoolError.__init__(error, message, **fields)
    return error


def fault_of(error: BaseException) -> RpcFault:
    """What a client is told of an error.

    Its code and name when it has them, INTERNAL otherwise, and of a foreign one nothing but its kind.
    """
    code, name = getattr(error, "code", 0), getattr(error, "wire_name", "")
    if isinstance(error, MoonpoolError) and code and name:
        return RpcFault(code, name, str(error))
    if isinstance(error, MoonpoolError):
        return RpcFault(RpcCode.INTERNAL, RpcCode.INTERNAL.name, f"{type(error).__name__}: {error}")
    return RpcFault(RpcCode.INTERNAL, RpcCode.INTERNAL.name, f"the server failed with {type(error).__name__}")
