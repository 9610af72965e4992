"""What becomes of batches when rails, NICs, ports and peers fail: right bytes, or a status that says why."""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.native.fake_verbs.fabric import (
    LOST,
    WC_FATAL,
    WC_REMOTE_ACCESS,
    WC_RETRY,
    WC_RNR,
    FakeFabric,
)
from tests.native.rdma_pairs import (
    MIB,
    SETTINGS,
    RdmaPair,
    fake_fabric,
    pattern,
    rdma_pair,
    transport_of,
    wait_until,
)

from moonpool import AccessDenied, Engine, Op, PeerGone, Status, TransferCancelled, TransferTimeout

BOTH = ["up", "up"]


@pytest.fixture
def fabric() -> Iterator[FakeFabric]:
    with fake_fabric() as made:
        yield made


@pytest.fixture
def pair(fabric: FakeFabric) -> Iterator[RdmaPair]:
    with rdma_pair() as made:
        yield made


def all_up(pair: RdmaPair) -> None:
    wait_until(lambda: set(pair.states()) == {"up"}, f"all rails are up, not {pair.rails()}")


def test_a_batch_is_striped_over_all_rails(pair: RdmaPair) -> None:
    pair.check_read(1)
    pair.check_write(2)
    assert all(rail.bytes_read and rail.bytes_written for rail in pair.rails())
    counters = pair.transport.counters()
    assert counters["read_bytes_fake0_to_0"] + counters["read_bytes_fake1_to_1"] == pair.region.size_bytes
    assert counters["rails_up"] == 2


@pytest.mark.parametrize("status", [WC_RETRY, WC_RNR, WC_FATAL])
@pytest.mark.parametrize("op", ["read", "write"])
def test_a_failed_request_is_done_again(fabric: FakeFabric, pair: RdmaPair, status: int, op: str) -> None:
    fabric.complete(0, status, after=0)
    (pair.check_read if op == "read" else pair.check_write)(status)
    assert sum(rail.breaks for rail in pair.rails()) == 1
    all_up(pair)
    assert pair.rails()[0].repairs == 1
    before = pair.rails()[0].bytes_read
    pair.check_read(7)
    assert pair.rails()[0].bytes_read > before, "the rail is used again"


def test_one_of_two_rails_is_cut(fabric: FakeFabric, pair: RdmaPair) -> None:
    fabric.retry(20)
    fabric.cut(0, True)
    pair.check_read(3)
    pair.check_write(4)
    assert pair.states()[1] == "up"
    assert pair.states()[0] != "up"
    fabric.cut(0, False)
    all_up(pair)
    before = pair.rails()[0].bytes_read
    pair.check_read(5)
    assert pair.rails()[0].bytes_read > before


def test_a_port_that_goes_down_is_left_at_once(fabric: FakeFabric, pair: RdmaPair) -> None:
    fabric.retry(5_000)  # only the event can be that quick
    fabric.port(0, False)
    wait_until(lambda: pair.rails()[0].cause == "port", "the event is heard")
    pair.check_read(3)
    assert pair.rails()[0].cause == "port"
    fabric.port(0, True)
    all_up(pair)
    before = pair.rails()[0].bytes_read
    pair.check_read(4)
    assert pair.rails()[0].bytes_read > before
    assert pair.transport.counters()["port_errors"] == 1


def test_without_rails_the_next_transport_takes_over(fabric: FakeFabric) -> None:
    fabric.retry(20)
    with rdma_pair(transports=("rdma", "tcp")) as pair:
        pair.check_read(1)
        assert pair.carried_by("tcp") == 0
        fabric.cut(0, True)
        fabric.cut(1, True)
        pair.check_read(2)
        pair.check_write(3)
        assert pair.carried_by("tcp") > 0
        fabric.cut(0, False)
        fabric.cut(1, False)
        all_up(pair)
        by_tcp = pair.carried_by("tcp")
        pair.check_read(4)
        assert pair.carried_by("tcp") == by_tcp, "rails carry everything again"


