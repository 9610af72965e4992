"""What happens to a world, as a list of values.

Each fault comes again and again while it lasts, then all heals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from simworld.loop import MS
from simworld.network import NetworkOptions

if TYPE_CHECKING:
    from simworld.process import Process
    from simworld.world import World

Blow = Callable[["World"], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A name, what it does each time, and how long there is between two times at most."""

    name: str
    blows: tuple[Blow, ...] = ()
    every_us_max: int = 1_200 * MS
    network: NetworkOptions = field(default_factory=NetworkOptions)
    #: Redis may forget what it had said was written: acknowledged objects and removes may be undone by it.
    loses_journal: bool = False


def _kill_node(world: World) -> None:
    node = world.choose(world.living_nodes())
    if node is not None:
        node.process.kill()
        within_ms = 3_000 if world.loop.chance.random() < 0.7 else 20
        world.later(within_ms, lambda: world.restart_node(node.name))


def _end_node(world: World) -> None:
    """A clean end, by its own word; it comes back as a new process, perhaps at once."""
    node = world.choose(world.living_nodes())
    if node is not None:
        within_ms = 3_000 if world.loop.chance.random() < 0.5 else 20
        node.leave(lambda: world.later(within_ms, lambda: world.restart_node(node.name)))


def _stop_node(world: World) -> None:
    node = world.choose(world.living_nodes())
    if node is not None:
        node.process.stop()
        world.later(2_500, node.process.go_on)


def _stop_master(world: World) -> None:
    master = world.choose(world.living_masters(), prefer=lambda one: one.leads)
    if master is not None:
        master.process.stop()
        world.later(3_000, master.process.go_on)


def _kill_master(world: World) -> None:
    master = world.choose(world.living_masters(), prefer=lambda one: one.leads)
    if master is not None:
        master.process.kill()
        world.later(2_000, lambda: world.restart_master(master.name))


def _part_leader(world: World) -> None:
    """The leader and Redis do not hear each other; everybody else hears both."""
    leaders = [master for master in world.living_masters() if master.leads]
    if leaders:
        leader = leaders[0].process
        world.network.part(leader.host, "redis")
        # By then another one leads; some find it, and some still talk to the old one.
        world.loop.after(900 * MS, lambda: _scatter(world, leader))
        world.loop.after(world.loop.chance.randint(300, 2_400) * MS, world.network.heal)


def _scatter(world: World, process: Process) -> None:
    """Some of those who talk to a process lose it, and look for another."""
    for connection in world.network.connections_of(process):
        if world.loop.chance.random() < 0.5:
            connection.cut()


def _kill_redis(world: World) -> None:
    if world.redis.process.is_alive:
        world.redis.process.kill()
        world.later(900, world.restart_redis)


def _stop_redis(world: World) -> None:
    world.redis.process.stop()
    server = world.redis.process
    world.later(1_500, server.go_on)


def _lose_redis_host(world: World) -> None:
    if world.redis.process.is_alive:
        world.redis.process.kill()
        world.lose_redis_tail()
        world.later(900, world.restart_redis)


def _stop_client(world: World) -> None:
    client = world.choose(world.living_clients())
    if client is not None:
        client.process.stop()
        world.later(_stop_ms(world), client.process.go_on)


def _stop_ms(world: World) -> int:
    """Mostly shorter than a put may take, sometimes longer than anything."""
    return 400 if world.loop.chance.random() < 0.4 else 3_000


def _stop_writer(world: World) -> None:
    """The next process that writes mapped memory stops in the middle of it."""

    def strike(process: Process) -> None:
        process.stop()
        world.later(_stop_ms(world), process.go_on)

    world.strike_next_writer = strike


def _kill_writer(world: World) -> None:
    """The next process that writes mapped memory dies in the middle of it."""

    def strike(process: Process) -> None:
        # Not from within the process itself: the kernel does it.
        world.loop.after(0, process.kill)
        world.later(500, world.start_client)

    world.strike_next_writer = strike


def _kill_client(world: World) -> None:
    client = world.choose(world.living_clients())
    if client is not None:
        client.process.kill()
        world.later(500, world.start_client)


