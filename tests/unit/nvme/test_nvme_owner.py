"""The owner's side: ranges that are offered, who was told of them, and what is written for a peer."""

from __future__ import annotations

import asyncio
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from moonpool.errors import AccessDenied, MoonpoolError, ProtocolError, StaleHandle, UsageError
from moonpool.operations import Access
from moonpool.transport.nvme_attribute import Target, decode
from moonpool.transport.nvme_book import RangeBook
from moonpool.transport.nvme_offers import Claims, NamespaceBacking, find_offered, plan_range, targets_of
from moonpool.transport.nvme_owner import EDGES, OPEN, RangeOwner
from moonpool.transport.nvme_sysfs import Namespace, read_subsystems

sys.path.insert(0, str(Path(__file__).parent))
from nvme_hosts import recorded, two_controllers

MIB = 1 << 20
HANDLE = 1 << 32 | 1


def namespace_of(host: str = "tcp", **changes: Any) -> Namespace:
    (subsystem,) = read_subsystems(recorded(host))
    return replace(subsystem.namespaces[0], **changes)


# ---- offers


def test_an_offer_names_a_namespace() -> None:
    tree = recorded("tcp")
    wwid = namespace_of().wwid
    for name in ("nvme0n1", "ng0n1", wwid, wwid.partition(".")[2]):
        assert find_offered(f"nvme:{name}", tree).wwid == wwid
    with pytest.raises(UsageError, match="there are nvme0n1"):
        find_offered("nvme:nvme7n1", tree)


def test_a_range_by_default_and_by_wish() -> None:
    namespace = namespace_of()
    whole = plan_range(namespace, None, {})
    assert (whole.offset, whole.size_bytes, whole.fua, whole.passthrough) == (0, 128 * MIB, False, "auto")
    assert whole.targets == (Target("tcp", "10.99.0.2", "4420"),)
    part = plan_range(namespace, 1000, {"offset": 4096, "fua": True, "passthrough": "no"})
    assert decode(part.encode()) == part
    assert (part.offset, part.size_bytes, part.fua, part.passthrough) == (4096, 1000, True, "no")
    assert plan_range(namespace_of("pcie"), 512, {}).targets == ()


@pytest.mark.parametrize(
    ("size", "how", "field"),
    [
        (0, {}, "size_bytes"),
        (128 * MIB + 1, {}, "size_bytes"),
        (512, {"offset": 128 * MIB}, "size_bytes"),
        (512, {"offset": 100}, "offset"),
        (512, {"offset": -512}, "offset"),
        (512, {"passthrough": "maybe"}, "passthrough"),
        (512, {"fua": 1}, "fua"),
        (512, {"create": True}, "create"),
    ],
)
def test_a_wrong_wish_is_named(size: int, how: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan_range(namespace_of(), size, how)
    assert caught.value.field == field


def test_metadata_is_refused_or_left_to_the_kernel() -> None:
    with pytest.raises(UsageError, match="format it without"):
        plan_range(namespace_of(metadata_bytes=8), 512, {})
    protected = namespace_of(metadata_bytes=8, protection="T10-DIF-TYPE1-CRC")
    assert plan_range(protected, 512, {}).passthrough == "no"
    with pytest.raises(UsageError, match="protection information"):
        plan_range(protected, 512, {"passthrough": "yes"})


def test_targets_of_several_controllers() -> None:
    (subsystem,) = read_subsystems(two_controllers("live"))
    assert targets_of(subsystem.namespaces[0]) == (
        Target("tcp", "10.99.0.2", "4420"),
        Target("tcp", "10.99.0.3", "4420"),
    )


def test_no_two_ranges_share_a_block() -> None:
    namespace, claims = namespace_of(), Claims()
    first = plan_range(namespace, 1000, {"offset": 512})
    claims.take(first)
    for offset, size in ((0, 513), (512, 512), (1024, 1), (1536 - 512, 512)):
        with pytest.raises(UsageError, match="share a block"):
            claims.take(plan_range(namespace, size, {"offset": offset}))
    claims.take(plan_range(namespace, 512, {"offset": 0}))
    claims.take(plan_range(namespace, 512, {"offset": 1536}))
    claims.take(plan_range(replace(namespace, nsid=2), 512, {"offset": 512}))
    claims.give_up(first)
    claims.take(plan_range(namespace, 1000, {"offset": 512}))


# ---- the book


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_session_is_over_when_its_last_command_is() -> None:
    clock = Clock()
    book = RangeBook(12.0, clock)
    book.note(1, 7, b"i", writes=True)
    book.note(2, 7, b"i", writes=False)
    assert book.holders(1) == book.holders(2) == {7}
    assert book.writers(1, None) == book.writers(1, b"i") == {7}
    assert book.writers(1, b"other") == book.writers(2, None) == set()
    assert not book.is_over(7, 0.0), "a live session is never over"
    book.session_ended(7)
    assert book.holders(1) == set(), "nobody is left to be asked"
    assert book.writers(1, None) == {7}, "but its last command may still land"
    assert not book.is_over(7, 0.0)
    clock.now += 12.1
    assert book.is_over(7, 0.0)
    assert book.writers(1, None) == set()
    assert book.is_over(8, 0.0), "one that was never told of anything"


def test_a_revoke_waits_for_ended_writers_only() -> None:
    clock = Clock()
    book = RangeBook(5.0, clock)
    book.note(1, 7, b"i", writes=True)
    book.note(1, 8, b"j", writes=False)
    assert book.forget(1, 0.0), "live sessions are asked by others, and have answered"
    assert book.holders(1) == set()
    book.note(1, 7, b"i", writes=True)
    book.session_ended(7)
    assert not book.forget(1, 0.0)
    clock.now += 5.1
    assert book.forget(1, 0.0)


# ---- control methods


@dataclass
class Region:
    handle: int
    access: Access
    backing: Any
    address: int = 0
    size_bytes: int = 5000
    location: str = "nvme:1"
    memory: None = None


@dataclass
class Session:
    session_id: int = 3
    peer_instance: bytes = b"peer"
    is_unix: bool = False
    peer_pid: int | None = None


class FakeHost:
    table: Any = None
    instance = b"owner"

    def __init__(self, region: Region) -> None:
        self.live: Region | None = region
        self.noted: list[tuple[int, int, bool]] = []

    def region(self, handle: int) -> Any:
        if self.live is None or self.live.handle != handle:
            raise StaleHandle(region=handle)
        return self.live

    def given(self, handle: int, session: Any, *, writes: bool) -> None:
        self.noted.append((handle, session.session_id, writes))


class Owner:
    """A `RangeOwner` of one region of 5,000 bytes with blocks of 512."""

    def __init__(self, access: Access = Access.READ_WRITE) -> None:
        about = plan_range(namespace_of(), 5000, {"offset": 4096})
        backing = NamespaceBacking(about, True, "nvme:1", None, Claims())  # type: ignore[arg-type]
        self.host = FakeHost(Region(HANDLE, access, backing))
        self.book = RangeBook(1.0)
        self.written: list[tuple[int, bytes]] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.owner = RangeOwner(self.host, self.book, self.write)  # type: ignore[arg-type]

    def write(self, _where: Any, pieces: list[tuple[int, bytes]], _budget_s: float) -> list[int]:
        assert self.go_on.wait(20.0)
        self.written += pieces
        return [0] * len(pieces)

    def call(self, method: str, params: dict[str, Any], session: Any = None) -> Any:
        outcome = self.owner.methods()[method](session or Session(), params)
        return asyncio.run(outcome) if asyncio.iscoroutine(outcome) else outcome


def test_a_peer_on_another_host_goes_into_the_book() -> None:
    owner = Owner()
    assert owner.call(OPEN, {"handle": HANDLE, "access": 3}) == {}
    assert owner.book.writers(HANDLE, b"peer") == {3}
    assert owner.host.noted == []


def test_a_peer_on_this_host_goes_into_the_engines_books() -> None:
    owner = Owner()
    owner.call(OPEN, {"handle": HANDLE, "access": 1}, Session(is_unix=True, peer_pid=77))
    assert owner.host.noted == [(HANDLE, 3, False)]
    assert owner.book.holders(HANDLE) == set()


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        ({}, ProtocolError),
        ({"handle": "x", "access": 1}, ProtocolError),
        ({"handle": True, "access": 1}, ProtocolError),
        ({"handle": HANDLE + 1, "access": 1}, StaleHandle),
        ({"handle": HANDLE}, ProtocolError),
        ({"handle": HANDLE, "access": 4}, ProtocolError),
        ({"handle": HANDLE, "access": 0}, ProtocolError),
        ({"handle": HANDLE, "access": 2}, AccessDenied),
    ],
)
def test_a_wrong_question_is_refused(params: dict[str, Any], kind: type[MoonpoolError]) -> None:
    owner = Owner(Access.READ)
    with pytest.raises(kind):
        owner.call(OPEN, params)
    assert owner.book.holders(HANDLE) == set()


