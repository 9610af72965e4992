"""Every byte arrives where it should and nowhere else: sizes, counts, kinds of arguments, digests."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import xxhash

from moonpool import Access, Op, UsageError

KIB = 1024
MIB = 1024 * KIB
LENGTHS = [1, 4095, 4096, 4097, 65_535, 65_536, 65_537, 300_000, 9 * MIB]
COUNTS = [1, 2, 255, 256, 257, 5_000]
CHUNK = 64 * KIB

both_ops = pytest.mark.parametrize("op", [Op.READ, Op.WRITE], ids=["read", "write"])


def chunk_digests(data: Any) -> list[int]:
    """XXH3-64 of each 64 KiB chunk, by the reference implementation's own binding."""
    raw = bytes(data)
    return [xxhash.xxh3_64_intdigest(raw[at : at + CHUNK]) for at in range(0, len(raw), CHUNK)]


@pytest.mark.parametrize("length", LENGTHS)
def test_read_brings_every_byte_and_touches_no_other(pair: Any, length: int) -> None:
    region, content = pair.offer(length + 333)
    into = pair.buffer(length)
    assert pair.initiator.read(pair.segment, region.handle, 111, into.address, length) is None
    assert np.array_equal(into.array, content[111 : 111 + length])
    into.check_guards()


@pytest.mark.parametrize("length", LENGTHS)
def test_write_lands_every_byte_and_touches_no_other(pair: Any, pattern: Any, length: int) -> None:
    region, content = pair.offer(length + 333)
    before = content.copy()
    source = pair.buffer(length)
    source.array[:] = pattern(length, 7)
    assert pair.initiator.write(pair.segment, region.handle, 111, source.address, length) is None
    assert np.array_equal(content[111 : 111 + length], pattern(length, 7))
    assert np.array_equal(content[:111], before[:111])
    assert np.array_equal(content[111 + length :], before[111 + length :])


def test_a_write_is_seen_by_the_next_read(pair: Any, pattern: Any) -> None:
    region, _ = pair.offer(1 * MIB, seed=3)
    back = pair.buffer(1 * MIB)
    for seed in range(20):
        pair.initiator.write(pair.segment, region.handle, 0, bytes(pattern(1 * MIB, seed)))
        pair.initiator.flush(pair.segment)
        pair.initiator.read(pair.segment, region.handle, 0, back.address, 1 * MIB)
        assert np.array_equal(back.array, pattern(1 * MIB, seed))


def test_zero_bytes_are_a_transfer_that_moves_nothing(pair: Any) -> None:
    region, content = pair.offer(4096)
    before = content.copy()
    into = pair.buffer(64, fill=9)
    pair.initiator.read(pair.segment, region.handle, 4096, into.address, 0)
    pair.initiator.write(pair.segment, region.handle, 0, into.address, 0)
    pair.initiator.read(pair.segment, region.handle, 0, bytearray())
    batch = pair.initiator.transfer(
        Op.READ, pair.segment, into.address, region.handle, [0, 10, 20], [0, 4, 0]
    )
    assert list(batch.status) == [0, 0, 0]
    assert np.array_equal(into.array[:4], before[10:14])
    assert (into.array[4:] == 9).all()
    assert np.array_equal(content, before)


def scattered(pair: Any, count: int, length: int, seed: int) -> tuple[Any, Any, Any, Any, Any]:
    """A region and its content, a buffer with gaps, and `count` offsets into each, local ones shuffled."""
    order = random.Random(seed)
    stride = length + 40
    region, content = pair.offer(count * stride + 8)
    mine = pair.buffer(count * stride, fill=0x11)
    there = np.arange(count, dtype=np.uint64) * np.uint64(stride) + np.uint64(5)
    here = list(range(0, count * stride, stride))
    order.shuffle(here)
    return region, content, mine, there, np.array(here, dtype=np.uint64)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("length", [1, 512, 4096])
