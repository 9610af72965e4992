"""Peers that stop, stall, trickle or fall silent: ended within the bound that was promised, then recovery."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from moonpool import (
    Access,
    Engine,
    HandshakeFailed,
    MoonpoolError,
    Op,
    PeerError,
    PeerGone,
    PeerStalled,
    RevokeIncomplete,
    Status,
    TransferCancelled,
    TransferTimeout,
)
from moonpool.bench.fault_proxy import Fault, FaultProxy

MIB = 1 << 20
WAIT_S = 30.0
#: How much later than promised an end may come on a busy machine.
LATE_S = 3.0
STALL_MS = 400
CONFIG = {
    "transports": ("tcp",),
    "stall_timeout_ms": STALL_MS,
    "connect_timeout_ms": 800,
    "handshake_timeout_ms": 600,
}

every_io = pytest.mark.parametrize("io", ["blocking", "epoll", "io_uring"])
both_ops = pytest.mark.parametrize("op", [Op.READ, Op.WRITE], ids=["read", "write"])


class Line:
    """An engine here, a peer's region of 8 MiB, and a proxy between the two."""

    def __init__(self, engine: Engine, proxy: FaultProxy, peer: Any) -> None:
        self.engine = engine
        self.proxy = proxy
        self.peer = peer
        self.handle = peer.ask("offer", size=8 * MIB, seed=1)
        self.segment = engine.open(proxy.endpoint)
        self.mine = np.zeros(8 * MIB, dtype=np.uint8)
        self.address = int(self.mine.ctypes.data)
        engine.register(self.mine, access=Access.NONE)

    def move(self, op: Op, length: int = 8 * MIB, **how: Any) -> Any:
        """One transfer, driven here; the ended batch."""
        return self.engine.transfer(
            op, self.segment, self.address, self.handle, 0, length, check=False, **how
        )

    def recover(self) -> None:
        """Without the fault everything works again, on fresh lanes, and every byte is right."""
        self.proxy.heal()
        back = bytearray(8 * MIB)
        self.engine.read(self.segment, self.handle, 0, back)
        sent = bytes(back)
        self.engine.write(self.segment, self.handle, 0, sent)
        self.engine.flush(self.segment)
        self.mine[:] = 0
        self.engine.read(self.segment, self.handle, 0, self.address, 8 * MIB)
        assert self.mine.tobytes() == sent


@pytest.fixture
def make_line(make_peer: Any) -> Iterator[Any]:
    """`make_line(**config)`: a line whose engine has these settings."""
    opened: list[Any] = []

    def make(**config: Any) -> Line:
        peer = make_peer(stall_timeout_ms=20_000)
        proxy = FaultProxy(peer.endpoint)
        engine = Engine(**{**CONFIG, **config})
        opened.extend((engine, proxy))
        return Line(engine, proxy, peer)

    yield make
    for one in opened:
        one.close()


@every_io
@both_ops
@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("after_bytes", [0, 20, 1_000_000])
def test_a_stalled_peer_is_told_from_a_slow_one(
    make_line: Any, io: str, op: Op, direction: Any, after_bytes: int
) -> None:
    line = make_line(tcp_io=io)
    line.move(op, 4096)
    line.proxy.set_fault(Fault(action="stall", direction=direction, after_bytes=after_bytes))
    began = time.monotonic()
    batch = line.move(op)
    elapsed = time.monotonic() - began
    payload_goes = "up" if op is Op.WRITE else "down"
    if direction != payload_goes and after_bytes > 0 and batch.ok:
        return  # requests of a READ and answers to a WRITE are short: the stall came behind them
    assert elapsed < STALL_MS / 1e3 + LATE_S
    assert list(batch.status) == [Status.STALLED]
    with pytest.raises(PeerStalled) as caught:
        batch.check()
    assert caught.value.retryable
    line.mine[:] = 0xEE
    line.recover()