def _cut(world: World) -> None:
    """One connection is reset, or all of one process."""
    process = world.choose(world.processes())
    if process is None:
        return
    connections = world.network.connections_of(process)
    if not connections:
        return
    if world.loop.chance.random() < 0.7:
        connections = [world.loop.chance.choice(connections)]
    for connection in connections:
        connection.cut()


def _cut_node(world: World) -> None:
    """A node loses its leader, which it finds again soon."""
    node = world.choose(world.living_nodes())
    if node is not None:
        for connection in world.network.connections_of(node.process):
            if connection.ends[0].owner is node.process:
                connection.cut()


def _cut_lane(world: World) -> None:
    """A node loses one of those who read and write through it, perhaps in the middle."""
    node = world.choose(world.living_nodes())
    if node is not None:
        lanes = [
            one
            for one in world.network.connections_of(node.process)
            if one.ends[1].owner is node.process and not one.is_local
        ]
        for lane in lanes:
            if world.loop.chance.random() < 0.5:
                lane.cut()


def _stall_lane(world: World) -> None:
    """What goes through some lanes of a node arrives much later: writes after their deadline, too."""
    node = world.choose(world.living_nodes())
    if node is None:
        return
    for lane in world.network.connections_of(node.process):
        if lane.ends[1].owner is node.process and world.loop.chance.random() < 0.5:
            lane.stall()
            world.later(1_900, lane.go_on)


def _part_node(world: World) -> None:
    """A node and a master do not hear each other, and everybody else hears both."""
    node, master = world.choose(world.living_nodes()), world.choose(world.living_masters())
    if node is not None and master is not None:
        world.network.part(node.process.host, master.process.host)
        world.later(1_500, world.network.heal)


def _part(world: World) -> None:
    hosts = sorted({process.host for process in world.processes()})
    host, other = world.loop.chance.sample(hosts, 2)
    world.network.part(host, other)
    world.later(2_500, world.network.heal)


def _isolate(world: World) -> None:
    hosts = sorted({process.host for process in world.processes()})
    host = world.loop.chance.choice(hosts)
    for other in hosts:
        if other != host:
            world.network.part(host, other)
    world.later(2_500, world.network.heal)


def _jump_clock(world: World) -> None:
    process = world.choose(world.processes())
    if process is not None:
        process.clock.jump(world.loop.chance.randint(1, 400 * MS))


_SLOW = NetworkOptions(slow_share=0.2, slow_us_max=250 * MS)
_NODE = (_kill_node, _stop_node)
_MASTER = (_kill_master, _stop_master, _part_leader)
_REDIS = (_kill_redis, _stop_redis)
_CLIENT = (_kill_client, _stop_client, _stop_writer, _stop_writer, _kill_writer)
_NETWORK = (_cut, _part, _isolate, _stall_lane)

FAULTS: tuple[Fault, ...] = (
    Fault(name="none"),
    Fault(name="slow", network=_SLOW),
    Fault(name="nodes", blows=_NODE),
    Fault(name="masters", blows=_MASTER),
    Fault(name="split", blows=(_part_leader,)),
    Fault(name="redis", blows=_REDIS),
    Fault(name="clients", blows=_CLIENT, every_us_max=300 * MS),
    Fault(name="network", blows=_NETWORK, every_us_max=600 * MS),
    Fault(
        name="links",
        blows=(_cut_node, _cut_node, _cut_lane, _part_node, _stall_lane, _stall_lane),
        every_us_max=250 * MS,
    ),
    Fault(name="clocks", blows=(_jump_clock,), every_us_max=300 * MS),
    Fault(name="redis_loss", blows=(_lose_redis_host,), loses_journal=True),
    Fault(
        name="everything",
        blows=(*_NODE, *_MASTER, *_REDIS, *_CLIENT, *_NETWORK, _jump_clock),
        every_us_max=500 * MS,
        network=NetworkOptions(slow_share=0.05, slow_us_max=100 * MS),
    ),
    Fault(name="goodbyes", blows=(_end_node, _end_node, _kill_node, _kill_master, _cut_node), network=_SLOW),
)
