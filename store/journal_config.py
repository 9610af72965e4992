"""Where the journal is kept, its bounds, and how long a leader leads without being heard."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, final

from moonpool.config_ranges import check_ranges
from moonpool.errors import UsageError
from moonpool.store.redis_link import RedisAddress
from moonpool.units import GIB, KIB, MIB

MEMORY_ADDRESS: Final = "memory://"
_PREFIX: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z", re.ASCII)
_HOUR_MS: Final = 3_600_000

_RANGES: Final[dict[str, tuple[int, int]]] = {
    "timeout_ms": (10, 600_000),
    "slow_ms": (1, 600_000),
    "linger_us": (0, 1_000_000),
    "group_bytes": (1, 4 * MIB),
    "queue_bytes_max": (64 * KIB, 4 * GIB),
    "groups_in_flight_max": (1, 4_096),
    "journal_bytes_max": (1 * MIB, 1 << 44),
    "snapshot_after_bytes": (64 * KIB, 1 << 44),
    "snapshot_every_ms": (100, 24 * 7 * _HOUR_MS),
    "snapshot_timeout_ms": (1_000, 6 * _HOUR_MS),
    "snapshot_piece_bytes": (64 * KIB, 32 * MIB),
    "replicas": (0, 16),
    "replicas_wait_ms": (1, 60_000),
    "lease_ms": (100, 600_000),
    "start_timeout_ms": (100, _HOUR_MS),
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JournalConfig:
    """How facts are kept. Raises `UsageError` that names the wrong field."""

    #: redis://, rediss:// or redis+unix:// URL; "" runs a private server in `data_dir`; "memory://" keeps
    #: nothing, for a pool inside one process.
    address: str = ""
    #: First part of every key in Redis; pools that share a Redis need different ones.
    prefix: str = "moonpool"
    #: Folder of the private server: its socket, its append-only file, its log. Made with mode 0700.
    data_dir: str = ""
    #: Longest wait for one answer of Redis before the connection is given up.
    timeout_ms: int = 1_000
    #: When Redis has not answered for so long, the journal counts as away: puts then wait for their facts, so
    #: that no more than this is lost with a leader that dies meanwhile.
    slow_ms: int = 200
    #: How long a fact that nobody waits for may wait for others to share an append with.
    linger_us: int = 1_000
    #: A group is sent at once when it holds so many bytes.
    group_bytes: int = 64 * KIB
    #: Most bytes of facts that wait for Redis; beyond it the master takes no mutations.
    queue_bytes_max: int = 64 * MIB
    #: Most groups sent and not yet answered.
    groups_in_flight_max: int = 64
    #: Most bytes of facts in the stream, or twice the last snapshot where that is more; a snapshot is taken
    #: at half of it at the latest, and mutations stop at the whole.
    journal_bytes_max: int = 128 * MIB
    #: A snapshot is taken when the stream is larger than the last snapshot and than this: it bounds how long
    #: a start takes (about 8 MiB a second), and what snapshots cost.
    snapshot_after_bytes: int = 8 * MIB
    #: Longest time between snapshots when there are new facts.
    snapshot_every_ms: int = 600_000
    #: Longest time that writing a snapshot may take before it is given up.
    snapshot_timeout_ms: int = 120_000
    #: Bytes of each piece of a snapshot in Redis.
    snapshot_piece_bytes: int = 1 * MIB - 64
    #: Replicas of Redis that must have a fact before it counts as durable (WAIT); 0 asks none.
    replicas: int = 0
    #: Longest wait for those replicas before the journal counts as away.
    replicas_wait_ms: int = 500
    #: How long a leader leads after it was last heard; renewed at a third.
    lease_ms: int = 2_000
    #: Longest wait for a private server to start and read its file.
    start_timeout_ms: int = 60_000

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES)
        if not _PREFIX.match(self.prefix):
            raise UsageError(
                f"prefix must be 1 to 64 of A-Z a-z 0-9 . _ -; it is {self.prefix!r}", field="prefix"
            )
        if self.address and self.address != MEMORY_ADDRESS:
            RedisAddress.parse(self.address)
        if not self.address and not self.data_dir:
            raise UsageError(
                "a master without a Redis address runs its own and needs data_dir; give one, or an address",
                field="data_dir",
            )
