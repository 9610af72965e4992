from typing import final

from moonpool.native.io.regions import LocalRegions
from moonpool.native.io.segment import NativeSegment
from moonpool.native.ofi.fabric import OwnMemory
from moonpool.native.ofi.link import Link

@final
class RemoteKey:
    def close(self) -> None: ...

def add_ofi_path(segment: NativeSegment, link: Link) -> int: ...
def reach_region(segment: NativeSegment, handle: int, key: int, base: int) -> RemoteKey: ...
def use_locally(table: LocalRegions, handle: int, memory: OwnMemory) -> None: ...
