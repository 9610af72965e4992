"""A master process.

Stands by and follows the journal, is elected, leads through the production `Leader`, is deposed.

A thin shell as the real one: it owns sockets, timers and the journal, looks at its own lease before a reply
leaves, and decides nothing that the core decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack  # type: ignore[import-untyped]

from moonpool.store.journal_groups import GroupQueue
from moonpool.store.leader import Leader
from moonpool.store.leadership import EPOCHS_SKIPPED_MAX
from moonpool.store.state import State
from moonpool.store.table_factory import Tables
from simworld.calls import as_sent
from simworld.journal_writer import LINGER_US, TIMEOUT_MS, JournalWriter
from simworld.loop import MS
from simworld.network import End, Network
from simworld.process import Process
from simworld.redis_link import RedisLink, Reply, dial_redis
from simworld.terms import Follower

GROUPS_AT_ONCE = 64
GROUP_BYTES = 65_536
GROUPS_IN_FLIGHT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterOptions:
    """Times of the shell, and what the core is made with."""

    make_state: Callable[[], tuple[State, Tables]]
    make_leader: Callable[[tuple[State, Tables], int, int, str, int], Leader]
    lease_ms: int = 600
    tick_ms: int = 20
    poll_ms: int = 25
    elect_ms: int = 150


class Master:
    """One incarnation of one master process."""

    def __init__(self, process: Process, network: Network, address: str, options: MasterOptions) -> None:
        self.process = process
        self.name = address
        self._network = network
        self._options = options
        self._ends: dict[int, End] = {}
        self.leader: Leader | None = None
        self._writer: JournalWriter | None = None
        self._lease_until_ms = 0
        self.epoch = 0
        self._raising: Leader | None = None
        self._time_offset_ms = 0
        #: Told of every term that begins (the leader) and ends (None).
        self.on_term: Callable[[Master], None] = lambda master: None
        self.on_turn: Callable[[Master], None] = lambda master: None
        #: Told of each reply to `put_start` that leaves, with the sizes that were asked for.
        self.on_put_started: Callable[[Master, list[int], list[Any]], None] = (
            lambda master, sizes, result: None
        )
        self._starting: dict[tuple[int, int], list[int]] = {}
        network.listen(process, address, self._accept)
        process.spawn(self._live())

    @property
    def leads(self) -> bool:
        return self.leader is not None

    def now_ms(self) -> int:
        """Cluster time: the last that the journal said, and what this process's clock counted since."""
        return self._time_offset_ms + self.process.clock.now_ms()

    # ---- standing by ------------------------------------------------------------------------------

    async def _live(self) -> None:
        while True:
            link = await dial_redis(self.process, self._network, TIMEOUT_MS)
            if link is None:
                await self.process.sleep(50 * MS)
                continue
            await self._follow(link)
            link.close()
            while self.leader is not None:
                await self.process.sleep(5 * MS)

    async def _follow(self, link: RedisLink) -> None:
        """Follows the journal until elected, or the connection ends."""
        follower = Follower(self._options.make_state())
        elect_at_ms = self.process.clock.now_ms() + self.process.loop.chance.randrange(self._options.elect_ms)
        while link.is_open:
            if not await self._catch_up(link, follower, None):
                return
            if self.process.clock.now_ms() >= elect_at_ms:
                elect_at_ms = self.process.clock.now_ms() + self._options.elect_ms
                if await self._stand(link, follower):
                    return
            await self.process.sleep(self._options.poll_ms * MS)

    async def _catch_up(self, link: RedisLink, follower: Follower, up_to: int | None) -> bool:
        """Applies what the journal holds; False when it cannot be followed from here."""
        while True:
            reply: Reply | None = await link.call("read", follower.applied, GROUPS_AT_ONCE)
            if reply is None or not follower.belongs(reply.run_id):
                return False
            last, groups = reply.result
            if last < follower.applied or not follower.apply(groups):
                return False
            if follower.applied >= (last if up_to is None else up_to):
                return True

    async def _stand(self, link: RedisLink, follower: Follower) -> bool:
        """Stands for election; True when this process's turn at the journal is over."""
        asked_ms = self.process.clock.now_ms()
        above = follower.epoch
        if follower.state.run not in ("", f"run{follower.run_id}") or not follower.applied:
            above += 1 + self.process.loop.chance.randrange(EPOCHS_SKIPPED_MAX)
        reply = await link.call("elect", self.name, self._options.lease_ms, above)
        if reply is None or not follower.belongs(reply.run_id):
            return True
        if reply.result is None:
            return False
        epoch, last = reply.result
        if not await self._catch_up(link, follower, last) or follower.applied != last:
            return True
        self._lease_until_ms = asked_ms + self._options.lease_ms * 9 // 10
        self._begin(epoch, follower, reply.run_id)
        return True

    # ---- leading ----------------------------------------------------------------------------------

    def _begin(self, epoch: int, follower: Follower, run_id: int) -> None:
        self.epoch = epoch
        self._time_offset_ms = follower.state.now_ms - self.process.clock.now_ms()
        queue = GroupQueue(epoch, follower.applied, GROUP_BYTES, LINGER_US, GROUPS_IN_FLIGHT)
        self.leader = self._options.make_leader(
            (follower.state, follower.tables), epoch, self.now_ms(), self.name, run_id
        )
        self._writer = JournalWriter(
            self.process, self._network, run_id, queue, self._durable, lambda reason: self._depose()
        )
        self.on_term(self)
        self.process.spawn(self._keep_lease(run_id))
        self.process.spawn(self._tick(self.leader))
        self._turn()

    async def _keep_lease(self, run_id: int) -> None:
        leader, link = self.leader, None
        while self.leader is leader:
            if link is None or not link.is_open:
                link = await dial_redis(self.process, self._network, TIMEOUT_MS)
            if link is not None:
                asked_ms, epoch = self.process.clock.now_ms(), self.epoch
                reply = await link.call("renew", self.name, epoch, self._options.lease_ms)
                if self.leader is not leader:
                    break
                if epoch != self.epoch:
                    continue  # raised in between
                if reply is not None and (reply.run_id != run_id or not reply.result):
                    self._depose()
                    break
                if reply is not None:
                    self._lease_until_ms = asked_ms + self._options.lease_ms * 9 // 10
            await self.process.sleep(self._options.lease_ms * MS // 3)
        if link is not None:
            link.close()

    async def _tick(self, leader: Leader) -> None:
        while self.leader is leader:
            leader.tick(self.now_ms())
            self._turn()
            await self.process.sleep(self._options.tick_ms * MS)

    def _durable(self, sequence: int) -> None:
        if self.leader is not None:
            self.leader.journal_durable(sequence, self.now_ms())
            self._turn()

    def _depose(self) -> None:
        if self.leader is None:
            return
        assert self._writer is not None
        self.leader.deposed(self.now_ms())
        self._writer.stop()
        self.leader = self._writer = None
        for end in list(self._ends.values()):
            end.close()
        self._ends.clear()
        self.on_term(self)

    def _raise_epoch(self, above: int) -> None:
        assert self._writer is not None
        if self._raising is self.leader:
            return  # whoever still finds it too low asks again
        leader = self._raising = self.leader

        def raised(epoch: int) -> None:
            self._raising = None
            if self.leader is leader and leader is not None:
                self.epoch = epoch
                leader.raise_epoch(epoch, self.now_ms())
                self._turn()

        self._writer.raise_epoch(self.name, above, raised)

    def may_answer(self) -> bool:
        """Whether its own lease still runs by its own clock."""
        return self.process.clock.now_ms() < self._lease_until_ms

    # ---- connections ------------------------------------------------------------------------------

    def _accept(self, end: End) -> None:
        self._ends[end.key] = end
        end.on_message = lambda message: self._request(end, message)
        end.on_close = lambda: self._closed(end)

    def _closed(self, end: End) -> None:
        if self._ends.pop(end.key, None) is not None and self.leader is not None:
            self.leader.connection_closed(end.key, self.now_ms())
            self._turn()

    def _request(self, end: End, message: list[Any]) -> None:
        _, number, method, params = message
        if self.leader is None or not self.may_answer():
            end.send([1, number, [101, "NOT_LEADER", "this master stands by"], None])
            return
        if method == "put_start":
            self._starting[end.key, number] = params[1]
        self.leader.request(end.key, number, method, params, self.now_ms())
        self._turn()

    def _turn(self) -> None:
        """Takes what the core wants done, and does it."""
        if self.leader is None or self._writer is None:
            return
        if self._writer.in_trouble:
            self.leader.journal_unavailable(self.now_ms())
        outputs = self.leader.take_outputs()
        if outputs.facts:
            urgent = self.leader.waits_for_journal
            self._writer.add(outputs.first_sequence, outputs.facts, self.now_ms(), urgent=urgent)
        if outputs.epoch_wanted:
            self._raise_epoch(outputs.epoch_wanted)
        self.on_turn(self)
        if not self.may_answer():
            return
        for connection, number, error, result in outputs.replies:
            sizes = self._starting.pop((connection, number), None)
            if sizes is not None and error is None:
                self.on_put_started(self, sizes, result)
            self._send(connection, [1, number, error, result])
        for connection, method, params in outputs.pushes:
            self._send(connection, [2, method, msgpack.unpackb(params, use_list=True, raw=False)])
        for connection in outputs.closes:
            self._close(connection)

    def _close(self, connection: int) -> None:
        end = self._ends.get(connection)
        if end is not None:
            end.close()
            self._closed(end)

    def _send(self, connection: int, message: list[Any]) -> None:
        end = self._ends.get(connection)
        if end is not None:
            end.send(as_sent(message))
