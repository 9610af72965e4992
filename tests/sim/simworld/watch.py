"""Looks at a world while it runs, and judges it at the end: each invariant has a checker of its own.

Invariant 1 is judged by the history at each get; writes by the claims on extents at each landing; leases,
views and misses where clients see them. Here are the rest: the core's own checks and its gauges, terms, the
journal replayed against the leader, durability of what was acknowledged, and that everything comes to rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moonpool.bench.chaos_history import PutRecord
from moonpool.store.facts import decode_group
from moonpool.store.records import NodeState, extent_bytes
from simworld.core import make_state
from simworld.durability import Journaled, why_gone
from simworld.judging import Judge
from simworld.loop import MS
from simworld.master import Master

if TYPE_CHECKING:
    from simworld.world import World

#: The core's tables check themselves at each so many turns of a leader.
CHECK_TURNS = 40


class InvariantBroken(AssertionError):
    """Something that must always hold does not."""


class Watch:
    """The checkers of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._turns = 0
        self.epochs: list[tuple[int, str]] = []
        self._waiting: dict[int, tuple[int, int | None]] = {}
        #: Tag of each put that was acknowledged: its object.
        self.object_ids: dict[int, int] = {}
        #: Hashes of the state at the end of each term, for the test of determinism.
        self.trace: list[int] = []

    # ---- told by processes ------------------------------------------------------------------------

    def term_changed(self, master: Master) -> None:
        """A master began or ended a term."""
        if master.leader is None:
            return
        epoch = master.epoch
        if not self._world.options.fault.loses_journal:
            self._must(all(epoch > other for other, _ in self.epochs), f"epoch {epoch} came twice")
        self.epochs.append((epoch, master.name))
        self.trace.append(master.leader.state.state_hash())

    def master_turned(self, master: Master) -> None:
        """A leader did something: its gauges add up at each step, its tables are whole every so often."""
        assert master.leader is not None
        self._turns += 1
        self._note_waiting(master)
        self._check_gauges(master)
        if self._turns % CHECK_TURNS == 0:
            master.leader.check()

    def put_started(self, master: Master, sizes: list[int], result: list[Any]) -> None:
        """A reply to `put_start` leaves the leader: from now on these extents are that put's."""
        assert master.leader is not None
        state, (_, _, put_id, _, entries) = master.leader.state, result
        for size, (_, places) in zip(sizes, entries, strict=True):
            for segment, offset, *_ in places:
                node = state.nodes[state.segments[segment].node_id]
                memory = self._world.engines[node.engine_endpoint].segments.get(segment)
                assert memory is not None, "an extent of a segment whose node has not reported"
                memory.claims.add(offset, extent_bytes(size), put_id)

    def stored(self, tag: int, object_id: int) -> None:
        """A put was acknowledged."""
        self.object_ids[tag] = object_id

    def missed(self, record: PutRecord, at: int) -> None:
        """A get missed a stored value that no remove explains: wrong where nothing else can explain it."""
        options = self._world.options
        calm = not options.fault.blows and not options.fault.network.slow_share > 0.1
        if calm and not options.workload.evicts and not self._world.is_calm:
            raise InvariantBroken(f"at {at} a get of {record.key} missed put {record.tag}, which was stored")

    # ---- gauges -----------------------------------------------------------------------------------

    def _check_gauges(self, master: Master) -> None:
        for segment, gauges in self._gauges(master).items():
            self._must(min(gauges) >= 0, f"a gauge of segment {segment} is negative: {gauges}")
            capacity = self._world.options.workload.capacity_bytes
            self._must(sum(gauges) == capacity, f"gauges of segment {segment}: {gauges}, not {capacity}")

    def _gauges(self, master: Master) -> dict[int, tuple[int, ...]]:
        assert master.leader is not None
        return {segment: tuple(gauges) for segment, gauges in master.leader.gauges().items()}

    # ---- coming to rest ---------------------------------------------------------------------------

    def leader(self) -> Master | None:
        """The master that leads, when exactly one does and may answer."""
        leading = [one for one in self._world.masters.values() if one.process.is_running and one.leads]
        return leading[0] if len(leading) == 1 and leading[0].may_answer() else None

    def why_unsettled(self) -> str:
        """What is not at rest yet; empty when all is."""
        world = self._world
        if busy := [one.process.name for one in world.clients if one.process.is_alive and one.busy_tasks()]:
            return f"clients are at work: {busy}"
        master = self.leader()
        if master is None or master.leader is None:
            return f"nobody leads: {[(name, one.leads) for name, one in world.masters.items()]}"
        if not all(node.is_active for node in world.nodes.values()):
            return f"nodes are not active: {[(n.name, n.core.phase.value) for n in world.nodes.values()]}"
        state = master.leader.state
        states = [(one.name, NodeState(one.state).name) for one in state.segments.values()]
        if sorted(name for name, what in states if what == "ACTIVE") != sorted(
            memory.name for node in world.nodes.values() for memory in node.memories
        ):
            return f"segments are not active: {states}"
        for segment, gauges in self._gauges(master).items():
            if state.segments[segment].state == NodeState.ACTIVE and any(gauges[2:]):
                return f"segment {segment} is not at rest: {gauges}"
        core = master.leader.core
        if core.durable != core.counters.last_fact:
            return "facts wait for the journal"
        if not state.settled:
            return "the state is not settled"
        return ""

    def is_settled(self) -> bool:
        """Whether all is at rest."""
        return not self.why_unsettled()

    def fail_to_settle(self) -> None:
        """The bound on settling was reached."""
        raise InvariantBroken(f"the world does not come to rest: {self.why_unsettled()}")

    # ---- the end ----------------------------------------------------------------------------------

    def final(self) -> None:
        """Judges what is left: journal against leader, every key by one more client."""
        master = self.leader()
        assert master is not None
        assert master.leader is not None
        master.leader.check()
        self._replay(master)
        judge = Judge(self._world)
        judge.run()
        self._check_durability(judge)

    def _replay(self, master: Master) -> None:
        """Every fact in Redis, applied to an empty state, gives the leader's state."""
        assert master.leader is not None
        state, _ = make_state(self._world.options.core)
        for group in self._world.disk.written.groups:
            state.apply_group(decode_group(group.payload))
        state.check()
        self._must(state.state_hash() == master.leader.state.state_hash(), "the journal gives another state")
        self.trace.append(state.state_hash())

    def _check_durability(self, judge: Judge) -> None:
        """What was acknowledged is there, or something says why it is not."""
        journaled = Journaled(self._world)
        for record in judge.missing:
            why = why_gone(self._world, journaled, record)
            self._world.notes[f"gone: {why}"] = self._world.notes.get(f"gone: {why}", 0) + 1
            if not why:
                raise InvariantBroken(
                    f"put {record.tag} of {record.key} was stored at {record.ended} and is gone:"
                    f" {journaled.lives.get(self.object_ids[record.tag])}"
                )

    def _note_waiting(self, master: Master) -> None:
        """Since when a leader has facts that the journal did not confirm."""
        assert master.leader is not None
        core = master.leader.core
        durable, since = self._waiting.get(master.epoch, (0, None))
        if core.durable == core.counters.last_fact:
            since = None
        elif since is None or core.durable > durable:
            since = self._world.loop.now
        self._waiting[master.epoch] = (core.durable, since)

    def unconfirmed_since(self) -> list[int]:
        """For each term: since when its last facts waited for the journal as it ended."""
        return [since for _, since in self._waiting.values() if since is not None]

    def _must(self, holds: bool, what: str) -> None:
        if not holds:
            raise InvariantBroken(f"at {self._world.loop.now // MS} ms: {what}")