@every_io
@both_ops
@pytest.mark.parametrize("action", ["stall", "swallow", "trickle", "delay"])
def test_the_deadline_holds_whatever_the_peer_does(make_line: Any, io: str, op: Op, action: Any) -> None:
    line = make_line(tcp_io=io, stall_timeout_ms=20_000)
    line.move(op, 4096)
    line.proxy.set_fault(Fault(action=action, pause_ms=10.0 if action == "trickle" else 400.0))
    began = time.monotonic()
    batch = line.move(op, timeout_s=0.3)
    assert time.monotonic() - began < 0.3 + LATE_S
    assert list(batch.status) == [Status.TIMED_OUT]
    with pytest.raises(TransferTimeout):
        batch.check()
    line.mine[:] = 0xEE
    line.proxy.heal()
    assert line.proxy.wait_delivered(WAIT_S)
    line.engine.read(line.segment, line.handle, 0, bytearray(4096))
    if op is Op.READ:
        assert (line.mine == 0xEE).all(), "a late answer landed in the caller's buffer"


def test_a_trickle_on_each_byte_does_not_outlive_the_stall_clock_nor_the_deadline(make_line: Any) -> None:
    line = make_line()
    line.move(Op.READ, 4096).check()
    line.proxy.set_fault(Fault(action="trickle", direction="down", pause_ms=10))
    began = time.monotonic()
    batch = line.move(Op.READ, timeout_s=1.0)
    # A byte each 10 ms is progress: it is the deadline that ends it.
    assert list(batch.status) == [Status.TIMED_OUT]
    assert time.monotonic() - began < 1.0 + LATE_S
    line.recover()


@every_io
def test_a_cancel_ends_a_stalled_batch_at_once(make_line: Any, io: str) -> None:
    line = make_line(tcp_io=io, stall_timeout_ms=20_000)
    line.move(Op.READ, 4096)
    line.proxy.set_fault(Fault(action="stall", direction="down", after_bytes=100_000))
    batch = line.engine.submit(Op.READ, line.segment, line.address, line.handle, 0, 8 * MIB)
    assert line.proxy.wait_held(1, WAIT_S)
    began = time.monotonic()
    assert batch.cancel()
    assert time.monotonic() - began < LATE_S
    with pytest.raises(TransferCancelled):
        batch.check()
    line.mine[:] = 0xEE
    line.proxy.heal()
    assert line.proxy.wait_delivered(WAIT_S)
    assert (line.mine == 0xEE).all()
    line.recover()


@every_io
@both_ops
def test_a_cut_connection_is_a_gone_peer(make_line: Any, io: str, op: Op) -> None:
    line = make_line(tcp_io=io)
    line.move(op, 4096)
    line.proxy.set_fault(
        Fault(action="cut", direction="up" if op is Op.WRITE else "down", after_bytes=300_000)
    )
    began = time.monotonic()
    batch = line.move(op)
    assert time.monotonic() - began < LATE_S
    assert list(batch.status) == [Status.PEER_GONE]
    with pytest.raises(PeerGone):
        batch.check()
    line.recover()


def test_an_idle_lane_that_was_cut_is_replaced_unseen(make_line: Any) -> None:
    line = make_line()
    for _ in range(5):
        line.move(Op.READ, 4096).check()
        lanes = line.engine.metrics()["counters"]["lanes_lost"]
        # The control session must live: only the lanes are cut.
        line.proxy.cut("lane")
        line.move(Op.READ, 4096).check()
        line.engine.notify(line.segment, b"x")
        assert line.engine.metrics()["counters"]["lanes_lost"] >= lanes


