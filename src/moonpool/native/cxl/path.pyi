from typing import Protocol, Self, final

from typing_extensions import Buffer

from moonpool.native.io.segment import NativeSegment

class _Closable(Protocol):
    def close(self) -> None: ...

@final
class FarView:
    def __new__(
        cls,
        address: int,
        size_bytes: int,
        owner: _Closable | None,
        *,
        writable: bool,
        by_hand: bool = False,
    ) -> Self: ...
    def close(self) -> None: ...

def catch_bad_memory() -> None: ...
def add_far_path(segment: NativeSegment) -> int: ...
def reach_far(segment: NativeSegment, handle: int, view: FarView) -> None: ...
def bad_memory_faults() -> int: ...
def copy_trapped(target: Buffer, source: Buffer) -> int: ...
