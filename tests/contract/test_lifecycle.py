"""Engines end cleanly, refuse what they cannot do any more, and do not survive a fork."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moonpool import (
    AccessDenied,
    Engine,
    EngineClosed,
    ForkedEngine,
    Op,
    PeerGone,
    PeerRefused,
    ResourceError,
    StaleHandle,
    Status,
    TransportUnavailable,
    UsageError,
)

WAIT_S = 20.0
CHILD_S = 30


def test_closing_twice_is_closing_once(pair: Any) -> None:
    pair.initiator.close()
    pair.initiator.close()
    pair.target.close()
    pair.target.close()


def test_a_closed_engine_says_so(pair: Any) -> None:
    region, _ = pair.offer(4096)
    engine, segment, handle = pair.initiator, pair.segment, pair.segment.handle
    engine.close()
    calls: list[Callable[[], Any]] = [
        lambda: engine.allocate(4096),
        lambda: engine.register(bytearray(16)),
        lambda: engine.revoke(region),
        lambda: engine.open(pair.name),
        lambda: engine.refresh(segment),
        lambda: engine.close_segment(segment),
        lambda: engine.read(segment, region.handle, 0, bytearray(16)),
        lambda: engine.read(handle, region.handle, 0, 4096, 16),
        lambda: engine.write(segment, region.handle, 0, bytes(16)),
        lambda: engine.transfer(Op.READ, segment, bytearray(16), region.handle, 0),
        lambda: engine.submit(Op.READ, segment, bytearray(16), region.handle, 0),
        lambda: engine.notify(segment, b""),
        lambda: engine.notifications(),
        lambda: engine.flush(segment),
        lambda: engine.metrics(),
    ]
    for call in calls:
        with pytest.raises(EngineClosed):
            call()


def test_a_peer_that_closes_is_gone(pair: Any, way: Any, eventually: Any) -> None:
    if way.to_itself:
        return  # its peer is itself
    region, _ = pair.offer(4096)
    pair.initiator.read(pair.segment, region.handle, 0, bytearray(16))
    pair.target.close()
    eventually(lambda: pair.segment.native.dead, "the initiator hears of it")
    for _ in range(2):
        with pytest.raises(PeerGone):
            pair.initiator.read(pair.segment, region.handle, 0, bytearray(16))
        with pytest.raises(PeerGone):
            pair.initiator.notify(pair.segment, b"")
        with pytest.raises(PeerGone):
            pair.initiator.flush(pair.segment)
    with pytest.raises(PeerRefused):
        pair.initiator.open(pair.name)
    pair.initiator.close_segment(pair.segment)


def test_closing_ends_what_other_threads_do(pair: Any, eventually: Any) -> None:
    region, content = pair.offer(1 << 20)
    mine = pair.buffer(1 << 20, fill=0x55)
    local = np.full(32_768, mine.address, dtype=np.uint64)
    ended: list[Any] = []

    def drive() -> None:
        try:
            ended.append(
                pair.initiator.transfer(Op.READ, pair.segment, local, region.handle, 0, 1 << 20, check=False)
            )
        except BaseException as problem:
            ended.append(problem)

    driver = threading.Thread(target=drive)
    driver.start()
    eventually(lambda: mine.array[0] == content[0], "the batch runs")
    submitted = pair.initiator.submit(Op.READ, pair.segment, local, region.handle, 0, 1 << 20)
    pair.initiator.close()
    driver.join(WAIT_S)
    assert not driver.is_alive()
    (batch,) = ended
    for one in (batch, submitted):
        assert one.wait(WAIT_S)
        # A lane may be shut before the batch on it hears of the cancel.
        ended_early = {Status.CANCELLED, Status.PEER_GONE}
        assert set(bytes(one.status)) <= {Status.COMPLETE, *ended_early}
        assert ended_early & set(bytes(one.status))
    mine.array[:] = 0xEE
    mine.check_guards()
    assert (mine.array == 0xEE).all()


def test_closing_the_target_ends_what_peers_do(pair: Any, way: Any, eventually: Any) -> None:
    if way.to_itself:
        return
    region, content = pair.offer(1 << 20)
    mine = pair.buffer(1 << 20, fill=0x55)
    local = np.full(32_768, mine.address, dtype=np.uint64)
    batch = pair.initiator.submit(Op.READ, pair.segment, local, region.handle, 0, 1 << 20)
    eventually(lambda: mine.array[0] == content[0], "the batch runs")
    pair.target.close()
    assert batch.wait(WAIT_S)
    assert Status.PEER_GONE in bytes(batch.status)
    with pytest.raises(PeerGone):
        batch.check()


def test_an_engine_that_was_dropped_in_use_can_still_be_closed(way: Any) -> None:
    engine = Engine(transports=way.transports, **way.config)
    engine.allocate(1 << 20)
    close = engine.close
    del engine
    gc.collect()
    close()


@pytest.mark.parametrize("clone", [pickle.dumps, copy.copy, copy.deepcopy])
def test_engines_are_not_copied(pair: Any, clone: Any) -> None:
    for one in (pair.initiator, pair.segment):
        with pytest.raises((UsageError, TypeError)):
            clone(one)


def fork() -> int:
    """As `os.fork`; newer Pythons warn of threads, and threads are what these tests are about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def in_child(work: Callable[[], None]) -> None:
    """Runs `work` in a forked child, which must end well within a bound."""
    pid = fork()
    if pid == 0:
        signal.alarm(CHILD_S)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    _, how = os.waitpid(pid, 0)
    assert how == 0, f"the child ended with {how:#x}"


