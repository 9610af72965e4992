"""Everything that one node is told: its masters, the memory it offers, its bounds and times."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final, final

from moonpool.config import EngineConfig
from moonpool.config_ranges import check_ranges
from moonpool.errors import UsageError
from moonpool.events import Tier
from moonpool.http_status import HttpStatusConfig
from moonpool.store.node_core import CoreLimits
from moonpool.store.records import Kind
from moonpool.units import GIB, KIB, MIB

_HOUR_MS: Final = 3_600_000
ADDRESSES_MAX: Final = 16
_NAME_BYTES_MAX: Final = 255
_PAGE_BYTES: Final = 4 * KIB

#: The first word of a backing: the transport that offers it, and what its segments are made of.
_BACKINGS: Final = {
    "file": ("file", Kind.LOCAL_DISK),
    "nvme": ("nvmeof", Kind.NVMEOF),
    "dax": ("cxl", Kind.MEMORY),
}

_RANGES: Final[dict[str, tuple[int, int]]] = {
    "segment_bytes": (64 * KIB, 1 << 46),
    "segments": (1, 1_024),
    "backing_offset": (0, 1 << 50),
    "slot_bytes": (64, 1 << 40),
    "log_bytes_per_slot": (16, 64 * KIB),
    "request_timeout_ms": (1, _HOUR_MS),
    "ack_timeout_ms": (1, _HOUR_MS),
    "connect_timeout_ms": (1, _HOUR_MS),
    "retry_first_ms": (1, 60_000),
    "retry_max_ms": (1, 60_000),
    "settle_timeout_ms": (1, _HOUR_MS),
    "close_timeout_ms": (100, 600_000),
    "view_clients_max": (1, 65_535),
    "pins_max": (1, 1 << 26),
    "pins_per_client_max": (1, 1 << 24),
    "hash_jobs_max": (1, 1 << 20),
    "report_page_bytes": (4 * KIB, 8 * MIB),
    "released_per_ack_max": (1, 1 << 18),
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Settings of one node. Raises `UsageError` that names the wrong field."""

    #: Masters, in order of preference: "host:port", "/path/of/a/socket" or "@name".
    addresses: tuple[str, ...]
    #: Name by which the pool knows this node; one that comes back under it replaces the one before, but not
    #: while that one lives. "" takes the host name and the process id.
    name: str = ""
    #: Name of the machine: copies of an object go to different ones. "" takes the host name.
    host: str = ""
    #: Bytes of payload in each segment, a multiple of 4,096.
    segment_bytes: int = 1 * GIB
    #: How many segments this node offers.
    segments: int = 1
    #: One object can be kept for each so many bytes of a segment; 4,096 suits objects from 4 KiB up.
    slot_bytes: int = 4 * KIB
    #: Bytes for keys in a segment's directory, for each object that can be kept.
    log_bytes_per_slot: int = 48
    #: Ask the system for huge pages; an error when it has none to give.
    huge_pages: bool = False
    #: Where the memory lies, such as "cpu:0".
    location: str = "cpu:0"
    #: Where payload lies when it is not in memory: "file:<path>", "nvme:<device>" or "dax:<device>"; segments
    #: lie one after the other in it, and clients need that transport too. "" takes memory.
    backing: str = ""
    #: Where in `backing` the first segment begins, a multiple of 4,096.
    backing_offset: int = 0
    #: What kind of memory it is, as in `moonpool.events.Tier`; files and namespaces are of the tier disk.
    tier: int = int(Tier.HOST)
    #: Settings of the engine that serves the memory; its `cluster_secret` also opens the masters' ports.
    engine: EngineConfig = field(default_factory=EngineConfig)
    #: Where `/metrics` and `/healthz` are; None: nowhere.
    http: HttpStatusConfig | None = None
    #: Longest wait for a master's answer to a join or a report, in milliseconds.
    request_timeout_ms: int = 5_000
    #: Longest wait for its answer to an acknowledgement, in milliseconds: then another master is asked.
    ack_timeout_ms: int = 1_500
    #: Longest wait for a connection to a master, in milliseconds.
    connect_timeout_ms: int = 1_000
    #: First pause after all masters failed, in milliseconds; it doubles up to `retry_max_ms`.
    retry_first_ms: int = 20
    #: Longest pause between tries, in milliseconds.
    retry_max_ms: int = 1_000
    #: Longest wait for clients of this host to settle before they are asked again, in milliseconds.
    settle_timeout_ms: int = 1_000
    #: Longest wait of `close` for each of its threads, in milliseconds.
    close_timeout_ms: int = 10_000
    #: Most clients of this host that view objects in place.
    view_clients_max: int = 1_024
    #: Most views open at once.
    pins_max: int = 1_000_000
    #: Most views that one client has open at once.
    pins_per_client_max: int = 65_536
    #: Most objects that wait to be hashed again.
    hash_jobs_max: int = 4_096
    #: Longest page of a report to the master.
    report_page_bytes: int = 512 * KIB
    #: Most freed extents told of in one acknowledgement.
    released_per_ack_max: int = 16_384

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES)
        if not 1 <= len(self.addresses) <= ADDRESSES_MAX:
            raise UsageError(f"a node has 1 to {ADDRESSES_MAX} masters", field="addresses")
        if any(not text or any(letter.isspace() for letter in text) for text in self.addresses):
            raise UsageError(f"these are no addresses: {self.addresses}", field="addresses")
        if self.segment_bytes % _PAGE_BYTES:
            raise UsageError(f"segment_bytes must be a multiple of {_PAGE_BYTES}", field="segment_bytes")
        for name in ("name", "host"):
            text = getattr(self, name)
            if len(text.encode()) > _NAME_BYTES_MAX or (text and not text.isprintable()):
                raise UsageError(f"{name} is one line of at most {_NAME_BYTES_MAX} bytes", field=name)
        if self.tier not in tuple(Tier):
            raise UsageError(f"tier={self.tier!r} is none of {[int(tier) for tier in Tier]}", field="tier")
        if self.backing and self.backing.partition(":")[0] not in _BACKINGS:
            ways = ", ".join(f"{word}:" for word in _BACKINGS)
            raise UsageError(f"backing={self.backing!r} begins with none of {ways}", field="backing")
        if self.backing_offset % _PAGE_BYTES:
            raise UsageError(f"backing_offset must be a multiple of {_PAGE_BYTES}", field="backing_offset")
        if self.retry_first_ms > self.retry_max_ms:
            raise UsageError("retry_first_ms must not be above retry_max_ms", field="retry_first_ms")

    @property
    def kind(self) -> int:
        """What segments are made of, as in `moonpool.store.records.Kind`."""
        return int(_BACKINGS.get(self.backing.partition(":")[0], ("", Kind.MEMORY))[1])

    @property
    def segment_tier(self) -> int:
        """The tier that segments are announced with."""
        return self.tier if self.kind == Kind.MEMORY else int(Tier.DISK)

    @property
    def engine_with_backing(self) -> EngineConfig:
        """The engine's settings, with the transport that offers `backing` among its transports."""
        name = _BACKINGS.get(self.backing.partition(":")[0], ("", Kind.MEMORY))[0]
        if not name or name in self.engine.transports:
            return self.engine
        return replace(self.engine, transports=(*self.engine.transports, name))

    def limits(self) -> CoreLimits:
        """Bounds of the core."""
        return CoreLimits(
            pins_max=self.pins_max,
            pins_per_client_max=self.pins_per_client_max,
            jobs_max=self.hash_jobs_max,
            report_page_bytes=self.report_page_bytes,
            released_per_ack_max=self.released_per_ack_max,
        )
