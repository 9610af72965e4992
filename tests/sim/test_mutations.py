"""A rule is broken on purpose, and a checker must notice within some worlds: so that no checker sleeps.

Each mutation replaces one small piece of the production cores, or of what the world promises them, for one
test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from simworld.cases import run_seed
from simworld.faults import FAULTS
from simworld.fencing import EngineFencing
from simworld.loop import SECOND
from simworld.master import Master
from simworld.node import Node
from simworld.redis_model import Group, RedisServer
from simworld.workloads import WORKLOADS

from moonpool.store.holds import Needs
from moonpool.store.leader_core import LeaderCore
from moonpool.store.node_core import NodeCore
from moonpool.store.node_pins import PinBook
from moonpool.store.state import State
from moonpool.store.tables import Place

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Mutation:
    """What is broken, in which worlds, and which checkers may see it."""

    name: str
    patch: Patch
    faults: tuple[str, ...]
    seen_by: tuple[str, ...]
    worlds: int = 60


def free_at_once(patch: pytest.MonkeyPatch) -> None:
    """An extent that a writer may still write is given to the next one."""

    def fence(core: LeaderCore, place: Place, size: int, *_rest: int) -> None:
        space = core.spaces.get(place.segment)
        if space is not None:
            space.free(place.offset, size, place.slot)

    patch.setattr(LeaderCore, "fence", fence)


def fence_nobody(patch: pytest.MonkeyPatch) -> None:
    """A node says that an extent is released while lanes and mapped writers still write it."""
    patch.setattr(EngineFencing, "begin", lambda self, segment, offset, length, instance, until_ms: 0)


def admit_everything(patch: pytest.MonkeyPatch) -> None:
    """A node lets in a WRITE whose grant is over, or of an earlier join."""
    patch.setattr(Node, "_admits", lambda self, segment, offset, length, grant: True)


def forget_pins(patch: pytest.MonkeyPatch) -> None:
    """A node does not count who reads in place."""
    patch.setattr(PinBook, "count", lambda self, place: 0)


def answer_removals_at_once(patch: pytest.MonkeyPatch) -> None:
    """A removal is answered before the nodes have stamped the old object dead."""
    keep = LeaderCore.retire

    def retire(core: LeaderCore, *params: Any) -> Needs:
        return Needs(keep(core, *params).sequence)

    patch.setattr(LeaderCore, "retire", retire)


def ignore_leases(patch: pytest.MonkeyPatch) -> None:
    """An extent is freed although a reader has a lease on it."""
    keep = LeaderCore.retire

    def retire(core: LeaderCore, stored: Any, place: Place, reason: int, _lease_until_ms: int) -> Needs:
        return keep(core, stored, place, reason, 0)

    patch.setattr(LeaderCore, "retire", retire)


def answer_without_lease(patch: pytest.MonkeyPatch) -> None:
    """A leader that stalled answers although another one leads by now."""
    patch.setattr(Master, "may_answer", lambda self: True)


def adopt_everything(patch: pytest.MonkeyPatch) -> None:
    """What a directory reports comes back, whether it was removed or not."""
    patch.setattr(State, "may_adopt", lambda self, tenant, key, object_id: True)


def append_without_epoch(patch: pytest.MonkeyPatch) -> None:
    """Redis takes facts of a leader that was deposed."""

    def append(server: RedisServer, _epoch: int, first: int, last: int, payload: bytes) -> tuple[str, int]:
        contents = server._contents
        contents.groups += (Group(first, last, payload),)
        contents.last = max(last, contents.last)
        return ("ok", last)

    patch.setattr(RedisServer, "_append", append)


def forget_effects(patch: pytest.MonkeyPatch) -> None:
    """A node acknowledges effects that it did not apply."""

    def effects(core: NodeCore, epoch: int, first: int, told: list[Any], _now_ms: int) -> None:
        del epoch
        core.applied = max(core.applied, first + len(told) - 1)

    patch.setattr(NodeCore, "effects", effects)


MUTATIONS = (
    Mutation("free at once", free_at_once, ("clients", "links"), ("ExtentStolen",)),
    Mutation("fence nobody", fence_nobody, ("clients", "links"), ("ExtentStolen", "ViewChanged")),
    Mutation("admit everything", admit_everything, ("links",), ("ExtentStolen",)),
    Mutation("forget pins", forget_pins, ("none", "slow"), ("ViewChanged", "ExtentStolen")),
    Mutation("answer removals at once", answer_removals_at_once, ("none", "slow"), ("HistoryBroken",)),
    Mutation("ignore leases", ignore_leases, ("none", "slow"), ("LeaseBroken",)),
    Mutation("answer without lease", answer_without_lease, ("split",), ("HistoryBroken", "LeaseBroken")),
    Mutation(
        "adopt everything",
        adopt_everything,
        ("redis_loss",),
        ("HistoryBroken", "LeaseBroken", "InternalError"),
    ),
    Mutation("append without epoch", append_without_epoch, ("masters",), ("UnknownFact", "InternalError")),
    Mutation("forget effects", forget_effects, ("none",), ("InvariantBroken", "HistoryBroken")),
)


def seeds_with(faults: tuple[str, ...]) -> Iterator[int]:
    """Seeds of worlds with one of these faults, all workloads in turn."""
    numbers = [number for number, fault in enumerate(FAULTS) if fault.name in faults]
    turn = 0
    while True:
        for number in numbers:
            for workload in range(len(WORKLOADS)):
                yield (turn * len(FAULTS) + number) * len(WORKLOADS) + workload
        turn += 1


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_broken_rule_is_noticed(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation.patch(monkeypatch)
    for count, seed in enumerate(seeds_with(mutation.faults), 1):
        outcome = run_seed(seed, active_us=3 * SECOND)
        if outcome.broken:
            print(f"{mutation.name}: noticed in world {count}, {outcome.told()}")
            assert outcome.broken.startswith(mutation.seen_by), outcome.told()
            return
        assert count < mutation.worlds, f"{mutation.name}: nobody noticed in {count} worlds"
