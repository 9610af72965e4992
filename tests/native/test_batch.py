"""Batches: the arrays they take and refuse, and the states they go through, without any peer."""

from __future__ import annotations

import array
import ctypes
import select
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moonpool.errors import Status, UsageError
from moonpool.native.io.batch import OPERATIONS, TRANSFERS_MAX, Batch
from moonpool.native.io.memory import BufferHold
from moonpool.native.io.regions import LocalRegions
from moonpool.native.io.segment import NativeSegment
from moonpool.native.io.shm import add_mapped_path

READ, WRITE = 1, 2
KEYS = (bytes(16), bytes(16))
HANDLE = 1 << 32
U64_MAX = (1 << 64) - 1


def numbers(batch: Batch) -> list[list[int]]:
    """The four arrays of a batch."""
    return [
        [int.from_bytes(raw[at : at + 8], "little") for at in range(0, len(raw), 8)] for raw in batch.arrays()
    ]


def filled(n: int = 1, op: int = READ, **changes: Any) -> Batch:
    batch = Batch(op, n)
    what = {"local": 1, "region": HANDLE, "offset": 0, "length": 8, "path": None, "digest": False, **changes}
    batch.fill(*what.values())
    return batch


@pytest.fixture
def here() -> Any:
    """A segment over this process's own memory, and the address of 64 KiB registered bytes."""

    class Here:
        memory = np.zeros(1 << 16, dtype=np.uint8)
        own = LocalRegions(4)
        segment = NativeSegment(own, 4, 262144)
        local = memory.ctypes.data

    add_mapped_path(Here.segment)
    Here.own.add(Here.local, 1 << 16, 7, *KEYS)
    Here.segment.put_region(HANDLE, Here.local, 1 << 16, 3, *KEYS)
    Here.segment.set_mapping(HANDLE, Here.local, True, Here.memory)
    return Here


# ---- arguments -------------------------------------------------------------------------------------------

VECTORS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "uint64": lambda values: np.array(values, dtype=np.uint64),
    "int64": lambda values: np.array(values, dtype=np.int64),
    "array Q": lambda values: array.array("Q", values),
    "array L": lambda values: array.array("L", values),
    "memoryview": lambda values: memoryview(np.array(values, dtype=np.uint64)),
    "read-only": lambda values: memoryview(np.array(values, dtype=np.uint64)).toreadonly(),
}


@pytest.mark.parametrize("make", VECTORS.values(), ids=VECTORS.keys())
def test_vectors_of_many_kinds(make: Callable[[list[int]], Any]) -> None:
    values = [[10, 20, 30], [4, 5, 6], [7, 8, 9], [1, 0, 3]]
    batch = filled(3, **dict(zip(("local", "region", "offset", "length"), map(make, values), strict=True)))
    assert numbers(batch) == values
    assert batch.n == 3
    assert batch.total_bytes == 4


@pytest.mark.parametrize("n", [1, 2, 1000])
def test_scalars_stand_for_all(n: int) -> None:
    batch = filled(n, local=5, region=U64_MAX, offset=1 << 63, length=0)
    assert numbers(batch) == [[5] * n, [U64_MAX] * n, [1 << 63] * n, [0] * n]


def test_scalars_and_vectors_mix() -> None:
    batch = filled(2, local=[1, 2], region=7, offset=np.array([3, 4], dtype=np.uint64), length=9)
    assert numbers(batch) == [[1, 2], [7, 7], [3, 4], [9, 9]]


def test_vectors_are_copied() -> None:
    values = np.array([1, 2], dtype=np.uint64)
    batch = filled(2, local=values)
    values[:] = 99
    assert numbers(batch)[0] == [1, 2]


@pytest.mark.parametrize("field", ["local", "region", "offset", "length"])
@pytest.mark.parametrize("wrong_length", [0, 1, 2, 4])
@pytest.mark.parametrize("make", [list, VECTORS["uint64"]], ids=["list", "uint64"])
def test_vectors_of_another_length_are_refused(field: str, wrong_length: int, make: Any) -> None:
    with pytest.raises(UsageError, match=f"{field} has {wrong_length} entries, the batch has 3") as caught:
        filled(3, **{field: make([1] * wrong_length)})
    assert caught.value.field == field


