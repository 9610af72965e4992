from collections.abc import Callable, Mapping
from typing import Final, Self, TypeAlias, final

from moonpool.native.io.segment import NativeSegment

COUNTERS: Final[tuple[str, ...]]
WAYS: Final[Mapping[str, int]]

#: generic fd, block fd, and what tells this pair from another
_Devices: TypeAlias = tuple[int, int, object]

@final
class NativeNamespace:
    def __new__(
        cls,
        nsid: int,
        block_bytes: int,
        memory_align: int,
        command_bytes_max: int,
        segments_max: int,
        away_ns: int,
        command_ms: int,
        look: Callable[[_Devices | None], tuple[int, _Devices | None]],
    ) -> Self: ...
    def open_devices(self) -> int: ...
    @property
    def devices(self) -> _Devices | None: ...
    @property
    def piece_bytes_max(self) -> int: ...
    @property
    def counters(self) -> dict[str, int]: ...
    def close(self) -> None: ...

@final
class NamespaceRegion:
    def __new__(
        cls, namespace: NativeNamespace, start: int, length: int, *, fua: bool, way: str, writable: bool
    ) -> Self: ...
    namespace: NativeNamespace
    def attach(self, segment: NativeSegment, handle: int) -> None: ...
    def close(self) -> None: ...
