"""Which transports exist, which can run here, and why others cannot: the only place to try imports."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Final, cast

from moonpool.config import EngineConfig
from moonpool.errors import TransportUnavailable, UsageError
from moonpool.transport.base import Availability, Transport

#: Order of preference: a segment's paths are offered a batch in this order. A module may have a function
#: `available()` that looks for its library and devices; `available_for(config)`, when a config names them.
KNOWN: Final[Mapping[str, tuple[str, str]]] = {
    "local": ("moonpool.transport.local", "LocalTransport"),
    "cuda": ("moonpool.transport.cuda", "CudaTransport"),
    "shm": ("moonpool.transport.shm", "ShmTransport"),
    "cxl": ("moonpool.transport.cxl", "CxlTransport"),
    "rdma": ("moonpool.transport.rdma", "RdmaTransport"),
    "ofi": ("moonpool.transport.ofi", "OfiTransport"),
    "file": ("moonpool.transport.file", "FileTransport"),
    "nvmeof": ("moonpool.transport.nvmeof", "NvmeofTransport"),
    "tcp": ("moonpool.transport.tcp", "TcpTransport"),
}
#: In a config: all that can run here, but those that must be named.
AUTO: Final = "auto"
#: Another way to devices that `rdma` drives already, or one in software.
NAMED_ONLY: Final = frozenset({"ofi"})
_HEADERS: Final = {
    "rdma": "libibverbs-dev",
    "ofi": "libfabric-dev",
    "file": "liburing-dev",
    "nvmeof": "liburing-dev",
}


def availability() -> dict[str, Availability]:
    """Every known transport and whether it can run on this machine."""
    return {name: _probe(name) for name in KNOWN}


def make_transports(config: EngineConfig) -> list[Transport]:
    """The config's transports, by preference; `TransportUnavailable` for one that cannot run here."""
    wanted = set(config.transports)
    unknown = wanted - set(KNOWN) - {AUTO}
    if unknown:
        raise UsageError(
            f"no transport {sorted(unknown)[0]!r}; there are {', '.join(KNOWN)}, and {AUTO}",
            field="transports",
        )
    if AUTO in wanted:
        wanted |= {name for name in KNOWN if name not in NAMED_ONLY and _probe(name, config).ok}
    made: list[Transport] = []
    for name, (module, kind) in KNOWN.items():
        if name in wanted:
            state = _probe(name, config)
            if not state.ok:
                raise TransportUnavailable(state.reason, state.how_to_get_it, transport=name)
            made.append(getattr(importlib.import_module(module), kind)(config))
    return made


def _probe(name: str, config: EngineConfig | None = None) -> Availability:
    module, _ = KNOWN[name]
    try:
        found = importlib.import_module(module)
    except ImportError as problem:
        how = f"install {_HEADERS.get(name, 'libxxhash-dev')} and pkg-config, then reinstall moonpool"
        return Availability(False, f"its native module is not there ({problem})", how)
    probe_for = getattr(found, "available_for", None)
    if config is not None and probe_for is not None:
        return cast("Availability", probe_for(config))
    probe = getattr(found, "available", None)
    return Availability(True) if probe is None else probe()
