"""How a master decides: times, sizes and bounds. One frozen value, made once and passed down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from moonpool.config_ranges import check_ranges
from moonpool.errors import UsageError
from moonpool.units import KIB, MIB

_HOUR_MS: Final = 3_600_000
_DAY_MS: Final = 24 * _HOUR_MS

#: Inclusive bounds. `evict_high` and `evict_low` are shares of a segment's capacity.
_RANGES: Final[dict[str, tuple[float, float]]] = {
    "tick_ms": (1, 10_000),
    "beat_ms": (1, 60_000),
    "suspect_ms": (1, _HOUR_MS),
    "dead_ms": (1, _HOUR_MS),
    "gone_ms": (1, 30 * _DAY_MS),
    "rejoin_ms": (1, _HOUR_MS),
    "rebuild_ms": (0, _HOUR_MS),
    "resend_ms": (1, _HOUR_MS),
    "client_grace_ms": (0, _HOUR_MS),
    "lease_ms_max": (0, _HOUR_MS),
    "location_lease_ms": (0, _HOUR_MS),
    "journal_wait_ms": (1, _HOUR_MS),
    "async_ms_max": (1, _HOUR_MS),
    "put_ms": (1, _HOUR_MS),
    "put_bytes_per_ms": (1, 1 << 40),
    "put_wait_ms_max": (0, _HOUR_MS),
    "rehash_ms": (1, _HOUR_MS),
    "window_bytes": (64 * KIB, 1 << 46),
    "evict_high": (0.01, 1.0),
    "evict_low": (0.0, 1.0),
    "evict_batch": (1, 1 << 20),
    "batch_keys_max": (1, 1 << 20),
    "list_looks_max": (1, 1 << 24),
    "replicas_max": (1, 16),
    "nodes_max": (1, 1 << 16),
    "segments_max": (1, 1 << 16),
    "clients_max": (1, 1 << 20),
    "tenants_max": (1, 1 << 20),
    "waiting_puts_max": (1, 1 << 20),
    "holds_max": (1, 1 << 24),
    "effects_max": (1, 1 << 24),
    "push_effects_max": (1, 1 << 16),
    "push_bytes_max": (64 * KIB, 8 * MIB),
    "rehash_tasks_max": (1, 1 << 20),
    "facts_waiting_max": (1, 1 << 26),
    "report_page_bytes": (4 * KIB, 8 * MIB),
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MasterConfig:
    """Rules of a master's core. Raises `UsageError` that names the wrong field."""

    #: "async": a put of a new key replies before its fact is in the journal; "sync": after.
    durability: str = "async"
    #: Whether events of stored and removed objects are made, for the publisher.
    events: bool = False
    #: How often `tick` is called at least, in milliseconds.
    tick_ms: int = 20
    #: How often a node acknowledges at least, in milliseconds.
    beat_ms: int = 200
    #: A node silent for this long is suspect: not chosen for puts, last in lookups.
    suspect_ms: int = 1_000
    #: A node silent for this long is dead: its places are not seen.
    dead_ms: int = 3_000
    #: A node dead for this long is gone for good, with its places.
    gone_ms: int = 600_000
    #: After a takeover nodes have this long to join before they count as silent.
    rejoin_ms: int = 3_000
    #: A master with an empty journal waits this long for nodes that hold objects before it settles.
    rebuild_ms: int = 30_000
    #: Effects without an acknowledgement for this long are sent again.
    resend_ms: int = 1_000
    #: A client without a connection for this long has ended.
    client_grace_ms: int = 1_000
    #: Longest lease that a reader may ask for.
    lease_ms_max: int = 5_000
    #: How long a client may trust a location it was told without hearing from the master.
    location_lease_ms: int = 2_000
    #: How long replies wait for a journal that is away before they say so.
    journal_wait_ms: int = 2_000
    #: In "async": when the journal is behind by this long, puts wait for it as in "sync", so that no more
    #: than this is lost with a master.
    async_ms_max: int = 100
    #: Time that every put has, besides that for its bytes.
    put_ms: int = 10_000
    #: A put has one more millisecond for each so many bytes.
    put_bytes_per_ms: int = 100_000
    #: Longest wait of `put_start` for space.
    put_wait_ms_max: int = 60_000
    #: Longest wait for a node's word on a place that a reader called damaged.
    rehash_ms: int = 10_000
    #: Bytes that one allocation window opens, more for a larger object.
    window_bytes: int = 256 * MIB
    #: Share of a segment in use from which objects are evicted in the background.
    evict_high: float = 0.95
    #: Share of a segment in use at which the background eviction ends.
    evict_low: float = 0.92
    #: Most objects evicted from one segment in one go.
    evict_batch: int = 1_024
    #: Most keys in one request.
    batch_keys_max: int = 16_384
    #: Most objects that one step of `list` or `remove_prefix` looks at.
    list_looks_max: int = 65_536
    #: Most replicas that a put may ask for.
    replicas_max: int = 8
    #: Most nodes that are not gone.
    nodes_max: int = 4_096
    #: Most segments that are not gone.
    segments_max: int = 16_384
    #: Most clients at once.
    clients_max: int = 65_536
    #: Most tenants.
    tenants_max: int = 4_096
    #: Most `put_start` that wait for space.
    waiting_puts_max: int = 4_096
    #: Most replies that wait for the journal or for nodes.
    holds_max: int = 262_144
    #: Most effects that wait for one node; beyond it the node must join again.
    effects_max: int = 1_048_576
    #: Most effects in one push.
    push_effects_max: int = 4_096
    #: Most bytes of effects in one push.
    push_bytes_max: int = MIB
    #: Most places being hashed again at once.
    rehash_tasks_max: int = 4_096
    #: Most facts that are decided and not durable.
    facts_waiting_max: int = 4_194_304
    #: Longest page of a node's report.
    report_page_bytes: int = MIB

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES)
        if self.durability not in ("async", "sync"):
            raise _wrong("durability", self.durability, "must be 'async' or 'sync'")
        if type(self.events) is not bool:
            raise _wrong("events", self.events, "must be true or false")
        if not self.beat_ms < self.suspect_ms <= self.dead_ms:
            raise _wrong("suspect_ms", self.suspect_ms, "must be above beat_ms and not above dead_ms")
        if self.evict_low > self.evict_high:
            raise _wrong("evict_low", self.evict_low, "must not be above evict_high")
        if self.window_bytes % 4096:
            raise _wrong("window_bytes", self.window_bytes, "must be a multiple of 4096")


def _wrong(name: str, value: object, rule: str) -> UsageError:
    return UsageError(f"master config field {name} {rule}; it is {value!r}", field=name, value=repr(value))
