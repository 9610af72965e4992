"""Bounds of a prefix index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from moonpool.config_ranges import check_ranges
from moonpool.units import MIB, U64_MAX

_RANGES: Final[dict[str, tuple[int, int]]] = {
    "blocks_max": (1, 1 << 30),
    "holders_max": (1, 1 << 20),
    "contexts_max": (1, 1 << 24),
    "set_bytes_max": (128, 1 << 40),
    "call_blocks_max": (1, 1 << 30),
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """What an index may hold. Raises `UsageError` that names the wrong field."""

    #: Most distinct blocks; each takes at most 48 bytes.
    blocks_max: int = 1 << 24
    #: Most holders: data-parallel ranks of all instances.
    holders_max: int = 4_096
    #: Most contexts: combinations of tenant, model, LoRA, salt and block size.
    contexts_max: int = 65_536
    #: Most bytes of distinct sets of holders: 40 for each set, and 32 for every 64 holders in it.
    set_bytes_max: int = 256 * MIB
    #: Most blocks in one call.
    call_blocks_max: int = 1 << 20
    #: Keys the hash table; None draws one, so that nobody can aim at one bucket. Results do not depend on it.
    table_seed: int | None = None

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES)
        if self.table_seed is not None:
            check_ranges(self, {"table_seed": (0, U64_MAX)})
