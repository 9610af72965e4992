"""The owner's side of grants: what lets peers write into granted regions, and who is writing at this moment.

Over tcp and unix lanes each WRITE into a granted region shows a grant, checked against the key set here.
Processes that mapped the memory write without asking; they can be asked to settle: an initiator answers when
no transfer of its own that ran when the question came touches the region any more.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import Final, final

from moonpool.config import EngineConfig
from moonpool.engine.control import ControlService
from moonpool.engine.opening import Openings
from moonpool.engine.peers import io_way
from moonpool.engine.writers import WriterBook
from moonpool.errors import MoonpoolError, UsageError
from moonpool.ids import InstanceId
from moonpool.native.io.regions import LocalRegions
from moonpool.native.io.server import TargetServer
from moonpool.native.io.writers import (
    deny_grants,
    grant_counters,
    kick_lanes,
    set_grant_key,
    writes_into,
)
from moonpool.transport.base import Transport
from moonpool.units import NS_PER_MS, NS_PER_US

#: In place of a session: transfers of this engine to itself.
OURSELVES: Final = 0


def open_server(table: LocalRegions, config: EngineConfig) -> TargetServer:
    """The target side of lanes over these regions, as the config says."""
    return TargetServer(
        table,
        io=io_way(config),
        spin_ns=config.spin_us * NS_PER_US,
        spin_max_bytes=config.spin_max_bytes,
        stall_ns=config.stall_timeout_ms * NS_PER_MS,
        lanes_max=config.connections_max,
        notices_max=config.notifications_max,
    )


@final
class Gate:
    """One for each engine; thread-safe. Times are nanoseconds of CLOCK_BOOTTIME."""

    def __init__(
        self,
        parts: tuple[LocalRegions, TargetServer, ControlService],
        book: WriterBook,
        openings: Openings,
        transports: Sequence[Transport],
    ) -> None:
        self._table, self._server, self._control = parts
        self._transports = transports
        self._book = book
        self._openings = openings
        self._claimed = threading.Lock()

    def claim(self) -> None:
        """Makes the caller the one who sets the key, until `unclaim`; UsageError when there is one."""
        if not self._claimed.acquire(blocking=False):
            raise UsageError("this engine serves a node already: use another engine, or close that node")

    def unclaim(self) -> None:
        """Somebody else may set the key."""
        self._claimed.release()

    def set_key(self, key: bytes, zero_ns: int) -> None:
        """From now on only grants made with this key (16 bytes) are right; their clock is 0 at `zero_ns`."""
        set_grant_key(self._table, key, zero_ns)

    def deny(self, region: int, start: int, tag: int, until_ns: int) -> bool:
        """Refuse grants that show `tag` for the extent at `start` until then; False when there is no room."""
        return deny_grants(self._table, region, start, tag, until_ns)

    def writes_into(self, region: int, offset: int, length: int) -> set[tuple[int, int]]:
        """WRITEs over lanes that may be touching the range now, as numbers that are never used again."""
        return writes_into(self._server, self._table, region, offset, length)

    def kick(self, lanes: Collection[tuple[int, int]]) -> int:
        """Ends lanes that still carry these WRITEs; returns how many."""
        return kick_lanes(self._server, lanes)

    def writers(self, region: int, instance: InstanceId | None) -> set[int]:
        """Sessions of this host that may write the region by themselves: of an instance, or any (None).

        Our own transfers count as the session `OURSELVES`.
        """
        found = self._book.of_region(region, instance)
        for transport in self._transports:
            found |= transport.writers(region, instance)
        if instance in (None, self._control.instance):
            found.add(OURSELVES)
        return found

    def settle(self, region: int, sessions: Collection[int], timeout_s: float) -> set[int]:
        """Ask sessions to settle; returns those that did in time. Blocks; not on the control thread."""
        settled = set()
        if OURSELVES in sessions and self._openings.drain(self._control.instance, timeout_s):
            settled.add(OURSELVES)
        asked = [session for session in sessions if session != OURSELVES]
        if asked:
            try:
                answers = self._control.call_peers("settle", {"handles": [region]}, timeout_s, asked)
            except MoonpoolError:  # the control thread is at its end, or did not answer in time
                answers = {}
            settled |= {
                session for session, answer in answers.items() if not isinstance(answer, MoonpoolError)
            }
            settled |= self._fence(region, set(asked) - settled, timeout_s)
        return settled

    def _fence(self, region: int, sessions: set[int], timeout_s: float) -> set[int]:
        """End what silent sessions could still write by devices; who mapped the memory cannot be ended."""
        out_of_reach = sessions - self._book.of_region(region, None)
        return {
            session
            for session in out_of_reach
            if all(transport.fence(session, timeout_s) for transport in self._transports)
        }

    def counters(self) -> dict[str, int]:
        """WRITEs that a grant let in, and refusals by reason."""
        return grant_counters(self._table)
