"""Connections between processes: ordered within one, delayed at will, cut or partitioned on command.

A message is never lost, changed or reordered inside a connection; a connection can be cut at any moment,
and a partition holds its messages back (as TCP does) until it heals. Who is killed closes its connections,
and the other end hears of it unless it is partitioned from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simworld.loop import Future, Loop
from simworld.process import Process


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """Delays of messages, each drawn anew; `slow_share` of them takes up to `slow_us_max`."""

    delay_us_min: int = 30
    delay_us_max: int = 400
    slow_share: float = 0.01
    slow_us_max: int = 20_000


class End:
    """One end of a connection. `on_message` and `on_close` run in the process that owns the end."""

    def __init__(self, connection: Connection, owner: Process, number: int) -> None:
        self._connection = connection
        self.owner = owner
        self._number = number
        self.on_message: Callable[[Any], None] = lambda message: None
        self.on_close: Callable[[], None] = lambda: None
        self.is_open = True

    @property
    def key(self) -> int:
        """Names the connection; both ends have the same."""
        return self._connection.number

    def send(self, message: Any) -> None:
        """Sends if the connection is open; nobody is told when it is not."""
        if self.is_open and self.owner.is_alive:
            self._connection.send(self._number, message)

    def close(self) -> None:
        """Closes this end now; the other hears of it after what was sent before."""
        if self.is_open:
            self.is_open = False
            self._connection.half_closed(self._number)

    def arrived(self, message: Any) -> None:
        if self.is_open:
            self.on_message(message)

    def ended(self) -> None:
        """The other end closed, or the connection was cut."""
        if self.is_open:
            self.is_open = False
            self._connection.half_closed(self._number)
            self.on_close()


class Connection:
    """Two ends, and for each direction what is under way."""

    def __init__(self, network: Network, number: int, client: Process, server: Process) -> None:
        self._network = network
        self.number = number
        #: A unix socket: nothing but the death of a process ends it.
        self.is_local = False
        self._is_stalled = False
        self.ends = (End(self, client, 0), End(self, server, 1))
        self._clear_at = [0, 0]
        self._waiting: list[list[Callable[[], None]]] = [[], []]
        self._generation = [0, 0]

    def send(self, source: int, message: Any) -> None:
        target = self.ends[1 - source]
        self._carry(source, lambda: target.owner.post(lambda: target.arrived(message)))

    def half_closed(self, source: int) -> None:
        target = self.ends[1 - source]
        self._carry(source, lambda: target.owner.post(target.ended))
        if not target.is_open:
            self._network.forget(self)

    def cut(self) -> None:
        """Resets both ends; what is under way is lost."""
        if self.is_local:
            return
        for direction in (0, 1):
            self._generation[direction] += 1
            self._waiting[direction].clear()
        for end in self.ends:
            end.owner.post(end.ended)

    def stall(self) -> None:
        """From now on nothing of it arrives, until `go_on`."""
        self._is_stalled = not self.is_local

    def go_on(self) -> None:
        """What was held back arrives, late."""
        self._is_stalled = False
        self.release()

    def release(self) -> None:
        """A partition healed: what was held back goes on."""
        for source in (0, 1):
            waiting, self._waiting[source] = self._waiting[source], []
            for deliver in waiting:
                self._carry(source, deliver)

    def _carry(self, source: int, deliver: Callable[[], None]) -> None:
        generation = self._generation[source]
        arrival = max(self._clear_at[source], self._network.loop.now + self._network.delay())
        self._clear_at[source] = arrival

        def arrive() -> None:
            if self._generation[source] != generation:
                return
            if self._waiting[source] or self._is_stalled or self._network.is_parted(self):
                self._waiting[source].append(deliver)
                return
            deliver()

        self._network.loop.at(arrival, arrive)


class Network:
    """All connections and listeners of a world."""

    def __init__(self, loop: Loop, options: NetworkOptions) -> None:
        self.loop = loop
        self._options = options
        self._connections: dict[int, Connection] = {}
        self._listeners: dict[str, tuple[Process, Callable[[End], None]]] = {}
        self._parted: set[frozenset[str]] = set()
        self._next = 1
        self.connect_timeout_us = 300_000

    def delay(self) -> int:
        chance = self.loop.chance
        if chance.random() < self._options.slow_share:
            return chance.randint(self._options.delay_us_max, self._options.slow_us_max)
        return chance.randint(self._options.delay_us_min, self._options.delay_us_max)

    def set_options(self, options: NetworkOptions) -> None:
        """New delays from now on."""
        self._options = options

    def listen(self, process: Process, address: str, on_connect: Callable[[End], None]) -> None:
        """Takes connections at an address until the process is gone."""
        self._listeners[address] = (process, on_connect)
        process.on_death(lambda: self._unlisten(process, address))

    def _unlisten(self, process: Process, address: str) -> None:
        if self._listeners.get(address, (None,))[0] is process:
            del self._listeners[address]

    def connect(self, client: Process, address: str, *, is_local: bool = False) -> Future[End | None]:
        """The client's end, or None when nobody listens there or it cannot be reached in time.

        `is_local`: through a unix socket, which cannot be cut.
        """
        result: Future[End | None] = Future()

        def settle(value: End | None) -> None:
            client.post(lambda: result.set(value))

        def arrive() -> None:
            found = self._listeners.get(address)
            if found is None or not client.is_alive:
                settle(None)
                return
            server, on_connect = found
            if self._hosts_parted(client.host, server.host):
                self.loop.after(self.connect_timeout_us, lambda: settle(None))
                return
            settle(self._open(client, server, on_connect, is_local))

        self.loop.after(self.delay(), arrive)
        return result

    def _open(
        self, client: Process, server: Process, on_connect: Callable[[End], None], is_local: bool
    ) -> End:
        connection = Connection(self, self._next, client, server)
        connection.is_local = is_local
        self._next += 1
        self._connections[connection.number] = connection
        for end in connection.ends:
            # The kernel closes the sockets of a process that is gone.
            end.owner.on_death(end.close)
        # A stopped process has its connections taken by the kernel and looks at them when it goes on.
        server.post(lambda: on_connect(connection.ends[1]))
        return connection.ends[0]

    def forget(self, connection: Connection) -> None:
        self._connections.pop(connection.number, None)

    def connections_of(self, process: Process) -> list[Connection]:
        """Its open connections, oldest first."""
        return [c for c in self._connections.values() if any(end.owner is process for end in c.ends)]

    def part(self, host: str, other: str) -> None:
        """From now on nothing passes between two hosts."""
        self._parted.add(frozenset((host, other)))

    def heal(self) -> None:
        """Lifts every partition."""
        if self._parted:
            self._parted.clear()
            for connection in list(self._connections.values()):
                connection.release()

    def calm(self) -> None:
        """Lifts everything."""
        self.heal()
        for connection in list(self._connections.values()):
            connection.go_on()

    def is_parted(self, connection: Connection) -> bool:
        return self._hosts_parted(connection.ends[0].owner.host, connection.ends[1].owner.host)

    def _hosts_parted(self, host: str, other: str) -> bool:
        return host != other and frozenset((host, other)) in self._parted
