"""Array kernels (numba): no I/O, no state, and no import of anything else of Moonpool's.

The names are loaded at first use, because numba takes half a second to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from moonpool.kernels.spraying import Sprayed, spray
    from moonpool.kernels.striping import (
        Paths,
        SliceBounds,
        Slices,
        Transfers,
        expected_paths,
        stripe_by_rate,
        stripe_evenly,
    )
    from moonpool.kernels.warming import warmup

__all__ = [
    "Paths",
    "SliceBounds",
    "Slices",
    "Sprayed",
    "Transfers",
    "expected_paths",
    "spray",
    "stripe_by_rate",
    "stripe_evenly",
    "warmup",
]

# Where each public name lives, beside striping.
_HOMES: Final = {
    "warmup": "moonpool.kernels.warming",
    "spray": "moonpool.kernels.spraying",
    "Sprayed": "moonpool.kernels.spraying",
}
_STRIPING: Final = "moonpool.kernels.striping"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'moonpool.kernels' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES.get(name, _STRIPING)), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