def test_without_rails_and_another_transport_the_batch_stalls(fabric: FakeFabric) -> None:
    fabric.retry(20)
    with rdma_pair(stall_timeout_ms=700) as pair:
        for number in (0, 1):
            fabric.cut(number, True)
        batch = pair.initiator.transfer(
            Op.READ, pair.segment, pair.mine.address, pair.region.handle, 0, MIB, check=False
        )
        assert list(batch.status) == [Status.STALLED]
        for number in (0, 1):
            fabric.cut(number, False)
        all_up(pair)
        pair.check_read(2)


def test_a_lost_completion_is_noticed(fabric: FakeFabric, pair: RdmaPair) -> None:
    """One request, done and never reported: no later one speaks for it, and nothing on its rail fails."""
    fabric.complete(0, LOST)
    fabric.complete(1, LOST)
    pair.content[:] = pattern(pair.content.size, 2)
    pair.initiator.read(pair.segment, pair.region.handle, 0, pair.mine.address, 4096)
    assert np.array_equal(pair.own[:4096], pair.content[:4096])
    assert sum(rail.breaks for rail in pair.rails()) >= 1
    fabric.clear()
    all_up(pair)
    pair.check_write(3)


def test_a_forbidden_request_fails_alone(fabric: FakeFabric, pair: RdmaPair) -> None:
    """The NIC's word for one transfer of many: the others arrive, and nothing is tried again for ever."""
    fabric.complete(0, WC_REMOTE_ACCESS, after=1)
    n = 400
    pair.content[:] = pattern(pair.content.size, 6)
    local = pair.mine.address + np.arange(n, dtype=np.uint64) * 8192
    # Every other one, so that no two can go as one request.
    offset = np.arange(n, dtype=np.uint64) * 8192
    batch = pair.initiator.transfer(
        Op.READ, pair.segment, local, pair.region.handle, offset, 4096, check=False
    )
    statuses = [Status(one) for one in batch.status]
    assert statuses.count(Status.ACCESS_DENIED) == 1
    assert statuses.count(Status.COMPLETE) == n - 1
    with pytest.raises(AccessDenied):
        batch.check()
    for i, status in enumerate(statuses):
        if status is Status.COMPLETE:
            place = slice(i * 8192, i * 8192 + 4096)
            assert np.array_equal(pair.own[place], pair.content[place])
    assert pair.transport.counters()["refused"] == 1
    all_up(pair)
    pair.check_write(3)


def test_a_deadline_ends_a_batch_that_a_device_holds(fabric: FakeFabric, pair: RdmaPair) -> None:
    pair.content[:] = pattern(pair.content.size, 6)
    for number in (0, 1):
        fabric.hold(number, True)
    started = time.monotonic()
    with pytest.raises(TransferTimeout):
        pair.initiator.read(pair.segment, pair.region.handle, 0, pair.mine.address, MIB, timeout_s=0.05)
    assert time.monotonic() - started < 10
    pair.own[:] = 0x77
    for number in (0, 1):
        fabric.hold(number, False)
    all_up(pair)
    assert (pair.own == 0x77).all(), "nothing lands late"
    pair.check_read(8)


def test_a_cancelled_batch_leaves_others_alone(fabric: FakeFabric, pair: RdmaPair) -> None:
    for number in (0, 1):
        fabric.hold(number, True)
    doomed = pair.initiator.submit(Op.READ, pair.segment, pair.mine.address, pair.region.handle, 0, MIB)
    wait_until(lambda: any(rail.requests_posted for rail in pair.rails()), "it is posted")
    other = np.zeros(MIB, dtype=np.uint8)
    mine = pair.initiator.register(other)
    results: list[Any] = []

    def read_the_rest() -> None:
        results.append(
            pair.initiator.transfer(
                Op.READ, pair.segment, mine.address, pair.region.handle, MIB, MIB, check=False
            )
        )

    pair.content[:] = pattern(pair.content.size, 9)
    reader = threading.Thread(target=read_the_rest)
    reader.start()
    doomed.cancel()
    assert doomed.wait(20)
    with pytest.raises(TransferCancelled):
        doomed.check()
    for number in (0, 1):
        fabric.hold(number, False)
    reader.join(20)
    (batch,) = results
    assert batch.ok, list(batch.status)
    assert np.array_equal(other, pair.content[MIB : 2 * MIB])


