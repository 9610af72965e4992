"""Lives of nodes: reported, active, silent, dead, gone. See "Node life" in docs/store/architecture.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, final

from moonpool.errors import InternalError
from moonpool.store import facts
from moonpool.store.effects import RESET
from moonpool.store.leader_core import LeaderCore
from moonpool.store.leader_windows import Room
from moonpool.store.records import (
    ANY_SLOT,
    NodeRecord,
    NodeState,
    SegmentRecord,
)
from moonpool.store.segment_space import SegmentSpace
from moonpool.store.sessions import Join

#: States from which a node that is here and has reported becomes active.
COMING: Final = (NodeState.JOINING, NodeState.SUSPECT)
#: What becomes of a segment's state when its node's changes; of other states nothing does.
_FOLLOWS: Final = {
    NodeState.ACTIVE: frozenset({NodeState.SUSPECT}),
    NodeState.SUSPECT: frozenset({NodeState.ACTIVE}),
    NodeState.DEAD: frozenset({NodeState.JOINING, NodeState.ACTIVE, NodeState.SUSPECT, NodeState.LEAVING}),
}


@final
class Nodes:
    """Joins and the lives of nodes. Each of `going` is called with its id before a segment's places go."""

    def __init__(
        self, core: LeaderCore, room: Room, going: Sequence[Callable[[int], None]], *, doubtful: bool
    ) -> None:
        self._core = core
        self._room = room
        self._segment_going = going
        #: When each node was heard last; later than now for those that have time to come back.
        self.heard_ms: dict[int, int] = {}
        self.dead_since_ms: dict[int, int] = {}
        #: Segments that have reported to this leader.
        self.reported: set[int] = set()
        #: Segments whose fence came back; they are resolved when old leases have ended.
        self.fenced: set[int] = set()
        #: Of a journal that may lack its end: nodes whose reports may still say that something was removed.
        #: Until they came, or had time to, no node becomes active. Of a lost journal nobody knows the nodes.
        self._awaited: set[int] = set()
        self._held_back = doubtful
        self._await_until_ms = core.now_ms + core.config.rejoin_ms
        for record in core.state.nodes.values():
            self.heard_ms[record.node_id] = core.now_ms + core.config.rejoin_ms
            if record.state == NodeState.DEAD:
                self.dead_since_ms[record.node_id] = core.now_ms
            elif doubtful:
                self._awaited.add(record.node_id)
        for segment in core.state.segments.values():
            self.add_space(segment)

    def add_space(self, record: SegmentRecord) -> None:
        """Makes the space of a segment."""
        core = self._core
        host = core.state.nodes[record.node_id].host
        extents, slots = core.tables.extents(record.capacity), core.tables.slots(record.slots)
        core.spaces[record.segment_id] = SegmentSpace(record, host, extents, slots)

    def end_join(self, join: Join, *, close: bool) -> None:
        """The join is over: nothing more is sent or believed. The node may join again."""
        core = self._core
        if core.joins.get(join.node_id) is join:
            del core.joins[join.node_id]
        core.acked.pop(join.number, None)
        core.holds.drop_join(join.number)
        session = core.sessions.get(join.connection)
        if session is not None and session.join is join:
            session.join = None
        if close:
            core.out.closes.append(join.connection)
        core.reschedule()

    def hold_back(self) -> None:
        """Objects come back from directories: which is the newest of a key shows when all nodes had time."""
        if self._core.now_ms < self._await_until_ms:
            self._held_back = True

    def reports_complete(self, join: Join) -> None:
        """All segments have reported: effects may leave, the node is active."""
        core = self._core
        for space in [each for each in core.spaces.values() if each.node_id == join.node_id]:
            for entry in list(space.quarantine.values()):
                if not entry.effect and not entry.released:
                    core.tell(join, entry)
            if not space.resolved:
                core.fence_segment(join, space)
            self.reported.add(space.segment_id)
        join.effects.open = True
        core.busy[join.number] = join
        self._awaited.discard(join.node_id)
        self.activate()

    def activate(self) -> None:
        """Makes the nodes active that are here and have reported."""
        core = self._core
        waits = self._awaited or core.rebuilding
        if self._held_back and waits and core.now_ms < self._await_until_ms:
            return
        self._held_back = False
        for join in core.joins.values():
            silent_ms = core.now_ms - self.heard_ms[join.node_id]
            if join.reporting or silent_ms >= core.config.suspect_ms:
                continue
            for record in list(core.state.segments.values()):
                if record.node_id == join.node_id and record.state in COMING:
                    self.set_segment(record, NodeState.ACTIVE)
            if core.state.nodes[join.node_id].state in COMING:
                core.commit(facts.NodeStateSet(join.node_id, NodeState.ACTIVE))
        core.reschedule()
        self._room.open_ahead()
        core.space_came = True

    def released(self, join: Join, segment_id: int, slot: int) -> None:
        """The node says that nobody uses an extent (or, with `ANY_SLOT`, anything from before) any more."""
        core = self._core
        space = core.spaces.get(segment_id)
        if space is None or space.node_id != join.node_id:
            return
        if slot == ANY_SLOT:
            if not space.resolved and not join.reporting:
                self.fenced.add(segment_id)
                self.resolve_fenced()
            return
        entry = space.quarantine.get(slot)
        if entry is None or entry.released or not 0 < entry.effect <= join.effects.acked:
            return
        core.releases.add(entry)

    def resolve_fenced(self) -> None:
        """Frees what nobody explains on segments whose fence came back, once old leases have ended."""
        core = self._core
        if not self.fenced or core.now_ms < core.free_after_ms:
            return
        for segment_id in sorted(self.fenced):
            space = core.spaces[segment_id]
            try:
                space.resolve(core.objects.packed_places(segment_id))
            except InternalError:
                # What the directory reported overlaps: nothing of it can be believed.
                self.reset(segment_id)
        self.fenced.clear()
        core.reschedule()
        core.space_came = True

    def reset(self, segment_id: int) -> None:
        """Gives a segment up and tells its node to forget it."""
        core = self._core
        join = core.joins.get(core.spaces[segment_id].node_id)
        self.segment_gone(segment_id)
        if join is not None:
            core.send(join, (RESET, segment_id))
            if not join.reporting and not join.effects.open:
                self.reports_complete(join)

    # Silence and death

    def watch(self) -> None:
        """Looks how long each node has been silent, and takes the steps that follow."""
        core, config = self._core, self._core.config
        for node in list(core.state.nodes.values()):
            silent_ms = core.now_ms - self.heard_ms[node.node_id]
            if node.state == NodeState.DEAD:
                if core.now_ms - self.dead_since_ms[node.node_id] >= config.gone_ms:
                    self.node_gone(node)
            elif silent_ms >= config.dead_ms:
                self._set_node(node, NodeState.DEAD)
                self.dead_since_ms[node.node_id] = core.now_ms
                self._awaited.discard(node.node_id)
                join = core.joins.get(node.node_id)
                if join is not None:
                    self.end_join(join, close=True)
            elif silent_ms >= config.suspect_ms and node.state == NodeState.ACTIVE:
                self._set_node(node, NodeState.SUSPECT)
        if self._held_back:
            self.activate()
        for join in list(core.joins.values()):
            if join.effects.resend_after(core.now_ms, config.resend_ms):
                core.busy[join.number] = join
            if len(join.effects) > config.effects_max:
                self.end_join(join, close=True)

    def _set_node(self, node: NodeRecord, state: NodeState) -> None:
        core = self._core
        core.commit(facts.NodeStateSet(node.node_id, state))
        for segment in list(core.state.segments.values()):
            if segment.node_id == node.node_id and segment.state in _FOLLOWS[state]:
                self.set_segment(segment, state)

    def set_segment(self, record: SegmentRecord, state: NodeState) -> None:
        """A segment's state changes."""
        self._core.commit(facts.SegmentState(record.segment_id, state, record.generation))

    def node_gone(self, node: NodeRecord) -> None:
        """The node never comes back as it was: its segments go, and its places with them."""
        core = self._core
        join = core.joins.get(node.node_id)
        if join is not None:
            self.end_join(join, close=True)
        for segment in list(core.state.segments.values()):
            if segment.node_id == node.node_id:
                self.segment_gone(segment.segment_id)
        core.commit(facts.NodeStateSet(node.node_id, NodeState.GONE))
        self.heard_ms.pop(node.node_id, None)
        self._awaited.discard(node.node_id)
        self.dead_since_ms.pop(node.node_id, None)

    def segment_gone(self, segment_id: int) -> None:
        """Drops a segment and all places on it."""
        core = self._core
        record = core.state.segment(segment_id)
        for going in self._segment_going:
            going(segment_id)
        core.events_of_gone(segment_id)
        space = core.spaces.pop(segment_id)
        if core.objects.bytes_on(segment_id):
            # Nobody stamps its words: who maps the memory may trust a location to the end, so no removal
            # of a key that was there may be answered before (which keys they were is soon not known).
            unseen_ms = space.unseen_ms or core.now_ms
            core.silent_until_ms = max(core.silent_until_ms, unseen_ms + core.config.location_lease_ms)
        core.releases.drop_segment(segment_id)
        for join in core.joins.values():
            join.reporting.pop(segment_id, None)
            join.confirmed.pop(segment_id, None)
            join.adopted.pop(segment_id, None)
            join.passed_on.pop(segment_id, None)
        self.fenced.discard(segment_id)
        self.reported.discard(segment_id)
        core.commit(facts.SegmentState(segment_id, NodeState.GONE, record.generation))
