from collections.abc import Iterable
from typing import Final, Self, final

from moonpool.native.io.batch import Batch

WORKERS_MAX: Final[int]

@final
class WorkerPool:
    def __new__(
        cls,
        threads: int,
        queued_max: int,
        *,
        head_start_ns: int = 0,
        by_deadline: bool = False,
        caps: Iterable[tuple[int, int]] = (),
    ) -> Self: ...
    @property
    def threads(self) -> int: ...
    @property
    def queued_max(self) -> int: ...
    @property
    def queued(self) -> int: ...
    def counts(self, of: int) -> dict[str, int]: ...
    def submit(self, batch: Batch, of: int = 3) -> None: ...
    def close(self) -> None: ...
    def forget_after_fork(self) -> None: ...
