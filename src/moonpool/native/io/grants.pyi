from collections.abc import Sequence

from typing_extensions import Buffer

UNITS_MAX: int

def siphash24(key: bytes, data: bytes) -> int: ...
def make_grant(key: bytes, region: int, start: int, length: int, deadline_ms: int, tag: int) -> bytes: ...
def make_grants(
    key: bytes,
    region: int,
    starts: Sequence[int] | Buffer,
    lengths: Sequence[int] | Buffer,
    deadline_ms: int,
    tag: int,
) -> bytearray: ...
def read_grant(grant: bytes) -> tuple[int, int, int, int, int]: ...
