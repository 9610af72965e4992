"""`ofi` in one process: what providers may require, endpoints closed under way, hostile owners, fall-over."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from moonpool import (
    Access,
    Engine,
    MoonpoolError,
    Op,
    Status,
    TransportUnavailable,
    UsageError,
)

pytest.importorskip("moonpool.native.ofi.library", reason="needs libfabric's headers at build time")

from moonpool.native.ofi import fabric as native
from moonpool.native.ofi.library import library_version, providers
from moonpool.transport import ofi
from moonpool.transport.ofi_attribute import Endpoint, RegionKey
from moonpool.transport.registry import availability

try:
    library_version()
except MoonpoolError as problem:
    pytest.skip(f"needs libfabric: {problem}", allow_module_level=True)

MIB = 1 << 20
WAIT_S = 20.0
CONFIG: dict[str, Any] = {
    "transports": ("ofi",),
    "ofi_provider": "tcp",
    "transfer_timeout_ms": 20_000,
    "stall_timeout_ms": 5_000,
    "connect_timeout_ms": 1_000,
}
LIMITS = {
    "bounce": native.BOUNCE,
    "flush": native.FLUSH,
    "shared": native.SHARED,
    "all": native.BOUNCE | native.FLUSH | native.SHARED,
}
both_ops = pytest.mark.parametrize("op", [Op.READ, Op.WRITE], ids=["read", "write"])


class Both:
    """Two engines of this process, a region of the one, and the segment that the other has open."""

    def __init__(self, initiator: Engine, owner: Engine, size: int = MIB) -> None:
        self.initiator, self.owner = initiator, owner
        self.region = owner.allocate(size)
        self.content = np.frombuffer(self.region.view, dtype=np.uint8)[:size]
        self.content[:] = np.arange(size, dtype=np.uint64).astype(np.uint8) * 7
        self.segment = initiator.open(owner.endpoint)

    @property
    def transport(self) -> ofi.OfiTransport:
        """The owner's."""
        found = self.owner._by_name["ofi"]
        assert isinstance(found, ofi.OfiTransport)
        return found

    def let_go(self) -> None:
        """Drop what would keep the region's memory."""
        del self.content, self.region

    def end_all(self) -> None:
        """The owner closes the endpoints of all peers, as a fence does."""
        for session in self.transport._ends.sessions(None):
            assert self.transport.fence(session, 1.0)

    def read(self, size: int = MIB, **how: Any) -> bytes:
        found = bytearray(size)
        self.initiator.read(self.segment, self.region.handle, 0, found, **how)
        return bytes(found)

    def counts(self) -> dict[str, Any]:
        metrics = self.initiator.metrics()
        return {**metrics["counters"], **metrics["gauges"]}


@pytest.fixture(autouse=True)
def _no_cycles() -> Iterator[None]:
    """An error that a test has caught keeps its regions, in a cycle of references."""
    yield
    gc.collect()


@pytest.fixture
def both() -> Iterator[Both]:
    with Engine(**CONFIG) as initiator, Engine(**CONFIG) as owner:
        made = Both(initiator, owner)
        yield made
        made.let_go()


@pytest.fixture
def with_tcp() -> Iterator[Both]:
    config = {**CONFIG, "transports": ("ofi", "tcp")}
    with Engine(**config) as initiator, Engine(**config) as owner:
        made = Both(initiator, owner)
        yield made
        made.let_go()


