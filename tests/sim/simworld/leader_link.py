"""A client's or a node's connection to whoever leads.

Found, joined, left when it is of the past, made anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simworld.calls import Answer, Caller, dial
from simworld.loop import MS
from simworld.network import Network
from simworld.process import Process

NOT_LEADER, STALE_EPOCH, UNKNOWN_CLIENT, UNKNOWN_NODE = 101, 102, 108, 109


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """Its times."""

    call_timeout_ms: int = 1_500
    beat_ms: int = 400
    retry_ms: int = 10


class LeaderLink:
    """Calls the leader, one try each; refuses replies of lower epochs."""

    def __init__(self, process: Process, network: Network, masters: list[str], options: LinkOptions) -> None:
        self._process = process
        self._network = network
        self._masters = masters
        self._options = options
        self._caller: Caller | None = None
        self._is_dialing = False
        self._turn = 0
        self.epoch = 0
        #: How often it was taken in: places are told within a join.
        self.joins = 0
        #: Makes the parameters of `client_join`.
        self.join_params: Callable[[], list[Any]] = list

    async def call(self, method: str, params: list[Any]) -> Answer | None:
        """(error, result) of the leader; None when the outcome is unknown or nobody was reached."""
        caller = await self._joined()
        if caller is None:
            await self._process.sleep(self._options.retry_ms * MS)
            return None
        answer = await caller.call(method, params, self._options.call_timeout_ms)
        if answer is None:
            caller.close()
            return None
        error, result = answer
        if error is not None:
            if error[0] in (NOT_LEADER, STALE_EPOCH, UNKNOWN_CLIENT):
                caller.close()
            return answer
        if result[0] < self.epoch:
            # A leader of the past: whatever it says, it does not count.
            caller.close()
            return None
        self.epoch = result[0]
        return answer

    async def _joined(self) -> Caller | None:
        if self._caller is not None and self._caller.is_open:
            return self._caller
        if self._is_dialing:
            return None
        self._is_dialing = True
        self._caller = await self._dial()
        self._is_dialing = False
        return self._caller

    async def _dial(self) -> Caller | None:
        self._turn += 1
        caller = await dial(self._process, self._network, self._masters[self._turn % len(self._masters)])
        if caller is None:
            return None
        answer = await caller.call("client_join", self.join_params(), self._options.call_timeout_ms)
        if answer is None or answer[0] is not None or answer[1][0] < self.epoch:
            caller.close()
            return None
        self.epoch = answer[1][0]
        self.joins += 1
        return caller

    async def beat_forever(self) -> None:
        """Keeps the connection, and lets the leader know that this client lives."""
        while True:
            await self._process.sleep(self._options.beat_ms * MS)
            await self.call("client_beat", [])
