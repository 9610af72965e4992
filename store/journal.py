"""What a master asks of its journal: facts in, and word of what became of them. The seam; no I/O here.

The loop thread owns the master's state and calls `append` and `take`; the journal does its waiting in a
thread of its own and calls `wake` when there is something to take. Two journals satisfy this: the one in
Redis (`journal_thread`) and the one of an embedded pool, which keeps nothing (`journal_memory`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final

from moonpool.store.state import State


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who would lead: its name, and the endpoints of its rpc port that others are told."""

    name: str
    endpoints: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class Elected:
    """This master leads in `epoch` from now on.

    The state holds every fact of the journal and belongs to the taker; cluster time goes on from `now_ms`.
    """

    state: State
    epoch: int
    #: Counts the terms of this journal object; what is appended after this was taken belongs to this term.
    term: int = 0
    #: Which run of Redis keeps the journal: after another one it may lack its end.
    run: str = ""


@final
@dataclass(frozen=True, slots=True)
class EpochRaised:
    """What `raise_epoch` asked for: facts appended from now on carry the new epoch."""

    epoch: int


@final
@dataclass(frozen=True, slots=True)
class Deposed:
    """This master does not lead any more: its state is to be thrown away."""

    reason: str


@final
@dataclass(frozen=True, slots=True)
class SnapshotWanted:
    """Take a snapshot of the state as it is, and hand it to `Journal.write_snapshot`."""


Notice = Elected | EpochRaised | Deposed | SnapshotWanted


class Journal(Protocol):
    """A journal of one pool. `append`, `take` and `write_snapshot` are called by one thread."""

    #: Endpoints of whoever leads, as far as is known.
    leader_endpoints: tuple[str, ...]

    def start(self) -> None:
        """Begins to stand by for leadership."""

    def take(self) -> list[Notice]:
        """What happened since the last call, in order; never waits."""

    def append(self, first_sequence: int, facts: Sequence[bytes], now_ms: int, *, urgent: bool) -> None:
        """Queues facts of one decision; never waits. `urgent`: a reply waits for them."""

    @property
    def durable(self) -> int:
        """The last sequence that is durable in this term."""

    @property
    def trouble(self) -> str:
        """Why the journal does not take facts now; "" when it does."""

    def service(self) -> None:
        """Takes in answers and sends what is due; never waits. To be called in each turn of the loop."""

    def room(self) -> bool:
        """False while the queue is at its bound: no mutation may be decided."""

    def may_answer(self, now_ns: int) -> bool:
        """Whether the leader's lease still holds at this reading of CLOCK_BOOTTIME."""

    @property
    def lease_until_ns(self) -> int:
        """The reading of CLOCK_BOOTTIME at which the leader's lease ends; 0 for a standby."""

    def resign(self, reason: str) -> bool:
        """Gives the term up, so that the journal is read afresh; `Deposed` follows. False where it cannot."""

    def raise_epoch(self, at_least: int) -> None:
        """Asks for an epoch above `at_least`; `EpochRaised` or `Deposed` follows."""

    def write_snapshot(self, state: State) -> None:
        """Writes the state as it is now, beside the service: stops the caller only for a fork."""

    def counters(self) -> dict[str, int]:
        """Gauges and counters for metrics; callable from any thread."""

    def close(self, *, release: bool) -> None:
        """Ends the thread; with `release`, after what was appended is durable, another may lead at once."""
