"""One seeded world.

Processes, network, Redis, memory; clients at work, faults coming; checkers at every step.

A run has three parts: the work with faults, a calm in which everything heals and settles, and the final
checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from moonpool.bench.chaos_history import History
from simworld.client import Client, ClientOptions, Surroundings
from simworld.client_work import Work
from simworld.core import CoreOptions, make_leader, make_state
from simworld.faults import Fault
from simworld.leader_link import LeaderLink, LinkOptions
from simworld.loop import MS, SECOND, Loop
from simworld.master import Master, MasterOptions
from simworld.memory import Engine
from simworld.network import Network, NetworkOptions
from simworld.node import Node, NodeOptions
from simworld.process import Clock, ClockOptions, Process
from simworld.redis_model import Disk, RedisOptions, RedisServer, lose_tail, lose_unsynced
from simworld.values import Values
from simworld.watch import Watch
from simworld.workloads import Workload

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldOptions:
    """How large a world is, and how long it lives."""

    seed: int
    workload: Workload
    fault: Fault
    core: CoreOptions = field(default_factory=CoreOptions)
    masters: int = 2
    nodes: int = 3
    clients: int = 3
    tasks: int = 2
    active_us: int = 5 * SECOND
    #: Bound on the time in which everything must settle once the faults are over.
    settle_us: int = 15 * SECOND


class World:
    """Everything of one run."""

    def __init__(self, options: WorldOptions) -> None:
        self.options = options
        self.loop = Loop(options.seed)
        self.network = Network(self.loop, NetworkOptions())
        self.network.set_options(options.fault.network)
        self.disk = Disk()
        self.history = History()
        self.values = Values()
        self.engines: dict[str, Engine] = {}
        self.notes: dict[str, int] = {}
        self.masters: dict[str, Master] = {}
        self.nodes: dict[str, Node] = {}
        self.clients: list[Client] = []
        self.is_calm = False
        #: What becomes of the next process that writes mapped memory.
        self.strike_next_writer: Callable[[Process], None] | None = None
        self._born = 0
        self._processes: list[Process] = []
        self.watch = Watch(self)
        self.start_redis()
        for number in range(options.masters):
            self.start_master(f"master{number}")
        for number in range(options.nodes):
            self.start_node(f"node{number}")
        for _ in range(options.clients):
            self.start_client()
        if options.workload.tenants > 1:
            keeper = self.make_client("default", "tenant-keeper")
            keeper.process.spawn(self._keep_tenants(keeper))
        if options.fault.blows:
            self._schedule_blow()

    # ---- births -----------------------------------------------------------------------------------

    def _process(self, name: str, host: str) -> Process:
        process = Process(self.loop, name, host, Clock(self.loop, ClockOptions()))
        self._processes.append(process)
        return process

    def start_redis(self) -> None:
        """A new run of the server, with what its disk has."""
        self.redis = RedisServer(self._process("redis", "redis"), self.network, self.disk, RedisOptions())

    def start_master(self, name: str) -> None:
        core = self.options.core
        options = MasterOptions(
            make_state=lambda: make_state(core),
            make_leader=lambda made, epoch, now_ms, leader, run_id: make_leader(
                core, made, (epoch, now_ms, leader, run_id), self.loop.chance.getrandbits(64)
            ),
        )
        master = Master(self._process(name, name), self.network, name, options)
        master.on_term = self.watch.term_changed
        master.on_turn = self.watch.master_turned
        master.on_put_started = self.watch.put_started
        self.masters[name] = master

    def start_node(self, name: str) -> None:
        workload = self.options.workload
        options = NodeOptions(
            name=name,
            masters=list(self.masters),
            capacity_bytes=workload.capacity_bytes,
            slots=workload.slots,
        )
        self._born += 1
        node = Node(self._process(name, name), self.network, f"{name}#{self._born}", options)
        self.engines[node.engine.endpoint] = node.engine
        self.nodes[name] = node

    def restart_redis(self) -> None:
        """Starts it unless it runs."""
        if not self.redis.process.is_alive:
            self.start_redis()

    def restart_master(self, name: str) -> None:
        if not self.masters[name].process.is_alive:
            self.start_master(name)

    def restart_node(self, name: str) -> None:
        if not self.nodes[name].process.is_alive:
            self.start_node(name)

    def start_client(self) -> None:
        """A client on some node's host, so that some of the memory is mapped and the rest behind lanes."""
        tenants = self.options.workload.tenants
        tenant = f"tenant{self._born % tenants}" if tenants > 1 else "default"
        client = self.make_client(tenant, f"client{self._born + 1}")
        self.clients.append(client)
        for _ in range(self.options.tasks):
            client.tasks.append(
                client.process.spawn(Work(client, self.options.workload, lambda: self.is_calm).run())
            )

    def make_client(self, tenant: str, name: str, attempts_max: int = 8) -> Client:
        """A client process that joins and beats, and does nothing yet."""
        self._born += 1
        process = self._process(name, f"node{self._born % self.options.nodes}")
        link = LeaderLink(process, self.network, list(self.masters), LinkOptions())
        around = Surroundings(self.network, self.engines, self.history, self.values, self.watch, self.notes)
        client = Client(process, link, around, ClientOptions(tenant=tenant, attempts_max=attempts_max))
        client.writer.on_piece = lambda: self._piece_written(process)
        process.spawn(link.beat_forever())
        return client

    def _piece_written(self, process: Process) -> None:
        strike, self.strike_next_writer = self.strike_next_writer, None
        if strike is not None and not self.is_calm:
            strike(process)

    async def _keep_tenants(self, keeper: Client) -> None:
        """Makes the tenants, and again when the journal has forgotten them."""
        while True:
            for number in range(self.options.workload.tenants):
                await keeper.link.call("tenant_set", [f"tenant{number}", 0, b""])
            await keeper.process.sleep(400 * MS)

    # ---- what faults ask for ------------------------------------------------------------------------

    def choose(self, found: Sequence[T], prefer: Callable[[T], bool] | None = None) -> T | None:
        """One of them by chance; mostly one that is preferred, when there is."""
        preferred = [one for one in found if prefer is not None and prefer(one)]
        if preferred and self.loop.chance.random() < 0.8:
            found = preferred
        return self.loop.chance.choice(found) if found else None

    def living_nodes(self) -> list[Node]:
        return [one for one in self.nodes.values() if one.process.is_running]

    def living_masters(self) -> list[Master]:
        return [one for one in self.masters.values() if one.process.is_running]

    def living_clients(self) -> list[Client]:
        return [one for one in self.clients if one.process.is_running]

    def processes(self) -> list[Process]:
        """All that live, stopped ones too."""
        found = [self.redis.process]
        found += [master.process for master in self.masters.values()]
        found += [node.process for node in self.nodes.values()]
        found += [client.process for client in self.clients]
        return [one for one in found if one.is_alive]

    def later(self, within_ms: int, run: Callable[[], None]) -> None:
        """Runs something within so many milliseconds."""
        self.loop.after(self.loop.chance.randint(1, within_ms * MS), run)

    def lose_redis_tail(self) -> None:
        """What the server had not synced, or what a replica had not received, is gone."""
        if self.loop.chance.random() < 0.5:
            lose_unsynced(self.disk)
        else:
            lose_tail(self.disk, self.loop.chance.randint(0, 6))

    def _schedule_blow(self) -> None:
        fault = self.options.fault
        self.loop.after(self.loop.chance.randint(50 * MS, fault.every_us_max), self._blow)

    def _blow(self) -> None:
        if self.is_calm:
            return
        self.loop.chance.choice(self.options.fault.blows)(self)
        self._schedule_blow()

    # ---- the run ------------------------------------------------------------------------------------

    def run(self) -> None:
        """Lives, calms down, settles, is judged."""
        self.run_until(self.options.active_us)
        self._calm()
        deadline = self.loop.now + self.options.settle_us
        while not self.watch.is_settled():
            if self.loop.now > deadline:
                self.watch.fail_to_settle()
            self.run_until(self.loop.now + 100 * MS)
        self.watch.final()

    def close(self) -> None:
        """Ends all processes, so that no task is left in the middle of something."""
        for process in self._processes:
            process.kill()

    def run_until(self, when: int) -> None:
        """Runs all events up to a moment."""
        while (due := self.loop.next_at()) is not None and due <= when:
            self.loop.step()
        self.loop.now = max(self.loop.now, when)

    def _calm(self) -> None:
        """The faults are over: partitions heal, what was stopped goes on, what was killed is started."""
        self.is_calm = True
        self.network.set_options(NetworkOptions(slow_share=0))
        self.network.calm()
        for process in self.processes():
            process.go_on()
        self.restart_redis()
        for name in list(self.masters):
            self.restart_master(name)
        for name in list(self.nodes):
            self.restart_node(name)
