from collections.abc import Callable, Sequence
from typing import Self, TypeAlias, final

from moonpool.native.disk.rings import DiskRings
from moonpool.native.io.segment import NativeSegment
from moonpool.native.nvmeof.namespace import NamespaceRegion

#: ask(handle, [(offset, bytes)], timeout_s) -> the status of each
_Ask: TypeAlias = Callable[[int, list[tuple[int, bytes]], float], Sequence[int]]

@final
class NamespaceWay:
    def __new__(cls, rings: DiskRings, ask: _Ask | None, *, passthrough: bool) -> Self: ...

def add_way(segment: NativeSegment, way: NamespaceWay) -> int: ...
def write_pieces(
    rings: DiskRings,
    region: NamespaceRegion,
    pieces: Sequence[tuple[int, bytes]],
    timeout_s: float,
    *,
    passthrough: bool,
) -> list[int]: ...
def flush_range(rings: DiskRings, region: NamespaceRegion, timeout_s: float, *, passthrough: bool) -> int: ...
