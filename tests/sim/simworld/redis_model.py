"""A model of Redis with the journal's scripts.

What is checked in one step, what a crash keeps and what it loses.

A kill of the process keeps every command that was answered (the append-only file was written before the
answer). Loss of the host loses what was not synced; a failover to a replica that lags loses the lag. Both
give a new run id.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from simworld.loop import MS, SECOND, Loop
from simworld.network import End, Network
from simworld.process import Process

PAST_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisOptions:
    """Times of the model."""

    #: Between a command's effect in memory and its answer: a kill in between loses the command.
    write_us: int = 200
    #: How often the append-only file is synced.
    sync_us: int = SECOND


class Group(NamedTuple):
    """One append: facts `first` to `last`."""

    first: int
    last: int
    payload: bytes


@dataclass(slots=True)
class Contents:
    """What Redis holds for one pool."""

    epoch: int = 0
    last: int = 0
    holder: str = ""
    held_until_us: int = 0
    groups: tuple[Group, ...] = ()

    def copy(self) -> Contents:
        return replace(self)


@dataclass(slots=True)
class Disk:
    """What outlives the process: versions by the time they were written, the newest last."""

    written: Contents = field(default_factory=Contents)
    synced: Contents = field(default_factory=Contents)
    #: The last versions, oldest first: what a lagging replica may have.
    past: deque[Contents] = field(default_factory=lambda: deque(maxlen=PAST_MAX))
    runs: int = 0


class RedisServer:
    """One incarnation of the server process, serving one address."""

    def __init__(self, process: Process, network: Network, disk: Disk, options: RedisOptions) -> None:
        self.process = process
        self._loop: Loop = process.loop
        self._disk = disk
        self._options = options
        disk.runs += 1
        self.run_id = disk.runs
        self._contents = disk.written.copy()
        network.listen(process, "redis", self._accept)
        process.after(options.sync_us, self._sync)

    def _sync(self) -> None:
        self._disk.synced = self._disk.written.copy()
        self.process.after(self._options.sync_us, self._sync)

    def _accept(self, end: End) -> None:
        end.on_message = lambda message: self._serve(end, *message)

    def _serve(self, end: End, request: int, command: str, *params: Any) -> None:
        handlers: dict[str, Callable[..., Any]] = {
            "elect": self._elect,
            "renew": self._renew,
            "raise": self._raise,
            "append": self._append,
            "read": self._read,
        }
        result = handlers[command](*params)

        def answer() -> None:
            self._disk.written = after
            self._disk.past.append(after)
            end.send((request, self.run_id, result))

        after = self._contents.copy()
        self.process.after(self._options.write_us, answer)

    def _elect(self, name: str, lease_ms: int, above: int) -> tuple[int, int] | None:
        """(epoch, last sequence) for a new leader; None while another one's lease lasts."""
        contents, now = self._contents, self.process.clock.now_us()
        if contents.holder not in ("", name) and now < contents.held_until_us:
            return None
        contents.epoch = max(contents.epoch, above) + 1
        contents.holder = name
        contents.held_until_us = now + lease_ms * MS
        return contents.epoch, contents.last

    def _renew(self, name: str, epoch: int, lease_ms: int) -> bool:
        """A lease that ended is taken up again when nobody led in between, which the epoch shows."""
        contents = self._contents
        if contents.epoch != epoch or contents.holder != name:
            return False
        contents.held_until_us = self.process.clock.now_us() + lease_ms * MS
        return True

    def _raise(self, name: str, epoch: int, above: int) -> int | None:
        """A new epoch for its holder."""
        contents = self._contents
        if (contents.holder, contents.epoch) != (name, epoch):
            return None
        contents.epoch = max(contents.epoch, above) + 1
        return contents.epoch

    def _append(self, epoch: int, first: int, last: int, payload: bytes) -> tuple[str, int]:
        """("ok", last), ("fenced", epoch), ("lost", 0) or ("gap", sequence)."""
        contents = self._contents
        if epoch != contents.epoch:
            return ("fenced", contents.epoch) if contents.epoch > epoch else ("lost", 0)
        if first == contents.last + 1:
            contents.groups += (Group(first, last, payload),)
            contents.last = last
            return ("ok", last)
        if contents.last >= last:
            return ("ok", last)
        return ("gap", contents.last)

    def _read(self, after: int, groups_max: int) -> tuple[int, tuple[Group, ...]]:
        """The last sequence, and the groups after one."""
        contents = self._contents
        found = []
        for group in reversed(contents.groups):
            if group.last <= after:
                break
            found.append(group)
        return contents.last, tuple(reversed(found[-groups_max:]))


def lose_unsynced(disk: Disk) -> None:
    """The host is lost: what was not synced is gone."""
    disk.written = disk.synced.copy()
    disk.past.clear()


def lose_tail(disk: Disk, writes: int) -> None:
    """A replica that lagged by so many writes becomes the server, with the lease and epoch of that time."""
    disk.written = disk.past[max(0, len(disk.past) - 1 - writes)].copy() if disk.past else Contents()
    disk.synced = disk.written.copy()
    disk.past.clear()