@pytest.mark.parametrize("limits", LIMITS)
def test_what_a_provider_may_require(monkeypatch: pytest.MonkeyPatch, limits: str) -> None:
    monkeypatch.setattr(ofi, "Fabric", functools.partial(native.Fabric, limits=LIMITS[limits]))
    with Engine(**CONFIG) as initiator, Engine(**CONFIG) as owner:
        pair = Both(initiator, owner, 3 * MIB + 11)
        size = pair.content.size
        registered = np.zeros(size + 1, dtype=np.uint8)
        initiator.register(registered, access=Access.NONE)
        local = int(registered.ctypes.data) + 1
        initiator.read(pair.segment, pair.region.handle, 0, local, size)
        assert np.array_equal(registered[1:], pair.content)
        assert pair.read(size) == pair.content.tobytes()
        for seed in range(5):
            data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
            batch = initiator.transfer(
                Op.WRITE, pair.segment, data, pair.region.handle, 0, digest=True, check=True
            )
            assert np.array_equal(pair.content, data)
            assert batch.digests is not None
        offsets = np.arange(0, 3000 * 64, 64, dtype=np.uint64)
        registered[:] = 0x3C
        initiator.transfer(
            Op.WRITE, pair.segment, offsets + np.uint64(local), pair.region.handle, offsets, 32
        )
        assert (pair.content[: 3000 * 64].reshape(-1, 64)[:, :32] == 0x3C).all()
        counts = pair.counts()
        assert (counts["ofi_bounced_bytes"] > 0) == bool(LIMITS[limits] & native.BOUNCE)
        assert (counts["ofi_flushes"] >= 6) == bool(LIMITS[limits] & native.FLUSH)
        assert pair.transport._fabric.is_shared == bool(LIMITS[limits] & native.SHARED)
        owner.revoke(pair.region)
        assert initiator.metrics()["gauges"]["ofi_endpoints_open"] >= 1


@both_ops
def test_an_endpoint_closed_by_its_owner_is_asked_for_again(both: Both, op: Op) -> None:
    assert both.read() == both.content.tobytes()
    for seed in range(3):
        both.end_all()
        data = np.full(MIB, seed + 1, dtype=np.uint8)
        if op is Op.READ:
            both.content[:] = data
            assert both.read() == data.tobytes()
        else:
            both.initiator.write(both.segment, both.region.handle, 0, data)
            assert np.array_equal(both.content, data)
    assert both.counts()["ofi_renewals"] == 3


@both_ops
def test_endpoints_closed_under_load_cost_no_batch(both: Both, op: Op) -> None:
    mine = np.frombuffer(both.read(), dtype=np.uint8).copy()
    both.initiator.register(mine, access=Access.NONE)
    local = np.full(2_000, mine.ctypes.data, dtype=np.uint64)
    batch = both.initiator.submit(op, both.segment, local, both.region.handle, 0, MIB)
    ended = 0
    while not batch.wait(0.2) and ended < 2:
        both.end_all()
        ended += 1
    assert batch.wait(WAIT_S)
    batch.check()
    assert np.array_equal(mine, both.content)
    assert both.counts()["ofi_torn_down"] >= min(ended, 1)


