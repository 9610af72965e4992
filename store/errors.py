"""Errors of the store, each with its code on the wire (docs/store/architecture.md, "RPC").

As in `moonpool.errors` the branches say who must act. `error_of_code` turns a reply's `[code, name, message]`
into the class; `code_of` and `name_of` give what a master puts into a reply.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Final

from moonpool.errors import (
    AccessDenied,
    InternalError,
    LimitExceeded,
    MoonpoolError,
    PeerError,
    ResourceError,
    Status,
    UsageError,
)


class StoreError(MoonpoolError):
    """What all errors of the store's own table share: a stable code and name."""

    code: ClassVar[int] = 0
    wire_name: ClassVar[str] = ""


class NoSpace(StoreError, ResourceError):
    """No segment has room, even after eviction and the wait that the caller allowed."""

    code, wire_name, retryable = 100, "NO_SPACE", True
    status = Status.NO_MEMORY
    sentence = "the pool has no room; wait longer (wait_ms), add nodes, or unpin objects"


class NotLeader(StoreError, PeerError):
    """The master asked is not the leader; the message names the leader when it is known."""

    code, wire_name, retryable = 101, "NOT_LEADER", True
    status = Status.REFUSED
    sentence = "this master is not the leader; ask the one that the message names"


class StaleEpoch(StoreError, PeerError):
    """A message carried a lower epoch than one seen before."""

    code, wire_name, retryable = 102, "STALE_EPOCH", True
    status = Status.STALE_HANDLE
    sentence = "the epoch is over; join again"


class UnknownPut(StoreError, UsageError):
    """The put id is not of an open put of this client."""

    code, wire_name = 103, "UNKNOWN_PUT"
    status = Status.STALE_HANDLE
    sentence = "no open put of this client has that id; it ended, was aborted, or belongs to another client"


class DeadlinePassed(StoreError, UsageError):
    """A put was ended after its deadline; its extents were taken back."""

    code, wire_name, retryable = 104, "DEADLINE_PASSED", True
    status = Status.TIMED_OUT
    sentence = "the put's deadline passed before it ended; start it again"


class Leased(StoreError, UsageError):
    """Readers hold leases on the object, and the caller asked to be refused in that case."""

    code, wire_name, retryable = 105, "LEASED", True
    status = Status.ACCESS_DENIED
    sentence = "readers hold leases on the object; use if_leased='defer', or try later"


class NoSuchObject(StoreError, UsageError):
    """No complete object has that key."""

    code, wire_name = 106, "NO_SUCH_OBJECT"
    status = Status.STALE_HANDLE
    sentence = "no object has that key"


class JournalUnavailable(StoreError, PeerError):
    """The journal did not confirm in time: the change may or may not have been made."""

    code, wire_name, retryable = 107, "JOURNAL_UNAVAILABLE", True
    status = Status.STALLED
    sentence = "the journal does not answer; the change may or may not last: look again when it is back"


class UnknownClient(StoreError, UsageError):
    """The connection is not bound to a client: `client_join` comes first."""

    code, wire_name, retryable = 108, "UNKNOWN_CLIENT", True
    status = Status.ACCESS_DENIED
    sentence = "this connection belongs to no client; call client_join first"


class UnknownNode(StoreError, UsageError):
    """The connection is not bound to a node, or its join is over: `node_join` comes first."""

    code, wire_name, retryable = 109, "UNKNOWN_NODE", True
    status = Status.ACCESS_DENIED
    sentence = "this connection belongs to no node; call node_join first"


class TenantRefused(StoreError, AccessDenied):
    """The tenant does not exist, or the token is not its own."""

    code, wire_name = 110, "TENANT_REFUSED"
    status = Status.ACCESS_DENIED
    sentence = "the tenant is unknown or the token is wrong; ask whoever set the tenant up"


class QuotaExceeded(StoreError, ResourceError):
    """The tenant's objects and open puts would pass its quota."""

    code, wire_name = 111, "QUOTA_EXCEEDED"
    status = Status.QUEUE_FULL
    sentence = "the tenant's quota is used up; remove objects, or raise the quota"


class TooLarge(StoreError, UsageError):
    """The object is larger than any segment, or than 1 TiB."""

    code, wire_name = 112, "TOO_LARGE"
    status = Status.OUT_OF_RANGE
    sentence = "the object is larger than any segment can hold; split it"


