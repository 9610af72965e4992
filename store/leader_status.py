"""Places that readers call damaged, and what the master says of itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, final

from moonpool.store.call import HELD, Call
from moonpool.store.effects import REHASH
from moonpool.store.errors import BadParams, Overloaded
from moonpool.store.holds import Needs
from moonpool.store.leader_core import LeaderCore
from moonpool.store.leader_nodes import Nodes
from moonpool.store.leader_reports import Reports
from moonpool.store.outputs import Reply
from moonpool.store.params import array, keys, number
from moonpool.store.records import DEFAULT_TENANT_ID, NodeState, Reason
from moonpool.store.segment_space import Gauges
from moonpool.units import U32_MAX, U64_MAX

#: What `damaged` answers.
TRUE, DAMAGED, UNKNOWN, NOT_THERE = range(4)
_LEAVING = (NodeState.DEAD, NodeState.LEAVING)


@final
@dataclass(slots=True, eq=False)
class Rehash:
    """A place that its node hashes again, and who waits for the verdict."""

    task: int
    join: int
    tenant: int
    key: bytes
    object_id: int
    segment_id: int
    slot: int
    until_ms: int
    waiting: list[Call] = field(default_factory=list)


@final
class Rehashing:
    """`damaged`, and the answers of nodes."""

    def __init__(self, core: LeaderCore, reports: Reports) -> None:
        self._core = core
        self._reports = reports
        self._tasks: dict[int, Rehash] = {}
        self._by_place: dict[tuple[int, int, int], Rehash] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._tasks)

    def damaged(self, call: Call) -> Any:
        """A reader got wrong bytes: asks the node; the place goes only on the node's word."""
        core = self._core
        key = keys([call.params[0]], 1)[0]
        object_id = number(call.params[1], "object id", 0, U64_MAX)
        segment_id = number(call.params[2], "segment", 0, U32_MAX)
        slot = number(call.params[3], "slot", 0, U32_MAX)
        index = core.objects.find(call.tenant, key)
        stored = core.objects.at(index) if index >= 0 else None
        there = stored is not None and any(
            place.segment == segment_id and place.slot == slot for place in stored.places
        )
        if stored is None or stored.object_id != object_id or not there:
            return [core.counters.epoch, NOT_THERE]
        join = core.joins.get(core.spaces[segment_id].node_id)
        if join is None:
            return [core.counters.epoch, UNKNOWN]
        core.check_may_change()
        running = self._by_place.get((segment_id, slot, object_id))
        if running is None:
            if len(self._tasks) >= core.config.rehash_tasks_max:
                raise Overloaded(field="rehash_tasks_max", limit=core.config.rehash_tasks_max)
            self._last += 1
            until_ms = core.now_ms + core.config.rehash_ms
            running = Rehash(self._last, join.number, call.tenant, key, object_id, segment_id, slot, until_ms)
            self._tasks[running.task] = running
            self._by_place[segment_id, slot, object_id] = running
            core.send(join, (REHASH, running.task, segment_id, slot, object_id))
        elif len(running.waiting) >= core.config.rehash_tasks_max:
            raise Overloaded(field="rehash_tasks_max", limit=core.config.rehash_tasks_max)
        running.waiting.append(call)
        return HELD

    def read_answers(self, value: Any) -> list[tuple[int, int]]:
        """The answers in a `node_ack`; raises `BadParams`."""
        answers = []
        for row in array(value, "answers", self._core.config.rehash_tasks_max):
            if not isinstance(row, list | tuple) or len(row) != 2:
                raise BadParams("an answer is [task, verdict]", field="answers")
            answers.append((number(row[0], "task", 0, U64_MAX), number(row[1], "verdict", 0, 2)))
        return answers

    def take_answers(self, join: int, answers: list[tuple[int, int]]) -> None:
        """A node says what it found."""
        core = self._core
        for task, verdict in answers:
            running = self._tasks.get(task)
            if running is None or running.join != join:
                continue
            if verdict:
                self._drop(running)
            self._end(running, DAMAGED if verdict else TRUE, Needs(core.counters.last_fact))

    def _drop(self, running: Rehash) -> None:
        core = self._core
        index = core.objects.find(running.tenant, running.key)
        stored = core.objects.at(index) if index >= 0 else None
        if stored is None or stored.object_id != running.object_id:
            return
        if any(p.segment == running.segment_id and p.slot == running.slot for p in stored.places):
            self._reports.drop_place(stored, running.segment_id, Reason.DAMAGED)

    def end_late(self) -> None:
        """Answers for nodes that did not."""
        for running in list(self._tasks.values()):
            if running.until_ms > self._core.now_ms:
                break
            self._end(running, UNKNOWN, Needs())

    def _end(self, running: Rehash, verdict: int, needs: Needs) -> None:
        core = self._core
        del self._tasks[running.task]
        del self._by_place[running.segment_id, running.slot, running.object_id]
        for call in running.waiting:
            result = [core.counters.epoch, verdict]
            core.hold(Reply(call.connection, call.message_id, None, result), needs)


