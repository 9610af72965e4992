"""How nodes come: joins, and their acknowledgements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, final

from moonpool.events import Tier
from moonpool.store import facts
from moonpool.store.call import HELD, Call
from moonpool.store.effects import EffectQueue
from moonpool.store.errors import BadParams, NotReady, Overloaded
from moonpool.store.holds import Needs
from moonpool.store.leader_core import LeaderCore
from moonpool.store.leader_nodes import COMING, Nodes
from moonpool.store.outputs import Bind, Reply
from moonpool.store.params import array, name_text, number, raw
from moonpool.store.records import (
    EPOCH_MAX,
    EPOCH_TOLD_MAX,
    PAGE_BYTES,
    SEGMENT_BYTES_MAX,
    SLOTS_MAX,
    Kind,
    NodeRecord,
    NodeState,
    SegmentRecord,
)
from moonpool.store.sessions import Join
from moonpool.units import U32_MAX, U64_MAX

_SEGMENTS_OF_NODE_MAX: Final = 1_024
_GRANT_KEY_BYTES: Final = 16
#: Config fields that nodes are told.
_SETTINGS: Final = (
    "beat_ms",
    "suspect_ms",
    "dead_ms",
    "lease_ms_max",
    "location_lease_ms",
    "put_ms",
    "put_bytes_per_ms",
    "report_page_bytes",
)


class SegmentOffer(NamedTuple):
    """A segment as its node offers it in `node_join`."""

    name: str
    generation: int
    capacity: int
    slots: int
    tier: int
    kind: int
    location: str
    data: int
    directory: int


def read_offer(value: Any) -> SegmentOffer:
    """The segment in a map; raises `BadParams`."""
    if not isinstance(value, dict) or set(value) != set(SegmentOffer._fields):
        raise BadParams(f"a segment is a map of {', '.join(SegmentOffer._fields)}", field="segments")
    capacity = number(value["capacity"], "capacity", PAGE_BYTES, SEGMENT_BYTES_MAX)
    if capacity % PAGE_BYTES:
        raise BadParams("a segment's capacity must be a multiple of 4096", field="capacity")
    return SegmentOffer(
        name_text(value["name"], "name"),
        number(value["generation"], "generation", 0, U64_MAX),
        capacity,
        number(value["slots"], "slots", 1, min(SLOTS_MAX, capacity)),
        number(value["tier"], "tier", 0, max(Tier)),
        number(value["kind"], "kind", 1, max(Kind)),
        name_text(value["location"], "location", may_be_empty=True),
        number(value["data"], "data", 0, U64_MAX),
        number(value["directory"], "directory", 0, U64_MAX),
    )


@final
class Joins:
    """The methods that nodes call to come and to acknowledge."""

    def __init__(self, core: LeaderCore, nodes: Nodes) -> None:
        self._core = core
        self._nodes = nodes

    def node_join(self, call: Call) -> Any:
        """A node comes (back): gives it ids and a grant key; its reports follow."""
        core, params = self._core, call.params
        name, host = name_text(params[0], "name"), name_text(params[1], "host")
        instance = raw(params[2], "instance", 16)
        engine = name_text(params[3], "engine endpoint", may_be_empty=True)
        view = name_text(params[4], "view endpoint", may_be_empty=True)
        highest = number(params[5], "highest epoch", 0, EPOCH_MAX)
        offers = [read_offer(each) for each in array(params[6], "segments", _SEGMENTS_OF_NODE_MAX)]
        if len({each.name for each in offers}) != len(offers):
            raise BadParams("two segments of one node have the same name", field="segments")
        if call.session.client is not None:
            raise BadParams("this connection belongs to a client; a node needs one of its own")
        core.check_may_change()
        old = next((each for each in core.state.nodes.values() if each.name == name), None)
        if highest > core.counters.epoch or (old is None and highest == core.counters.epoch):
            if highest > EPOCH_TOLD_MAX:
                raise BadParams(
                    f"no master leads above epoch {highest} on a node's word", field="highest epoch"
                )
            core.out.epoch_wanted = max(core.out.epoch_wanted, highest + 1)
            raise NotReady(f"the node has seen epoch {highest}; this master raises its own above it first")
        if old is not None and old.instance != instance:
            self._check_silent(old)
        self._check_bounds(old, offers)
        if old is None:
            self._meet(highest)
        if old is not None and old.instance != instance:
            self._nodes.node_gone(old)
            old = None
        record = NodeRecord(
            old.node_id if old else core.state.next_node_id,
            name,
            host,
            instance,
            engine,
            view,
            NodeState.JOINING if old is None or old.state == NodeState.DEAD else old.state,
        )
        if record != old:
            core.commit(facts.Node(*record))
        ids = self._take_segments(record, offers)
        join = self._begin_join(call, record.node_id, ids)
        settings = self._settings()
        result = [core.counters.epoch, record.node_id, ids, join.grant_key, settings]
        needs = Needs(core.counters.last_fact)
        core.hold(Reply(call.connection, call.message_id, None, result), needs)
        return HELD

    def _meet(self, highest: int) -> None:
        """A node that this journal does not know: has it been in a pool before, whose journal was lost?

        Then leases and locations that nobody here knows of may still be trusted, as after a takeover.
        """
        core = self._core
        if highest:
            if core.fresh:
                core.rebuilding = True
                self._nodes.hold_back()
            core.free_after_ms = max(core.free_after_ms, core.now_ms + core.config.lease_ms_max)
            core.silent_until_ms = max(core.silent_until_ms, core.now_ms + core.config.location_lease_ms)
        elif core.fresh and not core.rebuilding:
            core.silent_until_ms = 0

    def _check_silent(self, old: NodeRecord) -> None:
        """A name is another process's only when the one that had it has ended, or says nothing any more."""
        core = self._core
        silent_ms = core.now_ms - self._nodes.heard_ms[old.node_id]
        if old.node_id in core.joins and silent_ms < core.config.suspect_ms:
            raise NotReady(f"a node named {old.name!r} is in the pool and lives; give this one another name")

    def _check_bounds(self, old: NodeRecord | None, offers: Sequence[SegmentOffer]) -> None:
        core = self._core
        if old is None and len(core.state.nodes) >= core.config.nodes_max:
            raise Overloaded("too many nodes", field="nodes_max", limit=core.config.nodes_max)
        if len(core.state.segments) + len(offers) > core.config.segments_max:
            raise Overloaded("too many segments", field="segments_max", limit=core.config.segments_max)

    def _settings(self) -> dict[str, int]:
        config = self._core.config
        return {name: getattr(config, name) for name in _SETTINGS}

    def _take_segments(self, node: NodeRecord, offers: Sequence[SegmentOffer]) -> list[int]:
        core = self._core
        kept = {each.name: each for each in core.state.segments.values() if each.node_id == node.node_id}
        offered = {each.name: each for each in offers}
        for name, record in list(kept.items()):
            offer = offered.get(name)
            if offer is None or _offer_of(record) != offer:
                self._nodes.segment_gone(record.segment_id)
                del kept[name]
        ids = []
        for offer in offers:
            known = kept.get(offer.name)
            if known is None:
                segment_id = core.state.next_segment_id
                core.commit(facts.Segment(segment_id, node.node_id, *offer, NodeState.JOINING))
                self._nodes.add_space(core.state.segment(segment_id))
            else:
                segment_id = known.segment_id
                core.spaces[segment_id].host = node.host
                if known.state == NodeState.DEAD:
                    self._nodes.set_segment(known, NodeState.JOINING)
            ids.append(segment_id)
        return ids

    def _begin_join(self, call: Call, node_id: int, ids: Sequence[int]) -> Join:
        core = self._core
        old = core.joins.get(node_id)
        if old is not None:
            self._nodes.end_join(old, close=old.connection != call.connection)
        before = call.session.join
        if before is not None:
            self._nodes.end_join(before, close=False)
        core.last_join += 1
        key = core.random(_GRANT_KEY_BYTES)
        join = Join(core.last_join, node_id, call.connection, key, EffectQueue(), core.now_ms)
        join.clock_at_ms = core.now_ms
        join.reporting = dict.fromkeys(ids, 0)
        core.joins[node_id] = join
        core.acked[join.number] = 0
        call.session.join = join
        self._nodes.heard_ms[node_id] = core.now_ms
        self._nodes.dead_since_ms.pop(node_id, None)
        self._nodes.fenced.difference_update(ids)
        for segment_id in ids:
            for entry in core.spaces[segment_id].quarantine.values():
                entry.effect = 0
        core.out.binds.append(Bind(call.connection, 0, 0))
        core.reschedule()
        if not ids:
            self._nodes.reports_complete(join)
        return join

    def node_ack(self, call: Call) -> list[Any]:
        """What a node has done: effects up to a number, extents nobody uses any more."""
        core, join = self._core, call.join
        applied = number(call.params[0], "effect number", 0, U64_MAX)
        clock_ms = number(call.params[1], "clock", 0, U64_MAX)
        released = []
        for row in array(call.params[2], "released", core.config.effects_max):
            if not isinstance(row, list | tuple) or len(row) != 2:
                raise BadParams("a released extent is [segment, slot]", field="released")
            released.append((number(row[0], "segment", 0, U32_MAX), number(row[1], "slot", 0, U32_MAX)))
        if not join.effects.ack(applied, core.now_ms):
            raise BadParams(f"no effect {applied} was sent in this join", field="effect number")
        if join.number in core.acked:
            core.acked[join.number] = join.effects.acked
        join.last_ack_ms = join.clock_at_ms = self._nodes.heard_ms[join.node_id] = core.now_ms
        join.clock_ms = clock_ms
        for segment_id, slot in released:
            self._nodes.released(join, segment_id, slot)
        node = core.state.nodes[join.node_id]
        if node.state in COMING:
            self._nodes.activate()
        return [core.counters.epoch]

    def node_leave(self, call: Call) -> list[Any]:
        """A node ends: what it holds is gone, and it will not come back as it was."""
        join = call.join
        # The connection is left to the node: closing it here would take the answer away.
        self._nodes.end_join(join, close=False)
        self._nodes.node_gone(self._core.state.nodes[join.node_id])
        return [self._core.counters.epoch]


def _offer_of(record: SegmentRecord) -> SegmentOffer:
    return SegmentOffer(
        record.name,
        record.generation,
        record.capacity,
        record.slots,
        record.tier,
        record.kind,
        record.location,
        record.data_handle,
        record.directory_handle,
    )