def test_a_vector_read_fills_each_slot(pair: Any, count: int, length: int) -> None:
    region, content, mine, there, here = scattered(pair, count, length, seed=count)
    local = here + np.uint64(mine.address)
    batch = pair.initiator.transfer(Op.READ, pair.segment, local, region.handle, there, length)
    assert batch.ok
    assert batch.bytes_done == count * length
    expected = np.full_like(mine.array, 0x11)
    for at, offset in zip(here.tolist(), there.tolist(), strict=True):
        expected[at : at + length] = content[offset : offset + length]
    assert np.array_equal(mine.array, expected)
    mine.check_guards()


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("length", [1, 512, 4096])
def test_a_vector_write_lands_each_slot(pair: Any, pattern: Any, count: int, length: int) -> None:
    region, content, mine, there, here = scattered(pair, count, length, seed=count)
    mine.array[:] = pattern(mine.size, 5)
    expected = content.copy()
    for at, offset in zip(here.tolist(), there.tolist(), strict=True):
        expected[offset : offset + length] = mine.array[at : at + length]
    local = (here + np.uint64(mine.address)).tolist()
    batch = pair.initiator.transfer(Op.WRITE, pair.segment, local, region.handle, there.tolist(), length)
    assert len(batch) == count
    assert list(batch.status) == [0] * count
    assert np.array_equal(content, expected)


@both_ops
@pytest.mark.parametrize("seed", range(4))
def test_random_batches_over_several_regions(pair: Any, pattern: Any, op: Op, seed: int) -> None:
    choice = random.Random(1000 * int(op) + seed)
    print(f"seed={seed} op={op.name}")
    offers = [pair.offer(choice.randrange(1, 400_000), seed=k) for k in range(5)]
    count = choice.randrange(1, 700)
    mine = pair.buffer(4 * MIB, fill=0x22)
    if op is Op.WRITE:
        mine.array[:] = pattern(mine.size, seed)
    remote = [content.copy() for _, content in offers]
    local_before = mine.array.copy()
    local, regions, offsets, lengths = [], [], [], []
    at, used = 0, [0] * len(offers)
    for _ in range(count):
        which = choice.randrange(len(offers))
        content = remote[which]
        length = min(choice.choice([0, 1, 7, 100, 4096, 70_000]), mine.size - at)
        # Writes must not overlap one another: the order of a batch's transfers is not defined.
        offset = used[which] if op is Op.WRITE else choice.randrange(content.size + 1)
        length = min(length, content.size - offset)
        used[which] = offset + length
        local.append(mine.address + at)
        regions.append(offers[which][0].handle)
        offsets.append(offset)
        lengths.append(length)
        if op is Op.READ:
            local_before[at : at + length] = content[offset : offset + length]
        else:
            content[offset : offset + length] = mine.array[at : at + length]
        at += length + choice.randrange(3)
        at = min(at, mine.size)
    pair.initiator.transfer(op, pair.segment, local, regions, offsets, lengths)
    assert np.array_equal(mine.array, local_before)
    for (_, content), expected in zip(offers, remote, strict=True):
        assert np.array_equal(content, expected)
    mine.check_guards()


@both_ops
@pytest.mark.parametrize("kind", ["list", "tuple", "numpy", "int64", "array", "memoryview"])
def test_arrays_of_any_kind_mean_the_same(pair: Any, op: Op, kind: str) -> None:
    from array import array

    makers: dict[str, Any] = {
        "list": list,
        "tuple": tuple,
        "numpy": lambda values: np.array(values, dtype=np.uint64),
        "int64": lambda values: np.array(values, dtype=np.int64),
        "array": lambda values: array("Q", values),
        "memoryview": lambda values: memoryview(array("Q", values)),
    }
    make = makers[kind]
    region, content = pair.offer(64 * KIB)
    mine = pair.buffer(64 * KIB, fill=3)
    offsets = [0, 5_000, 40_000]
    pair.initiator.transfer(
        op,
        pair.segment,
        make([mine.address + offset for offset in offsets]),
        make([region.handle] * 3),
        make(offsets),
        make([100, 1, 4096]),
    )
    for offset, length in zip(offsets, [100, 1, 4096], strict=True):
        assert np.array_equal(mine.array[offset : offset + length], content[offset : offset + length])
    assert (mine.array[101:5_000] == 3).all()


def test_scalars_are_spread_over_a_batch(pair: Any) -> None:
    region, content = pair.offer(4096)
    mine = pair.buffer(4096)
    local = [mine.address + 100 * k for k in range(8)]
    pair.initiator.transfer(Op.READ, pair.segment, local, region.handle, 30, 100)
    assert np.array_equal(mine.array[:800], np.tile(content[30:130], 8))


def test_numpy_integers_are_integers(pair: Any) -> None:
    region, content = pair.offer(4096)
    mine = pair.buffer(4096)
    address, handle, offset, length = (np.uint64(v) for v in (mine.address, region.handle, 8, 64))
    pair.initiator.read(pair.segment, handle, offset, address, length)
    assert np.array_equal(mine.array[:64], content[8:72])
    pair.initiator.transfer(Op.READ, pair.segment, address + np.uint64(64), handle, offset, np.int64(64))
    assert np.array_equal(mine.array[64:128], content[8:72])
    local = np.array([mine.address + 200, mine.address + 300], dtype=np.uint64)
    pair.initiator.transfer(Op.READ, pair.segment, local, handle, offset, length)
    assert np.array_equal(mine.array[200:264], content[8:72])
    assert np.array_equal(mine.array[300:364], content[8:72])


