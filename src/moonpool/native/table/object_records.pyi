from typing import Self, final

@final
class ObjectRecords:
    objects_max: int
    def __new__(cls, objects_max: int, seed: int) -> Self: ...
