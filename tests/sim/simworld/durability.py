"""Invariant 3.

What was acknowledged is still there, or the journal and the deaths of nodes say why it is not.

An object may be gone because it was evicted, because every place that it still had was on a node that died,
or (async durability) because its leader was lost before its fact was in the journal, soon after the reply.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moonpool.bench.chaos_history import PutRecord
from moonpool.store.facts import Object, ObjectsGone, PlaceAdded, PlaceGone, Segment, decode_group
from moonpool.store.records import Reason
from simworld.journal_writer import TIMEOUT_MS
from simworld.loop import MS

if TYPE_CHECKING:
    from simworld.world import World

#: What a reply and an append may take on their way.
SLACK_MS = 300


@dataclass(slots=True)
class Life:
    """An object as the journal tells it. `reason`: why it ended, if it did."""

    segments: set[int] = field(default_factory=set)
    reason: Reason | None = None


class Journaled:
    """All lives in a journal."""

    def __init__(self, world: World) -> None:
        self.lives: dict[int, Life] = {}
        self.owner: dict[int, str] = {}
        for group in world.disk.written.groups:
            for fact in decode_group(group.payload).facts:
                self._take(fact)

    def _take(self, fact: object) -> None:
        if isinstance(fact, Object):
            self.lives[fact.object_id] = Life({place.segment for place in fact.places})
            if fact.replaced:
                self.lives[fact.replaced].reason = Reason.REPLACED
        elif isinstance(fact, ObjectsGone):
            for object_id, _ in fact.objects:
                self.lives.setdefault(object_id, Life()).reason = Reason(fact.reason)
        elif isinstance(fact, PlaceGone):
            self.lives[fact.object_id].segments.discard(fact.segment_id)
        elif isinstance(fact, PlaceAdded):
            self.lives[fact.object_id].segments.add(fact.place.segment)
        elif isinstance(fact, Segment):
            self.owner[fact.segment_id] = fact.name


def why_gone(world: World, journaled: Journaled, record: PutRecord) -> str:
    """What explains that a stored put is not there; empty when nothing does."""
    object_id = world.watch.object_ids[record.tag]
    life = journaled.lives.get(object_id)
    if life is None:
        return "lost with its leader" if _went_with_leader(world, record) else ""
    if life.reason in (Reason.EVICTED, Reason.REPLACED):
        # A put may replace an object that nobody sees, since its node is dead.
        return life.reason.name.lower()
    alive = {segment.id for node in world.nodes.values() for segment in node.core.segments}
    return "" if life.segments & alive else "its nodes died"


def _went_with_leader(world: World, record: PutRecord) -> bool:
    """Whether its fact waited for the journal when the term ended: until Redis is known to be away."""
    if world.options.fault.loses_journal:
        return True
    assert record.ended is not None
    return any(
        since - SLACK_MS * MS <= record.ended <= since + (TIMEOUT_MS + SLACK_MS) * MS
        for since in world.watch.unconfirmed_since()
    )