def test_a_forked_copy_refuses_and_the_parent_goes_on(pair: Any) -> None:
    region, content = pair.offer(64 * 1024)
    target = bytearray(64 * 1024)
    pair.initiator.read(pair.segment, region.handle, 0, target)

    def child() -> None:
        engine, segment = pair.initiator, pair.segment
        calls: list[Callable[[], Any]] = [
            lambda: engine.read(segment, region.handle, 0, bytearray(16)),
            lambda: engine.read(segment.handle, region.handle, 0, 4096, 16),
            lambda: engine.submit(Op.READ, segment, bytearray(16), region.handle, 0),
            lambda: engine.open(pair.name),
            lambda: engine.allocate(4096),
            lambda: engine.notifications(),
            lambda: engine.notify(segment, b"x"),
            lambda: engine.flush(segment),
            lambda: engine.revoke(region),
            lambda: engine.metrics(),
            lambda: pair.target.allocate(4096),
        ]
        for call in calls:
            try:
                call()
            except ForkedEngine:
                continue
            raise AssertionError("a forked engine worked")
        engine.close()
        pair.target.close()

    for _ in range(2):
        in_child(child)
        pair.initiator.read(pair.segment, region.handle, 0, target)
        assert target == content.tobytes()
        pair.initiator.notify(pair.segment, b"still here")
        assert pair.target.notifications(timeout_s=WAIT_S)[0].message == b"still here"
    assert pair.initiator.open(pair.name).handle


def test_a_child_makes_an_engine_of_its_own(pair: Any, way: Any, pattern: Any) -> None:
    region, content = pair.offer(64 * 1024)
    config = {**way.config}

    def child() -> None:
        with Engine(transports=way.transports, **config) as engine:
            segment = engine.open(pair.name)
            target = bytearray(64 * 1024)
            # Were the parent's memory to be copied on write, the child would see its own copy of it.
            engine.write(segment, region.handle, 0, pattern(64 * 1024, 77).tobytes())
            engine.read(segment, region.handle, 0, target)
            assert target == pattern(64 * 1024, 77).tobytes()
            engine.notify(segment, b"from the child")

    if way.to_itself:
        return  # an engine whose only transport is `local` is reached by nobody else
    in_child(child)
    assert np.array_equal(content, pattern(64 * 1024, 77))
    (notice,) = pair.target.notifications(timeout_s=WAIT_S)
    assert notice.message == b"from the child"
    assert notice.sender != pair.initiator.instance


