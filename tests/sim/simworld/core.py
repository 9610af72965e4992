"""What the masters of a world are made with.

The production core on one kind of tables, with a seeded generator.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from moonpool.store.leader import Leader
from moonpool.store.master_config import MasterConfig
from moonpool.store.state import State
from moonpool.store.table_factory import TableConfig, Tables, native_tables, twin_tables

#: Real times divided by four, so that a world of some seconds sees every timer end.
QUICK = MasterConfig(
    suspect_ms=300,
    dead_ms=900,
    rejoin_ms=900,
    rebuild_ms=2_000,
    resend_ms=300,
    client_grace_ms=400,
    lease_ms_max=600,
    location_lease_ms=500,
    journal_wait_ms=600,
    put_ms=600,
    put_bytes_per_ms=1_000,
    beat_ms=60,
    window_bytes=64 << 10,
    evict_batch=8,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreOptions:
    """Which config and tables."""

    config: MasterConfig = QUICK
    native: bool = False
    policy: str = "lru"

    def tables(self) -> Tables:
        """New, empty tables."""
        config = TableConfig(policy=self.policy)
        return native_tables(config) if self.native else twin_tables(config)


def make_state(options: CoreOptions) -> tuple[State, Tables]:
    """An empty state, and the tables it belongs to."""
    tables = options.tables()
    return State(tables.objects), tables


def through_a_snapshot(options: CoreOptions, made: tuple[State, Tables]) -> tuple[State, Tables]:
    """The same state in new tables, as a master has it that read a snapshot."""
    state, _ = made
    tables = options.tables()
    restored = State.restore(list(state.snapshot_chunks()), tables.objects)
    assert restored.state_hash() == state.state_hash(), "a snapshot gives another state"
    return restored, tables


def make_leader(
    options: CoreOptions, made: tuple[State, Tables], term: tuple[int, int, str, int], seed: int
) -> Leader:
    """A leader over a followed state; `term`: its epoch, the cluster time, its name, the run of Redis."""
    epoch, now_ms, name, run_id = term
    chance = random.Random(seed)
    state, tables = through_a_snapshot(options, made) if chance.random() < 0.5 else made
    return Leader.from_state(
        options.config,
        tables,
        chance.randbytes,
        state=state,
        epoch=epoch,
        now_ms=now_ms,
        name=name,
        endpoints=(name,),
        journal_run=f"run{run_id}",
    )