def test_edges_are_written_and_answered() -> None:
    owner = Owner()
    pieces = [(0, b"a"), (511, b"b"), (4999, b"c"), (512, b"d" * 511)]
    assert owner.call(EDGES, {"handle": HANDLE, "pieces": pieces, "budget_ms": 100}) == [0] * 4
    assert owner.written == pieces


@pytest.mark.parametrize(
    "pieces",
    [
        None,
        [],
        [(0, b"x")] * 1025,
        [(0, b"")],
        [(-1, b"x")],
        [(5000, b"x")],
        [(4999, b"xy")],
        [(511, b"xy")],
        [(0, "text")],
        [(True, b"x")],
        [(0,)],
        [0],
        [(0, b"x" * 512)] * 200,
    ],
)
def test_edges_that_are_none_are_refused(pieces: Any) -> None:
    owner = Owner()
    with pytest.raises(ProtocolError):
        owner.call(EDGES, {"handle": HANDLE, "pieces": pieces, "budget_ms": 100})
    assert owner.written == []


def test_edges_need_write_access_and_a_budget() -> None:
    with pytest.raises(AccessDenied):
        Owner(Access.READ).call(EDGES, {"handle": HANDLE, "pieces": [(0, b"x")], "budget_ms": 1})
    for budget in (None, -1, 60_001, 1.5):
        with pytest.raises(ProtocolError):
            Owner().call(EDGES, {"handle": HANDLE, "pieces": [(0, b"x")], "budget_ms": budget})


def test_a_revoke_waits_for_edges_under_way() -> None:
    owner = Owner()
    owner.go_on.clear()
    params = {"handle": HANDLE, "pieces": [(0, b"x")], "budget_ms": 1000}
    thread = threading.Thread(target=lambda: owner.call(EDGES, params))
    thread.start()
    while owner.owner.settle(HANDLE, 0.0):
        assert thread.is_alive()
    owner.host.live = None
    assert not owner.owner.settle(HANDLE, 0.01)
    owner.go_on.set()
    assert owner.owner.settle(HANDLE, 20.0)
    thread.join(20.0)
    assert owner.written == [(0, b"x")]
    with pytest.raises(StaleHandle):
        owner.call(EDGES, params)
