"""The owner's side of RDMA: who may reach its memory, and how that ends."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from tests.native.fake_verbs.fabric import FakeFabric
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

from moonpool import Access, Engine, Op, OutOfMemory, StaleHandle, Status, TransportUnavailable
from moonpool.errors import AccessDenied, LimitExceeded, ProtocolError
from moonpool.native.verbs import devices
from moonpool.transport.rdma_handshake import ANY_NIC, Nic, Offer, Rail, decode_keys, encode_offer

EVERYBODY = None


@pytest.fixture
def fabric() -> Iterator[FakeFabric]:
    with fake_fabric() as made:
        yield made


@pytest.fixture
def pair(fabric: FakeFabric) -> Iterator[RdmaPair]:
    with rdma_pair() as made:
        yield made


def test_sessions_with_queue_pairs_hold_what_is_open_to_peers(pair: RdmaPair) -> None:
    owner = transport_of(pair.target)
    read_only = pair.target.allocate(4096, access=Access.READ)
    private = pair.target.allocate(4096, access=Access.NONE)
    (session,) = owner.holders(pair.region.handle)
    assert owner.writers(pair.region.handle, EVERYBODY) == {session}
    assert owner.writers(pair.region.handle, pair.initiator.instance) == {session}
    assert owner.writers(pair.region.handle, b"somebody else...") == set()
    assert owner.holders(read_only.handle) == {session}
    assert owner.writers(read_only.handle, EVERYBODY) == set()
    assert owner.holders(private.handle) == owner.writers(private.handle, EVERYBODY) == set()
    assert owner.counters()["peer_queue_pairs"] == 2
    pair.initiator.close_segment(pair.segment)
    assert owner.holders(pair.region.handle) == set()
    assert owner.counters()["peer_queue_pairs"] == 0


def test_the_gate_fences_who_does_not_settle(fabric: FakeFabric, pair: RdmaPair) -> None:
    """A batch hangs in the initiator's NIC: its owner destroys the queue pairs, and then nothing can land."""
    gate = pair.target.gate
    pair.own[:] = 0x5A
    for number in (0, 1):
        fabric.hold(number, True)
    batch = pair.initiator.submit(
        Op.WRITE, pair.segment, pair.mine.address, pair.region.handle, 0, MIB, timeout_s=5.0
    )
    wait_until(lambda: any(rail.requests_posted for rail in pair.rails()), "it is posted")
    writers = gate.writers(pair.region.handle, pair.initiator.instance)
    assert len(writers) == 1
    assert gate.settle(pair.region.handle, writers, 0.2) == writers
    assert gate.writers(pair.region.handle, EVERYBODY) == {0}  # ourselves
    pair.content[:] = 0x11
    for number in (0, 1):
        fabric.hold(number, False)
    assert batch.wait(20)
    assert not batch.ok
    assert (pair.content == 0x11).all(), "nothing landed after the fence"
    wait_until(lambda: "fenced" in pair.link.last_problem, "the session gets no other queue pairs")
    with pytest.raises(AccessDenied):
        pair.link.peer.request("rdma.connect", {"offer": encode_offer(good_offer())})
    # A new session of the same engine is another one.
    pair.initiator.close_segment(pair.segment)
    again = pair.initiator.open(pair.target.endpoint)
    pair.initiator.write(again, pair.region.handle, 0, pair.mine.address, MIB)
    assert (pair.content[:MIB] == 0x5A).all()


def good_offer(link: int = 77, first: int = 0, n: int = 1) -> Offer:
    """An offer of queue pairs that nobody has."""
    nic = transport_nic()
    return Offer(link, (nic,), tuple(Rail(first + k, 0, ANY_NIC, 5 + k, 6) for k in range(n)))


def transport_nic() -> Nic:
    with Engine(transports=("rdma",), rdma_devices=("fake0",)) as engine:
        return transport_of(engine)._nics[0].about


def test_garbage_on_the_control_session_is_refused(pair: RdmaPair) -> None:
    peer = pair.link.peer
    for params in (
        {},
        {"offer": b""},
        {"offer": "text"},
        {"offer": secrets.token_bytes(300)},
        {"offer": None},
    ):
        with pytest.raises(ProtocolError):
            peer.request("rdma.connect", params)
    for handle in (0, -1, "x", None, pair.region.handle + 1):
        with pytest.raises((StaleHandle, ProtocolError)):
            peer.request("rdma.keys", {"handle": handle})
    pair.check_read(1)


def test_queue_pairs_of_a_session_are_bounded(pair: RdmaPair) -> None:
    peer, owner = pair.link.peer, transport_of(pair.target)
    offers = [encode_offer(good_offer(link=1000 + k, n=16)) for k in range(5)]
    for offer in offers[:3]:
        peer.request("rdma.connect", {"offer": offer}).close()
    with pytest.raises(LimitExceeded):
        peer.request("rdma.connect", {"offer": offers[3]})
    # The same rails of the same link again: replaced, not added.
    before = owner.counters()["peer_queue_pairs"]
    for _ in range(3):
        peer.request("rdma.connect", {"offer": offers[0]}).close()
    assert owner.counters()["peer_queue_pairs"] == before
    pair.check_read(2)
    pair.check_write(3)


