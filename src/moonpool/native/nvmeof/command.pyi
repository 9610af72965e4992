from collections.abc import Mapping

VERDICTS: Mapping[int, str]

def verdict(result: int, *, passthrough: bool) -> str | int: ...
def entry_bytes(
    opcode: int,
    fd: int,
    nsid: int,
    first: int,
    blocks: int,
    address: int,
    data_bytes: int,
    *,
    fua: bool,
    timeout_ms: int,
) -> bytes: ...
