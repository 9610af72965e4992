"""Every error Moonpool raises, and the status numbers that travel on the wire.

Four branches say who must act: the caller (`UsageError`), the remote end (`PeerError`), this machine
(`ResourceError`), or us (`InternalError`). Leaves say the condition. Each error is one sentence plus
structured fields, so that a program never has to parse the sentence.

Source of the numbers: docs/architecture.md, "Status". They are part of wire version 1.
"""

from __future__ import annotations

import errno as errno_codes
from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Any, ClassVar, Final, TypedDict, TypeVar, Unpack


class Status(IntEnum):
    """How a transfer stands; a u8 on the wire and in status arrays."""

    COMPLETE = 0
    PENDING = 1
    TIMED_OUT = 2
    CANCELLED = 3
    PEER_GONE = 4
    REFUSED = 5
    STALE_HANDLE = 6
    OUT_OF_RANGE = 7
    ACCESS_DENIED = 8
    PROTOCOL = 9
    NOT_REGISTERED = 10
    NO_MEMORY = 11
    UNSUPPORTED = 12
    QUEUE_FULL = 13
    INTERNAL = 14
    STALLED = 15


class PlaceFields(TypedDict, total=False):
    """Where and with what it happened; each field is also an attribute, None when not set."""

    peer: str
    segment: str
    name: str
    handle: int
    region: int
    address: int
    offset: int
    length_bytes: int
    transport: str
    operation: str
    path: int
    index: int
    attempt: int
    elapsed_ms: float
    timeout_ms: float
    errno: int
    field: str
    value: str
    limit: int


class ErrorFields(PlaceFields, total=False):
    """All structured fields: those of the place, and those that some sentences are made of."""

    reason: str
    how_to_get_it: str


_HEX_FIELDS: Final = frozenset({"handle", "region", "address"})
# Already told by the sentence of the error that carries them.
_SPOKEN_FIELDS: Final = frozenset({"reason", "how_to_get_it", "value"})
_KNOWN_FIELDS: Final = ErrorFields.__optional_keys__
_ErrorType = TypeVar("_ErrorType", bound="MoonpoolError")


class MoonpoolError(Exception):
    """Root of all errors of Moonpool: a sentence, structured fields, and whether to try again.

    `message` defaults to the class's own sentence. An error survives pickling and copying with its fields.
    """

    #: True when the same call, repeated unchanged a little later, may succeed.
    retryable: ClassVar[bool] = False
    #: The nearest wire status (see `status_of`).
    status: ClassVar[Status] = Status.INTERNAL
    #: Used when no message is given: what happened, and what to try.
    sentence: ClassVar[str] = "Moonpool failed"

    peer: str | None = None
    segment: str | None = None
    name: str | None = None
    handle: int | None = None
    region: int | None = None
    address: int | None = None
    offset: int | None = None
    length_bytes: int | None = None
    transport: str | None = None
    operation: str | None = None
    path: int | None = None
    index: int | None = None
    attempt: int | None = None
    elapsed_ms: float | None = None
    timeout_ms: float | None = None
    errno: int | None = None
    field: str | None = None
    value: str | None = None
    limit: int | None = None
    reason: str | None = None
    how_to_get_it: str | None = None

    def __init__(self, message: str = "", **fields: Unpack[ErrorFields]) -> None:
        self.message = message or self.sentence
        super().__init__(self.message)
        unknown = fields.keys() - _KNOWN_FIELDS
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        self.fields: Mapping[str, Any] = MappingProxyType(dict(fields))
        for name, value in fields.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        shown = [
            f"{name}={value:#x}" if name in _HEX_FIELDS and isinstance(value, int) else f"{name}={value}"
            for name, value in self.fields.items()
            if name not in _SPOKEN_FIELDS
        ]
        return f"{self.message} ({', '.join(shown)})" if shown else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        notes = {"__notes__": list(self.__notes__)} if hasattr(self, "__notes__") else None
        return (_rebuild, (type(self), self.message, dict(self.fields)), notes)


def _rebuild(kind: type[_ErrorType], message: str, fields: ErrorFields) -> _ErrorType:
    """Makes an error again without its own `__init__`, whose parameters differ from leaf to leaf."""
    error = kind.__new__(kind)
    MoonpoolError.__init__(error, message, **fields)
    return error


