"""The error tree, the status table, and errors as values that travel."""

from __future__ import annotations

import copy
import errno
import inspect
import pickle
import re
from pathlib import Path

import pytest

import moonpool.errors as errors
from moonpool.errors import (
    STATUS_ERRORS,
    InternalError,
    MoonpoolError,
    PeerError,
    ProtocolError,
    QueueFull,
    ResourceError,
    StaleHandle,
    Status,
    TransferTimeout,
    TransportUnavailable,
    UnsupportedMemory,
    UsageError,
    error_from_status,
    status_of,
)

BRANCHES = (UsageError, PeerError, ResourceError, InternalError)
ALL = [
    kind
    for kind in vars(errors).values()
    if inspect.isclass(kind) and issubclass(kind, MoonpoolError) and kind is not MoonpoolError
]
ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"


def make(kind: type[MoonpoolError], **fields: object) -> MoonpoolError:
    if kind is TransportUnavailable:
        return TransportUnavailable("no library", "apt-get install it", **fields)  # type: ignore[arg-type]
    if kind is UnsupportedMemory:
        return UnsupportedMemory("memory of a GPU", "cuda", **fields)  # type: ignore[arg-type]
    return kind("it failed", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ALL)
def test_each_error_has_exactly_one_branch(kind: type[MoonpoolError]) -> None:
    assert sum(issubclass(kind, branch) for branch in BRANCHES) == 1


@pytest.mark.parametrize("kind", ALL)
def test_pickle_and_copy_keep_everything(kind: type[MoonpoolError]) -> None:
    error = make(kind, peer="host:1", region=7 << 32 | 3, length_bytes=4096, errno=errno.EIO)
    error.add_note("seen twice")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is kind
        assert str(twin) == str(error)
        assert twin.fields == error.fields
        assert (twin.peer, twin.region, twin.errno) == ("host:1", 7 << 32 | 3, errno.EIO)
        assert twin.__notes__ == ["seen twice"]


def test_branches_are_also_the_builtin_kinds() -> None:
    assert issubclass(UsageError, ValueError)
    assert issubclass(PeerError, ConnectionError)
    assert issubclass(ResourceError, OSError)
    assert issubclass(TransferTimeout, TimeoutError)


@pytest.mark.parametrize("kind", ALL)
def test_every_class_has_a_sentence_and_a_final_status(kind: type[MoonpoolError]) -> None:
    assert len(str(make(kind))) > 5
    assert kind.status not in (Status.COMPLETE, Status.PENDING)
    assert isinstance(kind.retryable, bool)


def test_the_table_covers_every_failure_and_agrees_with_the_classes() -> None:
    assert set(STATUS_ERRORS) == set(Status) - {Status.COMPLETE, Status.PENDING}
    for status, kind in STATUS_ERRORS.items():
        error = error_from_status(status, peer="host:1")
        assert type(error) is kind
        assert status_of(error) is status


def test_documented_table_is_the_code_table() -> None:
    rows = re.findall(r"^\| (\d+) \| ([A-Z_]+) \| (?:`(\w+)`)?", ARCHITECTURE.read_text(), re.MULTILINE)
    assert {int(code): name for code, name, _ in rows} == {status.value: status.name for status in Status}
    documented = {int(code): kind for code, _, kind in rows if kind}
    assert documented == {status.value: kind.__name__ for status, kind in STATUS_ERRORS.items()}


def test_unknown_status_is_the_peers_fault() -> None:
    error = error_from_status(99, peer="host:1")
    assert type(error) is ProtocolError
    assert "99" in str(error)


@pytest.mark.parametrize("status", [Status.COMPLETE, Status.PENDING])
def test_a_success_has_no_error(status: Status) -> None:
    with pytest.raises(InternalError, match=status.name):
        error_from_status(status)


def test_sentence_names_the_fields_and_handles_are_hexadecimal() -> None:
    text = str(StaleHandle(handle=0x2_0000_0001, peer="host:1", attempt=2))
    assert text.startswith("the handle is not valid any more")
    assert "handle=0x200000001" in text
    assert "peer=host:1" in text
    assert "attempt=2" in text


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(TypeError, match="colour"):
        StaleHandle(colour="red")  # type: ignore[call-arg]


def test_unset_fields_are_none() -> None:
    error = UsageError("no")
    assert error.peer is None
    assert error.errno is None
    assert dict(error.fields) == {}


def test_transport_unavailable_carries_both_reasons() -> None:
    error = TransportUnavailable("no libibverbs", "apt-get install libibverbs1", transport="rdma")
    assert (error.reason, error.how_to_get_it, error.transport) == (
        "no libibverbs",
        "apt-get install libibverbs1",
        "rdma",
    )
    assert "apt-get install libibverbs1" in str(error)


def test_unsupported_memory_names_the_transport_that_takes_it() -> None:
    error = UnsupportedMemory("a CUDA pointer", "cuda")
    assert error.transport == "cuda"
    assert "'cuda'" in str(error)
    assert "host memory" in str(UnsupportedMemory("a pipe"))


def test_out_of_memory_has_its_errno() -> None:
    assert errors.OutOfMemory().errno == errno.ENOMEM
    assert errors.OutOfMemory(errno=errno.EAGAIN).errno == errno.EAGAIN


def test_foreign_errors_have_a_status_too() -> None:
    assert status_of(MemoryError()) is Status.NO_MEMORY
    assert status_of(KeyError("x")) is Status.INTERNAL


def test_only_queue_full_and_waits_are_retryable() -> None:
    retryable = {kind.__name__ for kind in ALL if kind.retryable}
    assert retryable == {
        QueueFull.__name__,
        "HandshakeFailed",
        "MetadataUnavailable",
        "PeerRefused",
        "PeerStalled",
        "TransferTimeout",
    }
