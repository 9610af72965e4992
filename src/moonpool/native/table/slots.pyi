from typing import Self, final

@final
class SlotMap:
    def __new__(cls, blocks_max: int, seed: int) -> Self: ...
