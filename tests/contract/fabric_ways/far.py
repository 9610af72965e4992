"""Bytes that no process maps, looked at and set behind the transport's back, with the face of an array."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from moonpool import Access, Engine, Region

Bytes = npt.NDArray[np.uint8]


class Store(Protocol):
    """What holds the bytes of one region: positions are from the region's start."""

    def load(self, start: int, size_bytes: int) -> bytes:
        """The bytes as anybody else on this host would see them now."""
        ...

    def store(self, start: int, data: bytes) -> None:
        """Sets them, visible to everybody when it returns."""
        ...


class Place(Protocol):
    """Where a way's regions lie; one for each pair of engines, closed with it."""

    def offer(self, engine: Engine, size_bytes: int, access: Access, granted: bool) -> tuple[Region, Store]:
        """A new region of exactly that size, offered by `engine`, and its bytes."""
        ...


class FarBytes:
    """A range of a `Store` as tests use numpy arrays: every look loads, every assignment stores."""

    def __init__(self, store: Store, start: int, size: int) -> None:
        self._store = store
        self._start = start
        self.size = size

    def copy(self) -> Bytes:
        """The bytes as they are now, on their own."""
        return np.frombuffer(self._store.load(self._start, self.size), dtype=np.uint8).copy()

    def tobytes(self) -> bytes:
        """As `copy`, as bytes."""
        return self._store.load(self._start, self.size)

    def __len__(self) -> int:
        return self.size

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Bytes:
        return self.copy() if dtype is None else self.copy().astype(dtype)

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice) and which.step in (None, 1):
            start, stop, _ = which.indices(self.size)
            return FarBytes(self._store, self._start + start, max(0, stop - start))
        if isinstance(which, int):
            place = range(self.size)[which]
            return np.uint8(self._store.load(self._start + place, 1)[0])
        return self.copy()[which]

    def __setitem__(self, which: slice, value: Any) -> None:
        start, stop, _ = which.indices(self.size)
        data = np.empty(max(0, stop - start), dtype=np.uint8)
        data[:] = value
        self._store.store(self._start + start, data.tobytes())

    def __eq__(self, other: object) -> Any:
        return self.copy() == np.asarray(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Way:
    """One way to move bytes: the transports of both ends, and what kind of bytes the target offers.

    `place` makes what holds the bytes when they have no address: then tests that need memory are left out.
    `on_request` says why a way runs only when it is chosen by name. `prepare` is called before each test.
    """

    name: str
    transports: tuple[str, ...]
    config: dict[str, Any] = field(default_factory=dict)
    foreign: bool = False
    to_itself: bool = False
    place: Callable[[], contextlib.AbstractContextManager[Place]] | None = None
    target_transports: tuple[str, ...] = ("shm", "tcp")
    on_request: str = ""
    prepare: Callable[[], None] | None = None
    #: False when its regions cannot ask for grants.
    grants: bool = True

    @property
    def transport(self) -> str:
        """The transport that the segment's first path must have."""
        return self.transports[0]

    @property
    def by_lane(self) -> bool:
        """True when bytes go through a socket."""
        return self.transport == "tcp"

    @property
    def in_memory(self) -> bool:
        """True when the target's regions are memory of its process."""
        return self.place is None
