"""What all tasks of one client process share.

Its link to the leader, lanes to nodes, mapped memory, its history.

It knows what a client knows: a connection to whoever says it leads, lanes to nodes, mapped memory of nodes
on its own host, a clock of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from moonpool.bench.chaos_history import History, PutRecord
from simworld.leader_link import LeaderLink
from simworld.loop import Task
from simworld.memory import Engine, Lane, MappedWriter
from simworld.network import Network
from simworld.process import Process
from simworld.values import Values

#: Until a client hears that the owner of mapped memory is gone.
NOTICE_US_MAX = 80_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """How a client behaves."""

    read_timeout_ms: int = 800
    write_timeout_ms: int = 2_000
    lease_ms: int = 300
    #: How long after the look-up a cached location may be used: the location lease, less a tenth.
    location_ms: int = 450
    attempts_max: int = 8
    #: Whether it maps the memory of nodes on its host; else it reaches them by lanes like any other.
    maps_memory: bool = True
    tenant: str = "default"


class ClientWatch(Protocol):
    """Told of what a client sees and cannot judge by itself."""

    def missed(self, record: PutRecord, at: int) -> None:
        """A get missed a stored value that no remove explains."""

    def stored(self, tag: int, object_id: int) -> None:
        """The leader said that a put is an object."""


@dataclass(frozen=True, slots=True)
class Remote:
    """A segment as the leader describes it."""

    segment: int
    endpoint: str
    view_endpoint: str
    host: str


@dataclass(slots=True)
class Surroundings:
    """What a client's machine offers, and what its doings are written down in."""

    network: Network
    #: Engines of all node processes that ever were, by endpoint; memory outlives its process while mapped.
    engines: dict[str, Engine]
    history: History
    values: Values
    watch: ClientWatch
    notes: dict[str, int] = field(default_factory=dict)

    def note(self, what: str) -> None:
        """Counts something that happened."""
        self.notes[what] = self.notes.get(what, 0) + 1


class Client:
    """One client process."""

    def __init__(
        self, process: Process, link: LeaderLink, surroundings: Surroundings, options: ClientOptions
    ) -> None:
        self.process = process
        self.link = link
        self.around = surroundings
        self.options = options
        self.instance = process.loop.chance.randbytes(16)
        self.writer = MappedWriter(process)
        self.tasks: list[Task] = []
        link.join_params = lambda: [self.instance, process.name, process.host, options.tenant, ""]
        self._lanes: dict[str, Lane] = {}
        self._mapped: dict[str, Engine] = {}
        #: Engines whose process is known to be gone.
        self._gone: set[str] = set()
        self._remotes: dict[tuple[int, int], Remote] = {}

    @property
    def now(self) -> int:
        """The world's time, for the history only."""
        return self.process.loop.now

    def busy_tasks(self) -> int:
        """Tasks that have not ended."""
        return sum(not task.is_done for task in self.tasks)

    def clock_ms(self) -> int:
        return self.process.clock.now_ms()

    def named(self, key: bytes) -> str:
        """The key in the history."""
        return f"{self.options.tenant}/{key.decode()}"

    async def remote(self, join: int, segment: int) -> Remote | None:
        """Where a segment of a reply of this join is, asked for when it is unknown.

        A journal that was lost gives ids and epochs again: each join has its own list.
        """
        found = self._remotes.get((join, segment))
        if found is not None:
            return found
        answer = await self.link.call("segments", [])
        if answer is None or answer[0] is not None:
            return None
        for shown in answer[1][2]:
            self._remotes[self.link.joins, shown["id"]] = remote_of(shown)
        return self._remotes.get((join, segment))

    def mapped(self, remote: Remote) -> Engine | None:
        """The engine whose memory is mapped here; maps it when its node is on this host and answers."""
        found = self._mapped.get(remote.endpoint)
        if remote.endpoint in self._gone:
            return None
        if found is not None:
            return found
        if not self.options.maps_memory or remote.host != self.process.host:
            return None
        engine = self.around.engines[remote.endpoint]
        if not engine.process.is_running:
            return None
        engine.map_for_writing(self.instance, self.writer)
        self._mapped[remote.endpoint] = engine
        # The memory stays; that its owner is gone is heard a little later, and later still when stopped.
        engine.process.on_death(lambda: self._owner_died(remote.endpoint))
        return engine

    def _owner_died(self, endpoint: str) -> None:
        delay_us = self.process.loop.chance.randint(10, NOTICE_US_MAX)
        self.process.after(delay_us, lambda: self._gone.add(endpoint))

    async def lane(self, remote: Remote) -> Lane | None:
        """A lane to a node's engine, opened when there is none."""
        lane = self._lanes.get(remote.endpoint)
        if lane is not None and lane.is_open:
            return lane
        end = await self.around.network.connect(self.process, remote.endpoint)
        if end is None:
            return None
        lane = self._lanes[remote.endpoint] = Lane(self.process, end)
        return lane


def remote_of(shown: dict[str, Any]) -> Remote:
    """A segment from its map in the reply of `segments`."""
    return Remote(shown["id"], shown["endpoint"], shown["view_endpoint"], shown["host"])
