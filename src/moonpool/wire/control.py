"""Control frames of wire version 1: a sans-I/O codec with bounds on everything a peer can make us hold.

A frame is `length u32` (little endian, the bytes that follow) and one MessagePack array::

    [0, id, method, params]   request     params is a map with text keys
    [1, id, error, result]    reply       error is nil or [code, name, message]; code is a `Status`
    [2, method, params]       push        no answer is expected

MessagePack is untrusted input: one byte of it can become a list of 56 bytes or a map of 64. `ControlLimits`
bounds the frame, the number of lists and maps in it and their depth, and no extension type is allowed. What
is left are scalars, short texts above all, at some twenty bytes for each byte of the frame.

Sources: docs/architecture.md, "Wire"; the MessagePack specification.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, TypeAlias, final

import msgpack  # type: ignore[import-untyped]

from moonpool import errors
from moonpool.errors import (
    LimitExceeded,
    MoonpoolError,
    ProtocolError,
    UsageError,
    error_from_status,
    status_of,
)
from moonpool.units import MIB, U64_MAX
from moonpool.wire.nesting import check_depth

#: The wire's own bound on one frame; an end may set a lower one for what it receives.
FRAME_BYTES_MAX: Final = 16 * MIB
METHOD_LENGTH_MAX: Final = 64
ERROR_NAME_LENGTH_MAX: Final = 64
ERROR_MESSAGE_LENGTH_MAX: Final = 1_024

_LENGTH: Final = struct.Struct("<I")
_REQUEST: Final = 0
_REPLY: Final = 1
_PUSH: Final = 2


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ControlLimits:
    """What one frame may cost its receiver. Raises `UsageError` for a bound the wire does not allow."""

    #: Bytes of one frame after its length word.
    frame_bytes_max: int = FRAME_BYTES_MAX
    #: Lists and maps in one frame, the outer array included.
    containers_max: int = 262_144
    #: Lists and maps inside each other, the outer array included.
    depth_max: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.frame_bytes_max <= FRAME_BYTES_MAX:
            message = f"a control frame may have 1 to {FRAME_BYTES_MAX} bytes, not {self.frame_bytes_max}"
            raise UsageError(message, field="frame_bytes_max")
        if self.containers_max < 2 or self.depth_max < 2:
            message = (
                "a request is a map inside an array, so the limits on containers and depth are at least 2"
            )
            raise UsageError(message, field="containers_max")


@final
@dataclass(frozen=True, slots=True)
class RequestMessage:
    """Asks the other end for something; `request_id` is any u64 the sender does not use twice at once."""

    request_id: int
    method: str
    params: Mapping[str, Any] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class WireError:
    """An error as it travels: a `Status` number, the name of an error class, and a sentence."""

    code: int
    name: str
    message: str


@final
@dataclass(frozen=True, slots=True)
class ReplyMessage:
    """Answers the request of that id with a result or an error."""

    request_id: int
    error: WireError | None = None
    result: Any = None


@final
@dataclass(frozen=True, slots=True)
class PushMessage:
    """Tells the other end something."""

    method: str
    params: Mapping[str, Any] = field(default_factory=dict)


ControlMessage: TypeAlias = RequestMessage | ReplyMessage | PushMessage


def encode_message(message: ControlMessage, limits: ControlLimits | None = None) -> bytes:
    """The frame of a message, its length word included.

    Raises `UsageError` for what MessagePack cannot carry and `LimitExceeded` for a frame above
    `limits.frame_bytes_max` (by default the wire's bound).
    """
    try:
        body: bytes = msgpack.packb(_as_array(message), use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as exc:
        raise UsageError(f"the control message cannot be encoded: {exc}") from exc
    frame_bytes_max = FRAME_BYTES_MAX if limits is None else limits.frame_bytes_max
    if len(body) > frame_bytes_max:
        raise LimitExceeded(
            f"the frame of {len(body)} bytes is above the limit of {frame_bytes_max}; ask for less at once",
            field="frame_bytes_max",
            limit=frame_bytes_max,
            length_bytes=len(body),
        )
    return _LENGTH.pack(len(body)) + body


def decode_message(body: bytes, limits: ControlLimits) -> ControlMessage:
    """The message in a frame's body (without its length word); raises `ProtocolError` for anything else."""
    outer = _unpack(body, limits)
    if type(outer) is not list or not outer:
        raise ProtocolError("a control frame must hold an array of 3 or 4 items")
    shape = _SHAPES.get(outer[0]) if type(outer[0]) is int else None
    if shape is None or len(outer) != shape[0]:
        raise ProtocolError(f"a control frame of {len(outer)} items has no message type that version 1 knows")
    return shape[1](outer)


def wire_error(error: BaseException) -> WireError:
    """What a peer is told of an error: all of ours, and nothing but its kind of anyone else's."""
    if not isinstance(error, MoonpoolError):
        return WireError(status_of(error), "InternalError", f"the peer failed with {type(error).__name__}")
    # A lone surrogate in a sentence must not keep the error itself from being told.
    sentence = str(error).encode("utf-8", "replace").decode()
    return WireError(error.status, type(error).__name__, sentence[:ERROR_MESSAGE_LENGTH_MAX])


def error_from_wire(wire: WireError, peer: str = "") -> MoonpoolError:
    """Makes (does not raise) the error a peer reported: of its own class where the code agrees.

    A COMPLETE or PENDING code is no failure and gives a `ProtocolError`.
    """
    message = f"the peer answered: {wire.message}"
    if wire.code in (errors.Status.COMPLETE, errors.Status.PENDING):
        return ProtocolError(f"the peer reported an error with the status {wire.code}", peer=peer)
    kind = _ERROR_KINDS.get(wire.name)
    if kind is None or kind.status != wire.code:
        return error_from_status(wire.code, message, peer=peer)
    # Leaves with parameters of their own still carry just a sentence here.
    error = kind.__new__(kind)
    MoonpoolError.__init__(error, message, peer=peer)
    return error


@final
@dataclass(frozen=True, slots=True)
class ControlFrame:
    """A message and the index of its frame in the stream, counted from 0."""

    index: int
    message: ControlMessage


@final
class ControlParser:
    """Cuts a byte stream into control messages.

    Holds at most one unfinished frame (`frame_bytes_max`, length word) besides what one `feed` brought.
    `frames_begun` counts frames of which at least one byte came: a unix socket delivers descriptors together
    with the first byte of their frame, so they belong to the last frame begun by that read.
    """

    __slots__ = ("_begun", "_buffer", "_complete", "_failure", "_limits", "frames_begun")

    def __init__(self, limits: ControlLimits | None = None) -> None:
        self._limits = limits or ControlLimits()
        self._buffer = bytearray()
        self._begun = False
        self._complete: deque[tuple[int, bytes]] = deque()
        self._failure: ProtocolError | None = None
        self.frames_begun = 0

    @property
    def is_inside_frame(self) -> bool:
        """True while an unfinished frame is held."""
        return self._begun

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the stream; after a failure they are dropped."""
        if self._failure is not None:
            return
        self._buffer += data
        while self._buffer:
            if not self._begun:
                self._begun = True
                self.frames_begun += 1
            if len(self._buffer) < _LENGTH.size:
                return
            (length,) = _LENGTH.unpack_from(self._buffer)
            if not 1 <= length <= self._limits.frame_bytes_max:
                self._fail(f"a control frame of {length} bytes is not allowed here")
                return
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            with memoryview(self._buffer) as view:
                self._complete.append((self.frames_begun - 1, bytes(view[_LENGTH.size : end])))
            del self._buffer[:end]
            self._begun = False

    def next_frame(self) -> ControlFrame | None:
        """The next message, or None until more bytes come; raises `ProtocolError`, and again ever after."""
        if self._complete:
            index, body = self._complete.popleft()
            try:
                return ControlFrame(index, decode_message(body, self._limits))
            except ProtocolError as exc:
                self._complete.clear()
                self._fail(exc.message)
        if self._failure is not None:
            raise ProtocolError(self._failure.message)
        return None

    def _fail(self, message: str) -> None:
        self._failure = ProtocolError(message)
        self._buffer.clear()
        self._begun = False


def _as_array(message: ControlMessage) -> list[Any]:
    match message:
        case RequestMessage():
            return [_REQUEST, message.request_id, message.method, message.params]
        case ReplyMessage():
            error = message.error
            told = None if error is None else [error.code, error.name, error.message]
            return [_REPLY, message.request_id, told, message.result]
        case PushMessage():
            return [_PUSH, message.method, message.params]


def _unpack(body: bytes, limits: ControlLimits) -> Any:
    left = limits.containers_max

    def count(container: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"more than {limits.containers_max} lists and maps")
        return container

    try:
        outer = msgpack.unpackb(
            body, raw=False, strict_map_key=True, max_ext_len=0, object_hook=count, list_hook=count
        )
    # TypeError and RecursionError come from the pure Python msgpack, on unhashable keys and deep nesting.
    except (ValueError, TypeError, RecursionError) as exc:
        raise ProtocolError(f"a control frame is not the MessagePack of version 1: {exc}") from exc
    check_depth(outer, limits.depth_max)
    return outer


def _request_id(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= U64_MAX:
        raise ProtocolError("a control message's id must be an integer of 64 bits")
    return value


def _method(value: Any) -> str:
    if type(value) is not str or not 1 <= len(value) <= METHOD_LENGTH_MAX:
        raise ProtocolError(
            f"a control message's method must be a text of 1 to {METHOD_LENGTH_MAX} characters"
        )
    return value


def _params(value: Any) -> Mapping[str, Any]:
    if type(value) is not dict or not all(type(key) is str for key in value):
        raise ProtocolError("a control message's params must be a map with text keys")
    return value


def _error(value: Any) -> WireError | None:
    if value is None:
        return None
    if type(value) is list and len(value) == 3:
        code, name, message = value
        if (
            type(code) is int
            and 0 <= code <= 255
            and type(name) is str
            and len(name) <= ERROR_NAME_LENGTH_MAX
            and type(message) is str
        ):
            return WireError(code, name, message[:ERROR_MESSAGE_LENGTH_MAX])
    raise ProtocolError("a reply's error must be nil or [code, name, message]")


def _request(outer: list[Any]) -> RequestMessage:
    return RequestMessage(_request_id(outer[1]), _method(outer[2]), _params(outer[3]))


def _reply(outer: list[Any]) -> ReplyMessage:
    return ReplyMessage(_request_id(outer[1]), _error(outer[2]), outer[3])


def _push(outer: list[Any]) -> PushMessage:
    return PushMessage(_method(outer[1]), _params(outer[2]))


_SHAPES: Final[Mapping[int, tuple[int, Callable[[list[Any]], ControlMessage]]]] = MappingProxyType(
    {_REQUEST: (4, _request), _REPLY: (4, _reply), _PUSH: (3, _push)}
)

# These two say something about the process that raises them, which would be a lie about ours.
_LOCAL_ONLY: Final = frozenset({"EngineClosed", "ForkedEngine"})
_ERROR_KINDS: Final[Mapping[str, type[MoonpoolError]]] = MappingProxyType(
    {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, MoonpoolError) and name not in _LOCAL_ONLY
    }
)
