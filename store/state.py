"""The master's durable state: what all facts up to one sequence number add up to.

`apply` is deterministic and is the only way in. Leader and standby both run it: the leader at the moment it
decides, the standby when it reads the journal. Leases, recency, open puts and free space are not here.

An *unsettled* state (from a LEADER fact to the next SETTLED) remembers what ended as *graves*, so that a
directory that is reported later cannot bring it back; see docs/store/architecture.md, "What may be adopted".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, final

import msgpack  # type: ignore[import-untyped]

from moonpool.errors import InternalError
from moonpool.native.table.chains import xxh3_64
from moonpool.store import facts
from moonpool.store.errors import UnknownFact
from moonpool.store.facts import Fact, Group
from moonpool.store.records import (
    DEFAULT_TENANT_ID,
    SEEN_STATES,
    NodeRecord,
    NodeState,
    SegmentRecord,
    StoredObject,
    TenantRecord,
    epoch_of,
)
from moonpool.store.state_snapshot import read_chunks, write_chunks
from moonpool.store.tables import ObjectTable

#: Most graves; with more, nothing unknown is adopted until the state settles. The same on every master.
GRAVES_MAX: Final = 262_144
#: The key of a grave for all keys of a tenant.
EVERY_KEY: Final = b""
_PAGE: Final = 4_096


@final
class State:
    """Facts added up. `objects` must be empty; it belongs to the state from now on.

    `sequence` is the number of the last fact applied, `now_ms` the cluster time it came with. Ids are never
    given twice, so what is gone leaves its record and only the counters remain.
    """

    __slots__ = (
        "adopting",
        "endpoints",
        "epoch",
        "graves",
        "high",
        "leader_name",
        "next_node_id",
        "next_segment_id",
        "next_tenant_id",
        "nodes",
        "now_ms",
        "objects",
        "run",
        "segments",
        "segments_version",
        "sequence",
        "settled",
        "tenant_epochs",
        "tenants",
    )

    def __init__(self, objects: ObjectTable) -> None:
        self.objects = objects
        self.sequence = 0
        self.now_ms = 0
        self.epoch = 0
        #: Of the journal's first leader: whatever carries a lower one comes from a journal that was lost.
        #: The epoch in which each tenant was made: a journal that lost one may give its id to another.
        self.tenant_epochs: dict[int, int] = {}
        self.leader_name = ""
        self.endpoints: tuple[str, ...] = ()
        #: The run of the journal's server, as the leader knew it.
        self.run = ""
        self.nodes: dict[int, NodeRecord] = {}
        self.segments: dict[int, SegmentRecord] = {}
        default = TenantRecord(DEFAULT_TENANT_ID, "default", 0, b"")
        self.tenants: dict[int, TenantRecord] = {DEFAULT_TENANT_ID: default}
        self.next_node_id = 1
        self.next_segment_id = 1
        self.next_tenant_id = 1
        #: Changes whenever what `segments` answers does.
        self.segments_version = 1
        #: The highest object id of each epoch.
        self.high: dict[int, int] = {}
        self.graves: dict[tuple[int, bytes], int] = {}
        self.settled = True
        self.adopting = True

    def apply(self, fact: Fact) -> None:
        """Takes one fact in; `InternalError` for one that contradicts the state, which is then not usable."""
        self.sequence += 1
        _APPLIERS[type(fact)](self, fact)

    def apply_group(self, group: Group) -> None:
        """Takes in the facts of a group that follows; raises `UnknownFact` when it does not follow."""
        if group.first_sequence != self.sequence + 1:
            raise UnknownFact(
                f"the journal goes on with fact {group.first_sequence}; fact {self.sequence + 1} is missing"
            )
        self.now_ms = max(self.now_ms, group.now_ms)
        for fact in group.facts:
            self.apply(fact)

    def knows(self, object_id: int) -> bool:
        """True for an object whose OBJECT fact was applied, whether it still lives or not."""
        return object_id <= self.high.get(epoch_of(object_id), 0)

    def may_adopt(self, tenant: int, key: bytes, object_id: int) -> bool:
        """True when a directory's unknown object of an absent key may come (back) into the table."""
        if not self.adopting or self.knows(object_id):
            return False
        grave = max(self.graves.get((tenant, key), 0), self.graves.get((tenant, EVERY_KEY), 0))
        return grave < object_id

    def segment(self, segment_id: int) -> SegmentRecord:
        """The record of a segment that is not gone; `InternalError` for another."""
        found = self.segments.get(segment_id)
        if found is None:
            raise InternalError(f"there is no segment {segment_id}")
        return found

    def state_hash(self) -> int:
        """XXH3-64 over everything durable in canonical order; O(n log n), for tests and comparisons."""
        rows = sorted(((o.tenant, o.key), o) for o in self._every_object())
        objects = [(*stored[:9], sorted(stored.places)) for _, stored in rows]
        meta = self.meta()
        meta["graves"] = sorted(meta["graves"])
        return xxh3_64(msgpack.packb([meta, objects], use_bin_type=True))

    def meta(self) -> dict[str, Any]:
        """Everything but the objects and the time, as plain values."""
        return {
            "sequence": self.sequence,
            "epoch": self.epoch,
            "tenant_epochs": sorted(self.tenant_epochs.items()),
            "leader": self.leader_name,
            "endpoints": list(self.endpoints),
            "run": self.run,
            "nodes": [list(self.nodes[each]) for each in sorted(self.nodes)],
            "segments": [list(self.segments[each]) for each in sorted(self.segments)],
            "tenants": [list(self.tenants[each]) for each in sorted(self.tenants)],
            "next": [self.next_node_id, self.next_segment_id, self.next_tenant_id],
            "high": sorted(self.high.items()),
            "graves": [[tenant, key, each] for (tenant, key), each in self.graves.items()],
            "settled": self.settled,
            "adopting": self.adopting,
            "segments_version": self.segments_version,
        }

    def snapshot_chunks(self) -> Iterator[bytes]:
        """The whole state as chunks that check themselves; the objects' part is taken at the first `next`."""
        return write_chunks({**self.meta(), "now_ms": self.now_ms}, self.objects.dump)

    @classmethod
    def restore(cls, chunks: Iterable[bytes], objects: ObjectTable) -> State:
        """The state of a snapshot, with `objects` (empty) as its table; raises `SnapshotDamaged`."""
        state = cls(objects)
        read_chunks(chunks, state.load_meta, objects.load)
        return state

    def load_meta(self, meta: dict[str, Any]) -> None:
        """Takes in what `meta` gave, in a new state; any error means that it is not such a value."""
        self.sequence, self.epoch, self.now_ms = meta["sequence"], meta["epoch"], meta["now_ms"]
        self.run = meta["run"]
        self.tenant_epochs = dict(meta["tenant_epochs"])
        self.leader_name, self.endpoints = meta["leader"], tuple(meta["endpoints"])
        self.nodes = {row[0]: NodeRecord(*row) for row in meta["nodes"]}
        self.segments = {row[0]: SegmentRecord(*row) for row in meta["segments"]}
        self.tenants = {row[0]: TenantRecord(*row) for row in meta["tenants"]}
        self.next_node_id, self.next_segment_id, self.next_tenant_id = meta["next"]
        self.high = dict(meta["high"])
        self.graves = {(tenant, key): each for tenant, key, each in meta["graves"]}
        self.settled, self.adopting = meta["settled"], meta["adopting"]
        self.segments_version = meta["segments_version"]
        for record in self.segments.values():
            self.objects.add_segment(record.segment_id, record.capacity)

    def check(self) -> None:
        """Asserts what must hold between the parts; `InternalError` names the first that fails."""
        self.objects.check()
        for record in self.segments.values():
            if record.node_id not in self.nodes or record.state == NodeState.GONE:
                raise InternalError(f"segment {record.segment_id} has no node, or is gone and still here")
            if not 0 <= record.opened <= record.capacity:
                raise InternalError(f"segment {record.segment_id} opened more than it has")
        if self.settled and self.graves:
            raise InternalError("a settled state remembers graves")

    def _every_object(self) -> Iterator[StoredObject]:
        after = -1
        while page := self.objects.scan(after, _PAGE):
            after = page[-1]
            yield from map(self.objects.at, page)

    def _bury(self, tenant: int, key: bytes, object_id: int) -> None:
        if self.settled or not self.adopting:
            return
        self.graves[tenant, key] = max(object_id, self.graves.get((tenant, key), 0))
        if len(self.graves) > GRAVES_MAX:
            self.graves.clear()
            self.adopting = False

    def _index_of(self, tenant: int, key: bytes, object_id: int) -> int:
        index = self.objects.find(tenant, key)
        if index < 0 or self.objects.object_id(index) != object_id:
            raise InternalError(f"a fact is about object {object_id}, which its key does not have")
        return index

    def _leader(self, fact: facts.Leader) -> None:
        if fact.epoch < self.epoch:
            raise InternalError(f"epoch {fact.epoch} comes after epoch {self.epoch}")
        self.epoch, self.leader_name, self.endpoints = fact.epoch, fact.name, fact.endpoints
        self.settled = False
        if self.run != fact.run:
            self.run = fact.run
            for record in self.segments.values():
                if record.state in SEEN_STATES:
                    self.segments[record.segment_id] = record._replace(state=NodeState.JOINING)
            for node in self.nodes.values():
                if node.state in SEEN_STATES:
                    self.nodes[node.node_id] = node._replace(state=NodeState.JOINING)
            self.segments_version += 1

    def _settled(self, _fact: facts.Settled) -> None:
        self.settled = self.adopting = True
        self.graves.clear()

    def _node(self, fact: facts.Node) -> None:
        self.nodes[fact.node_id] = NodeRecord(*fact)
        self.next_node_id = max(self.next_node_id, fact.node_id + 1)
        self.segments_version += 1

    def _node_state(self, fact: facts.NodeStateSet) -> None:
        record = self.nodes[fact.node_id]
        if fact.state != NodeState.GONE:
            self.nodes[fact.node_id] = record._replace(state=fact.state)
            return
        if any(segment.node_id == fact.node_id for segment in self.segments.values()):
            raise InternalError(f"node {fact.node_id} is gone and still has segments")
        del self.nodes[fact.node_id]

    def _segment(self, fact: facts.Segment) -> None:
        if fact.segment_id in self.segments or fact.node_id not in self.nodes:
            raise InternalError(f"segment {fact.segment_id} is there already, or its node is not")
        self.segments[fact.segment_id] = SegmentRecord(*fact)
        self.objects.add_segment(fact.segment_id, fact.capacity)
        self.next_segment_id = max(self.next_segment_id, fact.segment_id + 1)
        self.segments_version += 1

    def _segment_state(self, fact: facts.SegmentState) -> None:
        record = self.segment(fact.segment_id)
        self.segments_version += 1
        if fact.state != NodeState.GONE:
            self.segments[fact.segment_id] = record._replace(state=fact.state, generation=fact.generation)
            return
        ended = self.objects.drop_places(fact.segment_id)
        self.objects.drop_segment(fact.segment_id)
        del self.segments[fact.segment_id]
        if ended and not self.settled:
            # What ended is not named by this fact, so no grave can be left: nothing unknown may come.
            self.graves.clear()
            self.adopting = False

    def _window(self, fact: facts.Window) -> None:
        record = self.segment(fact.segment_id)
        if fact.offset != record.opened or fact.offset + fact.length > record.capacity or not fact.length:
            raise InternalError(f"a window of segment {fact.segment_id} does not follow the last one")
        self.segments[fact.segment_id] = record._replace(opened=fact.offset + fact.length)

    def apply_object(self, fact: facts.Object) -> None:
        """What `apply` does with an OBJECT fact, for a leader that counts the fact itself."""
        if fact.replaced:
            self.objects.drop(self._index_of(fact.tenant, fact.key, fact.replaced))
        self.objects.add(StoredObject(*fact[:10]))
        epoch = fact.object_id >> 40
        if epoch == self.epoch:
            self.high[epoch] = fact.object_id

    def _objects_gone(self, fact: facts.ObjectsGone) -> None:
        for object_id, key in fact.objects:
            index = -1 if key == EVERY_KEY else self.objects.find(fact.tenant, key)
            if index >= 0 and self.objects.object_id(index) == object_id:
                self.objects.drop(index)
            elif index >= 0 or self.settled:
                raise InternalError(f"object {object_id} ends and is not what its key has")
            self._bury(fact.tenant, key, object_id)

    def _place_gone(self, fact: facts.PlaceGone) -> None:
        self.objects.drop_place(self._index_of(fact.tenant, fact.key, fact.object_id), fact.segment_id)

    def _place_added(self, fact: facts.PlaceAdded) -> None:
        self.objects.add_place(self._index_of(fact.tenant, fact.key, fact.object_id), fact.place)

    def _pin(self, fact: facts.PinSet) -> None:
        index = self._index_of(fact.tenant, fact.key, fact.object_id)
        self.objects.set_pin(index, fact.pin, fact.soft_pin_end_ms)

    def _tenant(self, fact: facts.Tenant) -> None:
        self.tenants[fact.tenant_id] = TenantRecord(*fact)
        self.tenant_epochs.setdefault(fact.tenant_id, self.epoch)
        self.next_tenant_id = max(self.next_tenant_id, fact.tenant_id + 1)


_APPLIERS: Final[dict[type[Any], Callable[[State, Any], None]]] = {
    facts.Leader: State._leader,
    facts.Node: State._node,
    facts.Segment: State._segment,
    facts.SegmentState: State._segment_state,
    facts.Window: State._window,
    facts.Object: State.apply_object,
    facts.ObjectsGone: State._objects_gone,
    facts.PlaceGone: State._place_gone,
    facts.PlaceAdded: State._place_added,
    facts.PinSet: State._pin,
    facts.Tenant: State._tenant,
    facts.NodeStateSet: State._node_state,
    facts.Settled: State._settled,
}
