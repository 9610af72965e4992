from typing import Self, final

from moonpool.native.table.open_puts import OpenPuts
from moonpool.native.table.stored_objects import StoredObjects

@final
class HotCounters:
    epoch: int
    last_fact: int
    last_object: int
    last_put: int
    place_cursor: int
    put_key: bytes
    def __new__(cls, epoch: int, last_fact: int, put_key: bytes) -> Self: ...
    def next_object_id(self) -> int: ...
    def next_put_id(self) -> int: ...
    def raise_epoch(self, epoch: int) -> None: ...

@final
class HotState:
    def __new__(
        cls, objects: StoredObjects, puts: OpenPuts, counters: HotCounters, batch_keys_max: int
    ) -> Self: ...
