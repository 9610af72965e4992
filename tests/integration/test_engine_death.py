"""Processes that die: a typed error within a bound, healthy peers unaffected, nothing leaked; restarts."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonpool import Access, Engine, MoonpoolError, Op, PeerGone, PeerRefused, StaleHandle, Status

MIB = 1 << 20
LONG = 32_768
WAIT_S = 30.0
#: A dead process's sockets are closed by the kernel at once; the rest is ours.
NOTICE_S = 5.0
BOUNDS = {"transfer_timeout_ms": 20_000, "stall_timeout_ms": 8_000}

WAYS = {
    "mapped": (("shm", "tcp"), False),
    "process_vm": (("shm", "tcp"), True),
    "tcp": (("tcp",), False),
}
any_way = pytest.mark.parametrize("way", WAYS)
both_ops = pytest.mark.parametrize("op", [Op.READ, Op.WRITE], ids=["read", "write"])


@pytest.fixture
def shared_memory_is_clean() -> Iterator[None]:
    """Nothing is left in /dev/shm; semaphores of other programs' multiprocessing are none of ours."""

    def entries() -> set[str]:
        return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}

    before = entries()
    yield
    assert entries() <= before


def long_batch(engine: Engine, op: Op, segment: Any, handle: int) -> tuple[Any, Any]:
    """A batch of over a second, and the local memory it uses."""
    mine = np.full(MIB, 0x55, dtype=np.uint8)
    engine.register(mine, access=Access.NONE)
    local = np.full(LONG, mine.ctypes.data, dtype=np.uint64)
    return engine.submit(op, segment, local, handle, 0, MIB), mine


def settle(held: Any, wait_until: Any, before: Any) -> None:
    """Waits until no more is held than before."""
    try:
        wait_until(lambda: before.covers(held.now(), 24 * MIB), "what the dead took is free again")
    except AssertionError as problem:
        raise AssertionError(f"before: {before}, now: {held.now()}") from problem


def use_and_kill(engine: Engine, target: Any, wait_until: Any, how: tuple[Op, bool, float]) -> None:
    """Kills a target under a running batch; the batch, the segment and the name must all say so."""
    op, foreign, delay_s = how
    handle = target.ask("offer", size=MIB, seed=1, foreign=foreign)
    segment = engine.open(target.endpoint)
    batch, mine = long_batch(engine, op, segment, handle)
    time.sleep(delay_s)
    target.kill()
    killed = time.monotonic()
    assert batch.wait(WAIT_S)
    assert time.monotonic() - killed < NOTICE_S
    assert set(bytes(batch.status)) <= {Status.COMPLETE, Status.PEER_GONE}
    with pytest.raises(PeerGone):
        batch.check()
    mine[:] = 0xEE
    wait_until(lambda: not segment.peer.alive, "the death is known")
    with pytest.raises(PeerGone):
        engine.read(segment, handle, 0, bytearray(16))
    with pytest.raises(PeerRefused):
        engine.open(target.endpoint)
    engine.close_segment(segment)
    assert (mine == 0xEE).all()
    for region in engine.regions:
        engine.revoke(region)


@any_way
@both_ops
@pytest.mark.usefixtures("shared_memory_is_clean")
def test_the_target_is_killed_midway(make_peer: Any, held: Any, wait_until: Any, way: str, op: Op) -> None:
    transports, foreign = WAYS[way]
    healthy = make_peer(**BOUNDS)
    with Engine(transports=transports, **BOUNDS) as engine:
        good = engine.open(healthy.endpoint)
        good_handle = healthy.ask("offer", size=MIB, seed=5, foreign=foreign)
        engine.refresh(good)
        before = None
        for turn in range(4):
            use_and_kill(engine, make_peer(**BOUNDS), wait_until, (op, foreign, 0.01 * turn))
            engine.read(good, good_handle, 0, bytearray(MIB))
            # The first turn starts the threads that stay.
            before = before or held.now()
        settle(held, wait_until, before)


def work_and_die(engine: Engine, initiator: Any, wait_until: Any, how: tuple[Op, int, int]) -> None:
    """Kills an initiator while it works on a region; its session must end."""
    op, handle, rounds = how
    initiator.ask("open", endpoint=engine.endpoint)
    initiator.ask("work", op=int(op), handle=handle, length=MIB)
    wait_until(lambda: initiator.ask("progress")[0] > rounds, "the initiator works")
    closed = engine.metrics()["counters"]["control_sessions_closed"]
    initiator.kill()
    wait_until(
        lambda: engine.metrics()["counters"]["control_sessions_closed"] > closed, "its session is closed"
    )


