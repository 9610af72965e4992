"""Foreign host buffers: what is taken, with which address and size, for how long, and what is refused."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moonpool.errors import UnsupportedMemory, UsageError
from moonpool.native.io.memory import BufferHold, create_memory


class ArrayInterface:
    """An object whose only way to its memory is ``__array_interface__``."""

    def __init__(self, owner: np.ndarray[Any, Any], **changes: Any) -> None:
        self.owner = owner
        self.changes = changes

    @property
    def __array_interface__(self) -> dict[str, Any]:
        about = dict(self.owner.__array_interface__)
        about.update(self.changes)
        return about


# DLPack's structures (dlpack.h), written down a second time so that the native ones are not their own judge.
class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class Tensor:
    """A tensor of a library of its own: a capsule made by hand is the only way to its memory."""

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        bits: int = 32,
        lanes: int = 1,
        strides: tuple[int, ...] | None = None,
        byte_offset: int = 0,
        device: int = 1,
        name: bytes = b"dltensor",
    ) -> None:
        self.memory = np.zeros(1 << 16, dtype=np.uint8)
        self.device = device
        self.name = name
        self.managed = DLManagedTensor()
        tensor = self.managed.tensor
        tensor.data = self.memory.ctypes.data
        tensor.device_type, tensor.device_id = device, 0
        tensor.ndim, tensor.code, tensor.bits, tensor.lanes = len(shape), 2, bits, lanes
        self._shape = (ctypes.c_int64 * max(1, len(shape)))(*shape)
        tensor.shape = self._shape
        if strides is not None:
            self._strides = (ctypes.c_int64 * max(1, len(strides)))(*strides)
            tensor.strides = self._strides
        tensor.byte_offset = byte_offset
        self.capsules: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self) -> Any:
        return _new_capsule(ctypes.addressof(self.managed), self.name, None)


@pytest.mark.parametrize(
    "make",
    [
        lambda: bytearray(64),
        lambda: array.array("d", [0.0] * 8),
        lambda: np.zeros(64, dtype=np.uint8),
        lambda: np.zeros((4, 2, 2), dtype=np.float32),
        lambda: memoryview(bytearray(80))[8:72],
        lambda: (ctypes.c_uint64 * 8)(),
    ],
)
def test_writable_buffers_are_held_in_place(make: Callable[[], Any]) -> None:
    source = make()
    hold = BufferHold(source, writable=True)
    assert hold.size_bytes == 64
    assert hold.writable
    assert hold.address == np.frombuffer(source, dtype=np.uint8).ctypes.data
    ctypes.memset(hold.address, 0x5A, hold.size_bytes)
    assert bytes(memoryview(source).cast("B")) == b"\x5a" * 64
    hold.release()


def test_engine_memory_and_mmap_are_buffers_too() -> None:
    memory = create_memory(4096)
    hold = BufferHold(memory, writable=True)
    assert (hold.address, hold.size_bytes) == (memory.address, 4096)
    with pytest.raises(UsageError, match="1 views"):
        memory.close()
    hold.release()
    memory.close()
    with mmap.mmap(-1, 4096) as anonymous:
        hold = BufferHold(anonymous, writable=True)
        assert hold.size_bytes == 4096
        with pytest.raises(BufferError):
            anonymous.close()
        hold.release()


@pytest.mark.parametrize("make", [lambda: b"read only", lambda: memoryview(b"read only"), lambda: _frozen()])
def test_read_only_buffers_can_be_read_from_only(make: Callable[[], Any]) -> None:
    hold = BufferHold(make(), writable=False)
    assert hold.size_bytes == 9
    assert not hold.writable
    assert ctypes.string_at(hold.address, 9) == b"read only"
    hold.release()
    with pytest.raises(UsageError, match=r"writable|read-only"):
        BufferHold(make(), writable=True)


def _frozen() -> np.ndarray[Any, Any]:
    frozen = np.frombuffer(b"read only", dtype=np.uint8)
    assert not frozen.flags.writeable
    return frozen


def test_a_held_buffer_cannot_move_until_it_is_let_go() -> None:
    source = bytearray(8)
    hold = BufferHold(source, writable=True)
    with pytest.raises(BufferError):
        source.extend(b"more")
    hold.release()
    hold.release()
    assert (hold.address, hold.size_bytes) == (0, 0)
    source.extend(b"more")


def test_dropping_the_hold_lets_go() -> None:
    source = bytearray(8)
    hold = BufferHold(source, writable=False)
    del hold
    source.append(1)


@pytest.mark.parametrize(
    "strided",
    [
        lambda: np.zeros(16, dtype=np.uint8)[::2],
        lambda: np.zeros((8, 8), dtype=np.uint8)[:, :4],
        lambda: np.zeros((8, 8), dtype=np.uint8)[::-1],
        lambda: memoryview(bytearray(16))[::2],
        lambda: ArrayInterface(np.zeros(16, dtype=np.uint8)[::2]),
        lambda: ArrayInterface(np.zeros((8, 8), dtype=np.float64)[:, :4]),
        lambda: Tensor((4, 4), strides=(8, 1)),
        lambda: Tensor((4, 4), strides=(1, 4)),
    ],
)
def test_strided_memory_is_refused(strided: Callable[[], Any]) -> None:
    with pytest.raises(UsageError, match=r"strided|contiguous"):
        BufferHold(strided(), writable=False)


@pytest.mark.parametrize("nothing", [None, "text", 3.5, object(), [1, 2], range(3)])
def test_what_is_no_buffer_is_refused(nothing: object) -> None:
    with pytest.raises(UsageError, match="no buffer"):
        BufferHold(nothing, writable=False)


@pytest.mark.parametrize("address", [0, 1 << 40, True])
def test_an_address_is_no_buffer(address: int) -> None:
    with pytest.raises(UsageError, match="registered memory"):
        BufferHold(address, writable=False)


def test_device_memory_is_refused_by_name_of_its_transport() -> None:
    class OnDevice:
        __cuda_array_interface__ = {"data": (1 << 40, False), "shape": (4,), "typestr": "<f4", "version": 3}  # noqa: RUF012

    for source in (OnDevice(), Tensor((4,), device=2), Tensor((4,), device=13), Tensor((4,), device=10)):
        with pytest.raises(UnsupportedMemory) as caught:
            BufferHold(source, writable=False)
        assert caught.value.transport == "cuda"


@pytest.mark.parametrize("device", [1, 3, 11], ids=["cpu", "cuda_host", "rocm_host"])
def test_pinned_host_memory_is_host_memory(device: int) -> None:
    hold = BufferHold(Tensor((4,), device=device), writable=True)
    assert hold.size_bytes == 16


# ---- __array_interface__ ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["u1", "<i2", "<f4", "<c16", "|S7", "|V12", "|b1"])
def test_array_interface_gives_address_and_size(dtype: str) -> None:
    owner = np.zeros((3, 5), dtype=dtype)
    hold = BufferHold(ArrayInterface(owner), writable=True)
    assert (hold.address, hold.size_bytes) == (owner.ctypes.data, owner.nbytes)


def test_array_interface_may_spell_contiguous_strides_out() -> None:
    owner = np.zeros((3, 1, 4), dtype=np.float64)
    hold = BufferHold(ArrayInterface(owner, strides=(32, 999, 8)), writable=True)
    assert hold.size_bytes == owner.nbytes


def test_array_interface_of_a_read_only_array() -> None:
    frozen = _frozen()
    assert not BufferHold(ArrayInterface(frozen), writable=False).writable
    with pytest.raises(UsageError, match="read-only"):
        BufferHold(ArrayInterface(frozen), writable=True)


def test_array_interface_keeps_its_owner() -> None:
    source = ArrayInterface(np.zeros(16, dtype=np.uint8))
    alive = weakref.ref(source)
    hold = BufferHold(source, writable=True)
    del source
    gc.collect()
    assert alive() is not None
    hold.release()
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("data", [None, b"the bytes themselves", np.zeros(4, dtype=np.uint8)])
def test_array_interface_without_a_pointer_is_refused(data: Any) -> None:
    with pytest.raises(UsageError, match="no data pointer"):
        BufferHold(ArrayInterface(np.zeros(4, dtype=np.uint8), data=data), writable=False)


@pytest.mark.parametrize("typestr", ["|O8", "<U4", "|t64", "<M8[ns]"])
def test_array_interface_of_elements_that_are_no_bytes_is_refused(typestr: str) -> None:
    with pytest.raises(UsageError, match="plain bytes"):
        BufferHold(ArrayInterface(np.zeros(4, dtype=np.uint8), typestr=typestr), writable=False)


# ---- DLPack ----------------------------------------------------------------------------------------------


class OnlyDLPack:
    """A numpy array seen through DLPack alone."""

    def __init__(self, owner: np.ndarray[Any, Any]) -> None:
        self.owner = owner

    def __dlpack_device__(self) -> Any:
        return self.owner.__dlpack_device__()

    def __dlpack__(self) -> Any:
        return self.owner.__dlpack__()


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float32, np.float64, np.complex128, np.bool_])
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 1, 4)])
def test_numpy_by_dlpack(dtype: type, shape: tuple[int, ...]) -> None:
    owner = np.zeros(shape, dtype=dtype)
    hold = BufferHold(OnlyDLPack(owner), writable=True)
    assert (hold.address, hold.size_bytes) == (owner.ctypes.data, owner.nbytes)
    hold.release()


def test_numpy_by_dlpack_is_kept_alive() -> None:
    owner = np.zeros(1 << 16, dtype=np.uint8)
    alive = weakref.ref(owner)
    hold = BufferHold(OnlyDLPack(owner), writable=True)
    del owner
    gc.collect()
    assert alive() is not None
    ctypes.memset(hold.address, 1, hold.size_bytes)
    hold.release()
    gc.collect()
    assert alive() is None


def test_numpy_that_dlpack_cannot_express_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be used"):
        BufferHold(OnlyDLPack(_frozen()), writable=False)


@pytest.mark.parametrize("bits", [1, 4, 7, 8, 9, 16, 32, 64, 128])
@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_the_size_of_a_tensor_is_whole_bytes_an_element(bits: int, lanes: int) -> None:
    tensor = Tensor((5, 3), bits=bits, lanes=lanes, byte_offset=64)
    hold = BufferHold(tensor, writable=True)
    assert hold.size_bytes == 15 * -(-bits * lanes // 8)
    assert hold.address == tensor.memory.ctypes.data + 64


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((), None), ((4,), (1,)), ((4, 4), (4, 1)), ((4, 1, 4), (4, 77, 1)), ((1, 1), (9, 9))],
)
def test_contiguous_tensors_are_taken(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> None:
    hold = BufferHold(Tensor(shape, strides=strides), writable=True)
    assert hold.size_bytes == 4 * int(np.prod(shape))


@pytest.mark.parametrize("name", [b"used_dltensor", b"dltensor_versioned", b"other"])
def test_a_capsule_of_another_kind_is_refused(name: bytes) -> None:
    with pytest.raises(UsageError, match="unversioned capsule"):
        BufferHold(Tensor((4,), name=name), writable=False)


def test_a_tensor_that_lies_about_its_device_is_refused() -> None:
    tensor = Tensor((4,))
    tensor.managed.tensor.device_type = 2
    with pytest.raises(UnsupportedMemory):
        BufferHold(tensor, writable=False)


@pytest.mark.parametrize("problem", [BufferError("not exportable"), RuntimeError("needs grad")])
def test_a_tensor_that_refuses_says_why(problem: Exception) -> None:
    class Refusing(Tensor):
        def __dlpack__(self) -> Any:
            raise problem

    with pytest.raises(UsageError, match=str(problem)):
        BufferHold(Refusing((4,)), writable=False)


def test_a_collection_gives_the_buffer_back() -> None:
    """A failed call's error holds its frames, and so the hold, in a cycle that only the collector ends."""
    buffer = bytearray(8)
    cycle: dict[str, Any] = {"hold": BufferHold(buffer, writable=True)}
    cycle["self"] = cycle
    with pytest.raises(BufferError):
        buffer.append(1)
    del cycle
    gc.collect()
    buffer.append(1)