@final
class Reporting:
    """`status`, and the gauges."""

    def __init__(self, core: LeaderCore, nodes: Nodes) -> None:
        self._core = core
        self._nodes = nodes

    def gauges(self) -> dict[int, Gauges]:
        """The five gauges of each segment, in bytes; they add up to its capacity."""
        core = self._core
        found = {}
        for segment_id, space in core.spaces.items():
            leaving = core.state.segment(segment_id).state in _LEAVING
            live, writing = core.objects.bytes_on(segment_id), core.puts.writing_bytes(segment_id)
            found[segment_id] = space.gauges(live, writing, leaving)
        return found

    def status(self, call: Call) -> dict[str, Any]:
        """Gauges, nodes, segments, the journal's state: for people and for metrics."""
        core, state = self._core, self._core.state
        gauges = self.gauges()
        return {
            "epoch": core.counters.epoch,
            "leader": state.leader_name,
            "now_ms": core.now_ms,
            "segments_version": state.segments_version,
            "objects": len(core.objects),
            "objects_memory_bytes": core.objects.memory_bytes(),
            "open_puts": len(core.puts),
            "clients": len(core.clients),
            "held_replies": len(core.holds),
            "settled": state.settled,
            "journal": {
                "last": core.counters.last_fact,
                "durable": core.durable,
                "away": core.journal_away,
                "durability": core.config.durability,
            },
            "gauges": {name: sum(getattr(each, name) for each in gauges.values()) for name in Gauges._fields},
            "capacity": sum(space.capacity for space in core.spaces.values()),
            "tenants": [
                {
                    "id": each.tenant_id,
                    "name": each.name,
                    "quota_bytes": each.quota_bytes,
                    "bytes": core.objects.bytes_of(each.tenant_id),
                }
                for each in state.tenants.values()
                if call.tenant in (DEFAULT_TENANT_ID, each.tenant_id)
            ],
            "nodes": [self._node(each) for each in state.nodes],
            "segments": [self._segment(each, gauges[each]) for each in state.segments],
        }

    def _node(self, node_id: int) -> dict[str, Any]:
        core = self._core
        record, join = core.state.nodes[node_id], core.joins.get(node_id)
        return {
            "id": node_id,
            "name": record.name,
            "host": record.host,
            "engine_endpoint": record.engine_endpoint,
            "view_endpoint": record.view_endpoint,
            "state": NodeState(record.state).name.lower(),
            "joined": join is not None,
            "silent_ms": max(0, core.now_ms - self._nodes.heard_ms[node_id]),
            "effects_waiting": len(join.effects) if join is not None else 0,
        }

    def _segment(self, segment_id: int, gauges: Gauges) -> dict[str, Any]:
        core = self._core
        record, space = core.state.segments[segment_id], core.spaces[segment_id]
        return {
            "id": segment_id,
            "name": record.name,
            "node": core.state.nodes[record.node_id].name,
            "state": NodeState(record.state).name.lower(),
            "capacity": record.capacity,
            "opened": record.opened,
            "slots": record.slots,
            "slots_used": space.slots.used(),
            "tier": record.tier,
            "kind": record.kind,
            "resolved": space.resolved,
            **gauges._asdict(),
        }
