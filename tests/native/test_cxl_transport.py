"""The far-memory transport against owners and initiators that lie: nothing is mapped, nothing leaks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from moonpool.config import EngineConfig
from moonpool.errors import (
    AccessDenied,
    MoonpoolError,
    PeerGone,
    ProtocolError,
    StaleHandle,
    UnsupportedOperation,
)
from moonpool.native.io.memory import create_memory
from moonpool.native.io.regions import LocalRegions
from moonpool.native.io.segment import NativeSegment
from moonpool.operations import Access
from moonpool.transport.cxl import ATTACH, DETACH, CxlTransport, available
from moonpool.transport.cxl_attribute import DaxRange, pack_dax, pack_node

PAGE = 4096
HANDLE = 1 << 32 | 3
RANGE = DaxRange(
    device_bytes=64 << 20, align_bytes=2 << 20, offset=2 << 20, length=PAGE, identity="serial:ab"
)


class Answer:
    """What an owner said; descriptors that nobody took are closed."""

    def __init__(self, value: Any, fds: Sequence[int]) -> None:
        self.value = value
        self._fds = list(fds)

    @property
    def fds(self) -> tuple[int, ...]:
        return tuple(self._fds)

    def take_fds(self) -> list[int]:
        taken, self._fds = self._fds, []
        return taken

    def close(self) -> None:
        for fd in self.take_fds():
            os.close(fd)

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class FakeSession:
    is_unix: bool = True
    peer_pid: int | None = 1
    pidfd: int | None = None


@dataclass
class FakePeer:
    """Answers every request the same way, or raises."""

    value: Any = None
    fds: Sequence[int] = ()
    error: Exception | None = None
    session: FakeSession = field(default_factory=FakeSession)
    is_self: bool = False
    endpoint: str = "h:1"
    asked: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)

    def request(self, method: str, params: Mapping[str, Any]) -> Answer:
        self.asked.append((method, params))
        if self.error is not None:
            raise self.error
        return Answer(self.value, self.fds)


class FakeSegment:
    """A real native segment with one region, and what is noted of it."""

    def __init__(self) -> None:
        self.native = NativeSegment(LocalRegions(4), 4, 32768)
        self.native.put_region(HANDLE, 0, PAGE, 3, b"r" * 16, b"w" * 16)
        self.mappings: dict[int, Any] = {}
        self.problems: list[Exception] = []
        self.held: list[Any] = []

    def note_unreachable(self, handle: int, transport: str, problem: Exception) -> None:
        assert (handle, transport) == (HANDLE, "cxl")
        self.problems.append(problem)

    def hold(self, handle: int, thing: Any) -> None:
        assert handle == HANDLE
        self.held.append(thing)


@dataclass(frozen=True)
class FakeRegion:
    attributes: Mapping[str, bytes]
    handle: int = HANDLE
    address: int = 0
    size_bytes: int = PAGE
    access: Access = Access.READ_WRITE
    location: str = "cxl:1"
    memory: Any = None
    backing: Any = None


def reach(
    peer: FakePeer, attribute: bytes | None, config: EngineConfig | None = None
) -> tuple[bool, FakeSegment]:
    """What becomes of one region."""
    transport = CxlTransport(config or EngineConfig(transports=("cxl",)))
    segment = FakeSegment()
    region = FakeRegion({} if attribute is None else {"cxl": attribute})
    return transport.reach(peer, segment, region), segment  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def no_descriptor_stays() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    "attribute", [b"", b"\x01", b"\x01\x09", b"\x02\x01", b"\x01\x01x", pack_dax(RANGE)[:-1]]
)
def test_what_cannot_be_read_is_not_reached(attribute: bytes) -> None:
    peer = FakePeer()
    reached, segment = reach(peer, attribute)
    assert not reached
    assert isinstance(segment.problems[0], ProtocolError)
    assert peer.asked == []


def test_regions_of_others_are_no_business_of_ours() -> None:
    assert reach(FakePeer(), None)[0] is False


def memfd_of(size: int) -> int:
    fd = os.memfd_create("peer", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


@pytest.mark.parametrize(
    "value", [None, 5, {}, {"offset": 0}, {"offset": "0", "size": PAGE}, {"offset": True, "size": PAGE}]
)
def test_answers_that_make_no_sense(value: Any) -> None:
    reached, segment = reach(FakePeer(value, [memfd_of(PAGE)]), pack_node())
    assert not reached
    assert isinstance(segment.problems[0], ProtocolError)


@pytest.mark.parametrize(("offset", "size"), [(-1, PAGE), (1, PAGE), (0, 1 << 62), (0, PAGE - 1)])
@pytest.mark.parametrize("attribute", [pack_node(), pack_dax(RANGE)])
def test_ranges_outside_of_what_was_passed(offset: int, size: int, attribute: bytes) -> None:
    told = {"offset": offset, "size": size, "writable": True}
    reached, segment = reach(FakePeer(told, [memfd_of(PAGE)]), attribute)
    assert not reached
    assert isinstance(segment.problems[0], ProtocolError)


@pytest.mark.parametrize("count", [0, 2])
def test_one_descriptor_is_passed(count: int) -> None:
    told = {"offset": 0, "size": PAGE, "writable": True}
    reached, segment = reach(FakePeer(told, [memfd_of(PAGE) for _ in range(count)]), pack_node())
    assert not reached
    assert isinstance(segment.problems[0], ProtocolError)


def test_a_memfd_that_could_be_cut_is_not_mapped() -> None:
    told = {"offset": 0, "size": PAGE, "writable": True}
    reached, segment = reach(FakePeer(told, [memfd_of(PAGE)]), pack_node())
    assert not reached
    assert "sealed" in str(segment.problems[0])


@pytest.mark.parametrize("name", ["/dev/zero", "/proc/self/exe"])
def test_what_is_no_dax_device_is_not_mapped(name: str) -> None:
    told = {"offset": 0, "size": 64 << 20, "writable": False}
    reached, segment = reach(FakePeer(told, [os.open(name, os.O_RDONLY)]), pack_dax(RANGE))
    assert not reached
    assert "no DAX device" in str(segment.problems[0])


def test_a_range_shorter_than_its_region_is_refused() -> None:
    short = DaxRange(device_bytes=64 << 20, align_bytes=2 << 20, offset=0, length=PAGE - 1)
    reached, segment = reach(FakePeer(), pack_dax(short))
    assert not reached
    assert isinstance(segment.problems[0], ProtocolError)


def test_memory_of_a_node_is_mapped_and_let_go() -> None:
    memory = create_memory(2 * PAGE)
    told = {"offset": PAGE, "size": 2 * PAGE, "writable": True}
    reached, segment = reach(FakePeer(told, [os.dup(memory.fd)]), pack_node())
    assert reached
    assert segment.problems == []
    mapped = segment.mappings.pop(HANDLE)  # for who reads in place
    memoryview(memory)[PAGE : PAGE + 5] = b"bytes"
    assert bytes(memoryview(mapped)[PAGE : PAGE + 5]) == b"bytes"
    mapped.close()
    for thing in segment.held:
        thing.close()
    memory.close()


def test_what_shm_has_mapped_is_not_mapped_again() -> None:
    peer, segment = FakePeer(), FakeSegment()
    segment.mappings[HANDLE] = object()
    region = FakeRegion({"cxl": pack_node()})
    assert not CxlTransport(EngineConfig()).reach(peer, segment, region)  # type: ignore[arg-type]
    assert peer.asked == []


def test_other_hosts_need_a_name_in_the_config() -> None:
    far = FakeSession(is_unix=False, peer_pid=None)
    transport, segment = CxlTransport(EngineConfig()), FakeSegment()
    assert transport.connect(FakePeer(session=far), segment) == ()  # type: ignore[arg-type]
    shared = EngineConfig(cxl_shared=("serial:ab",))
    assert CxlTransport(shared).connect(FakePeer(session=far), segment)  # type: ignore[arg-type]
    assert reach(FakePeer(session=far), pack_dax(RANGE), EngineConfig(cxl_shared=("serial:cd",)))[0] is False
    reached, segment = reach(FakePeer(session=far), pack_dax(RANGE), shared)
    assert not reached
    assert isinstance(segment.problems[0], UnsupportedOperation)  # this host has no such device
    assert reach(FakePeer(session=far), pack_node(), shared)[0] is False


@dataclass
class FakeOwnerSession:
    session_id: int = 1
    peer_instance: bytes = b"i" * 16
    is_unix: bool = False
    peer_pid: int | None = None


class FakeHost:
    """An engine with one region."""

    def __init__(self, region: FakeRegion | None) -> None:
        self._region = region

    def region(self, handle: int) -> FakeRegion:
        if self._region is None or handle != self._region.handle:
            raise StaleHandle(region=handle)
        return self._region


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({}, ProtocolError),
        ({"handle": "3", "access": 1}, ProtocolError),
        ({"handle": HANDLE, "access": 8}, ProtocolError),
        ({"handle": HANDLE, "access": True}, ProtocolError),
        ({"handle": 7, "access": 1}, StaleHandle),
        ({"handle": HANDLE, "access": 3}, AccessDenied),
        ({"handle": HANDLE, "access": 0}, AccessDenied),
        ({"handle": HANDLE, "access": 1}, UnsupportedOperation),
    ],
)
def test_attaching_is_refused_to_who_may_not(params: dict[str, Any], error: type[MoonpoolError]) -> None:
    transport = CxlTransport(EngineConfig(cxl_shared=("serial:ab",)))
    transport.open(FakeHost(FakeRegion({}, access=Access.READ)))  # type: ignore[arg-type]
    with pytest.raises(error):
        transport.methods()[ATTACH](FakeOwnerSession(), params)
    assert transport.holders(HANDLE) == set()
    if error is ProtocolError:
        with pytest.raises(error):
            transport.methods()[DETACH](FakeOwnerSession(), params)
    assert transport.fence(1, 0.0)


def test_an_owner_that_is_gone_is_noted() -> None:
    reached, segment = reach(FakePeer(error=PeerGone("it went", peer="h:1")), pack_node())
    assert not reached
    assert isinstance(segment.problems[0], PeerGone)


def test_it_is_available_everywhere_and_says_what_it_found() -> None:
    state = available()
    assert state.ok
    assert "far memory" in state.reason
