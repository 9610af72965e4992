from typing import Self, final

from moonpool.native.table.object_records import ObjectRecords

@final
class Recency:
    policy: int
    ghosts_max: int
    def __new__(cls, records: ObjectRecords, policy: int, ghosts_max: int, seed: int) -> Self: ...