def test_a_child_does_not_keep_the_parents_connections(pair: Any, way: Any, eventually: Any) -> None:
    if way.to_itself:
        return
    region, _ = pair.offer(4096)
    pair.initiator.read(pair.segment, region.handle, 0, bytearray(16))
    leave, stay = os.pipe()
    pid = fork()
    if pid == 0:
        os.close(stay)
        signal.alarm(CHILD_S)
        os.read(leave, 1)
        os._exit(0)
    os.close(leave)
    try:
        pair.target.close()
        # The child still lives; were the target's sockets open in it, nobody would hear of the end.
        eventually(lambda: not pair.segment.peer.alive, "the initiator hears of the target's end")
        with pytest.raises(PeerGone):
            pair.initiator.read(pair.segment, region.handle, 0, bytearray(16))
    finally:
        os.close(stay)
        os.waitpid(pid, 0)


def test_a_port_that_is_taken_is_a_resource_error(way: Any) -> None:
    with Engine(transports=way.transports, **way.config) as first:
        port = int(first.endpoint.rpartition(":")[2])
        with pytest.raises(ResourceError) as caught:
            Engine(transports=way.transports, port=port, **way.config)
        assert caught.value.errno == errno.EADDRINUSE
        assert str(port) in str(caught.value)
        # The first one is as good as before.
        first.allocate(4096)


def test_the_same_port_is_free_after_closing(way: Any) -> None:
    port = 0
    for _ in range(3):
        with Engine(transports=way.transports, port=port, **way.config) as engine:
            port = int(engine.endpoint.rpartition(":")[2])
            engine.open(engine.endpoint) if way.to_itself else engine.allocate(4096)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [(b"0123456789abcdef", None), (None, b"0123456789abcdef"), (b"0123456789abcdef", b"fedcba9876543210")],
    ids=["only mine", "only theirs", "different"],
)
def test_secrets_must_agree(way: Any, mine: bytes | None, theirs: bytes | None) -> None:
    if way.to_itself:
        return  # no port is passed on the way to oneself
    config = {**way.config, "cluster_secret": None}
    with (
        Engine(transports=way.target_transports, **{**config, "cluster_secret": theirs}) as target,
        Engine(transports=way.transports, **{**config, "cluster_secret": mine}) as initiator,
    ):
        with pytest.raises(AccessDenied, match="secret"):
            initiator.open(target.endpoint)
        with pytest.raises(StaleHandle):
            initiator.read(1, 1 << 32, 0, bytearray(1))


def test_what_no_transport_reaches_is_said_at_once(way: Any) -> None:
    with (
        Engine(transports=("local",), **way.config) as alone,
        Engine(transports=("shm", "tcp"), **way.config) as target,
    ):
        with pytest.raises(TransportUnavailable, match="tcp"):
            alone.open(target.endpoint)
        segment = alone.open(alone.endpoint)
        region = alone.allocate(4096)
        alone.read(segment, region.handle, 0, bytearray(16))
    with pytest.raises(UsageError, match="transport"):
        Engine(transports=("carrier-pigeon",))
    with (
        Engine(transports=("tcp",), **way.config) as alone,
        pytest.raises(TransportUnavailable, match="local"),
    ):
        alone.open(alone.endpoint)


def test_segments_are_bounded(make_pair: Any) -> None:
    pair = make_pair(peers_max=3)
    more = [pair.initiator.open(pair.name) for _ in range(2)]
    with pytest.raises(ResourceError, match="peers_max"):
        pair.initiator.open(pair.name)
    pair.initiator.close_segment(more[0])
    region, content = pair.offer(4096)
    target = bytearray(4096)
    pair.initiator.read(pair.initiator.open(pair.name), region.handle, 0, target)
    assert target == content.tobytes()