@any_way
@both_ops
@pytest.mark.usefixtures("shared_memory_is_clean")
def test_an_initiator_is_killed_midway(make_peer: Any, held: Any, wait_until: Any, way: str, op: Op) -> None:
    transports, foreign = WAYS[way]
    with Engine(transports=("shm", "tcp"), **BOUNDS) as engine:
        region = engine.register(np.zeros(MIB, dtype=np.uint8)) if foreign else engine.allocate(MIB)
        healthy = make_peer(transports=transports, **BOUNDS)
        healthy.ask("open", endpoint=engine.endpoint)
        healthy.ask("work", op=int(Op.READ), handle=region.handle, length=4096)
        # What it holds here (a pidfd, a lane) must be there before anything is counted.
        wait_until(lambda: healthy.ask("progress")[0] > 0, "the healthy peer works")
        before = None
        for turn in range(4):
            initiator = make_peer(transports=transports, **BOUNDS)
            work_and_die(engine, initiator, wait_until, (op, region.handle, turn))
            before = before or held.now()
        settle(held, wait_until, before)
        rounds, problem = healthy.ask("stop")
        assert rounds > 0
        assert not problem
        # Nobody who died can touch the memory, so a revoke need not wait for the dead.
        began = time.monotonic()
        engine.revoke(region)
        assert time.monotonic() - began < NOTICE_S


def alive(segment: Any) -> bool:
    return bool(segment.peer.alive)


@any_way
def test_a_restart_under_the_same_port_is_another_instance(make_peer: Any, wait_until: Any, way: str) -> None:
    transports, foreign = WAYS[way]
    port = 0
    with Engine(transports=transports, **BOUNDS) as engine:
        old: list[tuple[Any, int]] = []
        for turn in range(3):
            target = make_peer(port=port, **BOUNDS)
            port = target.port
            handle = target.ask("offer", size=MIB, seed=turn, foreign=foreign)
            segment = engine.open(target.endpoint)
            assert segment.instance.hex() == target.instance
            back = bytearray(MIB)
            engine.read(segment, handle, 0, back)
            assert target.ask("holds", handle=handle, seed=turn)
            for gone, gone_handle in old:
                # Same name, same handle, another process: the old segment must not reach the new one.
                with pytest.raises(PeerGone):
                    engine.read(gone, gone_handle, 0, bytearray(16))
            old.append((segment, handle))
            target.kill()
            wait_until(lambda one=segment: not alive(one), "the death is known")
        for gone, _ in old:
            engine.close_segment(gone)


def test_a_restart_at_once_gets_its_name_back(make_peer: Any, pattern: Any) -> None:
    target = make_peer(**BOUNDS)
    with Engine(transports=("tcp",), **BOUNDS) as engine:
        handle = target.ask("offer", size=4096, seed=1)
        first = engine.open(target.endpoint)
        engine.read(first, handle, 0, bytearray(4096))
        endpoint, port = target.endpoint, target.port
        target.kill()
        # Opened without waiting until the death is known.
        again = make_peer(port=port, **BOUNDS)
        handle = again.ask("offer", size=4096, seed=2)
        second = engine.open(endpoint)
        back = bytearray(4096)
        engine.read(second, handle, 0, back)
        assert back == pattern(4096, 2).tobytes()
        with pytest.raises(PeerGone):
            engine.read(first, handle, 0, bytearray(16))


def test_segments_of_the_dead_can_be_closed_in_any_order(make_peer: Any, wait_until: Any, held: Any) -> None:
    with Engine(transports=("shm", "tcp"), **BOUNDS) as engine:
        before = held.now()
        target = make_peer(**BOUNDS)
        target.ask("offer", size=MIB, seed=1)
        segments = [engine.open(target.endpoint) for _ in range(4)]
        last = segments[3]
        target.kill()
        wait_until(lambda: not alive(last), "the death is known")
        for at in (2, 0, 3, 1):
            engine.close_segment(segments[at])
            with pytest.raises(StaleHandle):
                engine.close_segment(segments[at])
        settle(held, wait_until, before)


def test_a_death_while_opening_is_an_error_within_bounds(make_peer: Any) -> None:
    with Engine(transports=("shm", "tcp"), **BOUNDS) as engine:
        for turn in range(8):
            target = make_peer(**BOUNDS)
            for seed in range(20):
                target.ask("offer", size=4096, seed=seed)
            killer = threading.Timer(0.0005 * turn, target.signal, (signal.SIGKILL,))
            killer.start()
            began = time.monotonic()
            try:
                engine.close_segment(engine.open(target.endpoint))
            except MoonpoolError:
                pass
            finally:
                killer.join()
            assert time.monotonic() - began < WAIT_S
        assert engine.metrics()["gauges"]["segments_open"] == 0


def test_nothing_stays_behind_in_files(make_peer: Any, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm")) | set(os.listdir("/tmp"))
    target = make_peer(**BOUNDS)
    handle = target.ask("offer", size=MIB, seed=1)
    with Engine(transports=("shm", "tcp"), **BOUNDS) as engine:
        engine.read(engine.open(target.endpoint), handle, 0, bytearray(MIB))
        engine.allocate(MIB)
        target.kill()
    left = (set(os.listdir("/dev/shm")) | set(os.listdir("/tmp"))) - before
    assert not [name for name in left if "moonpool" in name.lower()]
