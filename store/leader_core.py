"""What all parts of a leader share: the state, the soft state beside it, and the few ways to change them.

Order of things: a handler validates everything first, then decides; `commit` encodes a fact, numbers it and
applies it at once. Effects and replies that depend on it wait. `finish`, at the end of every call from the
shell, lets out whatever may leave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from moonpool.errors import InternalError, MoonpoolError
from moonpool.events import ObjectsRemoved, ObjectsStored, Tier
from moonpool.native.table.hot_state import HotCounters
from moonpool.store import facts
from moonpool.store.counters import PUT_KEY_BYTES, Counters
from moonpool.store.effects import FENCE, RETIRE, encode_effect, encode_push
from moonpool.store.errors import JournalUnavailable, Overloaded, wire_error
from moonpool.store.facts import Fact, encode_fact
from moonpool.store.holds import Holds, Needs
from moonpool.store.master_config import MasterConfig
from moonpool.store.outputs import Outputs, Push, Reply
from moonpool.store.placement import weigh
from moonpool.store.quarantine import Quarantined, Releases
from moonpool.store.records import ANY_SLOT, NodeState, Place, StoredObject, extent_bytes
from moonpool.store.segment_space import SegmentSpace
from moonpool.store.sessions import Client, Join, Session
from moonpool.store.state import State
from moonpool.store.table_factory import Tables

#: Order in which readers are told of places; a segment in another state is not seen.
_RANKS: Final = {NodeState.ACTIVE: 0, NodeState.SUSPECT: 1, NodeState.LEAVING: 1}
_U32: Final = 0xFFFFFFFF
#: Bytes of one fact about objects that go, and of an object id with what goes around it.
GONE_BYTES_MAX: Final = 256 << 10
_PAIR_BYTES: Final = 16
#: A segment that is full still gets this share of its capacity as room, so that eviction is spread.
_FULL_SHARE: Final = 50


class LeaderCore:
    """Shared by the parts of one leader; see `Leader`. `random(n)` gives n unguessable bytes."""

    def __init__(
        self, config: MasterConfig, tables: Tables, state: State, epoch: int, random: Callable[[int], bytes]
    ) -> None:
        self.config = config
        self.tables = tables
        self.state = state
        self.objects = state.objects
        self.puts = tables.open_puts
        self.random = random
        self.counters: Counters | HotCounters = Counters(epoch, state.sequence, random(PUT_KEY_BYTES))
        self.now_ms = state.now_ms
        self.durable = state.sequence
        self.out = Outputs(state.sequence + 1)
        self.holds = Holds()
        self.releases = Releases()
        self.spaces: dict[int, SegmentSpace] = {}
        self.joins: dict[int, Join] = {}
        #: Highest acknowledged effect of each live join, by the join's number.
        self.acked: dict[int, int] = {}
        self.last_join = 0
        #: Joins with effects that wait to leave, by number.
        self.busy: dict[int, Join] = {}
        self.sessions: dict[int, Session] = {}
        self.clients: dict[int, Client] = {}
        #: Rank of each segment that readers are told of.
        self.ranks: dict[int, int] = {}
        #: Segments that take puts without a policy, as `placement.weigh` spreads them.
        self.schedule: list[int] = []
        self.largest_segment = 0
        self.journal_away = False
        #: Since when some fact has waited for the journal without any that was confirmed; 0: none waits.
        self.behind_since_ms = 0
        #: The journal's queue, or the journal itself, is at its bound.
        self.journal_full = False
        #: Nothing that existed before this leader is freed before; and nothing of removals is said before.
        self.free_after_ms = 0
        self.silent_until_ms = 0
        #: The journal was empty when this leader began; nodes came that another journal knew.
        self.fresh = state.sequence == 0
        self.rebuilding = False
        #: Space became free, or a window opened: puts that wait should look again.
        self.space_came = False
        self.put_waiters: list[Callable[[], None]] = []

    # Facts and replies

    def commit(self, fact: Fact) -> int:
        """Makes a fact: numbered, applied, on its way to the journal. Returns its number."""
        self.out.facts.append(encode_fact(fact))
        self.counters.last_fact += 1
        self.state.apply(fact)
        if isinstance(fact, facts.Segment | facts.SegmentState):
            self.segments_changed()
        return self.counters.last_fact

    def commit_gone(self, reason: int, tenant: int, objects: Sequence[tuple[int, bytes]]) -> None:
        """Makes the facts of objects that go together, each of a bounded size."""
        start, size = 0, 0
        for at, (_, key) in enumerate(objects):
            size += len(key) + _PAIR_BYTES
            if size > GONE_BYTES_MAX:
                self.commit(facts.ObjectsGone(reason, tenant, tuple(objects[start:at])))
                start, size = at, len(key) + _PAIR_BYTES
        if start < len(objects):
            self.commit(facts.ObjectsGone(reason, tenant, tuple(objects[start:])))

    @property
    def puts_wait(self) -> bool:
        """True when a put of a new key must not reply before its fact is durable."""
        since_ms = self.behind_since_ms
        slow = bool(since_ms) and self.now_ms - since_ms > self.config.async_ms_max
        return self.config.durability == "sync" or self.journal_away or slow

    @property
    def journal_behind(self) -> bool:
        """True when as many facts wait for the journal as may."""
        waiting = self.counters.last_fact - self.durable
        return self.journal_full or waiting >= self.config.facts_waiting_max

    def check_may_change(self) -> None:
        """Raises where no fact may be made now: too many wait for the journal."""
        if self.journal_behind:
            raise JournalUnavailable(
                "the journal is behind by as many facts as may wait; nothing was changed, try again"
            )
        if len(self.holds) >= self.config.holds_max:
            raise Overloaded(field="holds_max", limit=self.config.holds_max)

    def reply(self, connection: int, message_id: int, result: Any) -> None:
        """Answers at once."""
        self.out.replies.append(Reply(connection, message_id, None, result))

    def fail(self, connection: int, message_id: int, error: MoonpoolError) -> None:
        """Answers with an error at once."""
        self.out.replies.append(Reply(connection, message_id, wire_error(error), None))

    def hold(self, reply: Reply | None, needs: Needs, keys: tuple[tuple[int, bytes], ...] = ()) -> None:
        """Answers when the needs have come, or says that the journal did not answer in time.

        Whoever ends an object or a place without a reply holds None for its key, so that removals and
        replacements of that key wait until nobody reads it there.
        """
        self.holds.add(reply, needs, self.now_ms + self.config.journal_wait_ms, keys)

    # Extents that are given back

    def retire(self, stored: StoredObject, place: Place, reason: int, lease_until_ms: int) -> Needs:
        """An object lost a place: its extent is quarantined and the node told. What to wait for."""
        entry = Quarantined(
            place.segment,
            place.slot,
            place.offset,
            stored.size,
            max(lease_until_ms, self.free_after_ms),
            object_id=stored.object_id,
            reason=reason,
        )
        told = {} if self._is_anothers(entry) else self._quarantine(entry)
        until_ms = self.now_ms + self.config.location_lease_ms
        not_before_ms = self.silent_until_ms
        if not told:
            # A node that is away stamps nothing: who trusts a location it was told may do so to the end.
            space = self.spaces.get(place.segment)
            unseen_ms = space.unseen_ms if space is not None else 0
            not_before_ms = max(not_before_ms, (unseen_ms or self.now_ms) + self.config.location_lease_ms)
        return Needs(self.counters.last_fact, told, until_ms, not_before_ms)

    def fence(self, place: Place, size: int, put_id: int, client_id: int, deadline_ms: int) -> None:
        """A put lost an extent that its writer may still write: it is quarantined until the node says no."""
        client = self.clients.get(client_id)
        instance = client.instance if client is not None else bytes(16)
        self._quarantine(
            Quarantined(
                place.segment,
                place.slot,
                place.offset,
                size,
                0,
                put_id=put_id,
                instance=instance,
                deadline_ms=deadline_ms,
            )
        )

    def _is_anothers(self, entry: Quarantined) -> bool:
        """True for a place from a journal that lost its end, when the node says that its slot has another."""
        space = self.spaces.get(entry.segment_id)
        join = self.joins.get(space.node_id) if space is not None else None
        return join is not None and join.slot_is_anothers(entry.segment_id, entry.slot, entry.object_id)

    def _quarantine(self, entry: Quarantined) -> dict[int, int]:
        space = self.spaces.get(entry.segment_id)
        if space is None:
            return {}
        if entry.slot in space.quarantine:
            raise InternalError(f"slot {entry.slot} of segment {entry.segment_id} is quarantined twice")
        space.quarantine[entry.slot] = entry
        space.quarantined_bytes += extent_bytes(entry.size)
        join = self.joins.get(space.node_id)
        if join is None:
            return {}
        self.tell(join, entry)
        return {join.number: entry.effect}

    def tell(self, join: Join, entry: Quarantined) -> None:
        """Queues the effect that asks the node to release a quarantined extent."""
        if entry.object_id:
            effect: tuple[Any, ...] = (
                RETIRE,
                entry.segment_id,
                entry.slot,
                entry.object_id,
                entry.reason,
            )
        else:
            # The node's clock was estimated when the put began and is now; an estimate is behind by the time
            # that an acknowledgement travels, which is less than suspect_ms.
            left_ms = max(0, entry.deadline_ms - self.now_ms) + self.config.suspect_ms
            until = join.node_clock(self.now_ms) + left_ms & _U32
            length = extent_bytes(entry.size)
            effect = (
                FENCE,
                entry.segment_id,
                entry.slot,
                entry.offset,
                length,
                entry.instance,
                entry.put_id,
                until,
            )
        entry.effect = self.send(join, effect)

    def send(self, join: Join, effect: tuple[Any, ...]) -> int:
        """Queues an effect, to leave when all facts up to now are durable; returns its number."""
        self.busy[join.number] = join
        return join.effects.add(self.counters.last_fact, encode_effect(effect))

    def fence_segment(self, join: Join, space: SegmentSpace) -> None:
        """Asks the node when nobody from before its join can write the segment any more."""
        until = join.node_clock(self.now_ms) & _U32
        self.send(join, (FENCE, space.segment_id, ANY_SLOT, 0, space.capacity, bytes(16), 0, until))

    def free_quarantined(self, entry: Quarantined) -> None:
        """Ends an entry's quarantine."""
        space = self.spaces[entry.segment_id]
        del space.quarantine[entry.slot]
        space.quarantined_bytes -= extent_bytes(entry.size)
        space.free(entry.offset, entry.size, entry.slot)
        self.space_came = True

    # Segments

    def segments_changed(self) -> None:
        """Brings what is derived from the segments' states up to date."""
        self.ranks = {
            each.segment_id: _RANKS[NodeState(each.state)]
            for each in self.state.segments.values()
            if each.state in _RANKS
        }
        for segment_id, space in self.spaces.items():
            if segment_id in self.ranks:
                space.unseen_ms = 0
            elif not space.unseen_ms:
                space.unseen_ms = max(1, self.now_ms)
        self.reschedule()

    def takes_puts(self, space: SegmentSpace) -> bool:
        """True for a segment that is active and whose node is here, has reported and keeps up."""
        record = self.state.segments.get(space.segment_id)
        join = self.joins.get(space.node_id)
        return (
            record is not None
            and record.state == NodeState.ACTIVE
            and join is not None
            and not join.reporting
            and len(join.effects) < self.config.effects_max // 2
        )

    def reschedule(self) -> None:
        """Makes the schedule anew from the segments that take puts and their room."""
        able = [self.spaces[each] for each in sorted(self.spaces) if self.takes_puts(self.spaces[each])]
        rooms = [
            (
                space.segment_id,
                space.capacity - space.added + space.extents.free_bytes() + space.capacity // _FULL_SHARE,
            )
            for space in able
        ]
        self.schedule = weigh(rooms)
        self.largest_segment = max((space.capacity for space in able), default=0)

    def is_seen(self, stored: StoredObject) -> bool:
        """True when readers may be told of the object."""
        ranks = self.ranks
        return any(place.segment in ranks for place in stored.places)

    # Events for the publisher

    def stored_events(self, tenant: int, stored: list[tuple[bytes, tuple[Place, ...]]]) -> None:
        """Tells the publisher of keys that have new places."""
        if self.config.events and stored:
            for (node, tier), keys in self._by_holder(stored).items():
                name = self.state.tenants[tenant].name
                self.out.events.append(ObjectsStored(name, tuple(keys), node, tier))

    def removed_events(self, tenant: int, removed: list[tuple[bytes, tuple[Place, ...]]]) -> None:
        """Tells the publisher of keys that lost places."""
        if self.config.events and removed:
            for (node, tier), keys in self._by_holder(removed).items():
                name = self.state.tenants[tenant].name
                self.out.events.append(ObjectsRemoved(name, tuple(keys), node, tier))

    def _by_holder(
        self, changes: list[tuple[bytes, tuple[Place, ...]]]
    ) -> dict[tuple[str, Tier], list[bytes]]:
        found: dict[tuple[str, Tier], list[bytes]] = {}
        for key, places in changes:
            for place in places:
                record = self.state.segments.get(place.segment)
                node = self.state.nodes.get(record.node_id) if record else None
                if record and node:
                    found.setdefault((node.name, Tier(record.tier)), []).append(key)
        return found

    # What may leave

    def finish(self) -> None:
        """Lets out replies and effects that may leave; called at the end of each call from the shell."""
        if self.counters.last_fact == self.durable:
            self.behind_since_ms = 0
        elif not self.behind_since_ms:
            self.behind_since_ms = max(1, self.now_ms)
        for entry in self.releases.due(self.now_ms):
            self.free_quarantined(entry)
        if self.space_came:
            self.space_came = False
            for look_again in self.put_waiters:
                look_again()
        self.out.replies += self.holds.due(self.durable, self.acked, self.now_ms)
        for join in list(self.busy.values()):
            self._push(join)

    def _push(self, join: Join) -> None:
        config = self.config
        if self.joins.get(join.node_id) is not join or not join.effects.waiting:
            del self.busy[join.number]
            return
        while join.effects.open:
            first, effects = join.effects.take(
                self.durable, self.now_ms, config.push_effects_max, config.push_bytes_max
            )
            if not effects:
                return
            params = encode_push(self.counters.epoch, first, effects)
            self.out.pushes.append(Push(join.connection, "effects", params))

    def events_of_gone(self, segment_id: int) -> None:
        """Tells the publisher of everything on a segment that is about to go, as far as one page goes."""
        if not self.config.events:
            return
        after = -1
        while page := self.objects.places_on(segment_id, after, self.config.batch_keys_max):
            after = page[-1]
            by_tenant: dict[int, list[tuple[bytes, tuple[Place, ...]]]] = {}
            for index in page:
                stored = self.objects.at(index)
                places = tuple(place for place in stored.places if place.segment == segment_id)
                by_tenant.setdefault(stored.tenant, []).append((stored.key, places))
            for tenant, removed in by_tenant.items():
                self.removed_events(tenant, removed)