@both_ops
@pytest.mark.parametrize("length", [0, 1, 4096, 65_535, 65_536, 65_537, 1 * MIB + 9, 9 * MIB])
def test_the_digest_is_that_of_what_was_moved(pair: Any, pattern: Any, op: Op, length: int) -> None:
    region, content = pair.offer(length + 4096)
    mine = pair.buffer(length + 1)
    mine.array[:] = pattern(length + 1, 11)
    call = pair.initiator.read if op is Op.READ else pair.initiator.write
    digests = call(pair.segment, region.handle, 77, mine.address, length, digest=True)
    assert np.array_equal(mine.array[:length], content[77 : 77 + length])
    assert digests == chunk_digests(mine.array[:length])


@both_ops
def test_digests_of_a_vector_come_per_transfer(pair: Any, pattern: Any, op: Op) -> None:
    lengths = [1, 70_000, 0, 65_536, 131_073, 4096] * 60
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    region, content = pair.offer(sum(lengths) + 1)
    mine = pair.buffer(sum(lengths) + 1)
    mine.array[:] = pattern(mine.size, 12)
    local = [mine.address + start for start in starts]
    batch = pair.initiator.transfer(op, pair.segment, local, region.handle, starts, lengths, digest=True)
    assert np.array_equal(mine.array[:-1], content[: mine.size - 1])
    expected = [
        chunk_digests(mine.array[start : start + n]) for start, n in zip(starts, lengths, strict=True)
    ]
    assert batch.digests == expected


def test_large_batches_reach_the_configured_size_and_no_further(make_pair: Any) -> None:
    pair = make_pair(batch_transfers_max=300)
    region, content = pair.offer(4096)
    mine = pair.buffer(4096)
    pair.initiator.transfer(Op.READ, pair.segment, [mine.address] * 300, region.handle, 0, 16)
    assert np.array_equal(mine.array[:16], content[:16])
    with pytest.raises(UsageError, match="at most 300 transfers"):
        pair.initiator.transfer(Op.READ, pair.segment, [mine.address] * 301, region.handle, 0, 16)


def test_a_path_can_be_chosen_by_its_id(pair: Any) -> None:
    region, content = pair.offer(4096, Access.READ)
    mine = pair.buffer(8192)
    carried = 0
    for path in pair.segment.paths:
        mine.array[:] = 0
        batch = pair.initiator.transfer(
            Op.READ,
            pair.segment,
            [mine.address, mine.address + 4096],
            region.handle,
            0,
            4096,
            path=[path.id, path.id],
            check=False,
        )
        if batch.ok:
            carried += 1
            assert np.array_equal(mine.array, np.tile(content, 2))
        else:
            assert set(batch.status) == {12}, "a path that does not reach a region says UNSUPPORTED"
    assert carried >= 1
    rows = {(row["path"], row["op"]): row for row in pair.initiator.metrics()["paths"]}
    assert sum(row["transfers"] for row in rows.values()) == 2 * carried
    assert sum(row["bytes"] for row in rows.values()) == 8192 * carried


@pytest.mark.parametrize("wrong", ["lengths differ", "no length", "text", "too short", "negative"])
def test_a_call_that_makes_no_sense_is_a_usage_error(pair: Any, wrong: str) -> None:
    region, content = pair.offer(4096)
    mine = pair.buffer(4096, fill=1)
    cases: dict[str, tuple[Any, Any, Any, Any]] = {
        "lengths differ": ([mine.address] * 3, region.handle, [0, 1], 16),
        "no length": (mine.address, region.handle, 0, None),
        "text": (mine.address, region.handle, "zero", 16),
        "too short": (bytearray(10), region.handle, 0, 16),
        "negative": (mine.address, region.handle, -1, 16),
    }
    with pytest.raises(UsageError):
        pair.initiator.transfer(Op.READ, pair.segment, *cases[wrong])
    local, handle, offset, length = cases[wrong]
    if not isinstance(local, list) and length is not None:
        with pytest.raises(UsageError):
            pair.initiator.read(pair.segment, handle, offset, local, length)
    assert (mine.array == 1).all()
    assert content.size == 4096