@pytest.mark.parametrize(
    "dtype", ["uint8", "uint16", "uint32", "int32", "float32", "float64", "complex128", ">u8"]
)
def test_vectors_of_another_type_are_refused(dtype: str) -> None:
    with pytest.raises(UsageError, match="64-bit integers"):
        filled(2, offset=np.array([1, 2], dtype=dtype))


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (-1, OverflowError),
        (1 << 64, OverflowError),
        ([-1, 0], OverflowError),
        ([0, 1 << 64], OverflowError),
        (1.0, TypeError),
        ([1.0, 2.0], TypeError),
        ("12", TypeError),
        (None, TypeError),
        ([None, None], TypeError),
        (object(), TypeError),
        (b"12345678", UsageError),
    ],
)
def test_what_is_no_64_bit_number_is_refused(value: Any, error: type[Exception]) -> None:
    for field in ("local", "region", "offset", "length"):
        with pytest.raises(error):
            filled(2, **{field: value})


def test_strided_vectors_are_refused() -> None:
    with pytest.raises((ValueError, BufferError)):
        filled(2, offset=np.array([1, 2, 3, 4], dtype=np.uint64)[::2])
    with pytest.raises(BufferError):
        filled(2, offset=memoryview(np.array([1, 2, 3, 4], dtype=np.uint64))[::2])


def test_numpy_numbers_count_as_numbers() -> None:
    assert numbers(filled(1, offset=np.uint64(7), length=np.uint64(8)))[2:] == [[7], [8]]