def test_regions_of_many_chunks_have_their_keys_asked_for(fabric: FakeFabric) -> None:
    with rdma_pair() as pair:
        fabric.limits(max_mr_bytes=64 * 1024)
        there, here = pair.target.allocate(16 * MIB), pair.initiator.allocate(16 * MIB)
        assert decode_keys(there.attributes["rdma"], there.size_bytes).keys == ()
        content, own = (np.frombuffer(region.view, dtype=np.uint8) for region in (there, here))
        content[:] = pattern(16 * MIB, 5)
        pair.initiator.refresh(pair.segment)
        pair.initiator.read(pair.segment, there.handle, 0, here.address, 16 * MIB)
        assert np.array_equal(own, content)
        # Pieces that begin and end anywhere, over the borders of chunks of both sides.
        for offset, length in ((65_535, 2), (65_536, 65_536), (1, 300_000), (16 * MIB - 70_000, 70_000)):
            own[:] = 0
            pair.initiator.read(pair.segment, there.handle, offset, here.address + 3, length)
            assert np.array_equal(own[3 : 3 + length], content[offset : offset + length])
            assert not own[3 + length :].any()
        del content, own, there, here


def test_a_revoked_region_has_no_keys_any_more(fabric: FakeFabric, pair: RdmaPair) -> None:
    regions = fabric.live("regions")
    extra = pair.target.allocate(MIB)
    pair.initiator.refresh(pair.segment)
    pair.initiator.read(pair.segment, extra.handle, 0, pair.mine.address, 100)
    assert fabric.live("regions") == regions + 2
    pair.target.revoke(extra)
    assert fabric.live("regions") == regions
    with pytest.raises(StaleHandle):
        pair.initiator.read(pair.segment, extra.handle, 0, pair.mine.address, 100)
    pair.check_read(4)
    assert pair.transport.counters()["refused"] == 0, "nothing was asked of the NIC that it had to refuse"


def test_memory_that_cannot_be_pinned_is_left_to_other_transports(fabric: FakeFabric) -> None:
    with rdma_pair(transports=("rdma", "tcp")) as pair:
        fabric.fail("reg_mr", errno.EFAULT, times=1_000)
        region = pair.target.allocate(MIB, access=Access.READ_WRITE)
        fabric.clear()
        assert "rdma" not in region.attributes
        pair.initiator.refresh(pair.segment)
        np.frombuffer(region.view, dtype=np.uint8)[:] = pattern(MIB, 4)
        pair.initiator.read(pair.segment, region.handle, 0, pair.mine.address, MIB)
        assert np.array_equal(pair.own[:MIB], pattern(MIB, 4))
        assert pair.carried_by("tcp") == MIB
        assert transport_of(pair.target).counters()["regions_unpinnable"] == 1


def test_own_memory_that_cannot_be_pinned_is_bounced(fabric: FakeFabric, pair: RdmaPair) -> None:
    whole = np.zeros(MIB, dtype=np.uint8)
    fabric.fail("reg_mr", errno.EFAULT, times=1_000)
    mine = pair.initiator.register(whole, access=Access.NONE)
    pair.content[:] = pattern(pair.content.size, 5)
    pair.initiator.read(pair.segment, pair.region.handle, 7, mine.address, MIB)
    assert np.array_equal(whole, pair.content[7 : 7 + MIB])
    # A large held buffer too, which then cannot be registered for its batch.
    target = np.zeros(2 * MIB, dtype=np.uint8)
    pair.initiator.read(pair.segment, pair.region.handle, 0, target)
    assert np.array_equal(target, pair.content[: 2 * MIB])


def test_no_memory_to_pin_says_what_to_do(fabric: FakeFabric, pair: RdmaPair) -> None:
    before = len(pair.target.regions)
    fabric.fail("reg_mr", errno.ENOMEM, times=1)
    with pytest.raises(OutOfMemory, match="MEMLOCK"):
        pair.target.allocate(MIB)
    assert len(pair.target.regions) == before
    pair.check_read(1)


def test_without_devices_the_transport_says_so(fabric: FakeFabric) -> None:
    fabric.devices(0)
    with pytest.raises(TransportUnavailable, match="no RDMA device"):
        Engine(transports=("rdma",))
    fabric.devices(2)
    fabric.port(0, False)
    fabric.port(1, False)
    with pytest.raises(TransportUnavailable, match="active"):
        Engine(transports=("rdma",))
    fabric.clear()
    with pytest.raises(Exception, match="there are"):
        Engine(transports=("rdma",), rdma_devices=("mlx9",))
    devices.use_library("/nowhere/libibverbs.so")
    with pytest.raises(TransportUnavailable, match="nowhere"):
        Engine(transports=("rdma",))


