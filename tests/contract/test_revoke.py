"""Taking memory back: stale for everyone at once, and untouched by anyone afterwards."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from moonpool import Access, EngineConfig, NotRegistered, Op, StaleHandle, Status, UsageError

MIB = 1 << 20
WAIT_S = 20.0


def test_a_revoked_region_is_stale_for_everyone(pair: Any, way: Any) -> None:
    region, content = pair.offer(4096)
    kept, kept_content = pair.offer(4096, seed=2)
    second = pair.initiator.open(pair.name)
    pair.initiator.read(second, region.handle, 0, bytearray(16))
    before = content.copy()
    pair.target.revoke(region)
    for segment in (pair.segment, second):
        for op in (Op.READ, Op.WRITE):
            batch = pair.initiator.transfer(op, segment, bytearray(16), region.handle, 0, check=False)
            assert list(batch.status) == [Status.STALE_HANDLE]
    assert np.array_equal(content, before)
    target = bytearray(4096)
    pair.initiator.read(pair.segment, kept.handle, 0, target)
    assert target == kept_content.tobytes()
    assert [one.handle for one in pair.target.regions] == [kept.handle]
    if not way.to_itself:
        assert [one.handle for one in pair.initiator.refresh(pair.segment).regions] == [kept.handle]


def test_a_region_is_revoked_once(pair: Any) -> None:
    region, _ = pair.offer(4096)
    pair.target.revoke(region.handle)
    for gone in (region, region.handle, region.handle + (1 << 32), 0, 12345):
        with pytest.raises(StaleHandle):
            pair.target.revoke(gone)


def test_a_slot_used_again_has_another_handle(pair: Any) -> None:
    handles = []
    for turn in range(5):
        region, content = pair.offer(4096, seed=turn)
        target = bytearray(4096)
        pair.initiator.read(pair.segment, region.handle, 0, target)
        assert target == content.tobytes()
        for old in handles:
            with pytest.raises(StaleHandle):
                pair.initiator.read(pair.segment, old, 0, bytearray(16))
        handles.append(region.handle)
        pair.target.revoke(region)
    assert len(set(handles)) == 5


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE], ids=["read", "write"])
def test_revoking_under_a_running_batch(pair: Any, way: Any, eventually: Any, op: Op) -> None:
    region, content = pair.offer(MIB)
    mine = pair.buffer(MIB, fill=0x55)
    # Over a lane the rest of a WRITE is still sent, and thrown away at the other end.
    local = np.full(4_096 if way.by_lane else 32_768, mine.address, dtype=np.uint64)
    destination = content if op is Op.WRITE else mine.array
    first = destination[0].copy()
    batch = pair.initiator.submit(op, pair.segment, local, region.handle, 0, MIB)
    eventually(lambda: destination[0] != first, "the batch runs")
    pair.target.revoke(region)
    # From here on nobody reads or writes it; bytes that were read before may still be on their way.
    before = content.copy()
    content[:] = 0xEE
    mine.array[:] = 0x66
    assert batch.wait(WAIT_S)
    assert set(bytes(batch.status)) == {Status.COMPLETE, Status.STALE_HANDLE}
    assert (content == 0xEE).all()
    assert ((mine.array == 0x66) | (mine.array == before)).all()


def test_revoking_the_local_side_of_transfers(pair: Any) -> None:
    region, _ = pair.offer(4096)
    mine = np.zeros(4096, dtype=np.uint8)
    own = pair.initiator.register(mine, access=Access.NONE)
    pair.initiator.read(pair.segment, region.handle, 0, own.address, 4096)
    assert mine.any()
    pair.initiator.revoke(own)
    mine[:] = 0
    with pytest.raises(NotRegistered):
        pair.initiator.read(pair.segment, region.handle, 0, own.address, 4096)
    assert not mine.any()
    # The same range may be registered again.
    pair.initiator.register(mine, access=Access.NONE)
    pair.initiator.read(pair.segment, region.handle, 0, own.address, 4096)
    assert mine.any()


def test_regions_come_and_go_while_others_are_used(pair: Any, way: Any) -> None:
    steady, content = pair.offer(64 * 1024)
    expected = content.tobytes()
    stop = threading.Event()
    failures: list[BaseException] = []

    def keep_reading() -> None:
        try:
            while not stop.is_set():
                target = bytearray(64 * 1024)
                pair.initiator.read(pair.segment, steady.handle, 0, target)
                assert target == expected
        except BaseException as problem:
            failures.append(problem)

    reader = threading.Thread(target=keep_reading)
    reader.start()
    for turn in range(40):
        region, fresh = pair.offer(8192, seed=turn)
        target = bytearray(8192)
        pair.initiator.read(pair.segment, region.handle, 0, target)
        assert target == fresh.tobytes()
        pair.target.revoke(region)
    stop.set()
    reader.join()
    assert not failures


def test_new_regions_are_found_by_refreshing(pair: Any, way: Any) -> None:
    if way.to_itself:
        region, content = pair.offer(4096)
    else:
        if way.in_memory:
            content = np.frombuffer(bytes(range(256)) * 16, dtype=np.uint8).copy()
            region = pair.target.register(content)
        else:
            region, content = pair.offer(4096, refresh=False)
        with pytest.raises(StaleHandle):
            pair.initiator.read(pair.segment, region.handle, 0, bytearray(16))
        assert pair.initiator.refresh(pair.segment) is pair.segment
    target = bytearray(4096)
    pair.initiator.read(pair.segment, region.handle, 0, target)
    assert target == content.tobytes()
    known = pair.segment.region(region.handle)
    location = "cpu:0" if way.in_memory else region.location
    assert (known.size_bytes, known.access, known.location) == (4096, Access.READ_WRITE, location)
    assert repr(known).count("key") == 0, "a key is a secret"
    assert repr(region).count("key") == 0
    with pytest.raises(StaleHandle):
        pair.segment.region(region.handle + 1)


def test_regions_are_bounded(make_pair: Any) -> None:
    pair = make_pair(regions_max=4)
    regions = [pair.offer(4096)[0] for _ in range(3)]
    pair.target.register(bytearray(10))
    with pytest.raises(OSError, match="regions_max"):
        pair.target.register(bytearray(10))
    pair.target.revoke(regions[1])
    region, content = pair.offer(4096, seed=8)
    target = bytearray(4096)
    pair.initiator.read(pair.segment, region.handle, 0, target)
    assert target == content.tobytes()
    assert EngineConfig().regions_max > 4


@pytest.mark.parametrize("size", [0, -1, 1 << 62])
def test_impossible_sizes_are_refused(pair: Any, size: int) -> None:
    with pytest.raises((UsageError, OSError)):
        pair.target.allocate(size)
    with pytest.raises(UsageError):
        pair.target.register(bytearray())


def test_engine_memory_is_whole_zeroed_pages(pair: Any) -> None:
    region = pair.target.allocate(5000)
    assert region.size_bytes == 8192
    assert region.address % 4096 == 0
    assert bytes(region.view) == bytes(8192)
    region.view[8191] = 7
    assert region.view[8191] == 7
    foreign = pair.target.register(bytearray(100))
    with pytest.raises(UsageError):
        _ = foreign.view
