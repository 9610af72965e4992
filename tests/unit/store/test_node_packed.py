"""Effects from their bytes: the outcome is that of the core, whatever comes in whatever order."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest

from moonpool.errors import MoonpoolError, ProtocolError
from moonpool.store.errors import StaleEpoch
from moonpool.store.node_packed import PackedEffects
from moonpool.wire.rpc import pack_value

_SPEC = importlib.util.spec_from_file_location(
    "node_core_cases", Path(__file__).with_name("test_node_core.py")
)
assert _SPEC is not None
assert _SPEC.loader is not None
cases: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(cases)

SLOTS: int = cases.SLOTS
CLIENT: bytes = cases.CLIENT


class Twins:
    """Two worlds that are told the same: one as values, one as bytes."""

    def __init__(self) -> None:
        self.plain, self.packed = cases.World(), cases.World()
        self.take = PackedEffects(self.packed.core).take
        for world in self.both:
            world.join()

    @property
    def both(self) -> tuple[Any, Any]:
        return self.plain, self.packed

    def tell(self, epoch: int, first: int, effects: list[Any]) -> None:
        """The same push to both, and the same error from both."""
        problems: list[type[Exception] | None] = []
        for push in (
            lambda: self.plain.core.effects(epoch, first, effects, self.plain.now),
            lambda: self.take(pack_value([epoch, first, effects]), self.packed.now),
        ):
            try:
                push()
            except MoonpoolError as problem:
                problems.append(type(problem))
            else:
                problems.append(None)
        assert problems[0] == problems[1]

    def check(self) -> None:
        """All that can be seen of both is equal."""
        one, other = self.both
        assert facts_of(one) == facts_of(other)


def facts_of(world: Any) -> dict[str, Any]:
    """What a world has come to; where the log lies in the directory is its own affair."""
    directory = world.directory
    slots = []
    for slot in range(SLOTS):
        entry = directory.entry(slot)
        kept = entry._replace(log_place=0), directory.key(entry), directory.chunks(entry)
        slots.append((directory.word(slot), *kept, directory.plain.noted(slot)))
    return {
        "slots": slots,
        "live": directory.live,
        "log": directory.log_free_bytes(),
        "totals": world.core.totals(),
        "gauges": world.core.gauges(),
        "applied": world.core.applied,
        "denied": sorted(world.watch.denied),
        "releases": sorted(place.slot for place, _ in world.core.holds.to_say(1_000)),
        "phase": world.core.phase,
    }


def random_effect(chance: random.Random, ids: list[int]) -> list[Any]:
    """Mostly what a master sends: ids that rise, and objects that were added."""
    slot = chance.randrange(SLOTS)
    kind = chance.random()
    if kind < 0.45:
        ids[0] += 1
        size = chance.choice((0, 100, 4096, 70_000, 200_000))
        chunks = chance.choice((b"", bytes(8 * -(-size // 65_536)))) if size > 65_536 else b""
        made = cases.add(slot, ids[0], tag=chance.choice((0, 7)), size=size, chunks=chunks)
        made[7] = bytes(chance.randrange(1, 60))
        ids.append(ids[0] << 8 | slot)
        return list(made)
    if kind < 0.9 and len(ids) > 1:
        known = ids[chance.randrange(max(1, len(ids) - 20), len(ids))]
        return list(cases.retire(known & 255, known >> 8, chance.randrange(7)))
    if kind < 0.95:
        return list(cases.fence(slot, put_id=chance.randrange(3)))
    if kind < 0.97:
        return [4, chance.randrange(100), 70, slot, ids[0]]
    return chance.choice(
        [
            [2, 70, 99, 1, 1],
            [1, 70, 1],
            [7],
            [1, 71, *cases.add(1, 1)[2:]],
            cases.add(1, 2**63),
            [2, 70, 1, 1, 16],
        ]
    )


@pytest.mark.parametrize("seed", range(40))
def test_the_outcome_is_that_of_the_core(seed: int) -> None:
    chance = random.Random(seed)
    twins = Twins()
    ids = [0]
    holder = 0
    for _ in range(30):
        step = chance.random()
        effects = [random_effect(chance, ids) for _ in range(chance.randrange(1, 20))]
        first = twins.plain.core.applied + 1 + chance.choice((0, 0, 0, 0, 0, -1, -3, 2))
        twins.tell(3, max(0, first), effects)
        twins.check()
        for world in twins.both:
            world.now += 200
        if step < 0.3:
            holder += 1
            wanted = [[70, slot, twins.plain.directory.word(slot) & ~cases.DEAD or 1] for slot in range(4)]
            assert len({bytes(world.core.views.open(holder, wanted)) for world in twins.both}) == 1
        elif step < 0.5:
            gone = chance.randint(0, holder)
            assert len({world.core.views.holder_gone(gone) for world in twins.both}) == 1
        elif step < 0.7:
            writers = {(0, chance.randrange(SLOTS) * 8192, chance.choice((b"", CLIENT)))}
            for world in twins.both:
                world.watch.writers = writers
        elif step < 0.9:
            assert twins.plain.ack() == twins.packed.ack()
        else:
            for world in twins.both:
                while (job := world.core.hashing.take()) is not None:
                    world.core.hashing.hashed(job, b"d" * 16, bytes(8 * -(-job.size // 65_536)))
        twins.check()


def test_only_whole_pushes_of_this_epoch_count() -> None:
    twins = Twins()
    good = pack_value([3, 1, [cases.add(0, 1), cases.add(1, 2)]])
    for size in range(len(good)):
        world = cases.World()
        world.join()
        with pytest.raises(ProtocolError):
            PackedEffects(world.core).take(good[:size], world.now)
        assert world.directory.live == world.core.applied
    with pytest.raises(StaleEpoch):
        twins.take(pack_value([2, 1, [cases.add(0, 1)]]), twins.packed.now)
    for wrong in ([3, 0, []], [3, 1], [3, 1, {}], ["3", 1, []], None):
        with pytest.raises(ProtocolError):
            twins.take(pack_value(wrong), twins.packed.now)
    twins.take(good, twins.packed.now)
    assert twins.packed.core.applied == 2


def test_the_log_runs_short_and_is_found_again() -> None:
    """A log of 4 KiB, keys of changing length: what one side finds room for the other does."""
    twins = Twins()
    object_id = 0
    for size in (1_000, 10, 500, 900, 40):
        for slot in range(SLOTS):
            object_id += 1
            effect = cases.add(slot, object_id)
            effect[7] = bytes([slot]) * size
            effects = [effect]
            if object_id > SLOTS:
                effects.insert(0, cases.retire(slot, object_id - SLOTS))
            twins.tell(3, twins.plain.core.applied + 1, effects)
            for world in twins.both:
                world.ack()
    for world in twins.both:
        directory = world.directory
        for slot in range(SLOTS):
            entry = directory.entry(slot)
            assert directory.word(slot) == object_id - SLOTS + slot + 1
            assert entry.flags or directory.key(entry) == bytes([slot]) * 40
        assert directory.live == SLOTS