class UsageError(MoonpoolError, ValueError):
    """The caller asked for something wrong, and must ask for something else."""

    status = Status.UNSUPPORTED
    sentence = "the call is not valid; see the fields of this error"


class PeerError(MoonpoolError, ConnectionError):
    """The remote end is away, refused, or broke the protocol."""

    status = Status.PEER_GONE
    sentence = "the peer failed; check that its process runs and can be reached"


class ResourceError(MoonpoolError, OSError):
    """This machine could not give what was needed; `errno` says why where the system told us."""

    status = Status.NO_MEMORY
    sentence = "this machine could not give what the call needs"


class InternalError(MoonpoolError):
    """A bug of Moonpool's, or a failed invariant: please report it."""

    status = Status.INTERNAL
    sentence = "an invariant of Moonpool failed; please report this with the log"


class TransferTimeout(PeerError, TimeoutError):
    """The batch's deadline passed; nothing touches its memory any more."""

    retryable = True
    status = Status.TIMED_OUT
    sentence = "the deadline passed before the transfer ended; raise timeout_s or send less at once"


class TransferCancelled(UsageError):
    """The batch was cancelled by its owner; nothing touches its memory any more."""

    status = Status.CANCELLED
    sentence = "the transfer was cancelled by its owner"


class PeerGone(PeerError):
    """The connection was reset, the peer process died, or the session was closed."""

    status = Status.PEER_GONE
    sentence = "the peer is gone; open the segment again once it is back"


class PeerRefused(PeerError):
    """Nothing listens at the peer's address."""

    retryable = True
    status = Status.REFUSED
    sentence = "nothing listens at the peer's address; check that its process runs, and the address"


class PeerStalled(PeerError):
    """The peer made no progress for `stall_timeout_ms` while the deadline was still ahead."""

    retryable = True
    status = Status.STALLED
    sentence = "the peer made no progress; it may be stopped, overloaded, or cut off"


class AccessDenied(PeerError):
    """Wrong key or secret, another user, or a region that does not allow the operation."""

    status = Status.ACCESS_DENIED
    sentence = "access denied; check the region's access and key, and cluster_secret on both ends"


class ProtocolError(PeerError):
    """The peer sent bytes that the protocol does not allow; its connection is closed."""

    status = Status.PROTOCOL
    sentence = "the peer broke the protocol; check that both ends run compatible versions"


class HandshakeFailed(PeerError):
    """The connection was made, but its hello was not finished in time or was cut off."""

    retryable = True
    status = Status.PROTOCOL
    sentence = "the handshake was not finished; check that the port belongs to a Moonpool engine"


class RevokeIncomplete(PeerError):
    """A peer did not confirm a revoke in time; its connections were closed instead."""

    status = Status.STALLED
    sentence = "a peer did not confirm the revoke in time, so its connections were closed"


class MetadataUnavailable(PeerError):
    """The metadata service cannot be reached or does not answer in time."""

    retryable = True
    status = Status.REFUSED
    sentence = "the metadata service does not answer; check the address in the config field metadata"


class StaleHandle(UsageError):
    """A handle of an earlier generation, of a revoked region, or made up."""

    status = Status.STALE_HANDLE
    sentence = "the handle is not valid any more; open the segment again and take its new handles"


class OutOfRange(UsageError):
    """The bytes asked for are not all inside the remote region."""

    status = Status.OUT_OF_RANGE
    sentence = "the range is not inside the region; check offset and length"


class NotRegistered(UsageError):
    """The local address range is not inside one registered region."""

    status = Status.NOT_REGISTERED
    sentence = "the local range is not inside a registered region; register its buffer first"


class UnsupportedOperation(UsageError):
    """This path, region or transport cannot do that."""

    status = Status.UNSUPPORTED
    sentence = "the operation is not supported on this path"