class NotReady(StoreError, PeerError):
    """The master cannot do this yet, for example while it takes over."""

    code, wire_name, retryable = 113, "NOT_READY", True
    status = Status.REFUSED
    sentence = "the master is not ready for this yet; try again in a moment"


class BadParams(StoreError, UsageError):
    """A request's parameters are not what the method takes; nothing was changed."""

    code, wire_name = 65, "BAD_PARAMS"
    sentence = "the parameters are not what this method takes; see docs/rpc.md"


class UnknownMethod(StoreError, UsageError):
    """No method has that name."""

    code, wire_name = 64, "UNKNOWN_METHOD"
    sentence = "no method has that name; see docs/rpc.md"


class Overloaded(StoreError, LimitExceeded):
    """A bound of the master's config is reached; `field` names it."""

    code, wire_name, retryable = 67, "OVERLOADED", True
    status = Status.QUEUE_FULL
    sentence = "the master is at a configured bound; try again later, or raise the bound"


class UnknownFact(StoreError, UsageError):
    """A journal holds a fact of a type or version that this program does not know, or a damaged one."""

    sentence = "the journal holds a fact that this version does not know; run the version that wrote it"


class SnapshotDamaged(StoreError, PeerError):
    """A snapshot's chunk fails its check, or chunks are missing."""

    sentence = "the snapshot is damaged or incomplete; nothing was loaded"


class JournalFenced(StoreError, PeerError):
    """Another master leads: this one's facts are refused, and it discards its state."""

    status = Status.STALE_HANDLE
    sentence = "another master leads now; this one stands by"


class JournalLost(StoreError, PeerError):
    """Redis was started anew, went back, or holds another journal than this leader's."""

    status = Status.STALE_HANDLE
    sentence = "the journal is not the one this leader wrote; it loads what is there and leads again"


class JournalUnreadable(StoreError, UsageError):
    """What Redis holds is no journal that this version can load: nothing is served until someone looks."""

    sentence = "the journal cannot be loaded; run the version that wrote it, or choose another prefix"


class DataLost(StoreError, PeerError):
    """No replica gave bytes that match the object's digest."""

    retryable = True
    sentence = "no replica gave the object's bytes; the master was told, and the destination was cleared"


class PoolClosed(StoreError, UsageError):
    """The pool was closed before or during the call."""

    sentence = "the pool is closed; connect again"


class ForkedPool(StoreError, UsageError):
    """The pool was made before a fork and belongs to the parent process."""

    sentence = "this pool belongs to the parent process; connect again after the fork"


class MasterUnavailable(StoreError, PeerError):
    """No master that leads could be reached for as long as the config allows."""

    retryable = True
    status = Status.REFUSED
    sentence = "no master that leads answered; check the addresses, and that a master runs"


class DestinationTooSmall(StoreError, UsageError):
    """The object is larger than the destination; nothing was written into it."""

    status = Status.OUT_OF_RANGE
    sentence = "the object does not fit into the destination; give a larger one, or read a range"


class NotOnThisHost(StoreError, UsageError):
    """A view was asked for, and every copy of the object is on another host."""

    sentence = "no copy of the object is on this host, so it cannot be read in place; use get"


#: Class of each code that a store reply may carry.
ERRORS_BY_CODE: Final[Mapping[int, type[StoreError]]] = MappingProxyType(
    {
        kind.code: kind
        for kind in (
            NoSpace,
            NotLeader,
            StaleEpoch,
            UnknownPut,
            DeadlinePassed,
            Leased,
            NoSuchObject,
            JournalUnavailable,
            UnknownClient,
            UnknownNode,
            TenantRefused,
            QuotaExceeded,
            TooLarge,
            NotReady,
            BadParams,
            UnknownMethod,
            Overloaded,
        )
    }
)
CODE_INTERNAL: Final = 68


def wire_error(error: MoonpoolError) -> list[int | str]:
    """`[code, name, message]` for a reply; what is not the store's own becomes INTERNAL or BAD_PARAMS."""
    if isinstance(error, StoreError) and error.code:
        return [error.code, error.wire_name, str(error)]
    if isinstance(error, UsageError):
        return [BadParams.code, BadParams.wire_name, str(error)]
    return [CODE_INTERNAL, "INTERNAL", str(error)]


def error_of_code(code: int, message: str = "") -> MoonpoolError:
    """Makes (does not raise) the error that a reply's code stands for; an unknown one is `InternalError`."""
    kind = ERRORS_BY_CODE.get(code)
    return InternalError(message or f"the master failed with code {code}") if kind is None else kind(message)
