from array import array
from collections.abc import Sequence
from typing import Any, Self, TypeAlias, final

from numpy.typing import NDArray
from typing_extensions import Buffer

BLOCK_TOKENS_MAX: int
EXTRA_BYTES_MAX: int
PARENT_BYTES_MAX: int
ENCODINGS: tuple[str, ...]
DIGESTS: tuple[str, ...]

_Integers: TypeAlias = Sequence[int] | Buffer | NDArray[Any]

def xxh3_128(data: Buffer) -> bytes: ...
def pack_tokens(tokens: _Integers) -> array[int]: ...
def xxh3_64(data: Buffer, seed: int = 0) -> int: ...
@final
class Xxh3Chain:
    def __new__(
        cls, *, block_tokens: int, window_tokens: int = 0, seed: int = 0, link_seed: int = 0
    ) -> Self: ...
    def chain(
        self, tokens: _Integers, parent: int | None = None, extras: Sequence[bytes] = ()
    ) -> array[int]: ...
    def blocks(self, tokens: _Integers, extras: Sequence[bytes] = ()) -> array[int]: ...
    def chain_prompts(
        self, tokens: Buffer | NDArray[Any], offsets: _Integers
    ) -> tuple[array[int], array[int]]: ...

@final
class DigestChain:
    def __new__(cls, *, block_tokens: int, encoding: str, digest: str, root: bytes) -> Self: ...
    def chain(
        self, tokens: _Integers, parent: bytes | None = None, extras: Sequence[bytes] = ()
    ) -> tuple[bytes, array[int]]: ...