class UnsupportedMemory(UsageError):
    """The object's memory cannot be used here; `taken_by` names the transport that takes such memory."""

    status = Status.UNSUPPORTED

    def __init__(self, reason: str, taken_by: str = "", **fields: Unpack[PlaceFields]) -> None:
        advice = f"the transport {taken_by!r} takes it" if taken_by else "copy it into host memory first"
        if taken_by:
            fields.setdefault("transport", taken_by)
        super().__init__(f"this memory cannot be used: {reason}; {advice}", reason=reason, **fields)


class NameInUse(UsageError):
    """A live process has published a segment under that name."""

    status = Status.ACCESS_DENIED
    sentence = "a live process already has that name; choose another one, or stop that process"


class NoSuchSegment(UsageError):
    """No segment is published under that name, or its lease ran out."""

    status = Status.STALE_HANDLE
    sentence = "no segment is published under that name; check the name, and that its process runs"


class EngineClosed(UsageError):
    """The engine was closed before or during the call."""

    status = Status.PEER_GONE
    sentence = "the engine is closed; make a new one"


class ForkedEngine(UsageError):
    """The engine was made before a fork and belongs to the parent process."""

    status = Status.UNSUPPORTED
    sentence = "this engine belongs to the parent process; make a new one after the fork"


class OutOfMemory(ResourceError):
    """The system gave no memory, or not of the kind asked for."""

    status = Status.NO_MEMORY
    sentence = "the system gave no memory; free some, or raise the memory limit"

    def __init__(self, message: str = "", **fields: Unpack[ErrorFields]) -> None:
        fields.setdefault("errno", errno_codes.ENOMEM)
        super().__init__(message, **fields)


class QueueFull(ResourceError):
    """A bounded queue (submissions, notifications) is full for the moment."""

    retryable = True
    status = Status.QUEUE_FULL
    sentence = "the queue is full; wait for something to end, or raise its bound in the config"


class LimitExceeded(ResourceError):
    """A bound of the config is reached; `field` names it and `limit` is its value."""

    status = Status.QUEUE_FULL
    sentence = "a configured bound is reached; free something, or raise the bound"


class TransportUnavailable(ResourceError):
    """A transport was asked for by name and cannot run here; `how_to_get_it` says what would help."""

    status = Status.UNSUPPORTED

    def __init__(self, reason: str, how_to_get_it: str, **fields: Unpack[PlaceFields]) -> None:
        super().__init__(
            f"the transport is not available: {reason}; {how_to_get_it}",
            reason=reason,
            how_to_get_it=how_to_get_it,
            **fields,
        )


#: The class raised for each status that is a failure.
STATUS_ERRORS: Final[Mapping[Status, type[MoonpoolError]]] = MappingProxyType(
    {
        Status.TIMED_OUT: TransferTimeout,
        Status.CANCELLED: TransferCancelled,
        Status.PEER_GONE: PeerGone,
        Status.REFUSED: PeerRefused,
        Status.STALE_HANDLE: StaleHandle,
        Status.OUT_OF_RANGE: OutOfRange,
        Status.ACCESS_DENIED: AccessDenied,
        Status.PROTOCOL: ProtocolError,
        Status.NOT_REGISTERED: NotRegistered,
        Status.NO_MEMORY: OutOfMemory,
        Status.UNSUPPORTED: UnsupportedOperation,
        Status.QUEUE_FULL: QueueFull,
        Status.INTERNAL: InternalError,
        Status.STALLED: PeerStalled,
    }
)


def error_from_status(status: int, message: str = "", **fields: Unpack[ErrorFields]) -> MoonpoolError:
    """Makes (does not raise) the error of a failed status.

    A number outside the table can only have come from a peer, so it becomes a `ProtocolError`. COMPLETE and
    PENDING are no failures: asking for their error is a bug and raises `InternalError`.
    """
    try:
        known = Status(status)
    except ValueError:
        return ProtocolError(f"the peer sent the unknown status {status}", **fields)
    kind = STATUS_ERRORS.get(known)
    if kind is None:
        raise InternalError(f"the status {known.name} is not a failure and has no error")
    return kind(message, **fields)


def status_of(error: BaseException) -> Status:
    """The status number nearest to an error, for a reply on the wire; INTERNAL for what is not ours."""
    if isinstance(error, MoonpoolError):
        return error.status
    return Status.NO_MEMORY if isinstance(error, MemoryError) else Status.INTERNAL