def test_a_post_that_fails_breaks_only_its_rail(fabric: FakeFabric, pair: RdmaPair) -> None:
    fabric.fail("post_send", errno.ENOMEM, device=0)
    pair.check_read(3)
    assert pair.rails()[0].breaks == 1
    all_up(pair)


def test_a_device_that_is_removed(fabric: FakeFabric) -> None:
    with rdma_pair() as pair:
        fabric.remove(0)
        wait_until(lambda: pair.rails()[0].cause == "fatal", "the event is heard")
        pair.check_read(3)
        pair.check_write(4)
        assert pair.states()[1] == "up"
        assert pair.transport.counters()["nics_lost"] >= 1
        fabric.restore(0)


def test_repairs_that_fail_are_tried_again(fabric: FakeFabric, pair: RdmaPair) -> None:
    fabric.fail("create_qp", errno.ENOMEM, times=3)
    fabric.complete(0, WC_RETRY)
    pair.check_read(3)
    wait_until(lambda: bool(pair.link.last_problem), "a repair failed")
    all_up(pair)
    pair.check_read(4)


def test_a_peer_that_goes_ends_batches_and_frees_everything(fabric: FakeFabric) -> None:
    with rdma_pair() as pair:
        for number in (0, 1):
            fabric.hold(number, True)
        batch = pair.initiator.submit(Op.WRITE, pair.segment, pair.mine.address, pair.region.handle, 0, MIB)
        wait_until(lambda: any(rail.requests_posted for rail in pair.rails()), "it is posted")
        pair.target.close()
        assert batch.wait(20)
        with pytest.raises(PeerGone):
            batch.check()
        wait_until(lambda: not pair.transport.links(), "the link is gone")
        counters = pair.transport.counters()
        assert counters["links"] == counters["rails"] == 0
        assert counters["bounce_slots_unused"] == 64
        for number in (0, 1):
            fabric.hold(number, False)


def test_unregistered_buffers_survive_failures(fabric: FakeFabric, pair: RdmaPair) -> None:
    """Small ones go through bounce slots, large ones are registered for the batch: both survive a break."""
    for size in (3_000, 100_000, MIB):
        pair.content[:] = pattern(pair.content.size, size)
        fabric.complete(0, WC_RETRY)
        fabric.complete(1, WC_RETRY)
        target = np.zeros(size, dtype=np.uint8)
        pair.initiator.read(pair.segment, pair.region.handle, 17, target)
        assert np.array_equal(target, pair.content[17 : 17 + size])
        fabric.clear()
        all_up(pair)
        source = pattern(size, 99)
        pair.initiator.write(pair.segment, pair.region.handle, 33, source)
        assert np.array_equal(source, pair.content[33 : 33 + size])
    assert pair.transport.counters()["bounce_slots_unused"] == 64


def test_a_slow_rail_gets_less(fabric: FakeFabric, pair: RdmaPair) -> None:
    fabric.rate(0, 40_000_000)
    fabric.rate(1, 400_000_000)
    for seed in range(6):
        pair.check_read(seed)
    slow, quick = (rail.bytes_read for rail in pair.rails())
    assert slow < quick / 2, f"the slow rail carried {slow}, the quick one {quick}"


