"""What a user writes to handle failures, by who must act."""

from __future__ import annotations

from typing import assert_type

from moonpool import (
    MoonpoolError,
    PeerError,
    ResourceError,
    Status,
    TransferTimeout,
    TransportUnavailable,
    UsageError,
)
from moonpool.errors import STATUS_ERRORS, error_from_status


def advice(error: MoonpoolError) -> str:
    assert_type(error.retryable, bool)
    assert_type(error.status, Status)
    match error:
        case TransportUnavailable():
            assert_type(error.how_to_get_it, str | None)
            return error.how_to_get_it or "install it"
        case TransferTimeout() | PeerError():
            return f"try {error.peer or 'the peer'} again" if error.retryable else "open it again"
        case ResourceError():
            assert_type(error.errno, int | None)
            return "free something"
        case UsageError():
            return "change the call"
        case _:
            return "report it"


def plain_handlers_catch_ours_too() -> None:
    try:
        raise error_from_status(Status.TIMED_OUT, peer="host:7420", length_bytes=4096)
    except TimeoutError as error:
        print(error)


kinds = {status: kind.sentence for status, kind in STATUS_ERRORS.items()}
assert_type(kinds, dict[Status, str])
error_from_status(Status.TIMED_OUT, pear="host:7420")  # E: call-arg
error_from_status("TIMED_OUT")  # E: arg-type
