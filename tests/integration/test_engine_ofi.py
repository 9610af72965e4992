"""`ofi` between processes: every provider of software, peers that die or stop, and what is left behind."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from moonpool import Access, Engine, MoonpoolError, Op, PeerGone, Status, TransferTimeout

pytest.importorskip("moonpool.native.ofi.library", reason="needs libfabric's headers at build time")

from moonpool.native.ofi.library import library_version

try:
    library_version()
except MoonpoolError as problem:
    pytest.skip(f"needs libfabric: {problem}", allow_module_level=True)

MIB = 1 << 20
LONG = 16_384
CYCLES = 1_000
WAIT_S = 30.0
#: A dead process's sockets are closed by the kernel at once; the rest is ours.
NOTICE_S = 5.0
LATE_S = 3.0
PROVIDERS = ("tcp", "tcp;ofi_rxm", "shm", "sockets")
CONFIG: dict[str, Any] = {
    "transports": ("ofi",),
    "ofi_provider": "tcp",
    "transfer_timeout_ms": 20_000,
    "stall_timeout_ms": 8_000,
}
both_ops = pytest.mark.parametrize("op", [Op.READ, Op.WRITE], ids=["read", "write"])


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(**CONFIG) as made:
        yield made


def counts(engine: Engine) -> dict[str, Any]:
    metrics = engine.metrics()
    return {**metrics["counters"], **metrics["gauges"]}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_bytes_go_both_ways_over_each_provider(make_peer: Any, pattern: Any, provider: str) -> None:
    config = {**CONFIG, "ofi_provider": provider}
    peer = make_peer(**config)
    with Engine(**config) as engine:
        size = 3 * MIB + 17
        handle = peer.ask("offer", size=size, seed=1)
        segment = engine.open(peer.endpoint)
        assert [path.transport for path in segment.paths] == ["ofi"]
        assert segment.paths[0].local_device.startswith(("net", provider))
        found = bytearray(size)
        engine.read(segment, handle, 0, found)
        assert found == pattern(size, 1).tobytes()
        engine.write(segment, handle, 0, pattern(size, 2).tobytes())
        assert peer.ask("holds", handle=handle, seed=2)
        many = np.arange(0, 700 * 4096, 4096, dtype=np.uint64)
        mine = np.zeros(700 * 4096, dtype=np.uint8)
        engine.register(mine, access=Access.NONE)
        engine.transfer(Op.READ, segment, many + np.uint64(mine.ctypes.data), handle, many, 4096)
        assert np.array_equal(mine, pattern(size, 2)[: mine.size])
        engine.close_segment(segment)


@both_ops
@pytest.mark.parametrize("provider", ["tcp", "tcp;ofi_rxm"])
def test_a_killed_owner_ends_batches_as_gone(make_peer: Any, provider: str, op: Op) -> None:
    config = {**CONFIG, "ofi_provider": provider}
    peer = make_peer(**config)
    with Engine(**config) as engine:
        handle = peer.ask("offer", size=MIB, seed=1)
        segment = engine.open(peer.endpoint)
        mine = np.full(MIB, 0x55, dtype=np.uint8)
        engine.register(mine, access=Access.NONE)
        local = np.full(LONG, mine.ctypes.data, dtype=np.uint64)
        batch = engine.submit(op, segment, local, handle, 0, MIB)
        until = time.monotonic() + WAIT_S
        while Status.COMPLETE not in bytes(batch.status):
            assert time.monotonic() < until
            time.sleep(0.001)
        peer.kill()
        killed = time.monotonic()
        assert batch.wait(WAIT_S)
        assert time.monotonic() - killed < NOTICE_S
        assert set(bytes(batch.status)) == {Status.COMPLETE, Status.PEER_GONE}
        with pytest.raises(PeerGone):
            batch.check()
        mine[:] = 0xEE
        with pytest.raises(PeerGone):
            engine.read(segment, handle, 0, bytearray(16))
        assert (mine == 0xEE).all()
        again = make_peer(**config)
        handle = again.ask("offer", size=MIB, seed=4)
        other = engine.open(again.endpoint)
        engine.read(other, handle, 0, mine)
        assert np.array_equal(mine, np.frombuffer(_read(engine, other, handle, MIB), dtype=np.uint8))


def _read(engine: Engine, segment: Any, handle: int, size: int) -> bytes:
    found = bytearray(size)
    engine.read(segment, handle, 0, found)
    return bytes(found)


def test_a_killed_initiator_leaves_no_endpoint_and_disturbs_nobody(
    engine: Engine, make_peer: Any, wait_until: Any, pattern: Any
) -> None:
    region = engine.allocate(MIB)
    content = np.frombuffer(region.view, dtype=np.uint8)
    content[:] = pattern(MIB, 3)
    victim, other = make_peer(**CONFIG), make_peer(**CONFIG)
    for peer in (victim, other):
        assert peer.ask("open", endpoint=engine.endpoint) == ["ofi"]
        peer.ask("work", op=int(Op.READ), handle=region.handle, length=MIB)
    assert counts(engine)["ofi_peer_endpoints_open"] == 2
    wait_until(lambda: victim.ask("progress")[0] > 3, "the victim works")
    victim.kill()
    wait_until(lambda: counts(engine)["ofi_peer_endpoints_open"] == 1, "its endpoint is closed")
    before = other.ask("progress")[0]
    wait_until(lambda: other.ask("progress")[0] > before + 3, "the other goes on")
    assert other.ask("stop")[1] == ""
    engine.revoke(region)


@both_ops
def test_a_stopped_owner_ends_a_batch_after_its_deadline(make_peer: Any, pattern: Any, op: Op) -> None:
    bounds = {"connect_timeout_ms": 800, "handshake_timeout_ms": 600}
    config = {**CONFIG, **bounds}
    peer = make_peer(**config)
    with Engine(**config) as engine:
        handle = peer.ask("offer", size=8 * MIB, seed=1)
        segment = engine.open(peer.endpoint)
        mine = np.zeros(8 * MIB, dtype=np.uint8)
        engine.register(mine, access=Access.NONE)
        engine.read(segment, handle, 0, mine)
        assert np.array_equal(mine, pattern(8 * MIB, 1))
        mine[:] = pattern(8 * MIB, 2)
        peer.signal(signal.SIGSTOP)
        began = time.monotonic()
        local = np.full(8, mine.ctypes.data, dtype=np.uint64)
        batch = engine.transfer(op, segment, local, handle, 0, 8 * MIB, timeout_s=0.3, check=False)
        # The deadline, the grace for what is in flight, and one question to the owner.
        assert time.monotonic() - began < 0.3 + 0.5 + 1.4 + LATE_S
        assert Status.TIMED_OUT in bytes(batch.status)
        with pytest.raises(TransferTimeout):
            batch.check()
        mine[:] = 0xEE
        peer.signal(signal.SIGCONT)
        until = time.monotonic() + WAIT_S
        found = bytearray(8 * MIB)
        while True:
            try:
                engine.read(segment, handle, 0, found, timeout_s=5.0)
                break
            except MoonpoolError:
                assert time.monotonic() < until, "it does not recover"
                time.sleep(0.05)
        assert (mine == 0xEE).all()
        if op is Op.READ:
            assert found == pattern(8 * MIB, 1).tobytes()
        engine.write(segment, handle, 0, pattern(8 * MIB, 5).tobytes())
        assert peer.ask("holds", handle=handle, seed=5)
        assert counts(engine)["ofi_renewals"] >= 1
        assert counts(engine)["ofi_torn_down"] >= 1


def test_a_region_can_be_revoked_under_load(engine: Engine, make_peer: Any, wait_until: Any) -> None:
    peer = make_peer(**CONFIG)
    assert peer.ask("open", endpoint=engine.endpoint) == ["ofi"]
    region = engine.allocate(MIB)
    peer.ask("open", endpoint=engine.endpoint)
    peer.ask("work", op=int(Op.WRITE), handle=region.handle, length=MIB, seed=1)
    wait_until(lambda: peer.ask("progress")[0] > 3, "it works")
    engine.revoke(region)
    wait_until(lambda: peer.ask("progress")[1] == "StaleHandle", "the peer hears of it")
    assert counts(engine)["ofi_regions_now"] == 0


def test_many_connects_leave_nothing(engine: Engine, make_peer: Any, held: Any) -> None:
    peer = make_peer(**CONFIG)
    handle = peer.ask("offer", size=4096, seed=1)
    target = bytearray(4096)

    def cycle() -> None:
        segment = engine.open(peer.endpoint)
        engine.read(segment, handle, 0, target)
        engine.close_segment(segment)

    for _ in range(10):
        cycle()
    gc.collect()
    before, theirs = held.now(), peer.ask("facts")
    for _ in range(CYCLES):
        cycle()
    gc.collect()
    assert before.covers(held.now(), 16 * MIB)
    assert counts(engine)["ofi_endpoints_open"] == 0
    after = peer.ask("facts")
    assert {name: after[name] <= theirs[name] for name in after} == dict.fromkeys(after, True)
    assert peer.ask("counters")["ofi_peer_endpoints_open"] == 0


def test_many_killed_initiators_leave_nothing(
    engine: Engine, make_peer: Any, held: Any, wait_until: Any
) -> None:
    region = engine.allocate(MIB)

    def cycle() -> None:
        peer = make_peer(**CONFIG)
        peer.ask("open", endpoint=engine.endpoint)
        peer.ask("work", op=int(Op.WRITE), handle=region.handle, length=MIB)
        wait_until(lambda: peer.ask("progress")[0] > 0, "it works")
        peer.kill()
        wait_until(lambda: counts(engine)["ofi_peer_endpoints_open"] == 0, "its endpoint is closed")

    cycle()
    before = held.now()
    for _ in range(5):
        cycle()
    wait_until(lambda: before.covers(held.now(), 16 * MIB), "nothing is left of them")


def test_the_signals_are_left_alone() -> None:
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGSEGV, signal.SIGBUS)]
    with Engine(**CONFIG):
        os.kill(os.getpid(), 0)
    after = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGSEGV, signal.SIGBUS)]
    assert before == after
