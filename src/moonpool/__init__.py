"""Moonpool: a KV-cache store that pools the idle memory, SSDs and NICs of an LLM-serving cluster.

Public names are loaded when first used, so `import moonpool` costs next to nothing: it brings in neither
numpy nor numba nor redis nor any native module.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from moonpool.config import EngineConfig, load_config
    from moonpool.engine.batch import Batch
    from moonpool.engine.engine import Engine
    from moonpool.engine.region import Region
    from moonpool.engine.segment import Segment
    from moonpool.errors import (
        AccessDenied,
        EngineClosed,
        ForkedEngine,
        HandshakeFailed,
        InternalError,
        LimitExceeded,
        MetadataUnavailable,
        MoonpoolError,
        NameInUse,
        NoSuchSegment,
        NotRegistered,
        OutOfMemory,
        OutOfRange,
        PeerError,
        PeerGone,
        PeerRefused,
        PeerStalled,
        ProtocolError,
        QueueFull,
        ResourceError,
        RevokeIncomplete,
        StaleHandle,
        Status,
        TransferCancelled,
        TransferTimeout,
        TransportUnavailable,
        UnsupportedMemory,
        UnsupportedOperation,
        UsageError,
    )
    from moonpool.ids import AUTO_PATH
    from moonpool.operations import Access, Op

__all__ = [
    "AUTO_PATH",
    "Access",
    "AccessDenied",
    "Batch",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "ForkedEngine",
    "HandshakeFailed",
    "InternalError",
    "LimitExceeded",
    "MetadataUnavailable",
    "MoonpoolError",
    "NameInUse",
    "NoSuchSegment",
    "NotRegistered",
    "Op",
    "OutOfMemory",
    "OutOfRange",
    "PeerError",
    "PeerGone",
    "PeerRefused",
    "PeerStalled",
    "ProtocolError",
    "QueueFull",
    "Region",
    "ResourceError",
    "RevokeIncomplete",
    "Segment",
    "StaleHandle",
    "Status",
    "TransferCancelled",
    "TransferTimeout",
    "TransportUnavailable",
    "UnsupportedMemory",
    "UnsupportedOperation",
    "UsageError",
    "__version__",
    "load_config",
]

__version__: Final = "0.1.0"

# Where each public name lives; what is not listed is an error.
_HOMES: Final[dict[str, str]] = {
    "AUTO_PATH": "moonpool.ids",
    "Access": "moonpool.operations",
    "Batch": "moonpool.engine.batch",
    "Engine": "moonpool.engine.engine",
    "EngineConfig": "moonpool.config",
    "Op": "moonpool.operations",
    "Region": "moonpool.engine.region",
    "Segment": "moonpool.engine.segment",
    "load_config": "moonpool.config",
}
_ERRORS_HOME: Final = "moonpool.errors"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'moonpool' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES.get(name, _ERRORS_HOME)), name)
    globals()[name] = value  # the next look-up is a plain attribute
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
