"""Event streams through a bad network: ``python -m moonpool.bench.stream_fuzz [--events N]``.

An engine publishes random events; between it and the index messages are lost, doubled, delayed, and replaced
by garbage, and replays answer what the engine still remembers, or part of it. The oracle is the engine's own
set of blocks. Where everything can be replayed, the index must equal it whenever no gap is open; where not,
it must hold no block that the engine has not. Memory must stay flat.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from collections import deque
from typing import Any, Final, NamedTuple

import click
import msgpack  # type: ignore[import-untyped]

from moonpool.conductor.engine_source import SourceSpec
from moonpool.conductor.index import PrefixIndex
from moonpool.conductor.stream_feed import StreamFeed
from moonpool.events import CacheContext, Holder

CONTEXT: Final = CacheContext("m", 16)
HOLDER: Final = Holder("i")
#: Blocks have numbers from 1 to this: few, so that they come and go often.
BLOCKS: Final = 200
#: Messages between two looks at the whole index.
LOOK_EVERY: Final = 500
#: Growth of memory that is allowed after the first tenth, in KiB: the allocator's own rounding.
GROWTH_KIB_MAX: Final = 8_192


class Chances(NamedTuple):
    """How often each mishap befalls a message."""

    lost: float = 0.05
    late: float = 0.05
    garbage: float = 0.05
    doubled: float = 0.05
    restart: float = 0.0
    #: Of a message within a replay.
    replay_lost: float = 0.0


class Publisher:
    """An engine: numbers its batches, remembers the last `kept`, and knows what it has."""

    def __init__(self, draw: random.Random, kept: int) -> None:
        self._draw: Final = draw
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self._next = 0
        self._clock = 0.0
        self.blocks: set[int] = set()
        self.events = 0

    def restart(self) -> None:
        """Begins anew, with nothing."""
        self.kept.clear()
        self._next = 0
        self.blocks.clear()

    def publish(self) -> tuple[int, bytes]:
        """The next batch: its number and payload."""
        events = [self._event() for _ in range(self._draw.randrange(1, 4))]
        self.events += len(events)
        self._clock += 0.001
        made = (self._next, msgpack.packb([self._clock, events]))
        self._next += 1
        self.kept.append(made)
        return made

    def _event(self) -> Any:
        kind = self._draw.random()
        if kind < 0.6 or not self.blocks:
            new = [self._draw.randrange(1, BLOCKS) for _ in range(self._draw.randrange(1, 6))]
            self.blocks.update(new)
            return ["BlockStored", new, None, [], 16]
        if kind < 0.99:
            gone = self._draw.sample(sorted(self.blocks), min(len(self.blocks), 3))
            self.blocks.difference_update(gone)
            return {"type": "BlockRemoved", "block_hashes": gone}
        self.blocks.clear()
        return ["AllBlocksCleared"]


class World:
    """One publisher, one bad network, one index."""

    def __init__(self, seed: int, *, kept: int, chances: Chances) -> None:
        self._draw: Final = random.Random(seed)
        self._chances: Final = chances
        self.publisher: Final = Publisher(self._draw, kept)
        self.index: Final = PrefixIndex()
        spec = SourceSpec(instance=HOLDER.instance, context=CONTEXT)
        self.feed: Final = StreamFeed(spec, self.index, can_replay=True, held_max=64)
        self._late: list[tuple[int, bytes]] = []
        self._asked: int | None = None

    def step(self, calm: bool = False) -> None:
        """Publishes one batch and lets the network do its worst, or nothing when it is calm."""
        chances, draw = self._chances, self._draw
        if not calm and draw.random() < chances.restart:
            self.publisher.restart()
            self._late.clear()
        message = self.publisher.publish()
        chance = 1.0 if calm else draw.random()
        chance -= chances.lost
        if chance < 0:
            return
        chance -= chances.late
        if chance < 0:
            self._late.append(message)
            return
        chance -= chances.garbage
        if chance < 0:
            self._deliver(message[0], draw.randbytes(9))
            return
        self._deliver(*message)
        if chance - chances.doubled < 0:
            self._deliver(*message)
        if self._late and draw.random() < 0.3:
            self._deliver(*self._late.pop(draw.randrange(len(self._late))))
        if self._asked is not None and (calm or draw.random() < 0.3):
            self._replay()

    def _deliver(self, number: int, payload: bytes) -> None:
        asked = self.feed.live(number, payload)
        self._asked = asked if asked is not None else self._asked

    def _replay(self) -> None:
        while self._asked is not None:
            start, self._asked = self._asked, None
            kept = self.publisher.kept
            first = max(0, start - kept[0][0]) if kept else 0
            for number, payload in [kept[at] for at in range(first, len(kept))]:
                if self._draw.random() >= self._chances.replay_lost:
                    asked = self.feed.replayed(number, payload)
                    self._asked = asked if asked is not None else self._asked
        self.feed.replay_ended()

    def known(self) -> set[int]:
        """What the index holds."""
        return {block for block in range(1, BLOCKS) if self.index.holds(CONTEXT, HOLDER, block)}

    def settle(self) -> None:
        """Calm messages until no gap is open."""
        for _ in range(200):
            self.step(calm=True)
            if not self.feed.is_suspect:
                return


def run(events: int, seed: int, *, exact: bool) -> dict[str, Any]:
    """One world until so many events were published; what it came to, and how often a rule was broken."""
    if exact:
        world = World(seed, kept=512, chances=Chances())
    else:
        world = World(seed, kept=8, chances=Chances(restart=0.002, replay_lost=0.03))
    broken = looks = steps = 0
    first_kib = 0
    began = time.monotonic()
    while world.publisher.events < events:
        world.step()
        steps += 1
        if steps % LOOK_EVERY == 0:
            world.settle()
            known, true = world.known(), world.publisher.blocks
            broken += world.feed.is_suspect or not (known == true if exact else known <= true)
            looks += 1
            if not first_kib and world.publisher.events > events // 10:
                first_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    world.index.check()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - first_kib
    counters = world.feed.counters
    return {
        "events": world.publisher.events,
        "messages": counters.messages,
        "unreadable": counters.unreadable,
        "duplicates": world.feed.duplicates,
        "replays": counters.replays_asked,
        "lost": counters.lost,
        "restarts": counters.restarts,
        "looks": looks,
        "broken": broken + (exact and counters.lost > 0) + (grown > GROWTH_KIB_MAX),
        "grown_kib": grown,
        "seconds": time.monotonic() - began,
    }


@click.command(help=__doc__)
@click.option("--events", type=click.IntRange(1_000), default=10_000_000, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
def main(events: int, seed: int, as_json: bool) -> None:
    """The command; its help is this module's own docstring."""
    found = {
        "whole replays": run(events // 2, seed, exact=True),
        "short replays, restarts": run(events // 2, seed + 1, exact=False),
    }
    if as_json:
        click.echo(json.dumps(found))
    else:
        for name, report in found.items():
            facts = ", ".join(f"{field} {value:.0f}" for field, value in report.items())
            click.echo(f"{name}: {facts}")
    sys.exit(1 if any(report["broken"] for report in found.values()) else 0)


if __name__ == "__main__":
    main()