def test_when_the_owner_has_no_endpoint_any_more_tcp_takes_over(
    with_tcp: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [path.transport for path in with_tcp.segment.paths] == ["ofi", "tcp"]
    assert with_tcp.read() == with_tcp.content.tobytes()

    def refuse(*_of: Any) -> Any:
        raise UsageError("no more endpoints")

    monkeypatch.setattr(ofi.SessionEnds, "give", refuse)
    with_tcp.end_all()
    assert with_tcp.read() == with_tcp.content.tobytes()
    rows = {(row["transport"], row["op"]): row for row in with_tcp.initiator.metrics()["paths"]}
    assert rows["tcp", "READ"]["transfers"] == 1
    assert with_tcp.counts()["path_fallbacks"] >= 1


def test_a_write_whose_bytes_may_be_on_their_way_goes_no_other_way(
    with_tcp: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = np.full(MIB, 9, dtype=np.uint8)
    with_tcp.initiator.write(with_tcp.segment, with_tcp.region.handle, 0, data)
    monkeypatch.setattr(ofi.SessionEnds, "give", lambda *_of: 1 / 0)
    with_tcp.end_all()
    batch = with_tcp.initiator.transfer(
        Op.WRITE, with_tcp.segment, data, with_tcp.region.handle, 0, check=False
    )
    assert Status(batch.status[0]) not in (Status.COMPLETE, Status.PENDING)
    # Nothing of it was posted from here on: the next one goes by tcp at once.
    with_tcp.initiator.write(with_tcp.segment, with_tcp.region.handle, 0, data)


@pytest.mark.parametrize(
    "attribute", [b"", b"\x01", bytes(24), bytes(23), b"\xff" * 24, b"\x01" + bytes(6) + b"\x01" + bytes(16)]
)
def test_a_region_with_a_garbled_attribute_is_reached_another_way(
    monkeypatch: pytest.MonkeyPatch, attribute: bytes
) -> None:
    monkeypatch.setattr(RegionKey, "encode", lambda _key: attribute)
    monkeypatch.setattr(
        Endpoint, "to_answer", lambda one: {"number": 1, "address": one.address, "flush": b"\1" + bytes(23)}
    )
    config = {**CONFIG, "transports": ("ofi", "tcp")}
    with Engine(**config) as initiator, Engine(**config) as owner:
        pair = Both(initiator, owner)
        assert pair.read() == pair.content.tobytes()
        rows = [row["transport"] for row in initiator.metrics()["paths"] if row["transfers"]]
        assert rows == ["tcp"]
        assert any("ofi" in key for key in pair.segment.unreachable)


@both_ops
def test_a_wrong_key_is_refused_within_bounds(monkeypatch: pytest.MonkeyPatch, op: Op) -> None:
    true = RegionKey.encode
    monkeypatch.setattr(RegionKey, "encode", lambda key: true(RegionKey(key.key ^ 1, key.base)))
    with Engine(**CONFIG) as initiator, Engine(**CONFIG) as owner:
        pair = Both(initiator, owner)
        before = pair.content.copy()
        mine = np.full(MIB, 0x77, dtype=np.uint8)
        with pytest.raises(MoonpoolError) as caught:
            initiator.transfer(op, pair.segment, mine, pair.region.handle, 0)
        assert caught.value.status in (Status.REFUSED, Status.ACCESS_DENIED)
        assert np.array_equal(pair.content, before)
        assert (mine == 0x77).all()


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {},
        {"number": 0, "address": b"x", "flush": b""},
        {"number": 1, "address": b"", "flush": b"\1" + bytes(23)},
        {"number": 1, "address": b"\xff" * 16, "flush": b"\1" + bytes(23)},
        {"number": 1, "address": b"\x02\x00" + bytes(14), "flush": b"\1" + bytes(23)},
        {"number": 1, "address": bytes(15), "flush": b"\1" + bytes(23)},
        {"number": 1, "address": bytes(257), "flush": b"\1" + bytes(23)},
        {"number": 1 << 40, "address": bytes(16), "flush": b"\1" + bytes(23)},
        {"number": "1", "address": "127.0.0.1", "flush": 7},
    ],
)
def test_a_garbled_answer_costs_the_path_not_the_process(
    monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    monkeypatch.setattr(Endpoint, "to_answer", lambda _end: answer)
    config = {**CONFIG, "transports": ("ofi", "tcp"), "connect_timeout_ms": 300}
    with Engine(**config) as initiator, Engine(**config) as owner:
        pair = Both(initiator, owner)
        assert pair.read() == pair.content.tobytes()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"provider": 7, "format": 1, "pid": 1},
        {"provider": "x" * 65, "format": 1, "pid": 1},
        {"provider": "verbs", "format": 1, "pid": 1, "previous": None},
        {"provider": "net", "format": "2", "pid": 1},
        {"provider": "net", "format": 2, "pid": None},
        {"provider": "net", "format": 2, "pid": 1, "previous": -1},
        {"provider": "net", "format": 2, "pid": 1, "previous": True},
        {"provider": "net", "format": 2, "pid": 1, "previous": 1 << 70},
    ],
)
def test_garbled_questions_are_refused(both: Both, params: dict[str, Any]) -> None:
    with pytest.raises(MoonpoolError):
        both.segment.peer.request("ofi.connect", params).close()
    assert both.read() == both.content.tobytes()


def test_a_session_has_one_endpoint(both: Both) -> None:
    transport = both.transport
    assert both.read() == both.content.tobytes()
    asked = {"provider": transport._fabric.provider, "format": transport._fabric.address_format, "pid": 1}
    numbers = []
    for previous in (None, 1, 77, None):
        with both.segment.peer.request("ofi.connect", {**asked, "previous": previous}) as answer:
            numbers.append(answer.value["number"])
    assert numbers == sorted(set(numbers))
    assert both.owner.metrics()["gauges"]["ofi_peer_endpoints_open"] == 1
    assert both.read() == both.content.tobytes()  # its own was closed: it asks again
    assert both.counts()["ofi_renewals"] == 1


