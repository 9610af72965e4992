"""The tables of a leader, native or plain, from one config."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from moonpool.config_ranges import check_ranges
from moonpool.errors import UsageError
from moonpool.native.table.directory_slots_reference import ReferenceSlots
from moonpool.native.table.extents_reference import ReferenceExtents
from moonpool.native.table.objects_reference import ReferenceObjectTable
from moonpool.native.table.open_puts_reference import ReferenceOpenPuts
from moonpool.native.table.queues_reference import POLICIES
from moonpool.store.tables import Extents, ObjectTable, OpenPuts, Slots
from moonpool.units import U64_MAX

_RANGES: Final = {
    "objects_max": (1, 1 << 30),
    "ghosts_max": (1, 1 << 24),
    "open_puts_max": (1, 1 << 24),
    "open_entries_max": (1, 1 << 28),
    "hash_seed": (0, U64_MAX),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableConfig:
    """Policy and bounds of a leader's tables; reaching a bound is `LimitExceeded`."""

    #: "lru" or "s3fifo".
    policy: str = "lru"
    #: Complete objects. Memory is used as they come.
    objects_max: int = 1 << 26
    #: Evicted objects remembered for each segment (s3fifo), about 40 bytes each.
    ghosts_max: int = 1 << 16
    #: Puts started and not ended.
    open_puts_max: int = 1 << 16
    #: Keys of all open puts together.
    open_entries_max: int = 1 << 20
    #: Keys the hash tables, so that nobody can choose keys that collide. 0: drawn at random each time.
    hash_seed: int = 0

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise UsageError(
                f"policy must be one of {', '.join(POLICIES)}", field="policy", value=self.policy
            )
        check_ranges(self, _RANGES)


@dataclass(frozen=True, slots=True)
class Tables:
    """What a leader is made of: two tables of its own, and makers of each segment's two."""

    objects: ObjectTable
    open_puts: OpenPuts
    #: Of a segment's capacity in bytes.
    extents: Callable[[int], Extents]
    #: Of the number of slots in a segment's directory.
    slots: Callable[[int], Slots]


def twin_tables(config: TableConfig) -> Tables:
    """The plain twins: for tests, simulation, and where nothing is compiled."""
    return Tables(
        ReferenceObjectTable(config.policy, objects_max=config.objects_max, ghosts_max=config.ghosts_max),
        ReferenceOpenPuts(puts_max=config.open_puts_max, entries_max=config.open_entries_max),
        ReferenceExtents,
        ReferenceSlots,
    )


def native_tables(config: TableConfig) -> Tables:
    """The compiled tables: what a master serves from."""
    # Here and not above: the twins work where nothing is compiled.
    from moonpool.native.table import directory_slots, extents, objects, open_puts

    # What tables answer does not depend on it, so a run from a seed stays the same.
    seed = config.hash_seed or secrets.randbits(64)
    return Tables(
        objects.ObjectTable(
            config.policy,
            objects_max=config.objects_max,
            ghosts_max=config.ghosts_max,
            seed=seed,
        ),
        open_puts.OpenPuts(puts_max=config.open_puts_max, entries_max=config.open_entries_max, seed=seed),
        extents.Extents,
        directory_slots.DirectorySlots,
    )
