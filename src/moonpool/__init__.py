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
    from moonpool.operations import Access, Op, Priority
    from moonpool.store.aio import AsyncPool, connect_async
    from moonpool.store.client import Pool, connect
    from moonpool.store.client_config import ClientConfig
    from moonpool.store.client_results import GetResult, GetStatus, PutPolicy, PutResult, PutStatus
    from moonpool.store.errors import (
        DataLost,
        DestinationTooSmall,
        ForkedPool,
        JournalUnavailable,
        MasterUnavailable,
        NotOnThisHost,
        PoolClosed,
        QuotaExceeded,
        StoreError,
        TenantRefused,
        TooLarge,
    )
    from moonpool.store.records import ObjectType, Pin, RemoveCode
    from moonpool.store.value import Value
    from moonpool.store.view import View

__all__ = [
    "AUTO_PATH",
    "Access",
    "AccessDenied",
    "AsyncPool",
    "Batch",
    "ClientConfig",
    "DataLost",
    "DestinationTooSmall",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "ForkedEngine",
    "ForkedPool",
    "GetResult",
    "GetStatus",
    "HandshakeFailed",
    "InternalError",
    "JournalUnavailable",
    "LimitExceeded",
    "MasterUnavailable",
    "MetadataUnavailable",
    "MoonpoolError",
    "NameInUse",
    "NoSuchSegment",
    "NotOnThisHost",
    "NotRegistered",
    "ObjectType",
    "Op",
    "OutOfMemory",
    "OutOfRange",
    "PeerError",
    "PeerGone",
    "PeerRefused",
    "PeerStalled",
    "Pin",
    "Pool",
    "PoolClosed",
    "Priority",
    "ProtocolError",
    "PutPolicy",
    "PutResult",
    "PutStatus",
    "QueueFull",
    "QuotaExceeded",
    "Region",
    "RemoveCode",
    "ResourceError",
    "RevokeIncomplete",
    "Segment",
    "StaleHandle",
    "Status",
    "StoreError",
    "TenantRefused",
    "TooLarge",
    "TransferCancelled",
    "TransferTimeout",
    "TransportUnavailable",
    "UnsupportedMemory",
    "UnsupportedOperation",
    "UsageError",
    "Value",
    "View",
    "__version__",
    "connect",
    "connect_async",
    "load_config",
]

__version__: Final = "0.1.0"

# Where each public name lives; what is not listed is an error.
_HOMES: Final[dict[str, str]] = {
    "AUTO_PATH": "moonpool.ids",
    "Access": "moonpool.operations",
    "AsyncPool": "moonpool.store.aio",
    "Batch": "moonpool.engine.batch",
    "ClientConfig": "moonpool.store.client_config",
    "DataLost": "moonpool.store.errors",
    "DestinationTooSmall": "moonpool.store.errors",
    "Engine": "moonpool.engine.engine",
    "EngineConfig": "moonpool.config",
    "ForkedPool": "moonpool.store.errors",
    "GetResult": "moonpool.store.client_results",
    "GetStatus": "moonpool.store.client_results",
    "JournalUnavailable": "moonpool.store.errors",
    "MasterUnavailable": "moonpool.store.errors",
    "NotOnThisHost": "moonpool.store.errors",
    "ObjectType": "moonpool.store.records",
    "Op": "moonpool.operations",
    "Pin": "moonpool.store.records",
    "Pool": "moonpool.store.client",
    "PoolClosed": "moonpool.store.errors",
    "Priority": "moonpool.operations",
    "PutPolicy": "moonpool.store.client_results",
    "PutResult": "moonpool.store.client_results",
    "PutStatus": "moonpool.store.client_results",
    "QuotaExceeded": "moonpool.store.errors",
    "Region": "moonpool.engine.region",
    "RemoveCode": "moonpool.store.records",
    "Segment": "moonpool.engine.segment",
    "StoreError": "moonpool.store.errors",
    "TenantRefused": "moonpool.store.errors",
    "TooLarge": "moonpool.store.errors",
    "Value": "moonpool.store.value",
    "View": "moonpool.store.view",
    "connect": "moonpool.store.client",
    "connect_async": "moonpool.store.aio",
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
