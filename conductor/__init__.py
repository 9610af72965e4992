"""The conductor: who should serve which prompt.

Public names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from moonpool.conductor.blocks import BlockHasher
    from moonpool.conductor.index import PrefixIndex
    from moonpool.conductor.index_config import IndexConfig
    from moonpool.conductor.index_view import IndexView
    from moonpool.conductor.prefix_match import PrefixMatch
    from moonpool.conductor.recipes import Algorithm, HashRecipe
    from moonpool.events import CacheContext, Holder, Tier

__all__ = [
    "Algorithm",
    "BlockHasher",
    "CacheContext",
    "HashRecipe",
    "Holder",
    "IndexConfig",
    "IndexView",
    "PrefixIndex",
    "PrefixMatch",
    "Tier",
]

# Where each public name lives.
_HOMES: Final[dict[str, str]] = {
    "Algorithm": "moonpool.conductor.recipes",
    "BlockHasher": "moonpool.conductor.blocks",
    "CacheContext": "moonpool.events",
    "HashRecipe": "moonpool.conductor.recipes",
    "Holder": "moonpool.events",
    "IndexConfig": "moonpool.conductor.index_config",
    "IndexView": "moonpool.conductor.index_view",
    "PrefixIndex": "moonpool.conductor.index",
    "PrefixMatch": "moonpool.conductor.prefix_match",
    "Tier": "moonpool.events",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'moonpool.conductor' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