def test_a_peer_without_rdma_is_reached_by_what_it_has(fabric: FakeFabric) -> None:
    with Engine(transports=("tcp",)) as target, Engine(transports=("rdma", "tcp")) as initiator:
        region = target.allocate(4096)
        segment = initiator.open(target.endpoint)
        assert [path.transport for path in segment.paths] == ["tcp"]
        initiator.read(segment, region.handle, 0, bytearray(100))
        assert transport_of(initiator).links() == []
        assert fabric.live("pairs") == 0


def test_a_batch_of_every_kind_has_its_statuses(pair: RdmaPair) -> None:
    """Digests, gathered pieces and refusals in one batch."""
    pair.content[:] = pattern(pair.content.size, 12)
    n = 64
    local = pair.mine.address + np.arange(n, dtype=np.uint64) * 512
    offset = np.arange(n, dtype=np.uint64) * 512
    offset[40] = pair.region.size_bytes
    batch = pair.initiator.transfer(
        Op.READ, pair.segment, local, pair.region.handle, offset, 512, digest=True, check=False
    )
    expected = [Status.COMPLETE] * n
    expected[40] = Status.OUT_OF_RANGE
    assert [Status(one) for one in batch.status] == expected
    again = pair.initiator.transfer(
        Op.READ, pair.segment, local[:40], pair.region.handle, offset[:40], 512, digest=True
    )
    assert batch.digests is not None
    assert batch.digests[:40] == again.digests
    assert len({digests[0] for digests in batch.digests[:40]}) == 40


class DeviceMemory:
    """What stands for memory of a GPU: bytes behind a descriptor, at an address that no CPU may touch."""

    def __init__(self, device_address: int, size_bytes: int) -> None:
        self.address, self.device_address = 0, device_address
        self.size_bytes, self.writable, self.location = size_bytes, True, "cuda:0"
        self._fd = os.memfd_create("device memory")
        os.ftruncate(self._fd, size_bytes + 4096)

    def dma_buf(self) -> tuple[int, int]:
        return os.dup(self._fd), 4096

    def load(self) -> bytes:
        return os.pread(self._fd, self.size_bytes, 4096)

    def store(self, data: bytes) -> None:
        os.pwrite(self._fd, data, 4096)

    def close(self) -> None:
        os.close(self._fd)


def test_memory_of_devices_goes_straight_to_memory_of_devices(pair: RdmaPair) -> None:
    there, here = DeviceMemory(0x7100_0000_0000, MIB), DeviceMemory(0x7200_0000_0000, MIB)
    far = pair.target._offering.add(there, Access.READ_WRITE, there.location)
    pair.initiator._offering.add(here, Access.NONE, here.location)
    pair.initiator.refresh(pair.segment)
    content = pattern(MIB, 3).tobytes()
    there.store(content)
    pair.initiator.read(pair.segment, far.handle, 0, here.device_address, MIB)
    assert here.load() == content
    # Host to device, and back from an unregistered buffer's point of view.
    pair.initiator.write(pair.segment, far.handle, 100, pattern(5_000, 4))
    assert there.load()[100:5_100] == pattern(5_000, 4).tobytes()
    pair.initiator.write(pair.segment, pair.region.handle, 0, here.device_address, MIB)
    assert pair.content[:MIB].tobytes() == content
    # A digest would need the CPU: then the path leaves it to others, of which there are none.
    batch = pair.initiator.transfer(
        Op.READ, pair.segment, here.device_address, far.handle, 0, 4096, digest=True, check=False
    )
    assert list(batch.status) == [Status.UNSUPPORTED]


def test_engines_that_open_each_other_at_once(fabric: FakeFabric) -> None:
    """Three engines, each opening both others from several threads: nobody waits for who waits for him."""
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(Engine(transports=("rdma", "tcp"), **SETTINGS)) for _ in range(3)]
        for number, engine in enumerate(engines):
            engine.allocate(4096).view[:4] = bytes([number] * 4)
        ready, failures = threading.Barrier(12), []

        def open_both(engine: Engine) -> None:
            try:
                ready.wait(20)
                for number, other in enumerate(engines):
                    if other is not engine:
                        segment = engine.open(other.endpoint)
                        assert segment.paths[0].transport == "rdma"
                        target = bytearray(4)
                        engine.read(segment, segment.regions[0].handle, 0, target)
                        assert target == bytes([number] * 4)
            except BaseException as problem:
                failures.append(problem)

        threads = [threading.Thread(target=open_both, args=(engine,)) for engine in engines for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures
        assert [len(transport_of(engine).links()) for engine in engines] == [2, 2, 2]
