"""From the arguments of a call to a batch: numbers of every type, vectors, buffers, and what is neither."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest

from moonpool.config import EngineConfig
from moonpool.engine.notifications import check_message
from moonpool.engine.plan import TIMEOUT_S_MAX, as_memory, as_number, plan_batch, timeout_ns
from moonpool.errors import UsageError
from moonpool.native.io.batch import Batch
from moonpool.native.io.memory import BufferHold
from moonpool.operations import Op

CONFIG = EngineConfig(batch_transfers_max=100, notification_bytes_max=8)
PLAIN = (None, False, None, None)


def plan(local: Any, region: Any = 1 << 32, offset: Any = 0, length: Any = 8, path: Any = None) -> Batch:
    return plan_batch(Op.READ, (local, region, offset, length), (path, False, None, None), CONFIG)


def numbers(batch: Batch) -> list[list[int]]:
    return [np.frombuffer(raw, dtype=np.uint64).tolist() for raw in batch.arrays()]


@pytest.mark.parametrize("five", [5, np.uint64(5), np.int32(5), np.uint8(5), np.array(5)])
def test_integers_of_every_type_are_numbers(five: Any) -> None:
    assert as_number(five) == 5
    assert type(as_number(five)) is int
    assert numbers(plan(five, five, five, five, five)) == [[5], [5], [5], [5]]
    assert numbers(plan([5, 5], five, five, five, five)) == [[5, 5]] * 4


@pytest.mark.parametrize("other", [None, "5", b"5", 5.0, [5], (5,), np.array([5], dtype=np.uint64)])
def test_what_is_no_integer_stays_as_it_is(other: Any) -> None:
    assert as_number(other) is other


def test_an_address_as_a_numpy_number_is_no_buffer_of_eight_bytes() -> None:
    assert as_memory(np.uint64(4096), Op.WRITE) == 4096
    held = as_memory(np.array([4096], dtype=np.uint64), Op.WRITE)
    assert isinstance(held, BufferHold)
    assert as_memory(held, Op.WRITE) is held


@pytest.mark.parametrize("make", [list, tuple, np.uint64, np.int64, lambda v: array.array("Q", v)])
def test_vectors_of_addresses(make: Any) -> None:
    values = [4096, 8192, 12288]
    vector = np.array(values, dtype=make) if make in (np.uint64, np.int64) else make(values)
    assert numbers(plan(vector)) == [values, [1 << 32] * 3, [0] * 3, [8] * 3]


@pytest.mark.parametrize(
    "make", [lambda: bytearray(24), lambda: np.zeros(3), lambda: np.zeros((3, 1), dtype=np.uint64)]
)
def test_other_buffers_are_memory(make: Any) -> None:
    source = make()
    batch = plan(source, length=None)
    assert numbers(batch)[0] == [np.frombuffer(source, dtype=np.uint8).ctypes.data]
    assert numbers(batch)[3] == [24]
    assert numbers(plan(source, length=7))[3] == [7]


def test_one_buffer_may_serve_several_transfers() -> None:
    source = bytearray(16)
    assert numbers(plan(source, offset=[0, 100], length=[16, 8]))[2:] == [[0, 100], [16, 8]]
    for length in (17, [16, 17], np.array([16, 17], dtype=np.uint64)):
        with pytest.raises(UsageError, match="the buffer's 16 bytes"):
            plan(source, offset=[0, 100], length=length)


@pytest.mark.parametrize(
    "what",
    [
        (4096, 1 << 32, 0, None),
        ([4096], 1 << 32, 0, None),
        ([4096, 8192], [1 << 32] * 3, 0, 8),
        ([], 1 << 32, 0, 8),
        (4096, 1 << 32, 0.5, 8),
        (4096, 1 << 32, -1, 8),
        (4096, 1 << 64, 0, 8),
        (4096, None, 0, 8),
        (4096, "first", 0, 8),
        (4096, b"12345678", 0, 8),
        (4096, [b"1"], 0, 8),
        ([4096] * 101, 1 << 32, 0, 8),
        (np.array([1, 2, 3, 4], dtype=np.uint64)[::2], 1 << 32, 0, 8),
        (object(), 1 << 32, 0, 8),
        (4096, 1 << 32, np.array([0.0, 1.0]), 8),
        (4096, 1 << 32, memoryview(np.arange(4, dtype=np.uint64))[::2], 8),
    ],
)
def test_what_makes_no_batch_is_a_usage_error(what: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError):
        plan_batch(Op.READ, what, PLAIN, CONFIG)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", [-1, 1 << 16, 0.5, [0.5, 0.5], "any", np.zeros(2, dtype=np.uint64)])
def test_what_is_no_path_is_a_usage_error(path: Any) -> None:
    with pytest.raises(UsageError):
        plan(4096, path=path)


def test_the_bound_of_a_batch_is_named() -> None:
    assert plan([4096] * 100).n == 100
    with pytest.raises(UsageError) as caught:
        plan([4096] * 101)
    assert (caught.value.field, caught.value.limit) == ("batch_transfers_max", 100)


@pytest.mark.parametrize(
    ("timeout_s", "expected"), [(0, 0), (1, 10**9), (0.5, 5 * 10**8), (1e-10, 1), (1e9, 10**18)]
)
def test_timeouts_in_nanoseconds(timeout_s: float, expected: int) -> None:
    assert timeout_ns(timeout_s) == expected


@pytest.mark.parametrize("timeout_s", [-1, -1e-9, float("nan"), float("inf"), TIMEOUT_S_MAX * 1.01])
def test_timeouts_that_make_no_sense_are_refused(timeout_s: float) -> None:
    with pytest.raises(UsageError, match="timeout_s") as caught:
        timeout_ns(timeout_s)
    assert caught.value.field == "timeout_s"
    with pytest.raises(UsageError, match="timeout_s"):
        plan_batch(Op.READ, (4096, 1 << 32, 0, 8), (None, False, timeout_s, None), CONFIG)


@pytest.mark.parametrize("message", [b"", b"12345678", bytearray(b"abc"), memoryview(b"abc")])
def test_messages_are_bytes(message: Any) -> None:
    assert check_message(message, CONFIG) == bytes(message)


@pytest.mark.parametrize("message", ["text", None, 5, [1]])
def test_what_is_no_message_is_refused(message: Any) -> None:
    with pytest.raises(UsageError, match="is bytes"):
        check_message(message, CONFIG)


def test_a_long_message_is_refused() -> None:
    with pytest.raises(UsageError, match="at most 8 bytes") as caught:
        check_message(b"123456789", CONFIG)
    assert caught.value.limit == 8
