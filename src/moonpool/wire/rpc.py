"""Frames of the store's MessagePack-RPC: the sans-I/O reference codec of docs/rpc.md.

A frame is `length u32` (little endian, the bytes that follow, 1 to 16 MiB) and one MessagePack array::

    [0, id, method, params]   request     params is a list
    [1, id, error, result]    reply       error is nil or [code, name, message]
    [2, method, params]       push        from the server only; nobody answers it

Lists and maps nest at most 16 deep, the outer array included, and a frame has at most 262,144 of them;
extension types are not used. The native codecs of `native/io/rpc_*` make the same bytes and take the same
frames.

Source: docs/store/architecture.md, "RPC"; the MessagePack specification.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, TypeAlias, final

import msgpack  # type: ignore[import-untyped]

from moonpool.errors import LimitExceeded, ProtocolError, UsageError
from moonpool.units import MIB, U64_MAX
from moonpool.wire.nesting import check_depth

FRAME_BYTES_MAX: Final = 16 * MIB
LENGTH_BYTES: Final = 4
METHOD_BYTES_MAX: Final = 64
DEPTH_MAX: Final = 16
CONTAINERS_MAX: Final = 262_144
ERROR_NAME_CHARACTERS_MAX: Final = 64
ERROR_MESSAGE_CHARACTERS_MAX: Final = 1_024
ERROR_CODE_MAX: Final = 65_535

_LENGTH: Final = struct.Struct("<I")
_REQUEST: Final = 0
_REPLY: Final = 1
_PUSH: Final = 2


class RpcCode(IntEnum):
    """Error codes of the rpc itself; a service has its own from 100 on."""

    UNKNOWN_METHOD = 64
    BAD_PARAMS = 65
    TOO_LARGE_FRAME = 66
    OVERLOADED = 67
    INTERNAL = 68


@final
@dataclass(frozen=True, slots=True)
class RpcFault:
    """An error as it travels: a code, the name of that code, and a sentence."""

    code: int
    name: str
    message: str


@final
@dataclass(frozen=True, slots=True)
class RpcRequest:
    """Asks the server; `message_id` is any u64 that the sender has not in use, from 1."""

    message_id: int
    method: str
    params: Sequence[Any] = ()


@final
@dataclass(frozen=True, slots=True)
class RpcReply:
    """Answers the request of that id with a result or an error."""

    message_id: int
    error: RpcFault | None = None
    result: Any = None


@final
@dataclass(frozen=True, slots=True)
class RpcPush:
    """Tells a client or node something."""

    method: str
    params: Sequence[Any] = ()


RpcMessage: TypeAlias = RpcRequest | RpcReply | RpcPush


def pack_value(value: Any) -> bytes:
    """The MessagePack of a value, in its shortest form; `UsageError` for what it cannot carry."""
    try:
        packed: bytes = msgpack.packb(value, use_bin_type=True)
    except (TypeError, ValueError, OverflowError, UnicodeEncodeError) as exc:
        raise UsageError(f"the value cannot be sent: {exc}") from exc
    return packed


def unpack_value(data: bytes) -> Any:
    """The value of exactly these bytes, with the frame's bounds; raises `ProtocolError` for anything else."""
    left = CONTAINERS_MAX

    def count(container: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"more than {CONTAINERS_MAX} lists and maps")
        return container

    try:
        value = msgpack.unpackb(
            data, raw=False, strict_map_key=False, max_ext_len=0, object_hook=count, list_hook=count
        )
    # Map keys that are lists, texts that are no UTF-8, deep nesting (pure Python msgpack), cut off bytes.
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as exc:
        raise ProtocolError(f"this is not the MessagePack of the rpc: {exc}") from exc
    check_depth(value, DEPTH_MAX)
    return value


def pack_fault(error: RpcFault) -> bytes:
    """The MessagePack of [code, name, message], cut to their bounds."""
    message = error.message.encode("utf-8", "replace").decode()[:ERROR_MESSAGE_CHARACTERS_MAX]
    return pack_value([error.code, error.name[:ERROR_NAME_CHARACTERS_MAX], message])


