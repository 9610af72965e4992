from array import array

from typing_extensions import Buffer

def read_token_list(text: Buffer, start: int) -> tuple[array[int], int] | None: ...