@pytest.mark.parametrize("n", [0, TRANSFERS_MAX + 1, 1 << 62, U64_MAX // 35 + 1, U64_MAX])
def test_impossible_counts_are_refused(n: int) -> None:
    with pytest.raises(UsageError, match="1 to 4294967295 transfers"):
        Batch(READ, n)


@pytest.mark.parametrize("n", [-1, 1 << 64])
def test_counts_beyond_64_bits_are_refused(n: int) -> None:
    with pytest.raises(OverflowError):
        Batch(READ, n)


@pytest.mark.parametrize("op", [-1, 0, 3, 4, 5, 255, 256])
def test_only_reads_and_writes_come_in_batches(op: int) -> None:
    with pytest.raises(UsageError, match="no operation"):
        Batch(op, 1)
    assert OPERATIONS == {1: "READ", 2: "WRITE"}


def test_operation_is_named() -> None:
    assert [(Batch(op, 1).op, Batch(op, 1).operation) for op in OPERATIONS] == [(1, "READ"), (2, "WRITE")]


PATHS: dict[str, Any] = {
    "scalar": 0,
    "list": [0, 0, 0],
    "tuple": (0, 0, 0),
    "uint16": np.zeros(3, dtype=np.uint16),
    "array": array.array("H", [0, 0, 0]),
    "any": 0xFFFF,
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
def test_paths_of_many_kinds(here: Any, path: Any) -> None:
    batch = filled(3, local=here.local, path=path)
    here.segment.bind(batch)
    batch.drive_here()
    assert set(batch.statuses()) == {Status.COMPLETE}


@pytest.mark.parametrize(
    ("path", "error"),
    [
        (-1, OverflowError),
        (1 << 16, OverflowError),
        ([0, 0], UsageError),
        (np.zeros(4, dtype=np.uint16), UsageError),
        (np.zeros(3, dtype=np.uint64), ValueError),
        (np.zeros(3, dtype=np.int16), ValueError),
        ([0, 1 << 16, 0], OverflowError),
        ([0, -1, 0], OverflowError),
        ("abc", TypeError),
        (1.0, TypeError),
    ],
)
def test_what_is_no_path_is_refused(path: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        filled(3, path=path)


def test_a_single_transfer_has_a_path_too(here: Any) -> None:
    for path, status in ((0, Status.COMPLETE), (1, Status.UNSUPPORTED), ([0], Status.COMPLETE)):
        batch = filled(local=here.local, path=path)
        here.segment.bind(batch)
        batch.drive_here()
        assert batch.worst == status


@pytest.mark.parametrize("length", [(1 << 40) + 1, U64_MAX])
def test_digests_of_impossible_lengths_are_refused(length: int) -> None:
    with pytest.raises(UsageError, match="over the limit") as caught:
        filled(2, length=[8, length], digest=True)
    assert caught.value.index == 1


def test_digests_are_one_list_a_transfer(here: Any) -> None:
    batch = filled(3, local=here.local, length=[0, 1, 65536], digest=True)
    assert [len(one) for one in batch.digests() or ()] == [0, 1, 1]
    assert filled(3).digests() is None
    with pytest.raises(UsageError, match="filled once"):
        batch.fill(here.local, HANDLE, 0, 8, None, True)


# ---- buffers ---------------------------------------------------------------------------------------------


def test_a_held_buffer_needs_no_registration(here: Any) -> None:
    here.memory[:] = 7
    target = bytearray(1000)
    batch = filled(local=BufferHold(target, writable=True), length=1000)
    here.segment.bind(batch)
    batch.let_go()
    with pytest.raises(BufferError):
        target.append(0)  # held until the batch has ended
    batch.drive_here()
    assert target == b"\x07" * 1000
    batch.let_go()
    target.append(0)


@pytest.mark.parametrize("length", [101, 1 << 40, U64_MAX])
def test_a_transfer_longer_than_its_buffer_is_refused(length: int) -> None:
    hold = BufferHold(bytearray(100), writable=True)
    with pytest.raises(UsageError, match="the buffer's 100 bytes") as caught:
        filled(2, local=hold, length=[100, length])
    assert (caught.value.field, caught.value.index) == ("length", 1)


def test_a_released_buffer_is_refused() -> None:
    hold = BufferHold(bytearray(100), writable=True)
    hold.release()
    with pytest.raises(UsageError, match="the buffer's 0 bytes"):
        filled(local=hold, length=1)


def test_a_read_into_a_read_only_buffer_is_refused() -> None:
    with pytest.raises(UsageError, match="read-only"):
        filled(op=READ, local=BufferHold(b"constant", writable=False))
    filled(op=WRITE, local=BufferHold(b"constant", writable=False))


def test_parts_use_the_buffer_of_the_whole(here: Any) -> None:
    here.memory[:] = np.arange(1 << 16, dtype=np.uint64).astype(np.uint8)
    target = bytearray(200)
    hold = BufferHold(target, writable=True)
    whole = filled(local=hold, length=200)
    part = filled(2, local=[hold.address, hold.address + 100], offset=[0, 100], length=100)
    part.be_part_of(whole)
    here.segment.bind(part)
    part.drive_here()
    assert part.worst == Status.COMPLETE
    assert target == here.memory[:200].tobytes()
    beyond = filled(local=hold.address + 150, length=51)
    with pytest.raises(UsageError, match="the buffer's 200 bytes"):
        beyond.be_part_of(whole)
    before = filled(local=hold.address - 1, length=1)
    with pytest.raises(UsageError, match="the buffer's 200 bytes"):
        before.be_part_of(whole)


# ---- states ----------------------------------------------------------------------------------------------


def test_a_new_batch_is_pending() -> None:
    batch = filled(3)
    assert not batch.done
    assert batch.statuses() == bytes([Status.PENDING] * 3)
    assert (batch.elapsed_ns, batch.bytes_done, batch.first_failure()) == (0, 0, 0)
    assert not batch.wait(0.0)
    assert not batch.wait(-5.0)
    assert not batch.wait(float("nan"))


def test_a_driven_batch_has_ended(here: Any) -> None:
    batch = filled(3, local=here.local)
    batch.set_timeout(None)
    here.segment.bind(batch)
    assert batch.segment is here.segment
    batch.drive_here()
    assert batch.done
    assert batch.wait()
    assert batch.statuses() == bytes(3)
    assert (batch.worst, batch.bytes_done, batch.first_failure()) == (Status.COMPLETE, 24, -1)
    assert batch.elapsed_ns > 0
    batch.drive_here()
    batch.cancel()
    assert batch.worst == Status.COMPLETE, "what has ended stays as it is"


def test_a_batch_bound_to_nothing_ends_as_our_mistake() -> None:
    batch = filled(2)
    assert batch.wait()
    assert set(batch.statuses()) == {Status.INTERNAL}


def test_an_unfilled_batch_touches_nothing(here: Any) -> None:
    batch = Batch(READ, 4096)
    batch.fill(0, HANDLE, 0, 1, None, False)
    here.segment.bind(batch)
    batch.drive_here()
    assert set(batch.statuses()) == {Status.NOT_REGISTERED}


def test_a_cancelled_batch_ends_without_a_transfer(here: Any) -> None:
    here.memory[:] = 1
    batch = filled(2, op=WRITE, local=here.local)
    here.segment.bind(batch)
    batch.cancel()
    assert batch.done
    assert set(batch.statuses()) == {Status.CANCELLED}
    assert batch.worst == Status.CANCELLED


@pytest.mark.parametrize("timeout_s", [0, 0.0, -1, -1e300, float("-inf"), float("nan"), 1e-12])
def test_a_deadline_that_has_passed_ends_a_batch(here: Any, timeout_s: float) -> None:
    batch = filled(local=here.local)
    here.segment.bind(batch)
    batch.set_timeout(timeout_s)
    batch.drive_here()
    assert batch.worst == Status.TIMED_OUT


@pytest.mark.parametrize("timeout_s", [None, 20, 1e9, 1e300, float("inf"), np.float32(30), True])
def test_a_deadline_far_ahead_does_not(here: Any, timeout_s: Any) -> None:
    batch = filled(local=here.local)
    here.segment.bind(batch)
    batch.set_timeout(timeout_s)
    batch.drive_here()
    assert batch.worst == Status.COMPLETE


def test_the_event_is_readable_from_the_end_on(here: Any) -> None:
    for before in (True, False):
        batch = filled(local=here.local)
        here.segment.bind(batch)
        if before:
            fd = batch.event()
            assert select.select([fd], [], [], 0)[0] == []
        batch.drive_here()
        fd = batch.event()
        assert batch.event() == fd
        assert select.select([fd], [], [], 0)[0] == [fd]


def test_the_worst_is_the_first_failure_in_order(here: Any) -> None:
    batch = filled(4, local=here.local, region=[HANDLE, HANDLE, 7, HANDLE], offset=[0, 1 << 16, 0, 0])
    here.segment.bind(batch)
    batch.drive_here()
    assert list(batch.statuses()) == [0, Status.OUT_OF_RANGE, Status.STALE_HANDLE, 0]
    assert (batch.worst, batch.first_failure(), batch.bytes_done) == (Status.OUT_OF_RANGE, 1, 16)


def test_a_batch_carried_as_parts_is_settled() -> None:
    batch = filled(4)
    batch.set_timeout(None)
    batch.settle_as({2: Status.PEER_GONE})
    assert batch.done
    assert list(batch.statuses()) == [0, 0, Status.PEER_GONE, 0]
    assert (batch.worst, batch.bytes_done) == (Status.PEER_GONE, 24)


@pytest.mark.parametrize("index", [4, 1 << 40, -1])
def test_settling_a_transfer_that_is_not_there_is_refused(index: int) -> None:
    with pytest.raises((UsageError, OverflowError)):
        filled(4).settle_as({index: Status.PEER_GONE})


def test_a_notice_can_be_replaced() -> None:
    batch = filled()
    batch.attach_notice(b"first")
    batch.attach_notice(b"")
    with pytest.raises(TypeError):
        batch.attach_notice("text")  # type: ignore[arg-type]


def test_ctypes_vectors_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="64-bit integers"):
        filled(2, offset=(ctypes.c_uint64 * 2)(1, 2))