def unpack_fault(data: bytes) -> RpcFault:
    """The error of a reply; raises `ProtocolError` when it is none."""
    return _fault(unpack_value(data))


def encode_frame(message: RpcMessage, frame_bytes_max: int = FRAME_BYTES_MAX) -> bytes:
    """The frame of a message, its length word included.

    Raises `UsageError` for what MessagePack cannot carry, `LimitExceeded` for a frame above the bound.
    """
    body = pack_value(_as_array(message))
    if len(body) > frame_bytes_max:
        text = f"the frame of {len(body)} bytes is above the limit of {frame_bytes_max}; ask for less at once"
        raise LimitExceeded(text, field="frame_bytes_max", limit=frame_bytes_max, length_bytes=len(body))
    return _LENGTH.pack(len(body)) + body


def decode_body(body: bytes) -> RpcMessage:
    """The message in a frame's body (without its length word); raises `ProtocolError` for anything else."""
    outer = unpack_value(body)
    if type(outer) is not list or not outer or type(outer[0]) is not int:
        raise ProtocolError("a frame holds an array that begins with a number")
    if outer[0] == _REQUEST and len(outer) == 4:
        return RpcRequest(_message_id(outer[1]), _method(outer[2]), _params(outer[3]))
    if outer[0] == _REPLY and len(outer) == 4:
        error = None if outer[2] is None else _fault(outer[2])
        return RpcReply(_message_id(outer[1]), error, outer[3])
    if outer[0] == _PUSH and len(outer) == 3:
        return RpcPush(_method(outer[1]), _params(outer[2]))
    raise ProtocolError(f"no message of the rpc has the type {outer[0]} and {len(outer)} items")


@final
class FrameSplitter:
    """Cuts a byte stream into the bodies of frames.

    Holds at most one unfinished frame besides what it was fed.
    """

    __slots__ = ("_buffer", "_frame_bytes_max")

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._buffer = bytearray()
        self._frame_bytes_max = frame_bytes_max

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that are whole now; raises `ProtocolError` for a length that is not allowed."""
        self._buffer += data
        bodies: list[bytes] = []
        at = 0
        with memoryview(self._buffer) as view:
            while len(view) - at >= LENGTH_BYTES:
                (length,) = _LENGTH.unpack_from(view, at)
                if not 1 <= length <= self._frame_bytes_max:
                    raise ProtocolError(f"a frame of {length} bytes is not allowed here")
                end = at + LENGTH_BYTES + length
                if len(view) < end:
                    break
                bodies.append(bytes(view[at + LENGTH_BYTES : end]))
                at = end
        del self._buffer[:at]
        return bodies


def _as_array(message: RpcMessage) -> list[Any]:
    match message:
        case RpcRequest():
            return [_REQUEST, message.message_id, message.method, list(message.params)]
        case RpcReply():
            error = message.error
            told = None if error is None else [error.code, error.name, error.message]
            return [_REPLY, message.message_id, told, message.result]
        case RpcPush():
            return [_PUSH, message.method, list(message.params)]


def _message_id(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= U64_MAX:
        raise ProtocolError("a message's id is an integer of 64 bits")
    return value


def _method(value: Any) -> str:
    if type(value) is not str or not 1 <= len(value.encode()) <= METHOD_BYTES_MAX:
        raise ProtocolError(f"a method's name has 1 to {METHOD_BYTES_MAX} bytes of UTF-8")
    return value


def _params(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ProtocolError("a message's params are a list")
    return value


def _fault(value: Any) -> RpcFault:
    if type(value) is list and len(value) == 3:
        code, name, message = value
        if (
            type(code) is int
            and 0 < code <= ERROR_CODE_MAX
            and type(name) is str
            and len(name) <= ERROR_NAME_CHARACTERS_MAX
            and type(message) is str
        ):
            return RpcFault(code, name, message[:ERROR_MESSAGE_CHARACTERS_MAX])
    raise ProtocolError("a reply's error is nil or [code, name, message]")
