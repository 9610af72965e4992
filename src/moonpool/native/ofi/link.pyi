from collections.abc import Callable
from typing import final

from moonpool.native.ofi.fabric import Fabric

@final
class Link:
    def __init__(
        self,
        fabric: Fabric,
        ask: Callable[[int | None], tuple[int, bytes, int, int]],
        *,
        ends_max: int,
        spin_ns: int,
        spin_max_bytes: int,
        stall_ns: int,
        connect_ns: int,
    ) -> None: ...
    def connect(self) -> None: ...
    def shut(self) -> bool: ...
