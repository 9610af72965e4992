from typing import Final, Self, final

from moonpool.native.disk.rings import DiskRings
from moonpool.native.io.segment import NativeSegment

PIECE_BYTES: Final[int]
PAGE_BYTES: Final[int]

def direct_alignment(fd: int) -> tuple[int, int] | None: ...
@final
class Disk:
    def __new__(
        cls,
        rings: DiskRings,
        fd: int,
        edge_fd: int,
        start: int,
        block: int,
        memory_block: int,
        writable: bool,
        durable: bool = ...,
        is_device: bool = ...,
    ) -> Self: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...
    def reach(self, segment: NativeSegment, handle: int, which: int) -> None: ...
    def take_dirty(self) -> bool: ...
    def mark_dirty(self) -> None: ...
    @property
    def any_fd(self) -> int: ...
    @property
    def direct(self) -> bool: ...
    @property
    def writable(self) -> bool: ...

@final
class DiskPath:
    def __new__(cls, rings: DiskRings, which: int) -> Self: ...

def add_disk_path(segment: NativeSegment, rings: DiskRings, which: int) -> int: ...