def test_a_stalled_peer_holds_up_no_other(make_line: Any, make_peer: Any) -> None:
    line = make_line(connect_timeout_ms=20_000, handshake_timeout_ms=20_000, stall_timeout_ms=20_000)
    for _ in range(4):
        line.move(Op.READ, 4096).check()
    healthy = make_peer()
    handle = healthy.ask("offer", size=MIB, seed=2)
    good = line.engine.open(healthy.endpoint)
    line.proxy.set_fault(Fault(action="stall", kind="lane"))
    # More than the engine has workers.
    stuck = [
        line.engine.submit(Op.READ, line.segment, bytearray(MIB), line.handle, 0, timeout_s=WAIT_S)
        for _ in range(12)
    ]

    async def use_the_other() -> None:
        for _ in range(5):
            await line.engine.submit(Op.READ, good, bytearray(MIB), handle, 0)

    began = time.monotonic()
    asyncio.run(asyncio.wait_for(use_the_other(), WAIT_S / 2))
    assert time.monotonic() - began < WAIT_S / 2
    line.engine.read(good, handle, 0, bytearray(MIB))
    for batch in stuck:
        assert not batch.done
    for batch in stuck:
        assert batch.cancel()


@pytest.mark.parametrize("action", ["stall", "swallow"])
def test_a_silent_port_is_an_error_within_its_bound(make_peer: Any, action: Any) -> None:
    peer = make_peer()
    with FaultProxy(peer.endpoint, Fault(action=action, kind="any")) as proxy, Engine(**CONFIG) as engine:
        began = time.monotonic()
        with pytest.raises((HandshakeFailed, PeerStalled)):
            engine.open(proxy.endpoint)
        assert time.monotonic() - began < 0.6 + LATE_S
        began = time.monotonic()
        with pytest.raises(PeerError):
            engine.open(proxy.endpoint, timeout_s=0.1)
        assert time.monotonic() - began < 0.1 + LATE_S
        proxy.heal()
        engine.close_segment(engine.open(proxy.endpoint))


def test_a_deadline_includes_the_time_to_connect(make_line: Any) -> None:
    line = make_line(connect_timeout_ms=20_000, handshake_timeout_ms=20_000, stall_timeout_ms=20_000)
    line.proxy.set_fault(Fault(action="stall", kind="any"))
    began = time.monotonic()
    batch = line.move(Op.READ, 4096, timeout_s=0.3)
    assert time.monotonic() - began < 0.3 + LATE_S
    assert list(batch.status) == [Status.TIMED_OUT]
    line.recover()


def test_a_cancel_does_not_wait_for_a_connection(make_line: Any) -> None:
    line = make_line(connect_timeout_ms=20_000, handshake_timeout_ms=20_000, stall_timeout_ms=20_000)
    line.proxy.set_fault(Fault(action="stall", kind="any"))
    batch = line.engine.submit(Op.READ, line.segment, line.address, line.handle, 0, 4096)
    assert line.proxy.wait_held(1, WAIT_S)
    began = time.monotonic()
    assert batch.cancel()
    assert time.monotonic() - began < LATE_S
    line.recover()


@every_io
@both_ops
def test_a_stopped_peer_stalls_and_comes_back(make_peer: Any, io: str, op: Op) -> None:
    peer = make_peer(stall_timeout_ms=20_000)
    handle = peer.ask("offer", size=8 * MIB, seed=3)
    with Engine(**{**CONFIG, "tcp_io": io}) as engine:
        segment = engine.open(peer.endpoint)
        mine = np.zeros(8 * MIB, dtype=np.uint8)
        engine.register(mine, access=Access.NONE)
        where = (int(mine.ctypes.data), handle, 0, 8 * MIB)
        for _ in range(2):
            engine.transfer(op, segment, *where)
            peer.signal(signal.SIGSTOP)
            try:
                began = time.monotonic()
                batch = engine.transfer(op, segment, *where, check=False)
                assert time.monotonic() - began < STALL_MS / 1e3 + LATE_S
                assert list(batch.status) == [Status.STALLED]
                batch = engine.transfer(op, segment, *where, check=False, timeout_s=0.1)
                assert list(batch.status) == [Status.TIMED_OUT]
            finally:
                peer.signal(signal.SIGCONT)
            engine.transfer(op, segment, *where)
        assert peer.ask("holds", handle=handle, seed=3) is (op is Op.READ)


