from typing import Self, final

from moonpool.native.table.object_records import ObjectRecords

@final
class ObjectExtras:
    def __new__(cls, records: ObjectRecords, seed: int) -> Self: ...