def test_two_engines_of_different_nics(fabric: FakeFabric) -> None:
    """One NIC to two: a second round trip brings the rail to the peer's other NIC."""
    with rdma_pair(rdma_devices=("fake0",)) as pair:
        assert pair.states() == ["up"]
        with rdma_pair() as wide:
            segment = pair.initiator.open(wide.target.endpoint)
            assert segment.paths[0].remote_device == "fake0+fake1"
            target = np.zeros(MIB, dtype=np.uint8)
            wide.content[:] = pattern(wide.content.size, 4)
            pair.initiator.read(segment, wide.region.handle, 0, target)
            assert np.array_equal(target, wide.content[:MIB])
            links = {link.peer.endpoint: link for link in transport_of(pair.initiator).links()}
            rails = links[wide.target.endpoint].rails()
            assert [(rail.local_nic, rail.remote_nic) for rail in rails] == [(0, 0), (0, 1)]
            back = wide.initiator.open(pair.target.endpoint)
            wide.initiator.read(back, pair.region.handle, 0, bytearray(100))


def test_a_forked_child_frees_nothing_of_its_parents(fabric: FakeFabric, pair: RdmaPair) -> None:
    """A child that drops its copies, as at an interpreter's end, must not end the parent's queue pairs."""
    pair.check_read(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads
        pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        vars(pair).clear()
        gc.collect()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert pair.states() == BOTH
    pair.check_read(2)
    pair.check_write(3)
    assert [rail.breaks for rail in pair.rails()] == [0, 0]


def test_a_queue_pair_that_dies_at_the_owner(fabric: FakeFabric, pair: RdmaPair) -> None:
    """QP_FATAL of one of the owner's: its rail stops answering, is replaced, and carries again."""
    fabric.retry(20)
    (session,) = transport_of(pair.target)._owner._sessions.values()
    numbers = [queue_pair.number for queue_pair in session.pairs.values()]
    fabric.kill_pair(numbers[0])
    pair.check_read(1)
    all_up(pair)
    assert numbers[0] not in [queue_pair.number for queue_pair in session.pairs.values()]
    assert sum(rail.repairs for rail in pair.rails()) == 1
    pair.check_write(2)


def test_many_threads_share_the_rails_to_one_peer(pair: RdmaPair) -> None:
    """Each moves its own part; none waits for another's end, and all parts are right."""
    part = pair.region.size_bytes // 8
    pair.content[:] = pattern(pair.content.size, 21)
    failures: list[BaseException] = []

    def move(number: int) -> None:
        try:
            for _ in range(20):
                start = number * part
                pair.own[start : start + part] = 0
                pair.initiator.read(pair.segment, pair.region.handle, start, pair.mine.address + start, part)
                assert np.array_equal(pair.own[start : start + part], pair.content[start : start + part])
        except BaseException as problem:
            failures.append(problem)

    threads = [threading.Thread(target=move, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


def test_nics_that_were_not_paired_find_each_other(fabric: FakeFabric) -> None:
    """One NIC at each end is cut off, and not the two of one rail: the two that are left make a rail."""
    fabric.devices(4)
    fabric.retry(20)
    with (
        Engine(transports=("rdma", "tcp"), rdma_devices=("fake2", "fake3"), **SETTINGS) as target,
        Engine(transports=("rdma",), rdma_devices=("fake0", "fake1"), **SETTINGS) as initiator,
    ):
        region, mine = target.allocate(MIB), initiator.allocate(MIB)
        segment = initiator.open(target.endpoint)
        (link,) = transport_of(initiator).links()
        assert [(rail.local_nic, rail.remote_nic) for rail in link.rails()] == [(0, 0), (1, 1)]
        fabric.cut(0, True)
        fabric.cut(3, True)
        region.view[:] = pattern(MIB, 5).tobytes()
        initiator.read(segment, region.handle, 0, mine.address, MIB)
        assert bytes(mine.view) == bytes(region.view)
        up = [(rail.local_nic, rail.remote_nic) for rail in link.rails() if rail.state == "up"]
        assert up == [(1, 0)]
        fabric.cut(0, False)
        fabric.cut(3, False)
        wait_until(lambda: all(rail.state == "up" for rail in link.rails()), "all four rails come up")
        del region, mine
