"""Digests of objects in pieces, and the native steps that move and compare them."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.engine.engine import Engine
from moonpool.errors import Status, UsageError
from moonpool.native.io.copying import chunk_digests, root_digest
from moonpool.native.io.object_batch import (
    MISMATCH,
    batch_hashes,
    batch_verdicts,
    check_objects,
    clear_memory,
    copy_memory,
    hash_objects,
    hash_one,
    is_intact,
    object_batch,
    root_of_chunks,
)
from moonpool.native.io.object_calls import read_confirmed, read_object, read_word, write_object
from moonpool.native.io.payload import Payload
from moonpool.operations import Op

LATE_NS = 1 << 62
SECOND_NS = 10**9


def words(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


@given(
    size=st.sampled_from([0, 1, 64, 65_535, 65_536, 65_537, 131_072, 200_000]),
    cuts=st.lists(st.floats(0, 1), max_size=5),
)
def test_pieces_hash_as_the_whole(size: int, cuts: list[float]) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    bounds = sorted([0, *(int(cut * size) for cut in cuts), size])
    address = words(*(data.ctypes.data + start for start in bounds[:-1]))
    length = words(*(stop - start for start, stop in itertools.pairwise(bounds)))
    first = words(0, len(length))
    chunks = chunk_digests(data)
    root = root_digest(chunks)
    packed = b"".join(chunk.to_bytes(8, "little") for chunk in chunks)
    assert hash_objects(address, length, first) == (root, [packed])
    assert hash_one(data.ctypes.data, size) == (root, packed)
    assert root_of_chunks(packed) == root
    assert check_objects(address, length, root, first) == b"\0"
    assert is_intact(data.ctypes.data, size, root)
    if size:
        data[size // 2] ^= 1
        assert check_objects(address, length, root, first) == bytes([MISMATCH])
        assert not is_intact(data.ctypes.data, size, root)


def test_many_objects_are_judged_one_by_one() -> None:
    rows = [np.full(size, size & 0xFF, dtype=np.uint8) for size in (10, 70_000, 0)]
    address, length = words(*(row.ctypes.data for row in rows)), words(10, 70_000, 0)
    roots, chunks = hash_objects(address, length)
    assert [len(one) for one in chunks] == [8, 16, 0]
    rows[1][69_999] ^= 1
    assert check_objects(address, length, roots) == bytes([0, MISMATCH, 0])
    with pytest.raises(UsageError, match="48 bytes of roots"):
        check_objects(address, length, roots[:-1])
    with pytest.raises(UsageError, match="first must rise"):
        hash_objects(address, length, words(0, 4))
    with pytest.raises(UsageError, match="64-bit"):
        hash_objects(address.astype(np.uint32), length)


def test_memory_is_cleared_and_copied() -> None:
    one, two = np.arange(100, dtype=np.uint8), np.zeros(100, dtype=np.uint8)
    copy_memory(two.ctypes.data, one.ctypes.data, 100)
    assert (one == two).all()
    clear_memory(words(one.ctypes.data, two.ctypes.data + 50), words(100, 50))
    assert not one.any()
    assert two[:50].any()
    assert not two[50:].any()


@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
def test_one_object_goes_and_comes_in_one_step(transport: str) -> None:
    with Engine() as owner, Engine(transports=("shm" if transport == "local" else transport,)) as other:
        region = owner.allocate(1 << 20)
        user = owner if transport == "local" else other
        peer = user.open(owner.endpoint)
        data = np.random.default_rng(3).integers(0, 256, 300_000, dtype=np.uint8)
        back = np.zeros_like(data)
        written = write_object(peer.native, data.ctypes.data, region.handle, 4096, data.size, b"", LATE_NS)
        assert written == (0, *hash_one(data.ctypes.data, data.size))
        root = written[1]
        where = (peer.native, back.ctypes.data, region.handle, 4096, data.size)
        assert read_object(*where, root, SECOND_NS) == 0
        assert (back == data).all()
        assert read_object(*where, bytes(16), SECOND_NS) == MISMATCH
        assert read_object(*where, None, SECOND_NS) == 0
        region.view[0:8] = (77).to_bytes(8, "little")
        assert read_word(peer.native, region.handle, 0, SECOND_NS) == 77
        assert read_word(peer.native, region.handle, 1 << 20, SECOND_NS) is None
        assert read_confirmed(*where, root, region.handle, 0, 77, SECOND_NS) == 0
        assert read_confirmed(*where, root, region.handle, 0, 78, SECOND_NS) == MISMATCH
        assert read_confirmed(*where, root, region.handle, 1 << 20, 77, SECOND_NS) == Status.OUT_OF_RANGE
        outside = (peer.native, back.ctypes.data, region.handle, 1 << 20, 4096)
        assert read_object(*outside, root, SECOND_NS) == Status.OUT_OF_RANGE
        late = write_object(peer.native, data.ctypes.data, region.handle, 0, 8, bytes(24), 1)
        assert late[0] == Status.TIMED_OUT
        assert bytes(region.view[0:8]) == (77).to_bytes(8, "little"), "written after its deadline"


def test_batches_carry_digests_over_any_memory() -> None:
    with Engine() as owner:
        region = owner.allocate(1 << 20)
        peer = owner.open(owner.endpoint)
        rows = [np.full(size, size & 0xFF, dtype=np.uint8) for size in (5, 70_000)]
        where = (words(*(row.ctypes.data for row in rows)), region.handle, words(0, 8192), words(5, 70_000))
        batch = object_batch(Op.WRITE, rows, *where, True, SECOND_NS)
        owner.transfers.carry(peer, batch)
        roots, chunks = batch_hashes(batch)
        assert (roots, chunks) == hash_objects(where[0], where[3])
        assert batch_verdicts(batch, roots) == b"\0\0"
        assert batch_verdicts(batch, bytes(16) + roots[16:]) == bytes([MISMATCH, 0])
        plain = object_batch(Op.READ, rows, *where, False, SECOND_NS)
        with pytest.raises(UsageError, match="without digests"):
            batch_hashes(plain)


def test_a_payload_goes_home_once() -> None:
    memory = ctypes.create_string_buffer(64)
    home: list[int] = []
    payload = Payload(ctypes.addressof(memory), 64, memory, home, False)
    with pytest.raises(TypeError):
        memoryview(payload)[0] = 1
    views = [memoryview(payload), memoryview(payload)]
    payload.close()
    assert home == []
    views[0].release()
    assert home == []
    views[1].release()
    assert home == [ctypes.addressof(memory)]
    del payload
    assert len(home) == 1
