from typing import Self, final

@final
class HolderSets:
    def __new__(cls, holders_max: int, bytes_max: int) -> Self: ...
