"""How the conductor's service listens, what it keeps, and its bounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

from moonpool.conductor.index_config import IndexConfig
from moonpool.conductor.scheduler_config import SchedulerConfig
from moonpool.config_ranges import check_ranges
from moonpool.errors import UsageError
from moonpool.units import MIB, U64_MAX

_RANGES: Final[dict[str, tuple[int, int]]] = {
    "port": (0, 65_535),
    "hash_seed": (0, U64_MAX),
    "body_bytes_max": (1_024, 1 << 30),
    "connections_max": (1, 1 << 20),
    "receive_timeout_ms": (1_000, 3_600_000),
    "idle_timeout_ms": (1_000, 86_400_000),
    "registrations_max": (1, 1 << 20),
    "instances_max": (1, 65_536),
    "models_max": (1, 65_536),
    "names_max": (1, 1 << 30),
    "held_messages_max": (1, 1 << 20),
    "receive_messages_max": (1, 1 << 24),
    "replay_timeout_ms": (1, 600_000),
    "request_timeout_ms": (1_000, 1 << 40),
}
TOKEN_BYTES_MIN: Final = 16


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ConductorConfig:
    """One service. Raises `UsageError` that names the wrong field."""

    #: Loopback unless you say so; with another address set a token.
    host: str = "127.0.0.1"
    #: TCP port; 0 lets the system choose.
    port: int = 13_333
    #: What clients send as `Authorization: Bearer ...`; empty: nothing is asked for.
    token: str = field(default="", repr=False)
    #: Where registrations are kept for a warm restart; None: nowhere.
    state_path: Path | None = None
    #: Seed of the service's own block hashes, for engines whose hashes nobody else can make.
    hash_seed: int = 0
    #: How prompts are placed.
    policy: str = "affinity"
    #: How requests are rejected: none, baseline, early, predictive or priced.
    admission: str = "none"
    #: Largest request body, in bytes.
    body_bytes_max: int = 64 * MIB
    #: Most connections of clients at once; more are answered with 503.
    connections_max: int = 1_024
    #: A request whose bytes take longer to come, or an answer's to be taken, is cut, in milliseconds.
    receive_timeout_ms: int = 30_000
    #: A connection without a request is closed after this long, in milliseconds.
    idle_timeout_ms: int = 75_000
    #: Most event streams.
    registrations_max: int = 4_096
    #: Most instances to schedule on, of one model.
    instances_max: int = 4_096
    #: Most models to schedule for.
    models_max: int = 256
    #: Most block names remembered for one stream whose hashes nobody else can make.
    names_max: int = 1 << 22
    #: Most messages of one stream that wait behind a gap.
    held_messages_max: int = 4_096
    #: Most messages that wait in one subscription's socket.
    receive_messages_max: int = 100_000
    #: Longest silence within a replay, in milliseconds.
    replay_timeout_ms: int = 2_000
    #: A request that nobody completes is forgotten after this long, in milliseconds.
    request_timeout_ms: int = 3_600_000
    index: IndexConfig = field(default_factory=IndexConfig)
    scheduler: SchedulerConfig = field(default_factory=lambda: SchedulerConfig(block_tokens=16))

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES)
        if self.token and len(self.token.encode()) < TOKEN_BYTES_MIN:
            raise UsageError(
                f"a token has {TOKEN_BYTES_MIN} bytes or more (make one with `openssl rand -hex 32`)",
                field="token",
            )
