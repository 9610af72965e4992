from typing import Self, final

@final
class StoredObjects:
    def __new__(cls, policy: int, objects_max: int, ghosts_max: int, seed: int) -> Self: ...
