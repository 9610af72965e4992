"""The leader: requests in, outputs out. Pure: values and a clock reading in, values out.

The shell calls `request`, `journal_durable`, `tick` and so on from one thread, and then takes the outputs:
facts go to the journal, replies and pushes out, binds to the rpc loop. Nothing here blocks. A request that is
wrong in any way gets an error reply and changes nothing; an `InternalError` out of a call means that the
leader is broken and must be discarded: the journal is as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from moonpool.errors import InternalError, MoonpoolError
from moonpool.store import facts
from moonpool.store.call import HELD, Call
from moonpool.store.errors import (
    BadParams,
    JournalUnavailable,
    NotLeader,
    UnknownClient,
    UnknownMethod,
    UnknownNode,
)
from moonpool.store.leader_clients import Clients
from moonpool.store.leader_core import LeaderCore
from moonpool.store.leader_hot import HotPath, is_native
from moonpool.store.leader_joins import Joins
from moonpool.store.leader_nodes import Nodes
from moonpool.store.leader_put_end import PutEnds
from moonpool.store.leader_puts import Puts
from moonpool.store.leader_reads import Reads
from moonpool.store.leader_removal import Removal
from moonpool.store.leader_reports import Reports
from moonpool.store.leader_status import Rehashing, Reporting
from moonpool.store.leader_windows import Room
from moonpool.store.master_config import MasterConfig
from moonpool.store.method_table import METHODS, Caller
from moonpool.store.outputs import Outputs
from moonpool.store.records import NodeState
from moonpool.store.segment_space import Gauges
from moonpool.store.sessions import Session
from moonpool.store.state import State
from moonpool.store.table_factory import Tables

Handler = Callable[[Call], Any]


@final
class Leader:
    """Decides everything. `state` is what the journal adds up to; its table is `tables.objects`.

    `epoch` is the leader's own, above every epoch before; the first output holds its LEADER fact.
    """

    def __init__(
        self,
        config: MasterConfig,
        tables: Tables,
        random: Callable[[int], bytes],
        *,
        epoch: int = 1,
        now_ms: int = 0,
        name: str = "",
        endpoints: tuple[str, ...] = (),
        journal_run: str = "",
        state: State | None = None,
    ) -> None:
        state = State(tables.objects) if state is None else state
        if state.objects is not tables.objects:
            raise InternalError("the state's objects are not in the leader's table")
        if epoch <= state.epoch:
            raise InternalError(f"epoch {epoch} cannot follow epoch {state.epoch} of the journal")
        self._core = core = LeaderCore(config, tables, state, epoch, random)
        #: Keeps the native core of hot methods in step; None with tables of Python.
        self.hot = HotPath(core) if is_native(tables) else None
        core.now_ms = max(now_ms, state.now_ms)
        self._rebuild_until_ms = core.now_ms + config.rebuild_ms if core.fresh else 0
        # An empty journal may be one that was lost, until a node comes that never was in a pool.
        core.silent_until_ms = core.now_ms + config.location_lease_ms
        if not core.fresh:
            core.free_after_ms = core.now_ms + config.lease_ms_max
        self._identity = (name, endpoints, journal_run)
        doubtful = state.sequence > 0 and state.run != journal_run
        self._deposed: str | None = None
        self._room = Room(core)
        self._puts = Puts(core, self._room)
        self._put_ends = PutEnds(core)
        self._clients = Clients(core, self._put_ends)
        self._nodes = Nodes(core, self._room, (self._puts.segment_gone,), doubtful=doubtful)
        self._joins = Joins(core, self._nodes)
        self._reports = Reports(core, self._nodes)
        self._rehashing = Rehashing(core, self._reports)
        self._reporting = Reporting(core, self._nodes)
        self._handlers = self._bind_handlers()
        core.commit(facts.Leader(epoch, *self._identity))
        core.segments_changed()

    @classmethod
    def from_state(
        cls,
        config: MasterConfig,
        tables: Tables,
        random: Callable[[int], bytes],
        *,
        state: State,
        epoch: int,
        now_ms: int,
        name: str = "",
        endpoints: tuple[str, ...] = (),
        journal_run: str = "",
    ) -> Leader:
        """Takes over from a state that a standby built: one lease of silence, all unexplained space waits.

        `journal_run` names the run of the server that keeps the journal. After a run that is not the last
        leader's the journal may lack its end, so no place is seen until nodes have reported.
        """
        return cls(
            config,
            tables,
            random,
            epoch=epoch,
            now_ms=now_ms,
            name=name,
            endpoints=endpoints,
            journal_run=journal_run,
            state=state,
        )

    def _bind_handlers(self) -> dict[str, Handler]:
        reads, removal = Reads(self._core), Removal(self._core)
        handlers: dict[str, Handler] = {
            "exists": reads.exists,
            "lookup": reads.lookup,
            "list": reads.list_objects,
            "stat": reads.stat,
            "put_start": self._puts.put_start,
            "put_end": self._put_ends.put_end,
            "put_abort": self._put_ends.put_abort,
            "remove": removal.remove,
            "remove_prefix": removal.remove_prefix,
            "remove_all": removal.remove_all,
            "pin": removal.pin,
            "client_join": self._clients.client_join,
            "client_beat": self._clients.client_beat,
            "segments": self._clients.segments,
            "tenant_set": self._clients.tenant_set,
            "damaged": self._rehashing.damaged,
            "status": self._reporting.status,
            "node_join": self._joins.node_join,
            "node_report": self._reports.node_report,
            "node_ack": self._node_ack,
            "node_leave": self._joins.node_leave,
        }
        if handlers.keys() != METHODS.keys():
            raise InternalError("the method table and the handlers differ")
        return handlers

    # What the shell calls

    def request(self, connection: int, message_id: int, method: str, params: list[Any], now_ms: int) -> None:
        """One request; its reply comes with these outputs or later ones."""
        core = self._core
        self._clock(now_ms)
        session = core.sessions.get(connection)
        if session is None:
            session = core.sessions[connection] = Session(connection)
        try:
            result = self._handle(session, message_id, method, params)
        except InternalError:
            raise
        except MoonpoolError as error:
            core.fail(connection, message_id, error)
        else:
            if result is not HELD:
                core.reply(connection, message_id, result)
        core.finish()

    def _handle(self, session: Session, message_id: int, method: str, params: list[Any]) -> Any:
        if self._deposed is not None:
            raise NotLeader(self._deposed)
        spec = METHODS.get(method) if isinstance(method, str) else None
        if spec is None:
            raise UnknownMethod(f"there is no method {method!r}; docs/rpc.md has them all")
        if not isinstance(params, list | tuple) or len(params) != len(spec.params):
            raise BadParams(f"{method} takes {len(spec.params)} parameters; docs/rpc.md names them")
        tenant = 0
        if spec.caller is Caller.CLIENT:
            if session.client is None:
                raise UnknownClient
            tenant = session.client.tenant_id
        elif spec.caller is Caller.NODE and session.join is None:
            raise UnknownNode
        return self._handlers[method](Call(session, message_id, list(params), tenant))

    def _node_ack(self, call: Call) -> Any:
        answers = self._rehashing.read_answers(call.params[3])
        join = call.join.number
        result = self._joins.node_ack(call)
        self._rehashing.take_answers(join, answers)
        return result

    def connection_closed(self, connection: int, now_ms: int) -> None:
        """The connection is gone: its replies go nowhere, its client or node may come back on another."""
        self._clock(now_ms)
        session = self._core.sessions.pop(connection, None)
        if session is not None:
            self._puts.connection_closed(connection)
            self._clients.leave(session)
            if session.join is not None:
                self._nodes.end_join(session.join, close=False)
        self._core.finish()

    def journal_durable(self, sequence: int, now_ms: int) -> None:
        """The journal has all facts up to `sequence` for good."""
        core = self._core
        self._clock(now_ms)
        if sequence > core.counters.last_fact:
            raise InternalError(f"the journal confirms fact {sequence}, which was not made")
        if sequence > core.durable:
            core.durable, core.behind_since_ms = sequence, 0
        core.journal_away = False
        for space in core.spaces.values():
            if space.windows and space.open_windows(core.durable):
                core.space_came = True
        core.finish()

    def journal_unavailable(self, now_ms: int) -> None:
        """The journal does not answer: no put replies before its facts are durable, until it does."""
        self._clock(now_ms)
        self._core.journal_away = True
        self._core.finish()

    def journal_room(self, room: bool) -> None:
        """Whether the journal takes more facts; without room requests that would make some are refused."""
        self._core.journal_full = not room

    @property
    def waits_for_journal(self) -> bool:
        """Whether replies wait for facts that are being made, so that these should not linger."""
        return len(self._core.holds) > 0 or bool(self._puts.waiting)

    def deposed(self, now_ms: int, leader: str = "") -> None:
        """Another leads now (or the journal was lost): everything is refused from here on."""
        core = self._core
        self._clock(now_ms)
        where = f"; ask {leader}" if leader else ""
        self._deposed = f"this master is not the leader any more{where}"
        for held in core.holds.take_all():
            core.fail(held.connection, held.message_id, NotLeader(self._deposed))
        for starting in list(self._puts.waiting):
            call = starting.call
            core.fail(call.connection, call.message_id, NotLeader(self._deposed))
        self._puts.waiting.clear()

    def raise_epoch(self, epoch: int, now_ms: int) -> None:
        """The journal's epoch was raised for this leader, as its outputs asked."""
        core = self._core
        self._clock(now_ms)
        core.counters.raise_epoch(epoch)
        core.commit(facts.Leader(epoch, *self._identity))
        self._clients.epoch_raised()
        core.finish()

    def tick(self, now_ms: int) -> None:
        """Timers; to be called at least each `tick_ms`."""
        core = self._core
        self._clock(now_ms)
        if self._deposed is not None:
            return
        self._nodes.watch()
        self._clients.end_clients()
        self._put_ends.end_expired()
        self._puts.end_waits()
        self._nodes.resolve_fenced()
        core.reschedule()
        self._room.open_ahead()
        self._room.evict_background()
        self._rehashing.end_late()
        self._settle()
        for late in core.holds.given_up(core.now_ms):
            core.fail(late.connection, late.message_id, JournalUnavailable())
        core.space_came = core.space_came or bool(self._puts.waiting)
        core.finish()

    def _settle(self) -> None:
        core = self._core
        waiting = core.state.segments.keys() - self._nodes.reported
        if not core.state.settled and not waiting and core.now_ms >= self._rebuild_until_ms:
            core.commit(facts.Settled())

    def take_outputs(self) -> Outputs:
        """Everything decided since the last call. A deposed leader's facts and pushes are not for use."""
        core = self._core
        if self.hot is not None:
            if self.hot.drain():
                core.finish()
            self.hot.sync(deposed=self._deposed is not None)
        taken, core.out = core.out, Outputs(core.counters.last_fact + 1)
        if self._deposed is not None:
            taken.facts.clear()
            taken.pushes.clear()
        return taken

    def _clock(self, now_ms: int) -> None:
        # Cluster time never goes back, whatever the shell's clock does.
        core = self._core
        if self.hot is not None:
            self.hot.drain()
        core.now_ms = core.state.now_ms = max(core.now_ms, now_ms)

    # What may be looked at

    @property
    def state(self) -> State:
        """The durable state, with what is decided and not durable yet. To be read only."""
        return self._core.state

    @property
    def core(self) -> LeaderCore:
        """The soft state, for the native core and for metrics."""
        return self._core

    @property
    def epoch(self) -> int:
        return self._core.counters.epoch

    def gauges(self) -> dict[int, Gauges]:
        """Free, live, writing, quarantined and leaving bytes of each segment by id."""
        return self._reporting.gauges()

    def check(self) -> None:
        """Asserts the invariants of every part; `InternalError` names the first that fails."""
        core = self._core
        core.state.check()
        core.puts.check()
        if core.counters.last_fact != core.state.sequence or core.durable > core.state.sequence:
            raise InternalError("facts are numbered otherwise than applied")
        if core.spaces.keys() != core.state.segments.keys():
            raise InternalError("spaces and segments differ")
        for segment_id, space in core.spaces.items():
            space.check(core.objects.bytes_on(segment_id), core.puts.writing_bytes(segment_id))
            if core.state.segment(segment_id).state == NodeState.ACTIVE and segment_id not in core.ranks:
                raise InternalError(f"segment {segment_id} is active and not seen")
