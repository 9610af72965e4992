from collections.abc import Sequence
from typing import final

@final
class RemoteKeys:
    def __new__(
        cls, base: int, length: int, chunk_bytes: int, n_nics: int, keys: Sequence[int]
    ) -> RemoteKeys: ...
    def close(self) -> None: ...