def test_a_revoked_region_is_out_of_the_device_s_reach(both: Both) -> None:
    with both.segment.peer.request("describe", {}) as answer:
        about = next(one for one in answer.value["regions"] if one["handle"] == both.region.handle)
    assert both.read() == both.content.tobytes()
    kept = np.array(both.content)
    both.owner.revoke(both.region)
    other = both.owner.allocate(4096)
    both.initiator.refresh(both.segment)
    # Another region's handle, shown with the key that was: the provider knows it no more.
    stale = RegionKey.decode(about["attributes"]["ofi"])
    native_segment = both.segment.native
    keep = ofi.reach_region(native_segment, other.handle, stale.key, stale.base)
    with pytest.raises(MoonpoolError) as caught:
        both.initiator.read(both.segment, other.handle, 0, bytearray(4096))
    assert caught.value.status in (Status.REFUSED, Status.ACCESS_DENIED)
    assert kept.size == MIB
    keep.close()


def test_who_may_write_is_told_by_session_and_instance(both: Both) -> None:
    transport = both.transport
    sessions = transport._ends.sessions(None)
    assert len(sessions) == 1
    handle = both.region.handle
    assert transport.holders(handle) == sessions == transport.writers(handle, None)
    assert transport.writers(handle, both.initiator.instance) == sessions
    assert transport.writers(handle, bytes(16)) == set()
    readable = both.owner.allocate(4096, access=Access.READ)
    assert transport.writers(readable.handle, None) == set()
    assert transport.holders(readable.handle) == sessions
    assert transport.holders(12345) == set()


def test_a_provider_that_is_not_there_is_unavailable_with_what_helps() -> None:
    with pytest.raises(TransportUnavailable, match="fi_info"):
        Engine(**{**CONFIG, "ofi_provider": "no-such-provider"})
    with pytest.raises(UsageError, match="ofi_provider"):
        Engine(**{**CONFIG, "ofi_provider": "a b"})
    known = {name.partition(";")[0] for name in providers()}
    if not known & set(ofi.HARDWARE):
        with pytest.raises(TransportUnavailable, match="hardware"):
            Engine(**{**CONFIG, "ofi_provider": ""})
    assert ofi.available().ok


def test_engines_of_different_providers_do_not_meet() -> None:
    with Engine(**CONFIG) as initiator, Engine(**{**CONFIG, "ofi_provider": "sockets"}) as owner:
        owner.allocate(4096)
        with pytest.raises(TransportUnavailable):
            initiator.open(owner.endpoint)


def test_shm_is_refused_between_engines_of_one_process() -> None:
    config = {**CONFIG, "ofi_provider": "shm"}
    with Engine(**config) as initiator, Engine(**config) as owner:
        owner.allocate(4096)
        with pytest.raises(TransportUnavailable):
            initiator.open(owner.endpoint)


def test_ask_for_a_provider_by_what_the_library_calls_it() -> None:
    assert ofi.provider_names("", (1, 17)) == ofi.HARDWARE
    assert ofi.provider_names("tcp", (1, 17)) == ("net", "tcp")
    assert ofi.provider_names("tcp", (1, 18)) == ("tcp",)
    assert ofi.provider_names("efa", (1, 17)) == ("efa",)


def test_without_its_module_the_transport_is_away_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "moonpool.transport.ofi")
    monkeypatch.setitem(sys.modules, "moonpool.native.ofi.link", None)
    state = availability()["ofi"]
    assert not state.ok
    assert "libfabric-dev" in state.how_to_get_it
    with pytest.raises(TransportUnavailable, match="libfabric-dev"):
        Engine(**CONFIG)


def test_a_library_that_is_not_there_is_told() -> None:
    program = (
        "from moonpool.native.ofi import library\n"
        "from moonpool.errors import TransportUnavailable\n"
        "try:\n"
        "    library.library_version('libfabric-of-nowhere.so.9')\n"
        "except TransportUnavailable as problem:\n"
        "    print(problem)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60)
    assert "libfabric-of-nowhere.so.9" in done.stdout
    assert "apt-get install libfabric1" in done.stdout


def test_a_forked_child_disturbs_nothing(both: Both) -> None:
    assert both.read() == both.content.tobytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads and fork: from Python 3.12 on
        child = os.fork()
    if child == 0:
        try:
            for transport in both.initiator._by_name.values():
                transport.close()
            both.transport.close()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for _ in range(3):
        assert both.read() == both.content.tobytes()
    assert both.counts()["ofi_renewals"] == 0