def test_a_peer_that_stops_for_a_moment_costs_only_that_moment(make_peer: Any) -> None:
    peer = make_peer(stall_timeout_ms=20_000)
    handle = peer.ask("offer", size=8 * MIB, seed=3)
    with Engine(**{**CONFIG, "stall_timeout_ms": 20_000}) as engine:
        segment = engine.open(peer.endpoint)
        engine.read(segment, handle, 0, bytearray(8 * MIB))
        peer.signal(signal.SIGSTOP)
        wake = threading.Timer(0.3, peer.signal, (signal.SIGCONT,))
        wake.start()
        try:
            engine.read(segment, handle, 0, bytearray(8 * MIB))
        finally:
            wake.join()
        assert engine.metrics()["counters"]["lanes_lost"] == 0


@pytest.mark.parametrize("foreign", [False, True], ids=["mapped", "process_vm"])
def test_shm_goes_on_while_the_peer_is_stopped(make_peer: Any, pattern: Any, foreign: bool) -> None:
    peer = make_peer()
    handle = peer.ask("offer", size=8 * MIB, seed=4, foreign=foreign)
    with Engine(transports=("shm", "tcp")) as engine:
        segment = engine.open(peer.endpoint)
        peer.signal(signal.SIGSTOP)
        try:
            back = bytearray(8 * MIB)
            engine.read(segment, handle, 0, back)
            assert back == pattern(8 * MIB, 4).tobytes()
            engine.write(segment, handle, 0, pattern(8 * MIB, 5).tobytes())
        finally:
            peer.signal(signal.SIGCONT)
        assert peer.ask("holds", handle=handle, seed=5)


@pytest.mark.parametrize("foreign", [False, True], ids=["mapped", "process_vm"])
def test_a_revoke_of_a_stopped_holder_is_incomplete_and_says_so(
    make_peer: Any, wait_until: Any, foreign: bool
) -> None:
    with Engine(transports=("shm", "tcp"), revoke_timeout_ms=500) as engine:
        region = engine.register(np.zeros(MIB, dtype=np.uint8)) if foreign else engine.allocate(MIB)
        peer = make_peer(transports=("shm", "tcp"))
        peer.ask("open", endpoint=engine.endpoint)
        peer.ask("work", op=int(Op.WRITE), handle=region.handle, length=MIB, seed=6)
        peer.signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            with pytest.raises(RevokeIncomplete):
                engine.revoke(region)
            assert time.monotonic() - began < 2 * 0.5 + 1.0 + LATE_S
        finally:
            peer.signal(signal.SIGCONT)
        wait_until(lambda: peer.ask("progress")[1] != "", "the holder may not go on after that")
        assert peer.ask("stop")[1] in ("PeerGone", "StaleHandle")


def test_an_engine_closes_within_bounds_while_its_peer_is_stopped(make_peer: Any) -> None:
    peer = make_peer(stall_timeout_ms=20_000)
    handle = peer.ask("offer", size=8 * MIB, seed=3)
    for transports in (("tcp",), ("shm", "tcp")):
        engine = Engine(transports=transports, stall_timeout_ms=20_000, close_timeout_ms=1_000)
        segment = engine.open(peer.endpoint)
        engine.read(segment, handle, 0, bytearray(4096))
        batch = (
            engine.submit(Op.READ, segment, bytearray(8 * MIB), handle, 0) if transports == ("tcp",) else None
        )
        peer.signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            engine.close()
            assert time.monotonic() - began < 4 * 1.0 + LATE_S
            if batch is not None:
                assert batch.wait(LATE_S)
        finally:
            peer.signal(signal.SIGCONT)


def test_errors_of_many_stalls_are_counted(make_line: Any) -> None:
    line = make_line(stall_timeout_ms=100)
    line.move(Op.READ, 4096).check()
    line.proxy.set_fault(Fault(action="stall", direction="down"))
    for _ in range(3):
        with pytest.raises(MoonpoolError):
            line.move(Op.READ, 4096).check()
    (row,) = [one for one in line.engine.metrics()["paths"] if one["op"] == "READ" and one["errors"]]
    assert row["errors"] == {"STALLED": 3}
    line.recover()
