from moonpool.native.io.lanes import LanePool
from moonpool.native.io.segment import NativeSegment

def add_tcp_path(segment: NativeSegment, lanes: LanePool) -> int: ...
