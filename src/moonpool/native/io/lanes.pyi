from collections.abc import Callable
from typing import Final, Self, final

from moonpool.native.io.batch import Batch
from moonpool.native.io.segment import NativeSegment

LANES_MAX: Final[int]

@final
class LanePool:
    def __new__(
        cls,
        connector: Callable[[float, Callable[[int], None]], int],
        *,
        lanes_max: int,
        io: int,
        spin_ns: int,
        spin_max_bytes: int,
        stall_ns: int,
    ) -> Self: ...
    @property
    def open(self) -> int: ...
    def counters(self) -> dict[str, int]: ...
    def shut(self) -> None: ...
    def close(self, timeout_s: float) -> bool: ...
    def close_after_fork(self) -> None: ...
    def call(self, op: int, message: bytes, timeout_s: float) -> None: ...

def set_notice_lanes(segment: NativeSegment, lanes: LanePool) -> None: ...
def announce_by_lane(batch: Batch) -> None: ...
