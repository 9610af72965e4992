"""Each transfer has a status of its own: bad ones fail as what they are, good ones beside them arrive."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moonpool import (
    Access,
    AccessDenied,
    MoonpoolError,
    NotRegistered,
    Op,
    OutOfRange,
    StaleHandle,
    Status,
    UsageError,
)

ROOM = 64 * 1024

both_ops = pytest.mark.parametrize("op", [Op.READ, Op.WRITE], ids=["read", "write"])

# What is wrong with a transfer, and how it must fail.
FAULTS: dict[str, tuple[Status, type[MoonpoolError]]] = {
    "offset behind the end": (Status.OUT_OF_RANGE, OutOfRange),
    "ends behind the end": (Status.OUT_OF_RANGE, OutOfRange),
    "longer than anything": (Status.OUT_OF_RANGE, OutOfRange),
    "offset and length wrap around": (Status.OUT_OF_RANGE, OutOfRange),
    "no such slot": (Status.STALE_HANDLE, StaleHandle),
    "earlier generation": (Status.STALE_HANDLE, StaleHandle),
    "later generation": (Status.STALE_HANDLE, StaleHandle),
    "handle without generation": (Status.STALE_HANDLE, StaleHandle),
    "handle zero": (Status.STALE_HANDLE, StaleHandle),
    "not registered here": (Status.NOT_REGISTERED, NotRegistered),
    "half registered here": (Status.NOT_REGISTERED, NotRegistered),
    "local address zero": (Status.NOT_REGISTERED, NotRegistered),
    "local range wraps around": (Status.NOT_REGISTERED, NotRegistered),
}


class Spoiler:
    """Makes one transfer of each fault, as (local, region, offset, length)."""

    def __init__(self, pair: Any, region: Any, mine: Any) -> None:
        self.stranger = np.full(4096, 0x5C, dtype=np.uint8)
        self.pair = pair
        self.region = region
        self.mine = mine

    def spoil(self, fault: str) -> tuple[int, int, int, int]:
        size = self.region.size_bytes
        handle = self.region.handle
        whole_end = int(self.mine._whole.ctypes.data) + self.mine._whole.size
        good = self.mine.address
        faulty = {
            "offset behind the end": (good, handle, size + 1, 1),
            "ends behind the end": (good, handle, size - 15, 16),
            "longer than anything": (good, handle, 0, size + 1),
            "offset and length wrap around": (good, handle, (1 << 64) - 8, 16),
            "no such slot": (good, 1 << 32 | 60_000, 0, 16),
            "earlier generation": (good, handle - (1 << 32), 0, 16),
            "later generation": (good, handle + (1 << 32), 0, 16),
            "handle without generation": (good, handle & 0xFFFFFFFF, 0, 16),
            "handle zero": (good, 0, 0, 16),
            "not registered here": (int(self.stranger.ctypes.data), handle, 0, 16),
            "half registered here": (whole_end - 8, handle, 0, 16),
            "local address zero": (0, handle, 0, 16),
            "local range wraps around": ((1 << 64) - 8, handle, 0, 16),
        }
        return faulty[fault]


@both_ops
@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_transfer_fails_alone(pair: Any, op: Op, fault: str) -> None:
    region, content = pair.offer(ROOM)
    mine = pair.buffer(ROOM, fill=0x33)
    spoiler = Spoiler(pair, region, mine)
    expected, kind = FAULTS[fault]
    before = content.copy()
    good = [(mine.address + at, region.handle, at, 50) for at in range(0, 6_000, 100)]
    transfers = [*good[:30], spoiler.spoil(fault), *good[30:]]
    batch = pair.initiator.transfer(op, pair.segment, *map(list, zip(*transfers, strict=True)), check=False)
    assert batch.done
    assert not batch.ok
    assert [Status(one) for one in batch.status] == [Status.COMPLETE] * 30 + [expected] + [
        Status.COMPLETE
    ] * 30
    assert batch.bytes_done == 60 * 50
    with pytest.raises(kind) as caught:
        batch.check()
    assert caught.value.index == 30
    assert caught.value.segment == pair.name
    for _, _, at, length in good:
        assert np.array_equal(mine.array[at : at + length], content[at : at + length])
    changed = np.zeros(ROOM, dtype=bool)
    for _, _, at, length in good:
        changed[at : at + length] = True
    untouched, original = (content, before) if op is Op.WRITE else (mine.array, np.full(ROOM, 0x33, np.uint8))
    assert np.array_equal(untouched[~changed], original[~changed])
    assert (spoiler.stranger == 0x5C).all()
    mine.check_guards()


@both_ops
@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_single_transfer_raises_its_error(pair: Any, op: Op, fault: str) -> None:
    region, content = pair.offer(ROOM)
    mine = pair.buffer(ROOM, fill=0x33)
    before = content.copy()
    local, handle, offset, length = Spoiler(pair, region, mine).spoil(fault)
    call = pair.initiator.read if op is Op.READ else pair.initiator.write
    with pytest.raises(FAULTS[fault][1]) as caught:
        call(pair.segment, handle, offset, local, length)
    assert caught.value.status is FAULTS[fault][0]
    assert str(caught.value)
    assert np.array_equal(content, before)
    assert (mine.array == 0x33).all()
    # The lane or mapping is as good as before.
    call(pair.segment, region.handle, 0, mine.address, 16)


def test_every_kind_of_fault_in_one_batch(pair: Any) -> None:
    region, content = pair.offer(ROOM)
    mine = pair.buffer(ROOM)
    spoiler = Spoiler(pair, region, mine)
    transfers, expected = [], []
    for fault, (status, _) in list(FAULTS.items()) * 40:
        at = len(transfers) // 2 * 64
        transfers += [spoiler.spoil(fault), (mine.address + at, region.handle, at, 64)]
        expected += [status, Status.COMPLETE]
    brought = len(transfers) // 2 * 64
    columns = list(map(list, zip(*transfers, strict=True)))
    batch = pair.initiator.transfer(Op.READ, pair.segment, *columns, check=False)
    assert [Status(one) for one in batch.status] == expected
    assert np.array_equal(mine.array[:brought], content[:brought])
    assert not mine.array[brought:].any()


@pytest.mark.parametrize("access", [Access.READ, Access.WRITE])
def test_a_region_allows_only_what_it_says(pair: Any, access: Access) -> None:
    region, content = pair.offer(ROOM, access)
    mine = pair.buffer(ROOM, fill=0x44)
    before = content.copy()
    allowed = Op.READ if access is Access.READ else Op.WRITE
    refused = Op.WRITE if access is Access.READ else Op.READ
    for length in (16, ROOM):
        batch = pair.initiator.transfer(
            refused, pair.segment, mine.address, region.handle, 0, length, check=False
        )
        assert list(batch.status) == [Status.ACCESS_DENIED]
        with pytest.raises(AccessDenied):
            batch.check()
    assert np.array_equal(content, before)
    assert (mine.array == 0x44).all()
    pair.initiator.transfer(allowed, pair.segment, mine.address, region.handle, 0, ROOM)
    assert np.array_equal(mine.array, content)


def test_a_region_without_access_is_not_published(pair: Any) -> None:
    region, _ = pair.offer(ROOM, Access.NONE)
    assert region.handle not in [one.handle for one in pair.segment.regions]
    with pytest.raises(StaleHandle):
        pair.initiator.read(pair.segment, region.handle, 0, bytearray(16))


def test_a_read_only_buffer_takes_no_read(pair: Any) -> None:
    region, _ = pair.offer(ROOM)
    with pytest.raises(UsageError, match="writable"):
        pair.initiator.read(pair.segment, region.handle, 0, b"sixteen bytes....")
    fixed = np.full(64, 1, dtype=np.uint8)
    fixed.flags.writeable = False
    mine = pair.initiator.register(fixed, access=Access.READ)
    with pytest.raises(NotRegistered):
        pair.initiator.read(pair.segment, region.handle, 0, mine.address, 64)
    pair.initiator.write(pair.segment, region.handle, 0, mine.address, 64)
    with pytest.raises(UsageError, match="read-only"):
        pair.initiator.register(bytes(64), access=Access.READ_WRITE)
    assert (fixed == 1).all()


def test_ranges_are_registered_once(pair: Any) -> None:
    whole = np.zeros(3 * 4096, dtype=np.uint8)
    pair.initiator.register(whole[4096:8192])
    for start, stop in ((0, 4097), (8191, 12288), (4096, 8192), (5000, 5001), (0, 12288)):
        with pytest.raises(UsageError, match="overlaps"):
            pair.initiator.register(whole[start:stop])
    pair.initiator.register(whole[:4096])
    pair.initiator.register(whole[8192:])
    # Neighbours are regions of their own: a range over both is in neither.
    region, _ = pair.offer(4096)
    with pytest.raises(NotRegistered):
        pair.initiator.read(pair.segment, region.handle, 0, int(whole.ctypes.data) + 4090, 12)


def test_unsupported_paths_are_no_silent_fall_back(pair: Any) -> None:
    region, content = pair.offer(4096)
    mine = pair.buffer(4096, fill=7)
    before = content.copy()
    unknown = max(path.id for path in pair.segment.paths) + 1
    batch = pair.initiator.transfer(
        Op.WRITE, pair.segment, mine.address, region.handle, 0, 4096, path=unknown, check=False
    )
    assert list(batch.status) == [Status.UNSUPPORTED]
    assert np.array_equal(content, before)


def test_each_op_counts_its_errors(pair: Any) -> None:
    region, _ = pair.offer(4096)
    mine = pair.buffer(4096)
    pair.initiator.transfer(
        Op.READ, pair.segment, [mine.address] * 3, region.handle, [0, 1 << 40, 0], 8, check=False
    )
    carried = [row for row in pair.initiator.metrics()["paths"] if row["transfers"]]
    assert [(row["op"], row["transfers"], row["bytes"]) for row in carried] == [("READ", 2, 16)]
    assert sum(count for _, count in carried[0]["latency_us_buckets"]) == 1
