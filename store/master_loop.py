"""The loop thread of a master: it owns the rpc port and, while this master leads, all of the pool's state.

Theory of operation. One turn: serve the port (hot methods natively, cold requests come out), hear the journal
(elected, durable, deposed), hand requests to the leader, tick it when due, and carry out what it decided:
facts to the journal first, then replies, pushes and the rest. Nothing here waits but the port's poll, which
the journal's thread and the port's listeners wake.

    standby ──Elected──▶ leading ──Deposed──▶ standby

Before anything leaves, the lease is asked (`Journal.may_answer`): without it a reply becomes an error that
says that the outcome is not known, and pushes are dropped, which the leader's effects survive (they are sent
again). Hot methods are given the end of the lease. A deposed master closes all its connections: whoever was
there asks the next master, and finds the leader.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, final

from moonpool.errors import MoonpoolError
from moonpool.rpc.server import Closed, PortEvent, Request, RpcPort
from moonpool.store.errors import JournalUnavailable, NotLeader, NotReady
from moonpool.store.event_publisher import EventPublisher
from moonpool.store.journal import Deposed, Elected, EpochRaised, Identity, Journal, Notice, SnapshotWanted
from moonpool.store.leader import Leader
from moonpool.store.master_config import MasterConfig
from moonpool.store.outputs import Outputs
from moonpool.store.table_factory import Tables
from moonpool.units import NS_PER_MS
from moonpool.wire.rpc import RpcFault, pack_value

_LOG: Final = logging.getLogger("moonpool.store.master")
#: A master whose leader fails more often than this ends, for somebody to look at it.
_FAILURES_MAX: Final = 16
#: How often a standby's loop looks around without being woken.
_STANDBY_POLL_MS: Final = 200
#: Redis answers an append in about this time: sleeping meanwhile would cost a wake-up of some 40 us.
_ANSWER_US: Final = 150
#: How often what the status pages show is made anew.
_PAGE_EVERY_NS: Final = 500 * NS_PER_MS


@final
class MasterLoop:
    """Runs in one thread; everything but `stop` and `shown` belongs to it."""

    def __init__(
        self,
        config: MasterConfig,
        identity: Identity,
        port: RpcPort,
        journal: Journal,
        make_tables: Callable[[], Tables],
        publisher: EventPublisher | None = None,
    ) -> None:
        self._config = config
        self._identity = identity
        self._port = port
        self._journal = journal
        self._make_tables = make_tables
        self._publisher = publisher
        self._leader: Leader | None = None
        self._epoch = 0
        self._offset_ms = 0  # cluster time is CLOCK_BOOTTIME in ms plus this
        self._durable = 0
        self._connections: set[int] = set()
        self._next_tick_ns = self._next_page_ns = 0
        self._stopping = False
        self._unanswered = self._failures = 0
        #: What the status pages show; replaced whole, so any thread may read it.
        self.shown: dict[str, Any] = {"role": "standby", "epoch": 0, "gauges": {}}

    def stop(self) -> None:
        """Ends `run` soon; any thread may call."""
        self._stopping = True
        self._port.wake()

    def run(self) -> None:
        """Serves until `stop`."""
        while not self._stopping:
            leading = self._leader is not None
            events = self._port.poll(self._config.tick_ms if leading else _STANDBY_POLL_MS)
            try:
                for notice in self._journal.take():
                    self._hear(notice)
                self._serve(events)
            except Exception as exc:
                self._failed("its turn failed", exc)
        self._show(time.clock_gettime_ns(time.CLOCK_BOOTTIME))

    def _now_ms(self, now_ns: int) -> int:
        return now_ns // NS_PER_MS + self._offset_ms

    # What happened

    def _hear(self, notice: Notice) -> None:
        if isinstance(notice, Elected):
            self._begin(notice)
        elif isinstance(notice, Deposed):
            self._end(notice.reason)
        elif self._leader is None:
            return
        elif isinstance(notice, EpochRaised):
            self._epoch = notice.epoch
            self._leader.raise_epoch(notice.epoch, self._now_ms(time.clock_gettime_ns(time.CLOCK_BOOTTIME)))
        elif isinstance(notice, SnapshotWanted):
            # What hot methods made since the last turn goes to the journal before it is in a snapshot.
            now_ms = self._now_ms(time.clock_gettime_ns(time.CLOCK_BOOTTIME))
            self._carry_out(self._leader, self._leader.take_outputs(), now_ms)
            started_ns = time.monotonic_ns()
            self._journal.write_snapshot(self._leader.state)
            _LOG.info(
                "snapshot begun; service stood still for %d us", (time.monotonic_ns() - started_ns) // 1000
            )

    def _begin(self, elected: Elected) -> None:
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        self._offset_ms = elected.state.now_ms - now_ns // NS_PER_MS
        self._epoch = elected.epoch
        if self._publisher is not None:
            self._publisher.begin(f"{self._identity.name}/{elected.epoch}")
        self._next_page_ns = 0
        self._durable = elected.state.sequence
        tables = replace(self._make_tables(), objects=elected.state.objects)
        self._leader = Leader.from_state(
            self._config,
            tables,
            os.urandom,
            state=elected.state,
            epoch=elected.epoch,
            now_ms=self._now_ms(now_ns),
            name=self._identity.name,
            endpoints=self._identity.endpoints,
            journal_run=elected.run,
        )
        self._port.native.set_clock(self._offset_ms)
        hot = self._leader.hot
        self._port.native.set_hot(hot.native if hot is not None else None)
        _LOG.info("this master leads in epoch %d from fact %d", elected.epoch, self._durable)

    def _end(self, reason: str) -> None:
        self._port.native.set_hot_until(0)
        self._port.native.set_hot(None)
        leader, self._leader = self._leader, None
        self._next_page_ns = 0
        if leader is None:
            return
        _LOG.warning("this master does not lead any more: %s", reason)
        for connection in self._connections:
            self._port.close_connection(connection)

    def _serve(self, events: list[PortEvent]) -> None:
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        answering = self._journal.may_answer(now_ns)
        for event in events:
            leader = self._leader
            if isinstance(event, Closed):
                self._connections.discard(event.connection)
                if leader is not None:
                    leader.connection_closed(event.connection, self._now_ms(now_ns))
            elif leader is None or not answering:
                self._connections.add(event.connection)
                self._refuse(event)
            else:
                self._connections.add(event.connection)
                self._request(leader, event, self._now_ms(now_ns))
        if self._leader is not None:
            self._advance(self._leader, now_ns)
        if now_ns >= self._next_page_ns:
            self._show(now_ns)

    def _request(self, leader: Leader, request: Request, now_ms: int) -> None:
        try:
            leader.request(request.connection, request.message_id, request.method, request.params, now_ms)
        except Exception as exc:
            self._port.fail(request.connection, request.message_id, exc)
            self._failed(f"a request of method {request.method} failed", exc)

    def _failed(self, what: str, problem: Exception) -> None:
        """A bug, perhaps with half of a decision made: what the journal has is the truth, and is read again.

        Where that cannot be, or after too many, the problem is raised and ends the master.
        """
        _LOG.error("%s in the leader", what, exc_info=problem)
        self._failures += 1
        reason = f"{what} in the leader: {problem!r}"
        if self._leader is None or self._failures > _FAILURES_MAX or not self._journal.resign(reason):
            raise problem
        self._end(reason)

    def _refuse(self, request: Request) -> None:
        if self._leader is not None:
            error: MoonpoolError = NotReady(
                f"this leader's lease ended and its journal is away: {self._journal.trouble or 'no answer'}"
            )
        elif self._journal.leader_endpoints:
            error = NotLeader(f"the leader is at {', '.join(self._journal.leader_endpoints)}")
        else:
            error = NotLeader(f"no master leads now: {self._journal.trouble or 'an election is on its way'}")
        self._port.fail(request.connection, request.message_id, error)

    def _advance(self, leader: Leader, now_ns: int) -> None:
        now_ms = self._now_ms(now_ns)
        self._journal.service()
        durable = self._journal.durable
        if durable > self._durable:
            self._durable = durable
            leader.journal_durable(durable, now_ms)
        room = self._journal.room()
        leader.journal_room(room)
        if self._journal.trouble or not room:
            leader.journal_unavailable(now_ms)
        if now_ns >= self._next_tick_ns:
            self._next_tick_ns = now_ns + self._config.tick_ms * NS_PER_MS
            leader.tick(now_ms)
        self._carry_out(leader, leader.take_outputs(), now_ms)
        until_ns = self._journal.lease_until_ns
        self._port.native.set_hot_until(
            max(0, until_ns // NS_PER_MS + self._offset_ms) if room and not self._journal.trouble else 0
        )

    # What was decided

    def _carry_out(self, leader: Leader, out: Outputs, now_ms: int) -> None:
        if out.facts:
            urgent = leader.waits_for_journal
            self._journal.append(out.first_sequence, out.facts, now_ms, urgent=urgent)
            if urgent:
                self._port.native.stay_awake(_ANSWER_US)
        if out.epoch_wanted:
            self._journal.raise_epoch(out.epoch_wanted)
        answering = self._journal.may_answer(time.clock_gettime_ns(time.CLOCK_BOOTTIME))
        if not answering:
            self._withhold(out)
        else:
            self._let_out(out)
        for connection in out.closes:
            self._port.close_connection(connection)
        if out.events and self._publisher is not None:
            self._publisher.publish(out.events)

    def _let_out(self, out: Outputs) -> None:
        port = self._port
        for bind in out.binds:
            port.bind(bind.connection, bind.client_id, bind.tenant_id)
        for connection, message_id, error, result in out.replies:
            if error is None:
                port.reply(connection, message_id, result)
            else:
                port.fail(connection, message_id, RpcFault(int(error[0]), str(error[1]), str(error[2])))
        for push in out.pushes:
            port.native.push(push.connection, b"\x93\x02" + pack_value(push.method) + push.params)

    def _withhold(self, out: Outputs) -> None:
        """Without a lease nothing is said but that the outcome is not known."""
        self._unanswered += len(out.replies)
        problem = JournalUnavailable("this leader's lease ended before it could answer; ask again")
        for reply in out.replies:
            self._port.fail(reply.connection, reply.message_id, problem)

    def _show(self, now_ns: int) -> None:
        self._next_page_ns = now_ns + _PAGE_EVERY_NS
        leader = self._leader
        self.shown = {
            "role": "leader" if leader is not None else "standby",
            "epoch": self._epoch,
            "answering": leader is not None and self._journal.may_answer(now_ns),
            "gauges": leader_gauges(leader) if leader is not None else {},
            "port": self._port.counters(),
            "latencies": self._port.native.latencies(),
            "counters": {"replies_withheld": self._unanswered, "requests_failed": self._failures},
        }


def leader_gauges(leader: Leader) -> dict[str, float]:
    """Numbers of the pool, over all its segments; see `status` for each."""
    state, core = leader.state, leader.core
    shown: dict[str, float] = {
        "objects": len(state.objects),
        "segments": len(state.segments),
        "nodes": len(state.nodes),
        "nodes_joined": len(core.joins),
        "clients": len(core.clients),
        "tenants": len(state.tenants),
        "puts_open": len(core.puts),
        "replies_held": len(core.holds),
        "facts_not_durable": core.counters.last_fact - core.durable,
        "tables_bytes": state.objects.memory_bytes(),
        "graves": len(state.graves),
        "settled": int(state.settled),
    }
    for gauges in leader.gauges().values():
        for name, value in gauges._asdict().items():
            shown[f"{name}_bytes"] = shown.get(f"{name}_bytes", 0) + value
    return shown
