"""Values: the bytes of one object in pooled, page-aligned memory that goes back when nobody looks at it.

A `Value` is a buffer: `memoryview(value)`, `numpy.asarray(value)`, `torch.frombuffer(value, ...)` and
`bytes(value)` work. Its memory is engine memory (registered, pre-faulted), taken from size classes; when the
pool's bound is reached, further values get memory of their own: the bound slows a read, and never fails it.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import TYPE_CHECKING, Any, Final, Self, final

from moonpool.errors import UsageError
from moonpool.native.io.payload import Payload
from moonpool.operations import Access
from moonpool.units import MIB

if TYPE_CHECKING:
    import numpy

    from moonpool.engine.engine import Engine

#: Classes below a page; from 4 KiB up there are four classes to a doubling.
_SMALL_CLASSES: Final = (512, 1024, 2048)
_SLAB_BYTES: Final = 4 * MIB
#: No block is larger than the pool's bound divided by this.
_SHARE_OF_ONE: Final = 8


class ObjectBytes(Payload):
    """An object's bytes as a buffer: what values and views have in common."""

    __slots__ = ("object_id",)

    #: Which object the bytes are of: grows with every object stored.
    object_id: int

    @property
    def view(self) -> memoryview:
        """A view of the bytes; it keeps the memory in use."""
        return memoryview(self)

    def __bytes__(self) -> bytes:
        return bytes(memoryview(self))

    def numpy(self, dtype: Any = "uint8", shape: Any = None) -> numpy.ndarray[Any, Any]:
        """An array over the bytes, no copy; it keeps the memory in use as long as it lives."""
        import numpy as np

        array: numpy.ndarray[Any, Any] = np.frombuffer(self.view, dtype=dtype)
        return array if shape is None else array.reshape(shape)

    def __eq__(self, other: object) -> bool:
        try:
            return memoryview(self) == memoryview(other).cast("B")  # type: ignore[arg-type]
        except TypeError:
            return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_problem: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        kind = type(self).__name__
        raise UsageError(
            f"a {kind} cannot be pickled or copied: it is memory of this process; take bytes() of it"
        )

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.size_bytes} bytes"
        return f"<{type(self).__name__} of object {self.object_id:#x}, {state}>"


@final
class Value(ObjectBytes):
    """An object's bytes, owned by whoever holds this; writable, for it is a copy.

    `close` (or the end of a `with` block, or dropping it) gives the memory back, once no view of it lives.
    After that a use raises UsageError.
    """

    __slots__ = ()


def class_bytes(size: int) -> int:
    """The block that a value of `size` bytes gets: at most a fifth is waste from 20 KiB up."""
    if size <= 4096:
        return next((small for small in _SMALL_CLASSES if size <= small), 4096)
    step = max(4096, 1 << ((size - 1).bit_length() - 3))
    return (size + step - 1) // step * step


@final
class ValuePool:
    """Blocks for values, by size class. Thread-safe; at most `limit_bytes` of engine memory."""

    def __init__(self, engine: Engine, limit_bytes: int) -> None:
        self._engine = engine
        self._limit_bytes = limit_bytes
        self._taken_bytes = 0
        self._growing = threading.Lock()
        # Per class: free addresses, and the memory that must live as long as any of them is in use.
        self._free: dict[int, list[int]] = {}
        self._memory: dict[int, Any] = {}

    @property
    def pooled_bytes(self) -> int:
        """Engine memory held for values, in use or free."""
        return self._taken_bytes

    def take(self, size: int, object_id: int = 0) -> Value:
        """A value with undefined bytes. OutOfMemory when the system gives none."""
        block = class_bytes(size)
        free = self._free.get(block)
        try:
            address = free.pop()  # type: ignore[union-attr]
        except (IndexError, AttributeError):
            return self._take_slowly(size, block, object_id)
        value = Value(address, size, self._memory[block], free, True)
        value.object_id = object_id
        return value

    def _take_slowly(self, size: int, block: int, object_id: int) -> Value:
        with self._growing:
            free = self._free.setdefault(block, [])
            if not free:
                self._grow(block, free)
            memory: Any = self._memory.get(block)
            home: list[int] | None = free
            if free:
                address = free.pop()
            else:
                memory = mmap.mmap(-1, block)
                address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
                home = None
        value = Value(address, size, memory, home, True)
        value.object_id = object_id
        return value

    def _grow(self, block: int, free: list[int]) -> None:
        """Adds a slab of blocks, or one large block, within the bound; else leaves `free` empty."""
        if block > self._limit_bytes // _SHARE_OF_ONE:
            return  # it would leave no room for others
        slab = block if block > _SLAB_BYTES // 4 else _SLAB_BYTES // block * block
        if self._taken_bytes + slab > self._limit_bytes:
            slab = block
        if self._taken_bytes + slab > self._limit_bytes:
            return
        region = self._engine.allocate(slab, access=Access.NONE)
        self._taken_bytes += slab
        # Every block of the class keeps all slabs of the class: few objects, and none can go too early.
        self._memory[block] = (*self._memory.get(block, ()), region)
        free.extend(range(region.address + slab - block, region.address - 1, -block))
