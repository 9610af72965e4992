from typing import Final

LIBRARY: Final[str]
OLDEST: Final[tuple[int, int]]
HOW_TO_GET_IT: Final[str]

def library_version(name: str = ...) -> tuple[int, int]: ...
def providers() -> list[str]: ...
