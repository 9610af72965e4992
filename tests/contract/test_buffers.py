"""Memory that others own: any contiguous host buffer, at any alignment; device memory is refused by name."""

from __future__ import annotations

import ctypes
import mmap
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moonpool import Access, Op, UnsupportedMemory, UsageError

SIZE = 5_000


class ArrayInterface:
    """Offers an array by `__array_interface__` alone."""

    def __init__(self, owner: Any, **changes: Any) -> None:
        self._owner = owner
        self.__array_interface__ = {**owner.__array_interface__, **changes}


class OnlyDLPack:
    """Offers an array by DLPack alone."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._owner.__dlpack_device__()
        return device

    def __dlpack__(self, **options: Any) -> Any:
        return self._owner.__dlpack__(**options)


class OnDevice:
    """What a tensor on a device looks like from outside."""

    def __init__(self, kind: int) -> None:
        self._kind = kind

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self._kind, 0)

    def __dlpack__(self, **_options: Any) -> Any:
        raise AssertionError("the capsule of device memory must not even be asked for")


def of_numpy(size: int) -> tuple[Any, Any]:
    memory = np.zeros(size, dtype=np.uint8)
    return memory, memory


def of_bytearray(size: int) -> tuple[Any, Any]:
    memory = bytearray(size)
    return memory, np.frombuffer(memory, dtype=np.uint8)


def of_memoryview(size: int) -> tuple[Any, Any]:
    memory = bytearray(size + 30)
    return memoryview(memory)[13 : 13 + size], np.frombuffer(memory, dtype=np.uint8)[13 : 13 + size]


def of_mmap(size: int) -> tuple[Any, Any]:
    memory = mmap.mmap(-1, size)
    return memory, np.frombuffer(memory, dtype=np.uint8)


def of_ctypes(size: int) -> tuple[Any, Any]:
    memory = (ctypes.c_char * size)()
    return memory, np.frombuffer(memory, dtype=np.uint8)


def of_array(size: int) -> tuple[Any, Any]:
    memory = array("B", bytes(size))
    return memory, np.frombuffer(memory, dtype=np.uint8)


def of_matrix(size: int) -> tuple[Any, Any]:
    memory = np.zeros((size // 8, 2), dtype=np.float32)
    return memory, memory.reshape(-1).view(np.uint8)


def of_array_interface(size: int) -> tuple[Any, Any]:
    memory = np.zeros(size, dtype=np.uint8)
    return ArrayInterface(memory), memory


def of_dlpack(size: int) -> tuple[Any, Any]:
    memory = np.zeros(size // 4, dtype=np.int32)
    return OnlyDLPack(memory), memory.view(np.uint8)


MAKERS: list[Callable[[int], tuple[Any, Any]]] = [
    of_numpy,
    of_bytearray,
    of_memoryview,
    of_mmap,
    of_ctypes,
    of_array,
    of_matrix,
    of_array_interface,
    of_dlpack,
]
any_maker = pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)


@any_maker
def test_any_host_buffer_can_be_read_into_and_written_from(pair: Any, pattern: Any, make: Any) -> None:
    region, content = pair.offer(SIZE)
    buffer, seen = make(SIZE)
    assert seen.size == SIZE
    pair.initiator.read(pair.segment, region.handle, 0, buffer)
    assert np.array_equal(seen, content)
    seen[:] = pattern(SIZE, 9)
    pair.initiator.write(pair.segment, region.handle, 0, buffer)
    assert np.array_equal(content, pattern(SIZE, 9))
    pair.initiator.submit(Op.READ, pair.segment, buffer, region.handle, 8, 100).result()
    assert np.array_equal(seen[:100], pattern(SIZE, 9)[8:108])


@pytest.mark.memory_only("registers foreign memory with the target")
@any_maker
def test_any_host_buffer_can_be_registered(pair: Any, pattern: Any, way: Any, make: Any) -> None:
    theirs, there = make(SIZE)
    mine, here = make(SIZE)
    there[:] = pattern(SIZE, 3)
    region = pair.target.register(theirs)
    own = pair.initiator.register(mine, access=Access.NONE)
    if not way.to_itself:
        pair.initiator.refresh(pair.segment)
    # Foreign memory cannot be mapped: `shm` takes process_vm for it.
    pair.initiator.read(pair.segment, region.handle, 7, own.address + 3, 4_000)
    assert np.array_equal(here[3:4_003], pattern(SIZE, 3)[7:4_007])
    here[:] = 1
    pair.initiator.write(pair.segment, region.handle, 0, own.address, 4_999)
    assert (there[:4_999] == 1).all()
    assert there[4_999] == pattern(SIZE, 3)[4_999]
    pair.target.revoke(region)
    if pair.initiator is not pair.target:
        pair.initiator.revoke(own)


@pytest.mark.parametrize("shift", [1, 3, 8, 63, 2_049, 4_095])
def test_misaligned_buffers_work(pair: Any, pattern: Any, shift: int) -> None:
    region, content = pair.offer(300_000)
    mine = pair.buffer(200_000, shift=shift)
    for offset in (0, 1, 4_095, 4_097):
        pair.initiator.read(pair.segment, region.handle, offset, mine.address, 200_000)
        assert np.array_equal(mine.array, content[offset : offset + 200_000])
        mine.array[:] = pattern(200_000, offset)
        pair.initiator.write(pair.segment, region.handle, offset + shift, mine.address, 200_000)
        assert np.array_equal(content[offset + shift : offset + shift + 200_000], mine.array)
        mine.check_guards()


def test_a_buffer_of_integers_is_bytes_for_one_transfer(pair: Any) -> None:
    region, content = pair.offer(800)
    target = np.zeros(100, dtype=np.uint64)
    pair.initiator.read(pair.segment, region.handle, 0, target)
    assert np.array_equal(target.view(np.uint8), content)


DEVICE_KINDS = {"cuda": 2, "managed": 13, "oneapi": 14, "ext": 12, "vulkan": 7, "rocm": 10}


@pytest.mark.refuses_devices
@pytest.mark.parametrize("kind", DEVICE_KINDS.values(), ids=DEVICE_KINDS)
def test_memory_of_a_device_is_refused_by_name(pair: Any, kind: int) -> None:
    region, _ = pair.offer(4096)
    with pytest.raises(UnsupportedMemory, match=f"device type {kind}"):
        pair.initiator.read(pair.segment, region.handle, 0, OnDevice(kind))
    with pytest.raises(UnsupportedMemory):
        pair.target.register(OnDevice(kind))
    with pytest.raises(UnsupportedMemory):
        pair.initiator.submit(Op.WRITE, pair.segment, OnDevice(kind), region.handle, 0, 16)


def test_cuda_arrays_are_refused_by_name(pair: Any) -> None:
    region, _ = pair.offer(4096)

    class OnCuda:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (16,),
            "typestr": "|u1",
            "data": (0x7F0000000000, False),
            "version": 3,
        }

    with pytest.raises(UnsupportedMemory, match="cuda") as caught:
        pair.initiator.read(pair.segment, region.handle, 0, OnCuda())
    assert caught.value.transport == "cuda"
    with pytest.raises(UnsupportedMemory):
        pair.target.register(OnCuda())


def strided() -> Any:
    return np.zeros((100, 4), dtype=np.uint8)[:, ::2]


NO_BUFFERS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "text": lambda: "text",
    "float": lambda: 1.5,
    "object": object,
    "a set": lambda: {1, 2},
    "strided": strided,
    "strided view": lambda: memoryview(bytearray(100))[::2],
    "strided interface": lambda: ArrayInterface(strided(), strides=(4, 2)),
    "no data": lambda: ArrayInterface(np.zeros(8, np.uint8), data=None),
    "negative shape": lambda: ArrayInterface(np.zeros(8, np.uint8), shape=(-8,)),
    "objects": lambda: np.array([object()], dtype=object),
}


@pytest.mark.parametrize("what", NO_BUFFERS)
def test_what_is_no_contiguous_buffer_is_refused(pair: Any, what: str) -> None:
    region, content = pair.offer(4096)
    before = content.copy()
    with pytest.raises(UsageError):
        pair.initiator.read(pair.segment, region.handle, 0, NO_BUFFERS[what](), 4)
    with pytest.raises(UsageError):
        pair.initiator.write(pair.segment, region.handle, 0, NO_BUFFERS[what](), 4)
    with pytest.raises(UsageError):
        pair.target.register(NO_BUFFERS[what]())
    assert np.array_equal(content, before)


def test_read_only_interfaces_take_no_read(pair: Any) -> None:
    region, content = pair.offer(64)
    fixed = np.full(64, 4, dtype=np.uint8)
    about = fixed.__array_interface__
    read_only = ArrayInterface(fixed, data=(about["data"][0], True))
    with pytest.raises(UsageError):
        pair.initiator.read(pair.segment, region.handle, 0, read_only)
    pair.initiator.write(pair.segment, region.handle, 0, read_only)
    assert (content == 4).all()
    assert (fixed == 4).all()


def test_a_registered_buffer_is_held_until_revoked(pair: Any) -> None:
    memory = bytearray(4096)
    region = pair.target.register(memory)
    with pytest.raises(BufferError):
        memory.append(1)
    pair.target.revoke(region)
    del region
    memory.append(1)
