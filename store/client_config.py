"""How a pool finds its masters, waits for them, reads, and writes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Final, final

from moonpool.config import EngineConfig
from moonpool.config_ranges import check_ranges
from moonpool.errors import UsageError
from moonpool.units import GIB, KIB, MIB

_HOUR_MS: Final = 3_600_000

_RANGES: Final[dict[str, tuple[int, int]]] = {
    "location_cache_keys": (0, 1 << 26),
    "location_lease_ms": (1, 600_000),
    "contribute_bytes": (0, 1 << 46),
    "embedded_bytes": (1 * MIB, 1 << 46),
    "connect_timeout_ms": (1, _HOUR_MS),
    "request_timeout_ms": (1, _HOUR_MS),
    "lookup_timeout_ms": (1, _HOUR_MS),
    "unavailable_ms": (0, _HOUR_MS),
    "retry_first_ms": (1, 60_000),
    "retry_max_ms": (1, 60_000),
    "put_wait_ms": (0, _HOUR_MS),
    "transfer_timeout_ms": (1, 24 * _HOUR_MS),
    "batch_keys_max": (1, 65_536),
    "batch_bytes_max": (64 * KIB, 1 << 40),
    "segments_open_max": (1, 65_535),
    "value_pool_bytes": (0, 1 << 44),
    "views_max": (1, 1 << 24),
    "chunk_lists_max": (1, 1 << 20),
    "lease_base_ms": (1, 600_000),
    "lease_bytes_per_ms": (1, 1 << 40),
    "lease_ms_max": (1, 600_000),
    "hedge_after_us": (0, 60_000_000),
    "hedges_max": (1, 4_096),
}


class Verify(StrEnum):
    """What a read checks before it calls the bytes the object's."""

    #: The root digest of the whole object; of a range, the chunks that it touches.
    FULL = "full"
    #: For ranges the same as FULL; whole objects too.
    RANGE = "range"
    #: Only that the state word still names the object after the read. For destinations the CPU cannot hash.
    GENERATION = "generation"
    #: Nothing: the caller checks.
    OFF = "off"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Settings of one pool. Raises `UsageError` that names the wrong field."""

    #: Masters, in order of preference: "host:port", "/path/of/a/socket" or "@name". Empty: an embedded pool.
    addresses: tuple[str, ...] = ()
    #: Name under which the master and its logs know this client; "" takes the host name and the process id.
    name: str = ""
    #: Tenant whose keys this pool sees.
    tenant: str = "default"
    #: Token of the tenant, where it asks for one.
    token: bytes | None = field(default=None, repr=False)
    #: Settings of the engine that moves the bytes; its `cluster_secret` also opens the masters' ports.
    engine: EngineConfig = field(default_factory=EngineConfig)
    #: What reads check unless the call says otherwise: "full", "range", "generation" or "off".
    verify: str = "full"
    #: Most keys whose locations are remembered between reads; 0 asks the master each time.
    location_cache_keys: int = 0
    #: How long a remembered location may be used; cut to the masters' own `location_lease_ms`.
    location_lease_ms: int = 2_000
    #: Memory of this process that it offers to the pool, as a node.
    contribute_bytes: int = 0
    #: Memory of an embedded pool.
    embedded_bytes: int = 256 * MIB
    #: Longest wait for a connection to one master.
    connect_timeout_ms: int = 2_000
    #: Longest wait for an answer that the master may have to wait for, besides what the call itself asks for.
    request_timeout_ms: int = 5_000
    #: Longest wait for an answer that it has at once (look-ups, extents): then the next master is asked.
    lookup_timeout_ms: int = 1_500
    #: How long calls look for a master that leads before they raise.
    unavailable_ms: int = 15_000
    #: First pause between tries; doubled each time.
    retry_first_ms: int = 10
    #: Longest pause between tries.
    retry_max_ms: int = 500
    #: How long a put may wait at the master for space, unless the call says otherwise.
    put_wait_ms: int = 2_000
    #: Longest wait for the bytes of a read or a put, besides 20 ms for each megabyte; then another copy is
    #: tried, or a copy is left out.
    transfer_timeout_ms: int = 4_000
    #: Most keys in one request; larger calls are cut.
    batch_keys_max: int = 4_096
    #: Most bytes of one put request; larger calls are cut, so that deadlines stay near.
    batch_bytes_max: int = 1 * GIB
    #: Most peers' segments open at once; beyond it the one not used for longest is closed.
    segments_open_max: int = 1_024
    #: Engine memory kept for values; further ones get memory of their own.
    value_pool_bytes: int = 256 * MIB
    #: Most views open at once.
    views_max: int = 65_536
    #: Most objects whose chunk digests are kept for ranged reads.
    chunk_lists_max: int = 1_024
    #: Lease of a read: this, and a millisecond for each `lease_bytes_per_ms`, at most `lease_ms_max`, and at
    #: most what the masters give.
    lease_base_ms: int = 20
    #: See `lease_base_ms`.
    lease_bytes_per_ms: int = 50_000
    #: See `lease_base_ms`.
    lease_ms_max: int = 5_000
    #: A read over the network that takes this long, and longer than most, also asks another copy; 0 never.
    hedge_after_us: int = 5_000
    #: Most such second reads at once.
    hedges_max: int = 16

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES)
        if not isinstance(self.addresses, tuple) or not all(
            isinstance(address, str) and address for address in self.addresses
        ):
            raise UsageError("addresses takes a tuple of texts such as 'host:7420'", field="addresses")
        check_verify(self.verify)
        if not isinstance(self.tenant, str) or not self.tenant:
            raise UsageError("tenant must be a name", field="tenant")
        if not isinstance(self.token, bytes | None):
            raise UsageError("token must be bytes or None", field="token")
        if not isinstance(self.engine, EngineConfig):
            raise UsageError("engine takes an EngineConfig", field="engine")


#: Names of the settings that `connect` takes.
FIELDS: Final = tuple(one.name for one in fields(ClientConfig))


def check_verify(verify: str) -> Verify:
    """The way to verify; UsageError for a name that is none."""
    try:
        return Verify(verify)
    except ValueError:
        choices = ", ".join(Verify)
        raise UsageError(f"verify={verify!r}: choose one of {choices}", field="verify") from None
