"""What clients do, as a list of values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Keys, sizes, the mix of operations by weight, and the room there is."""

    name: str
    mix: dict[str, int]
    keys: int = 12
    #: Sizes are drawn from these.
    sizes: tuple[int, ...] = (0, 40, 700, 4_096, 9_000)
    policy: dict[str, Any] = field(default_factory=dict)
    replicas: tuple[int, ...] = (1, 1, 2)
    capacity_bytes: int = 1 << 19
    slots: int = 128
    tenants: int = 1
    groups: int = 0
    #: Pause between operations of one task, at most.
    think_us: int = 60_000

    @property
    def evicts(self) -> bool:
        """Whether a stored object may go to make room."""
        return self.capacity_bytes < self.keys * max(self.sizes) * max(self.replicas) * 4


_COMMON = {"put": 30, "get": 45, "cached": 20, "exists": 5, "remove": 8}

WORKLOADS: tuple[Workload, ...] = (
    Workload(name="mix", mix={**_COMMON, "upsert": 15, "view": 8}),
    Workload(
        name="upserts",
        mix={"upsert": 45, "get": 25, "cached": 30, "view": 20},
        keys=3,
        capacity_bytes=96 << 10,
        slots=64,
    ),
    Workload(name="removes", mix={**_COMMON, "remove": 35, "remove_prefix": 3, "remove_all": 1}, keys=8),
    Workload(
        name="small_pool",
        mix={**_COMMON, "upsert": 8, "view": 8, "pin": 4},
        keys=40,
        capacity_bytes=48 << 10,
        slots=24,
    ),
    Workload(
        name="groups_and_pins",
        mix={**_COMMON, "pin": 15, "upsert": 8},
        keys=24,
        groups=4,
        capacity_bytes=64 << 10,
        slots=48,
    ),
    Workload(name="replicas", mix={**_COMMON, "upsert": 10, "view": 5}, replicas=(2, 3)),
    Workload(
        name="hot_key",
        mix={"put": 15, "upsert": 20, "get": 10, "cached": 45, "remove": 15, "exists": 5, "view": 12},
        keys=2,
        sizes=(40, 4_096, 12_000),
        # Extents come round soon: who writes late writes into somebody else's.
        capacity_bytes=64 << 10,
        slots=48,
        think_us=12_000,
    ),
    Workload(name="tenants", mix={**_COMMON, "upsert": 10, "remove_all": 1}, tenants=3, keys=6),
)
